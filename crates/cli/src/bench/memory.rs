//! `kvdepot bench memory`: gets into and puts out of memory that no cache holds, against the best
//! plain copy of the same pieces on as many threads.
//!
//! What is timed is the public call, from `get` or `put` until its task has ended: looking up or
//! reserving, planning, copying with the checksum, publishing. The plain copies are timed from the
//! first thread's start to the last one's end. Every run takes other blocks and other places of
//! the caller's memory, in random order, and comes back to none before many times the size of the
//! caches was moved.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

use kvdepot_media::{Buffer, Pages, Plain};
use kvdepot_plan::Span;
use kvdepot_store::Key;
use serde_json::json;

use super::media::{Region, Store, check_room, in_memory, target};
use super::plain::{Crew, Way};
use super::random::Random;
use super::report::{Report, Row};
use super::rounds::Rounds;
use crate::args::Memory;
use crate::error::Error;
use crate::leftovers::Scratch;

/// The larger ones are left out where a batch is smaller.
const BLOCKS: [u64; 9] = [
    4 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    2 << 20,
    3 << 20,
    4 << 20,
    8 << 20,
    40 << 20,
];
const THREADS: [usize; 2] = [1, 2];
const OPS: [&str; 2] = ["get", "put"];
const TIERS: [&str; 2] = ["Dax", "Cache"];

/// What is measured, and how much of it.
struct Plan {
    ops: Vec<String>,
    tiers: Vec<String>,
    blocks: Vec<usize>,
    threads: Vec<usize>,
    size: usize,
    batch: usize,
    region: usize,
    rounds: usize,
}

impl Plan {
    fn new(args: &Memory) -> Plan {
        let or = |given: &[String], all: &[&str]| {
            if given.is_empty() {
                all.iter().map(|&name| name.to_owned()).collect()
            } else {
                given.to_vec()
            }
        };
        let threads = if args.threads.is_empty() {
            THREADS.to_vec()
        } else {
            args.threads.clone()
        };
        let (size, batch, rounds) = if args.quick {
            (256 << 20, 32 << 20, 5)
        } else {
            (1 << 30, 128 << 20, 15)
        };
        let size = args.extent.size.unwrap_or(size) as usize;
        let batch = (args.extent.batch.unwrap_or(batch) as usize).min(size / 2);
        let mut blocks = args.blocks.clone();
        if blocks.is_empty() {
            blocks.extend(BLOCKS.iter().filter(|block| **block as usize <= batch));
        }
        Plan {
            ops: or(&args.ops, &OPS),
            tiers: or(&args.tiers, &TIERS),
            blocks: blocks.into_iter().map(|block| block as usize).collect(),
            threads,
            size,
            batch,
            // The caller's memory: half of the medium, which is many times the caches' size.
            region: (size / 2).max(batch),
            rounds: args.extent.rounds.unwrap_or(rounds),
        }
    }

    fn check(&self) -> Result<(), Error> {
        let refuse = |field, value: u64, allowed: &str| {
            Err(Error::Usage {
                field,
                value: value.to_string(),
                allowed: allowed.into(),
            })
        };
        if let Some(block) = self.blocks.iter().find(|block| **block % 4096 != 0) {
            return refuse("--block", *block as u64, "a multiple of 4096");
        }
        if let Some(block) = self.blocks.iter().find(|block| **block > self.batch) {
            return refuse(
                "--block",
                *block as u64,
                "at most --batch, which is at most --size / 2",
            );
        }
        if self.blocks.is_empty() && self.size < 8192 {
            let allowed = "at least 8KiB (twice the smallest block)";
            return refuse("--size", self.size as u64, allowed);
        }
        if self.blocks.is_empty() {
            return refuse("--batch", self.batch as u64, "at least 4KiB");
        }
        if self.threads.contains(&0) {
            return refuse("--threads", 0, "1 or more");
        }
        if self.rounds == 0 {
            return refuse("--rounds", 0, "1 or more");
        }
        Ok(())
    }
}

/// How many cases will be measured.
pub(super) fn cases(args: &Memory) -> usize {
    let plan = Plan::new(args);
    plan.ops.len() * plan.tiers.len() * plan.threads.len() * plan.blocks.len()
}

pub(super) fn run(args: &Memory, report: &mut Report<'_>) -> Result<(), Error> {
    let plan = Plan::new(args);
    plan.check()?;
    let dir = in_memory(args.dir.as_deref());
    // What the plain copies put into is there twice, and so is the caller's memory.
    check_room(dir, plan.size, plan.size + 2 * plan.region)?;
    let region = Region::new(plan.region)?;
    let ordinary = Region::of(Pages::Small, plan.region)?;
    let smallest = plan.blocks.iter().copied().min().unwrap_or(4096);
    for tier in &plan.tiers {
        for threads in plan.threads.iter().copied() {
            // One for each: a depot's lanes are its own, and so is a directory's lock.
            let scratch = Scratch::new(dir)?;
            let mut store = Store::open(&scratch, tier, plan.size, smallest, threads)?;
            let crew = Crew::new(threads)?;
            for op in &plan.ops {
                let mut bench = Bench {
                    plan: &plan,
                    region: &region,
                    ordinary: &ordinary,
                    store: &mut store,
                    crew: &crew,
                };
                for block in plan.blocks.iter().copied() {
                    let rounds = match op.as_str() {
                        "get" => bench.get(block, report)?,
                        _ => bench.put(block, &scratch, tier, report)?,
                    };
                    let case = json!({
                        "op": op, "tier": tier, "block": block, "threads": threads,
                    });
                    figures(&case, &rounds, &plan, block, report)?;
                    report.case_done(&format!("{op} {tier} {block} bytes, {threads} threads"));
                }
            }
        }
    }
    Ok(())
}

fn figures(
    case: &serde_json::Value,
    rounds: &Rounds,
    plan: &Plan,
    block: usize,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let count = plan.batch / block;
    let bytes = (count * block) as f64;
    let (all, plain) = (all_limits(), limits().len());
    let row = |metric, limits: Range<usize>| {
        let rounds = rounds.beside(limits.clone());
        let best = rounds.best();
        Row {
            bench: "memory",
            case: case.clone(),
            metric,
            unit: "GB/s",
            value: bytes / rounds.value() / 1e9,
            limit: best.map(|(_, seconds)| bytes / seconds / 1e9),
            ratio: rounds.ratio(),
            rounds: plan.rounds,
            limit_name: best.map(|(limit, _)| all[limits.start + limit].name()),
        }
    };
    report.row(row("throughput", 0..plain))?;
    if plain < all.len() {
        report.row(row("throughput_with_checksum", plain..all.len()))?;
    }
    if block == 4096 {
        report.row(Row {
            metric: "overhead",
            unit: "ns/block",
            value: rounds.beside(0..plain).beyond().unwrap_or_default() * 1e9 / count as f64,
            limit: None,
            ratio: None,
            limit_name: None,
            ..row("overhead", 0..plain)
        })?;
    }
    Ok(())
}

struct Bench<'a> {
    plan: &'a Plan,
    region: &'a Region,
    /// As much memory of ordinary pages.
    ordinary: &'a Region,
    store: &'a mut Store,
    crew: &'a Crew,
}

/// A copy that kvdepot is compared with, between memory of one kind of pages.
#[derive(Clone, Copy)]
pub(super) struct Limit {
    pub(super) way: Way,
    pages: Pages,
}

/// The names of copies between small pages.
const SMALL_PAGES: &[(&str, &str)] = &[
    ("memcpy", "memcpy, small pages"),
    ("rep-movsb", "rep-movsb, small pages"),
    ("streaming", "streaming, small pages"),
    ("streaming-halves", "streaming-halves, small pages"),
    ("streaming-512", "streaming-512, small pages"),
    (
        "streaming-512-quarters",
        "streaming-512-quarters, small pages",
    ),
    ("fused-avx2", "fused-avx2, small pages"),
    ("fused-avx2-fetching", "fused-avx2-fetching, small pages"),
    ("fused-avx512", "fused-avx512, small pages"),
    (
        "fused-avx512-fetching",
        "fused-avx512-fetching, small pages",
    ),
];

/// The plain copies: which pages serve a machine best shows when both have been tried.
pub(super) fn limits() -> Vec<Limit> {
    of_both_pages(Plain::all().into_iter().map(Way::Plain))
}

/// The plain copies, and behind them the loops that compute a checksum.
fn all_limits() -> Vec<Limit> {
    #[cfg(feature = "peers")]
    let fused = of_both_pages(kvdepot_peers::Fused::all().into_iter().map(Way::Fused));
    #[cfg(not(feature = "peers"))]
    let fused = Vec::new();
    [limits(), fused].concat()
}

fn of_both_pages(ways: impl Iterator<Item = Way> + Clone) -> Vec<Limit> {
    let of = |pages| ways.clone().map(move |way| Limit { way, pages });
    of(Pages::Huge).chain(of(Pages::Small)).collect()
}

impl Limit {
    pub(super) fn name(&self) -> &'static str {
        let name = self.way.name();
        let small = SMALL_PAGES.iter().find(|(of, _)| *of == name);
        match (self.pages, small) {
            (Pages::Small, Some((_, small))) => small,
            _ => name,
        }
    }

    /// The one of two that has its pages.
    pub(super) fn choose<'a, T: ?Sized>(&self, huge: &'a T, small: &'a T) -> &'a T {
        match self.pages {
            Pages::Small => small,
            _ => huge,
        }
    }
}

/// A place in a circle of `len` that moves on by `count` with every run.
pub(super) struct Turn {
    pub(super) at: usize,
    pub(super) len: usize,
    pub(super) count: usize,
}

impl Turn {
    pub(super) fn next(&mut self) -> Range<usize> {
        if self.at + self.count > self.len {
            self.at = 0;
        }
        self.at += self.count;
        self.at - self.count..self.at
    }
}

impl Bench<'_> {
    fn turn(&self, len: usize, block: usize) -> Turn {
        Turn {
            at: 0,
            len,
            count: self.plan.batch / block,
        }
    }

    fn get(&mut self, block: usize, report: &Report<'_>) -> Result<Rounds, Error> {
        let mut keys = self.store.fill(self.region, block)?;
        Random(3).shuffle(&mut keys);
        let offsets = self.store.offsets(&keys)?;
        let medium = self.store.medium()?;
        let mut from = self.turn(keys.len(), block);
        let mut to = self.turn(self.region.blocks(block), block);
        let ways = all_limits();
        Rounds::run(
            self.plan.rounds,
            ways.len(),
            &report.interrupt,
            |contender| {
                let (from, to) = (from.next(), to.next());
                match ways.get(contender) {
                    Some(limit) => {
                        let pieces: Vec<Span> = offsets[from]
                            .iter()
                            .zip(to)
                            .map(|(at, to)| Span::new(*at, (to * block) as u64, block as u64))
                            .collect();
                        let region = limit.choose(self.region, self.ordinary);
                        self.crew.copy(limit.way, &medium, region.whole(), &pieces)
                    }
                    None => {
                        let keys = keys[from].to_vec();
                        let buffers = self.region.buffers(block, to)?;
                        let start = Instant::now();
                        let task = self.store.namespace().get(keys, buffers)?;
                        let got = task.wait(None)?;
                        let seconds = start.elapsed().as_secs_f64();
                        all(&got, "got")?;
                        Ok(seconds)
                    }
                }
            },
        )
    }

    fn put(
        &mut self,
        block: usize,
        scratch: &Scratch,
        tier: &str,
        report: &Report<'_>,
    ) -> Result<Rounds, Error> {
        // Full once, so that every page has been touched; the oldest blocks make room.
        let keys = self.store.fill(self.region, block)?;
        let count = self.plan.batch / block;
        let mut old: VecDeque<Vec<Key>> = keys.chunks(count).map(<[Key]>::to_vec).collect();
        let target = |pages| target(scratch, tier, pages, self.plan.size);
        let media: [Buffer; 2] = [target(Pages::Huge)?, target(Pages::Small)?];
        let mut numbers: Vec<usize> = (0..self.region.blocks(block)).collect();
        Random(5).shuffle(&mut numbers);
        let mut from = self.turn(numbers.len(), block);
        let mut to = self.turn(self.plan.size / block, block);
        let ways = all_limits();
        Rounds::run(
            self.plan.rounds,
            ways.len(),
            &report.interrupt,
            |contender| {
                let (from, to) = (&numbers[from.next()], to.next());
                match ways.get(contender) {
                    Some(limit) => {
                        let at = |number: usize| (number * block) as u64;
                        let pieces: Vec<Span> = from
                            .iter()
                            .zip(to)
                            .map(|(from, to)| Span::new(at(*from), at(to), block as u64))
                            .collect();
                        let region = limit.choose(self.region, self.ordinary);
                        let medium = limit.choose(&media[0], &media[1]);
                        self.crew.copy(limit.way, region.whole(), medium, &pieces)
                    }
                    None => {
                        self.store.make_room(&mut old, count)?;
                        let keys = self.store.keys(count);
                        old.push_back(keys.clone());
                        let buffers = self.region.buffers(block, from.iter().copied())?;
                        let start = Instant::now();
                        let task = self.store.namespace().put(keys, buffers)?;
                        let stored = task.wait(None)?;
                        let seconds = start.elapsed().as_secs_f64();
                        all(&stored, "stored")?;
                        Ok(seconds)
                    }
                }
            },
        )
    }
}

pub(super) fn all(done: &[bool], what: &str) -> Result<(), Error> {
    let missing = done.iter().filter(|ok| !**ok).count();
    if missing > 0 {
        let total = done.len();
        return Err(Error::Bench(format!(
            "{missing} of {total} blocks were not {what}"
        )));
    }
    Ok(())
}
