//! What is measured.

use kvdepot_transfer::{Config, Op};
use serde_json::{Value, json};

use crate::args::Transfer;
use crate::error::Error;

/// Megabytes and pieces of the published table.
const TABLE: [(u64, usize); 8] = [
    (200, 5_000),
    (200, 10_000),
    (300, 8_000),
    (400, 10_000),
    (500, 15_000),
    (600, 12_000),
    (700, 20_000),
    (700, 10_000),
];
/// One large piece.
const WHOLE: (u64, usize) = (256, 1);
const QUICK: [(u64, usize); 3] = [(200, 10_000), (400, 10_000), WHOLE];

const MESSAGES: [u64; 6] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20];
const QUICK_MESSAGES: [u64; 3] = [4 << 10, 64 << 10, 1 << 20];

/// What is moved at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Batch {
    pub(super) chunks: usize,
    pub(super) chunk: u64,
}

impl Batch {
    pub(super) fn bytes(&self) -> u64 {
        self.chunks as u64 * self.chunk
    }

    pub(super) fn gigabytes(&self) -> f64 {
        self.bytes() as f64 / 1e9
    }
}

/// What lies between the two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Loopback,
    /// A veth pair: each has a network namespace of its own.
    Veth,
}

impl Place {
    pub(super) fn all_of(args: &Transfer) -> Vec<Place> {
        let is_wanted = |place: &Place| match args.places.as_slice() {
            [] => *place == Place::Loopback,
            given => given.iter().any(|one| one == place.word()),
        };
        let both = [Place::Loopback, Place::Veth].into_iter();
        both.filter(is_wanted).collect()
    }

    fn word(self) -> &'static str {
        match self {
            Place::Loopback => "loopback",
            Place::Veth => "veth",
        }
    }
}

/// What is measured, and how much of it.
pub(super) struct Plan {
    pub(super) place: Place,
    metrics: Vec<String>,
    /// Those that there are; all where it is not said.
    only: Option<Vec<&'static str>>,
    pub(super) ops: Vec<Op>,
    pub(super) batches: Vec<Batch>,
    pub(super) messages: Vec<u64>,
    pub(super) rounds: usize,
    streams: Option<usize>,
    slice_size: Option<u64>,
    window: Option<usize>,
}

impl Plan {
    pub(super) fn new(args: &Transfer, place: Place) -> Plan {
        fn or<T: Clone>(given: &[T], quick: Option<&[T]>, all: &[T]) -> Vec<T> {
            match given {
                [] => quick.unwrap_or(all).to_vec(),
                given => given.to_vec(),
            }
        }
        let table: Vec<_> = TABLE.into_iter().chain([WHOLE]).collect();
        // Across a veth pair a few of the table say as much.
        let few = args.quick || place == Place::Veth;
        let batches = or(&args.batches, few.then_some(&QUICK), &table);
        let batch = |(megabytes, chunks): (u64, usize)| Batch {
            chunks,
            chunk: megabytes * 1_000_000 / chunks as u64,
        };
        let is_wanted =
            |op: &Op| args.ops.is_empty() || args.ops.iter().any(|one| one == word(*op));
        Plan {
            place,
            metrics: args.metrics.clone(),
            only: None,
            ops: [Op::Write, Op::Read]
                .into_iter()
                .filter(is_wanted)
                .collect(),
            batches: batches.into_iter().map(batch).collect(),
            messages: or(
                &args.messages,
                args.quick.then_some(&QUICK_MESSAGES),
                &MESSAGES,
            ),
            rounds: args.rounds.unwrap_or(if args.quick { 3 } else { 5 }),
            streams: args.streams,
            slice_size: args.slice_size,
            window: args.window,
        }
    }

    /// The same with none but these metrics.
    pub(super) fn with_only(self, metrics: Vec<&'static str>) -> Plan {
        Plan {
            only: Some(metrics),
            ..self
        }
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        if let Some(only) = &self.only
            && !self.wants_any(only)
        {
            return Err(Error::Usage {
                field: "--metric",
                value: self.metrics.join(", "),
                allowed: format!(
                    "one of {} with --where {}",
                    only.join(", "),
                    self.place.word()
                ),
            });
        }
        if self.rounds == 0 {
            return Err(Error::Usage {
                field: "--rounds",
                value: "0".into(),
                allowed: "1 or more".into(),
            });
        }
        Ok(())
    }

    pub(super) fn wants(&self, metric: &str) -> bool {
        let is_there = |only: &Vec<&str>| only.contains(&metric);
        self.only.as_ref().is_none_or(is_there)
            && (self.metrics.is_empty() || self.metrics.iter().any(|name| name == metric))
    }

    pub(super) fn wants_any(&self, metrics: &[&str]) -> bool {
        metrics.iter().any(|metric| self.wants(metric))
    }

    /// How an engine works, which is by its defaults where nothing was said; over TCP, though both
    /// ends are on one host.
    pub(super) fn config(&self) -> Config {
        let mut config = Config {
            local: false,
            rdma: Some(Vec::new()),
            ..Config::default()
        };
        config.streams = self.streams.unwrap_or(config.streams);
        config.slice_size = self.slice_size.unwrap_or(config.slice_size);
        config.tail_merge = config.tail_merge.min(config.slice_size);
        config.window = self.window.unwrap_or(config.window);
        config
    }

    /// The same without a watermark and without merged tails.
    pub(super) fn config_off(&self) -> Config {
        Config {
            watermark: usize::MAX,
            tail_merge: 0,
            ..self.config()
        }
    }

    /// The same over shared memory.
    pub(super) fn config_shared(&self) -> Config {
        Config {
            local: true,
            ..self.config()
        }
    }

    /// A case of these.
    pub(super) fn case(&self, op: Op, bytes: u64, chunks: usize) -> Value {
        json!({
            "op": word(op), "bytes": bytes, "chunks": chunks, "transport": "tcp",
            "streams": self.config().streams, "checksum": "off", "where": self.place.word(),
            "plan": "on",
        })
    }
}

pub(super) fn word(op: Op) -> &'static str {
    match op {
        Op::Read => "read",
        Op::Write => "write",
    }
}
