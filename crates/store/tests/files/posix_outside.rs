//! What others do to the directory of a tier `Posix`, and faults below a namespace that has a salt
//! and a key: no wrong byte, nothing that waits for ever, and what another tier has stays.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::common::{self, PATIENCE, eventually, get, keys, put};
use crate::folder::{LEN, at_rest, files, open, open_with};
use crate::fuse;
use kvdepot_store::{BlockBuffers, Buffer, Config, Depot, Namespace, NamespaceSpec, Outcome};
use serde_json::json;

/// A depot that authenticates the blocks of a tenant.
fn salted(pipeline: &str, at: &Path) -> (Depot, Namespace) {
    salted_beside(pipeline, at, at)
}

/// The same, with its arena in another directory, if it has one.
fn salted_beside(pipeline: &str, at: &Path, other: &Path) -> (Depot, Namespace) {
    // Elsewhere: what is mounted here knows no modes.
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("keys");
    fs::write(&file, format!("tenant {}\n", "7".repeat(64))).unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    let mut settings = json!({
        "lanes": 2, "close_timeout": "10s", "socket": "off", "mac_key_file": file,
        "lookup_timeout": "60s",
        "cache": {"capacity": "4MiB"},
        "dax": {"path": other.join("arena"), "capacity": "4MiB"},
        "posix": {"path": at.join("posix"), "capacity": "64MiB", "durability": "power"},
    });
    for (tier, section) in [("Cache", "cache"), ("Dax", "dax")] {
        if !pipeline.contains(tier) {
            settings.as_object_mut().unwrap().remove(section);
        }
    }
    let depot = Depot::open(&Config::new(pipeline, &settings).unwrap()).unwrap();
    let spec = NamespaceSpec {
        model: "m".into(),
        dtype: "float32".into(),
        block_tokens: 16,
        salt: Some("tenant".into()),
        ..NamespaceSpec::default()
    };
    let ns = depot.namespace(&spec).unwrap();
    (depot, ns)
}

#[test]
fn a_salted_namespace_loses_nothing_to_a_medium_that_fails() {
    let test = "posix_outside::a_salted_namespace_loses_nothing_to_a_medium_that_fails";
    fuse::over(test, |mounted| {
        let at = &mounted.dir;
        let mut next = 0;
        for (calls, errno, passed) in [
            ("write", libc::EIO, 2),
            ("fsync", libc::EIO, 0),
            ("write", libc::ENOSPC, 1),
            ("fallocate create", libc::ENOSPC, 0),
            ("read", libc::EIO, 0),
            ("lookup open read write create rename fsync", libc::EIO, 0),
        ] {
            for pipeline in ["Posix", "Cache|Posix"] {
                let what = format!("{calls}: {errno}, after {passed}, {pipeline}");
                next += 100;
                let (depot, ns) = salted(pipeline, at);
                let before = [next, next + 1];
                assert_eq!(put(&ns, &before, LEN), [true; 2], "{what}");
                mounted.fail_after(passed, calls, errno);
                let new: Vec<u64> = (next + 10..next + 14).collect();
                let stored: Vec<bool> = new.iter().map(|one| put(&ns, &[*one], LEN)[0]).collect();
                // Wrong bytes panic there.
                get(&ns, &before, LEN);
                get(&ns, &new, LEN);
                mounted.calm();
                let stored = new.iter().zip(stored).filter(|(_, stored)| *stored);
                let mut there: Vec<u64> = stored.map(|(number, _)| *number).collect();
                there.extend(before);
                eventually("what was acknowledged", || common::has(&ns, &there, LEN));
                at_rest(&depot);
                depot.close();
                let (depot, ns) = salted("Posix", at);
                assert!(common::has(&ns, &there, LEN), "{what}, opened again");
                eventually("a put that is stored", || put(&ns, &new, LEN) == [true; 4]);
                assert!(common::has(&ns, &new, LEN), "{what}");
                at_rest(&depot);
                depot.close();
            }
        }
    });
}

#[test]
fn what_an_arena_has_acknowledged_outlives_files_behind_it_that_fail() {
    let test = "posix_outside::what_an_arena_has_acknowledged_outlives_files_behind_it_that_fail";
    fuse::over(test, |mounted| {
        let at = &mounted.dir;
        let mut next = 0;
        for (calls, errno, passed) in [
            ("write", libc::EIO, 0),
            ("write", libc::ENOSPC, 1),
            ("fsync", libc::EIO, 0),
            ("fallocate create", libc::ENOSPC, 0),
            ("lookup open read write create rename fsync", libc::EIO, 0),
        ] {
            let what = format!("{calls}: {errno}, after {passed}");
            next += 100;
            let all: Vec<u64> = (next..next + 6).collect();
            let arena = tempfile::tempdir().unwrap();
            let (depot, ns) = salted_beside("Dax|Posix", at, arena.path());
            mounted.fail_after(passed, calls, errno);
            // One after the other, so that each of them meets the fault.
            for number in &all {
                assert_eq!(put(&ns, &[*number], LEN), [true], "{what}: {number}");
            }
            assert!(depot.drain(PATIENCE), "{what}");
            assert!(common::has(&ns, &all, LEN), "{what}");
            at_rest(&depot);
            depot.close();
            mounted.calm();
            let (depot, ns) = salted_beside("Dax|Posix", at, arena.path());
            assert!(common::has(&ns, &all, LEN), "{what}, opened again");
            at_rest(&depot);
            depot.close();
            // The files take blocks again, too.
            let (depot, ns) = salted("Posix", at);
            let new: Vec<u64> = (next + 10..next + 14).collect();
            eventually("a put that is stored", || put(&ns, &new, LEN) == [true; 4]);
            assert!(common::has(&ns, &new, LEN), "{what}, in files");
            at_rest(&depot);
            depot.close();
        }
    });
}

#[test]
fn files_that_somebody_removes_while_they_come_near_come_whole_or_not_at_all() {
    let test = concat!(
        "posix_outside::",
        "files_that_somebody_removes_while_they_come_near_come_whole_or_not_at_all"
    );
    fuse::over(test, |mounted| {
        let at = &mounted.dir;
        let all: Vec<u64> = (0..8).collect();
        // Of each file, its header is read first.
        for passed in [0, 3, 8] {
            let patience = || json!({"timeout": "60s", "lookup_timeout": "60s"});
            let depot = open_with("Posix", at, patience());
            let ns = common::namespace(&depot);
            eventually("a put that is stored", || put(&ns, &all, LEN) == [true; 8]);
            depot.close();
            let depot = open_with("Cache|Posix", at, patience());
            let ns = common::namespace(&depot);
            mounted.hang_after(passed, "read");
            let near = ns.prefetch(&keys(0..8)).unwrap();
            eventually("a read", || mounted.hanging() > 0);
            for file in files(at) {
                fs::remove_file(file).unwrap();
            }
            mounted.calm();
            let came = near.wait(Some(PATIENCE)).unwrap();
            // Wrong bytes panic there.
            let got = get(&ns, &all, LEN);
            for (number, (came, got)) in came.into_iter().zip(got).enumerate() {
                let what = format!("{number}, after {passed} reads: {got:?}");
                assert!(!came || got == Outcome::Done, "{what}");
            }
            ns.remove(&keys(0..8)).unwrap();
            at_rest(&depot);
            depot.close();
            assert_eq!(files(at).len(), 0);
        }
    });
}

#[test]
fn files_that_somebody_removes_are_read_to_their_end_or_missed() {
    for (pipeline, direct) in [
        ("Posix", "auto"),
        ("Posix", "false"),
        ("Cache|Posix", "auto"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let all: Vec<u64> = (0..8).collect();
        let depot = open(dir.path());
        assert_eq!(put(&common::namespace(&depot), &all, LEN), [true; 8]);
        depot.close();
        let depot = open_with(pipeline, dir.path(), json!({"direct": direct}));
        let ns = common::namespace(&depot);
        // Looked for, and some of them near already.
        assert_eq!(ns.prefix(&keys(0..8)).unwrap(), 8);
        let near = ns.prefetch(&keys(0..2)).unwrap();
        assert_eq!(near.wait(Some(PATIENCE)).unwrap(), [true; 2]);
        assert!(depot.drain(PATIENCE));
        // Asked for at once with their removal: each comes whole or not at all.
        let buffers: Vec<Buffer> = all.iter().map(|_| Buffer::from_vec(vec![0; LEN])).collect();
        let got = ns.get(keys(0..8), BlockBuffers::whole(buffers.clone()));
        let got = got.unwrap();
        files(dir.path())
            .iter()
            .for_each(|file| fs::remove_file(file).unwrap());
        got.wait(Some(PATIENCE)).unwrap();
        for ((number, buffer), outcome) in all.iter().zip(&buffers).zip(got.outcomes()) {
            let right = buffer.to_vec() == common::block(*number, LEN).to_vec();
            assert!(outcome != Outcome::Done || right, "{pipeline}: {number}");
        }
        // What another tier has stays; of the others a list says nothing, and nothing waits.
        let left = get(&ns, &all, LEN);
        if pipeline.contains("Cache") {
            assert_eq!(left[..2], [Outcome::Done; 2], "{left:?}");
        } else {
            assert_eq!(left, [Outcome::Miss; 8]);
        }
        let task = ns.prefetch(&keys(0..8)).unwrap();
        task.wait(Some(PATIENCE)).unwrap();
        assert_eq!(files(dir.path()).len(), 0);
        // All of it can be written again.
        ns.remove(&keys(0..8)).unwrap();
        eventually("a put that is stored", || put(&ns, &all, LEN) == [true; 8]);
        assert!(common::has(&ns, &all, LEN), "{pipeline}");
        assert_eq!(ns.blocks().unwrap().len(), 8);
        at_rest(&depot);
        depot.close();
        assert_eq!(files(dir.path()).len(), 8);
    }
}

#[test]
fn files_that_go_while_they_are_listed_are_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let all: Vec<u64> = (0..200).collect();
    let depot = open(dir.path());
    let ns = common::namespace(&depot);
    assert!(put(&ns, &all, 100).iter().all(|stored| *stored));
    std::thread::scope(|scope| {
        let files = files(dir.path());
        let removing = scope.spawn(move || {
            for file in files.iter().skip(1) {
                fs::remove_file(file).unwrap();
            }
        });
        while !removing.is_finished() {
            assert!(ns.blocks().unwrap().len() <= 200);
        }
    });
    assert_eq!(ns.blocks().unwrap().len(), 1);
    let found = ns.contains(&keys(0..200)).unwrap();
    // What this process has written it believes in for some seconds, and a get is a miss.
    assert_eq!(found.len(), 200);
    let got = get(&ns, &all, 100);
    let done = got.iter().filter(|one| **one == Outcome::Done).count();
    assert_eq!(done, 1, "{got:?}");
    assert!(put(&ns, &all, 100).iter().all(|stored| *stored));
    assert!(common::has(&ns, &all, 100));
    at_rest(&depot);
    depot.close();
}
