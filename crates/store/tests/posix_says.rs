//! What the tier `Posix` says: its answers, counts, listings and log lines, beside what is so.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
#[path = "common/folder.rs"]
mod folder;
#[path = "common/realm.rs"]
mod realm;

use std::fmt::{Debug, Write};
use std::fs;
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::sync::{Mutex, OnceLock};

use common::{PATIENCE, eventually, get, keys, namespace, namespace_of, put, start_put};
use folder::{LEN, ROOM, files, open, open_with, try_open};
use kvdepot_arena::format::file_header::FileHeader;
use kvdepot_store::{Depot, Namespace, NamespaceSpec, Outcome};
use serde_json::json;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

const MIB: usize = 1 << 20;

/// All lines of this process.
#[derive(Default)]
struct Log(Mutex<Vec<String>>);

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, " {}={value:?}", field.name()).unwrap();
    }
}

impl Subscriber for &'static Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(event.metadata().level().to_string());
        event.record(&mut line);
        self.0.lock().unwrap().push(line.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The lines since the first call that have this in them.
fn lines_with(text: &str) -> Vec<String> {
    static LOG: OnceLock<&Log> = OnceLock::new();
    let log = LOG.get_or_init(|| {
        let log: &Log = Box::leak(Box::default());
        tracing::subscriber::set_global_default(log).unwrap();
        log
    });
    let mut lines = log.0.lock().unwrap().clone();
    lines.retain(|line| line.contains(text));
    lines
}

fn outcomes(ns: &Namespace, numbers: &[u64], len: usize) -> Vec<Outcome> {
    let task = start_put(ns, numbers, len);
    task.wait(Some(PATIENCE)).unwrap();
    task.outcomes()
}

/// Makes a block's file one of a later release.
fn age(file: &Path) {
    let _none = rustix::fs::removexattr(file, "user.kvdepot");
    let file = fs::File::options()
        .read(true)
        .write(true)
        .open(file)
        .unwrap();
    let mut page = [0; 4096];
    file.read_exact_at(&mut page, 0).unwrap();
    page[8] += 1;
    assert!(FileHeader::is_newer(&page));
    file.write_all_at(&page, 0).unwrap();
}

#[test]
fn a_block_that_a_directory_never_takes_is_refused_and_nothing_goes_for_it() {
    for pipeline in ["Posix", "Cache|Posix"] {
        let dir = tempfile::tempdir().unwrap();
        let depot = open_with(pipeline, dir.path(), json!({"capacity": "32MiB"}));
        let ns = namespace(&depot);
        let all: Vec<u64> = (0..20).collect();
        assert!(put(&ns, &all, MIB).iter().all(|ok| *ok));
        for mib in [33, 40, 5] {
            assert_eq!(
                outcomes(&ns, &[100], mib * MIB),
                [Outcome::Full],
                "{pipeline}: {mib} MiB"
            );
        }
        // One beside others that fit.
        let task = ns.put(
            keys([100, 101]),
            kvdepot_store::BlockBuffers::whole([
                common::block(100, 40 * MIB),
                common::block(101, MIB),
            ]),
        );
        let task = task.unwrap();
        assert_eq!(task.wait(Some(PATIENCE)).unwrap(), [false, true]);
        assert_eq!(files(dir.path()).len(), 21, "{pipeline}");
        depot.close();
    }
}

#[test]
fn a_put_of_more_than_the_directory_keeps_as_much_of_it_as_fits() {
    let dir = tempfile::tempdir().unwrap();
    let depot = open_with("Posix", dir.path(), json!({"capacity": "32MiB"}));
    let ns = namespace(&depot);
    let old: Vec<u64> = (0..20).collect();
    assert!(put(&ns, &old, MIB).iter().all(|ok| *ok));
    let new: Vec<u64> = (100..140).collect();
    let stored = common::put_each(&ns, &new, MIB);
    let count = stored.iter().filter(|ok| **ok).count();
    println!("{count} of the put, {} files", files(dir.path()).len());
    assert!(count >= 24, "{count} of 40");
    assert!(files(dir.path()).len() >= 24);
    depot.close();
}

#[test]
fn what_this_process_has_evicted_is_not_said_to_be_there() {
    let dir = tempfile::tempdir().unwrap();
    let depot = open_with("Posix", dir.path(), json!({"capacity": "8MiB"}));
    let ns = namespace(&depot);
    let all: Vec<u64> = (0..200).collect();
    all.iter()
        .for_each(|number| assert_eq!(put(&ns, &[*number], LEN), [true]));
    // What is under way may still go.
    let mut before = u64::MAX;
    eventually("the end of the collection", || {
        let now = depot.stats().tiers[0].evicted_blocks;
        std::thread::sleep(std::time::Duration::from_millis(100));
        std::mem::replace(&mut before, now) == now && now > 0
    });
    let there = ns.contains(&keys(0..200)).unwrap();
    let said = there.into_iter().filter(|there| *there).count();
    assert_eq!(said, files(dir.path()).len());
    depot.close();
}

#[test]
fn rot_and_eviction_are_counted_and_told_to_who_asks_what_has_gone() {
    let dir = tempfile::tempdir().unwrap();
    let depot = open_with("Posix", dir.path(), json!({"capacity": "8MiB"}));
    let ns = namespace(&depot);
    assert_eq!(depot.gone(1000).unwrap().blocks, []);
    assert_eq!(put(&ns, &[1, 2, 3], LEN), [true; 3]);
    let of = |number: u64| {
        let all = files(dir.path()).into_iter();
        let name = common::key(number).to_string();
        let mut mine = all.filter(|file| file.to_str().unwrap().contains(&name));
        mine.next().unwrap()
    };
    let rot = |number, at| {
        let file = fs::File::options().write(true).open(of(number)).unwrap();
        file.write_all_at(&[0x5A; 64], at).unwrap();
    };
    rot(1, 50_000);
    assert_eq!(get(&ns, &[1], LEN), [Outcome::Corrupt]);
    let _none = rustix::fs::removexattr(of(2), "user.kvdepot");
    rot(2, 0);
    assert_eq!(get(&ns, &[2], LEN), [Outcome::Miss]);
    let corrupt = || depot.stats().tiers[0].corrupt_blocks;
    eventually("two rotten blocks", || corrupt() == 2);
    assert_eq!(ns.remove(&keys([3])).unwrap(), 1);
    let told = || -> Vec<(u64, u64)> {
        let gone = depot.gone(1000).unwrap();
        assert!(!gone.overflowed);
        let mut told: Vec<_> = gone
            .blocks
            .into_iter()
            .map(|(name, len)| (common::number(&name.key), len))
            .collect();
        told.sort_unstable();
        told
    };
    let len = LEN as u64;
    // Of one whose header is gone only the file's length is known.
    let whole = ROOM - 4096;
    assert_eq!(told(), [(1, len), (2, whole), (3, len)]);
    let all: Vec<u64> = (10..210).collect();
    all.iter()
        .for_each(|number| assert_eq!(put(&ns, &[*number], LEN), [true]));
    let tier = || depot.stats().tiers.remove(0);
    eventually("an eviction", || tier().evicted_blocks > 0);
    let went = told();
    assert!(!went.is_empty() && went.iter().all(|(_, bytes)| *bytes == len));
    // Those of a file are what it takes.
    let tier = tier();
    assert_eq!(tier.evicted_bytes, tier.evicted_blocks * ROOM);
    assert_eq!(tier.stored_bytes, tier.stored_blocks * ROOM);
    depot.close();
}

#[test]
fn how_many_blocks_a_directory_has_is_not_said_to_be_none() {
    let dir = tempfile::tempdir().unwrap();
    let depot = open_with("Cache|Posix", dir.path(), json!({}));
    assert_eq!(put(&namespace(&depot), &[1, 2], LEN), [true; 2]);
    let stats = depot.stats();
    let text = stats.prometheus();
    assert!(
        text.contains("kvdepot_live_blocks{tier=\"Cache\"} 2"),
        "{text}"
    );
    assert!(
        !text.contains("kvdepot_live_blocks{tier=\"Posix\"}"),
        "{text}"
    );
    let shown = &stats.shown()["tiers"];
    assert_eq!(shown[0]["blocks"], 2);
    assert!(shown[1]["blocks"].is_null(), "{shown}");
    depot.close();
}

#[test]
fn a_depot_says_where_its_directory_is_and_how_large() {
    for pipeline in ["Posix", "Cache|Posix"] {
        let dir = tempfile::tempdir().unwrap();
        let depot = open_with(pipeline, dir.path(), json!({}));
        let path = dir.path().join("posix");
        let said = format!("Posix 64 MiB at {}", path.display());
        assert!(
            depot.description().contains(&said),
            "{}",
            depot.description()
        );
        let first = pipeline.split('|').next().unwrap();
        assert!(depot.description().starts_with(first));
        depot.close();
    }
}

fn tenant(depot: &Depot) -> Namespace {
    let spec = NamespaceSpec {
        model: "m".into(),
        dtype: "float32".into(),
        block_tokens: 16,
        salt: Some("the tenant's secret".into()),
        ..NamespaceSpec::default()
    };
    depot.namespace(&spec).unwrap()
}

#[test]
fn namespaces_of_a_directory_are_listed_by_whoever_opens_it() {
    for pipeline in ["Posix", "Cache|Posix"] {
        let dir = tempfile::tempdir().unwrap();
        let depot = open_with(pipeline, dir.path(), json!({}));
        let (first, second) = (namespace(&depot), tenant(&depot));
        let (ids, empty) = ([first.id(), second.id()], namespace_of(&depot, "empty"));
        assert!(
            put(&first, &(0..11).collect::<Vec<_>>(), LEN)
                .iter()
                .all(|ok| *ok)
        );
        assert_eq!(put(&second, &[1], 5000), [true]);
        // One that nobody has described.
        let plain = depot.namespace_by_id(kvdepot_store::NamespaceId([0xAB; 16]));
        assert_eq!(put(&plain, &[1], 5000), [true]);
        depot.close();
        let depot = open_with(pipeline, dir.path(), json!({}));
        let found = depot.namespaces().unwrap();
        let of = |id| found.iter().find(|one| one.id == id).unwrap();
        assert_eq!(found.len(), 4, "{pipeline}: {found:?}");
        assert_eq!((of(ids[0]).blocks, of(ids[1]).blocks), (11, 1));
        // As far as the files' lengths say.
        assert_eq!(of(ids[0]).bytes, 11 * (ROOM - 4096));
        assert_eq!(
            of(ids[0]).description.as_deref(),
            Some("model=m dtype=float32 block_tokens=16")
        );
        let told = of(ids[1]).description.as_deref();
        assert_eq!(
            told,
            Some("model=m dtype=float32 block_tokens=16 salt=(set)")
        );
        assert_eq!(
            (of(plain.id()).blocks, &of(plain.id()).description),
            (1, &None)
        );
        assert_eq!(of(empty.id()).blocks, 0);
        for file in fs::read_dir(dir.path().join("posix/namespaces")).unwrap() {
            let text = fs::read_to_string(file.unwrap().path()).unwrap();
            assert!(text.starts_with("kvdepot namespace 1\nmodel="), "{text}");
            assert!(!text.contains("secret"));
        }
        assert_eq!(depot.namespace_by_id(ids[0]).clear().unwrap(), 11);
        depot.close();
    }
}

#[test]
fn what_is_no_description_is_none_and_descriptions_are_written_once() {
    let dir = tempfile::tempdir().unwrap();
    open(dir.path()).close();
    let depot = open(dir.path());
    let id = namespace(&depot).id();
    depot.close();
    let at = dir.path().join("posix/namespaces");
    let file = at.join(id.to_string());
    fs::write(&file, "kvdepot namespace 1\nas it was\n").unwrap();
    fs::write(at.join("no digest"), "kvdepot namespace 1\nx\n").unwrap();
    let strange = |byte: u8| at.join(kvdepot_store::NamespaceId([byte; 16]).to_string());
    fs::write(strange(1), "kvdepot namespace 2\nx\n").unwrap();
    fs::write(strange(2), [0xFF; 100]).unwrap();
    symlink("/etc/hostname", strange(3)).unwrap();
    fs::create_dir(strange(4)).unwrap();
    let depot = open(dir.path());
    let _described = namespace(&depot);
    let found = depot.namespaces().unwrap();
    let found: Vec<_> = found
        .iter()
        .map(|one| (one.id, one.description.as_deref()))
        .collect();
    assert_eq!(found, [(id, Some("as it was"))]);
    depot.close();
}

#[test]
fn a_file_of_a_later_release_is_named_so_declined_and_kept() {
    for pipeline in ["Posix", "Cache|Posix"] {
        let _begun = lines_with("");
        let dir = tempfile::tempdir().unwrap();
        let depot = open_with("Posix", dir.path(), json!({}));
        let number = if pipeline == "Posix" { 7_001 } else { 7_002 };
        assert_eq!(put(&namespace(&depot), &[number], LEN), [true]);
        depot.close();
        let file = files(dir.path()).remove(0);
        age(&file);
        let depot = open_with(pipeline, dir.path(), json!({}));
        let ns = namespace(&depot);
        assert_eq!(
            outcomes(&ns, &[number], LEN),
            [Outcome::Declined],
            "{pipeline}"
        );
        let _kept_near = ns.remove(&[]);
        assert!(file.exists());
        depot.close();
        let depot = open_with("Posix", dir.path(), json!({}));
        assert_eq!(get(&namespace(&depot), &[number], LEN), [Outcome::Miss]);
        assert!(file.exists());
        let lines = lines_with(&common::key(number).to_string());
        assert!(
            lines.iter().any(|line| line.contains("later release")),
            "{lines:?}"
        );
        assert!(
            !lines.iter().any(|line| line.contains("does not match")),
            "{lines:?}"
        );
        depot.close();
    }
}

#[test]
fn another_users_file_is_a_miss_that_stays_and_its_key_is_declined() {
    for pipeline in ["Posix", "Cache|Posix"] {
        let dir = tempfile::tempdir().unwrap();
        let depot = open(dir.path());
        assert_eq!(put(&namespace(&depot), &[1], LEN), [true]);
        depot.close();
        let file = files(dir.path()).remove(0);
        // Only a privileged user gives files away.
        if let Err(error) = std::os::unix::fs::chown(&file, Some(12_345), None) {
            println!("skipped: this process may not give files away: {error}");
            return;
        }
        let depot = open_with(pipeline, dir.path(), json!({}));
        let ns = namespace(&depot);
        assert_eq!(ns.prefix(&keys([1])).unwrap(), 0, "{pipeline}");
        assert_eq!(get(&ns, &[1], LEN), [Outcome::Miss]);
        let outcome = outcomes(&ns, &[1], LEN);
        assert_eq!(outcome, [Outcome::Declined], "{pipeline}");
        depot.close();
        assert!(file.exists());
    }
}

#[test]
fn an_arena_on_a_disk_logs_who_carries_its_bytes() {
    let _begun = lines_with("");
    let dir = tempfile::tempdir().unwrap();
    let depot = open_with("Nvme", dir.path(), json!({}));
    assert_eq!(put(&namespace(&depot), &[1], LEN), [true]);
    depot.close();
    let lines = lines_with(dir.path().to_str().unwrap());
    let said = |line: &String| line.contains("way=") && line.contains(" with ");
    assert!(lines.iter().any(said), "{lines:?}");
}

#[test]
fn an_arena_in_a_containers_writable_layer_is_warned_of() {
    const TEST: &str = "an_arena_in_a_containers_writable_layer_is_warned_of";
    let dir = tempfile::tempdir().unwrap();
    let layers = ["lower", "upper", "work"].map(|layer| {
        let path = dir.path().join(layer);
        fs::create_dir(&path).unwrap();
        path.display().to_string()
    });
    let [lower, upper, work] = layers;
    let how = format!("lowerdir={lower},upperdir={upper},workdir={work},userxattr");
    realm::on(
        (TEST, "container"),
        realm::User::Root,
        "overlay",
        &how,
        |at| {
            let _begun = lines_with("");
            open_with("Nvme", at, json!({})).close();
            let lines = lines_with("writable layer");
            assert!(
                lines.iter().any(|line| line.starts_with("WARN")),
                "{lines:?}"
            );
            // One that is there is where its user has it.
            open_with("Nvme", at, json!({})).close();
            assert_eq!(lines_with("writable layer").len(), lines.len());
        },
    );
}

#[test]
fn who_is_alone_names_another_capacity_at_once_and_the_log_says_so() {
    let _begun = lines_with("");
    let dir = tempfile::tempdir().unwrap();
    try_open("Posix", dir.path(), json!({})).unwrap().close();
    try_open("Posix", dir.path(), json!({"capacity": "48MiB"}))
        .unwrap()
        .close();
    let lines = lines_with(dir.path().to_str().unwrap());
    let said = |line: &String| line.contains("48 MiB") && line.contains("64 MiB");
    assert!(lines.iter().any(said), "{lines:?}");
}

#[test]
fn a_depot_logs_how_its_directory_is_named_when_it_opens() {
    let _begun = lines_with("");
    let dir = tempfile::tempdir().unwrap();
    open(dir.path()).close();
    let lines = lines_with("depot open");
    let path = dir.path().to_str().unwrap();
    assert!(lines.iter().any(|line| line.contains(path)), "{lines:?}");
}

#[test]
fn blocks_that_cannot_be_stored_are_one_line_of_the_log() {
    let _begun = lines_with("");
    let dir = tempfile::tempdir().unwrap();
    let depot = open(dir.path());
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1], LEN), [true]);
    // No directory can be made again at the place of the one that is gone.
    let at = dir.path().join("posix");
    fs::remove_dir_all(&at).unwrap();
    fs::write(&at, b"").unwrap();
    for number in 2..12 {
        let numbers: Vec<u64> = (number * 10..number * 10 + 4).collect();
        let stored = put(&ns, &numbers, LEN);
        assert!(stored.iter().all(|stored| !stored), "{stored:?}");
    }
    let mut lines = lines_with("cannot store a block");
    lines.retain(|line| line.contains(at.to_str().unwrap()));
    assert_eq!(lines.len(), 1, "{lines:?}");
    depot.close();
}

#[test]
fn block_files_that_cannot_be_read_are_one_line_of_the_log() {
    let _begun = lines_with("");
    let dir = tempfile::tempdir().unwrap();
    let depot = open(dir.path());
    let ns = namespace(&depot);
    let all: Vec<u64> = (0..20).collect();
    assert_eq!(put(&ns, &all, LEN), [true; 20]);
    // Links that are not followed.
    for file in files(dir.path()) {
        fs::remove_file(&file).unwrap();
        symlink(&file, &file).unwrap();
    }
    let found = get(&ns, &all, LEN);
    assert!(found.iter().all(|one| *one == Outcome::Miss), "{found:?}");
    let mut lines = lines_with("cannot read a block file");
    lines.retain(|line| line.contains(dir.path().to_str().unwrap()));
    assert_eq!(lines.len(), 1, "{lines:?}");
    depot.close();
}

#[test]
fn files_of_another_user_are_one_line_of_the_log() {
    let _begun = lines_with("");
    let dir = tempfile::tempdir().unwrap();
    let depot = open(dir.path());
    let ns = namespace(&depot);
    let all: Vec<u64> = (0..20).collect();
    assert_eq!(put(&ns, &all, LEN), [true; 20]);
    for file in files(dir.path()) {
        if std::os::unix::fs::chown(&file, Some(54_321), None).is_err() {
            println!("skipped: this process may not give files away");
            return;
        }
    }
    for _ in 0..5 {
        let found = get(&ns, &all, LEN);
        assert!(found.iter().all(|one| *one != Outcome::Done), "{found:?}");
    }
    // A machine that stands still for a minute has a second line.
    let lines = lines_with("54321");
    assert!((1..5).contains(&lines.len()), "{lines:?}");
    depot.close();
}
