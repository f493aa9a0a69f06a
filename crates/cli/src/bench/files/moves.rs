//! `dump`, `load_cold`, `load_warm` and `cpu_s_per_gib`: blocks between the caller's memory and the
//! disk, `depth` of them at a time.

use kvdepot_host::cpu::{process_time, time_of_this_thread};
use kvdepot_media::Op;
use kvdepot_media::checksum::{PartId, of_buffers};

use super::plan::{Cell, Plan};
use super::raw::{Way, ways};
use super::store::Store;
use crate::bench::media::Region;
use crate::bench::random::Random;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::Rounds;
use crate::error::Error;

const GIB: f64 = (1u64 << 30) as f64;

/// What is moved in the rounds of one metric.
struct Moves<'a> {
    plan: &'a Plan,
    cell: &'a Cell,
    depth: usize,
    region: &'a Region,
    store: &'a mut Store,
    /// Slots of the region, in no order.
    slots: Vec<usize>,
    /// Which blocks come next.
    at: usize,
}

pub(super) fn run(
    plan: &Plan,
    cell: &Cell,
    depth: usize,
    region: &Region,
    store: &mut Store,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let mut slots: Vec<usize> = (0..region.blocks(cell.block)).collect();
    Random(11).shuffle(&mut slots);
    let mut moves = Moves {
        plan,
        cell,
        depth,
        region,
        store,
        slots,
        at: 0,
    };
    if plan.wants("load_cold") || plan.wants("cpu_s_per_gib") {
        moves.load(true, report)?;
    }
    if plan.wants("load_warm") && !cell.direct {
        moves.load(false, report)?;
    }
    if plan.wants("dump") {
        moves.dump(report)?;
    }
    Ok(())
}

impl Moves<'_> {
    fn ways(&self, op: Op) -> Result<Vec<Way>, Error> {
        ways(op, self.cell.direct, self.depth, self.region.whole())
    }

    /// The blocks of the next run: none comes again before all have been.
    fn next(&mut self) -> std::ops::Range<usize> {
        let count = self.slots.len();
        if self.at + count > self.store.raw.count() {
            self.at = 0;
        }
        self.at += count;
        self.at - count..self.at
    }

    fn load(&mut self, cold: bool, report: &mut Report<'_>) -> Result<(), Error> {
        let mut ways = self.ways(Op::Read)?;
        let limits = ways.len();
        let mut cpu = vec![Vec::new(); limits + 1];
        let mut order: Vec<usize> = (0..self.store.raw.count()).collect();
        Random(17).shuffle(&mut order);
        let seconds = Rounds::run(self.plan.rounds, limits, &report.interrupt, |contender| {
            let range = match cold {
                true => self.next(),
                false => 0..self.slots.len(),
            };
            let (before, taken) = match ways.get_mut(contender) {
                Some(way) => {
                    let numbers = &order[range];
                    if cold {
                        self.store.raw.cool(way, numbers)?;
                    }
                    let (before, start) = (process_time(), std::time::Instant::now());
                    self.store.raw.read(way, numbers, &self.slots)?;
                    (before, start.elapsed().as_secs_f64())
                }
                None => {
                    let keys = &self.store.tier.blocks.keys[range];
                    if cold {
                        self.store.tier.cool(keys)?;
                    }
                    let before = process_time();
                    let blocks = &self.store.tier.blocks;
                    let load = blocks.load(keys, &self.slots, self.region, self.depth);
                    (before, load?)
                }
            };
            cpu[contender].push((process_time() - before).as_secs_f64());
            Ok(taken)
        })?;
        let metric = if cold { "load_cold" } else { "load_warm" };
        if self.plan.wants(metric) {
            report.row(self.rate(metric, &seconds, &ways))?;
        }
        if cold && self.plan.wants("cpu_s_per_gib") {
            report.row(self.cpu(&seconds, &cpu, &ways, report)?)?;
        }
        Ok(())
    }

    fn dump(&mut self, report: &mut Report<'_>) -> Result<(), Error> {
        let mut ways = self.ways(Op::Write)?;
        let limits = ways.len();
        let mut order: Vec<usize> = (0..self.store.raw.count()).collect();
        Random(19).shuffle(&mut order);
        let seconds =
            Rounds::run(
                self.plan.rounds,
                limits,
                &report.interrupt,
                |contender| match ways.get_mut(contender) {
                    Some(way) => {
                        let range = self.next();
                        let written = self.store.raw.write(way, &order[range], &self.slots)?;
                        self.store.raw.remove(&written)?;
                        Ok(written.seconds)
                    }
                    None => {
                        let blocks = &mut self.store.tier.blocks;
                        let keys = blocks.new_keys(self.slots.len());
                        let taken = blocks.dump(&keys, &self.slots, self.region, self.depth)?;
                        self.store.tier.remove(&keys)?;
                        Ok(taken)
                    }
                },
            )?;
        report.row(self.rate("dump", &seconds, &ways))
    }

    fn bytes(&self) -> f64 {
        (self.slots.len() * self.cell.block) as f64
    }

    fn rate(&self, metric: &'static str, seconds: &Rounds, ways: &[Way]) -> Row {
        let best = seconds.best();
        Row {
            bench: "files",
            case: self.cell.case(self.depth),
            metric,
            unit: "GB/s",
            value: self.bytes() / seconds.value() / 1e9,
            limit: best.map(|(_, seconds)| self.bytes() / seconds / 1e9),
            ratio: seconds.ratio(),
            rounds: self.plan.rounds,
            limit_name: best.map(|(way, _)| ways[way].name),
        }
    }

    /// Processor time, against the fastest plain way's and one pass of hashing.
    fn cpu(
        &self,
        seconds: &Rounds,
        cpu: &[Vec<f64>],
        ways: &[Way],
        report: &Report<'_>,
    ) -> Result<Row, Error> {
        let (best, _) = seconds.best().unwrap_or_default();
        let hashing = self.hashing();
        let (mut limits, mut ours) = (cpu[best].iter(), cpu[ways.len()].iter());
        let cpu = Rounds::run(self.plan.rounds, 1, &report.interrupt, |contender| {
            Ok(match contender {
                0 => limits.next().copied().unwrap_or_default() + hashing,
                _ => ours.next().copied().unwrap_or_default(),
            })
        })?;
        let gib = self.bytes() / GIB;
        Ok(Row {
            bench: "files",
            case: self.cell.case(self.depth),
            metric: "cpu_s_per_gib",
            unit: "s",
            value: cpu.value() / gib,
            limit: cpu.best().map(|(_, seconds)| seconds / gib),
            ratio: cpu.ratio(),
            rounds: self.plan.rounds,
            limit_name: Some("raw, and one pass of hashing"),
        })
    }

    /// Seconds that one thread takes to hash as many bytes that no cache holds.
    fn hashing(&self) -> f64 {
        let id = PartId {
            namespace: [0; 16],
            key: [0; 32],
            part: 0,
            parts: 1,
        };
        let before = time_of_this_thread();
        let _sum = std::hint::black_box(of_buffers(&id, &[self.region.whole().clone()]));
        (time_of_this_thread() - before).as_secs_f64() * self.bytes()
            / self.region.whole().len() as f64
    }
}
