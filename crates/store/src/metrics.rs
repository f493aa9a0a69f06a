//! What a depot counts. Names follow `kvdepot_<noun>_<unit>` with labels `tier`, `op`, `source`.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use kvdepot_arena::TierStats;
use serde_json::Value;

use crate::devices::{DeviceState, DeviceStats};
use crate::task::Outcome;
use crate::tier::TIERS_MAX;

/// The two directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "whoever asks has an answer for each"
)]
pub enum Op {
    /// Brings blocks back.
    Get,
    /// Stores blocks.
    Put,
}

impl Op {
    /// As logs have it.
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

/// A depot's counters and its tiers' fill.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct Stats {
    /// The tiers, near to far.
    pub tiers: Vec<TierStats>,
    /// The media of the lasting tier.
    pub devices: Vec<DeviceStats>,
    /// Calls of `put`.
    pub put_tasks: u64,
    /// Calls of `get`.
    pub get_tasks: u64,
    /// Calls of `prefetch`.
    #[serde(default)]
    pub prefetch_tasks: u64,
    /// Keys given to `put`.
    pub put_blocks: u64,
    /// Keys given to `get`.
    pub get_blocks: u64,
    /// Keys given to `prefetch`.
    #[serde(default)]
    pub prefetch_blocks: u64,
    /// Bytes given to `put`.
    pub put_bytes: u64,
    /// Bytes asked of `get`.
    pub get_bytes: u64,
    /// From handing a put's copies into a tier to the lanes until the last of them ended, summed
    /// over batches, by tier; without write-back and promotion.
    pub put_move_ns: Vec<u64>,
    /// The same for a get's copies out of a tier.
    pub get_move_ns: Vec<u64>,
    /// Blocks served, by tier.
    pub hit_blocks: Vec<u64>,
    /// Bytes served, by tier.
    pub hit_bytes: Vec<u64>,
    /// Keys that a `get` or a pin asked for and no tier had. Who only looks is not counted, nor a
    /// prefetch: the call that takes the bytes is.
    pub missed_blocks: u64,
    /// Keys of gets that waited while another call loaded their blocks.
    #[serde(default)]
    pub joined_blocks: u64,
    /// Keys that are being looked for, loaded or brought near from a tier that is slow to read.
    #[serde(default)]
    pub loading_blocks: u64,
    /// Blocks copied to the near tier after a far hit.
    pub promoted_blocks: u64,
    /// Bytes copied to the near tier after far hits.
    pub promoted_bytes: u64,
    /// Puts acknowledged.
    pub put_acknowledged_blocks: u64,
    /// Puts that found no room.
    pub put_full_blocks: u64,
    /// Puts dropped because the write-back queue was full.
    pub put_dropped_blocks: u64,
    /// Puts and reservations of blocks that were not to be stored, or not for their first touch.
    #[serde(default)]
    pub put_declined_blocks: u64,
    /// Blocks that did not verify on their way to the far tier.
    pub put_corrupt_blocks: u64,
    /// Reservations that were not needed: the block is stored.
    pub reserve_present_blocks: u64,
    /// Reservations that were not needed: another call is writing the block.
    pub reserve_pending_blocks: u64,
    /// Bytes that wait for the far tier.
    pub write_back_bytes: u64,
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
        (loading_blocks, write_back_bytes): (u64, u64),
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
            joined_blocks: read(&self.joined),
            loading_blocks,
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
    /// Of a depot with these tiers that holds nothing.
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

    /// All of it as people and programs are shown it: a number that is not known is null.
    #[must_use]
    pub fn shown(&self) -> Value {
        let mut all = serde_json::to_value(self).unwrap_or_default();
        let tiers = all.get_mut("tiers").and_then(Value::as_array_mut);
        for tier in tiers.into_iter().flatten().filter_map(Value::as_object_mut) {
            if tier.remove("uncounted") == Some(Value::Bool(true)) {
                tier.insert("blocks".into(), Value::Null);
            }
        }
        all
    }

    /// The counters in the Prometheus text format.
    #[must_use]
    pub fn prometheus(&self) -> String {
        let mut text = String::new();
        let mut metric = |name: &str, kind: &str, rows: &[(String, u64)]| {
            // Writing to a String cannot fail.
            let _infallible = writeln!(text, "# TYPE kvdepot_{name} {kind}");
            for (labels, value) in rows {
                let _infallible = writeln!(text, "kvdepot_{name}{labels} {value}");
            }
        };
        let by_tier = |value: &dyn Fn(usize, &TierStats) -> u64| -> Vec<(String, u64)> {
            let label = |tier: &TierStats| format!("{{tier=\"{}\"}}", tier.tier);
            self.tiers
                .iter()
                .enumerate()
                .map(|(i, tier)| (label(tier), value(i, tier)))
                .collect()
        };
        metric(
            "capacity_bytes",
            "gauge",
            &by_tier(&|_, tier| tier.capacity_bytes),
        );
        metric("live_bytes", "gauge", &by_tier(&|_, tier| tier.live_bytes));
        // How many others have stored is not known.
        let counted = |rows: Vec<(String, u64)>| -> Vec<(String, u64)> {
            let tiers = self.tiers.iter().zip(rows);
            let rows = tiers.filter(|(tier, _)| !tier.uncounted);
            rows.map(|(_, row)| row).collect()
        };
        let blocks = counted(by_tier(&|_, tier| tier.blocks));
        metric("live_blocks", "gauge", &blocks);
        metric(
            "pinned_blocks",
            "gauge",
            &by_tier(&|_, tier| tier.pinned_blocks),
        );
        metric(
            "reserved_blocks",
            "gauge",
            &by_tier(&|_, tier| tier.reserved_blocks),
        );
        metric(
            "stored_bytes_total",
            "counter",
            &by_tier(&|_, tier| tier.stored_bytes),
        );
        metric(
            "evicted_blocks_total",
            "counter",
            &by_tier(&|_, tier| tier.evicted_blocks),
        );
        metric(
            "evicted_bytes_total",
            "counter",
            &by_tier(&|_, tier| tier.evicted_bytes),
        );
        metric(
            "grouped_blocks",
            "gauge",
            &by_tier(&|_, tier| tier.grouped_blocks),
        );
        metric(
            "evicted_groups_total",
            "counter",
            &by_tier(&|_, tier| tier.evicted_groups),
        );
        metric(
            "corrupt_blocks_total",
            "counter",
            &by_tier(&|_, tier| tier.corrupt_blocks),
        );
        metric(
            "lost_bytes_total",
            "counter",
            &by_tier(&|_, tier| tier.lost_bytes),
        );
        metric(
            "unanswered_total",
            "counter",
            &by_tier(&|_, tier| tier.unanswered),
        );
        metric(
            "left_alone_total",
            "counter",
            &by_tier(&|_, tier| tier.left_alone),
        );
        metric(
            "requests_total",
            "counter",
            &by_tier(&|_, tier| tier.requests),
        );
        metric(
            "retries_total",
            "counter",
            &by_tier(&|_, tier| tier.retries),
        );
        let faults = self.tiers.iter().flat_map(|tier| {
            let row = |(cause, count): (&String, &u64)| {
                let labels = format!("{{tier=\"{}\",cause=\"{cause}\"}}", tier.tier);
                (labels, *count)
            };
            tier.faults.iter().map(row)
        });
        metric("faults_total", "counter", &faults.collect::<Vec<_>>());
        metric(
            "stayed_blocks_total",
            "counter",
            &by_tier(&|_, tier| tier.declined),
        );
        metric(
            "refused_blocks_total",
            "counter",
            &by_tier(&|_, tier| tier.full),
        );
        metric(
            "hit_blocks_total",
            "counter",
            &by_tier(&|i, _| self.hit_blocks[i]),
        );
        metric(
            "hit_bytes_total",
            "counter",
            &by_tier(&|i, _| self.hit_bytes[i]),
        );
        let by_op = |rows: &[(&str, u64)]| -> Vec<(String, u64)> {
            let row = |(op, value): &(&str, u64)| (format!("{{op=\"{op}\"}}"), *value);
            rows.iter().map(row).collect()
        };
        metric(
            "tasks_total",
            "counter",
            &by_op(&[
                ("put", self.put_tasks),
                ("get", self.get_tasks),
                ("prefetch", self.prefetch_tasks),
            ]),
        );
        metric(
            "blocks_total",
            "counter",
            &by_op(&[
                ("put", self.put_blocks),
                ("get", self.get_blocks),
                ("prefetch", self.prefetch_blocks),
            ]),
        );
        metric(
            "bytes_total",
            "counter",
            &by_op(&[("put", self.put_bytes), ("get", self.get_bytes)]),
        );
        let plain = |value| vec![(String::new(), value)];
        metric("missed_blocks_total", "counter", &plain(self.missed_blocks));
        metric("joined_blocks_total", "counter", &plain(self.joined_blocks));
        metric("loading_blocks", "gauge", &plain(self.loading_blocks));
        metric(
            "promoted_bytes_total",
            "counter",
            &plain(self.promoted_bytes),
        );
        metric(
            "dropped_blocks_total",
            "counter",
            &plain(self.put_dropped_blocks),
        );
        metric(
            "declined_blocks_total",
            "counter",
            &plain(self.put_declined_blocks),
        );
        metric(
            "reserve_present_blocks_total",
            "counter",
            &plain(self.reserve_present_blocks),
        );
        metric(
            "reserve_pending_blocks_total",
            "counter",
            &plain(self.reserve_pending_blocks),
        );
        metric("write_back_bytes", "gauge", &plain(self.write_back_bytes));
        self.by_device(&mut text);
        self.move_seconds(&mut text);
        text
    }

    fn by_device(&self, text: &mut String) {
        type Value = fn(&DeviceStats) -> u64;
        let rows: [(&str, Value); 4] = [
            ("device_capacity_bytes", |device| device.capacity_bytes),
            ("device_used_bytes", |device| device.used_bytes),
            ("device_blocks", |device| device.blocks),
            ("device_serving", |device| {
                u64::from(device.state == DeviceState::Serving)
            }),
        ];
        for (name, value) in rows {
            // Writing to a String cannot fail.
            let _infallible = writeln!(text, "# TYPE kvdepot_{name} gauge");
            for device in &self.devices {
                let (tier, value) = (&device.tier, value(device));
                // Quotes and backslashes as the format wants them.
                let path = format!("{:?}", device.path.to_string_lossy());
                let labels = format!("{{tier=\"{tier}\",device={path}}}");
                let _infallible = writeln!(text, "kvdepot_{name}{labels} {value}");
            }
        }
    }

    fn move_seconds(&self, text: &mut String) {
        // Writing to a String cannot fail.
        let _infallible = writeln!(text, "# TYPE kvdepot_move_seconds_total counter");
        for (op, moved) in [("put", &self.put_move_ns), ("get", &self.get_move_ns)] {
            for (tier, ns) in self.tiers.iter().zip(moved) {
                let (tier, seconds) = (&tier.tier, *ns as f64 / 1e9);
                let labels = format!("{{tier=\"{tier}\",op=\"{op}\"}}");
                let _infallible = writeln!(text, "kvdepot_move_seconds_total{labels} {seconds:.6}");
            }
        }
    }
}
