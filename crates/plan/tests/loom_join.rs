//! The join under every interleaving of its threads:
//! `RUSTFLAGS="--cfg loom" cargo test -p kvdepot-plan --test loom_join --release`.
//!
//! Lanes report and the models check with *relaxed* atomics, which loom lets return stale values
//! wherever the join itself does not order them: a completion that could miss a lane's report, a
//! payload released twice or never, and a waiter that wakes before the release all fail. A lost
//! wake-up is a deadlock, which loom reports, as it does references that are never dropped.
#![cfg(loom)]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use kvdepot_plan::{Ending, Guard, Join, Waiter};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use loom::thread;

/// What a batch owns: one result a lane, and an owner whose release is counted.
struct Payload {
    results: [AtomicUsize; 2],
    seen: Arc<Seen>,
}

/// What the models look at afterwards.
struct Seen {
    completions: AtomicUsize,
    releases: AtomicUsize,
    /// Sum of the lanes' results, as the completion saw it.
    results: AtomicUsize,
    /// The ending, as the completion saw it; one bit a flag.
    ending: AtomicUsize,
}

impl Drop for Payload {
    fn drop(&mut self) {
        assert_eq!(
            self.seen.completions.load(Relaxed),
            1,
            "released before the completion"
        );
        self.seen.releases.fetch_add(1, Relaxed);
    }
}

fn bits(ending: Ending) -> usize {
    let Ending {
        failed,
        panicked,
        cancelled,
    } = ending;
    usize::from(failed) | usize::from(panicked) << 1 | usize::from(cancelled) << 2
}

const FAILED: usize = 1;
const PANICKED: usize = 2;
const CANCELLED: usize = 4;

fn batch(then: impl FnOnce() + Send + 'static) -> (Join<Payload>, Waiter, Arc<Seen>) {
    let seen = Arc::new(Seen {
        completions: AtomicUsize::new(0),
        releases: AtomicUsize::new(0),
        results: AtomicUsize::new(0),
        ending: AtomicUsize::new(0),
    });
    let results = [AtomicUsize::new(0), AtomicUsize::new(0)];
    let payload = Payload {
        results,
        seen: Arc::clone(&seen),
    };
    let join = Join::new(payload, move |payload, ending| {
        payload.seen.completions.fetch_add(1, Relaxed);
        payload.seen.ending.store(bits(ending), Relaxed);
        // Exclusive accesses: loom refuses them unless every lane's access happened before.
        let sum = payload
            .results
            .iter_mut()
            .map(|result| result.with_mut(|value| *value))
            .sum();
        payload.seen.results.store(sum, Relaxed);
        then();
    });
    let waiter = join.waiter();
    (join, waiter, seen)
}

/// A lane: reports, then stops in its own way. Its panic ends with it, as in a worker thread.
fn lane(
    guard: Guard<Payload>,
    number: usize,
    stop: impl FnOnce(&Guard<Payload>) + 'static,
) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let unwound = catch_unwind(AssertUnwindSafe(move || {
            guard.payload().results[number].store(number + 1, Relaxed);
            stop(&guard);
        }));
        drop(unwound);
    })
}

fn panics() {
    // Unwinds without the panic hook: each interleaving would print a line.
    resume_unwind(Box::new("a lane panics"));
}

fn check(seen: &Seen, results: usize, endings: &[usize]) {
    assert_eq!(seen.completions.load(Relaxed), 1);
    assert_eq!(seen.releases.load(Relaxed), 1);
    assert_eq!(seen.results.load(Relaxed), results);
    let ending = seen.ending.load(Relaxed);
    assert!(endings.contains(&ending), "ending {ending}");
}

fn ended(waiter: &Waiter) -> usize {
    waiter.ending().map_or(usize::MAX, bits)
}

#[test]
fn two_lanes_and_a_waiter() {
    loom::model(|| {
        let (join, waiter, seen) = batch(|| {});
        let lanes = [lane(join.guard(), 0, |_| {}), lane(join.guard(), 1, |_| {})];
        drop(join);
        assert!(waiter.wait(None));
        check(&seen, 3, &[0]);
        assert_eq!(ended(&waiter), 0);
        lanes.into_iter().for_each(|lane| lane.join().unwrap());
    });
}

#[test]
fn the_planner_may_be_the_last_to_stop() {
    loom::model(|| {
        let (join, waiter, seen) = batch(|| {});
        let first = lane(join.guard(), 0, |_| {});
        // The first lane may be done before the second slice is planned.
        let second = lane(join.guard(), 1, |_| {});
        let waiting = thread::spawn(move || {
            assert!(waiter.wait(None));
            check(&seen, 3, &[0]);
        });
        drop(join);
        [first, second, waiting]
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn a_lane_that_fails_beside_one_that_does_not() {
    loom::model(|| {
        let (join, waiter, seen) = batch(|| {});
        let lanes = [
            lane(join.guard(), 0, |guard| guard.fail()),
            lane(join.guard(), 1, |_| {}),
        ];
        drop(join);
        assert!(waiter.wait(None));
        check(&seen, 3, &[FAILED]);
        assert_eq!(ended(&waiter), FAILED);
        lanes.into_iter().for_each(|lane| lane.join().unwrap());
    });
}

#[test]
fn a_lane_that_unwinds_beside_one_that_does_not() {
    loom::model(|| {
        let (join, waiter, seen) = batch(|| {});
        let lanes = [
            lane(join.guard(), 0, |_| panics()),
            lane(join.guard(), 1, |_| {}),
        ];
        drop(join);
        assert!(waiter.wait(None));
        check(&seen, 3, &[PANICKED]);
        lanes.into_iter().for_each(|lane| lane.join().unwrap());
    });
}

#[test]
fn a_slow_lane_that_only_cancellation_stops() {
    loom::model(|| {
        let (join, waiter, seen) = batch(|| {});
        let slow = lane(join.guard(), 0, |guard| {
            while !guard.is_cancelled() {
                thread::yield_now();
            }
        });
        let quick = lane(join.guard(), 1, |_| {});
        drop(join);
        assert!(!waiter.is_done(), "the slow lane still holds the payload");
        assert_eq!(seen.releases.load(Relaxed), 0);
        waiter.cancel();
        assert!(waiter.wait(None));
        check(&seen, 3, &[CANCELLED]);
        [slow, quick]
            .into_iter()
            .for_each(|lane| lane.join().unwrap());
    });
}

#[test]
fn cancellation_races_with_lanes_that_stop_anyway() {
    loom::model(|| {
        let (join, waiter, seen) = batch(|| {});
        let polite = lane(join.guard(), 0, |guard| {
            if !guard.is_cancelled() {
                guard.payload().results[0].store(10, Relaxed);
            }
        });
        let other = waiter.clone();
        let canceller = thread::spawn(move || other.cancel());
        drop(join);
        assert!(waiter.wait(None));
        let results = seen.results.load(Relaxed);
        assert!(results == 1 || results == 10);
        check(&seen, results, &[0, CANCELLED]);
        // A lane that stopped early has seen the cancellation, and then the ending has, too.
        assert!(results == 10 || ended(&waiter) == CANCELLED);
        [polite, canceller]
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn dropping_the_waiting_side_releases_nothing_early() {
    loom::model(|| {
        let (join, waiter, seen) = batch(|| {});
        let lanes = [
            lane(join.guard(), 0, |_| {}),
            lane(join.guard(), 1, |guard| guard.fail()),
        ];
        drop(join);
        // Gives up at once, as after a time-out.
        drop(waiter);
        lanes.into_iter().for_each(|lane| lane.join().unwrap());
        check(&seen, 3, &[FAILED]);
    });
}

#[test]
fn two_waiters_both_wake() {
    loom::model(|| {
        let (join, waiter, seen) = batch(|| {});
        let other = waiter.clone();
        let waiting = thread::spawn(move || assert!(other.wait(None)));
        let only = lane(join.guard(), 0, |_| {});
        drop(join);
        assert!(waiter.wait(None));
        check(&seen, 1, &[0]);
        [only, waiting]
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn a_completion_that_panics_still_releases_and_wakes() {
    loom::model(|| {
        let (join, waiter, seen) = batch(panics);
        let lanes = [
            lane(join.guard(), 0, |_| {}),
            lane(join.guard(), 1, |_| panics()),
        ];
        drop(join);
        assert!(waiter.wait(None));
        check(&seen, 3, &[0, PANICKED]);
        assert_eq!(ended(&waiter), PANICKED);
        lanes.into_iter().for_each(|lane| lane.join().unwrap());
    });
}

#[test]
fn being_done_means_that_everything_is_released() {
    loom::model(|| {
        let (join, waiter, seen) = batch(|| {});
        let only = lane(join.guard(), 0, |_| {});
        drop(join);
        if waiter.is_done() {
            check(&seen, 1, &[0]);
        }
        only.join().unwrap();
        assert!(waiter.is_done());
    });
}
