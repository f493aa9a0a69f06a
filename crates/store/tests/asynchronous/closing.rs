//! Closes that come while calls are in progress.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Sender};

use kvdepot_store::{Namespace, Outcome};
use kvdepot_testkit::log::Log;
use serde_json::json;

use crate::common::{PATIENCE, Place, eventually, namespace, put, start_put};
use crate::steps;
use crate::tiers::late::Mood;

const LEN: usize = 16 << 10;
const KEYS: usize = 400;

/// Keeps the depot's one lane from all work until the answer is dropped.
fn stop_lane(ns: &Namespace) -> Sender<()> {
    let find = |number| {
        let (begin, begun) = mpsc::channel();
        let (go, gone) = mpsc::channel::<()>();
        let task = start_put(ns, &[number], 1 << 20);
        task.on_done(move || {
            // The call itself may be the last to have the block.
            let name = std::thread::current().name().map(str::to_owned);
            let is_lane = name.is_some_and(|name| name.starts_with("kvdepot-lane"));
            begin.send(is_lane).unwrap();
            let _waits = is_lane.then(|| gone.recv());
        });
        begun.recv_timeout(PATIENCE).unwrap().then_some(go)
    };
    (1_000_000..).find_map(find).unwrap()
}

#[test]
fn a_close_copies_nothing_more_after_its_time_and_says_what_it_waits_for() {
    let place =
        Place::new("Cache", "64MiB", "")
            .with("", "lanes", 1)
            .with("", "close_timeout", "0s");
    let depot = place.open();
    let ns = namespace(&depot);
    let lane = stop_lane(&ns);
    let numbers: Vec<u64> = (0..KEYS as u64).collect();
    let task = start_put(&ns, &numbers, LEN);
    let log = Log::default();
    std::thread::scope(|scope| {
        scope.spawn(|| tracing::subscriber::with_default(log.clone(), || depot.close()));
        eventually("the warning", || {
            let lines = log.lines_with("close waits for calls");
            !lines.is_empty()
        });
        drop(lane);
    });
    // With the one that keeps the lane.
    let named = log.lines_with(&format!("put: 2 calls, {} keys", KEYS + 1));
    assert_eq!(named.len(), 1, "{named:?}");
    let outcomes = task.outcomes();
    let fits = |one: &Outcome| [Outcome::Done, Outcome::Closed].contains(one);
    assert!(outcomes.iter().all(fits), "{outcomes:?}");
    assert!(outcomes.contains(&Outcome::Closed));
}

#[test]
fn blocks_that_wait_for_a_tier_beside_a_call_when_a_closes_time_is_over_are_reported() {
    let (mood, dir) = (Arc::new(Mood::default()), tempfile::tempdir().unwrap());
    let settings = json!({
        "lanes": 1, "close_timeout": "0s", "tier_timeout": "60s", "dax": {"capacity": "256MiB"},
    });
    let depot = steps::open(&mood, "Dax|Slow", dir.path(), settings);
    let ns = namespace(&depot);
    mood.silent.store(true, Ordering::Relaxed);
    assert_eq!(put(&ns, &[1, 2, 3], LEN), [true; 3]);
    let lane = stop_lane(&ns);
    let numbers: Vec<u64> = (10..10 + KEYS as u64).collect();
    let _put = start_put(&ns, &numbers, LEN);
    let log = Log::default();
    std::thread::scope(|scope| {
        scope.spawn(|| tracing::subscriber::with_default(log.clone(), || depot.close()));
        eventually("the warning", || {
            let lines = log.lines_with("close waits for calls");
            !lines.is_empty()
        });
        mood.silent.store(false, Ordering::Relaxed);
        drop(lane);
    });
    let lost = log.lines_with("blocks in the write-back queue are lost");
    assert_eq!(lost.len(), 1, "{lost:?}");
}
