//! The copies of a get from one tier, by this process's lanes or by the caller's.

use std::sync::Arc;

use kvdepot_arena::verdict::{Bytes, Moved, Verdicts};
use kvdepot_arena::{Place, clock, parts};
use kvdepot_media::Done;

use super::{Get, plan};
use crate::metrics::Op;
use crate::pipeline::caller::{Caller, Errand, Lanes};
use crate::pipeline::turns::Turn;
use crate::task::Outcome;

impl Get {
    /// Copies from one tier. The `turn` of the step ends with that.
    pub(super) fn copy(
        self: &Arc<Get>,
        tier: usize,
        pinned: Vec<(usize, Place)>,
        turn: Option<Arc<Turn>>,
    ) {
        let core = &self.core;
        let bytes = pinned.iter().map(|(_, place)| place.len).sum();
        let name = core.tiers[tier].name();
        self.task.begins_at(name, pinned.len(), bytes);
        let used = pinned.iter().map(|(index, _)| *index);
        let used = used.map(|index| (self.keys[index], self.stamps.of(index)));
        core.note_used(tier, self.namespace, used);
        let buffers = match &self.caller {
            Caller::Here(buffers) => buffers,
            Caller::There { lanes, .. } => {
                return self.copy_there(lanes.as_ref(), tier, pinned, turn);
            }
        };
        let ends = core.tiers[tier].ends();
        let mut batch = core.copier.batch();
        batch.of_call(Arc::as_ptr(self).addr());
        if self.staged
            && let Err(error) = batch.stage()
        {
            // Cannot be: the call has made the slab. A direct copy is right as well.
            tracing::error!(%error,
                "internal error: cannot stage a get; copying without a staging buffer");
        }
        let mut outcomes = Vec::with_capacity(pinned.len());
        let mut verdicts = Verdicts::new(Bytes::Verified, pinned.len());
        let mut source = Vec::new();
        for (tag, (index, place)) in pinned.iter().enumerate() {
            let outcome = plan(
                &mut batch,
                (ends.as_ref(), &mut source),
                place,
                buffers,
                *index,
                tag as u32,
            );
            // Says nothing about the block, which stays.
            let outcome = outcome.unwrap_or_else(|error| {
                tracing::error!(%error,
                    "internal error: cannot plan the copy of a get; the block is a miss");
                Outcome::Miss
            });
            if outcome == Outcome::Done {
                verdicts.planned(tag, place.parts.into());
            }
            outcomes.push(outcome);
        }
        let started = clock::now();
        let get = Arc::clone(self);
        let done = move |done: &mut Done<'_>| {
            verdicts.count(done);
            let planned = outcomes.iter_mut().enumerate();
            for (tag, outcome) in planned.filter(|(_, outcome)| **outcome == Outcome::Done) {
                *outcome = outcome_of(verdicts.of(tag));
            }
            get.core.metrics.moved(Op::Get, tier, started);
            get.finish(tier, &pinned, &outcomes);
            drop(turn);
        };
        let _ticket = core.copier.submit(batch, done);
    }

    /// Has another process's lanes copy.
    fn copy_there(
        self: &Arc<Get>,
        lanes: &dyn Lanes,
        tier: usize,
        pinned: Vec<(usize, Place)>,
        turn: Option<Arc<Turn>>,
    ) {
        let ends = self.core.tiers[tier].ends();
        let mut outcomes = Vec::with_capacity(pinned.len());
        for (index, place) in &pinned {
            let payload = ends.parts(place);
            let payload = payload.map(|parts| parts.map(|parts| parts::bytes(&parts)));
            outcomes.push(match payload {
                Err(_) => Outcome::Miss,
                Ok(None) => Outcome::Corrupt,
                Ok(Some(len)) if len != self.caller.bytes(*index) => Outcome::Length,
                Ok(Some(_)) => Outcome::Done,
            });
        }
        let sent: Vec<usize> = (0..pinned.len())
            .filter(|position| outcomes[*position] == Outcome::Done)
            .collect();
        let blocks = sent.iter().map(|position| {
            let (index, place) = pinned[*position];
            (index, place, ends.outside(&place))
        });
        let blocks: Vec<Errand> = blocks.collect();
        if blocks.is_empty() {
            return self.finish(tier, &pinned, &outcomes);
        }
        let started = clock::now();
        let get = Arc::clone(self);
        let done = move |moved: &[Moved]| {
            for (position, moved) in sent.iter().zip(moved) {
                outcomes[*position] = outcome_of(*moved);
            }
            get.core.metrics.moved(Op::Get, tier, started);
            get.finish(tier, &pinned, &outcomes);
            drop(turn);
        };
        lanes.move_blocks(&blocks, Box::new(done));
    }
}

fn outcome_of(moved: Moved) -> Outcome {
    match moved {
        Moved::Done(_) => Outcome::Done,
        Moved::Corrupt => Outcome::Corrupt,
        Moved::Failed | Moved::Abandoned => Outcome::Miss,
    }
}
