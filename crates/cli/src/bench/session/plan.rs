//! What is measured, and whether there is room for it.

use std::path::PathBuf;

use kvdepot_host::limits;
use kvdepot_store::config::size::show;

use crate::args::Sessions;
use crate::error::Error;

const BYTES: [u64; 3] = [256 << 20, 1 << 30, 4 << 30];

/// How bytes come to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Io {
    Buffered,
    /// Through the page cache, and on the disk in the end.
    Fsync,
    Direct,
}

impl Io {
    const ALL: [Io; 3] = [Io::Buffered, Io::Fsync, Io::Direct];

    pub(super) fn name(self) -> &'static str {
        match self {
            Io::Buffered => "buffered",
            Io::Fsync => "fsync",
            Io::Direct => "direct",
        }
    }
}

/// What is measured, and how much of it.
pub(super) struct Plan {
    metrics: Vec<String>,
    pub(super) bytes: Vec<usize>,
    pub(super) ios: Vec<Io>,
    pub(super) sessions: usize,
    pub(super) rounds: usize,
    pub(super) dir: PathBuf,
}

impl Plan {
    pub(super) fn new(args: &Sessions) -> Plan {
        let bytes = match (&args.bytes[..], args.quick) {
            ([], true) => vec![64 << 20],
            ([], false) => BYTES.to_vec(),
            (given, _) => given.to_vec(),
        };
        let is_meant =
            |io: &Io| args.ios.is_empty() || args.ios.iter().any(|name| name == io.name());
        let (sessions, rounds) = if args.quick { (1000, 3) } else { (100_000, 5) };
        Plan {
            metrics: args.metrics.clone(),
            bytes: bytes.into_iter().map(|bytes| bytes as usize).collect(),
            ios: Io::ALL.into_iter().filter(is_meant).collect(),
            sessions: args.sessions.unwrap_or(sessions),
            rounds: args.rounds.unwrap_or(rounds),
            dir: args.dir.clone().unwrap_or_else(std::env::temp_dir),
        }
    }

    pub(super) fn wants(&self, metric: &str) -> bool {
        self.metrics.is_empty() || self.metrics.iter().any(|name| name == metric)
    }

    pub(super) fn wants_any(&self, metrics: &[&str]) -> bool {
        metrics.iter().any(|metric| self.wants(metric))
    }

    pub(super) fn largest(&self) -> usize {
        self.bytes.iter().copied().max().unwrap_or(0)
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        let refuse = |field, value: String, allowed: String| {
            Err(Error::Usage {
                field,
                value,
                allowed,
            })
        };
        let is_odd = |bytes: &&usize| !bytes.is_multiple_of(1 << 20) || **bytes < 8 << 20;
        if let Some(bytes) = self.bytes.iter().find(is_odd) {
            return refuse("--bytes", bytes.to_string(), "whole MiB, 8 or more".into());
        }
        if self.rounds == 0 {
            return refuse("--rounds", "0".into(), "1 or more".into());
        }
        let largest = self.largest() as u64;
        // A state that is there, the one that is written, and two of the staged way.
        let (needed, free) = (4 * largest + (256 << 20), limits::disk_free(&self.dir)?);
        if needed > free {
            let dir = self.dir.display();
            let (needed, free) = (show(needed), show(free));
            let allowed = format!("a size that fits into {dir} ({needed} needed, {free} free)");
            return refuse(
                "--bytes",
                show(largest),
                format!("{allowed}; use another --dir"),
            );
        }
        // The caller's memory twice, and once more in the tier that is memory.
        let (needed, memory) = (3 * largest + (256 << 20), limits::memory_allowed()?);
        if needed > memory / 4 * 3 {
            let (needed, memory) = (show(needed), show(memory));
            let allowed = format!("a size that fits into memory ({needed} needed of {memory})");
            return refuse("--bytes", show(largest), allowed);
        }
        Ok(())
    }
}
