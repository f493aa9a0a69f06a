//! What a depot counts. Names follow `kvdepot_<noun>_<unit>` with labels `tier`, `op`, `source`.

mod families;

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

pub use families::MetricsFormat;
use kvdepot_arena::TierStats;
use serde_json::{Value, json};

use crate::devices::DeviceStats;
use crate::task::Outcome;
use crate::tier::TIERS_MAX;

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "whoever asks has an answer for each"
)]
pub enum Op {
    /// Copies blocks to the caller.
    Get,
    /// Stores blocks of the caller.
    Put,
}

impl Op {
    /// Returns the name of the operation in logs.
    pub fn name(self) -> &'static str {
        match self {
            Op::Get => "get",
            Op::Put => "put",
        }
    }
}

/// Counters since the depot was opened.
#[derive(Default)]
pub(crate) struct Metrics {
    tasks: [AtomicU64; 2],
    blocks: [AtomicU64; 2],
    bytes: [AtomicU64; 2],
    prefetch_tasks: AtomicU64,
    prefetch_blocks: AtomicU64,
    move_ns: [[AtomicU64; TIERS_MAX]; 2],
    hits: [AtomicU64; TIERS_MAX],
    hit_bytes: [AtomicU64; TIERS_MAX],
    missed: AtomicU64,
    joined: AtomicU64,
    promoted_blocks: AtomicU64,
    promoted_bytes: AtomicU64,
    put_done: AtomicU64,
    put_full: AtomicU64,
    put_dropped: AtomicU64,
    put_declined: AtomicU64,
    put_corrupt: AtomicU64,
    reserve_present: AtomicU64,
    reserve_pending: AtomicU64,
}

/// Counters of a depot and usage of its tiers.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct Stats {
    /// Statistics of the tiers, first to last.
    pub tiers: Vec<TierStats>,
    /// Statistics of the media of the `Dax` and `Nvme` tiers.
    pub devices: Vec<DeviceStats>,
    /// Number of calls of `put`.
    pub put_tasks: u64,
    /// Number of calls of `get`.
    pub get_tasks: u64,
    /// Number of calls of `prefetch`.
    #[serde(default)]
    pub prefetch_tasks: u64,
    /// Number of keys in calls of `put`.
    pub put_blocks: u64,
    /// Number of keys in calls of `get`.
    pub get_blocks: u64,
    /// Number of keys in calls of `prefetch`.
    #[serde(default)]
    pub prefetch_blocks: u64,
    /// Payload in calls of `put`, in bytes.
    pub put_bytes: u64,
    /// Payload requested by calls of `get`, in bytes.
    pub get_bytes: u64,
    /// Copy time of puts into each tier, in nanoseconds, summed over batches.
    ///
    /// The time of a batch begins when the copy threads receive it and ends with its last copy.
    /// Write-back and promotion are not included.
    pub put_move_ns: Vec<u64>,
    /// Copy time of gets from each tier, in nanoseconds; measured like [`Stats::put_move_ns`].
    pub get_move_ns: Vec<u64>,
    /// Number of blocks served by each tier.
    pub hit_blocks: Vec<u64>,
    /// Payload served by each tier, in bytes.
    pub hit_bytes: Vec<u64>,
    /// Number of keys that a `get` or a pin requested and that every tier missed.
    ///
    /// Lookups and prefetches are not counted.
    pub missed_blocks: u64,
    /// Keys of gets that waited for another call to load their blocks.
    #[serde(default, rename = "joined_blocks")]
    pub coalesced_blocks: u64,
    /// Keys of lookups, loads and promotions in progress in asynchronous tiers.
    #[serde(default, rename = "loading_blocks")]
    pub inflight_load_blocks: u64,
    /// Number of blocks promoted to the first tier after a hit in a lower tier.
    pub promoted_blocks: u64,
    /// Payload promoted to the first tier after hits in lower tiers, in bytes.
    pub promoted_bytes: u64,
    /// Number of blocks whose puts were acknowledged.
    pub put_acknowledged_blocks: u64,
    /// Number of blocks whose puts found no space.
    pub put_full_blocks: u64,
    /// Number of blocks whose puts were dropped, for example because the write-back queue was full.
    pub put_dropped_blocks: u64,
    /// Number of blocks of puts and reservations that an admission policy rejected.
    #[serde(default)]
    pub put_declined_blocks: u64,
    /// Number of blocks that failed checksum verification during write-back.
    pub put_corrupt_blocks: u64,
    /// Number of blocks that were already stored when a call reserved them.
    pub reserve_present_blocks: u64,
    /// Number of blocks that another call was writing when a call reserved them.
    pub reserve_pending_blocks: u64,
    /// Bytes that wait for write-back to lower tiers.
    pub write_back_bytes: u64,
}

/// Names of counters on the socket of a served depot, and those that users see.
const RENAMED: [(&str, &str); 6] = [
    ("unanswered", "timeouts"),
    ("left_alone", "circuit_open"),
    ("declined", "write_back_deferred_blocks"),
    ("faults", "request_errors"),
    ("joined_blocks", "coalesced_blocks"),
    ("loading_blocks", "inflight_load_blocks"),
];

fn rename(counters: &mut serde_json::Map<String, Value>) {
    for (old, new) in RENAMED {
        if let Some(value) = counters.remove(old) {
            counters.insert(new.into(), value);
        }
    }
}

fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

fn read(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

impl Metrics {
    pub(crate) fn begin(&self, op: Op, blocks: u64, bytes: u64) {
        add(&self.tasks[op as usize], 1);
        add(&self.blocks[op as usize], blocks);
        add(&self.bytes[op as usize], bytes);
    }

    pub(crate) fn prefetch(&self, blocks: u64) {
        add(&self.prefetch_tasks, 1);
        add(&self.prefetch_blocks, blocks);
    }

    pub(crate) fn moved(&self, op: Op, tier: usize, started: Instant) {
        let elapsed = started.elapsed().as_nanos() as u64;
        add(&self.move_ns[op as usize][tier], elapsed);
    }

    pub(crate) fn hit(&self, tier: usize, blocks: u64, bytes: u64) {
        add(&self.hits[tier], blocks);
        add(&self.hit_bytes[tier], bytes);
    }

    pub(crate) fn missed(&self, blocks: u64) {
        add(&self.missed, blocks);
    }

    pub(crate) fn joined(&self, blocks: u64) {
        add(&self.joined, blocks);
    }

    pub(crate) fn promoted(&self, bytes: u64) {
        add(&self.promoted_blocks, 1);
        add(&self.promoted_bytes, bytes);
    }

    pub(crate) fn reserve_present(&self) {
        add(&self.reserve_present, 1);
    }

    pub(crate) fn reserve_pending(&self) {
        add(&self.reserve_pending, 1);
    }

    pub(crate) fn put_outcome(&self, outcome: Outcome) {
        match outcome {
            Outcome::Done => add(&self.put_done, 1),
            Outcome::Full => add(&self.put_full, 1),
            Outcome::Corrupt => add(&self.put_corrupt, 1),
            Outcome::Declined => add(&self.put_declined, 1),
            _ => add(&self.put_dropped, 1),
        }
    }

    pub(crate) fn read(
        &self,
        tiers: Vec<TierStats>,
        devices: Vec<DeviceStats>,
        (inflight_load_blocks, write_back_bytes): (u64, u64),
    ) -> Stats {
        let count = tiers.len();
        let each = |counters: &[AtomicU64]| counters.iter().take(count).map(read).collect();
        Stats {
            tiers,
            devices,
            put_tasks: read(&self.tasks[Op::Put as usize]),
            get_tasks: read(&self.tasks[Op::Get as usize]),
            prefetch_tasks: read(&self.prefetch_tasks),
            put_blocks: read(&self.blocks[Op::Put as usize]),
            get_blocks: read(&self.blocks[Op::Get as usize]),
            prefetch_blocks: read(&self.prefetch_blocks),
            put_bytes: read(&self.bytes[Op::Put as usize]),
            get_bytes: read(&self.bytes[Op::Get as usize]),
            put_move_ns: each(&self.move_ns[Op::Put as usize]),
            get_move_ns: each(&self.move_ns[Op::Get as usize]),
            hit_blocks: each(&self.hits),
            hit_bytes: each(&self.hit_bytes),
            missed_blocks: read(&self.missed),
            coalesced_blocks: read(&self.joined),
            inflight_load_blocks,
            promoted_blocks: read(&self.promoted_blocks),
            promoted_bytes: read(&self.promoted_bytes),
            put_acknowledged_blocks: read(&self.put_done),
            put_full_blocks: read(&self.put_full),
            put_dropped_blocks: read(&self.put_dropped),
            put_declined_blocks: read(&self.put_declined),
            put_corrupt_blocks: read(&self.put_corrupt),
            reserve_present_blocks: read(&self.reserve_present),
            reserve_pending_blocks: read(&self.reserve_pending),
            write_back_bytes,
        }
    }
}

impl Stats {
    /// Creates the statistics of an empty depot with these tiers.
    pub fn empty(tiers: &[String]) -> Stats {
        let tier = |name: &String| TierStats::new(name);
        let each = vec![0; tiers.len()];
        Stats {
            tiers: tiers.iter().map(tier).collect(),
            put_move_ns: each.clone(),
            get_move_ns: each.clone(),
            hit_blocks: each.clone(),
            hit_bytes: each,
            ..Stats::default()
        }
    }

    /// Returns the statistics as JSON with the counter names that users see.
    ///
    /// An unknown number is null.
    #[must_use]
    pub fn shown(&self) -> Value {
        let mut all = serde_json::to_value(self).unwrap_or_default();
        let tiers = all.get_mut("tiers").and_then(Value::as_array_mut);
        for tier in tiers.into_iter().flatten().filter_map(Value::as_object_mut) {
            if tier.remove("uncounted") == Some(Value::Bool(true)) {
                tier.insert("blocks".into(), Value::Null);
            }
            rename(tier);
        }
        all.as_object_mut().map(rename);
        all
    }

    /// Returns the object that `kvdepot stat --json` prints for a depot with a server at `socket`.
    ///
    /// `description` and `path` are those of the depot: the line for a log, and the first medium
    /// that survives the process.
    #[must_use]
    pub fn report(&self, socket: &Path, description: &str, path: Option<&Path>) -> Value {
        json!({
            "depot": format!("unix:{}", socket.display()),
            "description": description,
            "path": path.map(Path::to_string_lossy),
            "stats": self.shown(),
        })
    }
}
