//! `Nvme` on a block device. Here that is a loop device over a file, where this process may make
//! one; `make test-vm` names an emulated disk by `KVDEPOT_TEST_BLOCK`. Everything on it is lost.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and its output is for the person who reads it"
)]

use std::fmt::Display;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{
    PATIENCE, assert_at_rest, block, config_of, get, has, key, namespace, put, verify,
};
use kvdepot_media::Kind;
use kvdepot_service::Mover;
use kvdepot_store::inspect::Inspection;
use kvdepot_store::{BlockBuffers, Config, Depot, Error, Outcome};
use kvdepot_testkit::child::{self, Child};
use serde_json::{Value, json};

/// Bytes of the device: more than Btrfs puts before its second superblock.
const LEN: u64 = 80 << 20;
const BLOCK: usize = 100_001;
const MIB: u64 = 1 << 20;

/// Says what was checked.
fn ok(what: impl Display) {
    println!("ok: {what}");
}

struct Device {
    path: PathBuf,
    scratch: tempfile::TempDir,
    /// Whether it goes with this value.
    is_loop: bool,
}

/// Runs a program; its last line.
fn run(program: &str, args: &[&str]) -> Result<String, String> {
    let ran = Command::new(program).args(args).output();
    let ran = ran.map_err(|error| format!("{program}: {error}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    match ran.status.success() {
        true => Ok(text(&ran.stdout)),
        false => Err(format!("{program}: {}", text(&ran.stderr))),
    }
}

impl Device {
    /// The named one, or a new one.
    fn find() -> Result<Device, String> {
        let scratch = tempfile::tempdir().unwrap();
        if let Some(path) = std::env::var_os("KVDEPOT_TEST_BLOCK") {
            let (path, is_loop) = (path.into(), false);
            return Ok(Device {
                path,
                scratch,
                is_loop,
            });
        }
        let file = scratch.path().join("disk");
        // Not of whole pages.
        File::create(&file).unwrap().set_len(LEN + 512).unwrap();
        let made = run("losetup", &["--find", "--show", file.to_str().unwrap()])?;
        let (path, is_loop) = (made.into(), true);
        Ok(Device {
            path,
            scratch,
            is_loop,
        })
    }

    fn settings(&self, options: Value) -> Value {
        let mut nvme = options;
        let path = self.path.to_str().unwrap();
        nvme.as_object_mut()
            .unwrap()
            .entry("path")
            .or_insert_with(|| path.into());
        let socket = self.scratch.path().join("s");
        json!({
            "socket": socket.to_str().unwrap(),
            "lock_wait": "0s",
            "lanes": 2,
            "nvme": nvme,
        })
    }

    fn open_with(&self, options: Value) -> Result<Depot, Error> {
        let config = Config::new("Nvme", &self.settings(options)).unwrap();
        // What is refused is refused by both.
        let checked = config.check();
        let opened = kvdepot_service::open(&config);
        if let (Err(checked), Err(opened)) = (checked, &opened) {
            assert_eq!(checked.to_string(), opened.to_string());
        }
        opened
    }

    fn open(&self, options: Value) -> Depot {
        self.open_with(options).unwrap()
    }

    fn refusal(&self, options: Value) -> Error {
        self.open_with(options).err().unwrap()
    }

    /// A descriptor to look and write by, as other programs do.
    fn file(&self) -> File {
        let file = File::options().read(true).write(true).open(&self.path);
        file.unwrap()
    }

    fn write(&self, bytes: &[u8], at: u64) {
        let file = self.file();
        file.write_all_at(bytes, at).unwrap();
        file.sync_all().unwrap();
    }

    fn len(&self) -> u64 {
        kvdepot_host::block::geometry(self.file()).unwrap().bytes
    }

    fn zero(&self) {
        let (file, zeros) = (self.file(), vec![0; MIB as usize]);
        let len = self.len();
        for at in (0..len).step_by(MIB as usize) {
            let now = (len - at).min(MIB) as usize;
            file.write_all_at(&zeros[..now], at).unwrap();
        }
        file.sync_all().unwrap();
    }

    /// As a file system does that is mounted.
    fn claim(&self) -> io::Result<File> {
        let mut options = File::options();
        options.read(true).write(true);
        options.custom_flags(0o200).open(&self.path)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.is_loop {
            let detached = run("losetup", &["--detach", self.path.to_str().unwrap()]);
            assert!(detached.is_ok() || std::thread::panicking(), "{detached:?}");
        }
    }
}

fn says(error: impl Display, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{text:?} does not say {word:?}");
    }
    ok(format!("refused: {text}"));
}

#[test]
fn a_block_device_is_an_arena() {
    if child::role().is_some() {
        own_until_killed();
    }
    let device = match Device::find() {
        Ok(device) => device,
        Err(reason) => {
            println!("skipped: no loop device is to be had here: {reason}");
            return;
        }
    };
    println!();
    device.zero();
    what_others_left_is_not_taken(&device);
    partitions_are_not_overlooked(&device);
    nobody_else_has_it_meanwhile(&device);
    capacities(&device);
    links_and_tiers(&device);
    blocks_come_and_stay(&device);
    owners_are_killed(&device);
    gone_at_last(&device);
}

fn what_others_left_is_not_taken(device: &Device) {
    let name = device.path.to_str().unwrap();
    let len = device.len();
    let left: [(u64, &[u8], &str); 8] = [
        (1080, b"\x53\xef", "ext2, ext3 or ext4"),
        (510, b"\x55\xaa", "MBR"),
        (65_600, b"_BHRfS_M", "Btrfs"),
        (64 * MIB + 64, b"_BHRfS_M", "64 MiB (possibly Btrfs"),
        (4 * MIB, b"SKUL", "LUKS"),
        (len - 512, b"EFI PART", "backup of a GPT"),
        (len - MIB, b"x", "1 MiB before its end"),
        (len - 1, b"x", "1 MiB before its end"),
    ];
    for (at, bytes, what) in left {
        device.write(bytes, at);
        says(
            device.refusal(json!({})),
            &[
                name,
                "not a kvdepot arena: the medium contains",
                what,
                "format: true",
            ],
        );
        let mut there = vec![0; bytes.len()];
        device.file().read_exact_at(&mut there, at).unwrap();
        assert_eq!(there, bytes, "it was touched");
        device.write(&vec![0; bytes.len()], at);
    }
    // Who says that it may go loses it, wherever it was.
    for (at, bytes, _) in left {
        device.write(bytes, at);
    }
    device.open(json!({"format": true})).close();
    for (at, bytes, _) in left {
        let mut there = vec![0; bytes.len()];
        device.file().read_exact_at(&mut there, at).unwrap();
        assert!(there != bytes, "something is left at {at}");
    }
    assert!(!device.open(json!({})).opening().created);
    says(
        device.refusal(json!({"format": true})),
        &["a valid arena", "format: force"],
    );
    device.zero();
    assert!(device.open(json!({})).opening().created, "a new device");
    ok("a device of zeros became an arena");
    device.zero();
}

/// The kernel knows them by a table, also when that is gone by now, or because it was told.
fn partitions_are_not_overlooked(device: &Device) {
    let node = device.path.to_str().unwrap();
    let known = || kvdepot_host::block::uses(device.file()).unwrap().partitions;
    if device.is_loop {
        let file = device.scratch.path().join("disk");
        run("losetup", &["--detach", node]).unwrap();
        run("losetup", &["--partscan", node, file.to_str().unwrap()]).unwrap();
    }
    let mut table = [0; 512];
    table[510..].copy_from_slice(b"\x55\xaa");
    // Two of Linux, of 4 MiB each.
    for (at, begin) in [(446, 2048_u32), (462, 10_240)] {
        table[at + 4] = 0x83;
        table[at + 8..at + 12].copy_from_slice(&begin.to_le_bytes());
        table[at + 12..at + 16].copy_from_slice(&8192_u32.to_le_bytes());
    }
    device.write(&table, 0);
    run("blockdev", &["--rereadpt", node]).unwrap();
    let told = known().is_empty();
    if told {
        println!("this kernel reads no such tables, and is told");
        run("addpart", &[node, "1", "2048", "8192"]).unwrap();
        run("addpart", &[node, "2", "10240", "8192"]).unwrap();
    }
    let partitions = known();
    assert_eq!(partitions.len(), 2, "{partitions:?}");
    for format in ["true", "force", "false"] {
        let error = device.refusal(json!({"format": format}));
        says(error, &["nvme.path", node, &partitions[0], &partitions[1]]);
    }
    device.write(&[0; 512], 0);
    says(device.refusal(json!({})), &["partitions", &partitions[1]]);
    let partition = Path::new("/dev").join(&partitions[0]);
    let depot = device.open(json!({"path": partition.to_str().unwrap()}));
    assert_eq!(put(&namespace(&depot), &[1], BLOCK), [true]);
    assert!(device.claim().is_err(), "the disk of a partition in use");
    depot.close();
    ok("a partition is an arena");
    for number in ["1", "2"].into_iter().filter(|_| told) {
        run("delpart", &[node, number]).unwrap();
    }
    run("blockdev", &["--rereadpt", node]).unwrap();
    assert!(known().is_empty(), "{:?}", known());
    device.zero();
}

fn nobody_else_has_it_meanwhile(device: &Device) {
    let name = device.path.to_str().unwrap();
    let claimed = device.claim().unwrap();
    let error = device.refusal(json!({}));
    says(
        error,
        &[
            "nvme.path",
            name,
            "that is not in use",
            "opened exclusively",
        ],
    );
    drop(claimed);
    if let Err(error) = run("mkfs.ext4", &["-q", "-F", name]) {
        println!("not checked on a mounted device: {error}");
    } else {
        let at = device.scratch.path().join("mnt");
        std::fs::create_dir(&at).unwrap();
        let at = at.to_str().unwrap();
        run("mount", &["-t", "ext4", name, at]).unwrap();
        let error = device.refusal(json!({"format": "force"}));
        says(error, &["nvme.path", name, "mounted at", at]);
        run("umount", &[at]).unwrap();
        says(device.refusal(json!({})), &["contains ext2, ext3 or ext4"]);
    }
    let depot = device.open(json!({"format": "force"}));
    let busy = device.claim().unwrap_err();
    assert_eq!(busy.kind(), io::ErrorKind::ResourceBusy);
    let error = device.refusal(json!({}));
    assert!(matches!(error, Error::Locked { .. }), "{error}");
    says(error, &[&std::process::id().to_string()]);
    depot.close();
    drop(device.claim().unwrap());
    ok("claimed while it is open, and not any more");
    device.zero();
}

fn capacities(device: &Device) {
    let error = device.refusal(json!({"capacity": "1TiB"}));
    says(error, &["nvme.capacity", "1 TiB", "the size of the medium"]);
    let depot = device.open(json!({"capacity": "64MiB"}));
    assert_eq!(depot.stats().tiers[0].blocks, 0);
    assert_eq!(put(&namespace(&depot), &[1, 2], BLOCK), [true; 2]);
    depot.grow_device(&device.path, 70 * MIB).unwrap();
    let error = depot.grow_device(&device.path, 1 << 40).unwrap_err();
    says(error, &["the size of the device"]);
    depot.close();
    let error = device.refusal(json!({"capacity": "64MiB"}));
    says(error, &["nvme.capacity", "70 MiB"]);
    assert!(has(&namespace(&device.open(json!({}))), &[1, 2], BLOCK));
    device.zero();
}

fn links_and_tiers(device: &Device) {
    let name = device.path.to_str().unwrap();
    let options = json!({"path": name, "format": "force"});
    let config = Config::new("Dax", &json!({"socket": "off", "dax": options})).unwrap();
    says(
        Depot::open(&config).err().unwrap(),
        &["dax.path", "a block device", "Nvme"],
    );
    let link = device.scratch.path().join("link");
    symlink(&device.path, &link).unwrap();
    let error = device.refusal(json!({"path": link.to_str().unwrap()}));
    says(error, &["symbolic link"]);
    // As udev makes them.
    let link = Path::new("/dev/kvdepot-test-link");
    let _left = std::fs::remove_file(link);
    symlink(&device.path, link).unwrap();
    let depot = device.open(json!({"path": link.to_str().unwrap()}));
    let both = json!({"devices": [{"path": name}, {"path": link.to_str().unwrap()}]});
    let mut settings = device.settings(json!({}));
    settings["nvme"] = both;
    let twice = Config::new("Nvme", &settings);
    says(twice.err().unwrap(), &["nvme.devices"]);
    depot.close();
    std::fs::remove_file(link).unwrap();
    device.zero();
}

/// A worker writes by the descriptor that the owner hands out.
fn blocks_come_and_stay(device: &Device) {
    for durability in ["process", "power"] {
        let depot = device.open(json!({"durability": durability}));
        let ns = namespace(&depot);
        let numbers: Vec<u64> = (10..40).collect();
        assert_eq!(put(&ns, &numbers, BLOCK), [true; 30]);
        assert!(has(&ns, &numbers, BLOCK));
        let writer = Mover::attach(&device.scratch.path().join("s"), Some(1), true).unwrap();
        let (number, len) = (1000, 50_000);
        let wanted = [(key(number), vec![len as u64])];
        let _gone = ns.remove(&[key(number)]);
        let reserved: Vec<_> = ns.reserve(&wanted).unwrap().into_iter().flatten().collect();
        let placements: Vec<_> = reserved.iter().map(|one| one.placement()).collect();
        let bytes = BlockBuffers::whole([block(number, len)]);
        let job = writer.store(&placements, &bytes, 0).unwrap();
        assert!(job.wait(Some(PATIENCE)), "{:?}", job.error());
        let sums: Vec<_> = job
            .checksums()
            .into_iter()
            .map(|sum| vec![sum.unwrap()])
            .collect();
        assert_eq!(ns.commit(&reserved, &sums).unwrap(), [true]);
        assert_eq!(get(&ns, &[number], len), [Outcome::Done]);
        drop(writer);
        assert_at_rest(&depot);
        let inspection = Inspection::open(&device.path).unwrap();
        assert_eq!(inspection.kind(), Kind::Block);
        assert_eq!(verify(&device.path).sound, 31);
        depot.close();
        let depot = device.open(json!({}));
        assert!(has(&namespace(&depot), &numbers, BLOCK));
        ok(format!("31 blocks, {durability}, opened again"));
        depot.close();
    }
}

fn own_until_killed() -> ! {
    let depot = kvdepot_service::open(&config_of(&child::value("spec"))).unwrap();
    let ns = namespace(&depot);
    let first: u64 = child::value("first").parse().unwrap();
    for number in first.. {
        assert_eq!(put(&ns, &[number], BLOCK), [true]);
        child::say(&number.to_string());
    }
    unreachable!("killed long before");
}

fn owners_are_killed(device: &Device) {
    let mut first = 2000;
    for round in 1..=4_u64 {
        let spec = json!(["Nvme", device.settings(json!({"durability": "power"}))]).to_string();
        let values = [("spec", spec.as_str()), ("first", &first.to_string())];
        let mut owner = Child::start("block_device::a_block_device_is_an_arena", "owner", &values);
        for _ in 0..5 * round {
            assert_eq!(owner.line().unwrap(), first.to_string());
            first += 1;
        }
        owner.kill();
        while let Some(line) = owner.line() {
            assert_eq!(line, first.to_string());
            first += 1;
        }
        // Without a wait: the lock is free, and the device is.
        let depot = device.open(json!({}));
        let numbers: Vec<u64> = (2000..first).collect();
        assert!(has(&namespace(&depot), &numbers, BLOCK));
        depot.close();
        // One more may be there: whoever was killed before it could say so.
        first += 1;
        let depot = device.open(json!({}));
        assert_eq!(put(&namespace(&depot), &[first - 1], BLOCK), [true]);
    }
    ok(format!("4 owners killed, {} blocks served", first - 2000));
}

fn gone_at_last(device: &Device) {
    let depot = device.open(json!({}));
    let error = kvdepot_store::erase(&device.path).unwrap_err();
    assert!(matches!(error, Error::Locked { .. }), "{error}");
    depot.close();
    kvdepot_store::erase(&device.path).unwrap();
    assert!(device.path.exists());
    says(device.refusal(json!({})), &["not a kvdepot arena"]);
    ok("removed");
}
