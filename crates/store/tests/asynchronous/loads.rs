//! Calls that want the same block of a far tier at once: one reads it there.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::common::{self, PATIENCE, assert_at_rest, eventually, get, has, keys, namespace, put};
use crate::tiers::late::{Mood, slow_files};
use kvdepot_store::{BlockBuffers, Buffer, Config, Depot, GetOptions, Namespace, Outcome, Task};
use kvdepot_testkit::bytes::content;
use serde_json::{Value, json};

const LEN: usize = 70_001;
const DELAY: u64 = 50_000;

/// A depot whose far tier has blocks 0 to 9, and answers late; nothing is near.
struct Far {
    mood: Arc<Mood>,
    depot: Depot,
    ns: Namespace,
    home: tempfile::TempDir,
}

impl Far {
    fn new(settings: Value) -> Far {
        Far::of(10, settings)
    }

    fn of(count: u64, settings: Value) -> Far {
        let (home, mood) = (tempfile::tempdir().unwrap(), Arc::new(Mood::default()));
        let depot = open(&home, &mood, json!({}));
        let all: Vec<u64> = (0..count).collect();
        assert!(!put(&namespace(&depot), &all, LEN).contains(&false));
        depot.close();
        let depot = open(&home, &mood, settings);
        mood.delay.store(DELAY, Ordering::Relaxed);
        mood.reached.store(0, Ordering::Relaxed);
        let ns = namespace(&depot);
        Far {
            mood,
            depot,
            ns,
            home,
        }
    }

    fn reads(&self) -> u64 {
        self.mood.reached.load(Ordering::Relaxed)
    }

    fn joined(&self) -> u64 {
        self.depot.stats().coalesced_blocks
    }

    fn rot(&self, number: u64) {
        let name = format!("{}-{}", self.ns.id(), common::key(number));
        let path = self.home.path().join("files").join(name);
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(path, bytes).unwrap();
    }
}

fn open(home: &tempfile::TempDir, mood: &Arc<Mood>, mut settings: Value) -> Depot {
    settings["lanes"] = json!(2);
    settings["slow"] = json!({"path": home.path().join("files")});
    settings["close_timeout"] = json!("1s");
    // A lookup may take longer than a machine stands still.
    let others = [
        ("cache", json!({"capacity": "8MiB"})),
        ("lookup_timeout", json!("60s")),
    ];
    for (name, value) in others {
        settings
            .as_object_mut()
            .unwrap()
            .entry(name)
            .or_insert(value);
    }
    let config = Config::with_kinds(&slow_files(mood), "Cache|Slow", &settings).unwrap();
    Depot::open(&config).unwrap()
}

/// A get under way.
struct Got {
    numbers: Vec<u64>,
    buffers: Vec<Buffer>,
    task: Task,
}

impl Got {
    fn begin(ns: &Namespace, numbers: &[u64], prefix: bool) -> Got {
        let buffers = numbers.iter().map(|_| Buffer::from_vec(vec![0xEE; LEN]));
        let buffers: Vec<Buffer> = buffers.collect();
        let mut options = GetOptions::default();
        options.prefix = prefix;
        let into = BlockBuffers::whole(buffers.clone());
        let task = ns.get_with(keys(numbers.iter().copied()), into, options);
        Got {
            numbers: numbers.into(),
            buffers,
            task: task.unwrap(),
        }
    }

    /// Its outcomes; its bytes are those that were put.
    fn end(self) -> Vec<Outcome> {
        self.task.wait(Some(PATIENCE)).unwrap();
        let outcomes = self.task.outcomes();
        for ((number, buffer), outcome) in self.numbers.iter().zip(&self.buffers).zip(&outcomes) {
            assert!(*outcome != Outcome::Done || buffer.to_vec() == content(*number, LEN));
        }
        outcomes
    }
}

#[test]
fn what_many_want_at_once_is_read_once_and_once_more_to_be_near() {
    for prefix in [false, true] {
        let far = Far::new(json!({}));
        // Some ask from two ends: nobody waits for who waits for it.
        let wanted: [&[u64]; 4] = [&[0, 1, 2], &[2, 1, 0], &[1, 1], &[0, 1, 2, 77, 2]];
        let gets = (0..24).map(|at| Got::begin(&far.ns, wanted[at % 4], prefix));
        for (at, got) in gets.collect::<Vec<_>>().into_iter().enumerate() {
            let mut expect = vec![Outcome::Done; wanted[at % 4].len()];
            if at % 4 == 3 {
                expect[3] = Outcome::Miss;
                expect[4] = if prefix { Outcome::Miss } else { Outcome::Done };
            }
            assert_eq!(got.end(), expect);
        }
        assert!(far.reads() <= 2 * 3 + 2, "{} reads", far.reads());
        assert!(far.joined() > 40, "{}", far.joined());
        assert_at_rest(&far.depot);
        assert!(far.joined() < 200 && has(&far.ns, &[0, 1, 2], LEN));
        far.depot.close();
    }
}

#[test]
fn threads_may_come_at_any_moment() {
    let far = Far::new(json!({}));
    far.mood.delay.store(3000, Ordering::Relaxed);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let far = &far;
            scope.spawn(move || {
                for round in 0..10 {
                    std::thread::sleep(Duration::from_micros(thread * 300));
                    let both = [round, (round + 1) % 10];
                    assert!(has(&far.ns, &both, LEN));
                }
            });
        }
    });
    // How little they read depends on how busy the machine is.
    assert!(far.joined() > 0);
    assert_at_rest(&far.depot);
    far.depot.close();
}

#[test]
fn a_get_during_a_prefetch_waits_for_it() {
    let far = Far::new(json!({}));
    let all: Vec<u64> = (0..10).collect();
    let prefetch = far.ns.prefetch(&keys(all.iter().copied())).unwrap();
    eventually("the promotions", || {
        far.depot.stats().inflight_load_blocks == 10
    });
    let gets = [true, false].map(|prefix| Got::begin(&far.ns, &all, prefix));
    assert_eq!(
        gets.map(Got::end),
        [[Outcome::Done; 10], [Outcome::Done; 10]]
    );
    assert_eq!(prefetch.wait(Some(PATIENCE)).unwrap(), [true; 10]);
    assert_eq!((far.reads(), far.joined()), (10, 20));
    assert_at_rest(&far.depot);
    far.depot.close();
}

#[test]
fn where_the_near_tier_does_not_get_it_each_loads_for_itself() {
    let cases = [
        json!({"cache": {"capacity": "64KiB"}}),
        json!({"promote": false}),
    ];
    for settings in cases {
        let far = Far::new(settings);
        let gets = (0..6).map(|_| Got::begin(&far.ns, &[3, 4], false));
        for got in gets.collect::<Vec<_>>() {
            assert_eq!(got.end(), [Outcome::Done; 2]);
        }
        assert_eq!(
            (far.reads(), far.joined()),
            (12, 0),
            "nobody waits for nothing"
        );
        assert_at_rest(&far.depot);
        far.depot.close();
    }

    // Nothing leaves the near tier.
    let far = Far::new(json!({}));
    far.mood.delay.store(0, Ordering::Relaxed);
    let mut near = Vec::new();
    for number in 1000.. {
        if put(&far.ns, &[number], LEN) != [true] {
            break;
        }
        let pins = far.ns.pin(&keys([number]), false).unwrap();
        let is_near = pins[0].as_ref().is_some_and(|pin| pin.tier == 0);
        near.extend(pins.into_iter().flatten());
        if !is_near {
            break;
        }
    }
    assert!(near.len() > 20);
    far.mood.delay.store(DELAY, Ordering::Relaxed);
    far.mood.reached.store(0, Ordering::Relaxed);
    let gets = (0..6).map(|_| Got::begin(&far.ns, &[3, 4], false));
    for got in gets.collect::<Vec<_>>() {
        assert_eq!(got.end(), [Outcome::Done; 2]);
    }
    assert!(far.joined() > 0);
    far.ns.unpin(&near, false);
    assert_at_rest(&far.depot);
    far.depot.close();
}

#[test]
fn a_load_that_fails_keeps_nobody() {
    let far = Far::new(json!({}));
    far.rot(5);
    let begun = Instant::now();
    let gets = (0..6).map(|_| Got::begin(&far.ns, &[5, 6], false));
    for got in gets.collect::<Vec<_>>() {
        let outcomes = got.end();
        assert!(
            matches!(outcomes[0], Outcome::Corrupt | Outcome::Miss),
            "{outcomes:?}"
        );
        assert_eq!(outcomes[1], Outcome::Done);
    }
    // The first has no buffer for it; the others have.
    let small = BlockBuffers::whole([Buffer::from_vec(vec![0; 100])]);
    let misfit = far.ns.get(keys([7]), small).unwrap();
    let gets = (0..3).map(|_| Got::begin(&far.ns, &[7], true));
    for got in gets.collect::<Vec<_>>() {
        assert_eq!(got.end(), [Outcome::Done]);
    }
    misfit.wait(Some(PATIENCE)).unwrap();
    assert_eq!(misfit.outcomes(), [Outcome::Length]);
    // It is removed while it is loaded.
    let got = [8, 8, 8].map(|number| Got::begin(&far.ns, &[number], false));
    far.ns.remove(&keys([8])).unwrap();
    for got in got {
        let outcome = got.end()[0];
        assert!(matches!(outcome, Outcome::Done | Outcome::Miss));
    }
    assert_eq!(get(&far.ns, &[8], LEN), [Outcome::Miss]);
    assert!(
        begun.elapsed() < Duration::from_secs(8),
        "somebody waited for the limit"
    );
    assert_at_rest(&far.depot);
    far.depot.close();
}

#[test]
fn a_get_of_consecutive_hits_goes_on_beside_a_load_of_many_steps_that_stalls() {
    for ends in [true, false] {
        let limit = if ends { "30s" } else { "300ms" };
        let limits = json!({"lookup_timeout": limit, "tier_timeout": limit});
        let far = Far::of(100, limits);
        far.mood.delay.store(0, Ordering::Relaxed);
        let near: Vec<u64> = (90..100).collect();
        eventually("some are near", || {
            let task = far.ns.prefetch(&keys(90..100)).unwrap();
            task.wait(Some(PATIENCE)).unwrap() == [true; 10]
        });
        far.mood.silent.store(true, Ordering::Relaxed);
        let long: Vec<u64> = (0..90).collect();
        let long = Got::begin(&far.ns, &long, false);
        let begun = Instant::now();
        let both = Got::begin(&far.ns, &[90, 91, 40, 41], true);
        assert_eq!(Got::begin(&far.ns, &near, true).end(), [Outcome::Done; 10]);
        assert!(begun.elapsed() < Duration::from_secs(10));
        if ends {
            far.mood.silent.store(false, Ordering::Relaxed);
        }
        let tail = if ends { Outcome::Done } else { Outcome::Miss };
        assert_eq!(both.end(), [Outcome::Done, Outcome::Done, tail, tail]);
        assert_eq!(long.end(), [tail; 90]);
        assert!(begun.elapsed() < Duration::from_secs(20));
        far.mood.silent.store(false, Ordering::Relaxed);
        assert_at_rest(&far.depot);
        far.depot.close();
    }
}

#[test]
fn nobody_waits_longer_than_a_tier_may_take() {
    let far = Far::new(json!({"lookup_timeout": "300ms", "tier_timeout": "300ms"}));
    far.mood.silent.store(true, Ordering::Relaxed);
    let begun = Instant::now();
    let gets = (0..6).map(|_| Got::begin(&far.ns, &[1, 2], false));
    for got in gets.collect::<Vec<_>>() {
        assert_eq!(got.end(), [Outcome::Miss; 2]);
    }
    assert!(
        begun.elapsed() < Duration::from_secs(60),
        "{:?}",
        begun.elapsed()
    );
    far.mood.silent.store(false, Ordering::Relaxed);
    eventually("an answer", || has(&far.ns, &[1, 2], LEN));
    assert_at_rest(&far.depot);
    far.depot.close();

    // A close ends what waits, and nothing else does.
    let far = Far::new(json!({"lookup_timeout": "1h", "tier_timeout": "1h"}));
    far.mood.silent.store(true, Ordering::Relaxed);
    let gets: Vec<Got> = (0..6).map(|_| Got::begin(&far.ns, &[3, 4], true)).collect();
    let mood = Arc::clone(&far.mood);
    let waits = std::thread::spawn(move || {
        let all_ended = gets.iter().all(|got| got.task.wait(Some(PATIENCE)).is_ok());
        // The tier ends behind its answers.
        mood.silent.store(false, Ordering::Relaxed);
        all_ended
    });
    far.depot.close();
    assert!(waits.join().unwrap());
}

#[test]
fn near_keys_of_a_large_get_wait_for_no_tier_that_answers_late() {
    const NEAR: u64 = 100;
    let far = Far::of(1, json!({"lookup_timeout": "1h", "tier_timeout": "1h"}));
    let near: Vec<u64> = (1000..1000 + NEAR).collect();
    assert!(!put(&far.ns, &near, 64).contains(&false));
    assert!(far.depot.drain(PATIENCE));
    far.mood.silent.store(true, Ordering::Relaxed);
    let each = (10_000..12_000).chain(near);
    let into = each.clone().map(|_| Buffer::from_vec(vec![0; 64]));
    let task = far.ns.get(keys(each), BlockBuffers::whole(into));
    let task = task.unwrap();
    let done = || {
        let outcomes = task.outcomes();
        let done = outcomes.iter().filter(|one| **one == Outcome::Done);
        done.count() as u64
    };
    eventually("the near keys are served", || done() == NEAR);
    assert!(!task.is_done());
    far.mood.silent.store(false, Ordering::Relaxed);
    far.depot.close();
}
