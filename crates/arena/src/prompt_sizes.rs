//! Sizes of the new prompts of a tier, as parts of it. The usual ones are stored whole at first
//! sight; a prompt far larger than these may evict only a part as large as they are.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::held::Mutex;
use crate::index::Use;
use crate::place::Wanted;

/// The sizes that are counted: a 256th of the tier, and each next one twice as much.
const SIZES: usize = 6;
const SMALLEST: u64 = 256;

/// A size is usual if one prompt in so many reaches it.
const USUAL: u32 = 8;

/// Counted prompts at which each count is halved: 32 to 64 are counted.
const PERIOD: u32 = 64;

/// Counted blocks that are remembered: one that is offered again is not counted again.
const REMEMBERED: usize = 256;

#[derive(Default)]
struct Counts {
    prompts: u32,
    reached: [u32; SIZES],
    /// Uses with the blocks of their prompts that were counted, in their low bits; the oldest is at
    /// `next`.
    recent: Vec<u64>,
    next: usize,
}

impl Counts {
    /// Returns true if this block of a use was not counted recently, and notes that it is.
    fn is_new(&mut self, began: u64, blocks: u64) -> bool {
        let block = began | blocks & ((1 << Use::BITS) - 1);
        let is_new = !self.recent.contains(&block);
        if is_new && self.recent.len() < REMEMBERED {
            self.recent.push(block);
        } else if is_new {
            self.recent[self.next] = block;
            self.next = (self.next + 1) % REMEMBERED;
        }
        is_new
    }
}

/// Counts of recent new prompts by their sizes.
pub struct PromptSizes {
    counts: Mutex<Counts>,
    /// The part of the tier that new prompts usually fit into.
    usual: AtomicU64,
}

impl Default for PromptSizes {
    fn default() -> PromptSizes {
        PromptSizes {
            counts: Mutex::default(),
            usual: AtomicU64::new(part(SIZES - 1)),
        }
    }
}

fn part(size: usize) -> u64 {
    SMALLEST >> size
}

impl PromptSizes {
    /// Counts offered blocks, which are in prefix order.
    ///
    /// `blocks_in(part, block)` returns the number of such blocks in one of `part` equal parts of
    /// the tier.
    pub fn note(&self, offered: &[Wanted], blocks_in: impl Fn(u64, &Wanted) -> u64) {
        let mut sizes = [0; SIZES];
        let mut room = None;
        for wanted in offered {
            let use_ = Use::of(wanted.stamp);
            if !use_.is_first || !wanted.evict {
                continue;
            }
            if room != Some(wanted.room()) {
                room = Some(wanted.room());
                sizes = std::array::from_fn(|size| blocks_in(part(size), wanted));
            }
            let blocks = use_.depth.saturating_add(1);
            if blocks == 1 || (blocks <= sizes[SIZES - 1] && sizes.contains(&blocks)) {
                self.count(use_.began, blocks, &sizes);
            }
        }
    }

    /// Counts a prompt that begins, or that reaches one of these sizes.
    fn count(&self, began: u64, blocks: u64, sizes: &[u64; SIZES]) {
        let mut counts = self.counts.lock();
        if !counts.is_new(began, blocks) {
            return;
        }
        if blocks == 1 {
            counts.prompts += 1;
        }
        for (reached, size) in counts.reached.iter_mut().zip(sizes) {
            *reached += u32::from(*size == blocks);
        }
        let is_usual = |reached: &u32| reached * USUAL >= counts.prompts;
        let largest = counts.reached.iter().rposition(is_usual);
        // A prompt that reaches a size takes less than twice as much.
        let fits = largest.map_or(0, |size| (size + 1).min(SIZES - 1));
        self.usual.store(part(fits), Ordering::Relaxed);
        if counts.prompts >= PERIOD {
            counts.prompts /= 2;
            counts.reached.iter_mut().for_each(|reached| *reached /= 2);
        }
    }

    /// Returns the number of equal parts of the tier, 8 to 256, such that new prompts usually fit
    /// into one part.
    pub fn usual_part(&self) -> u64 {
        self.usual.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::{Stamps, Uses};
    use crate::key::Key;

    /// Offers a prompt of so many blocks to a tier of 4096, in calls of 16.
    fn offer(sizes: &PromptSizes, uses: &Uses, blocks: usize) {
        offer_as(sizes, uses.call(0), blocks);
    }

    fn offer_as(sizes: &PromptSizes, stamps: Stamps, blocks: usize) {
        let wanted = |at| Wanted {
            key: Key([0; 32]),
            len: 4096,
            parts: 1,
            stamp: stamps.of(at),
            copy: false,
            evict: true,
        };
        let wanted: Vec<Wanted> = (0..blocks).map(wanted).collect();
        for call in wanted.chunks(16) {
            sizes.note(call, |part, _| 4096 / part);
        }
    }

    #[test]
    fn a_prompt_that_is_offered_again_counts_once() {
        let (sizes, uses) = (PromptSizes::default(), Uses::default());
        (0..40).for_each(|_| offer(&sizes, &uses, 600));
        assert_eq!(sizes.usual_part(), 8);
        // As who writes back does while another one writes the block.
        let stamps = uses.call(0);
        (0..1000).for_each(|_| offer_as(&sizes, stamps, 1));
        assert_eq!(sizes.usual_part(), 8);
    }

    #[test]
    fn rare_prompts_are_not_usual_however_large() {
        let (sizes, uses) = (PromptSizes::default(), Uses::default());
        assert_eq!(sizes.usual_part(), 8, "until a few were offered");
        for _ in 0..10 {
            (0..99).for_each(|_| offer(&sizes, &uses, 15));
            offer(&sizes, &uses, 6000);
            assert_eq!(sizes.usual_part(), 256);
        }
        // Prompts of 40 blocks take a part of 64, as one in eight does: once they are usual.
        for _ in 0..64 {
            (0..5).for_each(|_| offer(&sizes, &uses, 1));
            offer(&sizes, &uses, 40);
        }
        assert_eq!(sizes.usual_part(), 64);
        (0..64).for_each(|_| offer(&sizes, &uses, 600));
        assert_eq!(sizes.usual_part(), 8);
    }
}
