//! Calls of many keys pin and reserve in an asynchronous tier in steps, one after the other.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::common::{
    PATIENCE, assert_at_rest, eventually, has, key, keys, namespace, pin_all, put, start_put,
};
use crate::tiers::files;
use crate::tiers::late::{Mood, slow_files};
use kvdepot_store::{Config, Depot, Outcome, Pin, Reservation};
use serde_json::{Value, json};

const LEN: usize = 1000;

/// Most blocks of a step, and of those that callers keep pinned or reserved.
const STEP: usize = 8;
const LASTING: usize = 4 * STEP;

const BLOCKS: u64 = 200;

/// A tier that takes steps of few blocks, and notes the largest.
fn few() -> Arc<Mood> {
    let mood = Arc::new(Mood::default());
    mood.step.store(STEP, Ordering::Relaxed);
    mood
}

pub(crate) fn open(mood: &Arc<Mood>, pipeline: &str, dir: &Path, mut settings: Value) -> Depot {
    let lanes = settings.as_object_mut().unwrap().entry("lanes");
    lanes.or_insert_with(|| json!(2));
    for tier in pipeline.split('|') {
        let section = tier.to_ascii_lowercase();
        let given = settings[&section].take();
        settings[&section] = match tier {
            "Cache" => json!({"capacity": "8MiB"}),
            _ => json!({"path": dir.join(tier)}),
        };
        for (name, value) in given.as_object().into_iter().flatten() {
            settings[&section][name] = value.clone();
        }
    }
    // A lookup may take longer than a machine stands still.
    let limit = settings.as_object_mut().unwrap().entry("lookup_timeout");
    limit.or_insert_with(|| json!("60s"));
    let kinds = slow_files(mood).with(files::kind());
    Depot::open(&Config::with_kinds(&kinds, pipeline, &settings).unwrap()).unwrap()
}

/// A depot whose last tier alone has all blocks.
fn filled(mood: &Arc<Mood>, pipeline: &str, dir: &Path, settings: &Value) -> Depot {
    let all: Vec<u64> = (0..BLOCKS).collect();
    let depot = open(mood, pipeline, dir, settings.clone());
    assert!(!put(&namespace(&depot), &all, LEN).contains(&false));
    depot.close();
    mood.largest.store(0, Ordering::Relaxed);
    open(mood, pipeline, dir, settings.clone())
}

/// That the tier was asked, and for few blocks at a time.
fn assert_in_steps(mood: &Mood, call: &str) {
    let largest = mood.largest.swap(0, Ordering::Relaxed);
    assert!((1..=STEP).contains(&largest), "{call}: {largest} keys");
}

#[test]
fn two_phase_calls_and_checks_of_many_keys_ask_in_steps_and_keep_a_bounded_number() {
    for pipeline in ["Slow", "Cache|Slow"] {
        let (mood, dir) = (few(), tempfile::tempdir().unwrap());
        // Most of what is reserved goes past the memory.
        let settings = json!({"write_back_depth": "64KiB"});
        let depot = filled(&mood, pipeline, dir.path(), &settings);
        let ns = namespace(&depot);
        let all = keys(0..BLOCKS);

        let there = ns.acknowledged(&all).unwrap();
        assert_eq!(there, vec![Some(LEN as u64); BLOCKS as usize]);
        assert_in_steps(&mood, "acknowledged");

        let pinned = |some| ns.pin(some, false).unwrap().into_iter().flatten();
        let pinned = |some| pinned(some).collect::<Vec<Pin>>();
        let pins = pinned(&all);
        assert_in_steps(&mood, "pin");
        let first: Vec<_> = pins.iter().map(Pin::key).collect();
        assert_eq!(first, keys(0..LASTING as u64), "{pipeline}");
        ns.unpin(&pins, false);
        let others = pinned(&all[LASTING..2 * LASTING]);
        assert_eq!(others.len(), LASTING, "{pipeline}");
        ns.unpin(&others, false);

        let wanted = |count: u64| {
            let new = (BLOCKS..BLOCKS + count).map(|number| (key(number), vec![LEN as u64]));
            let reserved = ns.reserve(&new.collect::<Vec<_>>()).unwrap();
            reserved.into_iter().flatten().collect::<Vec<Reservation>>()
        };
        mood.largest.store(0, Ordering::Relaxed);
        let reserved = wanted(BLOCKS);
        assert_in_steps(&mood, "reserve");
        let last = depot.stats().tiers.len() - 1;
        let far = reserved.iter().filter(|one| one.tier == last);
        assert_eq!(far.count(), LASTING, "{pipeline}");
        ns.abort(&reserved);
        let few = wanted(LASTING as u64);
        assert_eq!(few.len(), LASTING, "what was aborted is no longer kept");
        ns.abort(&few);
        assert_at_rest(&depot);
        depot.close();
    }
}

#[test]
fn a_prefetch_of_many_keys_brings_all_of_them_step_by_step() {
    let (mood, dir) = (few(), tempfile::tempdir().unwrap());
    let depot = filled(&mood, "Cache|Slow", dir.path(), &json!({}));
    let ns = namespace(&depot);
    let outcomes = |numbers| {
        let task = ns.prefetch(&keys(numbers)).unwrap();
        task.wait(Some(PATIENCE)).unwrap();
        task.outcomes()
    };
    const GAP: u64 = 130;
    assert_eq!(ns.remove(&keys([GAP])).unwrap(), 1);
    let came = outcomes(0..BLOCKS);
    assert_eq!(came[..GAP as usize], [Outcome::Done; GAP as usize]);
    assert!(came[GAP as usize..].iter().all(|one| *one == Outcome::Miss));
    assert_in_steps(&mood, "prefetch");
    let near = |numbers| ns.nearest(&keys(numbers)).unwrap();
    assert_eq!(near(0..GAP), [Some("Cache"); GAP as usize]);
    assert!(
        !near(GAP + 1..BLOCKS).contains(&Some("Cache")),
        "behind the gap"
    );
    // From memory and files in turn.
    assert_eq!(put(&ns, &[GAP], LEN), [true]);
    assert!(outcomes(0..BLOCKS).iter().all(|one| *one == Outcome::Done));
    assert!(has(&ns, &[0, GAP, BLOCKS - 1], LEN));
    assert_at_rest(&depot);
    depot.close();
}

#[test]
fn blocks_that_stay_in_their_tier_are_looked_for_in_steps() {
    let all: Vec<u64> = (0..BLOCKS).collect();
    // What may be written is written, and the tier behind the edge may have the others.
    let (mood, dir) = (few(), tempfile::tempdir().unwrap());
    let budget = json!({"slow": {"write_budget_hour": 2 * LEN}});
    let depot = open(&mood, "Cache|Slow", dir.path(), budget);
    let stored = put(&namespace(&depot), &all, LEN).into_iter();
    assert_eq!(stored.filter(|stored| *stored).count(), 2);
    assert_in_steps(&mood, "what is kept");
    depot.close();
    // They are touched again, and go on.
    let (mood, dir) = (few(), tempfile::tempdir().unwrap());
    let second = json!({"files": {"admission": "second"}});
    let depot = open(&mood, "Slow|Files", dir.path(), second);
    let ns = namespace(&depot);
    assert!(!put(&ns, &all, LEN).contains(&false));
    mood.largest.store(0, Ordering::Relaxed);
    eventually("all blocks go on", || {
        // As many as may be pinned in the queue at a time.
        assert!(!ns.contains(&keys(0..BLOCKS)).unwrap().contains(&false));
        let files = std::fs::read_dir(dir.path().join("Files")).unwrap();
        depot.drain(PATIENCE) && files.count() == BLOCKS as usize
    });
    assert_in_steps(&mood, "what is touched again");
    depot.close();
}

#[test]
fn a_step_that_comes_to_nothing_within_its_limit_is_the_last_of_its_call() {
    let (mood, dir) = (few(), tempfile::tempdir().unwrap());
    let depot = open(&mood, "Slow", dir.path(), json!({"lookup_timeout": "50ms"}));
    let ns = namespace(&depot);
    let all: Vec<u64> = (0..100).collect();
    assert!(!put(&ns, &all, LEN).contains(&false));
    mood.refuses.store(true, Ordering::Relaxed);
    assert!(pin_all(&ns, 0..100).is_empty());
    let refused = || mood.refused.lock().unwrap().drain(..).count();
    assert_eq!(refused(), 1);
    assert_eq!(ns.acknowledged(&keys(0..100)).unwrap(), vec![None; 100]);
    assert_eq!(refused(), 1);
    mood.refuses.store(false, Ordering::Relaxed);
    eventually("pins", || {
        let pinned = pin_all(&ns, 0..32);
        ns.unpin(&pinned, false);
        pinned.len() == 32
    });
    depot.close();
}

#[test]
fn prefetches_side_by_side_leave_no_gap_in_what_they_bring() {
    let (mood, dir) = (few(), tempfile::tempdir().unwrap());
    let settings = || json!({"cache": {"capacity": "64MiB"}});
    let depot = open(&mood, "Cache|Slow", dir.path(), settings());
    let ns = namespace(&depot);
    assert!(!put(&ns, &Vec::from_iter(0..400), 1000).contains(&false));
    assert!(depot.drain(PATIENCE));
    depot.close();
    // The memory begins empty.
    let depot = open(&mood, "Cache|Slow", dir.path(), settings());
    let ns = namespace(&depot);
    // Their steps overlap.
    mood.delay.store(1000, Ordering::Relaxed);
    let tasks = (0..4).map(|call| ns.prefetch(&keys(100 * call..100 * call + 100)).unwrap());
    for task in Vec::from_iter(tasks) {
        task.wait(Some(PATIENCE)).unwrap();
        let outcomes = task.outcomes();
        let brought = outcomes
            .iter()
            .take_while(|one| **one == Outcome::Done)
            .count();
        assert!(
            !outcomes[brought..].contains(&Outcome::Done),
            "{outcomes:?}"
        );
    }
    depot.close();
}

#[test]
fn the_steps_that_a_put_has_left_when_the_time_of_a_close_is_over_end_as_closed() {
    let (mood, dir) = (few(), tempfile::tempdir().unwrap());
    let settings = json!({"close_timeout": "0s", "tier_timeout": "60s"});
    let depot = open(&mood, "Slow", dir.path(), settings);
    let all: Vec<u64> = (0..BLOCKS).collect();
    mood.silent.store(true, Ordering::Relaxed);
    let task = start_put(&namespace(&depot), &all, LEN);
    std::thread::scope(|scope| {
        scope.spawn(|| depot.close());
        eventually("the end of the put", || task.is_done());
        mood.silent.store(false, Ordering::Relaxed);
    });
    assert_eq!(task.outcomes(), vec![Outcome::Closed; BLOCKS as usize]);
}
