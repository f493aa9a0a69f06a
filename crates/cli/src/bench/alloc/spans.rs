//! How many spans a prompt's restore needs: its blocks are read as so many contiguous pieces of
//! the arena. The store is imitated: a prompt's blocks are allocated in order, each with the one
//! before it as its hint; what was used longest ago is evicted, a prompt's later blocks first, and
//! somewhat ahead of need.
//!
//! Requests are played one after the other, and once more so that those of one moment take turns
//! block by block, as from several engines with one arena: without hints their blocks mix.

use std::collections::HashMap;

use kvdepot_alloc::{Extents, Pool};
use serde_json::json;

use super::contenders::refused;
use super::lru::Lru;
use super::trace::{Prompt, Requests};
use crate::bench::{Report, Row};
use crate::error::Error;
use crate::interrupt::Interrupt;

/// Bytes of a block, and what the store rounds them up to.
const BLOCK: u64 = 1 << 20;
const GRANULE: u64 = 4096;
/// Extents of a block, at most, as in the store.
const MAX_EXTENTS: usize = 4;
/// Eviction runs ahead by one part in so many of the arena, as in the store.
const AHEAD: usize = 64;
/// The requests have so many times as many blocks as the arena.
const SHARE: usize = 8;
/// How often the arena's capacity is allocated before anything counts.
const CHURN: usize = 10;

/// Moments between two looks for Ctrl-C.
const CHUNK: usize = 256;

/// A block of the requests; they are played several times, each time with other blocks.
type Block = (usize, u64);

/// An arena with an index, without bytes.
struct Arena {
    pool: Pool,
    hinted: bool,
    slots: HashMap<Block, u32>,
    blocks: Lru<(Block, Extents)>,
    ahead: u64,
    /// Blocks that were allocated.
    allocated: usize,
}

/// Sums over the restores that were counted.
#[derive(Default)]
struct Restores {
    count: usize,
    blocks: usize,
    spans: usize,
}

impl Restores {
    fn spans(&self) -> f64 {
        self.spans as f64 / self.count as f64
    }
}

impl Arena {
    fn new(capacity: usize, hinted: bool) -> Result<Arena, Error> {
        Ok(Arena {
            pool: Pool::new(capacity as u64 * BLOCK, GRANULE).map_err(refused)?,
            hinted,
            slots: HashMap::new(),
            blocks: Lru::default(),
            ahead: (capacity / AHEAD) as u64 * BLOCK,
            allocated: 0,
        })
    }

    fn get(&self, block: Block) -> Option<(u32, Extents)> {
        let slot = *self.slots.get(&block)?;
        self.blocks.get(slot).map(|(_, extents)| (slot, extents))
    }

    /// The leading blocks that are there, and in how many spans.
    fn restore(&self, prompt: &[Block]) -> (usize, usize) {
        let (mut blocks, mut spans, mut end) = (0, 0, None);
        for (_, extents) in prompt.iter().map_while(|block| self.get(*block)) {
            blocks += 1;
            for extent in &extents {
                spans += usize::from(end != Some(extent.offset));
                end = Some(extent.end());
            }
        }
        (blocks, spans)
    }

    /// Puts in what is missing of prompts, a block of each in turn, and counts as their use.
    fn put(&mut self, prompts: &[Vec<Block>]) -> Result<(), Error> {
        // What is there must not make room for the rest.
        prompts.iter().for_each(|prompt| self.touch(prompt));
        let mut near = vec![None; prompts.len()];
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        for index in 0..longest {
            for (near, prompt) in near.iter_mut().zip(prompts) {
                let Some(block) = prompt.get(index) else {
                    continue;
                };
                let extents = match self.get(*block) {
                    Some((_, extents)) => extents,
                    None => self.allocate(*block, *near)?,
                };
                if self.hinted {
                    *near = extents.last().map(|extent| extent.offset);
                }
            }
        }
        prompts.iter().for_each(|prompt| self.touch(prompt));
        Ok(())
    }

    fn allocate(&mut self, block: Block, near: Option<u64>) -> Result<Extents, Error> {
        loop {
            let full = match self.pool.allocate_scattered(BLOCK, MAX_EXTENTS, near) {
                Ok(extents) => {
                    let slot = self.blocks.insert((block, extents));
                    self.slots.insert(block, slot);
                    self.allocated += 1;
                    return Ok(extents);
                }
                Err(full) => full,
            };
            while self.pool.free_bytes() < BLOCK + self.ahead {
                let (oldest, extents) = self.blocks.take_oldest().ok_or_else(|| refused(full))?;
                self.slots.remove(&oldest);
                for extent in &extents {
                    self.pool.free(extent.offset).map_err(refused)?;
                }
            }
        }
    }

    /// The head of a prompt is used last, so that it goes last.
    fn touch(&mut self, prompt: &[Block]) {
        for block in prompt.iter().rev() {
            if let Some(slot) = self.slots.get(block) {
                self.blocks.touch(*slot);
            }
        }
    }
}

/// Plays the requests until the arena has churned, and then once more, which counts.
fn play(
    moments: &[&[Prompt]],
    capacity: usize,
    hinted: bool,
    interrupt: &Interrupt,
) -> Result<Restores, Error> {
    let mut arena = Arena::new(capacity, hinted)?;
    let mut pass = 0;
    loop {
        let counts = arena.allocated >= CHURN * capacity;
        let mut restores = Restores::default();
        for (index, prompts) in moments.iter().enumerate() {
            if index % CHUNK == 0 {
                interrupt.check()?;
            }
            let blocks = |prompt: &Prompt| prompt.blocks.iter().map(|id| (pass, *id)).collect();
            let prompts: Vec<Vec<Block>> = prompts.iter().map(blocks).collect();
            for prompt in &prompts {
                let (blocks, spans) = arena.restore(prompt);
                restores.count += usize::from(blocks > 0);
                restores.blocks += blocks;
                restores.spans += spans;
            }
            arena.put(&prompts)?;
        }
        if counts {
            return Ok(restores);
        }
        pass += 1;
    }
}

/// One request after the other, or all of a moment at once.
pub(super) const CASES: [bool; 2] = [false, true];

pub(super) fn run(requests: &Requests, report: &mut Report<'_>) -> Result<(), Error> {
    for together in CASES {
        let same = |a: &Prompt, b: &Prompt| together && a.moment == b.moment;
        let moments: Vec<&[Prompt]> = requests.prompts.chunk_by(same).collect();
        measure(requests, &moments, together, report)?;
        report.case_done("spans");
    }
    Ok(())
}

fn measure(
    requests: &Requests,
    moments: &[&[Prompt]],
    together: bool,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let blocks = |prompts: &&[Prompt]| prompts.iter().map(|prompt| prompt.blocks.len()).sum();
    let most: usize = moments.iter().map(blocks).max().unwrap_or(0);
    let capacity = (requests.blocks / SHARE).max(most * 2);
    let unhinted = play(moments, capacity, false, &report.interrupt)?;
    let hinted = play(moments, capacity, true, &report.interrupt)?;
    let row = |metric, unit, value| Row {
        bench: "alloc",
        case: json!({
            "workload": "spans",
            "trace": requests.source,
            "requests": requests.prompts.len(),
            "capacity": capacity,
            "together": together,
        }),
        metric,
        unit,
        value,
        limit: None,
        ratio: None,
        rounds: 1,
        limit_name: None,
    };
    let blocks = hinted.blocks as f64 / hinted.count as f64;
    report.row(row("blocks_per_restore", "blocks", blocks))?;
    report.row(row("spans_hinted", "spans/restore", hinted.spans()))?;
    report.row(row("spans_unhinted", "spans/restore", unhinted.spans()))?;
    let ratio = hinted.spans() / unhinted.spans();
    report.row(row("spans_hinted_over_unhinted", "ratio", ratio))
}
