//! The limit of eviction: the blocks that may be evicted to store a block. Without a limit, a
//! prompt as large as the arena evicts all other prompts, and then its own prefix.
//!
//! Blocks that were used after a prompt's first store are never evicted for it, so a prompt does
//! not evict its own prefix. The new blocks of a prompt evict the least recently used blocks until
//! they take as much as prompts of this tier usually do: a part of the bytes or records of all its
//! devices, an eighth at most. Later blocks use free space, or evict blocks that were not used
//! while the arena's capacity was stored once, up to half of the tier. Blocks that found no space
//! and are offered again evict all blocks that were not used since. Blocks whose position in their
//! prompt is unknown use free space.
//!
//! Only the last tier of a pipeline has a limit: all blocks pass the tiers before it, and those
//! that are evicted there are written back already.

use std::sync::Arc;

use crate::body::{Arena, State};
use crate::group::ordinary;
use crate::index::{Oldest, Use};
use crate::place::Wanted;
use crate::prompt_sizes::PromptSizes;
use crate::turnover::EvictionLimit;

/// The part of the tier that bounds all that a new prompt evicts.
const LARGEST_PART: u64 = 2;

impl Wanted {
    /// Returns true if this block cannot find space after `refused`, an earlier block of its call,
    /// found none.
    ///
    /// This block then needs at least as much space and may not evict more.
    #[must_use]
    pub fn needs_as_much_as(&self, refused: &Wanted) -> bool {
        let [use_, other] = [self, refused].map(|wanted| Use::of(ordinary(wanted.stamp)));
        let is_deeper = (use_.began, use_.is_first) == (other.began, other.is_first)
            && use_.depth >= other.depth;
        let evicts_no_more = !self.evict || (refused.evict && is_deeper);
        refused.len > 0 && self.room() >= refused.room() && evicts_no_more
    }
}

impl Arena {
    /// Marks this arena and the others in `devices` as the last tier of their pipeline, with the
    /// prompt sizes `sizes`.
    pub fn set_last(&self, devices: &[Arc<Arena>], sizes: &Arc<PromptSizes>) {
        let layouts = || devices.iter().map(|arena| arena.layout());
        let bytes = layouts().map(|layout| layout.data_len()).sum();
        let records = layouts().map(|layout| layout.records).sum();
        self.last_tier.set(bytes, records, sizes);
    }

    /// Marks this arena as `own` of `all` equal parts of the last tier of its pipeline, whose other
    /// parts are elsewhere, with the prompt sizes `sizes`.
    pub fn set_last_part(&self, (own, all): (u64, u64), sizes: &Arc<PromptSizes>) {
        let scaled = |own_part: u64| {
            let whole = u128::from(own_part) * u128::from(all) / u128::from(own.max(1));
            u64::try_from(whole).unwrap_or(u64::MAX)
        };
        let layout = self.layout();
        self.last_tier
            .set(scaled(layout.data_len()), scaled(layout.records), sizes);
    }

    /// Returns true if this arena is in the last tier of its pipeline.
    pub fn is_last(&self) -> bool {
        self.last_tier.is_set()
    }

    /// Returns the number of blocks like `wanted` in one of `part` equal parts of the last tier.
    pub fn blocks_in(&self, part: u64, wanted: &Wanted) -> u64 {
        self.last_tier.blocks_in(part, wanted)
    }

    pub(crate) fn eviction_limit(&self, state: &State, wanted: &Wanted) -> EvictionLimit {
        let use_ = Use::of(ordinary(wanted.stamp));
        let is_within = |part| self.last_tier.is_within(part, wanted);
        EvictionLimit(match () {
            () if !wanted.evict => 0,
            () if !self.is_last() => return EvictionLimit::NONE,
            () if !use_.is_first || is_within(self.last_tier.usual_part()) => use_.began,
            () if is_within(LARGEST_PART) => use_.began.min(state.turnover.before(use_.began)),
            () => 0,
        })
    }

    /// Whether a block may be stored in free space. Space that was evicted ahead of need is for
    /// blocks that may evict: others would evict through it.
    pub(crate) fn may_use_free(&self, state: &mut State, wanted: &Wanted) -> bool {
        let room = wanted.room();
        if !state.is_free(room) || state.need.is_none() {
            return state.is_free(room);
        }
        let (bytes, slots) = state.unpromised();
        if bytes >= self.with_ahead(room) && slots > self.slots_ahead() {
            return true;
        }
        self.may_evict_oldest(state, wanted)
    }

    /// Returns whether the least recently used block may be evicted for this one; true if the order
    /// of use has not found it yet. If so, eviction ahead of need may use the same limit.
    pub(crate) fn may_evict_oldest(&self, state: &mut State, wanted: &Wanted) -> bool {
        let limit = self.eviction_limit(state, wanted);
        let may = match state.order.look(&self.index) {
            Oldest::Block(_, stamp) | Oldest::Used(_, stamp) => limit.allows(stamp),
            Oldest::NotYet | Oldest::Nothing => true,
        };
        if may {
            state.need = state.need.max(Some(limit));
        }
        may
    }
}
