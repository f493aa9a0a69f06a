//! What queues and write budgets bound stays bounded when they meet: a queue that is full sends a
//! block past it, and a budget that is used up keeps it.

use std::path::Path;
use std::sync::Barrier;

use crate::common::{key, namespace, put, start_put};
use crate::tiers::files;
use kvdepot_store::{Checksum, Config, Depot, Kinds};
use serde_json::{Value, json};

const LEN: usize = 70_001;
const DEPTH: u64 = 160 << 10;

fn open(dir: &Path, pipeline: &str, sections: Value) -> Depot {
    let mut all = json!({"lanes": 2, "socket": "off", "write_back_depth": DEPTH});
    for tier in pipeline.split('|') {
        let section = tier.to_ascii_lowercase();
        all[&section] = sections[&section].clone();
        if tier != "Cache" {
            all[&section]["path"] = json!(dir.join(tier));
        }
    }
    let kinds = Kinds::standard().with(files::kind());
    Depot::open(&Config::with_kinds(&kinds, pipeline, &all).unwrap()).unwrap()
}

#[test]
fn puts_that_a_budget_keeps_near_do_not_overrun_the_queues() {
    for budget in [2 * LEN, 1 << 30] {
        let dir = tempfile::tempdir().unwrap();
        let sections = json!({
            "cache": {"capacity": "64MiB"}, "dax": {"capacity": "32MiB"},
            "files": {"write_budget_hour": budget},
        });
        let depot = open(dir.path(), "Cache|Dax|Files", sections);
        let all: Vec<u64> = (0..400).collect();
        let task = start_put(&namespace(&depot), &all, LEN);
        let mut most = 0;
        while !task.is_done() {
            most = most.max(depot.stats().write_back_bytes);
            std::thread::yield_now();
        }
        depot.close();
        // And a quarter of the 32 MiB of `Dax`.
        assert!(most <= DEPTH + (8 << 20), "with {budget}: {most}");
    }
}

#[test]
fn reservations_that_a_budget_keeps_near_take_nothing_of_the_queue() {
    for budget in [2 * LEN, 1 << 30] {
        let dir = tempfile::tempdir().unwrap();
        let sections =
            json!({"cache": {"capacity": "64MiB"}, "files": {"write_budget_hour": budget}});
        let depot = open(dir.path(), "Cache|Files", sections);
        let ns = namespace(&depot);
        let wanted: Vec<_> = (0..100)
            .map(|number| (key(number), vec![LEN as u64]))
            .collect();
        let mine: Vec<_> = ns.reserve(&wanted).unwrap().into_iter().flatten().collect();
        let queued = depot.stats().write_back_bytes;
        ns.abort(&mine);
        depot.close();
        assert!(mine.len() > 2 && queued <= DEPTH, "with {budget}: {queued}");
    }
}

#[test]
fn what_is_aborted_while_it_is_committed_still_costs_what_it_costs() {
    const LONG: usize = 2 << 20;
    const BLOCKS: usize = 40;
    for far in ["Dax", "Files"] {
        let dir = tempfile::tempdir().unwrap();
        let mut section = json!({"write_budget_hour": BLOCKS * LONG});
        if far == "Dax" {
            section["capacity"] = json!("16MiB");
        }
        let sections = json!({"cache": {"capacity": "1MiB"}, far.to_ascii_lowercase(): section});
        let depot = open(dir.path(), &format!("Cache|{far}"), sections);
        let ns = namespace(&depot);
        let mut stored = 0;
        for round in 0..2000 {
            let wanted = [(key(round), vec![LONG as u64])];
            let mine: Vec<_> = ns.reserve(&wanted).unwrap().into_iter().flatten().collect();
            if mine.is_empty() {
                break;
            }
            let gate = Barrier::new(2);
            let committed = std::thread::scope(|scope| {
                let committed = scope.spawn(|| {
                    gate.wait();
                    ns.commit(&mine, &[vec![Checksum([7; 16])]]).unwrap()
                });
                gate.wait();
                (0..round % 40 * 5).for_each(|_| std::hint::spin_loop());
                ns.abort(&mine);
                committed.join().unwrap()
            });
            stored += usize::from(committed == [true]);
            ns.remove(&[key(round)]).unwrap();
        }
        depot.close();
        assert!(stored <= BLOCKS, "{far}: {stored} of {BLOCKS}");
    }
}

#[test]
fn what_a_budget_keeps_near_is_acknowledged_by_no_memory_of_what_another_has_removed() {
    let dir = tempfile::tempdir().unwrap();
    let mut sections = json!({"cache": {"capacity": "1MiB"}, "posix": {"capacity": "64MiB"}});
    let other = open(dir.path(), "Posix", sections.clone());
    sections["posix"]["write_budget_hour"] = json!(LEN);
    let depot = open(dir.path(), "Cache|Posix", sections);
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1], LEN), [true]);
    assert_eq!(put(&ns, &[1], LEN), [true], "it is there");
    assert_eq!(namespace(&other).remove(&[key(1)]).unwrap(), 1);
    assert_eq!(put(&ns, &[1], LEN), [false], "and now nowhere that lasts");
    other.close();
    depot.close();
}
