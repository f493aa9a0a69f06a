//! What an arena counts, and how full it is.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;

/// What an arena counts; read by statistics only.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) evicted_blocks: AtomicU64,
    pub(crate) evicted_bytes: AtomicU64,
    pub(crate) evicted_groups: AtomicU64,
    pub(crate) corrupt_blocks: AtomicU64,
    pub(crate) lost_bytes: AtomicU64,
    pub(crate) full: AtomicU64,
    pub(crate) stored_blocks: AtomicU64,
    pub(crate) stored_bytes: AtomicU64,
}

/// An arena's fill, for people and metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct TierStats {
    /// The tier's name.
    pub tier: String,
    /// Bytes of data it can hold.
    pub capacity_bytes: u64,
    /// Bytes of payload published; of a tier of files what all who share it have there: whole
    /// files, headers too, and what is granted to who writes.
    pub live_bytes: u64,
    /// Bytes not allocated.
    pub free_bytes: u64,
    /// The longest free extent.
    pub largest_free_bytes: u64,
    /// Blocks published; 0 where they are [uncounted](TierStats::uncounted).
    pub blocks: u64,
    /// Whether it is not known how many blocks there are: others store and remove some, too.
    #[serde(default)]
    pub uncounted: bool,
    /// Blocks that the record table can hold.
    pub blocks_max: u64,
    /// Blocks pinned by readers.
    pub pinned_blocks: u64,
    /// Blocks being written.
    pub reserved_blocks: u64,
    /// Blocks evicted since it was opened.
    pub evicted_blocks: u64,
    /// Bytes evicted since it was opened: payloads, or whole files.
    pub evicted_bytes: u64,
    /// Blocks that did not verify.
    pub corrupt_blocks: u64,
    /// Bytes of extents that are not used again, because the medium failed under them.
    pub lost_bytes: u64,
    /// Reservations refused for lack of room.
    pub full: u64,
    /// Blocks published since it was opened.
    pub stored_blocks: u64,
    /// Bytes published since it was opened: payloads, or whole files.
    pub stored_bytes: u64,
    /// Questions that the tier did not answer in time.
    #[serde(default)]
    pub unanswered: u64,
    /// How often it was left alone for a while, because it did not answer.
    #[serde(default)]
    pub left_alone: u64,
    /// Published blocks that are in groups.
    #[serde(default)]
    pub grouped_blocks: u64,
    /// Groups that were evicted since it was opened.
    #[serde(default)]
    pub evicted_groups: u64,
    /// Blocks that stayed in the tier before, because they were touched for the first time.
    #[serde(default)]
    pub declined: u64,
    /// Requests to an object store.
    #[serde(default)]
    pub requests: u64,
    /// Those that were made again.
    #[serde(default)]
    pub retries: u64,
    /// Requests that came to nothing, by cause.
    #[serde(default)]
    pub faults: BTreeMap<String, u64>,
}

impl TierStats {
    /// Those of a tier that has not begun.
    #[must_use]
    pub fn new(tier: &str) -> TierStats {
        TierStats {
            tier: tier.to_owned(),
            ..TierStats::default()
        }
    }

    /// What was counted, without what is there now: it stays when a device goes.
    pub fn counted(self) -> TierStats {
        TierStats {
            tier: self.tier,
            evicted_blocks: self.evicted_blocks,
            evicted_bytes: self.evicted_bytes,
            evicted_groups: self.evicted_groups,
            corrupt_blocks: self.corrupt_blocks,
            lost_bytes: self.lost_bytes,
            full: self.full,
            stored_blocks: self.stored_blocks,
            stored_bytes: self.stored_bytes,
            ..TierStats::default()
        }
    }

    /// Those of two devices as one.
    pub fn plus(self, other: TierStats) -> TierStats {
        TierStats {
            tier: self.tier,
            capacity_bytes: self.capacity_bytes + other.capacity_bytes,
            live_bytes: self.live_bytes + other.live_bytes,
            free_bytes: self.free_bytes + other.free_bytes,
            largest_free_bytes: self.largest_free_bytes.max(other.largest_free_bytes),
            blocks: self.blocks + other.blocks,
            uncounted: self.uncounted || other.uncounted,
            blocks_max: self.blocks_max + other.blocks_max,
            pinned_blocks: self.pinned_blocks + other.pinned_blocks,
            reserved_blocks: self.reserved_blocks + other.reserved_blocks,
            evicted_blocks: self.evicted_blocks + other.evicted_blocks,
            evicted_bytes: self.evicted_bytes + other.evicted_bytes,
            corrupt_blocks: self.corrupt_blocks + other.corrupt_blocks,
            lost_bytes: self.lost_bytes + other.lost_bytes,
            full: self.full + other.full,
            stored_blocks: self.stored_blocks + other.stored_blocks,
            stored_bytes: self.stored_bytes + other.stored_bytes,
            unanswered: self.unanswered + other.unanswered,
            left_alone: self.left_alone + other.left_alone,
            grouped_blocks: self.grouped_blocks + other.grouped_blocks,
            evicted_groups: self.evicted_groups + other.evicted_groups,
            declined: self.declined + other.declined,
            requests: self.requests + other.requests,
            retries: self.retries + other.retries,
            faults: self.faults,
        }
    }
}
