//! Prefetches: a prompt's blocks come near before anybody asks for their bytes.

use std::sync::Arc;

use kvdepot_arena::{Error, Key, NamespaceId, Place};

use super::Core;
use super::ledger::{Promotion, Waiter};
use crate::journal::Journal;
use crate::task::{Mirror, Outcome, Task};

impl Core {
    /// Brings the consecutive hits from the first key into the near tier, in the background.
    pub fn prefetch(
        self: &Arc<Core>,
        namespace: NamespaceId,
        keys: &[Key],
        mirror: Option<Mirror>,
    ) -> Result<Task, Error> {
        let _pass = self.gate.enter()?;
        self.metrics.prefetch(keys.len() as u64);
        let journal = Journal::dispatched("prefetch", keys.len(), 0);
        let task = Task::with_mirror(keys.len(), journal, mirror);
        // There are no buffers to hold.
        task.release(keys.len());
        self.note_asked(namespace, keys);
        let stamps = self.uses.call(keys.len());
        let mut found = vec![false; keys.len()];
        let mut pinned: Vec<(usize, usize, Place)> = Vec::with_capacity(keys.len());
        for (number, tier) in self.tiers.iter().enumerate() {
            let stamp = |index| stamps.of(index);
            let each = |index: usize, place| pinned.push((number, index, place));
            tier.pin(namespace, keys, &mut found, stamp, each);
        }
        let hits = found.iter().take_while(|found| **found).count();
        pinned.sort_unstable_by_key(|(_, index, _)| *index);
        let mut ahead = Vec::new();
        let mut passed = Vec::new();
        for (tier, index, place) in pinned {
            if tier > 0 && index < hits {
                let task = task.clone();
                let waiter = Some(Waiter { task, index });
                ahead.push(Promotion {
                    tier,
                    place,
                    waiter,
                });
                continue;
            }
            passed.push((tier, place.token));
            if index < hits {
                task.acknowledge(index, Outcome::Done);
            }
        }
        (hits..keys.len()).for_each(|index| task.acknowledge(index, Outcome::Miss));
        let refused = self.enqueue_promotions(ahead.into_iter(), self.near().block_max() / 2);
        for block in refused {
            passed.push((block.tier, block.place.token));
            if let Some(Waiter { task, index }) = block.waiter {
                task.acknowledge(index, Outcome::Dropped);
            }
        }
        for (number, tier) in self.tiers.iter().enumerate() {
            let here = passed.iter().filter(|(tier, _)| *tier == number);
            tier.unpin(here.map(|(_, token)| *token));
        }
        Ok(task)
    }
}
