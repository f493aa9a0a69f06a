//! A file system that hangs, under the tier `Posix`: at whatever call it does, what is asked of it
//! is a miss or not stored when its time is over, the other tiers go on, and a close ends.

use std::time::{Duration, Instant};

use crate::common::{self, eventually, get, has, key, namespace, put, put_each};
use crate::fuse;
use crate::fuse::Mounted;
use kvdepot_store::{Config, Depot, Namespace, Outcome};
use serde_json::{Value, json};

/// Several reads of the file system, and several writes.
const LEN: usize = 300_001;

const TIER: Duration = Duration::from_millis(500);
const CLOSE: Duration = Duration::from_millis(1300);

/// What a machine that stands still may add: less than a depot waits that is not told how long.
const BUSY: Duration = Duration::from_secs(8);

fn open(mounted: &Mounted, pipeline: &str, direct: &str) -> Depot {
    open_with(
        mounted,
        pipeline,
        direct,
        json!({"lookup_timeout": "200ms", "tier_timeout": "500ms", "close_timeout": "300ms"}),
    )
}

/// A depot that waits for a slow machine.
fn open_patient(mounted: &Mounted, direct: &str) -> Depot {
    let patient = json!({"lookup_timeout": "60s", "tier_timeout": "60s", "close_timeout": "60s"});
    open_with(mounted, "Posix", direct, patient)
}

fn open_with(mounted: &Mounted, pipeline: &str, direct: &str, mut settings: Value) -> Depot {
    settings["lanes"] = json!(2);
    settings["posix"] = json!({
        "path": mounted.dir.join("posix"), "capacity": "64MiB", "durability": "power",
        "direct": direct,
    });
    if pipeline.contains("Cache") {
        settings["cache"] = json!({"capacity": "32MiB"});
    }
    Depot::open(&Config::new(pipeline, &settings).unwrap()).unwrap()
}

/// Where a file system may hang, how many of these calls it answers before, and whether the page
/// cache is used.
const READS: [(&str, usize, &str); 5] = [
    ("lookup", 0, "true"),
    ("open", 0, "true"),
    // The header; then the payload.
    ("read", 0, "true"),
    ("read", 2, "true"),
    ("read", 2, "false"),
];
const WRITES: [(&str, usize, &str); 10] = [
    ("lookup", 0, "true"),
    ("create", 0, "true"),
    ("fallocate", 0, "true"),
    // The payload, and one of the headers.
    ("write", 0, "true"),
    ("write", 0, "false"),
    ("write", 9, "true"),
    ("fsync", 0, "true"),
    ("fsyncdir", 0, "true"),
    ("rename", 0, "true"),
    ("rename", 1, "true"),
];

/// Everything at once.
const ALL: &str = "lookup getattr setattr mkdir unlink rmdir rename open read write release fsync \
                   flush opendir readdir releasedir fsyncdir create fallocate statfs";

fn in_time<T>(what: &str, limit: Duration, call: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let answer = call();
    let took = begun.elapsed();
    assert!(took < limit + BUSY, "{what} took {took:?}");
    answer
}

/// What is in a depot that opens after all: everything, and nothing is held or counted for ever.
fn whole(mounted: &Mounted, numbers: &[u64]) {
    mounted.calm();
    let depot = open_patient(mounted, "auto");
    let ns = namespace(&depot);
    assert!(has(&ns, numbers, LEN));
    let fresh: Vec<u64> = numbers.iter().map(|number| number + 500_000).collect();
    assert!(put(&ns, &fresh, LEN).iter().all(|stored| *stored));
    assert!(has(&ns, &fresh, LEN));
    at_rest(&depot);
    depot.close();
}

fn at_rest(depot: &Depot) {
    eventually("the end of pins and reservations", || {
        let tiers = depot.stats().tiers;
        tiers
            .iter()
            .all(|tier| tier.pinned_blocks + tier.reserved_blocks == 0)
    });
}

fn reads_hang(mounted: &Mounted, ns: &Namespace, number: u64, what: &str) {
    let outcome = until_one_hangs(mounted, what, || {
        in_time(what, TIER, || get(ns, &[number], LEN))
    });
    assert_ne!(outcome, [Outcome::Done], "{what}");
}

/// Repeats a call until the file system hangs: where the machine stands still, a call may time out
/// before it comes to that.
fn until_one_hangs<T>(mounted: &Mounted, what: &str, mut call: impl FnMut() -> T) -> T {
    let mut last = None;
    eventually(what, || {
        last = Some(call());
        mounted.hanging() > 0
    });
    last.unwrap()
}

#[test]
fn a_read_that_hangs_is_a_miss_in_time_and_a_close_ends() {
    fuse::over(
        "posix_hung::a_read_that_hangs_is_a_miss_in_time_and_a_close_ends",
        |mounted| {
            let mut next = 0;
            for (call, passed, direct) in READS {
                let what = format!("{call}, after {passed}, direct {direct}");
                next += 10;
                let numbers = [next, next + 1, next + 2];
                let depot = open_patient(mounted, direct);
                assert_eq!(put(&namespace(&depot), &numbers, LEN), [true; 3]);
                depot.close();
                let depot = open(mounted, "Posix", direct);
                let ns = namespace(&depot);
                mounted.hang_after(passed, call);
                reads_hang(mounted, &ns, next, &what);
                in_time(&what, CLOSE, || depot.close());
                whole(mounted, &numbers);
            }
        },
    );
}

#[test]
fn a_write_that_hangs_is_not_stored_and_a_close_ends() {
    fuse::over(
        "posix_hung::a_write_that_hangs_is_not_stored_and_a_close_ends",
        |mounted| {
            let mut next = 0;
            for (call, passed, direct) in WRITES {
                let what = format!("{call}, after {passed}, direct {direct}");
                next += 10;
                let depot = open(mounted, "Posix", direct);
                let ns = namespace(&depot);
                common::stored(&ns, &[next, next + 1], LEN);
                mounted.hang_after(passed, call);
                let all = [next + 2, next + 3, next + 4];
                let stored = until_one_hangs(mounted, &what, || {
                    in_time(&what, 2 * TIER, || put(&ns, &all, LEN))
                });
                assert!(stored.contains(&false), "{what}: {stored:?}");
                in_time(&what, CLOSE, || depot.close());
                // What was said to be stored is.
                let stored = all.iter().zip(stored).filter(|(_, stored)| *stored);
                let mut there: Vec<u64> = stored.map(|(number, _)| *number).collect();
                there.extend([next, next + 1]);
                whole(mounted, &there);
            }
        },
    );
}

#[test]
fn a_block_that_is_removed_while_its_publication_hangs_does_not_come_back() {
    fuse::over(
        "posix_hung::a_block_that_is_removed_while_its_publication_hangs_does_not_come_back",
        |mounted| {
            let depot = open(mounted, "Posix", "true");
            let ns = namespace(&depot);
            for (number, clears) in [(1, false), (2, true)] {
                mounted.hang("fsync");
                let stored = until_one_hangs(mounted, "a put", || put(&ns, &[number], LEN));
                assert_eq!(stored, [false]);
                let removed = match clears {
                    true => ns.clear(),
                    false => ns.remove(&[key(number)]),
                };
                assert_eq!(removed.unwrap(), 0);
                mounted.calm();
                at_rest(&depot);
                assert_eq!(ns.contains(&[key(number)]).unwrap(), [false]);
            }
            depot.close();
        },
    );
}

#[test]
fn other_tiers_go_on_and_the_tier_too_once_it_answers() {
    fuse::over(
        "posix_hung::other_tiers_go_on_and_the_tier_too_once_it_answers",
        |mounted| {
            let depot = open(mounted, "Cache|Posix", "auto");
            let ns = namespace(&depot);
            let near: Vec<u64> = (0..20).collect();
            // A new directory is full until it was looked at, and what takes longer is refused.
            common::stored(&ns, &near, LEN);
            mounted.hang(ALL);
            // Once it is left alone, nobody waits for it at all.
            for number in 1000..1004 {
                in_time("a miss", TIER, || get(&ns, &[number], LEN));
            }
            for number in &near {
                in_time("a hit", Duration::ZERO, || {
                    assert!(has(&ns, &[*number], LEN))
                });
            }
            let task = common::start_put(&ns, &[2000, 2001], LEN);
            in_time("release", TIER, || task.wait_released(Some(BUSY)).unwrap());
            assert!(has(&ns, &[2000], LEN), "it is near");
            in_time("the end of a put", 4 * TIER, || {
                task.wait(Some(BUSY + 4 * TIER)).unwrap()
            });
            mounted.calm();
            eventually("a put that is stored", || put(&ns, &[3000], LEN) == [true]);
            at_rest(&depot);
            mounted.hang(ALL);
            in_time("a close", CLOSE, || depot.close());
            drop(depot);
            whole(mounted, &near);
        },
    );
}

#[test]
fn a_put_waits_for_space_as_long_as_the_tier_may_take() {
    fuse::over(
        "posix_hung::a_put_waits_for_space_as_long_as_the_tier_may_take",
        |mounted| {
            let settings = json!({
                "lanes": 2,
                "posix": {"path": mounted.dir.join("posix"), "capacity": "8MiB", "timeout": "60s"},
            });
            let depot = Depot::open(&Config::new("Posix", &settings).unwrap()).unwrap();
            let ns = namespace(&depot);
            assert!(
                put_each(&ns, &(0..24).collect::<Vec<_>>(), LEN)
                    .iter()
                    .all(|it| *it)
            );
            // As on a disk with much to do: the collection that frees space takes its time.
            mounted.hang("unlink");
            let (answer, answers) = std::sync::mpsc::channel();
            std::thread::scope(|threads| {
                threads.spawn(|| answer.send(put_each(&ns, &(24..40).collect::<Vec<_>>(), LEN)));
                eventually("a collection", || mounted.hanging() > 0);
                let early = answers.recv_timeout(Duration::from_secs(3));
                assert!(early.is_err(), "{early:?}");
                mounted.calm();
                let stored = answers.recv().unwrap();
                assert!(stored.iter().all(|stored| *stored), "{stored:?}");
            });
            depot.close();
        },
    );
}
