//! Random histories of a depot beside a naive map. With room for everything the answers must be
//! the map's; with too little a block may be missing, but never wrong, and nothing may leak.

use crate::common::{
    self, PATIENCE, Place, Served, assert_at_rest, get, key, keys, namespace, namespace_of, verify,
};
use kvdepot_service::Mover;
use kvdepot_store::{BlockBuffers, Buffer, Depot, Namespace, Outcome, Pin};
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::model::Model;
use kvdepot_testkit::{Rng, rounds};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

const KEYS: u64 = 24;

#[derive(Clone, Debug)]
enum Step {
    Put {
        first: u64,
        count: u64,
        len: usize,
    },
    Get {
        first: u64,
        count: u64,
    },
    Remove {
        number: u64,
    },
    Clear,
    /// Reserve, move, and commit or abort.
    TwoPhase {
        number: u64,
        parts: Vec<u64>,
        commit: bool,
    },
    Pin {
        number: u64,
    },
    Unpin,
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let number = 0..KEYS;
    let len = prop_oneof![1..200_usize, 4000..4200_usize, 10_000..40_000_usize];
    let step = prop_oneof![
        6 => (number.clone(), 1..6_u64, len)
            .prop_map(|(first, count, len)| Step::Put { first, count, len }),
        6 => (number.clone(), 1..6_u64).prop_map(|(first, count)| Step::Get { first, count }),
        2 => number.clone().prop_map(|number| Step::Remove { number }),
        1 => Just(Step::Clear),
        3 => (number.clone(), prop::collection::vec(1..9000_u64, 1..4), any::<bool>())
            .prop_map(|(number, parts, commit)| Step::TwoPhase { number, parts, commit }),
        2 => number.prop_map(|number| Step::Pin { number }),
        2 => Just(Step::Unpin),
        1 => Just(Step::Reopen),
    ];
    prop::collection::vec(step, 1..60)
}

/// The depot under test, with the map beside it.
struct Twin {
    place: Place,
    depot: Depot,
    ns: Namespace,
    mover: Option<Mover>,
    model: Model,
    pins: Vec<(Pin, Vec<u8>)>,
    /// Whether everything fits, so that nothing may be missing.
    exact: bool,
    lasts: bool,
}

impl Twin {
    fn new(pipeline: &str, exact: bool) -> Twin {
        let (cache, dax) = if exact {
            ("8MiB", "16MiB")
        } else {
            ("300KiB", "600KiB")
        };
        let mut place = Place::new(pipeline, cache, dax);
        if pipeline.contains("Dax") {
            place = place.with("dax", "records", 2 * KEYS + 8);
        }
        let depot = place.serve();
        Twin {
            ns: namespace(&depot),
            mover: Mover::attach(&place.socket(), Some(1), true).ok(),
            depot,
            place,
            model: Model::default(),
            pins: Vec::new(),
            exact,
            lasts: pipeline.contains("Dax"),
        }
    }

    fn run(&mut self, step: &Step) {
        match step {
            Step::Put { first, count, len } => self.put(*first, *count, *len),
            Step::Get { first, count } => (*first..first + count).for_each(|n| self.get(n)),
            Step::Remove { number } => {
                // A repeated key counts once.
                let count = self.ns.remove(&[key(*number); 2]).unwrap();
                assert!(count <= 1, "{count}");
                assert!(!self.exact || (count == 1) == self.model.may_contain(*number));
                self.model.remove(*number);
            }
            Step::Clear => {
                self.ns.clear().unwrap();
                (0..2 * KEYS).for_each(|number| self.model.remove(number));
            }
            Step::TwoPhase {
                number,
                parts,
                commit,
            } => self.two_phase(*number, parts, *commit),
            Step::Pin { number } => {
                if let Some(pin) = self.ns.pin(&[key(*number)], false).unwrap().remove(0) {
                    let bytes = self.load(&pin);
                    assert!(self.model.allows(*number, &bytes));
                    self.pins.push((pin, bytes));
                }
            }
            Step::Unpin => self.unpin(),
            Step::Reopen => self.reopen(),
        }
        // Nobody else's, whatever the keys are.
        let strange = namespace_of(&self.depot, "strange");
        assert!(!strange.contains(&keys(0..KEYS)).unwrap().contains(&true));
    }

    /// The block that a number stands for as long as it is there: a put of a key that is stored
    /// changes nothing.
    fn put(&mut self, first: u64, count: u64, len: usize) {
        let numbers: Vec<u64> = (first..first + count).collect();
        let buffers = numbers.iter().map(|number| common::block(*number, len));
        let task = self
            .ns
            .put(keys(numbers.clone()), BlockBuffers::whole(buffers))
            .unwrap();
        for number in &numbers {
            if !self.exact || !self.model.may_contain(*number) {
                self.model.put(*number, *number, len);
            }
        }
        let stored = task.wait(Some(PATIENCE)).unwrap();
        assert!(
            !self.exact || !stored.contains(&false),
            "{:?}",
            task.outcomes()
        );
    }

    fn get(&self, number: u64) {
        let mut done = false;
        for version in self.model.versions(number) {
            assert_eq!(version.content, number);
            match get(&self.ns, &[number], version.len)[0] {
                Outcome::Done => done = true,
                Outcome::Length => {}
                Outcome::Miss => assert!(!self.exact),
                other => panic!("{other:?}"),
            }
        }
        let may = self.model.may_contain(number);
        assert!(!self.exact || done == may);
        let there = self.ns.contains(&[key(number)]).unwrap()[0];
        assert!(if self.exact {
            there == may
        } else {
            may || !there
        });
    }

    fn two_phase(&mut self, number: u64, parts: &[u64], commit: bool) {
        let reserve = || self.ns.reserve(&[(key(number), parts.to_vec())]).unwrap();
        let mut reserved = reserve().remove(0);
        if self.exact && !self.model.may_contain(number) {
            // A copy of what has been removed meanwhile may still be on its way to another tier.
            common::eventually("reserve", || {
                reserved = reserved.take().or_else(|| reserve().remove(0));
                reserved.is_some()
            });
        }
        let Some(reserved) = reserved else {
            return;
        };
        let total: u64 = parts.iter().sum();
        let whole = content(number, total as usize);
        let mut sums = Vec::new();
        let mut at = 0;
        for (part, len) in (0..).zip(parts) {
            let bytes = Buffer::from_vec(whole[at..at + *len as usize].to_vec());
            let blocks = BlockBuffers::whole([bytes]);
            let job = self
                .mover
                .as_ref()
                .unwrap()
                .store(&[reserved.placement()], &blocks, part)
                .unwrap();
            assert!(job.wait(Some(PATIENCE)));
            sums.push(job.checksums()[0].unwrap());
            at += *len as usize;
        }
        if commit {
            assert_eq!(self.ns.commit(&[reserved], &[sums]).unwrap(), [true]);
            self.model.put(number, number, total as usize);
        } else {
            self.ns.abort(&[reserved]);
        }
    }

    fn load(&self, pin: &Pin) -> Vec<u8> {
        let mut bytes = Vec::new();
        for part in 0.. {
            let Ok(ranges) = self.mover.as_ref().unwrap().locate(&pin.placement(), part) else {
                break;
            };
            let len: u64 = ranges.iter().map(|(_, _, len)| len).sum();
            let buffer = Buffer::from_vec(vec![0; len as usize]);
            let blocks = BlockBuffers::whole([buffer.clone()]);
            let job = self
                .mover
                .as_ref()
                .unwrap()
                .load(&[pin.placement()], &blocks, part)
                .unwrap();
            assert!(job.wait(Some(PATIENCE)) && job.checksums()[0].is_some());
            bytes.extend(buffer.to_vec());
        }
        bytes
    }

    /// What was pinned is what it was, whatever has happened since.
    fn unpin(&mut self) {
        for (pin, bytes) in std::mem::take(&mut self.pins) {
            assert_eq!(self.load(&pin), bytes);
            self.ns.unpin(&[pin], true);
        }
    }

    fn rest(&mut self) {
        self.unpin();
        assert!(self.depot.drain(PATIENCE));
        common::eventually("rest", || {
            self.depot
                .stats()
                .tiers
                .iter()
                .all(|tier| tier.pinned_blocks == 0)
        });
        assert_at_rest(&self.depot);
    }

    fn reopen(&mut self) {
        self.rest();
        self.depot.close();
        if self.lasts {
            let found = verify(&self.place.arena());
            assert!(found.bad.is_empty() && found.damaged_records.is_empty());
        } else {
            self.model = Model::default();
        }
        // Else the new owner would wait for it as for a worker of the old one.
        self.mover = None;
        self.depot = self.place.serve();
        assert_eq!(self.depot.opening().outranked, 0);
        self.ns = namespace(&self.depot);
        self.mover = Mover::attach(&self.place.socket(), Some(1), true).ok();
        (0..KEYS).for_each(|number| self.get(number));
    }
}

fn run(name: &str, pipeline: &str, exact: bool) {
    let mut rng = Rng::for_test(name);
    let seed: Vec<u8> = (0..4).flat_map(|_| rng.bits().to_le_bytes()).collect();
    let config = Config {
        cases: rounds(60) as u32,
        failure_persistence: None,
        ..Config::default()
    };
    let source = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
    let mut runner = TestRunner::new_with_rng(config, source);
    let outcome = runner.run(&steps(), |steps| {
        let mut twin = Twin::new(pipeline, exact);
        steps.iter().for_each(|step| twin.run(step));
        twin.rest();
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
}

#[test]
fn model_of_a_cache_with_room() {
    run("model_depot::model_of_a_cache_with_room", "Cache", true);
}

#[test]
fn model_of_an_arena_with_room() {
    run("model_depot::model_of_an_arena_with_room", "Dax", true);
}

#[test]
fn model_of_two_tiers_with_room() {
    run(
        "model_depot::model_of_two_tiers_with_room",
        "Cache|Dax",
        true,
    );
}

#[test]
fn model_of_an_arena_under_pressure() {
    run(
        "model_depot::model_of_an_arena_under_pressure",
        "Dax",
        false,
    );
}

#[test]
fn model_of_two_tiers_under_pressure() {
    run(
        "model_depot::model_of_two_tiers_under_pressure",
        "Cache|Dax",
        false,
    );
}
