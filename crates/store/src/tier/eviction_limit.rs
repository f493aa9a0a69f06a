//! The eviction limit of tiers of files and objects: how far into a new prompt blocks may evict
//! others. Arenas have their own, which knows when each block was used.

use kvdepot_arena::{PromptSizes, Use, Wanted};

/// The part of the capacity that a prompt evicts each time that its rest is offered again.
const AGAIN_PART: u64 = 8;

/// The eviction limit of one tier.
pub(super) struct EvictionLimit {
    is_last: bool,
    /// Bytes of the capacity that a block of so many bytes takes.
    room_of: fn(u64) -> u64,
    /// Sizes of the prompts that this process offers.
    prompts: PromptSizes,
}

impl EvictionLimit {
    pub(super) fn new(is_last: bool, room_of: fn(u64) -> u64) -> EvictionLimit {
        EvictionLimit {
            is_last,
            room_of,
            prompts: PromptSizes::default(),
        }
    }

    /// Returns true if this is the last tier of its pipeline: no other tier has the blocks that it
    /// evicts. Only a last tier has a limit.
    pub(super) fn is_last(&self) -> bool {
        self.is_last
    }

    /// Notes the sizes of the prompts that these blocks are of.
    pub(super) fn note(&self, capacity: u64, blocks: &[Wanted]) {
        if self.is_last {
            let blocks_in = |part, wanted: &Wanted| self.blocks_in(capacity, part, wanted);
            self.prompts.note(blocks, blocks_in);
        }
    }

    /// Returns true if others may be evicted for a block. The new blocks of a prompt evict others
    /// until they take as much as prompts usually do. When the rest is offered again, it evicts an
    /// eighth of the capacity. Explicit saves have no limit.
    pub(super) fn allows(&self, capacity: u64, wanted: &Wanted) -> bool {
        let use_ = Use::of(wanted.stamp);
        let part = match use_.is_first {
            true => self.prompts.usual_part(),
            false => AGAIN_PART,
        };
        !self.is_last || use_.is_saved || use_.depth < self.blocks_in(capacity, part, wanted)
    }

    /// The number of blocks like this one in one of so many parts of the capacity.
    fn blocks_in(&self, capacity: u64, part: u64, wanted: &Wanted) -> u64 {
        (capacity / part).div_ceil((self.room_of)(wanted.len))
    }
}
