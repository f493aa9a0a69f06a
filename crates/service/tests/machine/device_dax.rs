//! A device DAX, and a file on a file system that maps its medium directly. `make test-vm` runs
//! this in a virtual machine that has both, and stops that machine without a word between the two
//! tests. `KVDEPOT_TEST_DAX` names the medium; everything on it is lost.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and its output is for the person who reads it"
)]

use std::fmt::Display;
use std::ops::Range;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::common::{
    PATIENCE, assert_at_rest, block, config_of, get, has, key, keys, namespace, put, verify,
};
use kvdepot_host::limits;
use kvdepot_media::{Access, Kind, Mapping};
use kvdepot_service::Mover;
use kvdepot_store::{BlockBuffers, Buffer, Config, Depot, Error, Namespace, Outcome, Reservation};
use kvdepot_testkit::Rng;
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::child::{self, Child};
use serde_json::{Value, json};

/// Blocks of the first boot: those that outlive a power cut, those that outlive their process, and
/// those that a worker wrote.
const POWER: Range<u64> = 0..300;
const PROCESS: Range<u64> = 1000..1100;
const WORKER: Range<u64> = 2000..2010;

/// Blocks of the second boot: of an owner that is killed, and more than the medium has room for.
const KILLED: Range<u64> = 10_000..100_000;
const FULL: Range<u64> = 100_000..100_070;

/// What somebody else left on the medium.
const FOREIGN: &[u8] = b"somebody else's data";

/// Says what was checked.
fn ok(what: impl Display) {
    println!("ok: {what}");
}

/// The bytes of block `number`: from one to more than a huge page has.
fn len_of(number: u64) -> usize {
    const LENGTHS: [usize; 9] = [
        1, 4095, 4096, 4097, 20_000, 65_536, 100_001, 250_000, 40_000,
    ];
    match number % 50 {
        49 => (2 << 20) + 1,
        _ => LENGTHS[number as usize % LENGTHS.len()],
    }
}

/// What `KVDEPOT_TEST_DAX` names.
struct Medium {
    path: PathBuf,
    sockets: tempfile::TempDir,
}

impl Medium {
    fn named() -> Medium {
        let path = std::env::var_os("KVDEPOT_TEST_DAX");
        println!();
        Medium {
            path: path.expect("KVDEPOT_TEST_DAX names a medium").into(),
            sockets: tempfile::tempdir().unwrap(),
        }
    }

    fn is_device(&self) -> bool {
        self.path.starts_with("/dev")
    }

    fn socket(&self) -> PathBuf {
        self.sockets.path().join("s")
    }

    fn settings(&self, options: Value) -> Value {
        let mut dax = options;
        dax["path"] = self.path.to_str().unwrap().into();
        json!({
            "socket": self.socket().to_str().unwrap(),
            "lock_wait": "0s",
            "lanes": 2,
            "dax": dax,
        })
    }

    fn config(&self, options: Value) -> Config {
        Config::new("Dax", &self.settings(options)).unwrap()
    }

    fn open(&self, options: Value) -> Depot {
        kvdepot_service::open(&self.config(options)).unwrap()
    }

    /// Why it does not open.
    fn refusal(&self, options: Value) -> Error {
        kvdepot_service::open(&self.config(options)).err().unwrap()
    }

    fn command(&self, verb: &str) -> Command {
        let mut command = Command::new("kvdepot");
        command.arg(verb).arg(&self.path);
        // On a terminal it asks; there is none.
        if verb == "rm" {
            command.arg("--yes");
        }
        command
    }

    /// What the command says, as JSON: its last line.
    fn tell(&self, verb: &str) -> Value {
        let ran = self.command(verb).arg("--json").output().unwrap();
        assert!(ran.status.success(), "kvdepot {verb}: {}", errors(&ran));
        let text = String::from_utf8(ran.stdout).unwrap();
        serde_json::from_str(text.lines().last().unwrap()).unwrap()
    }

    /// That the tools see `blocks` blocks, all of them sound, with and without an owner.
    fn tools_see(&self, blocks: u64, owned: bool) {
        let stat = self.tell("stat");
        assert_eq!(stat["owned"], owned, "{stat}");
        assert_eq!(stat["blocks"], blocks, "{stat}");
        assert_eq!(stat["kind"], if self.is_device() { "dax" } else { "file" });
        let listed = self
            .command("ls")
            .args(["--blocks", "--json"])
            .output()
            .unwrap();
        assert_eq!(
            String::from_utf8(listed.stdout).unwrap().lines().count(),
            blocks as usize
        );
        let verified = self.tell("verify");
        assert_eq!(verified["sound"], blocks, "{verified}");
        assert_eq!(verified["damaged_records"], json!([]), "{verified}");
        let beside = if owned { "beside an owner" } else { "alone" };
        ok(format!("stat, ls and verify, {beside}: {blocks} blocks"));
    }
}

fn errors(ran: &Output) -> String {
    String::from_utf8_lossy(&ran.stderr).into_owned()
}

fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    name.trim().to_owned()
}

fn says(error: impl Display, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{text:?} does not say {word:?}");
    }
    ok(format!("refused: {text}"));
}

/// Puts blocks, each of its own length, in batches.
fn store(ns: &Namespace, numbers: Range<u64>) {
    let numbers: Vec<u64> = numbers.collect();
    for batch in numbers.chunks(20) {
        let buffers = batch.iter().map(|number| block(*number, len_of(*number)));
        let keys = keys(batch.iter().copied());
        let task = ns.put(keys, BlockBuffers::whole(buffers)).unwrap();
        let done = task.wait(Some(PATIENCE)).unwrap();
        assert!(done.iter().all(|done| *done), "{:?}", task.outcomes());
    }
}

/// Gets blocks; panics at wrong bytes. How many were there.
fn fetch(ns: &Namespace, numbers: Range<u64>) -> u64 {
    let numbers: Vec<u64> = numbers.collect();
    let mut found = 0;
    for batch in numbers.chunks(20) {
        let buffers: Vec<Buffer> = batch
            .iter()
            .map(|number| Buffer::from_vec(vec![0xEE; len_of(*number)]))
            .collect();
        let keys = keys(batch.iter().copied());
        let task = ns.get(keys, BlockBuffers::whole(buffers.clone())).unwrap();
        task.wait(Some(PATIENCE)).unwrap();
        for ((number, buffer), outcome) in batch.iter().zip(&buffers).zip(task.outcomes()) {
            match outcome {
                Outcome::Done => assert!(
                    buffer.to_vec() == content(*number, len_of(*number)),
                    "wrong bytes for block {number}"
                ),
                other => assert_eq!(other, Outcome::Miss, "block {number}"),
            }
            found += u64::from(outcome == Outcome::Done);
        }
    }
    found
}

fn count(numbers: &Range<u64>) -> u64 {
    numbers.end - numbers.start
}

#[test]
#[ignore = "needs a DAX device; make test-vm runs it in a virtual machine"]
fn first_boot() {
    if child::role().is_some() {
        own_until_killed();
    }
    let medium = Medium::named();
    what_lies_there_stays(&medium);
    if medium.is_device() {
        what_the_device_does_not_have_is_not_mapped(&medium);
        who_may_not_open_it_learns_so(&medium);
    } else {
        std::fs::remove_file(&medium.path).unwrap();
        let error = medium.refusal(json!({"capacity": "1GiB"}));
        says(error, &["dax.capacity", "the free space of"]);
    }
    a_capacity_of_any_number_of_pages(&medium);
    let whole = if medium.is_device() {
        json!({"format": "force"})
    } else {
        std::fs::remove_file(&medium.path).unwrap();
        json!({"capacity": "64MiB"})
    };
    let depot = medium.open(whole);
    assert!(depot.opening().created);
    if !medium.is_device() {
        what_the_disk_does_not_have_is_not_grown(&medium, &depot);
    }
    let ns = namespace(&depot);
    store(&ns, PROCESS);
    assert_eq!(fetch(&ns, PROCESS), count(&PROCESS));
    ok(format!("{} blocks put and read back", count(&PROCESS)));
    workers_move_bytes(&medium, &depot);
    there_is_one_owner(&medium);
    medium.tools_see(count(&PROCESS) + count(&WORKER), true);
    depot.close();
    medium.tools_see(count(&PROCESS) + count(&WORKER), false);
    // Whoever is killed here has said what is safe; so has the one whom the machine stops.
    let mut owner = Child::start(
        "device_dax::first_boot",
        "power",
        &[("spec", &spec(&medium))],
    );
    owner.expect("stored");
    says(
        medium.refusal(json!({})),
        &[&owner.pid().to_string(), &host()],
    );
    owner.kill();
    let depot = medium.open(json!({"durability": "power"}));
    let ns = namespace(&depot);
    assert_eq!(fetch(&ns, POWER), count(&POWER));
    ok(format!("{} blocks put to outlive power", count(&POWER)));
    assert_eq!(fetch(&ns, PROCESS), count(&PROCESS));
    assert_eq!(fetch(&ns, WORKER), count(&WORKER));
    assert_at_rest(&depot);
}

fn spec(medium: &Medium) -> String {
    json!(["Dax", medium.settings(json!({"durability": "power"}))]).to_string()
}

/// The children of both tests.
fn own_until_killed() -> ! {
    let depot = kvdepot_service::open(&config_of(&child::value("spec"))).unwrap();
    let ns = namespace(&depot);
    if child::role().unwrap() == "power" {
        store(&ns, POWER);
        child::say("stored");
        child::sleep_until_killed();
    }
    let first: u64 = child::value("first").parse().unwrap();
    for number in first..KILLED.end {
        store(&ns, number..number + 1);
        child::say(&number.to_string());
    }
    unreachable!("killed long before");
}

fn what_lies_there_stays(medium: &Medium) {
    if !medium.is_device() {
        std::fs::write(&medium.path, vec![0; 1 << 20]).unwrap();
    }
    let foreign = Mapping::open(&medium.path, Access::ReadWrite).unwrap();
    foreign.write_from(0, FOREIGN).unwrap();
    says(
        medium.refusal(json!({})),
        &["not a kvdepot arena", "format"],
    );
    for verb in ["stat", "verify", "rm"] {
        let ran = medium.command(verb).output().unwrap();
        assert_eq!(ran.status.code(), Some(2), "kvdepot {verb}");
        says(errors(&ran).trim(), &["not a kvdepot arena"]);
    }
    let capacity = foreign.len() + (2 << 20);
    let error = medium.refusal(json!({"format": true, "capacity": capacity}));
    says(error, &["dax.capacity", "the size of the medium"]);
    let mut begin = vec![0; FOREIGN.len()];
    foreign.read_into(0, &mut begin).unwrap();
    assert_eq!(begin, FOREIGN, "it was touched");
    ok("after all this it lies there as before");
}

fn what_the_device_does_not_have_is_not_mapped(medium: &Medium) {
    let device = Mapping::open(&medium.path, Access::ReadWrite).unwrap();
    assert_eq!(device.kind(), Kind::Dax);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let name = medium.path.to_str().unwrap();
    let line = maps.lines().find(|line| line.ends_with(name)).unwrap();
    let (begin, _) = line.split_once('-').unwrap();
    let begin = u64::from_str_radix(begin, 16).unwrap();
    assert!(begin.is_multiple_of(2 << 20), "{begin:x} for huge pages");
    ok(format!(
        "{} bytes at {begin:x}, of huge pages",
        device.len()
    ));
    let again = |access| device.try_clone_fd(access).unwrap();
    let beyond = device.len() + (2 << 20);
    let error = Mapping::from_fd(again(Access::ReadOnly), beyond, Access::ReadOnly);
    says(error.unwrap_err(), &[&device.len().to_string()]);
    let error = Mapping::from_fd(again(Access::ReadOnly), device.len(), Access::ReadWrite);
    says(error.unwrap_err(), &["ermission"]);
    // To its last byte.
    let last = device.len() - 1;
    device.write_from(last, &[7]).unwrap();
    let read_only = Mapping::from_fd(again(Access::ReadOnly), device.len(), Access::ReadOnly);
    let mut byte = [0];
    read_only.unwrap().read_into(last, &mut byte).unwrap();
    assert_eq!(byte, [7]);
    let part = Mapping::from_fd(
        again(Access::ReadWrite),
        (2 << 20) + 4096,
        Access::ReadWrite,
    );
    let part = part.unwrap();
    part.write_from((2 << 20) + 4095, &[9]).unwrap();
    ok("its last byte, and a part of it that ends inside a huge page");
}

/// ext4 gives a file all it has left before it says that this is too little.
fn what_the_disk_does_not_have_is_not_grown(medium: &Medium, depot: &Depot) {
    let state = || {
        let len = medium.path.metadata().unwrap().len();
        // Blocks that say where blocks are come and go.
        (len, limits::disk_free(&medium.path).unwrap() >> 20)
    };
    let before = state();
    let error = depot.grow_device(&medium.path, 1 << 30).unwrap_err();
    says(error, &["capacity: 1 GiB", "the free space of"]);
    assert_eq!(state(), before);
    ok("an arena that could not grow has left the disk as it was");
}

fn who_may_not_open_it_learns_so(medium: &Medium) {
    let ran = medium.command("stat").uid(1000).output().unwrap();
    assert_eq!(ran.status.code(), Some(2));
    says(errors(&ran).trim(), &["ermission"]);
}

fn a_capacity_of_any_number_of_pages(medium: &Medium) {
    let capacity = (20 << 20) + 4096;
    let options = match medium.is_device() {
        true => json!({"capacity": capacity, "format": true}),
        false => json!({"capacity": capacity}),
    };
    let depot = medium.open(options);
    let ns = namespace(&depot);
    store(&ns, 0..40);
    assert_eq!(fetch(&ns, 0..40), 40);
    workers_move_bytes(medium, &depot);
    depot.close();
    let error = medium.refusal(json!({"capacity": "40MiB"}));
    says(error, &["dax.capacity", "format"]);
    let depot = medium.open(json!({"capacity": capacity}));
    assert_eq!(fetch(&namespace(&depot), 0..40), 40);
    ok(format!(
        "an arena of {capacity} bytes, no multiple of a huge page"
    ));
}

/// Other processes map the medium from the descriptor that the owner hands out.
fn workers_move_bytes(medium: &Medium, depot: &Depot) {
    let ns = namespace(depot);
    let writer = Mover::attach(&medium.socket(), Some(1), true).unwrap();
    let numbers: Vec<u64> = WORKER.collect();
    let wanted: Vec<_> = numbers
        .iter()
        .map(|number| (key(*number), vec![len_of(*number) as u64]))
        .collect();
    let reserved: Vec<Reservation> = ns.reserve(&wanted).unwrap().into_iter().flatten().collect();
    let placements: Vec<_> = reserved.iter().map(Reservation::placement).collect();
    let bytes = numbers.iter().map(|number| block(*number, len_of(*number)));
    let job = writer
        .store(&placements, &BlockBuffers::whole(bytes), 0)
        .unwrap();
    assert!(job.wait(Some(PATIENCE)), "{:?}", job.error());
    let sums: Vec<_> = job
        .checksums()
        .into_iter()
        .map(|sum| vec![sum.unwrap()])
        .collect();
    let done = ns.commit(&reserved, &sums).unwrap();
    assert!(done.iter().all(|done| *done));
    assert_eq!(fetch(&ns, WORKER), count(&WORKER));
    let reader = Mover::attach(&medium.socket(), Some(1), false).unwrap();
    reader.populate().unwrap();
    assert!(reader.media().iter().all(|medium| !medium.is_writable()));
    ok("a worker writes, another maps it for reading only");
}

fn there_is_one_owner(medium: &Medium) {
    let error = medium.refusal(json!({}));
    assert!(matches!(error, Error::Locked { .. }), "{error}");
    says(error, &[&std::process::id().to_string(), &host()]);
    let error = medium.refusal(json!({"format": true}));
    assert!(matches!(error, Error::Locked { .. }), "{error}");
    let ran = medium.command("rm").output().unwrap();
    assert_eq!(ran.status.code(), Some(2));
    says(
        errors(&ran).trim(),
        &[&std::process::id().to_string(), &host()],
    );
}

#[test]
#[ignore = "needs a DAX device; make test-vm runs it in a virtual machine"]
fn second_boot() {
    if child::role().is_some() {
        own_until_killed();
    }
    let medium = Medium::named();
    let begun = Instant::now();
    let depot = medium.open(json!({}));
    let ns = namespace(&depot);
    let first = POWER.start;
    assert!(has(&ns, &[first], len_of(first)));
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
    assert!(!depot.opening().created && depot.opening().damaged == 0);
    ok(format!(
        "open after a restart, the first block in {} ms",
        took.as_millis()
    ));
    assert_eq!(fetch(&ns, POWER), count(&POWER));
    let others = fetch(&ns, PROCESS) + fetch(&ns, WORKER);
    // A device has no cache above it, and this one survives; a file system may have lost extents.
    let all = count(&PROCESS) + count(&WORKER);
    assert!(others == all || !medium.is_device(), "{others} of {all}");
    ok(format!("{} blocks, and {others} of {all}", count(&POWER)));
    assert_at_rest(&depot);
    let blocks = depot.stats().tiers[0].blocks;
    depot.close();
    medium.tools_see(blocks, false);
    owners_are_killed(&medium);
    through_a_cache(&medium);
    full_to_the_last_byte(&medium);
    gone_at_last(&medium);
}

fn owners_are_killed(medium: &Medium) {
    let mut rng = Rng::new(7);
    let mut next = KILLED.start;
    for _ in 0..4 {
        let values = [("spec", spec(medium)), ("first", next.to_string())];
        let values = values
            .each_ref()
            .map(|(name, value)| (*name, value.as_str()));
        let mut owner = Child::start("device_dax::second_boot", "killed", &values);
        for _ in 0..rng.between(5, 40) {
            assert_eq!(owner.line().unwrap(), next.to_string());
            next += 1;
        }
        owner.kill();
        while let Some(line) = owner.line() {
            assert_eq!(line, next.to_string());
            next += 1;
        }
        let found = verify(&medium.path);
        assert!(found.bad.is_empty() && found.damaged_records.is_empty());
        let depot = medium.open(json!({}));
        let ns = namespace(&depot);
        assert_eq!(fetch(&ns, KILLED.start..next), next - KILLED.start);
        assert_at_rest(&depot);
        // One more may be there: whoever was killed before it could say so.
        next += 1;
        store(&ns, next - 1..next);
    }
    let stored = next - KILLED.start;
    ok(format!(
        "4 owners killed, {stored} acknowledged blocks and all older ones served"
    ));
}

fn through_a_cache(medium: &Medium) {
    let mut settings = medium.settings(json!({}));
    settings["cache"] = json!({"capacity": "8MiB"});
    let depot = kvdepot_service::open(&Config::new("Cache|Dax", &settings).unwrap()).unwrap();
    assert_eq!(fetch(&namespace(&depot), POWER), count(&POWER));
    depot.close();
    ok("served through a cache");
}

/// All of the medium is used, to its end, and what is stored later takes the place of the oldest.
fn full_to_the_last_byte(medium: &Medium) {
    let depot = medium.open(json!({}));
    let ns = namespace(&depot);
    for number in FULL {
        assert_eq!(put(&ns, &[number], 2 << 20), [true]);
    }
    let stats = &depot.stats().tiers[0];
    assert!(
        stats.free_bytes < 4 << 20,
        "{} bytes free",
        stats.free_bytes
    );
    let kept = FULL.filter(|number| get(&ns, &[*number], 2 << 20) == [Outcome::Done]);
    let kept = kept.count() as u64;
    assert!(kept << 21 > stats.capacity_bytes / 2, "{kept}");
    assert_at_rest(&depot);
    depot.close();
    let found = verify(&medium.path);
    assert!(found.bad.is_empty() && found.sound >= kept);
    ok(format!(
        "full: {kept} of {} newer blocks, all sound",
        count(&FULL)
    ));
}

fn gone_at_last(medium: &Medium) {
    let ran = medium.command("rm").output().unwrap();
    assert!(ran.status.success(), "{}", errors(&ran));
    if medium.is_device() {
        says(medium.refusal(json!({})), &["not a kvdepot arena"]);
    } else {
        assert!(!Path::new(&medium.path).exists());
    }
    ok("removed");
}
