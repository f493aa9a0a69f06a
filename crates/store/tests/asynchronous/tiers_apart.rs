//! Tiers that are no arenas of this process, and that may answer late.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::common::{self, PATIENCE, eventually, get, has, key, keys, namespace, put, start_put};
use crate::tiers::files;
use crate::tiers::late::{self, Mood, slow_files, slow_kind};
use kvdepot_store::sim::{Schedule, Turn};
use kvdepot_store::{
    BlockBuffers, Buffer, Checksum, Config, Depot, Error, Key, Kinds, Namespace, Outcome,
};
use serde_json::{Value, json};

const LEN: usize = 70_001;

/// Its lookups may take longer than a machine stands still.
fn open(kinds: &Kinds, pipeline: &str, dir: &tempfile::TempDir) -> Depot {
    let limits = json!({"close_timeout": "10s", "lookup_timeout": "60s"});
    open_with(kinds, pipeline, dir, limits)
}

/// For tests in which a tier loses answers.
fn open_impatient(kinds: &Kinds, pipeline: &str, dir: &tempfile::TempDir) -> Depot {
    open_with(kinds, pipeline, dir, json!({"close_timeout": "10s"}))
}

fn open_with(kinds: &Kinds, pipeline: &str, dir: &tempfile::TempDir, mut settings: Value) -> Depot {
    let path = |name| dir.path().join(name).to_str().unwrap().to_owned();
    settings["lanes"] = json!(2);
    for tier in pipeline.split('|') {
        settings[tier.to_ascii_lowercase()] = match tier {
            "Cache" => json!({"capacity": "1MiB"}),
            "Dax" => json!({"path": path("arena"), "capacity": "2MiB"}),
            "Slow" => json!({"path": path("slow")}),
            _ => json!({"path": path("files")}),
        };
    }
    let config = Config::with_kinds(kinds, pipeline, &settings).unwrap();
    Depot::open(&config).unwrap()
}

/// Blocks of a depot at rest.
fn listed(ns: &Namespace) -> usize {
    ns.blocks().unwrap().len()
}

#[test]
fn blocks_live_in_files_behind_memory_and_alone() {
    for pipeline in ["Files", "Cache|Files", "Dax|Files", "Cache|Dax|Files"] {
        let dir = tempfile::tempdir().unwrap();
        let all: Vec<u64> = (0..40).collect();
        let depot = open(&files::kinds(), pipeline, &dir);
        let ns = namespace(&depot);
        assert!(put(&ns, &all, LEN).iter().all(|ok| *ok), "{pipeline}");
        assert!(put(&ns, &all, LEN).iter().all(|ok| *ok), "again");
        assert!(depot.drain(PATIENCE));
        assert!(has(&ns, &all, LEN), "{pipeline}");
        assert_eq!(ns.prefix(&keys(0..50)).unwrap(), 40);
        assert_eq!(listed(&ns), 40, "{pipeline}");
        depot.close();
        let files = std::fs::read_dir(dir.path().join("files")).unwrap().count();
        assert_eq!(files, 40, "{pipeline}");

        // The memory is gone, and so is what the arena had no room for.
        let depot = open(&files::kinds(), pipeline, &dir);
        let ns = namespace(&depot);
        let task = ns.prefetch(&keys(0..5)).unwrap();
        assert_eq!(task.wait(Some(PATIENCE)).unwrap(), [true; 5]);
        assert!(has(&ns, &all, LEN), "{pipeline}");
        assert_eq!(ns.remove(&keys(0..2)).unwrap(), 2);
        assert_eq!(get(&ns, &[0, 1, 2], LEN)[..2], [Outcome::Miss; 2]);
        assert!(ns.clear().unwrap() >= 38);
        assert_eq!(listed(&ns), 0, "{pipeline}");
        assert!(!ns.contains(&keys(0..40)).unwrap().contains(&true));
        depot.close();
    }
}

#[test]
fn a_file_that_rots_is_a_miss_and_is_written_anew() {
    let dir = tempfile::tempdir().unwrap();
    let depot = open(&files::kinds(), "Files", &dir);
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1, 2], LEN), [true; 2]);
    let of = |number| {
        let name = format!("{}-{}", ns.id(), key(number));
        dir.path().join("files").join(name)
    };
    let mut bytes = std::fs::read(of(1)).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(of(1), bytes).unwrap();
    let cut = std::fs::OpenOptions::new().write(true).open(of(2)).unwrap();
    cut.set_len(5000).unwrap();
    let outcomes = get(&ns, &[1, 2], LEN);
    assert_eq!(outcomes[0], Outcome::Corrupt);
    assert_ne!(outcomes[1], Outcome::Done);
    assert_eq!(ns.contains(&keys([1])).unwrap(), [false]);
    assert_eq!(put(&ns, &[1], LEN), [true]);
    assert!(has(&ns, &[1], LEN));
    depot.close();
}

/// Lanes and background threads that do what they have to do only while somebody waits.
fn stepped() -> Arc<Schedule> {
    Schedule::new(|_| Turn {
        job: 0,
        fails: false,
    })
}

/// Puts one block of equal bytes.
fn put_one(ns: &Namespace, block: u64, byte: u8, len: usize) -> Vec<bool> {
    let buffer = BlockBuffers::whole([Buffer::from_vec(vec![byte; len])]);
    let put = ns.put(keys([block]), buffer).unwrap();
    put.wait(None).unwrap()
}

#[test]
fn what_was_removed_does_not_come_near_once_it_is_put_anew() {
    let schedule = stepped();
    let _entered = schedule.enter(|| ());
    let dir = tempfile::tempdir().unwrap();
    let depot = open(&files::kinds(), "Cache|Files", &dir);
    let ns = namespace(&depot);
    let len = 100_000;
    // Fills the queue between the tiers, so that others go past it.
    let other = BlockBuffers::whole([Buffer::from_vec(vec![0; 450_000])]);
    let other = ns.put(keys([2]), other).unwrap();
    let get = || {
        let buffer = Buffer::from_vec(vec![0; len]);
        let into = BlockBuffers::whole([buffer.clone()]);
        let done = ns.get(keys([1]), into).unwrap().wait(None).unwrap();
        assert_eq!(done, [true]);
        buffer.to_vec()[0]
    };
    assert_eq!(put_one(&ns, 1, 7, len), [true]);
    assert_eq!(get(), 7);
    // It is on its way near, pinned where it is.
    assert_eq!(ns.remove(&keys([1])).unwrap(), 1);
    assert_eq!(put_one(&ns, 1, 8, len), [true]);
    while depot.step_background() {}
    assert_eq!(get(), 8);
    assert_eq!(other.wait(None).unwrap(), [true]);
    depot.close();
}

#[test]
fn no_tier_that_forgets_acknowledges_behind_one_that_lasts() {
    let schedule = stepped();
    let _entered = schedule.enter(|| ());
    let dir = tempfile::tempdir().unwrap();
    let kinds = Kinds::new().with(files::kind_that(false));
    let depot = open(&kinds, "Dax|Files", &dir);
    let ns = namespace(&depot);
    // More than may wait between the tiers.
    for block in 0..3 {
        assert_eq!(put_one(&ns, block, 7, 500_000), [true]);
    }
    assert_eq!(ns.nearest(&keys(0..3)).unwrap(), [Some("Dax"); 3]);
    depot.close();
}

#[test]
fn a_close_ends_the_pins_of_what_was_still_to_come_near() {
    let mood = Arc::new(Mood::default());
    let kinds = slow_files(&mood);
    let dir = tempfile::tempdir().unwrap();
    let all: Vec<u64> = (0..12).collect();
    let depot = open(&kinds, "Cache|Slow", &dir);
    assert!(put(&namespace(&depot), &all, 9000).iter().all(|ok| *ok));
    depot.close();
    // More of them than an edge has threads, each of which waits for an answer.
    mood.delay.store(50_000, Ordering::Relaxed);
    let depot = open(&kinds, "Cache|Slow", &dir);
    let ns = namespace(&depot);
    let buffer = || BlockBuffers::whole([Buffer::from_vec(vec![0; 9000])]);
    let tasks = all.iter().map(|number| ns.get(keys([*number]), buffer()));
    for task in tasks.collect::<Vec<_>>() {
        assert_eq!(task.unwrap().wait(Some(PATIENCE)).unwrap(), [true]);
    }
    // The tier panics where files are held.
    depot.close();
}

#[test]
fn only_the_calls_that_ask_a_late_tier_wait_for_it() {
    let mood = Arc::new(Mood::default());
    let dir = tempfile::tempdir().unwrap();
    let depot = open(&slow_files(&mood), "Cache|Slow", &dir);
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1, 2], LEN), [true; 2]);
    mood.delay.store(50_000, Ordering::Relaxed);
    let asked = || mood.asked.load(Ordering::Relaxed);
    let before = asked();
    assert!(has(&ns, &[1, 2], LEN));
    assert_eq!(ns.contains(&keys([1, 2])).unwrap(), [true; 2]);
    assert_eq!(
        asked(),
        before,
        "what is near is not asked for further away"
    );
    let begun = Instant::now();
    assert_eq!(get(&ns, &[7], LEN), [Outcome::Miss]);
    assert!(begun.elapsed() >= Duration::from_millis(50));
    let lookup = ns.lookup(&keys([1, 7])).unwrap();
    assert!(!lookup.is_done(), "nobody waits for it");
    assert_eq!(lookup.wait(Some(PATIENCE)).unwrap(), [true, false]);
    assert!(ns.lookup(&keys([1, 2])).unwrap().is_done());
    // A put returns at once, and its caller goes on.
    let begun = Instant::now();
    let task = start_put(&ns, &[3], LEN);
    task.wait_released(Some(PATIENCE)).unwrap();
    assert!(!task.is_done() || begun.elapsed() >= Duration::from_millis(50));
    assert_eq!(task.wait(Some(PATIENCE)).unwrap(), [true]);
    depot.close();
}

/// So long that nobody waits for it.
const NEVER: u64 = 3_600_000_000;

#[test]
fn pins_of_a_commit_that_is_answered_too_late_end() {
    let mood = Arc::new(Mood::default());
    let kinds = slow_files(&mood).with(files::kind());
    let dir = tempfile::tempdir().unwrap();
    let settings = json!({"tier_timeout": "2s"});
    let depot = open_with(&kinds, "Slow|Files", &dir, settings);
    let ns = namespace(&depot);
    mood.commit_delay.store(NEVER, Ordering::Relaxed);
    assert_eq!(put(&ns, &[1], LEN), [false]);
    // The answer comes now, and the tier panics where files are held.
    depot.close();
}

#[test]
fn a_close_has_no_time_for_a_tier_that_does_not_answer() {
    let settings =
        || json!({"tier_timeout": "1h", "lookup_timeout": "1h", "close_timeout": "10ms"});
    // While a call waits for it, a block on its way, a block that is to come near.
    for waits in ["lookup", "put", "promotion"] {
        let mood = Arc::new(Mood::default());
        let kinds = slow_files(&mood);
        let dir = tempfile::tempdir().unwrap();
        let depot = open_with(&kinds, "Cache|Slow", &dir, settings());
        let ns = namespace(&depot);
        if waits == "promotion" {
            assert_eq!(put(&ns, &[1], LEN), [true]);
            depot.close();
        }
        let depot = open_with(&kinds, "Cache|Slow", &dir, settings());
        let ns = namespace(&depot);
        let pending = match waits {
            "lookup" => {
                mood.delay.store(NEVER, Ordering::Relaxed);
                Some(ns.lookup(&keys([1])).unwrap())
            }
            "put" => {
                mood.delay.store(NEVER, Ordering::Relaxed);
                Some(start_put(&ns, &[1], LEN))
            }
            _ => {
                let asked = mood.asked.load(Ordering::Relaxed);
                mood.delay.store(1000, Ordering::Relaxed);
                assert!(has(&ns, &[1], LEN));
                mood.delay.store(NEVER, Ordering::Relaxed);
                eventually("it is asked whether the block is there still", || {
                    mood.asked.load(Ordering::Relaxed) > asked + 1
                });
                None
            }
        };
        depot.close();
        let ended = pending.map(|task| task.wait(Some(PATIENCE)).unwrap());
        assert!(ended.is_none_or(|ended| ended == [false]), "{waits}");
    }
}

#[test]
fn a_put_joins_who_writes_its_block_to_a_late_tier() {
    let mood = Arc::new(Mood::default());
    let kinds = slow_files(&mood);
    let dir = tempfile::tempdir().unwrap();
    // Room on the way for one block: the second put goes where the first one's block is going.
    let settings = json!({"write_back_depth": LEN});
    let depot = open_with(&kinds, "Cache|Slow", &dir, settings);
    let ns = namespace(&depot);
    mood.delay.store(200_000, Ordering::Relaxed);
    let first = start_put(&ns, &[1], LEN);
    let asked = || mood.asked.load(Ordering::Relaxed);
    eventually("the block is on its way", || asked() > 0);
    let second = start_put(&ns, &[1], LEN);
    assert_eq!(first.wait(Some(PATIENCE)).unwrap(), [true]);
    assert_eq!(second.wait(Some(PATIENCE)).unwrap(), [true]);
    assert_eq!(mood.commits.load(Ordering::Relaxed), 1);
    depot.close();
}

#[test]
fn all_who_join_a_put_to_a_late_tier_have_its_answer() {
    let mood = Arc::new(Mood::default());
    let dir = tempfile::tempdir().unwrap();
    let depot = open(&slow_files(&mood), "Slow", &dir);
    let ns = namespace(&depot);
    mood.silent.store(true, Ordering::Relaxed);
    let puts: Vec<_> = (0..20).map(|_| start_put(&ns, &[1], LEN)).collect();
    mood.silent.store(false, Ordering::Relaxed);
    for put in puts {
        assert_eq!(put.wait(Some(PATIENCE)).unwrap(), [true]);
    }
    // For room and to publish, by the first of them.
    assert_eq!(mood.asked.load(Ordering::Relaxed), 2);
    depot.close();
}

#[test]
fn an_end_of_what_has_its_end_already_lets_nobody_begin_anew() {
    let mood = Arc::new(Mood::default());
    let dir = tempfile::tempdir().unwrap();
    let depot = open(&slow_files(&mood), "Slow", &dir);
    let ns = namespace(&depot);
    let reserve = || {
        let reserved = ns.reserve(&[(key(1), vec![LEN as u64])]).unwrap();
        reserved.into_iter().next().flatten().unwrap()
    };
    let commits = || mood.commits.load(Ordering::Relaxed);
    let sums = [vec![Checksum([7; 16])]];
    // It is being published.
    let first = reserve();
    let joined = start_put(&ns, &[1], LEN);
    mood.commit_delay.store(300_000, Ordering::Relaxed);
    std::thread::scope(|scope| {
        let commit = scope.spawn(|| ns.commit(std::slice::from_ref(&first), &sums));
        eventually("the tier is asked to publish it", || commits() == 1);
        ns.abort(std::slice::from_ref(&first));
        assert_eq!(joined.wait(Some(PATIENCE)).unwrap(), [true]);
        assert_eq!(commit.join().unwrap().unwrap(), [true]);
    });
    // For room and to publish.
    assert_eq!(mood.asked.load(Ordering::Relaxed), 2);
    // It was published, and others write its block now.
    assert_eq!(ns.remove(&[key(1)]).unwrap(), 1);
    let second = reserve();
    let joined = start_put(&ns, &[1], LEN);
    ns.abort(std::slice::from_ref(&first));
    assert_eq!(
        ns.commit(std::slice::from_ref(&first), &sums).unwrap(),
        [false]
    );
    assert_eq!(
        ns.commit(std::slice::from_ref(&second), &sums).unwrap(),
        [true]
    );
    assert_eq!(joined.wait(Some(PATIENCE)).unwrap(), [true]);
    assert_eq!(commits(), 2);
    common::assert_at_rest(&depot);
    depot.close();
}

#[test]
fn a_tier_in_the_middle_that_is_broken_or_too_small_is_passed_by() {
    let mood = Arc::new(Mood::default());
    let forgets = files::kind_that(false);
    let kinds = late::kinds("Slow", slow_kind(forgets), &mood);
    let dir = tempfile::tempdir().unwrap();
    let depot = open_impatient(&kinds, "Cache|Slow|Dax", &dir);
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1], LEN), [true]);
    mood.lost.store(1000, Ordering::Relaxed);
    for block in 2..10 {
        assert_eq!(put(&ns, &[block], LEN), [true], "{block}");
        assert_eq!(put(&ns, &[block], LEN), [true], "{block}, again");
    }
    assert!(depot.drain(PATIENCE));
    assert_eq!(depot.stats().tiers[2].blocks, 9);
    common::assert_at_rest(&depot);
    depot.close();
}

#[test]
fn what_comes_to_the_middle_since_the_nearest_is_full_waits_for_the_queue_there() {
    let mood = Arc::new(Mood::default());
    mood.commit_delay.store(2000, Ordering::Relaxed);
    // A quarter of it may wait: one block.
    let middle = files::kind_of(false, 5 * LEN as u64);
    let kinds = slow_files(&mood).with(middle);
    for overload in ["wait", "drop"] {
        let dir = tempfile::tempdir().unwrap();
        let settings = json!({"overload": overload});
        let depot = open_with(&kinds, "Cache|Files|Slow", &dir, settings);
        let ns = namespace(&depot);
        // One by one: a full queue may drop.
        assert!((0..14).all(|block| put(&ns, &[block], LEN) == [true]));
        let held = ns.pin(&keys(0..14), false).unwrap();
        let stored = put(&ns, &(20..40).collect::<Vec<_>>(), LEN);
        let all = stored.iter().all(|stored| *stored);
        assert_eq!(all, overload == "wait", "{overload}: {stored:?}");
        held.into_iter()
            .for_each(|pin| ns.unpin(pin.as_slice(), false));
        assert!(depot.drain(PATIENCE));
        common::assert_at_rest(&depot);
        depot.close();
    }
}

#[test]
fn what_passes_by_the_tier_that_acknowledges_is_acknowledged_by_none_that_forgets() {
    let mood = Arc::new(Mood::default());
    let kinds = slow_files(&mood).with(files::kind_that(false));
    let dir = tempfile::tempdir().unwrap();
    let depot = open_impatient(&kinds, "Cache|Slow|Files", &dir);
    let ns = namespace(&depot);
    mood.lost.store(1000, Ordering::Relaxed);
    for block in 1..5 {
        assert_eq!(put(&ns, &[block], LEN), [false], "{block}");
    }
    depot.close();
}

#[test]
fn a_block_that_is_in_two_tiers_is_cleared_once() {
    for pipeline in ["Cache|Files", "Cache|Dax|Files", "Files|Slow"] {
        let dir = tempfile::tempdir().unwrap();
        let kinds = slow_files(&Arc::default()).with(files::kind());
        let depot = open(&kinds, pipeline, &dir);
        let ns = namespace(&depot);
        assert_eq!(put(&ns, &[1, 2, 3], LEN), [true; 3]);
        assert!(depot.drain(PATIENCE));
        assert_eq!(ns.clear().unwrap(), 3, "{pipeline}");
        depot.close();
    }
}

/// The files, under the section of another tier.
#[test]
fn a_tier_that_does_not_answer_is_a_miss_and_is_left_alone_until_it_does() {
    let mood = Arc::new(Mood::default());
    let dir = tempfile::tempdir().unwrap();
    let kinds = slow_files(&mood);
    let depot = open_impatient(&kinds, "Cache|Slow", &dir);
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1], LEN), [true]);
    mood.lost.store(1000, Ordering::Relaxed);
    for number in 10..20 {
        assert_eq!(get(&ns, &[number], LEN), [Outcome::Miss]);
    }
    let stats = |tier: usize| depot.stats().tiers[tier].clone();
    assert!(stats(1).circuit_open >= 1 && stats(1).timeouts >= 3);
    assert!(has(&ns, &[1], LEN), "what is near is served");
    let put = start_put(&ns, &[5], LEN);
    assert_eq!(put.wait(Some(PATIENCE)).unwrap(), [false]);
    assert!(matches!(ns.remove(&keys([1])), Err(Error::Silent { .. })));
    mood.lost.store(0, Ordering::Relaxed);
    eventually("the tier is asked again", || {
        common::put(&ns, &[6], LEN) == [true]
    });
    depot.close();
}

#[test]
fn a_put_that_tries_a_silent_tier_keeps_lookups_from_it_for_seconds() {
    /// An hour, in microseconds.
    const SILENT: u64 = 3_600_000_000;
    let mood = Arc::new(Mood::default());
    let dir = tempfile::tempdir().unwrap();
    let limits = json!({"close_timeout": "1s", "lookup_timeout": "300ms", "tier_timeout": "1h"});
    let depot = open_with(&slow_files(&mood), "Slow", &dir, limits);
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1], LEN), [true]);
    mood.delay.store(SILENT, Ordering::Relaxed);
    eventually("an open circuit breaker", || {
        !has(&ns, &[1], LEN) && depot.stats().tiers[0].circuit_open > 0
    });
    let asked = || mood.asked.load(Ordering::Relaxed);
    let (mut number, mut trial) = (100, None);
    eventually("a put that tries", || {
        let before = asked();
        number += 1;
        let task = start_put(&ns, &[number], LEN);
        eventually("the end of a put, or its question", || {
            task.is_done() || asked() > before
        });
        let tries = !task.is_done();
        trial = Some(task);
        tries
    });
    // From here on the tier answers, but for that put.
    mood.delay.store(0, Ordering::Relaxed);
    eventually("a hit", || has(&ns, &[1], LEN));
    assert!(trial.is_some_and(|put| !put.is_done()));
    depot.close();
}

#[test]
fn blocks_go_through_three_tiers_that_fail_at_random() {
    let mood = Arc::new(Mood::default());
    mood.delay.store(200, Ordering::Relaxed);
    mood.lost.store(100, Ordering::Relaxed);
    let dir = tempfile::tempdir().unwrap();
    let kinds = slow_files(&mood);
    for round in 0..4 {
        let depot = open_impatient(&kinds, "Cache|Dax|Slow", &dir);
        let ns = namespace(&depot);
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let ns = &ns;
                scope.spawn(move || {
                    for step in 0..40 {
                        let first = (thread * 7 + step * 3 + round) % 60;
                        let some: Vec<u64> = (first..first + 4).collect();
                        // Where a queue is full they go to the tier that fails.
                        let _stored = put(ns, &some, LEN);
                        // Wrong bytes panic there.
                        let _found = get(ns, &some, LEN);
                        if step % 8 == 0 {
                            let _silent = ns.remove(&keys([first]));
                        }
                    }
                });
            }
        });
        assert!(depot.drain(PATIENCE));
        common::assert_at_rest(&depot);
        depot.close();
    }
}

#[test]
fn nonsense_is_refused_with_the_reason() {
    let refused = |pipeline: &str, kinds: &Kinds| {
        let config = Config::with_kinds(kinds, pipeline, &json!({}));
        config.err().map(|error| error.to_string())
    };
    let kinds = files::kinds();
    let why = refused("Files|Cache", &kinds).unwrap();
    assert!(why.contains("Cache as the first tier"), "{why}");
    let why = refused("Cache|Cache", &kinds).unwrap();
    assert!(why.contains("different tiers"), "{why}");
    let why = refused("Cache|Files", &Kinds::new()).unwrap();
    assert!(why.contains("known tiers: Cache, Dax, Nvme"), "{why}");
    let typo = json!({"files": {"pth": "/tmp"}});
    let error = Config::with_kinds(&kinds, "Cache|Files", &typo).unwrap_err();
    assert!(
        error.to_string().contains("did you mean \"path\""),
        "{error}"
    );
    // What cannot be opened leaves nothing behind.
    let dir = tempfile::tempdir().unwrap();
    let arena = dir.path().join("arena");
    let settings = json!({"dax": {"path": arena.to_str(), "capacity": "1MiB"}});
    let kinds = Kinds::new().with(late::broken());
    let config = Config::with_kinds(&kinds, "Dax|Broken", &settings).unwrap();
    assert!(Depot::open(&config).is_err());
    assert!(!arena.exists());
}

#[test]
fn what_is_being_written_near_is_not_reserved_further_away_too() {
    let dir = tempfile::tempdir().unwrap();
    let settings = json!({"write_back_depth": "80KiB"});
    let depot = open_with(&files::kinds(), "Cache|Files", &dir, settings);
    let ns = namespace(&depot);
    let block = [(key(1), vec![LEN as u64])];
    let mine: Vec<_> = ns.reserve(&block).unwrap().into_iter().flatten().collect();
    assert_eq!(mine[0].tier, 0);
    // The queue has no room for another one.
    assert!(ns.reserve(&block).unwrap()[0].is_none());
    let other = ns.reserve(&[(key(2), vec![LEN as u64])]).unwrap();
    let other: Vec<_> = other.into_iter().flatten().collect();
    assert_eq!(other[0].tier, 1);
    let joins = start_put(&ns, &[1], LEN);
    let waits = joins.wait(Some(Duration::from_millis(100)));
    assert!(matches!(waits, Err(Error::Timeout { .. })), "{waits:?}");
    ns.abort(&mine);
    assert_eq!(joins.wait(Some(PATIENCE)).unwrap(), [true]);
    ns.abort(&other);
    assert!(depot.drain(PATIENCE) && has(&ns, &[1], LEN));
    common::assert_at_rest(&depot);
    depot.close();
}

#[test]
fn a_block_that_is_put_while_a_slower_tier_is_asked_is_not_gone() {
    let mood = Arc::new(Mood::default());
    let dir = tempfile::tempdir().unwrap();
    let depot = open(&slow_files(&mood), "Cache|Slow", &dir);
    let ns = namespace(&depot);
    assert_eq!(depot.gone(10).unwrap().blocks, []);
    assert_eq!(put(&ns, &[1, 2], LEN), [true; 2]);
    assert!(depot.drain(PATIENCE));
    assert_eq!(ns.remove(&keys([1, 2])).unwrap(), 2);
    mood.silent.store(true, Ordering::Relaxed);
    let before = mood.asked.load(Ordering::Relaxed);
    let gone = std::thread::scope(|scope| {
        let asks = scope.spawn(|| depot.gone(10));
        eventually("the question", || {
            mood.asked.load(Ordering::Relaxed) > before
        });
        // Both are asked about at once, and one of them comes back meanwhile.
        let task = start_put(&ns, &[1], LEN);
        eventually("the copy", || depot.stats().tiers[0].blocks == 1);
        mood.silent.store(false, Ordering::Relaxed);
        assert_eq!(task.wait(Some(PATIENCE)).unwrap(), [true]);
        asks.join().unwrap().unwrap()
    });
    let gone: Vec<Key> = gone.blocks.iter().map(|(block, _)| block.key).collect();
    assert_eq!(gone, [key(2)]);
}
