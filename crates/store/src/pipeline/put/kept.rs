//! What edges keep from going on: it stays where it is, and is stored all the same where a tier
//! further away has it already.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::Arc;

use kvdepot_arena::Key;

use super::{Admitted, Put, Routes};
use crate::pipeline::ledger::Dues;
use crate::pipeline::turns::{Turn, in_turns};
use crate::task::Outcome;
use crate::tier::{Answer, Stage};

impl Put {
    /// Ends keys that an edge keeps, and whose buffers are released. Asks the tiers that may answer
    /// late, from `from` on: what arenas have was seen before.
    pub(super) fn end_kept(self: &Arc<Put>, kept: Vec<usize>, from: usize) {
        if kept.is_empty() {
            return;
        }
        let core = &self.core;
        let mut behind = core.tiers.iter().enumerate().skip(from);
        let late = behind.find_map(|(tier, stage)| {
            let apart = stage.apart().filter(|_| core.takes_puts(tier))?;
            Some((tier, apart))
        });
        let Some((tier, apart)) = late else {
            return self.end(kept, Outcome::Declined);
        };
        let put = Arc::clone(self);
        in_turns(kept, apart.step_max(), move |step, turn| {
            put.ask_kept(tier, step, turn);
        });
    }

    fn ask_kept(self: &Arc<Put>, tier: usize, kept: Vec<usize>, turn: Turn) {
        let Some(apart) = self.core.tiers[tier].apart() else {
            return;
        };
        let keys: Vec<Key> = kept.iter().map(|index| self.keys[*index]).collect();
        let (put, limit) = (Arc::clone(self), apart.lookup_limit());
        // Not by a probe, which believes for a while what others may have removed since.
        let answer = match turn.is_over() {
            true => Answer::Now(None),
            false => apart.pin(self.namespace, &keys, &[]),
        };
        answer.then(move |places| {
            let places = places.unwrap_or_default();
            let mut there = places.iter().map(Option::is_some);
            let (stored, kept): (Vec<_>, Vec<_>) =
                kept.into_iter().partition(|_| there.next() == Some(true));
            put.core.tiers[tier].unpin(places.iter().flatten());
            if stored.is_empty() {
                turn.came_to_nothing(limit);
            }
            put.end(stored, Outcome::Done);
            put.end_kept(kept, tier + 1);
            drop(turn);
        });
    }

    fn end(&self, indices: Vec<usize>, outcome: Outcome) {
        for index in indices {
            self.core.metrics.put_outcome(outcome);
            self.task.acknowledge(index, outcome);
        }
    }

    /// Finds room in a nearer tier for what may not be written further away any more, and went
    /// there because a queue was full; what was too large for those is declined.
    pub(super) fn keep_near(self: &Arc<Put>, routes: &mut Routes) {
        let core = &self.core;
        let mut unpaid = std::mem::take(&mut routes.unpaid);
        for (near, stage) in core.tiers.iter().enumerate() {
            let takes = |(tier, index): &mut (usize, usize)| {
                let len = self.caller.bytes(*index);
                near < *tier && !core.bypasses(near, len) && core.is_entered(&self.caller, near)
            };
            let here: Vec<(usize, usize)> = unpaid.extract_if(.., takes).collect();
            if here.is_empty() {
                continue;
            }
            let wanted = here.iter().map(|(_, index)| (*index, Dues::default()));
            let wanted: Vec<Admitted> = wanted.collect();
            let refused = match stage {
                Stage::Here(arenas) => self.reserve(near, arenas, wanted, routes),
                Stage::Apart(apart) => {
                    self.reserve_late(near, apart, wanted, false);
                    continue;
                }
            };
            // The next tier may have room.
            unpaid.extend(of_indices(here, refused));
        }
        for (tier, index) in unpaid {
            core.edges[tier - 1].declines();
            routes.settled.push((index, Outcome::Declined));
        }
    }
}

/// Tiers and indices that are among `indices`. A call may have any number of both.
fn of_indices<I: Eq + Hash>(
    blocks: Vec<(usize, I)>,
    indices: Vec<I>,
) -> impl Iterator<Item = (usize, I)> {
    let indices: HashSet<I> = indices.into_iter().collect();
    let blocks = blocks.into_iter();
    blocks.filter(move |(_, index)| indices.contains(index))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::hash::Hasher;

    use super::*;

    thread_local! {
        static COMPARED: Cell<usize> = const { Cell::new(0) };
    }

    /// An index that counts comparisons.
    #[derive(Eq)]
    struct Index(usize);

    impl PartialEq for Index {
        fn eq(&self, other: &Index) -> bool {
            COMPARED.set(COMPARED.get() + 1);
            self.0 == other.0
        }
    }

    impl Hash for Index {
        fn hash<H: Hasher>(&self, state: &mut H) {
            self.0.hash(state);
        }
    }

    #[test]
    fn blocks_that_a_nearer_tier_refuses_are_told_apart_in_one_pass() {
        const ALL: usize = 10_000;
        let blocks = (0..ALL).map(|at| (1, Index(at)));
        let refused = (ALL / 2..ALL).map(Index);
        let left = of_indices(blocks.collect(), refused.collect());
        let left: Vec<usize> = left.map(|(_, index)| index.0).collect();
        assert_eq!(left, Vec::from_iter(ALL / 2..ALL));
        let compared = COMPARED.get();
        assert!(compared < 4 * ALL, "{compared}");
    }
}
