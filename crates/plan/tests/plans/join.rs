//! The join with real threads, clocks and panics. `loom_join` tries every interleaving; this one
//! shows what the model checker has no notion of: time-outs and double panics.
#![cfg(not(loom))]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use kvdepot_plan::{Ending, Join};

/// Far longer than any of this takes: a lost wake-up fails instead of hanging.
const PLENTY: Option<Duration> = Some(Duration::from_secs(30));

/// Counts its drops, as an owner of buffers would.
struct Owner(Arc<AtomicUsize>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn owner() -> (Owner, Arc<AtomicUsize>) {
    let drops = Arc::new(AtomicUsize::new(0));
    (Owner(Arc::clone(&drops)), drops)
}

#[test]
fn lanes_complete_once_and_release_before_waking() {
    let (owner, drops) = owner();
    let completions = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&completions);
    let join = Join::new(
        (owner, AtomicUsize::new(0)),
        move |(owner, work), ending| {
            assert!(ending.is_clean());
            assert_eq!(*work.get_mut(), 8 * 100);
            assert_eq!(
                owner.0.load(Ordering::SeqCst),
                0,
                "released after the completion"
            );
            counted.fetch_add(1, Ordering::SeqCst);
        },
    );
    let waiter = join.waiter();
    let lanes: Vec<_> = (0..8)
        .map(|_| {
            let guards: Vec<_> = (0..100).map(|_| join.guard()).collect();
            thread::spawn(move || {
                for guard in guards {
                    guard.payload().1.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    drop(join);
    assert!(waiter.wait(PLENTY));
    assert_eq!(
        (
            drops.load(Ordering::SeqCst),
            completions.load(Ordering::SeqCst)
        ),
        (1, 1)
    );
    assert_eq!(waiter.ending(), Some(Ending::default()));
    lanes.into_iter().for_each(|lane| lane.join().unwrap());
}

#[test]
fn a_slow_lane_keeps_the_payload_through_time_outs() {
    let (owner, drops) = owner();
    let join = Join::new(owner, |_, _| {});
    let (waiter, slow) = (join.waiter(), join.guard());
    drop(join);
    let begun = Instant::now();
    assert!(!waiter.wait(Some(Duration::ZERO)));
    assert!(!waiter.wait(Some(Duration::from_millis(30))));
    assert!(begun.elapsed() >= Duration::from_millis(30));
    assert!(!waiter.is_done());
    assert_eq!(drops.load(Ordering::SeqCst), 0);
    let lane = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        drop(slow);
    });
    assert!(
        waiter.wait(Some(Duration::MAX)),
        "a deadline beyond the clock is no deadline"
    );
    assert_eq!(drops.load(Ordering::SeqCst), 1);
    lane.join().unwrap();
}

#[test]
fn dropping_the_waiter_releases_nothing_and_loses_nothing() {
    let (owner, drops) = owner();
    let (sender, receiver) = mpsc::channel();
    let join = Join::new(owner, move |_, ending| sender.send(ending).unwrap());
    drop(join.waiter());
    let guard = join.guard();
    drop(join);
    assert_eq!(drops.load(Ordering::SeqCst), 0);
    guard.fail();
    drop(guard);
    assert_eq!(drops.load(Ordering::SeqCst), 1);
    assert_eq!(
        receiver.try_recv(),
        Ok(Ending {
            failed: true,
            ..Ending::default()
        })
    );
}

#[test]
fn a_batch_without_lanes_completes_where_it_is_dropped() {
    let (sender, receiver) = mpsc::channel();
    let join = Join::new(vec![1, 2, 3], move |payload: &mut Vec<i32>, _| {
        sender.send(std::mem::take(payload)).unwrap();
    });
    let waiter = join.waiter();
    assert!(!waiter.is_done());
    drop(join);
    assert!(waiter.wait(None));
    assert_eq!(
        receiver.try_recv(),
        Ok(vec![1, 2, 3]),
        "the payload can be taken for reuse"
    );
}

#[test]
fn cancellation_reaches_the_lanes_and_the_ending() {
    let join = Join::new((), |(), ending| assert!(ending.cancelled));
    let (waiter, guard) = (join.waiter(), join.guard());
    drop(join);
    assert!(!guard.is_cancelled());
    waiter.cancel();
    assert!(guard.is_cancelled());
    assert!(!waiter.is_done(), "cancelled is not stopped");
    drop(guard);
    assert_eq!(
        waiter.ending(),
        Some(Ending {
            cancelled: true,
            ..Ending::default()
        })
    );
    let late = Join::new((), |(), _| {}).waiter();
    late.cancel();
    assert_eq!(late.ending(), Some(Ending::default()), "too late to matter");
}

#[test]
fn a_lane_that_unwinds_counts_down() {
    let (owner, drops) = owner();
    let (sender, receiver) = mpsc::channel();
    let join = Join::new(owner, move |_, ending| sender.send(ending).unwrap());
    let (waiter, guard) = (join.waiter(), join.guard());
    drop(join);
    let lane = thread::spawn(move || {
        let _guard = guard;
        panic!("a lane fails in a way nobody foresaw");
    });
    assert!(waiter.wait(PLENTY));
    assert!(lane.join().is_err());
    assert_eq!(drops.load(Ordering::SeqCst), 1);
    let expected = Ending {
        panicked: true,
        ..Ending::default()
    };
    assert_eq!(
        (receiver.try_recv(), waiter.ending()),
        (Ok(expected), Some(expected))
    );
}

#[test]
fn a_completion_that_panics_loses_neither_payload_nor_wake_up() {
    for lane_panics in [false, true] {
        let (owner, drops) = owner();
        let join = Join::new(owner, |_, _| panic!("the completion panics"));
        let (waiter, guard) = (join.waiter(), join.guard());
        drop(join);
        let lane = thread::spawn(move || {
            let _guard = guard;
            assert!(
                !lane_panics,
                "so does the lane, and the process survives both"
            );
        });
        assert!(waiter.wait(PLENTY));
        assert_eq!(
            lane.join().is_err(),
            lane_panics,
            "a lane does not die of a completion"
        );
        assert_eq!(drops.load(Ordering::SeqCst), 1);
        assert_eq!(
            waiter.ending(),
            Some(Ending {
                panicked: true,
                ..Ending::default()
            })
        );
    }
}

#[test]
fn a_payload_that_panics_when_dropped_still_wakes() {
    struct Bad;
    impl Drop for Bad {
        fn drop(&mut self) {
            panic!("the payload panics");
        }
    }
    let join = Join::new(Bad, |_, _| {});
    let waiter = join.waiter();
    assert!(catch_unwind(AssertUnwindSafe(|| drop(join))).is_err());
    assert!(waiter.wait(PLENTY));
}
