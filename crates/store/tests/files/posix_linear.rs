//! Calls of many blocks over the tier `Posix`: their calls to the file system grow with the blocks
//! alone, small calls have their turns among them, and a close ends them in their midst.

use std::collections::BTreeMap;
use std::path::Path;

use crate::common::{eventually, get, has, key, keys, namespace, put, start_put};
use crate::folder::{at_rest, open_with};
use crate::fuse;
use kvdepot_store::{BlockBuffers, Buffer, Config, Depot, Namespace, Outcome, Task};
use kvdepot_testkit::few_rounds;
use serde_json::{Value, json};

const LEN: usize = 64;

/// A block that no call here stores but the first.
const FIRST: u64 = 1 << 40;

/// The settings of a directory with space for so many blocks, a page for the header of each.
fn roomy(blocks: u64) -> Value {
    json!({
        "capacity": format!("{}KiB", 16 * blocks + 16_384),
        "timeout": "60s", "lookup_timeout": "60s",
    })
}

/// A depot whose directory was counted.
fn counted(pipeline: &str, at: &Path, blocks: u64) -> Depot {
    let depot = open_with(pipeline, at, roomy(blocks));
    let ns = namespace(&depot);
    eventually("the first count", || put(&ns, &[FIRST], LEN) == [true]);
    depot
}

#[test]
fn the_file_system_calls_of_a_call_grow_with_its_keys_alone() {
    let test = "posix_linear::the_file_system_calls_of_a_call_grow_with_its_keys_alone";
    // The file system is a process with little time.
    let most = few_rounds(4000, 800);
    fuse::over(test, |mounted| {
        let mut counts: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
        let sizes = std::iter::successors(Some(500), |count| Some(count * 2));
        for count in sizes.take_while(|count| *count <= most) {
            let at = mounted.dir.join(count.to_string());
            std::fs::create_dir(&at).unwrap();
            let numbers: Vec<u64> = (0..count).collect();
            let mut note = |what, call: &dyn Fn(&Namespace)| {
                let depot = counted("Posix", &at, count);
                let ns = namespace(&depot);
                let before = mounted.calls();
                call(&ns);
                // Files that are closed behind their call count, too.
                depot.close();
                let calls = mounted.calls() - before;
                counts.entry(what).or_default().push(calls);
            };
            let stores = |ns: &Namespace| {
                let stored = start_put(ns, &numbers, LEN).wait(None).unwrap();
                assert!(!stored.contains(&false));
            };
            note("put", &stores);
            note("put again", &stores);
            note("get", &|ns: &Namespace| {
                let there = start_get(ns, &numbers).wait(None).unwrap();
                assert!(!there.contains(&false));
            });
            note("remove", &|ns: &Namespace| {
                assert_eq!(ns.remove(&keys(0..count)).unwrap(), numbers.len());
            });
        }
        for (what, calls) in counts {
            for pair in calls.windows(2) {
                assert!(
                    pair[1] as f64 <= 2.2 * pair[0] as f64,
                    "{what}: {calls:?} for 500 keys, and each for twice as many"
                );
            }
        }
    });
}

/// The fewest blocks of a large call that end while a small one is under way.
fn fewest_meanwhile(large: &Task, mut small: impl FnMut()) -> usize {
    let ended = || {
        let outcomes = large.outcomes().into_iter();
        outcomes.filter(|one| *one != Outcome::Pending).count()
    };
    let mut fewest = usize::MAX;
    while !large.is_done() {
        let before = ended();
        small();
        fewest = fewest.min(ended() - before);
    }
    large.wait(None).unwrap();
    fewest
}

fn start_get(ns: &Namespace, numbers: &[u64]) -> Task {
    let into = numbers.iter().map(|_| Buffer::from_vec(vec![0; LEN]));
    let buffers = BlockBuffers::whole(into);
    ns.get(keys(numbers.iter().copied()), buffers).unwrap()
}

#[test]
fn small_calls_have_their_turns_in_the_midst_of_a_large_one() {
    // 256,000 in `make test-all`.
    let count = few_rounds(2000, 12_800);
    for pipeline in ["Posix", "Cache|Posix"] {
        let dir = tempfile::tempdir().unwrap();
        let depot = counted(pipeline, dir.path(), 2 * count);
        let ns = namespace(&depot);
        let numbers: Vec<u64> = (0..count).collect();
        let stored = start_put(&ns, &numbers, LEN).wait(None).unwrap();
        assert!(!stored.contains(&false));
        let mut next = FIRST + 1;
        for large in ["put", "get"] {
            for small in ["put", "get", "lookup", "stats"] {
                let midst = |round: u64| {
                    let from = (round + 1) * count;
                    let new: Vec<u64> = (from..from + count).collect();
                    let task = match large {
                        "put" => start_put(&ns, &new, LEN),
                        _ => start_get(&ns, &numbers),
                    };
                    let fewest = fewest_meanwhile(&task, || match small {
                        "put" => {
                            next += 1;
                            assert_eq!(put(&ns, &[next], LEN), [true]);
                        }
                        "get" => assert_eq!(get(&ns, &[FIRST], LEN), [Outcome::Done]),
                        "lookup" => assert_eq!(ns.contains(&[key(FIRST)]).unwrap(), [true]),
                        _ => assert!(depot.stats().tiers.iter().all(|tier| tier.timeouts == 0)),
                    });
                    ns.remove(&keys(new)).unwrap();
                    fewest < count as usize / 8
                };
                // On a machine that stands still, large calls may end in between.
                let has_turns = (0..8).any(midst);
                assert!(has_turns, "{pipeline}: {small} beside {large}");
            }
        }
        at_rest(&depot);
        depot.close();
    }
}

#[test]
fn a_close_ends_a_call_of_many_blocks_in_its_midst() {
    let count = few_rounds(4000, 12_800);
    let numbers: Vec<u64> = (0..count).collect();
    for pipeline in ["Posix", "Cache|Posix"] {
        let ends_early = |_| {
            let dir = tempfile::tempdir().unwrap();
            let mut posix = roomy(count);
            posix["path"] = json!(dir.path().join("posix"));
            let mut settings = json!({
                "lanes": 2, "close_timeout": "0s", "socket": "off", "posix": posix,
            });
            if pipeline.contains("Cache") {
                settings["cache"] = json!({"capacity": "1MiB"});
            }
            let depot = Depot::open(&Config::new(pipeline, &settings).unwrap()).unwrap();
            let ns = namespace(&depot);
            eventually("the first count", || put(&ns, &[FIRST], LEN) == [true]);
            let task = start_put(&ns, &numbers, LEN);
            depot.close();
            assert!(task.is_done(), "{pipeline}");
            let outcomes = numbers.iter().zip(task.outcomes());
            let stored = outcomes.filter(|(_, outcome)| *outcome == Outcome::Done);
            let stored: Vec<u64> = stored.map(|(number, _)| *number).collect();
            // Acknowledged, and so there.
            let depot = open_with("Posix", dir.path(), roomy(count));
            let ns = namespace(&depot);
            for some in stored.chunks(1000) {
                assert!(has(&ns, some, LEN), "{pipeline}");
            }
            at_rest(&depot);
            depot.close();
            stored.len() < numbers.len()
        };
        // On a machine that stands still, all may be stored before the close begins.
        assert!((0..8).any(ends_early), "{pipeline}");
    }
}
