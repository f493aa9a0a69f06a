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

/// The fill level and the counters of a tier, for people and metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct TierStats {
    /// Name of the tier.
    pub tier: String,
    /// Maximum size of stored data in bytes.
    pub capacity_bytes: u64,
    /// Size of published payloads in bytes.
    ///
    /// For a tier of files, it is the size of all files of all processes that share the directory,
    /// with headers and with space that was granted to writers.
    pub live_bytes: u64,
    /// Free space in bytes.
    pub free_bytes: u64,
    /// Length of the largest free extent in bytes.
    pub largest_free_bytes: u64,
    /// Number of published blocks; 0 if they are [uncounted](TierStats::uncounted).
    pub blocks: u64,
    /// True if the number of blocks is unknown, because other processes store and remove blocks,
    /// too.
    #[serde(default)]
    pub uncounted: bool,
    /// Maximum number of blocks in the record table.
    pub blocks_max: u64,
    /// Number of blocks that readers have pinned.
    pub pinned_blocks: u64,
    /// Number of blocks that are being written.
    pub reserved_blocks: u64,
    /// Number of blocks evicted since the tier was opened.
    pub evicted_blocks: u64,
    /// Bytes evicted since the tier was opened: payloads, or whole files.
    pub evicted_bytes: u64,
    /// Number of blocks that failed verification.
    pub corrupt_blocks: u64,
    /// Bytes in extents that are not reused because the medium failed under them.
    pub lost_bytes: u64,
    /// Number of reservations that failed for lack of space.
    pub full: u64,
    /// Number of blocks published since the tier was opened.
    pub stored_blocks: u64,
    /// Bytes published since the tier was opened: payloads, or whole files.
    pub stored_bytes: u64,
    /// Requests to the tier that timed out.
    #[serde(default, rename = "unanswered")]
    pub timeouts: u64,
    /// Number of times that the circuit breaker of the tier opened.
    #[serde(default, rename = "left_alone")]
    pub circuit_open: u64,
    /// Number of published blocks that belong to groups.
    #[serde(default)]
    pub grouped_blocks: u64,
    /// Number of groups evicted since the tier was opened.
    #[serde(default)]
    pub evicted_groups: u64,
    /// Blocks that stayed in the previous tier, because this was their first access or because of
    /// the limits of this tier.
    #[serde(default, rename = "declined")]
    pub write_back_deferred_blocks: u64,
    /// Number of requests to an object store.
    #[serde(default)]
    pub requests: u64,
    /// Requests that were retried.
    #[serde(default)]
    pub retries: u64,
    /// Failed requests, by cause.
    #[serde(default, rename = "faults")]
    pub request_errors: BTreeMap<String, u64>,
}

impl TierStats {
    /// Creates empty statistics for the tier named `tier`.
    #[must_use]
    pub fn new(tier: &str) -> TierStats {
        TierStats {
            tier: tier.to_owned(),
            ..TierStats::default()
        }
    }

    /// Returns only the counters, without the fill level. A tier keeps them when a device is
    /// removed.
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

    /// Returns the sum of the statistics of two devices.
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
            timeouts: self.timeouts + other.timeouts,
            circuit_open: self.circuit_open + other.circuit_open,
            grouped_blocks: self.grouped_blocks + other.grouped_blocks,
            evicted_groups: self.evicted_groups + other.evicted_groups,
            write_back_deferred_blocks: self.write_back_deferred_blocks
                + other.write_back_deferred_blocks,
            requests: self.requests + other.requests,
            retries: self.retries + other.retries,
            request_errors: self.request_errors,
        }
    }
}
