//! Tiers on disks, and other processes that read and write them by themselves.

use std::path::Path;
use std::time::Duration;

use crate::common::{PATIENCE, eventually, get, has, key, keys, namespace, put, start_put};
use kvdepot_service::Mover;
use kvdepot_store::{
    BlockBuffers, Buffer, Checksum, Config, Depot, Namespace, Outcome, Reservation,
};
use kvdepot_testkit::bytes::content;
use serde_json::json;

const LEN: usize = 70_001;

const SHORT: Duration = Duration::from_millis(50);

fn serve(home: &Path, pipeline: &str) -> Depot {
    // A lookup may take longer than a machine stands still.
    let mut settings = json!({
        "lanes": 2, "close_timeout": "10s", "lookup_timeout": "60s", "socket": home.join("s"),
    });
    for tier in pipeline.split('|') {
        settings[tier.to_ascii_lowercase()] = match tier {
            "Cache" => json!({"capacity": "1MiB"}),
            _ => json!({"path": home.join(tier), "capacity": "16MiB"}),
        };
    }
    kvdepot_service::open(&Config::new(pipeline, &settings).unwrap()).unwrap()
}

#[test]
fn clients_and_workers_move_blocks_of_tiers_on_disks() {
    for pipeline in [
        "Nvme",
        "Cache|Nvme",
        "Posix",
        "Cache|Posix",
        "Cache|Nvme|Posix",
        "Dax|Nvme",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path();
        let all: Vec<u64> = (0..40).collect();
        let owner = serve(home, pipeline);
        let client = kvdepot_service::connect(&home.join("s"), Some(2)).unwrap();
        let there = namespace(&client);
        assert!(put(&there, &all, LEN).iter().all(|ok| *ok), "{pipeline}");
        client.close();
        assert!(owner.drain(PATIENCE));
        owner.close();
        let owner = serve(home, pipeline);
        let client = kvdepot_service::connect(&home.join("s"), Some(2)).unwrap();
        let worker = Mover::attach(&home.join("s"), Some(1), true).unwrap();
        let (there, here) = (namespace(&client), namespace(&owner));
        for ns in [&there, &here] {
            let pinned = ns.pin(&[key(7)], false).unwrap().remove(0).unwrap();
            let buffer = Buffer::from_vec(vec![0; LEN]);
            let buffers = BlockBuffers::whole([buffer.clone()]);
            let job = worker.load(&[pinned.placement()], &buffers, 0).unwrap();
            assert!(job.wait(Some(PATIENCE)));
            assert!(
                job.checksums()[0].is_some(),
                "{pipeline}: {:?}",
                job.error()
            );
            assert!(buffer.to_vec() == content(7, LEN), "{pipeline}");
            ns.unpin(&[pinned], false);
        }
        assert!(has(&there, &all, LEN), "{pipeline}");
        assert_eq!(get(&there, &[1, 99], LEN), [Outcome::Done, Outcome::Miss]);
        two_phase(pipeline, &there, &worker, 50);
        two_phase(pipeline, &here, &worker, 60);
        drop(worker);
        client.close();
        owner.close();
    }
}

fn store(worker: &Mover, reserved: &Reservation, part: u32, bytes: Vec<u8>) -> Checksum {
    let buffers = BlockBuffers::whole([Buffer::from_vec(bytes)]);
    let job = worker
        .store(&[reserved.placement()], &buffers, part)
        .unwrap();
    assert!(job.wait(Some(PATIENCE)));
    job.checksums()[0].unwrap_or_else(|| panic!("{:?}", job.error()))
}

/// A block of two parts, written and read by a worker.
fn two_phase(pipeline: &str, ns: &Namespace, worker: &Mover, number: u64) {
    let lens = vec![5000, LEN as u64];
    let reserved = ns.reserve(&[(key(number), lens.clone())]).unwrap();
    let reserved = reserved.into_iter().next().flatten().unwrap();
    let again = ns.reserve(&[(key(number), lens)]).unwrap();
    assert_eq!(again, [None], "{pipeline}: reserved twice");
    let sums = [(0, 5000), (1, LEN)]
        .map(|(part, len)| store(worker, &reserved, part as u32, content(number + part, len)));
    assert_eq!(ns.contains(&keys([number])).unwrap(), [false]);
    let committed = ns.commit(&[reserved], &[sums.to_vec()]).unwrap();
    assert_eq!(committed, [true], "{pipeline}");
    let pinned = ns.pin(&keys([number]), false).unwrap().remove(0).unwrap();
    for (part, len) in [(0, 5000), (1, LEN)] {
        let buffer = Buffer::from_vec(vec![0; len]);
        let buffers = BlockBuffers::whole([buffer.clone()]);
        let job = worker
            .load(&[pinned.placement()], &buffers, part as u32)
            .unwrap();
        assert!(job.wait(Some(PATIENCE)));
        assert!(buffer.to_vec() == content(number + part, len), "{pipeline}");
    }
    ns.unpin(&[pinned], false);
}

/// Files of a directory that nobody has published.
fn unfinished(home: &Path) -> usize {
    let folders = std::fs::read_dir(home.join("Posix/new")).unwrap();
    let each = folders.map(|folder| std::fs::read_dir(folder.unwrap().path()).unwrap());
    each.flatten()
        .filter(|file| file.as_ref().unwrap().file_name() != "alive")
        .count()
}

#[test]
fn reservations_in_files_end_with_whoever_has_them() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path();
    let owner = serve(home, "Posix");
    let client = kvdepot_service::connect(&home.join("s"), Some(1)).unwrap();
    let worker = Mover::attach(&home.join("s"), Some(1), true).unwrap();
    let (there, here) = (namespace(&client), namespace(&owner));
    let reserve = |ns: &Namespace, number| {
        let reserved = ns.reserve(&[(key(number), vec![LEN as u64])]).unwrap();
        reserved.into_iter().next().flatten().unwrap()
    };
    // Who puts the same block meanwhile waits for it, and shares its end or takes over.
    for (ns, other, number) in [(&here, &there, 1), (&there, &here, 2)] {
        let reserved = reserve(ns, number);
        let task = start_put(other, &[number], LEN);
        assert!(task.wait(Some(SHORT)).is_err());
        let sum = store(&worker, &reserved, 0, content(number, LEN));
        assert_eq!(ns.commit(&[reserved], &[vec![sum]]).unwrap(), [true]);
        task.wait(Some(PATIENCE)).unwrap();
        assert_eq!(task.outcomes(), [Outcome::Done]);
    }
    for (ns, other, number) in [(&here, &there, 3), (&there, &here, 4)] {
        let reserved = reserve(ns, number);
        let task = start_put(other, &[number], LEN);
        let _half = store(&worker, &reserved, 0, content(99, LEN));
        ns.abort(std::slice::from_ref(&reserved));
        task.wait(Some(PATIENCE)).unwrap();
        assert_eq!(task.outcomes(), [Outcome::Done]);
        assert_eq!(
            ns.commit(&[reserved], &[vec![Checksum::default()]])
                .unwrap(),
            [false]
        );
    }
    assert!(has(&here, &[1, 2, 3, 4], LEN) && has(&there, &[1, 2, 3, 4], LEN));
    eventually("what was given up is gone", || unfinished(home) == 0);
    // A client's end with it, and the others with the depot.
    let _left = reserve(&there, 5);
    let held = reserve(&here, 6);
    assert_eq!(unfinished(home), 2);
    client.close();
    eventually("a client that is gone holds nothing", || {
        unfinished(home) == 1
    });
    let task = start_put(&here, &[6], LEN);
    owner.close();
    task.wait(Some(PATIENCE)).unwrap();
    assert_eq!(task.outcomes(), [Outcome::Closed]);
    drop(held);
    assert_eq!(unfinished(home), 0);
    let owner = serve(home, "Posix");
    assert!(has(&namespace(&owner), &[1, 2, 3, 4], LEN));
    owner.close();
}

#[test]
fn a_directory_that_was_removed_is_opened_again_by_clients_too() {
    for whole in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path();
        let owner = serve(home, "Posix");
        let client = kvdepot_service::connect(&home.join("s"), Some(1)).unwrap();
        let (there, here) = (namespace(&client), namespace(&owner));
        assert_eq!(put(&there, &[1], LEN), [true]);
        let path = home.join("Posix");
        if whole {
            std::fs::remove_dir_all(&path).unwrap();
        } else {
            for entry in std::fs::read_dir(&path).unwrap() {
                let entry = entry.unwrap().path();
                match entry.is_dir() {
                    true => std::fs::remove_dir_all(entry).unwrap(),
                    false => std::fs::remove_file(entry).unwrap(),
                }
            }
        }
        eventually("a put", || put(&here, &[2], LEN) == [true]);
        eventually("a client's put", || put(&there, &[3], LEN) == [true]);
        assert!(has(&there, &[2, 3], LEN) && has(&here, &[2, 3], LEN));
        assert_eq!(get(&there, &[1], LEN), [Outcome::Miss]);
        client.close();
        owner.close();
        let owner = serve(home, "Posix");
        assert!(has(&namespace(&owner), &[2, 3], LEN));
        owner.close();
    }
}
