//! What goes on over an edge at its first touch, and what at its second (`admission: second`).

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::common::{
    self, PATIENCE, eventually, get, has, key, keys, namespace, put, put_each, start_put,
};
use crate::tiers::late::Mood;
use crate::tiers::{files, late};
use kvdepot_store::option::{Kind, OptionSpec};
use kvdepot_store::{Config, Depot, Namespace, Outcome, TierKind};
use serde_json::{Value, json};

const LEN: usize = 70_001;

/// The files, under the section of another tier.
fn further() -> TierKind {
    const OPTIONS: &[OptionSpec] = &[OptionSpec::new("further", "path", Kind::Text, "none", "")];
    TierKind {
        name: "Further",
        options: OPTIONS,
        ..files::kind()
    }
}

/// Opens a pipeline whose tiers named in `second` take a block at its second touch.
fn open(dir: &Path, pipeline: &str, second: &[&str], settings: Value) -> Depot {
    open_in(&Arc::default(), dir, pipeline, second, settings)
}

/// The same, with a mood of the tier `Further`.
fn open_in(
    mood: &Arc<Mood>,
    dir: &Path,
    pipeline: &str,
    second: &[&str],
    settings: Value,
) -> Depot {
    let mut all = settings;
    let edges = all["edges"].take();
    all.as_object_mut().unwrap().remove("edges");
    all["lanes"] = json!(2);
    // A lookup may take longer than a machine stands still.
    let limit = all.as_object_mut().unwrap().entry("lookup_timeout");
    limit.or_insert_with(|| json!("60s"));
    for tier in pipeline.split('|') {
        let path = dir.join(tier);
        let section = tier.to_ascii_lowercase();
        all[&section] = match tier {
            "Cache" => json!({"capacity": "1MiB"}),
            "Dax" => json!({"path": path, "capacity": "2MiB"}),
            _ => json!({"path": path}),
        };
        if second.contains(&tier) {
            all[&section]["admission"] = json!("second");
        }
        for (name, value) in edges[&section].as_object().into_iter().flatten() {
            all[&section][name] = value.clone();
        }
    }
    let kinds = late::kinds("Further", further(), mood).with(files::kind());
    Depot::open(&Config::with_kinds(&kinds, pipeline, &all).unwrap()).unwrap()
}

/// Whether a tier of files has a block.
fn is_in(dir: &Path, tier: &str, ns: &Namespace, number: u64) -> bool {
    let name = format!("{}-{}", ns.id(), key(number));
    dir.join(tier).join(name).exists()
}

fn outcomes(ns: &Namespace, numbers: &[u64]) -> Vec<Outcome> {
    let task = start_put(ns, numbers, LEN);
    task.wait(Some(PATIENCE)).unwrap();
    task.outcomes()
}

#[test]
fn what_a_nearer_tier_has_is_not_acknowledged_before_it_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let depot = open(dir.path(), "Cache|Files", &["Files"], json!({}));
    let ns = namespace(&depot);
    let acknowledged = || ns.acknowledged(&keys([1])).unwrap()[0];
    assert_eq!(outcomes(&ns, &[1]), [Outcome::Declined]);
    assert_eq!(
        (ns.contains(&keys([1])).unwrap()[0], acknowledged()),
        (true, None)
    );
    // The lookup was its second touch.
    assert!(depot.drain(PATIENCE));
    assert_eq!(acknowledged(), Some(LEN as u64));
    // What others have removed since is written again, though it is near.
    let name = format!("{}-{}", ns.id(), key(1));
    std::fs::remove_file(dir.path().join("Files").join(name)).unwrap();
    assert_eq!(
        (ns.contains(&keys([1])).unwrap()[0], acknowledged()),
        (true, None)
    );
    assert_eq!(
        (outcomes(&ns, &[1]), acknowledged()),
        (vec![Outcome::Done], Some(LEN as u64))
    );
    depot.close();
}

#[test]
fn what_is_put_twice_goes_on_and_what_was_put_once_stays_near() {
    let dir = tempfile::tempdir().unwrap();
    let depot = open(dir.path(), "Cache|Files", &["Files"], json!({}));
    let ns = namespace(&depot);
    assert!(
        !ns.contains(&keys([1])).unwrap()[0],
        "who looks for it first touches nothing"
    );
    assert_eq!(outcomes(&ns, &[1, 2]), [Outcome::Declined; 2]);
    assert!(depot.drain(PATIENCE) && !is_in(dir.path(), "Files", &ns, 1));
    assert_eq!(depot.stats().tiers[1].write_back_deferred_blocks, 2);
    assert_eq!(depot.stats().put_declined_blocks, 2);
    let text = depot.stats().prometheus();
    assert!(
        text.contains("kvdepot_write_back_deferred_blocks_total{tier=\"Files\"} 2"),
        "{text}"
    );
    assert_eq!(outcomes(&ns, &[1]), [Outcome::Done]);
    assert!(is_in(dir.path(), "Files", &ns, 1) && !is_in(dir.path(), "Files", &ns, 2));
    assert_eq!(outcomes(&ns, &[1]), [Outcome::Done], "it is there");
    assert!(has(&ns, &[1, 2], LEN), "what stays is served");
    ns.remove(&keys([1])).unwrap();
    assert_eq!(outcomes(&ns, &[1]), [Outcome::Declined], "it was forgotten");
    depot.close();
}

#[test]
fn what_is_too_short_or_too_long_stays_near() {
    let dir = tempfile::tempdir().unwrap();
    let edges = json!({"files": {"block_min": "64KiB", "block_max": "100KiB"}});
    let depot = open(dir.path(), "Cache|Files", &[], json!({"edges": edges}));
    let ns = namespace(&depot);
    for (number, len, goes_on) in [(1, 1000, false), (2, LEN, true), (3, 200_000, false)] {
        assert_eq!(put(&ns, &[number], len), [goes_on]);
        assert!(has(&ns, &[number], len), "it is near");
        assert_eq!(is_in(dir.path(), "Files", &ns, number), goes_on);
    }
    // One that the near tier cannot have is nowhere.
    assert_eq!(put(&ns, &[4], 2 << 20), [false]);
    assert!(!has(&ns, &[4], 2 << 20));
    assert_eq!(depot.stats().tiers[1].write_back_deferred_blocks, 3);
    depot.close();
}

#[test]
fn no_more_is_written_than_the_budget_allows() {
    for pipeline in ["Cache|Files", "Dax|Files"] {
        let dir = tempfile::tempdir().unwrap();
        let (hour, day) = (3 * LEN as u64, 10 * LEN as u64);
        let edges = json!({"files": {"write_budget_hour": hour, "write_budget_day": day}});
        let depot = open(dir.path(), pipeline, &[], json!({"edges": edges}));
        let ns = namespace(&depot);
        // What is there already costs nothing.
        assert_eq!(put(&ns, &[1], LEN), [true]);
        assert_eq!(put(&ns, &[1], LEN), [true]);
        let last = match pipeline {
            "Cache|Files" => Outcome::Declined,
            // It is acknowledged before.
            _ => Outcome::Done,
        };
        let outcomes = outcomes(&ns, &[2, 3, 4, 5]);
        assert_eq!(outcomes, [Outcome::Done, Outcome::Done, last, last]);
        assert!(depot.drain(PATIENCE));
        let there = (1..=5).filter(|number| is_in(dir.path(), "Files", &ns, *number));
        assert_eq!(there.count(), 3, "{pipeline}");
        assert!(has(&ns, &[1, 2, 3, 4, 5], LEN), "what stays is served");
        assert_eq!(depot.stats().tiers[1].write_back_deferred_blocks, 2);
        depot.close();
    }
}

#[test]
fn what_passes_the_near_tier_by_keeps_the_budget_too() {
    const LONG: usize = 2 << 20;
    let dir = tempfile::tempdir().unwrap();
    let edges = json!({"files": {"write_budget_hour": 2 * LONG}});
    let depot = open(dir.path(), "Cache|Files", &[], json!({"edges": edges}));
    let ns = namespace(&depot);
    // Too large for the near tier: all of one call find the budget as it is before any is written.
    let stored = put(&ns, &[1, 2, 3, 4], LONG);
    assert_eq!(stored.iter().filter(|stored| **stored).count(), 2);
    assert_eq!(put(&ns, &[5], LONG), [false]);
    let there = (1..=5).filter(|number| is_in(dir.path(), "Files", &ns, *number));
    assert_eq!(there.count(), 2);
    depot.close();
}

#[test]
fn a_key_that_comes_twice_in_a_call_beyond_the_budget_is_declined_twice() {
    const LONG: usize = 2 << 20;
    for far in ["Dax", "Files"] {
        let dir = tempfile::tempdir().unwrap();
        let mut edge = json!({"write_budget_hour": 3 << 20});
        if far == "Dax" {
            edge["capacity"] = json!("16MiB");
        }
        let edges = json!({far.to_ascii_lowercase(): edge});
        let depot = open(
            dir.path(),
            &format!("Cache|{far}"),
            &[],
            json!({"edges": edges}),
        );
        let ns = namespace(&depot);
        let stored = put(&ns, &[1, 2, 2, 1], LONG);
        assert_eq!(stored, [true, false, false, true], "{far}");
        // Nobody joins what was given up.
        assert_eq!(put(&ns, &[2], LONG), [false], "{far}");
        depot.close();
    }
}

#[test]
fn what_is_reserved_and_not_written_costs_nothing() {
    const LONG: usize = 2 << 20;
    for far in ["Dax", "Files"] {
        let dir = tempfile::tempdir().unwrap();
        let mut edge = json!({"write_budget_hour": 3 << 20});
        if far == "Dax" {
            edge["capacity"] = json!("16MiB");
        }
        let edges = json!({far.to_ascii_lowercase(): edge});
        let settings = json!({"edges": edges});
        let depot = open(dir.path(), &format!("Cache|{far}"), &[], settings);
        let ns = namespace(&depot);
        let reserve = |number| ns.reserve(&[(key(number), vec![LONG as u64])]).unwrap();
        for _ in 0..3 {
            let mine: Vec<_> = reserve(1).into_iter().flatten().collect();
            assert_eq!(mine.len(), 1, "{far}");
            assert!(reserve(2)[0].is_none(), "{far}: beyond the budget");
            ns.abort(&mine);
            // Another time it is nobody's.
            ns.abort(&mine);
        }
        assert_eq!(put(&ns, &[1, 2], LONG), [true, false], "{far}");
        depot.close();
    }
}

#[test]
fn what_a_silent_tier_was_to_be_given_costs_nothing() {
    const LONG: usize = 2 << 20;
    for (pipeline, len) in [("Cache|Further", LEN), ("Cache|Further", LONG)] {
        let dir = tempfile::tempdir().unwrap();
        let mood = Arc::<Mood>::default();
        let edges = json!({"further": {
            "write_budget_hour": 2 * len, "timeout": "50ms", "lookup_timeout": "50ms",
        }});
        let depot = open_in(&mood, dir.path(), pipeline, &[], json!({"edges": edges}));
        let ns = namespace(&depot);
        mood.lost.store(1000, Relaxed);
        for _ in 0..2 {
            assert_eq!(put(&ns, &[1, 2], len), [false; 2]);
        }
        mood.lost.store(0, Relaxed);
        eventually("an answer", || put(&ns, &[1, 2], len) == [true; 2]);
        assert_eq!(put(&ns, &[3], len), [false], "{len}");
        depot.close();
    }
}

#[test]
fn what_finds_no_room_on_its_way_and_no_budget_behind_is_declined() {
    const LONG: usize = 2 << 20;
    let dir = tempfile::tempdir().unwrap();
    let edges = json!({"cache": {"capacity": "8MiB"}, "files": {"write_budget_hour": LEN}});
    let depot = open(dir.path(), "Cache|Dax|Files", &[], json!({"edges": edges}));
    let ns = namespace(&depot);
    assert_eq!(outcomes(&ns, &[1]), [Outcome::Done]);
    let task = start_put(&ns, &[2], LONG);
    assert_eq!(task.wait(Some(PATIENCE)).unwrap(), [false]);
    assert_eq!(task.outcomes(), [Outcome::Declined]);
    assert!(has(&ns, &[2], LONG), "it stays near");
    common::assert_at_rest(&depot);
    depot.close();
}

#[test]
fn what_is_stored_already_needs_no_budget() {
    const LONG: usize = 2 << 20;
    let dir = tempfile::tempdir().unwrap();
    let edges = json!({"files": {"write_budget_hour": LONG + 2 * LEN, "block_max": "3MiB"}});
    let depot = open(dir.path(), "Cache|Files", &[], json!({"edges": edges}));
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1, 2], LEN), [true; 2]);
    assert_eq!(put(&ns, &[3], LONG), [true]);
    assert_eq!(outcomes(&ns, &[1, 9, 2]), {
        [Outcome::Done, Outcome::Declined, Outcome::Done]
    });
    assert_eq!(put(&ns, &[3, 4], LONG), [true, false]);
    // They leave the near tier.
    let others: Vec<u64> = (100..140).collect();
    assert_eq!(put_each(&ns, &others, LEN), [false; 40]);
    assert_eq!(ns.nearest(&keys([1])).unwrap(), [Some("Files")]);
    assert_eq!(put(&ns, &[1, 8, 2], LEN), [true, false, true]);
    ns.remove(&keys([1])).unwrap();
    assert_eq!(put(&ns, &[1], LEN), [false]);
    common::assert_at_rest(&depot);
    depot.close();
}

#[test]
fn what_finds_the_queue_full_and_no_budget_behind_stays_near() {
    for pipeline in ["Cache|Dax", "Cache|Files", "Dax|Files", "Files|Further"] {
        let dir = tempfile::tempdir().unwrap();
        let far = pipeline
            .split('|')
            .next_back()
            .unwrap()
            .to_ascii_lowercase();
        let edges = json!({far: {"write_budget_hour": 2 * LEN}});
        let settings = json!({"write_back_depth": "80KiB", "edges": edges});
        let depot = open(dir.path(), pipeline, &[], settings);
        let ns = namespace(&depot);
        let some: Vec<u64> = (0..8).collect();
        let outcomes = outcomes(&ns, &some);
        let far = |one: &&Outcome| **one == Outcome::Declined;
        let near = if pipeline.starts_with("Cache") { 6 } else { 0 };
        assert_eq!(outcomes.iter().filter(far).count(), near, "{pipeline}");
        assert!(has(&ns, &some, LEN), "{pipeline}: {outcomes:?}");
        // Nor does a reservation need it.
        let more: Vec<_> = (10..14)
            .map(|number| (key(number), vec![LEN as u64]))
            .collect();
        let mine: Vec<_> = ns.reserve(&more).unwrap().into_iter().flatten().collect();
        assert_eq!(mine.len(), 4, "{pipeline}");
        ns.abort(&mine);
        assert!(depot.drain(PATIENCE));
        common::assert_at_rest(&depot);
        depot.close();
    }
}

#[test]
fn whoever_asks_for_a_block_touches_it() {
    type Ask = fn(&Namespace);
    let asks: [(&str, Ask); 6] = [
        ("contains", |ns| drop(ns.contains(&keys([1])).unwrap())),
        ("prefix", |ns| assert_eq!(ns.prefix(&keys([1])).unwrap(), 1)),
        ("lookup", |ns| drop(ns.lookup(&keys([1])).unwrap())),
        ("get", |ns| assert!(has(ns, &[1], LEN))),
        ("pin", |ns| ns.unpin(&common::pin_all(ns, 1..2), false)),
        ("reserve", |ns| {
            let again = ns.reserve(&[(key(1), vec![LEN as u64])]).unwrap();
            assert!(again[0].is_none());
        }),
    ];
    for (name, ask) in asks {
        let dir = tempfile::tempdir().unwrap();
        let depot = open(dir.path(), "Cache|Files", &["Files"], json!({}));
        let ns = namespace(&depot);
        assert_eq!(put(&ns, &[1, 2], LEN), [false; 2], "{name}");
        ask(&ns);
        assert!(depot.drain(PATIENCE));
        assert!(is_in(dir.path(), "Files", &ns, 1), "{name}");
        assert!(!is_in(dir.path(), "Files", &ns, 2), "{name}");
        depot.close();
    }
}

#[test]
fn where_the_near_tier_acknowledges_a_put_is_stored() {
    for near in ["Dax", "Files"] {
        let dir = tempfile::tempdir().unwrap();
        let pipeline = format!("{near}|Further");
        let open = || open(dir.path(), &pipeline, &["Further"], json!({}));
        let depot = open();
        let ns = namespace(&depot);
        let further = |number| is_in(dir.path(), "Further", &ns, number);
        assert_eq!(put(&ns, &[1, 2, 3], LEN), [true; 3]);
        assert!(depot.drain(PATIENCE) && !further(1), "{near}");
        assert!(has(&ns, &[1], LEN));
        eventually("a block that is read goes on", || further(1));
        assert_eq!(put(&ns, &[2], LEN), [true]);
        eventually("a block that is put again goes on", || further(2));
        depot.close();
        // Nothing is known after a restart: the first touch is the first one then.
        let depot = open();
        let ns = namespace(&depot);
        let further = |number| is_in(dir.path(), "Further", &ns, number);
        assert!(has(&ns, &[3], LEN) && depot.drain(PATIENCE) && !further(3));
        assert!(has(&ns, &[3], LEN));
        eventually("a block that is read twice goes on", || further(3));
        depot.close();
    }
}

#[test]
fn each_edge_decides_for_itself() {
    let dir = tempfile::tempdir().unwrap();
    let depot = open(dir.path(), "Cache|Dax|Files", &["Dax", "Files"], json!({}));
    let ns = namespace(&depot);
    assert_eq!(outcomes(&ns, &[1, 2]), [Outcome::Declined; 2]);
    assert_eq!(put(&ns, &[1], LEN), [true], "the arena acknowledges");
    assert!(depot.drain(PATIENCE) && !is_in(dir.path(), "Files", &ns, 1));
    assert_eq!(depot.stats().tiers[1].blocks, 1);
    assert!(has(&ns, &[1], LEN));
    assert!(depot.drain(PATIENCE) && is_in(dir.path(), "Files", &ns, 1));
    common::assert_at_rest(&depot);
    depot.close();
}

#[test]
fn what_passes_a_tier_by_goes_over_its_edge_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let settings = json!({"write_back_depth": "4KiB"});
    let depot = open(dir.path(), "Cache|Files", &["Files"], settings);
    let ns = namespace(&depot);
    // More than may wait, and then more than fits.
    for len in [LEN, 2 << 20] {
        let number = len as u64;
        assert_eq!(put(&ns, &[number], len), [false]);
        assert_eq!(get(&ns, &[number], len), [Outcome::Miss]);
        assert_eq!(put(&ns, &[number], len), [true]);
        assert!(is_in(dir.path(), "Files", &ns, number));
        assert!(has(&ns, &[number], len));
    }
    depot.close();
}

#[test]
fn a_first_touch_needs_no_room_in_the_queue() {
    let dir = tempfile::tempdir().unwrap();
    let settings = json!({"write_back_depth": "80KiB"});
    let depot = open(dir.path(), "Cache|Files", &["Files"], settings);
    let ns = namespace(&depot);
    let some: Vec<u64> = (0..8).collect();
    assert_eq!(outcomes(&ns, &some), [Outcome::Declined; 8]);
    assert!(has(&ns, &some, LEN));
    assert!(depot.drain(PATIENCE));
    // As much as the queue took, and the rest another time.
    eventually("all of them go on", || {
        assert!(has(&ns, &some, LEN) && depot.drain(PATIENCE));
        some.iter()
            .all(|number| is_in(dir.path(), "Files", &ns, *number))
    });
    common::assert_at_rest(&depot);
    depot.close();
}

#[test]
fn a_first_touch_that_a_late_tier_does_not_take_goes_no_further_either() {
    let dir = tempfile::tempdir().unwrap();
    let mood = Arc::<Mood>::default();
    let soon = json!({"lookup_timeout": "1s"});
    let depot = open_in(&mood, dir.path(), "Further|Files", &["Files"], soon);
    let ns = namespace(&depot);
    mood.lost.store(1000, Relaxed);
    assert_eq!(outcomes(&ns, &[1]), [Outcome::Declined]);
    assert!(!is_in(dir.path(), "Files", &ns, 1));
    assert_eq!(outcomes(&ns, &[1]), [Outcome::Done]);
    assert!(is_in(dir.path(), "Files", &ns, 1));
    depot.close();
}

#[test]
fn what_finds_the_queue_full_at_its_second_touch_goes_on_at_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let mood = Arc::<Mood>::default();
    let settings = json!({"write_back_depth": "80KiB", "overload": "drop"});
    let depot = open_in(&mood, dir.path(), "Dax|Further", &["Further"], settings);
    let ns = namespace(&depot);
    let further = |number| is_in(dir.path(), "Further", &ns, number);
    assert_eq!(put(&ns, &[1, 2], LEN), [true; 2]);
    // It leaves, for want of room.
    for others in [100..120, 120..140] {
        let others: Vec<u64> = others.collect();
        assert!(put_each(&ns, &others, LEN).iter().all(|ok| *ok));
    }
    assert_eq!(get(&ns, &[1], LEN), [Outcome::Miss]);
    mood.delay.store(500_000, Relaxed);
    assert_eq!(put(&ns, &[139], LEN), [true]);
    assert_eq!(put(&ns, &[1], LEN), [true]);
    mood.delay.store(0, Relaxed);
    assert!(depot.drain(PATIENCE) && further(139) && !further(1));
    assert!(has(&ns, &[1], LEN) && depot.drain(PATIENCE));
    assert!(further(1));
    depot.close();
}
