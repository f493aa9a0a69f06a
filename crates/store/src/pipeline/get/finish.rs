//! What follows the copies of a get from one tier.

use std::sync::Arc;

use kvdepot_arena::Place;

use super::Get;
use crate::pipeline::ledger::Promotion;
use crate::pipeline::loads::Joining;
use crate::task::Outcome;

impl Get {
    /// All copies from one tier have stopped.
    pub(super) fn finish(
        self: &Arc<Get>,
        tier: usize,
        pinned: &[(usize, Place)],
        outcomes: &[Outcome],
    ) {
        let core = &self.core;
        let from = &core.tiers[tier];
        let (mut hits, mut failed, mut corrupt) = (Vec::new(), Vec::new(), Vec::new());
        for (one, outcome) in pinned.iter().zip(outcomes) {
            match outcome {
                Outcome::Done => hits.push(*one),
                Outcome::Corrupt => corrupt.push(*one),
                _ => failed.push(*one),
            }
        }
        let bytes = hits.iter().map(|(_, place)| place.len).sum();
        let count = hits.len();
        from.unpin(failed.iter().map(|(_, place)| place));
        if tier > 0 {
            // Promotion keeps the pins of what it takes over.
            let blocks: Vec<Promotion> = {
                let mut loads = self.loads.lock();
                let each = hits.into_iter().map(|(index, place)| Promotion {
                    tier,
                    place,
                    waiter: None,
                    busy_until: None,
                    load: loads.remove(&index),
                });
                each.collect()
            };
            core.promote_later(tier, blocks);
        } else {
            from.unpin(hits.iter().map(|(_, place)| place));
        }
        core.metrics.hit(tier, count as u64, bytes);
        self.task.ends_at(from.name(), count);
        let each = pinned.iter().zip(outcomes);
        let settled = each
            .filter(|(_, outcome)| **outcome != Outcome::Corrupt)
            .map(|((index, _), outcome)| (*index, *outcome));
        self.task.settle(settled.clone());
        self.end_loads(settled.map(|(index, _)| index));
        if !corrupt.is_empty() {
            self.discard(tier, corrupt);
        }
    }

    /// Unpublishes what did not verify in a tier. Not before that has answered, or its time is
    /// over, is the next one asked: it may have nothing to say, and who hears that puts the block
    /// again.
    fn discard(self: &Arc<Get>, tier: usize, corrupt: Vec<(usize, Place)>) {
        let from = &self.core.tiers[tier];
        for (_, place) in &corrupt {
            tracing::warn!(key = %place.identity.key, tier = from.name(),
                "checksum mismatch during a read; block removed");
        }
        let places: Vec<Place> = corrupt.iter().map(|(_, place)| *place).collect();
        let get = Arc::clone(self);
        from.discard(&places).then(move |_| {
            let core = &get.core;
            core.tiers[tier].unpin(places.iter());
            let indices = corrupt.iter().map(|(index, _)| *index);
            if tier + 1 < core.tiers.len() {
                return get.start(indices.collect(), tier + 1, Joining::Each, None);
            }
            let settled = indices.clone();
            get.task
                .settle(settled.map(|index| (index, Outcome::Corrupt)));
            get.end_loads(indices);
        });
    }
}
