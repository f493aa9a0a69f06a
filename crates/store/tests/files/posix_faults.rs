//! File systems that fail under the tier `Posix`, and what else happens to its directory: what was
//! not written whole is not stored, and once the fault has ended the tier works as before, with
//! nothing counted that is not there.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::Path;

use crate::common::{self, eventually, get, has, keys, namespace, put};
use crate::folder::{LEN, ROOM, at_rest, counted, files, open, open_with, try_open, used};
use crate::fuse;
use crate::realm;
use crate::realm::User;
use kvdepot_host::dir::{Access, Dir};
use kvdepot_host::lock::{self, Kind};
use kvdepot_store::{Config, Depot, Outcome};
use kvdepot_testkit::child::{self, Child};
use rustix::process::{Resource, Rlimit};
use serde_json::json;

/// More than a process may have in files without a name.
const LONG: usize = 512 << 10;

/// That nothing is held in a depot, and after its end counted, but what is there.
fn close(depot: &Depot, at: &Path) {
    at_rest(depot);
    depot.close();
    assert_eq!(counted(at), used(at), "counted, and there");
    assert_eq!(fs::read_dir(at.join("posix/new")).unwrap().count(), 0);
}

/// Puts blocks one after the other; those that were acknowledged.
fn put_each(depot: &Depot, numbers: std::ops::Range<u64>) -> Vec<u64> {
    let ns = namespace(depot);
    numbers
        .filter(|number| put(&ns, &[*number], LEN) == [true])
        .collect()
}

#[test]
fn a_file_system_that_is_full_before_the_capacity_keeps_the_newest() {
    const TEST: &str =
        "posix_faults::a_file_system_that_is_full_before_the_capacity_keeps_the_newest";
    for (at, how) in [("bytes", "size=6m"), ("inodes", "size=64m,nr_inodes=402")] {
        if child::role().is_some_and(|role| role != at) {
            continue;
        }
        realm::on((TEST, at), User::Root, "tmpfs", how, |at| {
            let depot = open_with("Posix", at, json!({"fan_out": 16}));
            let stored = put_each(&depot, 0..600);
            assert!(stored.len() > 500, "{} of 600", stored.len());
            let ns = namespace(&depot);
            let newest = &stored[stored.len() - 20..];
            assert!(has(&ns, newest, LEN));
            assert!(get(&ns, &stored, LEN).contains(&Outcome::Miss));
            assert!(depot.stats().tiers[0].evicted_blocks > 0);
            close(&depot, at);
            // Nothing of it may go: it is refused, and works again when there is room.
            let free = kvdepot_host::limits::disk_free(at).unwrap();
            let depot = open_with("Posix", at, json!({"fan_out": 16}));
            assert!(namespace(&depot).clear().unwrap() > 20);
            let others: Vec<_> = (0..)
                .map(|number| at.join(format!("other-{number}")))
                .take(600)
                .take_while(|path| fs::write(path, vec![1; 64 << 10]).is_ok())
                .collect();
            assert_eq!(
                put(&namespace(&depot), &[1000], LEN),
                [false],
                "{free} were free"
            );
            assert_eq!(get(&namespace(&depot), &[1000], LEN), [Outcome::Miss]);
            for path in fs::read_dir(at).unwrap().map(|entry| entry.unwrap().path()) {
                if path.is_file() {
                    fs::remove_file(path).unwrap();
                }
            }
            assert!(!others.is_empty());
            assert_eq!(put(&namespace(&depot), &[1000], LEN), [true]);
            close(&depot, at);
        });
    }
}

/// Which calls fail with what, and after how many.
const FAILURES: [(&str, i32, usize); 16] = [
    ("write", libc::EIO, 0),
    ("write", libc::EIO, 3),
    ("fsync", libc::EIO, 0),
    ("fsyncdir", libc::EIO, 0),
    ("rename", libc::EIO, 0),
    ("create", libc::EIO, 0),
    ("write", libc::ENOSPC, 0),
    ("write", libc::ENOSPC, 1),
    ("fallocate", libc::ENOSPC, 0),
    ("create", libc::EDQUOT, 0),
    ("mkdir rename", libc::ENOSPC, 0),
    ("fsync", libc::ENOSPC, 0),
    // As after an error of the medium.
    (
        "write create mkdir rename unlink setattr fallocate",
        libc::EROFS,
        0,
    ),
    (
        "lookup getattr open read write create rename fsync mkdir",
        libc::ESTALE,
        0,
    ),
    ("lookup open create rename mkdir", libc::EACCES, 0),
    (
        "lookup open read write create rename fsync mkdir",
        libc::EIO,
        0,
    ),
];

#[test]
fn what_fails_on_its_way_is_not_stored_and_the_tier_works_once_the_fault_has_ended() {
    let test = concat!(
        "posix_faults::",
        "what_fails_on_its_way_is_not_stored_and_the_tier_works_once_the_fault_has_ended"
    );
    fuse::over(test, |mounted| {
        let at = &mounted.dir;
        let mut next = 0;
        for (calls, errno, passed) in FAILURES {
            let what = format!("{calls}: {errno}, after {passed}");
            for pipeline in ["Posix", "Cache|Posix"] {
                next += 100;
                let depot = open_with(pipeline, at, json!({"durability": "power"}));
                let ns = namespace(&depot);
                let before = [next, next + 1];
                assert_eq!(put(&ns, &before, LEN), [true; 2], "{what}");
                mounted.fail_after(passed, calls, errno);
                // One after the other, so that each of them meets the fault.
                let new: Vec<u64> = (next + 10..next + 15).collect();
                let stored: Vec<bool> = new.iter().map(|one| put(&ns, &[*one], LEN)[0]).collect();
                assert!(stored.contains(&false), "{what}: {stored:?}");
                mounted.calm();
                let acknowledged = new.iter().zip(&stored).filter(|(_, stored)| **stored);
                for (number, _) in acknowledged {
                    assert!(
                        has(&ns, &[*number], LEN),
                        "{what}: {number} was acknowledged"
                    );
                }
                assert!(has(&ns, &before, LEN), "{what}");
                at_rest(&depot);
                depot.close();
                // What a nearer tier still had is gone now: what was acknowledged is in a file.
                let depot = open_with(pipeline, at, json!({"durability": "power"}));
                let ns = namespace(&depot);
                let acknowledged = new.iter().zip(&stored).filter(|(_, stored)| **stored);
                let acknowledged: Vec<u64> = acknowledged.map(|(number, _)| *number).collect();
                assert!(has(&ns, &acknowledged, LEN), "{what}, opened again");
                assert!(has(&ns, &before, LEN), "{what}, opened again");
                eventually("a put that is stored", || put(&ns, &new, LEN) == [true; 5]);
                assert!(has(&ns, &new, LEN), "{what}");
                at_rest(&depot);
                depot.close();
                let depot = open(at);
                assert!(
                    has(&namespace(&depot), &new, LEN),
                    "{what}, opened once more"
                );
                close(&depot, at);
            }
        }
    });
}

#[test]
fn what_gets_no_name_is_not_stored_and_nothing_of_it_stays() {
    const TEST: &str = "posix_faults::what_gets_no_name_is_not_stored_and_nothing_of_it_stays";
    if child::role().is_none() {
        for errno in [libc::ENOSPC, libc::EDQUOT, libc::EIO, libc::EACCES] {
            let dir = tempfile::tempdir().unwrap();
            let plain = Dir::open(dir.path()).unwrap();
            if !plain.links_unnamed() || plain.unnamed(false).unwrap().is_none() {
                println!("skipped: there are no files without a name");
                return;
            }
            let (at, errno) = (dir.path().to_str().unwrap(), errno.to_string());
            let mut child = Child::start(TEST, "refused", &[("at", at), ("errno", &errno)]);
            let said = child.line().expect("the body has failed");
            if let Some(number) = said.strip_prefix("no filter: ") {
                let error = std::io::Error::from_raw_os_error(number.parse().unwrap());
                return realm::skip("a filter of calls", &error);
            }
            assert_eq!(said, "done");
            let depot = open(dir.path());
            let ns = namespace(&depot);
            assert!(has(&ns, &[1], LEN) && has(&ns, &[3], LONG), "{errno}");
            assert_eq!(put(&ns, &[2], LEN), [true], "{errno}");
            close(&depot, dir.path());
        }
        return;
    }
    let at = child::value("at");
    let (at, errno) = (Path::new(&at), child::value("errno").parse().unwrap());
    let depot = open(at);
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1], LEN), [true]);
    if let Err(error) = realm::refuse(libc::SYS_linkat, errno) {
        let number = error.raw_os_error().unwrap();
        return child::say(&format!("no filter: {number}"));
    }
    assert_eq!(put(&ns, &[2], LEN), [false]);
    assert_eq!(get(&ns, &[2], LEN), [Outcome::Miss]);
    // Where it fails by itself, files have names from then on.
    assert_eq!(put(&ns, &[2], LEN), [errno == libc::EACCES]);
    assert!(has(&ns, &[1], LEN));
    assert_eq!(
        put(&ns, &[3], LONG),
        [true],
        "it has a name while it is written"
    );
    ns.remove(&keys([2])).unwrap();
    close(&depot, at);
    child::say("done");
}

#[test]
fn a_read_that_fails_is_a_miss_and_the_block_stays() {
    let test = "posix_faults::a_read_that_fails_is_a_miss_and_the_block_stays";
    fuse::over(test, |mounted| {
        for (calls, errno, passed) in [
            ("read", libc::EIO, 0),
            ("read", libc::EIO, 1),
            ("open", libc::ESTALE, 0),
            ("lookup", libc::EACCES, 0),
        ] {
            let what = format!("{calls}: {errno}, after {passed}");
            let depot = open(&mounted.dir);
            let ns = namespace(&depot);
            assert_eq!(put(&ns, &[1], LEN), [true], "{what}");
            mounted.fail_after(passed, calls, errno);
            assert_ne!(get(&ns, &[1], LEN), [Outcome::Done], "{what}");
            mounted.calm();
            eventually("a hit", || has(&ns, &[1], LEN));
            close(&depot, &mounted.dir);
        }
    });
}

#[test]
fn without_the_right_to_enter_it_the_directory_is_left_alone_until_that_is_back() {
    let test = concat!(
        "posix_faults::",
        "without_the_right_to_enter_it_the_directory_is_left_alone_until_that_is_back"
    );
    realm::on(
        (test, "plain"),
        User::Plain,
        "tmpfs",
        "size=64m,mode=777",
        |at| {
            let depot = open(at);
            let ns = namespace(&depot);
            assert_eq!(put(&ns, &[1], LEN), [true]);
            let mine = fs::read_dir(at.join("posix/new")).unwrap().next();
            let mine = mine.unwrap().unwrap().path();
            let blocks = at.join("posix/blocks");
            // Long ones are written there under a name.
            let cases = [(10, blocks, 0, LEN), (11, mine, 0o500, LONG)];
            for (number, folder, mode, len) in cases {
                let rights =
                    |mode| fs::set_permissions(&folder, Permissions::from_mode(mode)).unwrap();
                rights(mode);
                assert_eq!(put(&ns, &[number], len), [false]);
                assert_eq!(get(&ns, &[number], len), [Outcome::Miss]);
                rights(0o700);
                assert_eq!(put(&ns, &[number], len), [true]);
                assert!(has(&ns, &[1], LEN) && has(&ns, &[number], len));
            }
            close(&depot, at);
        },
    );
}

#[test]
fn a_directory_that_is_removed_is_opened_again() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let (depot, other) = (open(at), open_with("Cache|Posix", at, json!({})));
    let (ns, there) = (namespace(&depot), namespace(&other));
    assert_eq!(put(&ns, &[1], LEN), [true]);
    for made_again in [false, true] {
        fs::remove_dir_all(at.join("posix")).unwrap();
        if made_again {
            fs::create_dir(at.join("posix")).unwrap();
        }
        assert_eq!(get(&ns, &[7], LEN), [Outcome::Miss]);
        eventually("a put that is stored", || put(&ns, &[7], LEN) == [true]);
        eventually("another's", || put(&there, &[8], LEN) == [true]);
        assert!(has(&ns, &[7, 8], LEN) && has(&there, &[7, 8], LEN));
        assert_eq!(files(at).len(), 2);
        assert_eq!(ns.remove(&keys([7, 8])).unwrap(), 2);
    }
    other.close();
    depot.close();
    // What was there before the first look counts until the next one.
    assert_eq!(fs::read_dir(at.join("posix/new")).unwrap().count(), 0);
}

#[test]
fn links_in_the_fan_out_lead_nowhere_and_files_of_others_are_misses() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let depot = open(at);
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1], LEN), [true]);
    let file = files(at).remove(0);
    let folder = file.parent().unwrap();
    // The same block, outside.
    fs::rename(folder, at.join("outside")).unwrap();
    symlink(at.join("outside"), folder).unwrap();
    depot.close();
    let depot = open(at);
    let ns = namespace(&depot);
    assert_eq!(get(&ns, &[1], LEN), [Outcome::Miss]);
    assert_eq!(put(&ns, &[1], LEN), [false]);
    let outside = fs::read_dir(at.join("outside")).unwrap().count();
    assert_eq!(outside, 1, "nothing is written or removed there");
    fs::remove_file(folder).unwrap();
    assert_eq!(put(&ns, &[1], LEN), [true]);
    assert!(has(&ns, &[1], LEN));
    depot.close();
    // Only a privileged user gives files away.
    if let Err(error) = chown(files(at).remove(0), Some(12_345), None) {
        println!("skipped: this process may not give files away: {error}");
        return;
    }
    let depot = open(at);
    let ns = namespace(&depot);
    assert_eq!(get(&ns, &[1], LEN), [Outcome::Miss]);
    // It is not there to be replaced, and nobody is told that the block is stored.
    assert_eq!(put(&ns, &[1], LEN), [false]);
    depot.close();
}

#[test]
fn blocks_of_another_user_are_refused_at_open_and_the_error_names_both() {
    let dir = tempfile::tempdir().unwrap();
    open(dir.path()).close();
    let blocks = dir.path().join("posix/blocks");
    // Only a privileged user gives folders away.
    if let Err(error) = chown(&blocks, Some(12_345), None) {
        println!("skipped: this process may not give folders away: {error}");
        return;
    }
    let refused = try_open("Posix", dir.path(), json!({})).err().unwrap();
    let (text, own) = (refused.to_string(), rustix::process::geteuid().as_raw());
    for said in ["posix.path", "uid 12345", &format!("uid {own}")] {
        assert!(text.contains(said), "{text}");
    }
}

#[test]
fn where_the_file_system_gives_all_files_to_one_user_that_users_are_blocks() {
    const TEST: &str =
        "posix_faults::where_the_file_system_gives_all_files_to_one_user_that_users_are_blocks";
    // It needs two users: who may not mount without a namespace of users has one alone.
    fuse::over_by(TEST, User::Same, |mounted| {
        mounted.owned_by(12_345);
        for _ in 0..2 {
            let depot = open(&mounted.dir);
            let ns = namespace(&depot);
            assert_eq!(put(&ns, &[1, 2], LEN), [true, true]);
            assert_eq!(ns.prefix(&keys([1, 2, 3])).unwrap(), 2);
            assert!(has(&ns, &[1, 2], LEN));
            depot.close();
        }
    });
}

#[test]
fn who_names_another_fan_out_is_refused_and_another_capacity_is_noted() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let settings = || fs::read_to_string(at.join("posix/settings")).unwrap();
    let depot = open_with("Posix", at, json!({"fan_out": 16}));
    assert_eq!(
        settings(),
        "kvdepot posix 1\ncapacity 67108864\nfan_out 16\n"
    );
    let error = try_open("Posix", at, json!({"fan_out": 17}))
        .err()
        .unwrap()
        .to_string();
    for said in ["posix.fan_out", "17", "16", "settings"] {
        assert!(error.contains(said), "{error}");
    }
    // While others are there theirs stays; who is alone says what holds.
    let more = json!({"fan_out": 16, "capacity": "128MiB"});
    try_open("Posix", at, more.clone()).unwrap().close();
    assert!(settings().contains("67108864"));
    depot.close();
    try_open("Posix", at, more).unwrap().close();
    assert!(settings().contains("134217728"));
    // A broken one is written anew.
    fs::write(at.join("posix/settings"), "capacity\0").unwrap();
    open_with("Posix", at, json!({"fan_out": 32})).close();
    assert!(settings().contains("fan_out 32"));
}

#[test]
fn one_who_collects_and_is_stopped_is_passed_by() {
    const CAPACITY: u64 = 4 << 20;
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let depot = open_with("Posix", at, json!({"capacity": CAPACITY}));
    // As a process has it that was stopped while it collected.
    let usage = Dir::open(&at.join("posix"))
        .unwrap()
        .open_at("usage", Access::Write);
    let usage = usage.unwrap().unwrap();
    eventually("the lock", || {
        lock::try_lock(&usage, 1, Kind::Exclusive).unwrap()
    });
    let all = CAPACITY / ROOM * 3;
    eventually("room", || put_each(&depot, 0..all).len() as u64 > all / 2);
    let stored = put_each(&depot, 1000..1000 + all);
    assert_eq!(stored.len() as u64, all, "all the time");
    assert!(used(at) <= CAPACITY);
    depot.close();
}

#[test]
fn two_processes_that_write_the_same_blocks_both_do_and_each_is_counted_once() {
    const TEST: &str =
        "posix_faults::two_processes_that_write_the_same_blocks_both_do_and_each_is_counted_once";
    if let Some(role) = child::role() {
        assert_eq!(role, "writer");
        let depot = open(Path::new(&child::value("at")));
        child::say("open");
        let stored = put_each(&depot, 0..300);
        child::say(&format!("{}", stored.len()));
        depot.close();
        return child::say("closed");
    }
    let dir = tempfile::tempdir().unwrap();
    let at = [("at", dir.path().to_str().unwrap())];
    let mut writers = [0, 1].map(|_| Child::start(TEST, "writer", &at));
    writers.iter_mut().for_each(|writer| writer.expect("open"));
    writers.iter_mut().for_each(|writer| writer.expect("300"));
    writers
        .iter_mut()
        .for_each(|writer| writer.expect("closed"));
    assert_eq!(files(dir.path()).len(), 300);
    assert_eq!(used(dir.path()), 300 * ROOM);
    let depot = open(dir.path());
    assert!(has(&namespace(&depot), &(0..300).collect::<Vec<_>>(), LEN));
    close(&depot, dir.path());
}

#[test]
fn what_is_collected_while_it_is_read_comes_whole_or_not_at_all() {
    const TEST: &str = "posix_faults::what_is_collected_while_it_is_read_comes_whole_or_not_at_all";
    let small = || json!({"capacity": "4MiB"});
    if let Some(role) = child::role() {
        assert_eq!(role, "writer");
        let depot = open_with("Posix", Path::new(&child::value("at")), small());
        child::say("open");
        for number in (0..).step_by(4) {
            put_each(&depot, number..number + 4);
            child::say(&number.to_string());
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let at = [("at", dir.path().to_str().unwrap())];
    let mut writer = Child::start(TEST, "writer", &at);
    writer.expect("open");
    let depot = open_with("Posix", dir.path(), small());
    let ns = namespace(&depot);
    let (mut hits, mut misses) = (0, 0);
    while hits < 300 || misses < 300 {
        let written: u64 = writer.line().unwrap().parse().unwrap();
        let first = written.saturating_sub(80);
        for outcome in get(&ns, &(first..written + 4).collect::<Vec<_>>(), LEN) {
            match outcome {
                Outcome::Done => hits += 1,
                Outcome::Miss => misses += 1,
                other => panic!("{other:?}"),
            }
        }
    }
    writer.kill();
    at_rest(&depot);
    depot.close();
}

#[test]
fn pins_leave_the_process_half_of_its_descriptors() {
    const TEST: &str = "posix_faults::pins_leave_the_process_half_of_its_descriptors";
    const MOST: u64 = 200;
    if child::role().is_none() {
        let dir = tempfile::tempdir().unwrap();
        let at = [("at", dir.path().to_str().unwrap())];
        return Child::start(TEST, "limited", &at).expect("done");
    }
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let limit = Rlimit {
        current: Some(MOST),
        ..limit
    };
    rustix::process::setrlimit(Resource::Nofile, limit).unwrap();
    // Pins wait as long for files that others close.
    let soon = json!({"lookup_timeout": "5s"});
    let depot = open_with("Posix", Path::new(&child::value("at")), soon);
    let ns = namespace(&depot);
    assert_eq!(put_each(&depot, 0..300).len(), 300);
    let pins = common::pin_all(&ns, 0..300);
    assert!(
        (MOST as usize / 10..=MOST as usize / 8).contains(&pins.len()),
        "{}",
        pins.len()
    );
    drop(fs::File::open("/dev/null").unwrap());
    ns.unpin(&pins, false);
    eventually("the end of pins", || has(&ns, &[0, 150, 299], LEN));
    at_rest(&depot);
    depot.close();
    child::say("done");
}

#[test]
fn a_file_system_without_direct_io_is_refused_it_and_serves_without() {
    const TEST: &str =
        "posix_faults::a_file_system_without_direct_io_is_refused_it_and_serves_without";
    realm::on((TEST, "ramfs"), User::Root, "ramfs", "", |at| {
        let refused = try_open("Posix", at, json!({"direct": "true"}));
        let error = refused.err().unwrap().to_string();
        assert!(
            error.contains("posix.direct") && error.contains("auto"),
            "{error}"
        );
        for pipeline in ["Posix", "Nvme"] {
            let depot = open_with(pipeline, at, json!({"direct": "auto"}));
            let stored = put_each(&depot, 0..20);
            assert!(
                has(&namespace(&depot), &stored, LEN) && stored.len() == 20,
                "{pipeline}"
            );
            depot.close();
        }
    });
}

#[test]
fn a_3fs_is_told_to_settle_lengths_too() {
    const TEST: &str = "posix_faults::a_3fs_is_told_to_settle_lengths_too";
    fuse::over(TEST, |mounted| {
        mounted.fail("fdatasync", libc::EIO);
        for durability in ["process", "power"] {
            let section = json!({
                "path": mounted.dir.join(durability), "library": "posix", "capacity": "64MiB",
                "durability": durability,
            });
            let settings = json!({"ds3fs": section, "socket": "off"});
            let depot = Depot::open(&Config::new("Ds3fs", &settings).unwrap()).unwrap();
            let ns = namespace(&depot);
            for _ in 0..2 {
                // The second time it is there, and made to last by who did not write it.
                assert_eq!(put(&ns, &[1], LEN), [true], "{durability}");
            }
            assert!(has(&ns, &[1], LEN));
            depot.close();
        }
    });
}

#[test]
fn without_a_ring_threads_read_and_write() {
    const TEST: &str = "posix_faults::without_a_ring_threads_read_and_write";
    let threads = || -> Vec<String> {
        let tasks = fs::read_dir("/proc/self/task").unwrap();
        let names = tasks.map(|task| fs::read_to_string(task.unwrap().path().join("comm")));
        names.filter_map(Result::ok).collect()
    };
    if let Some(role) = child::role() {
        let has_ring = || {
            threads()
                .iter()
                .any(|name| name.starts_with("kvdepot-ring"))
        };
        for pipeline in ["Posix", "Nvme"] {
            let dir = tempfile::tempdir().unwrap();
            let depot = open_with(pipeline, dir.path(), json!({}));
            let stored = put_each(&depot, 0..20);
            assert!(has(&namespace(&depot), &stored, LEN) && stored.len() == 20);
            assert_eq!(has_ring(), role == "any", "{pipeline}");
            depot.close();
        }
        return child::say("done");
    }
    let refused = |command: &mut std::process::Command| {
        realm::refusing(command, libc::SYS_io_uring_setup, libc::EPERM);
    };
    match Child::try_start(TEST, "none", &[], refused) {
        Ok(mut child) => child.expect("done"),
        Err(error) => realm::skip("a filter of calls", &error),
    }
    if kvdepot_media::file::Hands::new(1)
        .unwrap()
        .refused()
        .is_none()
    {
        Child::start(TEST, "any", &[]).expect("done");
    }
}
