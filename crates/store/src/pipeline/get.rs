//! Gets: pin, copy and verify, unpin. The nearest tier that has a block serves it; one that does
//! not verify is unpublished there, and the next tier is asked.

use std::ops::Range;
use std::sync::Arc;

use kvdepot_arena::gate::Pass;
use kvdepot_arena::verdict::{Bytes, Moved, Verdicts};
use kvdepot_arena::{Error, Key, NamespaceId, Place, Stamps, clock, parts};
use kvdepot_media::{Done, Mapping};

use super::caller::{Caller, Lanes};
use super::{Core, steps};
use crate::buffers::BlockBuffers;
use crate::metrics::Op;
use crate::task::{Outcome, Task};

/// How blocks are brought back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GetOptions {
    /// Through the staging slab, for memory that plain copies are slow into.
    pub staged: bool,
    /// Only the consecutive hits from the first key: the others end as misses, and their buffers
    /// are not touched. A block that its buffer does not fit ends the hits like a miss.
    pub prefix: bool,
}

/// One call. It holds the caller's memory until the last copy into it has stopped.
struct Get {
    core: Arc<Core>,
    namespace: NamespaceId,
    keys: Vec<Key>,
    caller: Caller,
    task: Task,
    stamps: Stamps,
    staged: bool,
    _pass: Pass,
}

impl Core {
    /// Starts a get. The copies run on the lanes.
    pub(crate) fn get(
        self: &Arc<Core>,
        namespace: NamespaceId,
        keys: Vec<Key>,
        buffers: BlockBuffers,
        options: GetOptions,
    ) -> Result<Task, Error> {
        let pass = self.gate.enter()?;
        buffers.check(keys.len(), true)?;
        if options.staged || buffers.on_device() {
            self.copier.make_slab()?;
        }
        let caller = Caller::Here(buffers);
        let task = self.begin(Op::Get, keys.len(), &caller, None);
        self.start_get(pass, namespace, keys, caller, &task, options);
        Ok(task)
    }

    /// Starts a get whose bytes are moved to where `caller` says.
    pub fn start_get(
        self: &Arc<Core>,
        pass: Pass,
        namespace: NamespaceId,
        keys: Vec<Key>,
        caller: Caller,
        task: &Task,
        options: GetOptions,
    ) {
        let count = keys.len();
        self.note_asked(namespace, &keys);
        let core = Arc::clone(self);
        let get = Get {
            stamps: core.uses.call(count),
            core,
            namespace,
            keys,
            caller,
            task: task.clone(),
            staged: options.staged,
            _pass: pass,
        };
        let get = Arc::new(get);
        for step in steps(count) {
            if !options.prefix {
                get.start(step.collect(), 0);
            } else if get.start_hits(step) {
                break;
            }
        }
    }
}

impl Get {
    /// Serves these keys from the tiers from `first` on.
    fn start(self: &Arc<Get>, mut indices: Vec<usize>, first: usize) {
        for tier in first..self.core.tiers.len() {
            if indices.is_empty() {
                return;
            }
            let (pinned, rest) = self.pin(tier, &indices);
            indices = rest;
            self.serve(tier, pinned);
        }
        self.miss(indices.into_iter().map(|index| (index, Outcome::Miss)));
    }

    /// Serves the hits of a step before its first gap. If there is one, everything behind it is a
    /// miss, also of later steps, and the answer is true.
    fn start_hits(self: &Arc<Get>, step: Range<usize>) -> bool {
        let mut rest: Vec<usize> = step.clone().collect();
        let mut tiers = Vec::with_capacity(self.core.tiers.len());
        for tier in 0..self.core.tiers.len() {
            let (pinned, missing) = self.pin(tier, &rest);
            tiers.push(pinned);
            rest = missing;
        }
        // Of a block in parts the length is known once its table has been read.
        let misfits = |(index, place): &&(usize, Place)| {
            place.parts == 1 && place.len != self.caller.bytes(*index)
        };
        let misfit = tiers
            .iter()
            .flatten()
            .filter(misfits)
            .map(|(at, _)| *at)
            .min();
        let absent = rest.first().copied();
        let gap = misfit.into_iter().chain(absent).min().unwrap_or(step.end);
        for (tier, pinned) in tiers.into_iter().enumerate() {
            let (hits, behind): (Vec<_>, Vec<_>) =
                pinned.into_iter().partition(|(at, _)| *at < gap);
            self.core.tiers[tier].unpin(behind.into_iter().map(|(_, place)| place.token));
            self.serve(tier, hits);
        }
        if gap == step.end {
            return false;
        }
        let outcome = |at| match Some(at) == misfit {
            true => (at, Outcome::Length),
            false => (at, Outcome::Miss),
        };
        self.miss((gap..self.keys.len()).map(outcome));
        true
    }

    /// Copies what was pinned in one tier, and stamps it in those behind.
    fn serve(self: &Arc<Get>, tier: usize, pinned: Vec<(usize, Place)>) {
        if pinned.is_empty() {
            return;
        }
        let served: Vec<usize> = pinned.iter().map(|(index, _)| *index).collect();
        self.copy(tier, pinned);
        // While the lanes copy.
        let used = served
            .iter()
            .map(|at| (&self.keys[*at], self.stamps.of(*at)));
        for behind in &self.core.tiers[tier + 1..] {
            behind.touch(self.namespace, used.clone());
        }
    }

    /// Ends keys that are not served.
    fn miss(&self, ended: impl ExactSizeIterator<Item = (usize, Outcome)>) {
        if ended.len() > 0 {
            self.core.metrics.missed(ended.len() as u64);
            self.task.settle(ended);
        }
    }

    /// Pins what one tier has; answers that, and the keys it has not.
    fn pin(&self, tier: usize, indices: &[usize]) -> (Vec<(usize, Place)>, Vec<usize>) {
        let keys: Vec<Key> = indices.iter().map(|index| self.keys[*index]).collect();
        let mut pinned = Vec::with_capacity(indices.len());
        let mut found = vec![false; indices.len()];
        let each = |position: usize, place| pinned.push((indices[position], place));
        let stamp = |position: usize| self.stamps.of(indices[position]);
        self.core.tiers[tier].pin(self.namespace, &keys, &mut found, stamp, each);
        let missing = indices.iter().zip(&found).filter(|(_, found)| !**found);
        (pinned, missing.map(|(index, _)| *index).collect())
    }

    fn copy(self: &Arc<Get>, tier: usize, pinned: Vec<(usize, Place)>) {
        let core = &self.core;
        let buffers = match &self.caller {
            Caller::Here(buffers) => buffers,
            Caller::There { lanes, .. } => return self.copy_there(lanes.as_ref(), tier, pinned),
        };
        let devices = core.tiers[tier].devices();
        let mut batch = core.copier.batch();
        if self.staged
            && let Err(error) = batch.stage()
        {
            // Cannot be: the call has made the slab. A direct copy is right as well.
            tracing::error!(%error, "a get could not be staged");
        }
        let mut outcomes = Vec::with_capacity(pinned.len());
        let mut verdicts = Verdicts::new(Bytes::Verified, pinned.len());
        for (tag, (index, place)) in pinned.iter().enumerate() {
            let outcome = devices
                .mapping(place.token)
                .and_then(|mapping| plan(&mut batch, &mapping, place, buffers, *index, tag as u32));
            // Says nothing about the block, which stays.
            let outcome = outcome.unwrap_or_else(|error| {
                tracing::error!(%error, "a get could not be planned");
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
        };
        let _ticket = core.copier.submit(batch, done);
    }

    /// Has another process's lanes copy.
    fn copy_there(self: &Arc<Get>, lanes: &dyn Lanes, tier: usize, pinned: Vec<(usize, Place)>) {
        let devices = self.core.tiers[tier].devices();
        let mut outcomes = Vec::with_capacity(pinned.len());
        for (index, place) in &pinned {
            let payload = devices.mapping(place.token);
            let payload = payload.map(|mapping| parts::payload_of(&mapping, place));
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
        let blocks: Vec<(usize, Place)> = sent.iter().map(|position| pinned[*position]).collect();
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
        };
        lanes.move_blocks(&blocks, Box::new(done));
    }

    /// All copies from one tier have stopped.
    fn finish(self: &Arc<Get>, tier: usize, pinned: &[(usize, Place)], outcomes: &[Outcome]) {
        let core = &self.core;
        let from = &core.tiers[tier];
        let corrupt: Vec<&(usize, Place)> = pinned
            .iter()
            .zip(outcomes)
            .filter(|(_, outcome)| **outcome == Outcome::Corrupt)
            .map(|(pinned, _)| pinned)
            .collect();
        if !corrupt.is_empty() {
            let tokens: Vec<_> = corrupt.iter().map(|(_, place)| place.token).collect();
            from.discard(&tokens);
            for (_, place) in &corrupt {
                tracing::warn!(key = %place.identity.key, tier = from.name(),
                    "a block did not verify and was unpublished");
            }
        }
        let served = |outcome: &Outcome| *outcome == Outcome::Done;
        if tier > 0 {
            // Promotion keeps the pins of what it takes over.
            let (promoted, rest): (Vec<_>, Vec<_>) = pinned
                .iter()
                .zip(outcomes)
                .partition(|(_, outcome)| served(outcome));
            from.unpin(rest.into_iter().map(|((_, place), _)| place.token));
            let places = promoted.into_iter().map(|((_, place), _)| *place).collect();
            core.promote_later(tier, places);
        } else {
            from.unpin(pinned.iter().map(|(_, place)| place.token));
        }
        let hits = pinned
            .iter()
            .zip(outcomes)
            .filter(|(_, outcome)| served(outcome));
        let bytes = hits.clone().map(|((_, place), _)| place.len).sum();
        core.metrics.hit(tier, hits.count() as u64, bytes);
        let last = tier + 1 == core.tiers.len();
        let retry: Vec<usize> = corrupt
            .iter()
            .filter(|_| !last)
            .map(|(index, _)| *index)
            .collect();
        let settled = pinned
            .iter()
            .zip(outcomes)
            .filter(|(_, o)| last || **o != Outcome::Corrupt);
        self.task
            .settle(settled.map(|((index, _), outcome)| (*index, *outcome)));
        if !retry.is_empty() {
            self.start(retry, tier + 1);
        }
    }
}

fn outcome_of(moved: Moved) -> Outcome {
    match moved {
        Moved::Done(_) => Outcome::Done,
        Moved::Corrupt => Outcome::Corrupt,
        Moved::Failed | Moved::Abandoned => Outcome::Miss,
    }
}

/// Plans one block's way into the caller's memory; `Done` when its bytes will decide.
pub fn plan(
    batch: &mut kvdepot_media::Batch,
    mapping: &Arc<Mapping>,
    place: &Place,
    buffers: &BlockBuffers,
    index: usize,
    tag: u32,
) -> Result<Outcome, Error> {
    let (identity, extents) = (&place.identity, &place.extents);
    if place.parts == 1 {
        if place.len != buffers.bytes(index) {
            return Ok(Outcome::Length);
        }
        let source = parts::buffers(mapping, extents, 0, place.len)?;
        let id = parts::part_id(identity, 0, 1);
        batch.part(
            &id,
            &source,
            buffers.pieces(index),
            Some(place.checksum),
            tag,
        )?;
        return Ok(Outcome::Done);
    }
    let found = parts::read(
        mapping,
        identity,
        extents,
        place.len,
        place.parts,
        place.checksum,
    );
    let Some(found) = found else {
        return Ok(Outcome::Corrupt);
    };
    if found.iter().map(|part| part.len).sum::<u64>() != buffers.bytes(index) {
        return Ok(Outcome::Length);
    }
    let mut pieces = buffers.pieces(index).to_vec();
    for (number, part) in found.iter().enumerate() {
        let source = parts::buffers(mapping, extents, part.offset, part.len)?;
        let rest = split(&mut pieces, part.len as usize)?;
        let id = parts::part_id(identity, number as u32, place.parts);
        batch.part(&id, &source, &pieces, Some(part.checksum), tag)?;
        pieces = rest;
    }
    Ok(Outcome::Done)
}

/// Cuts the first `len` bytes off a list of buffers: they stay, the rest is returned.
fn split(
    pieces: &mut Vec<kvdepot_media::Buffer>,
    len: usize,
) -> Result<Vec<kvdepot_media::Buffer>, Error> {
    let mut left = len;
    let Some(at) = pieces.iter().position(|piece| {
        let here = left < piece.len();
        if !here {
            left -= piece.len();
        }
        here
    }) else {
        return Ok(Vec::new());
    };
    let mut rest = pieces.split_off(at);
    if left > 0 {
        pieces.push(rest[0].slice(0, left)?);
        rest[0] = rest[0].slice(left, rest[0].len() - left)?;
    }
    Ok(rest)
}
