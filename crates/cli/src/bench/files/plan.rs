//! What is measured, and whether there is room for it.

use std::path::{Path, PathBuf};

use kvdepot_host::limits;
use kvdepot_store::config::size::show;
use serde_json::{Value, json};

use crate::args::Files;
use crate::error::Error;

const TIERS: [&str; 2] = ["Posix", "Nvme"];

/// The tiers that are measured only where they are named: one has no files, and the other needs
/// a 3FS.
pub(super) const OBJECTS: &str = "S3";
pub(super) const RINGS: &str = "Ds3fs";
/// The metric of hits before a stage that answers nothing.
pub(super) const HUNG: &str = "hung_over_cache";

const BLOCKS: [u64; 4] = [64 << 10, 256 << 10, 1 << 20, 4 << 20];
const DEPTHS: [usize; 3] = [1, 8, 32];

/// Metrics that are figures of blocks that are moved.
const MOVES: [&str; 5] = [
    "dump",
    "load_cold",
    "load_warm",
    "cpu_s_per_gib",
    "requests_per_block",
];

/// What is measured, and how much of it.
#[derive(Clone)]
pub(super) struct Plan {
    pub(super) cells: Vec<Cell>,
    pub(super) metrics: Vec<String>,
    pub(super) blocks: Vec<usize>,
    pub(super) tiers: Vec<String>,
    pub(super) size: usize,
    pub(super) batch: usize,
    pub(super) rounds: usize,
    pub(super) dir: PathBuf,
    /// Where objects are, as `s3://BUCKET/PREFIX`, and the server if it is not AWS.
    pub(super) url: Option<String>,
    pub(super) endpoint: Option<String>,
    /// A directory below the mount of a 3FS, and its library if it is not where the loader looks.
    pub(super) path: Option<PathBuf>,
    pub(super) library: Option<PathBuf>,
}

/// One medium, and the blocks in it.
#[derive(Clone)]
pub(super) struct Cell {
    pub(super) tier: String,
    pub(super) direct: bool,
    pub(super) block: usize,
    pub(super) depths: Vec<usize>,
}

impl Cell {
    pub(super) fn case(&self, depth: usize) -> Value {
        let mut case = json!({"tier": self.tier, "block": self.block, "depth": depth});
        if TIERS.contains(&self.tier.as_str()) {
            case["direct"] = self.direct.into();
        }
        case
    }
}

impl Plan {
    pub(super) fn new(args: &Files) -> Plan {
        fn or<T: Clone>(given: &[T], quick: Option<&[T]>, all: &[T]) -> Vec<T> {
            match given {
                [] => quick.unwrap_or(all).to_vec(),
                given => given.to_vec(),
            }
        }
        let quick = args.quick;
        let tiers = or(&args.tiers, None, &TIERS.map(str::to_owned));
        let blocks = or(&args.blocks, quick.then_some(&[64 << 10, 1 << 20]), &BLOCKS);
        let blocks: Vec<usize> = blocks.into_iter().map(|block| block as usize).collect();
        let depths = or(&args.depths, quick.then_some(&[8]), &DEPTHS);
        let directs = or(&args.directs, None, &[true, false]);
        let mut cells = Vec::new();
        for tier in &tiers {
            for direct in &directs {
                if tier != "Posix" && !direct {
                    continue;
                }
                for block in blocks.iter().copied() {
                    cells.push(Cell {
                        tier: tier.clone(),
                        direct: *direct,
                        block,
                        depths: depths.clone(),
                    });
                }
            }
        }
        let (size, batch, rounds) = match quick {
            true => (256 << 20, 64 << 20, 3),
            false => (2 << 30, 256 << 20, 7),
        };
        let size = args.size.unwrap_or(size) as usize;
        Plan {
            cells,
            metrics: args.metrics.clone(),
            blocks,
            tiers,
            size,
            batch: args.batch.map_or(batch, |batch| batch as usize).min(size),
            rounds: args.rounds.unwrap_or(rounds),
            dir: args.dir.clone().unwrap_or_else(std::env::temp_dir),
            url: args.url.clone(),
            endpoint: args.endpoint.clone().or_else(|| {
                let endpoint = std::env::var("AWS_ENDPOINT");
                endpoint.ok()
            }),
            path: args.path.clone(),
            library: args.library.clone(),
        }
    }

    pub(super) fn wants(&self, metric: &str) -> bool {
        self.metrics.is_empty() || self.metrics.iter().any(|name| name == metric)
    }

    /// The tiers on files of a disk.
    pub(super) fn on_disk(&self) -> impl Iterator<Item = &String> {
        let on_disk = |tier: &&String| TIERS.contains(&tier.as_str());
        self.tiers.iter().filter(on_disk)
    }

    pub(super) fn has_files(&self) -> bool {
        self.on_disk().next().is_some()
    }

    /// The tiers that shall hang behind `Cache`. A server that does is easily had; a 3FS has to be
    /// made to, and is asked for.
    pub(super) fn hung(&self) -> impl Iterator<Item = &String> {
        let is_named = self.metrics.iter().any(|name| name == HUNG);
        let hangs = move |tier: &&String| match tier.as_str() {
            OBJECTS => self.wants(HUNG),
            tier => tier == RINGS && is_named,
        };
        self.tiers.iter().filter(hangs)
    }

    /// Where the files of a tier are made.
    pub(super) fn dir_of(&self, tier: &str) -> &Path {
        let elsewhere = self.path.as_deref().filter(|_| tier == RINGS);
        elsewhere.unwrap_or(&self.dir)
    }

    fn has(&self, tier: &str) -> bool {
        self.tiers.iter().any(|one| one == tier)
    }

    pub(super) fn moves(&self) -> bool {
        MOVES.iter().any(|metric| self.wants(metric))
    }

    pub(super) fn check(&self, args: &Files) -> Result<(), Error> {
        let refuse = |field, value: String, allowed: String| {
            Err(Error::Usage {
                field,
                value,
                allowed,
            })
        };
        if let Some(block) = self.blocks.iter().find(|block| **block % 4096 != 0) {
            return refuse("--block", block.to_string(), "a multiple of 4096".into());
        }
        let most = args.depths.iter().copied().max().unwrap_or(32).max(8);
        let largest = self.blocks.iter().copied().max().unwrap_or(0);
        if largest.saturating_mul(2) > self.batch {
            let allowed = format!("at least {} (two blocks)", show(2 * largest as u64));
            return refuse("--batch, --size", show(self.batch as u64), allowed);
        }
        if most > 1024 {
            return refuse("--depth", most.to_string(), "1 to 1024".into());
        }
        if self.rounds == 0 {
            return refuse("--rounds", "0".into(), "1 or more".into());
        }
        if self.has(RINGS) && self.path.is_none() {
            let allowed = "a directory below a 3FS mount, to measure Ds3fs";
            return refuse("--path", "missing".into(), allowed.into());
        }
        let objects = self.has(OBJECTS);
        if objects && self.url.is_none() {
            let allowed = "s3://BUCKET/PREFIX, to measure S3";
            return refuse("--url", "missing".into(), allowed.into());
        }
        // What they name would not be measured, and something else would.
        let meant = [
            ("--url", &args.url.clone().map(PathBuf::from), OBJECTS),
            (
                "--endpoint",
                &args.endpoint.clone().map(PathBuf::from),
                OBJECTS,
            ),
            ("--path", &args.path, RINGS),
            ("--library", &args.library, RINGS),
        ];
        for (option, value, tier) in meant {
            if let Some(value) = value.as_ref().filter(|_| !self.has(tier)) {
                let allowed = format!("this option only with --tier {tier}");
                return refuse(option, value.display().to_string(), allowed);
            }
        }
        let is_url = |text: &&String| text.starts_with("http://") || text.starts_with("https://");
        if let Some(endpoint) = self.endpoint.as_ref().filter(|one| objects && !is_url(one)) {
            let allowed = "https://HOST:PORT, or http:// if anybody may read the data";
            return refuse("--endpoint", endpoint.clone(), allowed.into());
        }
        self.check_room()
    }

    /// Refuses what the directory, or this machine's memory, has no room for.
    fn check_room(&self) -> Result<(), Error> {
        let refuse = |needed: u64, free: u64, whence: String, or: &str| {
            let (needed, free) = (show(needed), show(free));
            Err(Error::Usage {
                field: "--size",
                value: show(self.size as u64),
                allowed: format!("a size that fits {whence} ({needed} needed, {free} free){or}"),
            })
        };
        // Kvdepot's blocks and as many others, each with what a round writes anew.
        let needed = 2 * (self.size + 2 * self.batch) as u64 + (256 << 20);
        for tier in self.tiers.iter().filter(|tier| *tier != OBJECTS) {
            let dir = self.dir_of(tier);
            let free = limits::disk_free(dir)?;
            if needed > free {
                let whence = format!("into {}", dir.display());
                let option = if tier == RINGS { "--path" } else { "--dir" };
                let or = format!("; use another {option}");
                return refuse(needed, free, whence, &or);
            }
        }
        let needed = 4 * self.batch as u64 + (256 << 20);
        let memory = limits::memory_allowed()?;
        if needed > memory / 4 * 3 {
            return refuse(
                needed,
                memory,
                "into memory together with --batch".into(),
                "",
            );
        }
        Ok(())
    }
}
