//! A directory stays within its capacity whatever its sharers do, at every moment, and is used.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::{self, PATIENCE, eventually, get, has, keys, namespace, put};
use crate::folder::{look, open_with};
use kvdepot_store::{Outcome, Reservation};
use kvdepot_testkit::child::{self, Child};
use kvdepot_testkit::{Rng, rounds};
use rustix::process::{Resource, getrlimit, setrlimit};
use serde_json::json;

const CAPACITY: u64 = 32 << 20;

#[test]
fn four_processes_at_full_speed_keep_a_directory_within_its_capacity_and_use_it() {
    const TEST: &str = concat!(
        "posix_bounds::",
        "four_processes_at_full_speed_keep_a_directory_within_its_capacity_and_use_it"
    );
    if let Some(role) = child::role() {
        let at = child::value("at");
        let depot = open_with("Posix", Path::new(&at), json!({"capacity": CAPACITY}));
        let ns = namespace(&depot);
        let mut rng = Rng::new(role.parse().unwrap());
        child::say("open");
        let first: u64 = role.parse::<u64>().unwrap() << 32;
        let (mut stored, mut refused) = (0_u64, 0_u64);
        for call in 0.. {
            let len = [5000, 70_001, 300_000][rng.below(3) as usize];
            let numbers: Vec<u64> = (first + call * 8..first + call * 8 + 8).collect();
            for kept in put(&ns, &numbers, len) {
                match kept {
                    true => stored += 1,
                    false => refused += 1,
                }
            }
            if call % 16 == 15 {
                child::say(&format!("{stored} {refused}"));
            }
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let at = [("at", dir.path().to_str().unwrap())];
    let mut writers = ["1", "2", "3", "4"].map(|role| Child::start(TEST, role, &at));
    writers.iter_mut().for_each(|writer| writer.expect("open"));
    let mut last = look(dir.path());
    let (mut most, mut least, mut looks) = (0, u64::MAX, 0_u64);
    let mut full_since: Option<Instant> = None;
    let begun = Instant::now();
    let lasts = Duration::from_secs(rounds(5));
    while full_since.is_none_or(|since| since.elapsed() < lasts) {
        assert!(
            begun.elapsed() < PATIENCE + lasts,
            "it is never full: {least} to {most}"
        );
        let now = look(dir.path());
        looks += 1;
        // All of these were there at one moment, the one between the looks.
        let both: u64 = now
            .iter()
            .filter(|(which, _)| last.contains_key(*which))
            .map(|(_, room)| room)
            .sum();
        assert!(
            both <= CAPACITY * 105 / 100,
            "{both} of {CAPACITY} bytes at once"
        );
        most = most.max(both);
        let all: u64 = now.values().sum();
        if full_since.is_some() {
            // One look may miss what comes behind it.
            let again = || look(dir.path()).values().sum::<u64>();
            let enough = all >= CAPACITY * 8 / 10 || (0..3).any(|_| again() >= CAPACITY * 8 / 10);
            assert!(enough, "{all} of {CAPACITY} bytes are used");
            least = least.min(all);
        } else if all >= CAPACITY * 85 / 100 {
            full_since = Some(Instant::now());
        }
        last = now;
    }
    let mut sums = [0_u64; 2];
    for writer in &mut writers {
        writer.kill();
        let mut said = String::new();
        while let Some(line) = writer.line() {
            said = line;
        }
        // One that had no turn has said nothing.
        for (sum, number) in sums.iter_mut().zip(said.split_whitespace()) {
            *sum += number.parse::<u64>().unwrap();
        }
    }
    let [stored, refused] = sums;
    println!("{looks} looks: {least} to {most} of {CAPACITY}; {stored} stored, {refused} refused");
    assert!(
        stored > 20 * refused,
        "{stored} were stored, {refused} refused"
    );
    // What they were writing is left, and granted, until somebody looks.
    let depot = open_with("Posix", dir.path(), json!({"capacity": CAPACITY}));
    let ns = namespace(&depot);
    eventually("room", || put(&ns, &[1], 70_001) == [true]);
    depot.close();
}

/// Runs `body` in a child process that may open 1,024 files.
fn with_1024_descriptors(test: &str, body: impl FnOnce(&Path)) {
    if child::role().is_some() {
        let mut limit = getrlimit(Resource::Nofile);
        limit.current = Some(1024);
        setrlimit(Resource::Nofile, limit).unwrap();
        body(Path::new(&child::value("at")));
        child::say("done");
        child::sleep_until_killed();
    }
    let dir = tempfile::tempdir().unwrap();
    let at = [("at", dir.path().to_str().unwrap())];
    let mut one = Child::start(test, "1", &at);
    one.expect("done");
    one.kill();
}

#[test]
fn calls_wait_for_open_files_and_no_block_is_missed() {
    const TEST: &str = "posix_bounds::calls_wait_for_open_files_and_no_block_is_missed";
    const LEN: usize = 1000;
    with_1024_descriptors(TEST, |at| {
        let limits = json!({"timeout": "60s", "lookup_timeout": "60s"});
        let depot = open_with("Posix", at, limits);
        let ns = namespace(&depot);
        // Half of the descriptors are for open files; a call of more blocks has them by steps.
        let all: Vec<u64> = (0..3000).collect();
        let stored = put(&ns, &all, LEN);
        assert_eq!(stored.iter().filter(|ok| **ok).count(), all.len());
        // Small calls beside a large one wait for their turn.
        std::thread::scope(|scope| {
            let large = scope.spawn(|| get(&ns, &all, LEN));
            while !large.is_finished() {
                assert!(has(&ns, &[7], LEN));
            }
            let missed = large.join().unwrap();
            assert!(missed.iter().all(|outcome| *outcome == Outcome::Done));
        });
        assert_eq!(depot.stats().tiers[0].timeouts, 0);
        depot.close();
    });
}

#[test]
fn reservations_and_pins_that_last_have_a_quarter_of_the_files_and_leave_others_the_rest() {
    const TEST: &str = concat!(
        "posix_bounds::",
        "reservations_and_pins_that_last_have_a_quarter_of_the_files_and_leave_others_the_rest"
    );
    const LEN: usize = 1000;
    /// A quarter of the 512 files that may be open.
    const LASTING: usize = 128;
    with_1024_descriptors(TEST, |at| {
        for pipeline in ["Posix", "Cache|Posix"] {
            let path = at.join(pipeline.replace('|', "-"));
            let limits = json!({"timeout": "60s", "lookup_timeout": "60s"});
            let open = || open_with(pipeline, &path, limits.clone());
            let depot = open();
            let stored: Vec<u64> = (0..1000).collect();
            assert!(!put(&namespace(&depot), &stored, LEN).contains(&false));
            depot.close();
            // Nothing is in memory.
            let depot = open();
            let ns = namespace(&depot);
            let far = depot.stats().tiers.len() - 1;
            let new: u64 = 1 << 20;
            let others_go_on = |number: u64| {
                assert!(has(&ns, &[number], LEN), "{pipeline}");
                // More than have room in memory.
                let more: Vec<u64> = (new * number..new * number + 1500).collect();
                assert!(!put(&ns, &more, LEN).contains(&false), "{pipeline}");
            };
            let wanted = |count: u64| {
                let blocks = keys(new..new + count).into_iter();
                blocks
                    .map(|key| (key, vec![LEN as u64]))
                    .collect::<Vec<_>>()
            };

            let pins = common::pin_all(&ns, 0..1000);
            assert_eq!(pins.len(), LASTING, "{pipeline}");
            others_go_on(999);
            ns.unpin(&pins, false);

            let reserved = ns.reserve(&wanted(3000)).unwrap().into_iter().flatten();
            let reserved: Vec<Reservation> = reserved.collect();
            let in_files = reserved.iter().filter(|one| one.tier == far).count();
            assert_eq!(in_files, LASTING, "{pipeline}");
            others_go_on(998);
            ns.abort(&reserved);

            let all = ns.reserve_strict(&wanted(3000));
            let refused = all.unwrap_err().to_string();
            // In memory there may be no room either.
            let named = pipeline != "Posix" || refused.contains("open files of the tier");
            assert!(named, "{refused}");
            let few = ns.reserve(&wanted(8)).unwrap();
            assert!(!few.contains(&None), "{pipeline}");
            ns.abort(&few.into_iter().flatten().collect::<Vec<_>>());
            assert_eq!(depot.stats().tiers[far].timeouts, 0);
            depot.close();
        }
    });
}

#[test]
fn calls_of_many_blocks_have_their_files_open_in_steps_beside_pins_that_last() {
    const TEST: &str = concat!(
        "posix_bounds::",
        "calls_of_many_blocks_have_their_files_open_in_steps_beside_pins_that_last"
    );
    const LEN: usize = 1000;
    const BLOCKS: u64 = 3000;
    const PINS: usize = 100;
    with_1024_descriptors(TEST, |at| {
        for pipeline in ["Posix", "Cache|Posix"] {
            let path = at.join(pipeline.replace('|', "-"));
            let open = || {
                let limits = json!({"timeout": "30s", "lookup_timeout": "30s"});
                open_with(pipeline, &path, limits)
            };
            let all: Vec<u64> = (0..BLOCKS).collect();
            let (first, rest) = all.split_at(BLOCKS as usize / 2);
            let depot = open();
            let ns = namespace(&depot);
            assert!(put(&ns, first, LEN).into_iter().all(|stored| stored));
            depot.close();
            let depot = open();
            let ns = namespace(&depot);
            // Somebody keeps some of the 512 files that may be open.
            let pins = common::pin_all(&ns, 0..PINS as u64);
            assert_eq!(pins.len(), PINS);
            let stored = put(&ns, rest, LEN).into_iter();
            assert_eq!(stored.filter(|stored| *stored).count(), rest.len());
            let came = get(&ns, first, LEN).into_iter();
            let came = came.filter(|outcome| *outcome == Outcome::Done).count();
            assert_eq!(came, first.len(), "{pipeline}");
            ns.unpin(&pins, false);
            assert_eq!(depot.stats().tiers.last().unwrap().timeouts, 0);
            depot.close();
        }
    });
}
