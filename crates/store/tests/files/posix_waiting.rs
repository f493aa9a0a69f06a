//! Requests that wait for their prefetched blocks beside each other, over a small first tier.

use crate::common::{PATIENCE, get, keys, namespace, put};
use crate::folder::open_with;
use kvdepot_store::{Namespace, Outcome};
use serde_json::json;

const LEN: usize = 16_000;

/// Four of these prompts fill the first tier, of 1 MiB.
const PROMPT: u64 = 16;
const PROMPTS: u64 = 12;

/// Prefetches a prompt; false if some of its blocks found no space on their way.
fn prefetch(ns: &Namespace, prompt: &[u64]) -> bool {
    let task = ns.prefetch(&keys(prompt.iter().copied())).unwrap();
    task.wait(Some(PATIENCE)).unwrap();
    !task.outcomes().contains(&Outcome::Dropped)
}

#[test]
fn prompts_that_wait_beside_each_other_are_read_once() {
    let dir = tempfile::tempdir().unwrap();
    let open = || open_with("Cache|Posix", dir.path(), json!({}));
    let prompts = (0..PROMPTS).map(|number| number * PROMPT..(number + 1) * PROMPT);
    let prompts: Vec<Vec<u64>> = prompts.map(Iterator::collect).collect();
    let depot = open();
    let ns = namespace(&depot);
    for prompt in &prompts {
        assert!(!put(&ns, prompt, LEN).contains(&false));
    }
    depot.close();
    // Nothing is in memory.
    let depot = open();
    let ns = namespace(&depot);
    // As an engine does: what waits prefetches until all of it is near, and one that is ready runs
    // at a time.
    let mut waiting: Vec<(&Vec<u64>, bool)> =
        prompts.iter().map(|prompt| (prompt, false)).collect();
    while !waiting.is_empty() {
        for (prompt, is_ready) in &mut waiting {
            *is_ready = *is_ready || prefetch(&ns, prompt);
        }
        let next = waiting.iter().position(|(_, is_ready)| *is_ready);
        let (prompt, _) = waiting.remove(next.unwrap());
        assert!(
            get(&ns, prompt, LEN)
                .iter()
                .all(|one| *one == Outcome::Done)
        );
    }
    let stats = depot.stats();
    let read = stats.promoted_blocks + stats.hit_blocks[1];
    let all = PROMPTS * PROMPT;
    assert!(
        (all..=all * 6 / 5).contains(&read),
        "{read} of {all} blocks"
    );
    depot.close();
}
