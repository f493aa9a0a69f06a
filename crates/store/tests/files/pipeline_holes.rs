//! What other stores of key-value cache were found to do wrong, each as a test: tiers in files, and
//! pipelines of them, do it right.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::common::{
    self, PATIENCE, block, eventually, get, has, key, keys, namespace, put, start_put,
};
use crate::folder::{LEN, at_once, at_rest, files, open, open_with, try_open, used};
use crate::realm;
use crate::realm::User;
use kvdepot_media::Checksum;
use kvdepot_store::{BlockBuffers, Buffer, Depot, Outcome};
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::child::{self, Child};
use serde_json::json;

/// With nothing near but what the far tier has.
fn cold(pipeline: &str, at: &Path) -> Depot {
    open_with(pipeline, at, json!({}))
}

/// Changes a bit of a block's payload.
fn rot(file: &Path, at: usize) {
    let mut bytes = fs::read(file).unwrap();
    bytes[at] ^= 4;
    fs::write(file, bytes).unwrap();
}

#[test]
fn corrupt_bytes_are_no_hit_in_any_stage() {
    for pipeline in ["Posix", "Cache|Posix", "Nvme", "Cache|Nvme"] {
        let dir = tempfile::tempdir().unwrap();
        let depot = cold(pipeline, dir.path());
        assert_eq!(put(&namespace(&depot), &[1], LEN), [true]);
        depot.close();
        match pipeline.contains("Nvme") {
            false => rot(&files(dir.path())[0], 50_000),
            true => {
                // Wherever it lies.
                let file = dir.path().join("nvme");
                let bytes = fs::read(&file).unwrap();
                let middle = &content(1, LEN)[40_000..40_064];
                let found = bytes.windows(64).position(|bytes| bytes == middle);
                rot(&file, found.unwrap());
            }
        }
        let depot = cold(pipeline, dir.path());
        let ns = namespace(&depot);
        assert_eq!(get(&ns, &[1], LEN), [Outcome::Corrupt], "{pipeline}");
        eventually("a miss", || get(&ns, &[1], LEN) == [Outcome::Miss]);
        assert_eq!(ns.contains(&[key(1)]).unwrap(), [false], "{pipeline}");
        assert_eq!(put(&ns, &[1], LEN), [true], "{pipeline}");
        assert!(has(&ns, &[1], LEN), "{pipeline}");
        depot.close();
    }
}

#[test]
fn a_block_without_all_of_its_parts_is_never_committed() {
    for pipeline in ["Nvme", "Cache|Nvme", "Posix", "Cache|Posix"] {
        let dir = tempfile::tempdir().unwrap();
        let depot = cold(pipeline, dir.path());
        let ns = namespace(&depot);
        let reserved = ns.reserve(&[(key(1), vec![4096, 4096])]).unwrap().remove(0);
        assert_eq!(
            ns.contains(&[key(1)]).unwrap(),
            [false],
            "not before its commit"
        );
        // Of one part nobody knows anything.
        let committed = ns.commit(&[reserved.unwrap()], &[vec![Checksum([7; 16])]]);
        assert!(
            committed.is_err() || committed.unwrap() == [false],
            "{pipeline}"
        );
        assert_eq!(get(&ns, &[1], 8192 + 4096), [Outcome::Miss], "{pipeline}");
        depot.close();
        let depot = cold(pipeline, dir.path());
        assert_eq!(namespace(&depot).contains(&[key(1)]).unwrap(), [false]);
        depot.close();
    }
}

#[test]
fn what_a_killed_writer_leaves_is_invisible_and_swept() {
    const TEST: &str = "pipeline_holes::what_a_killed_writer_leaves_is_invisible_and_swept";
    if let Some(role) = child::role() {
        assert_eq!(role, "writer");
        let depot = open(Path::new(&child::value("at")));
        let ns = namespace(&depot);
        child::say("open");
        for first in (0..).step_by(64) {
            let _unheard = start_put(&ns, &(first..first + 64).collect::<Vec<_>>(), LEN);
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let new = dir.path().join("posix/new");
    let at = [("at", dir.path().to_str().unwrap())];
    let left = || -> usize {
        let folders = fs::read_dir(&new).unwrap();
        folders
            .map(|one| fs::read_dir(one.unwrap().path()).unwrap().count() - 1)
            .sum()
    };
    for _ in 0..50 {
        let mut writer = Child::start(TEST, "writer", &at);
        writer.expect("open");
        eventually("a file that is being written", || left() > 0);
        writer.kill();
        if left() > 0 {
            break;
        }
    }
    assert!(left() > 0, "nothing was cut off");
    let depot = open(dir.path());
    let ns = namespace(&depot);
    // What is found is whole, and nothing of what was cut off is found.
    for (key, _) in ns.blocks().unwrap() {
        assert!(has(&ns, &[common::number(&key)], LEN));
    }
    depot.close();
    // As if some seconds had passed: it might have been starting.
    let then = SystemTime::now() - Duration::from_secs(60);
    for folder in fs::read_dir(&new).unwrap() {
        let alive = fs::File::options()
            .write(true)
            .open(folder.unwrap().path().join("alive"));
        alive.unwrap().set_modified(then).unwrap();
    }
    let depot = open(dir.path());
    eventually("the sweep", || fs::read_dir(&new).unwrap().count() == 1);
    depot.close();
}

#[test]
fn a_load_that_failed_is_no_hit_of_the_near_tier() {
    let dir = tempfile::tempdir().unwrap();
    let depot = cold("Cache|Posix", dir.path());
    assert_eq!(put(&namespace(&depot), &[1, 2], LEN), [true; 2]);
    depot.close();
    let all = files(dir.path());
    rot(&all[0], 50_000);
    fs::File::options()
        .write(true)
        .open(&all[1])
        .unwrap()
        .set_len(8192)
        .unwrap();
    let depot = cold("Cache|Posix", dir.path());
    let ns = namespace(&depot);
    for round in 0..3 {
        let found = get(&ns, &[1, 2], LEN);
        assert!(
            !found.contains(&Outcome::Done),
            "{found:?} in round {round}"
        );
    }
    assert!(depot.drain(PATIENCE));
    assert_eq!(ns.contains(&keys([1, 2])).unwrap(), [false; 2]);
    at_rest(&depot);
    depot.close();
}

#[test]
fn without_space_what_was_said_to_be_stored_is_and_nothing_else_is_found() {
    const TEST: &str =
        "pipeline_holes::without_space_what_was_said_to_be_stored_is_and_nothing_else_is_found";
    realm::on((TEST, "full"), User::Root, "tmpfs", "size=8m", |at| {
        let depot = cold("Cache|Posix", at);
        let ns = namespace(&depot);
        // Others have all but the room of some blocks.
        let free = kvdepot_host::limits::disk_free(at).unwrap();
        fs::write(at.join("others"), vec![1; free as usize - 600_000]).unwrap();
        let all: Vec<u64> = (0..32).collect();
        let task = start_put(&ns, &all, LEN);
        let stored = task.wait(Some(PATIENCE)).unwrap();
        for (outcome, stored) in task.outcomes().iter().zip(&stored) {
            assert_eq!(outcome.reason().is_none(), *stored, "{outcome:?}");
        }
        assert!(stored.contains(&false) || depot.stats().tiers[1].evicted_blocks > 0);
        depot.close();
        let depot = cold("Posix", at);
        let ns = namespace(&depot);
        let found = ns.contains(&keys(all.iter().copied())).unwrap();
        let there = get(&ns, &all, LEN);
        for (number, stored) in stored.iter().enumerate() {
            // One that was stored may have made way for another.
            assert!(*stored || !found[number], "{number} was not stored");
            assert_eq!(found[number], there[number] == Outcome::Done, "{number}");
        }
        assert_eq!(
            found.iter().filter(|found| **found).count(),
            files(at).len()
        );
        depot.close();
    });
}

#[test]
fn the_capacity_counts_bytes_of_any_length_and_what_is_being_written() {
    const CAPACITY: u64 = 4 << 20;
    let dir = tempfile::tempdir().unwrap();
    let small = json!({"capacity": CAPACITY});
    let depot = open_with("Posix", dir.path(), small);
    let ns = namespace(&depot);
    let within = || {
        let there = at_once(dir.path());
        // A file system adds what it needs to find the pieces of a file.
        assert!(there <= CAPACITY * 105 / 100, "{there} of {CAPACITY}");
    };
    for number in 0..200 {
        let len = [1, 5000, 70_001, 300_000][number as usize % 4];
        let task = start_put(&ns, &[number], len);
        within();
        task.wait(Some(PATIENCE)).unwrap();
        within();
    }
    assert!(used(dir.path()) > CAPACITY * 8 / 10);
    depot.close();
}

#[test]
fn a_configuration_that_cannot_be_is_an_error_and_no_default() {
    let dir = tempfile::tempdir().unwrap();
    for (name, value) in [
        ("capcity", json!("1GiB")),
        ("capacity", json!(0)),
        ("direct", json!("perhaps")),
        ("fan_out", json!(100_000)),
        ("durability", json!("always")),
    ] {
        let error = try_open("Posix", dir.path(), json!({ name: value }))
            .err()
            .unwrap();
        assert!(
            error.to_string().contains(&format!("posix.{name}")),
            "{error}"
        );
    }
    let error = try_open("Posix|Cache|Posix", dir.path(), json!({}))
        .err()
        .unwrap();
    assert!(error.to_string().contains("Posix"), "{error}");
}

#[test]
fn a_miss_is_stored_found_and_loaded_buffered_and_direct() {
    for direct in ["auto", "false"] {
        for pipeline in ["Posix", "Cache|Posix"] {
            let dir = tempfile::tempdir().unwrap();
            let depot = open_with(pipeline, dir.path(), json!({ "direct": direct }));
            let ns = namespace(&depot);
            assert_eq!(get(&ns, &[1], LEN), [Outcome::Miss]);
            assert_eq!(put(&ns, &[1], LEN), [true]);
            assert_eq!(ns.contains(&[key(1)]).unwrap(), [true]);
            assert!(has(&ns, &[1], LEN));
            depot.close();
        }
    }
}

#[test]
fn a_file_that_is_not_published_is_not_found() {
    let dir = tempfile::tempdir().unwrap();
    let depot = open(dir.path());
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1], LEN), [true]);
    let file = files(dir.path()).remove(0);
    let mine = fs::read_dir(dir.path().join("posix/new"))
        .unwrap()
        .next()
        .unwrap();
    fs::rename(&file, mine.unwrap().path().join("99")).unwrap();
    depot.close();
    let depot = open(dir.path());
    let ns = namespace(&depot);
    assert_eq!(ns.contains(&[key(1)]).unwrap(), [false]);
    assert_eq!(get(&ns, &[1], LEN), [Outcome::Miss]);
    assert!(ns.blocks().unwrap().is_empty());
    depot.close();
}

#[test]
fn a_prefix_ends_at_the_first_gap() {
    for pipeline in ["Posix", "Cache|Posix", "Cache|Nvme"] {
        let dir = tempfile::tempdir().unwrap();
        let depot = cold(pipeline, dir.path());
        let ns = namespace(&depot);
        put(&ns, &[0, 1, 2, 3, 5, 6], LEN);
        assert_eq!(ns.prefix(&keys(0..7)).unwrap(), 4, "{pipeline}");
        assert_eq!(ns.prefix(&keys([5, 6])).unwrap(), 2, "{pipeline}");
        assert_eq!(ns.prefix(&keys([4, 5])).unwrap(), 0, "{pipeline}");
        depot.close();
    }
}

#[test]
fn a_block_that_is_stored_layer_by_layer_is_loaded_whole_and_the_other_way() {
    for pipeline in ["Posix", "Cache|Posix", "Nvme"] {
        let dir = tempfile::tempdir().unwrap();
        let depot = cold(pipeline, dir.path());
        let ns = namespace(&depot);
        let whole = content(1, LEN);
        let layers = || -> Vec<Buffer> {
            whole
                .chunks(9001)
                .map(|layer| Buffer::from_vec(layer.to_vec()))
                .collect()
        };
        let mut scattered = BlockBuffers::default();
        scattered.push(layers());
        let task = ns.put(vec![key(1)], scattered).unwrap();
        assert_eq!(task.wait(Some(PATIENCE)).unwrap(), [true], "{pipeline}");
        assert!(has(&ns, &[1], LEN), "{pipeline}");
        let empty: Vec<Buffer> = whole
            .chunks(9001)
            .map(|layer| Buffer::from_vec(vec![0; layer.len()]))
            .collect();
        let mut scattered = BlockBuffers::default();
        scattered.push(empty.clone());
        let task = ns.get(vec![key(1)], scattered).unwrap();
        assert_eq!(task.wait(Some(PATIENCE)).unwrap(), [true], "{pipeline}");
        let all: Vec<u8> = empty.iter().flat_map(Buffer::to_vec).collect();
        assert!(all == whole, "{pipeline}");
        depot.close();
    }
}

#[test]
fn one_block_that_several_ask_for_at_once_comes_to_all_of_them() {
    for pipeline in ["Posix", "Cache|Posix", "Cache|Nvme|Posix"] {
        let dir = tempfile::tempdir().unwrap();
        let depot = cold(pipeline, dir.path());
        put(&namespace(&depot), &[1, 2], LEN);
        depot.close();
        let depot = cold(pipeline, dir.path());
        let ns = namespace(&depot);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| assert!(has(&ns, &[1, 2, 1, 1], LEN), "{pipeline}"));
            }
        });
        at_rest(&depot);
        depot.close();
    }
}

#[test]
fn what_could_not_be_read_or_stored_fails_its_task_with_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    let depot = open_with("Posix", dir.path(), json!({"capacity": "1MiB"}));
    let ns = namespace(&depot);
    // Larger than any block may be there.
    let len = 1 << 20;
    let task = ns
        .put(vec![key(1)], BlockBuffers::whole([block(1, len)]))
        .unwrap();
    assert_eq!(task.wait(Some(PATIENCE)).unwrap(), [false]);
    assert!(task.outcomes()[0].reason().is_some());
    let missing = BlockBuffers::whole([Buffer::from_vec(vec![0; len])]);
    let task = ns.get(vec![key(1)], missing).unwrap();
    assert_eq!(task.wait(Some(PATIENCE)).unwrap(), [false]);
    assert_eq!(task.outcomes()[0].reason(), Some("miss"));
    depot.close();
}

#[test]
fn processes_share_what_each_has_stored() {
    const TEST: &str = "pipeline_holes::processes_share_what_each_has_stored";
    let all: Vec<u64> = (0..20).collect();
    if let Some(role) = child::role() {
        let depot = open(Path::new(&child::value("at")));
        let ns = namespace(&depot);
        match &*role {
            "writer" => assert_eq!(put(&ns, &all, LEN), [true; 20]),
            _ => assert!(has(&ns, &all, LEN)),
        }
        child::say("done");
        child::sleep_until_killed();
    }
    let dir = tempfile::tempdir().unwrap();
    let at = [("at", dir.path().to_str().unwrap())];
    let mut writer = Child::start(TEST, "writer", &at);
    writer.expect("done");
    let mut readers = [0, 1].map(|_| Child::start(TEST, "reader", &at));
    readers.iter_mut().for_each(|reader| reader.expect("done"));
}
