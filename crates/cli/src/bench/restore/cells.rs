//! The runs of one case: every plain copy, a direct and a staged get, in turns.

use std::path::{Path, PathBuf};
use std::time::Instant;

use kvdepot_host::cpu;
use kvdepot_media::Plain;
use kvdepot_plan::Span;
use kvdepot_store::{GetOptions, Key};

use crate::bench::media::{Region, Store, check_room};
use crate::bench::plain::Crew;
use crate::bench::random::Random;
use crate::bench::report::Report;
use crate::bench::rounds::Rounds;
use crate::error::Error;
use crate::leftovers::Scratch;

/// What is copied in one call, and by how many threads.
#[derive(Clone, Debug)]
pub(super) struct Cell {
    pub(super) blocks: usize,
    pub(super) block: usize,
    pub(super) order: String,
    pub(super) workers: usize,
}

impl Cell {
    pub(super) fn bytes(&self) -> usize {
        self.blocks * self.block
    }

    /// How often a run repeats its call.
    fn calls(&self) -> usize {
        RUN_MIN.div_ceil(self.bytes())
    }

    /// Bytes of a run.
    pub(super) fn run_bytes(&self) -> usize {
        self.bytes() * self.calls()
    }

    /// Bytes of the tier that a call reads from: half of a gapped one's are passed over.
    fn reach(&self) -> usize {
        self.bytes() * if self.order == "gapped" { 2 } else { 1 }
    }
}

/// The ways of kvdepot, behind the limits.
pub(super) const MODES: [&str; 2] = ["direct", "staged"];

/// What was measured of a case.
pub(super) struct Runs {
    pub(super) seconds: Rounds,
    /// Processor seconds of all threads.
    pub(super) cpu: Rounds,
    limits: Vec<(Plain, bool)>,
    pub(super) rounds: usize,
}

impl Runs {
    /// The contender that is a mode of kvdepot.
    pub(super) fn mode(&self, number: usize) -> usize {
        self.limits.len() + number
    }

    /// A limit's name.
    pub(super) fn limit_name(&self, limit: usize) -> &'static str {
        match self.limits.get(limit) {
            Some((way, false)) => way.name(),
            Some((Plain::Memcpy, true)) => "memcpy, one piece",
            Some((Plain::Streaming, true)) => "streaming, one piece",
            _ => "streaming-halves, one piece",
        }
    }
}

/// Fewest bytes of a run: calls are repeated until their sum can be timed.
const RUN_MIN: usize = 16 << 20;

/// Bytes of the tier for blocks of one size, so that no call finds its source in a cache.
fn medium(cells: &[Cell], block: usize, cold: usize) -> usize {
    let reach = cells.iter().filter(|cell| cell.block == block);
    let most = reach.map(Cell::reach).max().unwrap_or(0);
    most.max(2 * cold).next_multiple_of(block)
}

/// The memory and the threads that the cases share, as far as they can.
pub(super) struct Machine {
    dir: PathBuf,
    region: Region,
    cells: Vec<Cell>,
    cold: usize,
    depot: Option<Filled>,
}

/// A tier full of blocks of one size.
struct Filled {
    workers: usize,
    block: usize,
    store: Store,
    crew: Crew,
    /// In the order of the medium.
    keys: Vec<Key>,
    offsets: Vec<u64>,
    _scratch: Scratch,
}

impl Machine {
    /// `cold` bytes are copied before any of them is copied again.
    pub(super) fn new(dir: &Path, cells: &[Cell], cold: usize) -> Result<Machine, Error> {
        let bytes = cells.iter().map(Cell::bytes).max().unwrap_or(0);
        let most = cells
            .iter()
            .map(|cell| medium(cells, cell.block, cold))
            .max();
        let region = bytes.max(cold);
        check_room(dir, most.unwrap_or(0) / 2, region)?;
        Ok(Machine {
            dir: dir.into(),
            region: Region::new(region)?,
            cells: cells.to_vec(),
            cold,
            depot: None,
        })
    }

    fn fill(&mut self, cell: &Cell) -> Result<(), Error> {
        let fits = |depot: &Filled| (depot.workers, depot.block) == (cell.workers, cell.block);
        if !self.depot.as_ref().is_some_and(fits) {
            // The one before gives its memory back first.
            self.depot = None;
            let scratch = Scratch::new(&self.dir)?;
            let (block, workers) = (cell.block, cell.workers);
            let bytes = medium(&self.cells, block, self.cold);
            let mut store = Store::open(&scratch, "Dax", bytes, block, workers)?;
            let keys = store.fill(&self.region, block)?;
            let offsets = store.offsets(&keys)?;
            self.depot = Some(Filled {
                workers,
                block,
                crew: Crew::new(workers)?,
                store,
                keys,
                offsets,
                _scratch: scratch,
            });
        }
        Ok(())
    }

    /// Runs every contender `rounds` times.
    pub(super) fn measure(
        &mut self,
        cell: &Cell,
        rounds: usize,
        report: &Report<'_>,
    ) -> Result<Runs, Error> {
        self.fill(cell)?;
        let Some(filled) = &self.depot else {
            return Err(Error::Bench("the tier is closed".into()));
        };
        let mut turns = Turns::new(cell, filled.keys.len(), self.region.blocks(cell.block));
        let medium = filled.store.medium()?;
        let pieces: &[bool] = match cell.order.as_str() {
            "adjacent" => &[false, true],
            _ => &[false],
        };
        let each = |joined: &bool| {
            let joined = *joined;
            Plain::all().into_iter().map(move |way| (way, joined))
        };
        let limits: Vec<(Plain, bool)> = pieces.iter().flat_map(each).collect();
        let contenders = limits.len() + MODES.len();
        let mut cpu = vec![Vec::new(); contenders];
        let run = |contender: usize| {
            let (mut seconds, mut used) = (0.0, 0.0);
            for _ in 0..cell.calls() {
                let (from, to) = turns.next();
                let time = match limits.get(contender) {
                    Some((way, joined)) => {
                        let at = |(from, to): (&usize, usize)| {
                            let to = (to * cell.block) as u64;
                            Span::new(filled.offsets[*from], to, cell.block as u64)
                        };
                        let spans: Vec<Span> = from.iter().zip(to).map(at).collect();
                        let spans = if *joined {
                            join(&spans, cell.workers)
                        } else {
                            spans
                        };
                        let before = cpu::process_time();
                        let time = filled
                            .crew
                            .copy(*way, &medium, self.region.whole(), &spans)?;
                        used += (cpu::process_time() - before).as_secs_f64();
                        time
                    }
                    None => {
                        let keys = from.iter().map(|at| filled.keys[*at]).collect();
                        let buffers = self.region.buffers(cell.block, to)?;
                        let mut options = GetOptions::default();
                        options.staged = contender > limits.len();
                        let (before, start) = (cpu::process_time(), Instant::now());
                        let task = filled.store.namespace().get_with(keys, buffers, options)?;
                        let got = task.wait(None)?;
                        let time = start.elapsed().as_secs_f64();
                        used += (cpu::process_time() - before).as_secs_f64();
                        if got.contains(&false) {
                            return Err(Error::Bench("some blocks were not restored".into()));
                        }
                        time
                    }
                };
                seconds += time;
            }
            cpu[contender].push(used);
            Ok(seconds)
        };
        let interrupt = &report.interrupt;
        let seconds = Rounds::run_ways(rounds, limits.len(), MODES.len(), interrupt, run)?;
        let mut next = vec![0; contenders];
        // In the order in which they ran, with the round that does not count.
        let again = |contender: usize| {
            next[contender] += 1;
            Ok(cpu[contender][next[contender] - 1])
        };
        let cpu = Rounds::run_ways(rounds, limits.len(), MODES.len(), interrupt, again)?;
        Ok(Runs {
            seconds,
            cpu,
            limits,
            rounds,
        })
    }
}

/// What the next call copies, and where to.
struct Turns {
    /// Blocks by position, in the order of the calls.
    order: Vec<usize>,
    blocks: usize,
    from: usize,
    to: usize,
    room: usize,
}

impl Turns {
    fn new(cell: &Cell, stored: usize, room: usize) -> Turns {
        let mut order: Vec<usize> = match cell.order.as_str() {
            "gapped" => (0..stored).step_by(2).collect(),
            _ => (0..stored).collect(),
        };
        if cell.order == "shuffled" {
            Random(9).shuffle(&mut order);
        }
        Turns {
            order,
            blocks: cell.blocks,
            from: 0,
            to: 0,
            room,
        }
    }

    fn next(&mut self) -> (&[usize], std::ops::Range<usize>) {
        let step = |at: usize, end: usize| if at + self.blocks > end { 0 } else { at };
        let from = step(self.from, self.order.len());
        let to = step(self.to, self.room);
        (self.from, self.to) = (from + self.blocks, to + self.blocks);
        (&self.order[from..from + self.blocks], to..to + self.blocks)
    }
}

/// Neighbours as one piece, cut into one for each thread.
fn join(spans: &[Span], threads: usize) -> Vec<Span> {
    let Some(first) = spans.first() else {
        return Vec::new();
    };
    let bytes: u64 = spans.iter().map(|span| span.len).sum();
    // Whole pages, so that streaming stores are possible.
    let share = bytes.div_ceil(threads as u64).next_multiple_of(4096);
    let cut = |at: u64| Span::new(first.src + at, first.dst + at, share.min(bytes - at));
    let starts = (0..bytes).step_by(share as usize);
    let cut: Vec<Span> = starts.map(cut).collect();
    let adjoin = |pair: &[Span]| pair[0].src + pair[0].len == pair[1].src;
    // A tier that was not filled in order has no such piece.
    if spans.windows(2).all(adjoin) {
        cut
    } else {
        spans.to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(blocks: usize, order: &str) -> Cell {
        Cell {
            blocks,
            block: 4096,
            order: order.into(),
            workers: 2,
        }
    }

    #[test]
    fn calls_take_their_blocks_in_their_order_and_come_back_late() {
        let mut adjacent = Turns::new(&cell(4, "adjacent"), 10, 9);
        let (from, to) = adjacent.next();
        assert_eq!((from, to), (&[0, 1, 2, 3][..], 0..4));
        assert_eq!(adjacent.next(), (&[4, 5, 6, 7][..], 4..8));
        assert_eq!(adjacent.next(), (&[0, 1, 2, 3][..], 0..4));
        let mut gapped = Turns::new(&cell(3, "gapped"), 10, 9);
        assert_eq!(gapped.next().0, [0, 2, 4]);
        let mut shuffled = Turns::new(&cell(10, "shuffled"), 10, 10);
        let mut order = shuffled.next().0.to_vec();
        assert_ne!(order, (0..10).collect::<Vec<usize>>());
        order.sort_unstable();
        assert_eq!(order, (0..10).collect::<Vec<usize>>());
    }

    #[test]
    fn neighbours_become_a_piece_for_each_thread() {
        let spans: Vec<Span> = (0..5)
            .map(|n| Span::new(n * 4096, n * 4096, 4096))
            .collect();
        let joined = join(&spans, 2);
        assert_eq!(
            joined,
            [Span::new(0, 0, 12288), Span::new(12288, 12288, 8192)]
        );
        assert_eq!(join(&spans[..1], 4), spans[..1]);
        let gapped = [spans[0], spans[2]];
        assert_eq!(join(&gapped, 1), gapped);
    }
}
