//! `kvdepot bench cuda`: gets and puts of a device's memory, against pinned copies of as much.
//!
//! What is timed is the public call, from `get` or `put` until its task has ended, as in `bench
//! memory`, and the same depot is asked. On a double that completes all at once and moves nothing,
//! what is left is the processor's part: hashing, and one copy into or out of the slab.

mod costs;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use kvdepot_media::cuda::{Device, Memory, Pinned};
use kvdepot_media::{Buffer, Op, Pages};
use kvdepot_plan::Span;
use kvdepot_store::{BlockBuffers, Key};
use serde_json::{Value, json};

use super::media::{Region, Store, check_room, target};
use super::memory::{Turn, all, limits};
use super::plain::Crew;
use super::random::Random;
use super::report::{Report, Row};
use super::rounds::Rounds;
use crate::args::Cuda;
use crate::error::Error;
use crate::leftovers::Scratch;

const BLOCKS: [usize; 5] = [16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20];
const PAGES: [usize; 2] = [1, 16];
const PAGE_LEAST: usize = 4 << 10;

/// What the double of the driver calls its devices.
const DOUBLE: &str = "double";

struct Plan {
    metrics: Vec<String>,
    blocks: Vec<usize>,
    pages: Vec<usize>,
    lanes: usize,
    size: usize,
    batch: usize,
    rounds: usize,
}

impl Plan {
    fn new(args: &Cuda, is_double: bool) -> Plan {
        let processors = std::thread::available_parallelism().map_or(2, usize::from);
        let lanes = if is_double { 2 } else { processors.min(16) };
        let (size, batch, rounds) = match args.quick {
            true => (256 << 20, 32 << 20, 5),
            false => (1 << 30, 128 << 20, 15),
        };
        let blocks = args.blocks.iter().map(|block| *block as usize).collect();
        let size = args.extent.size.map_or(size, |size| size as usize);
        let batch = args.extent.batch.map_or(batch, |batch| batch as usize);
        Plan {
            metrics: args.metrics.clone(),
            blocks: Some(blocks)
                .filter(|some: &Vec<_>| !some.is_empty())
                .unwrap_or_else(|| BLOCKS.to_vec()),
            pages: match args.pages.is_empty() {
                true => PAGES.to_vec(),
                false => args.pages.clone(),
            },
            lanes: args.lanes.unwrap_or(lanes),
            size,
            batch: batch.min(size / 2),
            rounds: args.extent.rounds.unwrap_or(rounds),
        }
    }

    fn wants(&self, metric: &str) -> bool {
        self.metrics.is_empty() || self.metrics.iter().any(|wanted| wanted == metric)
    }

    /// Bytes and pages of each case.
    fn shapes(&self) -> Vec<(usize, usize)> {
        let pages = |block: usize| self.pages.iter().map(move |pages| (block, *pages));
        let all = self.blocks.iter().flat_map(|block| pages(*block));
        all.filter(|(block, pages)| *pages == 1 || block / pages >= PAGE_LEAST)
            .collect()
    }

    fn check(&self) -> Result<(), Error> {
        let refuse = |field, value: usize, allowed: &str| {
            Err(Error::Usage {
                field,
                value: value.to_string(),
                allowed: allowed.into(),
            })
        };
        if let (true, Some(pages)) = (self.shapes().is_empty(), self.pages.iter().min()) {
            let allowed = "a number that leaves pages of at least 4096 bytes in one --block";
            return refuse("--pages", *pages, allowed);
        }
        for (block, pages) in self.shapes() {
            if block % 4096 != 0 || block > self.batch {
                let allowed = "a multiple of 4096, at most --batch, which is at most --size / 2";
                return refuse("--block", block, allowed);
            }
            if block % pages != 0 {
                return refuse("--pages", pages, "a divisor of every --block");
            }
        }
        Ok(())
    }
}

/// How many cases will be measured.
pub(super) fn cases(args: &Cuda) -> usize {
    let plan = Plan::new(args, false);
    let moves = ["get", "put"].iter().filter(|op| plan.wants(op)).count();
    let costs = costs::METRICS
        .iter()
        .filter(|cost| plan.wants(cost))
        .count();
    moves * plan.shapes().len() + costs
}

pub(super) fn run(args: &Cuda, report: &mut Report<'_>) -> Result<(), Error> {
    let device = Device::open(args.device)?;
    let is_double = device.name()? == DOUBLE;
    let plan = Plan::new(args, is_double);
    plan.check()?;
    let temporary = std::env::temp_dir();
    let dir = args.dir.as_deref().unwrap_or(&temporary);
    check_room(dir, plan.size, plan.size)?;
    let scratch = Scratch::new(dir)?;
    let smallest = plan.blocks.iter().copied().min().unwrap_or(PAGE_LEAST);
    let mut settings = json!({"lanes": plan.lanes});
    if let Some(slab) = args.staging_slab {
        settings["staging_slab"] = json!(slab);
    }
    if let Some(regions) = args.staging_regions {
        settings["staging_regions"] = json!(regions);
    }
    let mut store = Store::open_with(&scratch, "Cache", plan.size, smallest, settings)?;
    let region = plan.size / 2;
    let host = Region::new(region)?;
    let memory = device.memory(region)?;
    let mut bench = Bench {
        there: Buffer::of_device(&memory),
        memory: &memory,
        limit: match is_double {
            true => Limit::memory(&plan, region, &scratch)?,
            false => Limit::Pinned(Box::new(Pinned::new(&device, plan.batch, 2)?)),
        },
        plan: &plan,
        device: &device,
        host: &host,
        store: &mut store,
    };
    for op in ["get", "put"].into_iter().filter(|op| plan.wants(op)) {
        for shape in plan.shapes() {
            bench.moves(op, shape, report)?;
        }
    }
    bench.memory(report)?;
    drop(bench);
    drop(store);
    if plan.wants("attach_s") {
        costs::attach(&plan, &device, dir, report)?;
    }
    Ok(())
}

/// What kvdepot is measured against.
enum Limit {
    /// Pinned copies, of a device.
    Pinned(Box<Pinned>),
    /// Plain copies between memory of the host, beside a double: kinds of pages in turn.
    Memory(Box<Plains>),
}

/// Plain copies on as many threads as there are lanes, between kinds of pages in turn.
struct Plains {
    crew: Crew,
    region: [Region; 2],
    target: [Buffer; 2],
}

/// Pinned copies: all as one, or one a block, on so many streams.
const PINNED: [(&str, bool, usize); 3] = [
    ("one copy", true, 1),
    ("a copy a block", false, 1),
    ("a copy a block on two streams", false, 2),
];

impl Limit {
    fn memory(plan: &Plan, region: usize, scratch: &Scratch) -> Result<Limit, Error> {
        let target = |pages| target(scratch, "Cache", pages, plan.size);
        Ok(Limit::Memory(Box::new(Plains {
            crew: Crew::new(plan.lanes)?,
            region: [Region::new(region)?, Region::of(Pages::Small, region)?],
            target: [target(Pages::Huge)?, target(Pages::Small)?],
        })))
    }

    fn count(&self) -> usize {
        match self {
            Limit::Pinned(_) => PINNED.len(),
            Limit::Memory(_) => limits().len(),
        }
    }

    fn name(&self, number: usize) -> Option<&'static str> {
        match self {
            Limit::Pinned(_) => PINNED.get(number).map(|(name, ..)| *name),
            Limit::Memory(_) => limits().get(number).map(|limit| limit.name()),
        }
    }
}

struct Bench<'a> {
    plan: &'a Plan,
    device: &'a Arc<Device>,
    host: &'a Region,
    store: &'a mut Store,
    /// The caller's memory on the device.
    memory: &'a Memory,
    there: Buffer,
    limit: Limit,
}

impl Bench<'_> {
    fn moves(
        &mut self,
        op: &'static str,
        (block, pages): (usize, usize),
        report: &mut Report<'_>,
    ) -> Result<(), Error> {
        let keys = self.store.fill(self.host, block)?;
        let count = self.plan.batch / block;
        let mut order: Vec<usize> = (0..self.there.len() / (block / pages)).collect();
        Random(3).shuffle(&mut order);
        let mut old: VecDeque<Vec<Key>> = keys.chunks(count).map(<[Key]>::to_vec).collect();
        let mut shuffled = keys.clone();
        Random(4).shuffle(&mut shuffled);
        let turn = |len| Turn { at: 0, len, count };
        let (mut from, mut to) = (turn(keys.len()), turn(self.there.len() / block));
        let medium = self.store.medium()?;
        let offsets = self.store.offsets(&shuffled)?;
        let rounds = Rounds::run(
            self.plan.rounds,
            self.limit.count(),
            &report.interrupt,
            |contender| {
                let (from, to) = (from.next(), to.next());
                if contender < self.limit.count() {
                    let places = (&medium, &offsets[from]);
                    return self.plain(op, contender, block, places, to.start);
                }
                let buffers = self.buffers(block, pages, &order, to)?;
                if op == "get" {
                    let keys = shuffled[from].to_vec();
                    let start = Instant::now();
                    let got = self.store.namespace().get(keys, buffers)?.wait(None)?;
                    let seconds = start.elapsed().as_secs_f64();
                    return all(&got, "got").map(|()| seconds);
                }
                self.store.make_room(&mut old, count)?;
                let keys = self.store.keys(count);
                old.push_back(keys.clone());
                let start = Instant::now();
                let stored = self.store.namespace().put(keys, buffers)?.wait(None)?;
                let seconds = start.elapsed().as_secs_f64();
                all(&stored, "stored").map(|()| seconds)
            },
        )?;
        let bytes = (count * block) as f64;
        let best = rounds.best();
        report.row(Row {
            bench: "cuda",
            case: json!({
                "block": block, "pages": pages, "where": self.place(), "lanes": self.plan.lanes,
            }),
            metric: op,
            unit: "GB/s",
            value: bytes / rounds.value() / 1e9,
            limit: best.map(|(_, seconds)| bytes / seconds / 1e9),
            ratio: rounds.ratio(),
            rounds: self.plan.rounds,
            limit_name: best.and_then(|(limit, _)| self.limit.name(limit)),
        })?;
        report.case_done(&format!("{op} {block} bytes in {pages} pages"));
        Ok(())
    }

    /// What rows say of where they were measured.
    fn place(&self) -> &'static str {
        match self.limit {
            Limit::Pinned(_) => "device",
            Limit::Memory(_) => "double",
        }
    }

    /// Blocks whose pages are anywhere on the device, in `order`.
    fn buffers(
        &self,
        block: usize,
        pages: usize,
        order: &[usize],
        numbers: std::ops::Range<usize>,
    ) -> Result<BlockBuffers, Error> {
        let page = block / pages;
        let mut buffers = BlockBuffers::default();
        for number in numbers {
            let pages = &order[number * pages..(number + 1) * pages];
            let each = pages.iter().map(|at| self.there.slice(at * page, page));
            buffers.push(each.collect::<Result<Vec<_>, _>>()?);
        }
        Ok(buffers)
    }

    /// A plain copy of as many blocks: those at `offsets` of the medium, and on the other side
    /// those from the block `first` on.
    fn plain(
        &self,
        op: &str,
        contender: usize,
        block: usize,
        (medium, offsets): (&Buffer, &[u64]),
        first: usize,
    ) -> Result<f64, Error> {
        let len = block as u64;
        match &self.limit {
            Limit::Pinned(pinned) => {
                let (_, whole, streams) = PINNED[contender];
                let (op, all) = match op {
                    "get" => (Op::Write, (0, first as u64 * len)),
                    _ => (Op::Read, (first as u64 * len, 0)),
                };
                let span = |at: u64, len| Span::new(all.0 + at, all.1 + at, len);
                let count = offsets.len() as u64;
                let pieces: Vec<Span> = match whole {
                    true => vec![span(0, count * len)],
                    false => (0..count).map(|number| span(number * len, len)).collect(),
                };
                Ok(pinned.copy(op, self.memory, &pieces, streams)?)
            }
            Limit::Memory(plains) => {
                let Plains {
                    crew,
                    region,
                    target,
                } = &**plains;
                let limit = limits()[contender];
                let region = limit.choose(&region[0], &region[1]).whole();
                let at = |number: usize| (first + number) as u64 * len;
                let (from, to, places): (_, _, Vec<_>) = match op {
                    "get" => {
                        let places = offsets.iter().enumerate();
                        (
                            medium,
                            region,
                            places.map(|(n, from)| (*from, at(n))).collect(),
                        )
                    }
                    _ => {
                        let target = limit.choose(&target[0], &target[1]);
                        let places = (0..offsets.len()).map(|n| (at(n), at(n)));
                        (region, target, places.collect())
                    }
                };
                let spans = places
                    .into_iter()
                    .map(|(from, to)| Span::new(from, to, len));
                crew.copy(limit.way, from, to, &spans.collect::<Vec<_>>())
            }
        }
    }

    fn cost(&self, metric: &'static str, unit: &'static str, case: Value) -> Row {
        Row {
            bench: "cuda",
            case,
            metric,
            unit,
            value: 0.0,
            limit: None,
            ratio: None,
            rounds: 1,
            limit_name: None,
        }
    }
}
