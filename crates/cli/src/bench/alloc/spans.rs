//! How many spans a prompt's restore needs: its blocks are read as so many contiguous pieces of
//! the arena. The store is imitated: the blocks of a put are allocated in order, each with the one
//! before it as its hint and with the bytes of the put that will follow; what was used longest ago
//! is evicted, a prompt's later blocks first, and somewhat ahead of need.
//!
//! Requests are played one after the other, and so that those of one moment take turns, as from
//! several engines with one arena or one that prefills in chunks: without hints their blocks mix.

use std::collections::HashMap;

use kvdepot_alloc::{Extents, Hint, Pool};
use serde_json::json;

use super::contenders::refused;
use super::lru::Lru;
use crate::bench::report::{Report, Row};
use crate::bench::trace::{Prompt, Requests};
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

    /// Puts in what is missing of prompts, so many blocks of each in turn, and counts as their
    /// use.
    fn put(&mut self, prompts: &[Vec<Block>], turn: usize) -> Result<(), Error> {
        // What is there must not make room for the rest.
        prompts.iter().for_each(|prompt| self.touch(prompt));
        let mut behind = vec![None; prompts.len()];
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        for begin in (0..longest).step_by(turn) {
            for (behind, prompt) in behind.iter_mut().zip(prompts) {
                let end = prompt.len().min(begin + turn);
                for (index, block) in prompt.iter().enumerate().take(end).skip(begin) {
                    let extents = match self.get(*block) {
                        Some((_, extents)) => extents,
                        None => {
                            let followed_by = (end - index - 1) as u64 * BLOCK;
                            let behind = *behind;
                            let hint = Hint {
                                behind,
                                followed_by,
                            };
                            self.allocate(*block, hint)?
                        }
                    };
                    *behind = extents.last().map(|extent| extent.offset);
                }
            }
        }
        prompts.iter().for_each(|prompt| self.touch(prompt));
        Ok(())
    }

    fn allocate(&mut self, block: Block, hint: Hint) -> Result<Extents, Error> {
        let hint = match self.hinted {
            true => hint,
            false => Hint::default(),
        };
        loop {
            let full = match self.pool.allocate_scattered(BLOCK, MAX_EXTENTS, hint) {
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
    (capacity, turn): (usize, usize),
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
            arena.put(&prompts, turn)?;
        }
        if counts {
            return Ok(restores);
        }
        pass += 1;
    }
}

/// Blocks of a request before the next one of the same moment has its turn: all, 8192 tokens of
/// the public trace, or one.
pub(super) const TURNS: [usize; 3] = [usize::MAX, 16, 1];

pub(super) fn run(requests: &Requests, report: &mut Report<'_>) -> Result<(), Error> {
    for turn in TURNS {
        let same = |a: &Prompt, b: &Prompt| turn < usize::MAX && a.moment == b.moment;
        let moments: Vec<&[Prompt]> = requests.prompts.chunk_by(same).collect();
        measure(requests, &moments, turn, report)?;
        report.case_done("spans");
    }
    Ok(())
}

fn measure(
    requests: &Requests,
    moments: &[&[Prompt]],
    turn: usize,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let blocks = |prompts: &&[Prompt]| prompts.iter().map(|prompt| prompt.blocks.len()).sum();
    let most: usize = moments.iter().map(blocks).max().unwrap_or(0);
    let capacity = (requests.blocks / SHARE).max(most * 2);
    let unhinted = play(moments, (capacity, turn), false, &report.interrupt)?;
    let hinted = play(moments, (capacity, turn), true, &report.interrupt)?;
    let turn = match turn {
        usize::MAX => json!("prompt"),
        blocks => json!(blocks),
    };
    let row = |metric, unit, value| Row {
        bench: "alloc",
        case: json!({
            "workload": "spans",
            "trace": requests.source,
            "requests": requests.prompts.len(),
            "capacity": capacity,
            "turn": turn,
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
