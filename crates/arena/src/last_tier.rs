//! Size of the last tier of a pipeline, of which the eviction limit of a prompt is a part.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::index::Use;

/// Bytes and records of all devices of the tier; zero in an arena of another tier.
#[derive(Default)]
pub(crate) struct LastTier {
    bytes: AtomicU64,
    records: AtomicU64,
}

impl LastTier {
    pub(crate) fn set(&self, bytes: u64, records: u64) {
        self.bytes.store(bytes, Ordering::Relaxed);
        self.records.store(records, Ordering::Relaxed);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) > 0
    }

    /// Whether the new blocks of a prompt before one of `room` bytes take less than one of so many
    /// parts of the tier.
    pub(crate) fn is_within(&self, part: u64, used: Use, room: u64) -> bool {
        let bytes = self.bytes.load(Ordering::Relaxed) / part;
        let records = self.records.load(Ordering::Relaxed).div_ceil(part);
        used.depth.saturating_mul(room) < bytes && used.depth < records
    }
}
