//! The work of a call grows in proportion to its keys: locks taken, keys hashed and blocks looked
//! at, which debug builds count in all threads. In a program of its own: other tests work, too.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(debug_assertions)]

mod common;

use std::path::Path;
use std::time::Duration;

use common::several::several;
use common::{PATIENCE, Place, assert_at_rest, block, eventually, keys, namespace, put};
use kvdepot_store::{BlockBuffers, Buffer, Config, Depot, DrainTo, Namespace, Outcome, work};
use kvdepot_testkit::few_rounds;
use parking_lot::Mutex;
use serde_json::json;

/// One test at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// Keys of the first call; each next one has twice as many.
const FEWEST: u64 = 1000;
const LEN: usize = 64;

/// Keys of the largest call: 256,000 in `make test-all`.
fn most_keys() -> u64 {
    few_rounds(16_000, 12_800)
}

/// The work of all threads for `call`, and for what follows it in the background.
fn work_of<R>(depot: &Depot, call: impl FnOnce() -> R) -> (u64, R) {
    let before = work().all;
    let answer = call();
    assert!(depot.drain(Duration::MAX));
    (work().all - before, answer)
}

/// The work of calls of each kind, by their numbers of keys.
#[derive(Default)]
struct Counted(Vec<(&'static str, Vec<(u64, u64)>)>);

impl Counted {
    /// Each key that is handed over is a unit of work, too.
    fn note(&mut self, what: &'static str, keys: u64, work: u64) {
        let call = (keys, keys + work);
        match self.0.iter_mut().find(|(one, _)| *one == what) {
            Some((_, calls)) => calls.push(call),
            None => self.0.push((what, vec![call])),
        }
    }

    fn assert_linear(&self, name: &str) {
        for (what, calls) in &self.0 {
            assert_linear(&format!("{name}: {what}"), calls);
        }
    }

    /// The same from the smallest to the largest call: what follows a call in other threads is cut
    /// into batches by chance.
    fn assert_linear_in_all(&self, name: &str) {
        for (what, calls) in &self.0 {
            let doublings = calls.len() as i32 - 1;
            let (first, last) = (calls[0].1 as f64, calls[calls.len() - 1].1 as f64);
            assert!(
                last <= 2.2_f64.powi(doublings) * first,
                "{name}: {what}: {calls:?}"
            );
        }
    }
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
    let stored = task.wait(None).unwrap();
    stored.into_iter().filter(|stored| *stored).count()
}

/// Loads all of these blocks; whether they came.
fn load(ns: &Namespace, numbers: std::ops::Range<u64>) -> bool {
    let into = numbers.clone().map(|_| Buffer::from_vec(vec![0; LEN]));
    let buffers = BlockBuffers::whole(into);
    let task = ns.get(keys(numbers), buffers).unwrap();
    task.wait(None).unwrap();
    task.outcomes().iter().all(|one| *one == Outcome::Done)
}

#[test]
fn the_work_of_a_call_grows_with_its_keys_alone() {
    let most = most_keys();
    let _alone = ALONE.lock();
    let (room, records) = (format!("{}KiB", 10 * most), most * 5 / 2);
    let memory = |pipeline| {
        let place = Place::new(pipeline, &room, &room);
        match pipeline {
            "Cache" => place,
            _ => place.with("dax", "records", records),
        }
    };
    let pair = several(&["a", "b"], &room);
    let device = |name: &str| json!({"path": pair.dir().join(name), "capacity": room});
    let section = json!({"devices": [device("a"), device("b")], "records": records});
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
        assert_eq!(store(&ns, 0..most), most as usize);
        assert_eq!(ns.remove(&keys(0..most)).unwrap(), most as usize);
        let mut counted = Counted::default();
        let mut note = |what, count, work| counted.note(what, count, work);
        for count in sizes(most) {
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
            let (work, all_came) = work_of(&depot, || load(&ns, numbers.clone()));
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
        counted.assert_linear(name);
        assert_at_rest(&depot);
    }
}

/// A depot of files with space for so many blocks, in a new directory.
fn files(pipeline: &str, dir: &Path, blocks: u64) -> Depot {
    let mut settings = json!({
        // What goes on behind a call is waited for, and promotions are not.
        "lanes": 2, "socket": "off", "promote": false,
        // A page for the header of each, and a part of the directory is kept free.
        "posix": {
            "path": dir.join("posix"), "capacity": format!("{}KiB", 16 * blocks + 16_384),
            "timeout": "60s", "lookup_timeout": "60s",
        },
    });
    if pipeline.contains("Cache") {
        // None of them goes round it.
        let room = format!("{}KiB", 10 * blocks);
        settings["cache"] = json!({"capacity": room});
        settings["write_back_depth"] = json!(room);
    }
    Depot::open(&Config::new(pipeline, &settings).unwrap()).unwrap()
}

#[test]
fn the_work_of_a_call_over_files_grows_with_its_keys_alone() {
    let _alone = ALONE.lock();
    for pipeline in ["Posix", "Cache|Posix"] {
        let mut counted = Counted::default();
        for count in sizes(few_rounds(8_000, 12_800)) {
            let dir = tempfile::tempdir().unwrap();
            // What a process has just written or missed it does not look for.
            let open = || {
                let depot = files(pipeline, dir.path(), count);
                let ns = namespace(&depot);
                (depot, ns)
            };
            let all = keys(0..count);
            let (depot, ns) = open();
            eventually("the first count", || {
                store(&ns, 1 << 40..(1 << 40) + 1) == 1
            });
            let (work, stored) = work_of(&depot, || store(&ns, 0..count));
            assert_eq!(stored, count as usize, "{pipeline}");
            counted.note("put", count, work);
            let (work, again) = work_of(&depot, || store(&ns, 0..count));
            assert_eq!(again, count as usize, "{pipeline}");
            counted.note("put again", count, work);
            let (work, all_came) = work_of(&depot, || load(&ns, 0..count));
            assert!(all_came, "{pipeline}");
            counted.note("get", count, work);
            depot.close();
            let (depot, ns) = open();
            let (work, there) = work_of(&depot, || ns.contains(&all).unwrap());
            assert!(!there.contains(&false), "{pipeline}");
            counted.note("contains", count, work);
            let (work, all_came) = work_of(&depot, || load(&ns, 0..count));
            assert!(all_came, "{pipeline}");
            counted.note("get of files", count, work);
            let (work, gone) = work_of(&depot, || ns.remove(&all).unwrap());
            assert_eq!(gone, count as usize, "{pipeline}");
            counted.note("remove", count, work);
            depot.close();
            let (depot, ns) = open();
            let (work, there) = work_of(&depot, || ns.contains(&all).unwrap());
            assert!(!there.contains(&true), "{pipeline}");
            counted.note("contains none", count, work);
            depot.close();
        }
        counted.assert_linear_in_all(pipeline);
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
fn the_work_of_puts_that_a_write_budget_refuses_grows_with_their_keys_alone() {
    /// Blocks that wait for the arena, and those that may be written to it.
    const QUEUED: u64 = 10;
    const PAID: u64 = 100;
    let _alone = ALONE.lock();
    let mut counted = Counted::default();
    for count in sizes(few_rounds(8_000, 1600)) {
        // The arena has space for all, which the full queue sends past the memory. Those that
        // cannot be paid for go back to the memory, which has space for 256.
        let room = format!("{}KiB", 10 * count);
        let place = Place::new("Cache|Dax", "1MiB", &room)
            .with("dax", "records", 2 * count)
            .with("dax", "write_budget_hour", PAID * LEN as u64)
            .with("", "write_back_depth", QUEUED * LEN as u64);
        let depot = place.open();
        let ns = namespace(&depot);
        let (work, stored) = work_of(&depot, || store(&ns, 0..count));
        assert!((1..=PAID).contains(&(stored as u64)), "{stored}");
        let refused = depot.stats().tiers[0].full;
        assert!(refused >= count / 2, "{refused} of {count} by the memory");
        counted.note("put", count, work);
        depot.close();
    }
    counted.assert_linear_in_all("Cache|Dax");
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
