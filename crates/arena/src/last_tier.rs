//! Size of the last tier of a pipeline, of which the eviction limit of a prompt is a part.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::index::Use;
use crate::place::Wanted;
use crate::prompt_sizes::PromptSizes;

/// Bytes and records of all devices of the tier; zero in an arena of another tier.
#[derive(Default)]
pub(crate) struct LastTier {
    bytes: AtomicU64,
    records: AtomicU64,
    prompts: OnceLock<Arc<PromptSizes>>,
}

impl LastTier {
    pub(crate) fn set(&self, bytes: u64, records: u64, prompts: &Arc<PromptSizes>) {
        self.bytes.store(bytes, Ordering::Relaxed);
        self.records.store(records, Ordering::Relaxed);
        self.prompts.get_or_init(|| Arc::clone(prompts));
    }

    pub(crate) fn is_set(&self) -> bool {
        self.prompts.get().is_some()
    }

    /// The number of parts of the tier into one of which new prompts usually fit.
    pub(crate) fn usual_part(&self) -> u64 {
        self.prompts.get().map_or(1, |sizes| sizes.usual_part())
    }

    /// The number of blocks like this one in one of so many parts of the tier.
    pub(crate) fn blocks_in(&self, part: u64, wanted: &Wanted) -> u64 {
        let bytes = self.bytes.load(Ordering::Relaxed) / part;
        let records = self.records.load(Ordering::Relaxed).div_ceil(part);
        bytes.div_ceil(wanted.room().max(1)).min(records)
    }

    /// Returns true if the new blocks of a prompt before this one take less than one of `part`
    /// parts of the tier.
    pub(crate) fn is_within(&self, part: u64, wanted: &Wanted) -> bool {
        Use::of(wanted.stamp).depth < self.blocks_in(part, wanted)
    }
}
