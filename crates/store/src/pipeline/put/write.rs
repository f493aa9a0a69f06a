//! The copies of a put into one tier, and what follows them.

use std::sync::Arc;

use kvdepot_arena::verdict::{Bytes, Moved, Verdicts};
use kvdepot_arena::{Error, Identity, Place, Reserved, clock, parts};
use kvdepot_media::{Checksum, Done};

use super::Put;
use crate::config::Overload;
use crate::metrics::Op;
use crate::pipeline::caller::{Caller, Errand, Lanes};
use crate::pipeline::edge::Stays;
use crate::pipeline::ledger::{Dues, Held};
use crate::task::Outcome;
use crate::tier::Stage;

/// Room for a block of the call, its index, and what goes with it.
pub(super) type Copy = (usize, Reserved, Dues);

/// Index of a block, where it lies, what goes with it, and its bytes' checksum if they are all
/// there.
type Written = (usize, Place, Dues, Option<Checksum>);

impl Put {
    pub(super) fn copy(self: &Arc<Put>, tier: usize, copies: Vec<Copy>) {
        let core = &self.core;
        let bytes = copies.iter().map(|(_, reserved, _)| reserved.len).sum();
        let name = core.tiers[tier].name();
        self.task.begins_at(name, copies.len(), bytes);
        let buffers = match &self.caller {
            Caller::Here(buffers) => buffers,
            Caller::There { lanes, .. } => return self.copy_there(lanes.as_ref(), tier, copies),
        };
        let ends = core.tiers[tier].ends();
        let mut batch = core.copier.batch();
        batch.of_call(Arc::as_ptr(self).addr());
        let is_apart = core.tiers[tier].apart().is_some();
        if is_apart {
            batch.keep_leaves();
        }
        let mut verdicts = Verdicts::new(Bytes::New, copies.len());
        let mut target = Vec::new();
        let planned = copies
            .iter()
            .enumerate()
            .try_for_each(|(tag, (index, place, _))| {
                ends.buffers(place, 0, place.len, &mut target)?;
                let id = parts::part_id(&place.identity, 0, 1);
                let part = batch.part(&id, buffers.pieces(*index), &target, None, tag as u32)?;
                if let Some(proof) = ends.proof(place) {
                    batch.authenticate(part, &proof.key, None);
                }
                verdicts.planned(tag, 1);
                Ok::<(), Error>(())
            });
        if let Err(error) = planned {
            tracing::error!(%error,
                "internal error: cannot plan the copy of a put; the put failed");
            let failed = vec![Moved::Failed; copies.len()];
            self.finish(tier, copies, &failed);
            return;
        }
        let started = clock::now();
        let put = Arc::clone(self);
        let done = move |done: &mut Done<'_>| {
            verdicts.count(done);
            if is_apart {
                for (tag, (_, place, _)) in copies.iter().enumerate() {
                    ends.note_leaves(place, verdicts.leaves(tag));
                    ends.note_macs(place, verdicts.macs(tag));
                }
            }
            put.core.metrics.moved(Op::Put, tier, started);
            put.finish(tier, copies, &verdicts.all());
        };
        let _ticket = core.copier.submit(batch, done);
    }

    /// Has another process's lanes copy.
    fn copy_there(self: &Arc<Put>, lanes: &dyn Lanes, tier: usize, mut copies: Vec<Copy>) {
        let stage = &self.core.tiers[tier];
        let ends = stage.ends();
        let handed = copies.iter_mut().map(|(index, reserved, _)| {
            // Like those of the two-phase verbs: nobody knows when they end. A file that is given
            // up becomes nobody else's.
            let place = match stage {
                Stage::Here(_) => reserved.hand_out(),
                Stage::Apart(_) => **reserved,
            };
            (*index, place, ends.outside(&place))
        });
        let blocks: Vec<Errand> = handed.collect();
        let held: Vec<_> = blocks.iter().map(|(_, at, _)| (tier, at.token)).collect();
        let names = held.iter().map(|name| (*name, Box::<Held>::default()));
        self.core.ledger.lock().held.extend(names);
        let started = clock::now();
        let put = Arc::clone(self);
        let done = move |moved: &[Moved]| {
            put.core.metrics.moved(Op::Put, tier, started);
            put.finish(tier, copies, moved);
            let mut ledger = put.core.ledger.lock();
            // What was given up stays reserved: nobody joins it.
            let ended = held.iter().zip(moved);
            for (name, _) in ended.filter(|(_, moved)| **moved != Moved::Abandoned) {
                ledger.held.remove(name);
            }
        };
        lanes.move_blocks(&blocks, Box::new(done));
    }

    /// All copies into one tier have stopped.
    fn finish(self: &Arc<Put>, tier: usize, copies: Vec<Copy>, moved: &[Moved]) {
        let core = &self.core;
        let mut written = Vec::new();
        let mut failed = Vec::new();
        let mut places: Vec<Written> = Vec::with_capacity(copies.len());
        for ((index, mut reserved, mut dues), moved) in copies.into_iter().zip(moved) {
            let place = *reserved;
            let checksum = match moved {
                Moved::Done(checksum) => {
                    written.push((reserved, *checksum));
                    Some(*checksum)
                }
                Moved::Corrupt | Moved::Failed => {
                    failed.push(reserved);
                    None
                }
                // Who still writes there has the file open, or does not find it any more.
                Moved::Abandoned if core.tiers[tier].apart().is_some() => {
                    failed.push(reserved);
                    None
                }
                Moved::Abandoned => {
                    dues.spent.written();
                    reserved.hand_out();
                    None
                }
            };
            places.push((index, place, dues, checksum));
        }
        // On its way further, a block must not go.
        let pinned = core.goes_on(tier);
        match &core.tiers[tier] {
            Stage::Here(arenas) => {
                let stored = arenas.commit(written, pinned);
                let failed = failed.iter_mut().map(|reserved| reserved.hand_out().token);
                arenas.abort(&failed.collect::<Vec<_>>());
                self.published(tier, places, stored);
            }
            Stage::Apart(apart) => {
                // Before those who joined them begin anew.
                drop(failed);
                if written.is_empty() {
                    return self.published(tier, places, Vec::new());
                }
                core.publishes(tier, written.iter().map(|(one, _)| one.identity));
                let put = Arc::clone(self);
                let committed = apart.commit(written, pinned);
                committed.then(move |stored| {
                    put.published(tier, places, stored.unwrap_or_default());
                });
            }
        }
    }

    /// A tier has answered which of what was written it has; `stored` has those that were written.
    fn published(self: &Arc<Put>, tier: usize, places: Vec<Written>, stored: Vec<bool>) {
        let core = &self.core;
        let ended: Vec<Place> = places.iter().map(|(_, place, _, _)| *place).collect();
        // What the medium could not take failed too.
        let mut stored = stored.into_iter();
        let mut settled = Vec::new();
        let (mut passed, mut kept) = (Vec::new(), Vec::new());
        core.fetch_known(
            self.namespace,
            ended.iter().map(|place| &place.identity.key),
        );
        let waits = tier < core.ack;
        {
            let is_queued = waits || core.goes_on(tier);
            let mut ledger = is_queued.then(|| core.ledger.lock());
            for (at, (index, place, mut dues, checksum)) in places.into_iter().enumerate() {
                ledger.iter_mut().for_each(|ledger| ledger.take_turns(at));
                let answer = checksum.and_then(|_| stored.next());
                // What a tier does not answer for may be there.
                if checksum.is_some() && answer != Some(false) {
                    dues.spent.written();
                }
                let Some(checksum) = checksum.filter(|_| answer == Some(true)) else {
                    settled.push((index, core.lost()));
                    continue;
                };
                core.note_stored(self.namespace, &place.identity.key, place.len);
                if !waits {
                    settled.push((index, Outcome::Done));
                }
                let Some(ledger) = ledger.as_mut() else {
                    continue;
                };
                let place = Place { checksum, ..place };
                let spent = match core.edges[tier].admits(&place.identity, place.len) {
                    Ok(spent) => spent,
                    Err(stays) => {
                        match stays {
                            _ if !waits => {}
                            Stays::Barred => settled.push((index, Outcome::Declined)),
                            Stays::Kept => kept.push(index),
                        }
                        passed.push(place);
                        continue;
                    }
                };
                // Of what its edge has kept, a full queue takes nothing.
                let room = || match dues.passed && core.overload == Overload::Wait {
                    true => core.share_of(tier, place.len),
                    false => core.room_in(tier, place.len),
                };
                let Some(share) = dues.share.or_else(room) else {
                    if waits {
                        kept.push(index);
                    }
                    passed.push(place);
                    continue;
                };
                let waiters = waits.then(|| self.waiter(index)).into_iter();
                let (paid, waiters) = ((share, spent), waiters.collect());
                passed.extend(core.send_later(ledger, tier, place, paid, waiters));
            }
        }
        let lost = settled.iter();
        let lost =
            lost.filter(|(_, outcome)| matches!(outcome, Outcome::Dropped | Outcome::Closed));
        let name = core.tiers[tier].name();
        self.task.ends_at(name, ended.len() - lost.count());
        core.tiers[tier].unpin(passed.iter());
        let released = ended.len() - settled.len();
        for (_, outcome) in &settled {
            core.metrics.put_outcome(*outcome);
        }
        let done = settled
            .iter()
            .filter(|(_, outcome)| *outcome == Outcome::Done);
        let done: Vec<Identity> = done.map(|(index, _)| self.identity(*index)).collect();
        self.task.settle(settled);
        self.task.release(released);
        core.share_done(tier, done.into_iter());
        core.resolve(tier, &ended);
        self.end_kept(kept, core.ack);
    }
}
