//! The work of a call grows in proportion to its keys: locks taken, keys hashed and blocks looked
//! at, which debug builds count in all threads. In a program of its own: other tests work, too.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(debug_assertions)]

mod common;

use common::several::several;
use common::{PATIENCE, Place, assert_at_rest, block, keys, namespace, put};
use kvdepot_store::{BlockBuffers, Buffer, Depot, DrainTo, Namespace, Outcome, work};
use parking_lot::Mutex;
use serde_json::json;

/// One test at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// Keys of the first call; each next one has twice as many.
const FEWEST: u64 = 1000;
const LEN: usize = 64;

/// The work of all threads for `call`, and for what follows it in the background.
fn work_of<R>(depot: &Depot, call: impl FnOnce() -> R) -> (u64, R) {
    let before = work().all;
    let answer = call();
    assert!(depot.drain(PATIENCE));
    (work().all - before, answer)
}

/// That the work of a call at most doubles, and a tenth, each time that its keys do.
fn assert_linear(what: &str, calls: &[(u64, u64)]) {
    for pair in calls.windows(2) {
        let [(keys, work), (_, more)] = pair else {
            continue;
        };
        assert!(
            *more as f64 <= 2.2 * *work as f64,
            "{what}: {work} for {keys} keys, {more} for twice as many; all: {calls:?}"
        );
    }
}

fn sizes(most: u64) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(FEWEST), |keys| Some(keys * 2)).take_while(move |keys| *keys <= most)
}

/// Buffers for so many blocks, all in the same memory.
fn buffers(count: u64) -> BlockBuffers {
    let one = block(0, LEN);
    BlockBuffers::whole((0..count).map(|_| one.clone()))
}

fn store(ns: &Namespace, numbers: std::ops::Range<u64>) -> usize {
    let count = numbers.end - numbers.start;
    let task = ns.put(keys(numbers), buffers(count)).unwrap();
    let stored = task.wait(Some(PATIENCE)).unwrap();
    stored.into_iter().filter(|stored| *stored).count()
}

#[test]
fn the_work_of_a_call_grows_with_its_keys_alone() {
    const MOST: u64 = 16_000;
    let _alone = ALONE.lock();
    let memory = |pipeline| {
        let place = Place::new(pipeline, "160MiB", "160MiB");
        match pipeline {
            "Cache" => place,
            _ => place.with("dax", "records", 40_000),
        }
    };
    let pair = several(&["a", "b"], "160MiB");
    let device = |name: &str| json!({"path": pair.dir().join(name), "capacity": "160MiB"});
    let section = json!({"devices": [device("a"), device("b")], "records": 40_000});
    let pair = pair.with_section("dax", section);
    for (name, place) in [
        ("Cache", memory("Cache")),
        ("Dax", memory("Dax")),
        ("Cache|Dax", memory("Cache|Dax")),
        ("two devices", pair),
    ] {
        let depot = place.open();
        let ns = namespace(&depot);
        // Tables have grown by then.
        assert_eq!(store(&ns, 0..MOST), MOST as usize);
        assert_eq!(ns.remove(&keys(0..MOST)).unwrap(), MOST as usize);
        let mut found: Vec<(&str, Vec<(u64, u64)>)> = Vec::new();
        let mut note = |what, count, work| match found.iter_mut().find(|(one, _)| *one == what) {
            Some((_, calls)) => calls.push((count, work)),
            None => found.push((what, vec![(count, work)])),
        };
        for count in sizes(MOST) {
            let numbers = 0..count;
            let all = keys(numbers.clone());
            let wanted: Vec<_> = all.iter().map(|key| (*key, vec![LEN as u64])).collect();
            let reserve = || {
                let made = ns.reserve(&wanted).unwrap();
                ns.abort(&made.into_iter().flatten().collect::<Vec<_>>());
            };
            note("reserve", count, work_of(&depot, reserve).0);
            let (work, stored) = work_of(&depot, || store(&ns, numbers.clone()));
            assert_eq!(stored, count as usize);
            note("put", count, work);
            let again = work_of(&depot, || store(&ns, numbers.clone())).0;
            note("put again", count, again);
            let get = || {
                let into = (0..count).map(|_| Buffer::from_vec(vec![0; LEN]));
                let task = ns.get(all.clone(), BlockBuffers::whole(into)).unwrap();
                task.wait(Some(PATIENCE)).unwrap();
                task.outcomes().iter().all(|one| *one == Outcome::Done)
            };
            let (work, all_came) = work_of(&depot, get);
            assert!(all_came, "{name}");
            note("get", count, work);
            let pin = || ns.unpin(&common::pin_all(&ns, 0..count), true);
            note("pin", count, work_of(&depot, pin).0);
            let (work, there) = work_of(&depot, || ns.prefix(&all).unwrap());
            assert_eq!(there, count as usize);
            note("prefix", count, work);
            let (work, _) = work_of(&depot, || ns.contains(&all).unwrap());
            note("contains", count, work);
            let (work, gone) = work_of(&depot, || ns.remove(&all).unwrap());
            assert_eq!(gone, count as usize);
            note("remove", count, work);
            let (work, _) = work_of(&depot, || ns.contains(&all).unwrap());
            note("contains none", count, work);
        }
        for (what, calls) in &found {
            assert_linear(&format!("{name}: {what}"), calls);
        }
        assert_at_rest(&depot);
    }
}

#[test]
fn keys_that_find_no_room_cost_little_each_however_many_they_are() {
    /// Units of work for each that finds none, and for each block of the tier, which may go.
    const EACH: u64 = 64;
    const EVICTED: u64 = 256;
    const MOST: u64 = 64_000;
    let _alone = ALONE.lock();
    let scattered = |place: Place| place.with("dax", "records", 2000);
    for (name, place, gap, pinned) in [
        ("Cache", Place::new("Cache", "2MiB", ""), None, true),
        // The head of what comes evicts others.
        ("Cache, free", Place::new("Cache", "2MiB", ""), None, false),
        ("Dax", Place::new("Dax", "", "2MiB"), None, true),
        ("Dax, free", Place::new("Dax", "", "2MiB"), None, false),
        ("two devices", several(&["a", "b"], "1MiB"), None, true),
        ("two, free", several(&["a", "b"], "1MiB"), None, false),
        // One block of a granule in eight is gone, and what is refused needs eight of them.
        (
            "holes",
            scattered(Place::new("Dax", "", "4MiB")),
            Some(8),
            true,
        ),
    ] {
        let depot = place.open();
        let ns = namespace(&depot);
        let blocks = depot.stats().tiers[0].capacity_bytes / 4096;
        let numbers: Vec<u64> = (0..blocks).collect();
        // What is offered again takes all that there is.
        (0..2).for_each(|_| drop(put(&ns, &numbers, 4096)));
        let len = match gap {
            Some(gap) => {
                let every = keys((0..blocks).step_by(gap));
                assert_eq!(ns.remove(&every).unwrap(), every.len());
                gap * 4096
            }
            None => 4096,
        };
        let pins = common::pin_all(&ns, 0..if pinned { blocks } else { 0 });
        let one = block(0, len);
        let mut calls = Vec::new();
        for count in sizes(MOST) {
            let (from, before) = (count << 32, depot.stats().tiers[0].full);
            let buffers = BlockBuffers::whole((0..count).map(|_| one.clone()));
            let (work, outcomes) = work_of(&depot, || {
                let task = ns.put(keys(from..from + count), buffers).unwrap();
                task.wait(Some(PATIENCE)).unwrap();
                task.outcomes()
            });
            let full = outcomes.iter().filter(|one| **one == Outcome::Full).count();
            let stored = outcomes.len() - full;
            assert!(
                stored as u64 <= if pinned { 0 } else { blocks },
                "{name}: {stored}"
            );
            let refused = depot.stats().tiers[0].full - before;
            assert!(refused >= full as u64, "{name}: {refused} of {full}");
            let most = EACH * count + EVICTED * stored as u64;
            assert!(work <= most, "{name}: {work} for {count} keys");
            calls.push((count, work));
        }
        assert_linear(name, &calls);
        ns.unpin(&pins, false);
        if !name.starts_with("two") {
            assert_at_rest(&depot);
        }
    }
}

#[test]
fn a_lookup_of_many_keys_beside_a_drain_looks_again_only_for_those_that_it_missed() {
    const KEYS: u64 = 50_000;
    const STORED: u64 = 3000;
    let _alone = ALONE.lock();
    let place = several(&["a", "b"], "16MiB");
    let device = |name: &str| json!({"path": place.dir().join(name), "capacity": "16MiB"});
    let section = json!({"devices": [device("a"), device("b")], "records": 4000});
    let place = place.with_section("dax", section);
    let depot = place.open();
    let ns = namespace(&depot);
    let numbers: Vec<u64> = (0..STORED).collect();
    assert!(put(&ns, &numbers, LEN).iter().all(|stored| *stored));
    let absent = keys(1 << 32..(1 << 32) + KEYS);
    let look = || {
        let before = work().mine;
        assert!(ns.contains(&absent).unwrap().iter().all(|found| !found));
        work().mine - before
    };
    let devices = ["a", "b"].map(|name| place.dir().join(name));
    let most = std::thread::scope(|scope| {
        let drains = scope.spawn(|| {
            let drain = |path: &std::path::PathBuf| {
                let drained = depot.drain_device(path, DrainTo::Others, PATIENCE).unwrap();
                depot.add_device(path, None).unwrap();
                drained.moved_blocks
            };
            devices.iter().map(drain).sum::<u64>()
        });
        let mut most = 0;
        while !drains.is_finished() {
            most = most.max(look());
        }
        assert!(drains.join().unwrap() >= STORED);
        most
    });
    // Both have had blocks of the namespace by now.
    let quiet = look();
    // Each batch that moves meanwhile has some keys looked up again, and not all.
    assert!(
        most <= quiet + quiet / 2,
        "{most} beside a drain, {quiet} else"
    );
}

#[test]
fn blocks_of_mixed_lengths_cost_little_each_where_the_large_ones_find_no_room() {
    const MOST: u64 = 4000;
    let _alone = ALONE.lock();
    let mut all = Vec::new();
    for name in ["two devices", "one device"] {
        let names: &[&str] = if name == "two devices" {
            &["a", "b"]
        } else {
            &["a"]
        };
        let capacity = if name == "two devices" {
            "80MiB"
        } else {
            "160MiB"
        };
        let place = several(names, capacity);
        let device = |name: &&str| json!({"path": place.dir().join(name), "capacity": capacity});
        let list: Vec<_> = names.iter().map(device).collect();
        let section = json!({"devices": list, "records": 60_000});
        let place = place.with_section("dax", section);
        let depot = place.open();
        let ns = namespace(&depot);
        let blocks = depot.stats().tiers[0].capacity_bytes / 4096;
        for _ in 0..2 {
            for from in (0..blocks).step_by(1000) {
                let numbers: Vec<u64> = (from..blocks.min(from + 1000)).collect();
                drop(put(&ns, &numbers, 4096));
            }
        }
        // Holes of a granule each.
        let every = keys((0..blocks).step_by(2));
        ns.remove(&every).unwrap();
        let pins = common::pin_all(&ns, 0..blocks);
        let (small, large) = (block(0, 4096), block(0, 8 * 4096));
        let mut calls = Vec::new();
        let mut from = 1 << 32;
        for count in [500, 1000, 2000, MOST] {
            let each = (0..count).map(|at| {
                if at % 2 == 0 {
                    small.clone()
                } else {
                    large.clone()
                }
            });
            let buffers = BlockBuffers::whole(each);
            let (work, outcomes) = work_of(&depot, || {
                let task = ns.put(keys(from..from + count), buffers).unwrap();
                task.wait(Some(PATIENCE)).unwrap();
                task.outcomes()
            });
            assert!(outcomes.contains(&Outcome::Done) && outcomes.contains(&Outcome::Full));
            // Once more has the same holes.
            ns.remove(&keys(from..from + count)).unwrap();
            from += count;
            calls.push((count, work));
        }
        ns.unpin(&pins, false);
        depot.close();
        all.push((name, calls));
    }
    for (name, calls) in all {
        assert_linear(name, &calls);
    }
}
