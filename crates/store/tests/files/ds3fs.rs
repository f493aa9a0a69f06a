//! The tier `Ds3fs` over the double of 3FS's library (`crates/testkit/usrbio`), which really reads
//! and writes files through its rings. Each scenario is a process of its own: the double is told
//! by its environment what to do.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::common::{block, get, has, keys, namespace};
use kvdepot_store::{BlockBuffers, Config, Depot, Outcome};
use kvdepot_testkit::child::{self, Child};
use kvdepot_testkit::double;
use rustix::process::{Resource, getrlimit, setrlimit};
use serde_json::{Value, json};

const TEST: &str = "ds3fs::what_is_acknowledged_is_whole_whatever_the_rings_do";

/// Blocks of a scenario, and their lengths in turn.
const BLOCKS: u64 = 24;
const LENS: [usize; 6] = [1, 4096, 70_001, (1 << 20) + 3, 5 << 20, 8191];

/// Descriptors that a process may have, where there are few.
const FEW: u64 = 256;

fn len(number: u64) -> usize {
    LENS[number as usize % LENS.len()]
}

fn library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| double::build("usrbio"))
}

/// Whether the double loses results, whose time has to be over.
fn loses() -> bool {
    std::env::var_os("KVDEPOT_DOUBLE_3FS_LOSE").is_some()
}

fn try_open(mount: &Path, options: Value) -> Result<Depot, kvdepot_store::Error> {
    // Where nothing is lost, nothing is late: a machine may stand still.
    let [lookup, other] = if loses() {
        ["1s", "2s"]
    } else {
        ["60s", "60s"]
    };
    let mut section = json!({
        "path": mount.join("kv"), "capacity": "256MiB", "lookup_timeout": lookup,
        "timeout": other, "stream_number": 2,
    });
    for (name, value) in options.as_object().unwrap() {
        section[name] = value.clone();
    }
    let settings = json!({"lanes": 2, "socket": "off", "close_timeout": "5s", "ds3fs": section});
    Depot::open(&Config::new("Ds3fs", &settings)?)
}

/// What a child does: `write` says which blocks are acknowledged, `read` which are whole,
/// `few` how many descriptors it has at most where it may have few, and `churn` writes until it is
/// killed.
fn work(role: &str) {
    let mount = PathBuf::from(child::value("mount"));
    let more = json!({"library": child::value("library")});
    // The daemon takes those of processes that are gone, which the double leaves.
    let links = || {
        let found = std::fs::read_dir(mount.join("3fs-virt/iovs"));
        found.map_or(0, Iterator::count)
    };
    let before = links();
    if role == "few" {
        let mut limit = getrlimit(Resource::Nofile);
        limit.current = Some(FEW);
        setrlimit(Resource::Nofile, limit).unwrap();
    }
    let depot = try_open(&mount, more).unwrap();
    let ns = namespace(&depot);
    let numbers: Vec<u64> = (0..BLOCKS).collect();
    let list = |of: &[u64]| {
        of.iter()
            .map(|number| format!("{number} "))
            .collect::<String>()
    };
    match role {
        "write" => {
            let blocks = numbers.iter().map(|number| block(*number, len(*number)));
            let blocks = BlockBuffers::whole(blocks);
            let task = ns.put(keys(numbers.iter().copied()), blocks).unwrap();
            let stored = task.wait(Some(Duration::from_secs(60))).unwrap();
            let stored = numbers.iter().zip(stored).filter(|(_, stored)| *stored);
            let stored: Vec<u64> = stored.map(|(number, _)| *number).collect();
            child::say(&list(&stored));
        }
        "read" => {
            // Wrong bytes panic.
            let is_whole = |number: &&u64| get(&ns, &[**number], len(**number)) == [Outcome::Done];
            let whole: Vec<u64> = numbers.iter().filter(is_whole).copied().collect();
            child::say(&list(&whole));
        }
        "few" => {
            let blocks = BlockBuffers::whole((0..200).map(|number| block(number, 70_001)));
            let task = ns.put(keys(0..200), blocks).unwrap();
            let mut most = 0;
            while !task.is_done() {
                // None could be had to count them.
                let open = std::fs::read_dir("/proc/self/fd").map_or(FEW as usize, Iterator::count);
                most = most.max(open);
            }
            child::say(&most.to_string());
        }
        _ => {
            for number in 100.. {
                let stored = ns.put(
                    keys([number]),
                    BlockBuffers::whole(vec![block(number, 70_001)]),
                );
                if stored.unwrap().wait(Some(Duration::from_secs(60))).unwrap() == [true] {
                    child::say(&number.to_string());
                }
            }
        }
    }
    let begun = Instant::now();
    depot.close();
    assert!(
        begun.elapsed() < crate::common::PATIENCE,
        "a close waits for its rings"
    );
    // No memory stays known to 3FS, when nothing is lost. A file is closed by a thread.
    while links() > before && begun.elapsed() < crate::common::PATIENCE && !loses() {
        std::thread::sleep(Duration::from_millis(10));
    }
    // Those of a process that was killed may have gone meanwhile.
    child::say(&format!("closed, {} left", links().saturating_sub(before)));
}

fn start(mount: &Path, role: &str, faults: &[(&str, &str)]) -> Child {
    let values = [
        ("mount", mount.to_str().unwrap()),
        ("library", library().to_str().unwrap()),
    ];
    let prepare = |command: &mut std::process::Command| {
        command.env("KVDEPOT_DOUBLE_3FS", mount);
        for (name, value) in faults {
            command.env(format!("KVDEPOT_DOUBLE_3FS_{name}"), value);
        }
    };
    Child::try_start(TEST, role, &values, prepare).unwrap()
}

/// What a child says of blocks.
fn said(mount: &Path, role: &str, faults: &[(&str, &str)]) -> Vec<u64> {
    let mut child = start(mount, role, faults);
    let line = child
        .line()
        .unwrap_or_else(|| panic!("{role} with {faults:?} said nothing"));
    let left = child.line().unwrap();
    let lost = faults.iter().any(|(fault, _)| *fault == "LOSE");
    assert!(
        left == "closed, 0 left" || lost,
        "{role} with {faults:?}: {left}"
    );
    // Waiting closes its input, which ends it.
    while child.line().is_some() {}
    assert!(child.wait().success(), "{role} with {faults:?}");
    let numbers = line.split_whitespace();
    numbers.map(|number| number.parse().unwrap()).collect()
}

#[test]
fn what_is_acknowledged_is_whole_whatever_the_rings_do() {
    if let Some(role) = child::role() {
        return work(&role);
    }
    let all: Vec<u64> = (0..BLOCKS).collect();
    // Faults, whether everything goes well in spite of them, and whether some must not.
    let cases: [(&[(&str, &str)], bool); 8] = [
        (&[], true),
        (&[("REORDER", "1"), ("DELAY_US", "300")], true),
        (&[("SHORT_ALL", "100000")], true),
        (&[("FULL", "1")], true),
        // Slabs are not taken: all bytes are copied once more.
        (&[("REFUSE", "1")], true),
        (&[("FAIL", "3"), ("ERRNO", "5")], false),
        (&[("FAIL", "7"), ("ERRNO", "28")], false),
        (&[("LOSE", "4")], false),
    ];
    // Each has processes of its own, and waits for time-outs.
    let run = |(faults, harmless): (&[(&str, &str)], bool)| {
        let mount = tempfile::tempdir().unwrap();
        let mount = mount.path();
        let stored = said(mount, "write", faults);
        assert!(
            stored == all || !harmless,
            "{faults:?}: only {stored:?} are stored"
        );
        assert!(
            stored.len() < all.len() || harmless,
            "{faults:?}: nothing has failed"
        );
        let found = said(mount, "read", &[]);
        assert_eq!(found, stored, "written with {faults:?}");
        let found = said(mount, "read", faults);
        assert!(
            found == stored || !harmless,
            "{faults:?}: only {found:?} are read"
        );
        // What could not be read is there all the same.
        assert_eq!(
            said(mount, "read", &[]),
            stored,
            "after reads with {faults:?}"
        );
    };
    for some in cases.chunks(4) {
        std::thread::scope(|scope| {
            for case in some {
                scope.spawn(|| run(*case));
            }
        });
    }
}

/// 3FS's library has a descriptor of its own of each file.
#[test]
fn files_take_half_of_the_descriptors_that_the_process_may_have() {
    let mount = tempfile::tempdir().unwrap();
    let most = said(mount.path(), "few", &[("DELAY_US", "3000")]);
    // And a few that have nothing to do with files.
    assert!(most[0] < FEW * 3 / 4, "{most:?} of {FEW}");
}

#[test]
fn a_writer_that_is_killed_loses_nothing_that_it_was_told() {
    let mount = tempfile::tempdir().unwrap();
    let mut writer = start(mount.path(), "churn", &[("DELAY_US", "200")]);
    let told: Vec<u64> = (0..20)
        .map(|_| writer.line().unwrap().parse().unwrap())
        .collect();
    writer.kill();
    // By the mount: what a sharer without the library sees.
    let depot = try_open(mount.path(), json!({"library": "posix"})).unwrap();
    let ns = namespace(&depot);
    assert!(told.iter().all(|number| has(&ns, &[*number], 70_001)));
    depot.close();
}

/// What the next process does not take away, 3FS's daemon keeps mapped.
#[test]
fn the_slab_of_a_writer_that_is_killed_is_made_unknown_by_the_next() {
    let mount = tempfile::tempdir().unwrap();
    let slabs = || {
        let links = std::fs::read_dir(mount.path().join("3fs-virt/iovs")).unwrap();
        let leads = links.map(|link| std::fs::read_link(link.unwrap().path()).unwrap());
        let is_slab = |to: &PathBuf| to.to_string_lossy().starts_with("/dev/shm/kvdepot-slab-");
        leads.filter(is_slab).count()
    };
    let mut writer = start(mount.path(), "churn", &[]);
    writer.line().unwrap();
    writer.kill();
    assert_eq!(slabs(), 1, "it was killed while it had one");
    let mut other = start(mount.path(), "churn", &[]);
    other.line().unwrap();
    assert_eq!(slabs(), 1, "one lives");
    let all: Vec<u64> = (0..BLOCKS).collect();
    assert_eq!(said(mount.path(), "write", &[]), all);
    assert_eq!(slabs(), 1, "who lives keeps its own");
    other.line().unwrap();
    other.kill();
}

#[test]
fn a_library_or_a_mount_that_is_not_there_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |library: Value| {
        let opened = try_open(dir.path(), json!({ "library": library }));
        opened.map(drop).unwrap_err().to_string()
    };
    let missing = refused("libhf3fs_none.so".into());
    for part in [
        "ds3fs.library",
        "libhf3fs_none.so",
        "hf3fs_api_shared",
        "posix",
    ] {
        assert!(missing.contains(part), "{missing}");
    }
    // This process has not told the double where its 3FS is.
    let elsewhere = refused(library().to_str().unwrap().into());
    assert!(elsewhere.contains("ds3fs.library"), "{elsewhere}");
    for (name, value, says) in [
        ("stream_number", 65, "ds3fs.stream_number"),
        ("running_queue_depth", 1 << 20, "ds3fs.running_queue_depth"),
        ("fan_out", 5000, "ds3fs.fan_out"),
    ] {
        let error = try_open(dir.path(), json!({ name: value }))
            .map(drop)
            .unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
    }
}
