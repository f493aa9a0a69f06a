//! Metrics of a depot as text: one table for the Prometheus text format and for OpenMetrics.

use std::fmt::{Display, Write};

use kvdepot_arena::TierStats;

use super::Stats;
use crate::devices::{DeviceState, DeviceStats};

/// Text format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MetricsFormat {
    /// The Prometheus text format, version 0.0.4.
    Prometheus,
    /// OpenMetrics, version 1.0.0.
    OpenMetrics,
}

/// Metrics of one name.
struct Family {
    /// Name without the prefix `kvdepot_`, and without `_total`. It ends in the unit, if there is
    /// one.
    name: &'static str,
    kind: Kind,
    help: &'static str,
    samples: Samples,
}

#[derive(Clone, Copy)]
enum Kind {
    Gauge,
    Counter,
}

/// Values of a family by their labels.
enum Samples {
    /// One per tier.
    Tier(fn(&TierStats) -> u64),
    /// One per tier, by the position of the tier; `None` is an unknown number.
    TierAt(fn(&Stats, usize) -> Option<u64>),
    /// One per tier and cause of a failed request.
    RequestErrors,
    /// One per medium.
    Device(fn(&DeviceStats) -> u64),
    /// One per operation in [`OPS`]; `None` if the operation has no such number.
    Op(fn(&Stats) -> [Option<u64>; 3]),
    /// One per tier and operation, in seconds.
    MoveSeconds,
    /// One per depot.
    Depot(fn(&Stats) -> u64),
}

/// Values of the label `op`.
const OPS: [&str; 3] = ["put", "get", "prefetch"];

/// Last words of names that are units.
const UNITS: [&str; 3] = ["blocks", "bytes", "seconds"];

/// All families, in the order of the text.
const FAMILIES: &[Family] = &[
    gauge(
        "capacity_bytes",
        "Capacity of the tier, in bytes of data.",
        Samples::Tier(|tier| tier.capacity_bytes),
    ),
    gauge(
        "live_bytes",
        "Published bytes of the tier; for a directory, the bytes of all processes.",
        Samples::Tier(|tier| tier.live_bytes),
    ),
    gauge(
        "live_blocks",
        "Published blocks of the tier.",
        Samples::TierAt(|stats, at| {
            // The number of blocks of other processes is unknown.
            let tier = stats.tiers.get(at).filter(|tier| !tier.uncounted);
            tier.map(|tier| tier.blocks)
        }),
    ),
    gauge(
        "pinned_blocks",
        "Blocks of the tier that readers have pinned.",
        Samples::Tier(|tier| tier.pinned_blocks),
    ),
    gauge(
        "reserved_blocks",
        "Blocks that are being written to the tier.",
        Samples::Tier(|tier| tier.reserved_blocks),
    ),
    counter(
        "stored_bytes",
        "Bytes published in the tier.",
        Samples::Tier(|tier| tier.stored_bytes),
    ),
    counter(
        "evicted_blocks",
        "Blocks evicted from the tier.",
        Samples::Tier(|tier| tier.evicted_blocks),
    ),
    counter(
        "evicted_bytes",
        "Bytes evicted from the tier.",
        Samples::Tier(|tier| tier.evicted_bytes),
    ),
    gauge(
        "grouped_blocks",
        "Blocks of the tier that belong to groups.",
        Samples::Tier(|tier| tier.grouped_blocks),
    ),
    counter(
        "evicted_groups",
        "Groups that were removed because a block of the group was evicted.",
        Samples::Tier(|tier| tier.evicted_groups),
    ),
    counter(
        "corrupt_blocks",
        "Blocks that failed checksum verification and were misses.",
        Samples::Tier(|tier| tier.corrupt_blocks),
    ),
    counter(
        "bad_media_bytes",
        "Bytes of failed parts of the medium, which are not used again.",
        Samples::Tier(|tier| tier.lost_bytes),
    ),
    counter(
        "timeouts",
        "Requests to the tier that timed out.",
        Samples::Tier(|tier| tier.timeouts),
    ),
    counter(
        "circuit_open",
        "Openings of the tier's circuit breaker because of time-outs.",
        Samples::Tier(|tier| tier.circuit_open),
    ),
    counter(
        "requests",
        "Requests to an object store, or to other hosts.",
        Samples::Tier(|tier| tier.requests),
    ),
    counter(
        "retries",
        "Repeated requests to an object store, or to other hosts.",
        Samples::Tier(|tier| tier.retries),
    ),
    counter(
        "request_errors",
        "Failed requests to an object store, or to other hosts, by cause.",
        Samples::RequestErrors,
    ),
    counter(
        "write_back_deferred_blocks",
        "Blocks that were not written back into the tier, for example at their first access.",
        Samples::Tier(|tier| tier.write_back_deferred_blocks),
    ),
    counter(
        "no_space_blocks",
        "Reservations in the tier that failed for lack of space.",
        Samples::Tier(|tier| tier.full),
    ),
    counter(
        "hit_blocks",
        "Blocks that the tier served.",
        Samples::TierAt(|stats, at| stats.hit_blocks.get(at).copied()),
    ),
    counter(
        "hit_bytes",
        "Bytes that the tier served.",
        Samples::TierAt(|stats, at| stats.hit_bytes.get(at).copied()),
    ),
    counter(
        "tasks",
        "Calls, by operation.",
        Samples::Op(|stats| {
            let tasks = [stats.put_tasks, stats.get_tasks, stats.prefetch_tasks];
            tasks.map(Some)
        }),
    ),
    counter(
        "blocks",
        "Keys of calls, by operation.",
        Samples::Op(|stats| {
            let blocks = [stats.put_blocks, stats.get_blocks, stats.prefetch_blocks];
            blocks.map(Some)
        }),
    ),
    counter(
        "bytes",
        "Bytes of calls, by operation.",
        Samples::Op(|stats| [Some(stats.put_bytes), Some(stats.get_bytes), None]),
    ),
    counter(
        "missed_blocks",
        "Keys of gets and pins that no tier had.",
        Samples::Depot(|stats| stats.missed_blocks),
    ),
    counter(
        "coalesced_blocks",
        "Keys of gets that waited for a load of another call.",
        Samples::Depot(|stats| stats.coalesced_blocks),
    ),
    gauge(
        "inflight_load_blocks",
        "Keys of lookups, loads and promotions in progress in asynchronous tiers.",
        Samples::Depot(|stats| stats.inflight_load_blocks),
    ),
    counter(
        "promoted_bytes",
        "Bytes promoted to the first tier after a hit in a lower tier.",
        Samples::Depot(|stats| stats.promoted_bytes),
    ),
    counter(
        "overload_dropped_blocks",
        "Puts that were dropped because of overload.",
        Samples::Depot(|stats| stats.put_dropped_blocks),
    ),
    counter(
        "admission_rejected_blocks",
        "Puts and reservations that an admission policy rejected.",
        Samples::Depot(|stats| stats.put_declined_blocks),
    ),
    counter(
        "reserve_present_blocks",
        "Reservations that were rejected because the block is stored.",
        Samples::Depot(|stats| stats.reserve_present_blocks),
    ),
    counter(
        "reserve_pending_blocks",
        "Reservations that were rejected because another call is writing the block.",
        Samples::Depot(|stats| stats.reserve_pending_blocks),
    ),
    gauge(
        "write_back_bytes",
        "Bytes in the write-back queue.",
        Samples::Depot(|stats| stats.write_back_bytes),
    ),
    gauge(
        "device_capacity_bytes",
        "Capacity of the medium, in bytes.",
        Samples::Device(|device| device.capacity_bytes),
    ),
    gauge(
        "device_used_bytes",
        "Used bytes of the medium.",
        Samples::Device(|device| device.used_bytes),
    ),
    gauge(
        "device_blocks",
        "Published blocks of the medium.",
        Samples::Device(|device| device.blocks),
    ),
    gauge(
        "device_serving",
        "1 if the medium accepts writes; 0 if it is being drained or has failed.",
        Samples::Device(|device| u64::from(device.state == DeviceState::Serving)),
    ),
    counter(
        "move_seconds",
        "Copy time of puts and gets, as a sum over batches, in seconds.",
        Samples::MoveSeconds,
    ),
];

const fn gauge(name: &'static str, help: &'static str, samples: Samples) -> Family {
    Family {
        name,
        kind: Kind::Gauge,
        help,
        samples,
    }
}

const fn counter(name: &'static str, help: &'static str, samples: Samples) -> Family {
    Family {
        name,
        kind: Kind::Counter,
        help,
        samples,
    }
}

impl Stats {
    /// Returns the counters in the Prometheus text format.
    #[must_use]
    pub fn prometheus(&self) -> String {
        self.metrics(MetricsFormat::Prometheus)
    }

    /// Returns the counters as text in `format`.
    #[must_use]
    pub fn metrics(&self, format: MetricsFormat) -> String {
        let mut page = Page {
            format,
            text: String::new(),
        };
        for family in FAMILIES {
            page.add(family, self);
        }
        if format == MetricsFormat::OpenMetrics {
            page.text.push_str("# EOF\n");
        }
        page.text
    }
}

/// The text so far.
struct Page {
    format: MetricsFormat,
    text: String,
}

impl Page {
    fn add(&mut self, family: &Family, stats: &Stats) {
        let name = format!("kvdepot_{}", family.name);
        let sample = match family.kind {
            Kind::Counter => format!("{name}_total"),
            Kind::Gauge => name.clone(),
        };
        self.describe(family, &name, &sample);
        match &family.samples {
            Samples::Tier(value) => {
                for tier in &stats.tiers {
                    self.sample(&sample, &[("tier", tier.tier.as_str())], value(tier));
                }
            }
            Samples::TierAt(value) => {
                for (at, tier) in stats.tiers.iter().enumerate() {
                    if let Some(value) = value(stats, at) {
                        self.sample(&sample, &[("tier", tier.tier.as_str())], value);
                    }
                }
            }
            Samples::RequestErrors => {
                for tier in &stats.tiers {
                    for (cause, count) in &tier.request_errors {
                        let labels = [("tier", tier.tier.as_str()), ("cause", cause.as_str())];
                        self.sample(&sample, &labels, count);
                    }
                }
            }
            Samples::Device(value) => {
                for device in &stats.devices {
                    let path = device.path.to_string_lossy();
                    let labels = [("tier", device.tier.as_str()), ("device", &*path)];
                    self.sample(&sample, &labels, value(device));
                }
            }
            Samples::Op(values) => {
                for (op, value) in OPS.into_iter().zip(values(stats)) {
                    if let Some(value) = value {
                        self.sample(&sample, &[("op", op)], value);
                    }
                }
            }
            Samples::MoveSeconds => {
                for (op, moved) in [("put", &stats.put_move_ns), ("get", &stats.get_move_ns)] {
                    for (tier, ns) in stats.tiers.iter().zip(moved) {
                        let labels = [("tier", tier.tier.as_str()), ("op", op)];
                        let seconds = *ns as f64 / 1e9;
                        self.sample(&sample, &labels, format_args!("{seconds:.6}"));
                    }
                }
            }
            Samples::Depot(value) => self.sample(&sample, &[], value(stats)),
        }
    }

    /// Adds the lines before the samples. A counter's family has no suffix in OpenMetrics.
    fn describe(&mut self, family: &Family, name: &str, sample: &str) {
        let is_open = self.format == MetricsFormat::OpenMetrics;
        let (title, help) = (if is_open { name } else { sample }, family.help);
        let kind = match family.kind {
            Kind::Gauge => "gauge",
            Kind::Counter => "counter",
        };
        // Writing to a String cannot fail.
        let _infallible = writeln!(self.text, "# HELP {title} {help}\n# TYPE {title} {kind}");
        let last = family.name.rsplit('_').next().unwrap_or_default();
        if is_open && UNITS.contains(&last) {
            let _infallible = writeln!(self.text, "# UNIT {title} {last}");
        }
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        self.text.push_str(name);
        for (at, (label, content)) in labels.iter().enumerate() {
            let before = if at == 0 { '{' } else { ',' };
            // Writing to a String cannot fail.
            let _infallible = write!(self.text, "{before}{label}=\"{}\"", escaped(content));
        }
        if !labels.is_empty() {
            self.text.push('}');
        }
        let _infallible = writeln!(self.text, " {value}");
    }
}

/// The value of a label, as both formats quote it.
fn escaped(content: &str) -> String {
    let content = content.replace('\\', "\\\\").replace('"', "\\\"");
    content.replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    /// Statistics with a sample of each family.
    fn stats() -> Stats {
        let mut stats = Stats::empty(&["Cache".to_owned(), "Files".to_owned()]);
        stats.tiers[1].uncounted = true;
        stats.tiers[1].request_errors = BTreeMap::from([("timeout".to_owned(), 3)]);
        stats.put_move_ns = vec![1_500_000_000, 0];
        stats.devices = vec![DeviceStats {
            tier: "Dax".into(),
            path: "/a \"b\"\\c\nd/ü".into(),
            state: DeviceState::Draining,
            capacity_bytes: 7,
            data_bytes: 6,
            used_bytes: 5,
            live_bytes: 4,
            blocks: 3,
            pinned_blocks: 2,
            reserved_blocks: 1,
            evicted_blocks: 0,
            lost_bytes: 0,
            orphans: Vec::new(),
        }];
        stats
    }

    /// Lines of one kind of description: the name and the rest.
    fn described<'a>(text: &'a str, word: &str) -> BTreeMap<&'a str, &'a str> {
        let start = format!("# {word} ");
        let lines = text.lines().filter_map(|line| line.strip_prefix(&*start));
        lines.filter_map(|line| line.split_once(' ')).collect()
    }

    /// Samples without descriptions.
    fn samples(text: &str) -> Vec<&str> {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        lines.collect()
    }

    #[test]
    fn every_sample_is_described_in_both_formats() {
        let stats = stats();
        let [plain, open] = [MetricsFormat::Prometheus, MetricsFormat::OpenMetrics]
            .map(|format| stats.metrics(format));
        assert_eq!(stats.prometheus(), plain);
        // The formats differ in their descriptions alone.
        assert_eq!(samples(&plain), samples(&open));
        assert!(open.ends_with("\n# EOF\n") && !plain.contains("EOF"));
        for (text, is_open) in [(&plain, false), (&open, true)] {
            let (helps, types) = (described(text, "HELP"), described(text, "TYPE"));
            assert_eq!(helps.len(), FAMILIES.len());
            assert!(helps.values().all(|help| help.ends_with('.')));
            let units = described(text, "UNIT");
            assert_eq!(units.is_empty(), !is_open);
            assert!(units.iter().all(|(name, unit)| name.ends_with(unit)));
            let mut seen = BTreeSet::new();
            for sample in samples(text) {
                let (name, _) = sample.split_once(['{', ' ']).unwrap();
                let family = match is_open {
                    true => name.strip_suffix("_total").unwrap_or(name),
                    false => name,
                };
                assert!(helps.contains_key(family), "{sample}");
                let is_counter = name.ends_with("_total");
                assert_eq!(types[family], if is_counter { "counter" } else { "gauge" });
                seen.insert(family);
            }
            assert_eq!(seen.len(), FAMILIES.len());
        }
    }

    #[test]
    fn samples_have_their_labels_and_values() {
        let text = stats().prometheus();
        let has = |line: &str| assert!(text.lines().any(|one| one == line), "{line}\n{text}");
        has("kvdepot_live_blocks{tier=\"Cache\"} 0");
        assert!(!text.contains("kvdepot_live_blocks{tier=\"Files\"}"));
        has("kvdepot_request_errors_total{tier=\"Files\",cause=\"timeout\"} 3");
        has("kvdepot_move_seconds_total{tier=\"Cache\",op=\"put\"} 1.500000");
        has("kvdepot_bytes_total{op=\"get\"} 0");
        assert!(!text.contains("kvdepot_bytes_total{op=\"prefetch\"}"));
        has("kvdepot_missed_blocks_total 0");
        has(r#"kvdepot_device_used_bytes{tier="Dax",device="/a \"b\"\\c\nd/ü"} 5"#);
        has(r#"kvdepot_device_serving{tier="Dax",device="/a \"b\"\\c\nd/ü"} 0"#);
    }
}
