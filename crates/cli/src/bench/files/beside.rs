//! `dump`, `load_cold` and `cpu_s_per_gib` of kvdepot beside others with blocks of their own, and
//! `requests_per_block`.

use std::ops::Range;

use kvdepot_host::cpu::process_time;
use kvdepot_store::Key;
use serde_json::Value;

use super::plan::{Cell, OBJECTS, Plan};
use super::tier::Tier;
use crate::bench::media::Region;
use crate::bench::random::Random;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::Rounds;
use crate::error::Error;
use crate::interrupt::Interrupt;

const GIB: f64 = (1u64 << 30) as f64;

/// Who has as many blocks as the others, in an order of its own.
pub(super) trait Contender {
    fn name(&self) -> &'static str;

    /// Has none of these in memory, as far as it can be told.
    fn cool(&mut self, _which: Range<usize>) -> Result<(), Error> {
        Ok(())
    }

    /// Loads these, so many at a time; seconds.
    fn load(&mut self, which: Range<usize>, depth: usize) -> Result<f64, Error>;

    /// Stores as many new ones as a round has, so many at a time; seconds.
    fn dump(&mut self, depth: usize) -> Result<f64, Error>;

    /// Removes those.
    fn remove(&mut self) -> Result<(), Error>;

    /// Requests so far.
    fn asked(&self) -> u64 {
        0
    }
}

/// Blocks of kvdepot.
pub(super) struct Ours<'a> {
    name: &'static str,
    tier: Tier,
    region: &'a Region,
    slots: &'a [usize],
    new: Vec<Key>,
}

impl<'a> Ours<'a> {
    pub(super) fn new(
        name: &'static str,
        tier: Tier,
        region: &'a Region,
        slots: &'a [usize],
    ) -> Ours<'a> {
        Ours {
            name,
            tier,
            region,
            slots,
            new: Vec::new(),
        }
    }
}

impl Contender for Ours<'_> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cool(&mut self, which: Range<usize>) -> Result<(), Error> {
        self.tier.cool(&self.tier.blocks.keys[which])
    }

    fn load(&mut self, which: Range<usize>, depth: usize) -> Result<f64, Error> {
        let blocks = &self.tier.blocks;
        blocks.load(&blocks.keys[which], self.slots, self.region, depth)
    }

    fn dump(&mut self, depth: usize) -> Result<f64, Error> {
        let blocks = &mut self.tier.blocks;
        self.new = blocks.new_keys(self.slots.len());
        blocks.dump(&self.new, self.slots, self.region, depth)
    }

    fn remove(&mut self) -> Result<(), Error> {
        self.tier.remove(&std::mem::take(&mut self.new))
    }

    fn asked(&self) -> u64 {
        let tiers = self.tier.blocks.depot().stats().tiers;
        tiers.iter().map(|tier| tier.requests).sum()
    }
}

/// The contenders over one medium, kvdepot last.
pub(super) struct Beside<'a> {
    plan: &'a Plan,
    cell: &'a Cell,
    contenders: Vec<Box<dyn Contender + 'a>>,
    /// Blocks of each, and of a round.
    count: usize,
    batch: usize,
    at: usize,
}

/// What the rounds of one metric have taken.
pub(super) struct Taken {
    seconds: Rounds,
    cpu: Vec<Vec<f64>>,
    requests: u64,
    blocks: u64,
}

impl<'a> Beside<'a> {
    /// Each has all blocks of the plan; a round has as many as there are slots.
    pub(super) fn new(
        plan: &'a Plan,
        cell: &'a Cell,
        contenders: Vec<Box<dyn Contender + 'a>>,
        slots: &[usize],
    ) -> Beside<'a> {
        Beside {
            plan,
            cell,
            contenders,
            count: plan.size / cell.block,
            batch: slots.len(),
            at: 0,
        }
    }

    /// With as many under way as the case says, one number after the other.
    pub(super) fn measure_all(&mut self, report: &mut Report<'_>) -> Result<(), Error> {
        let Cell { tier, block, .. } = self.cell;
        for depth in self.cell.depths.iter().copied() {
            self.measure(depth, report)?;
            report.case_done(&format!("{tier}, {block} bytes, {depth} in flight"));
        }
        Ok(())
    }

    fn measure(&mut self, depth: usize, report: &mut Report<'_>) -> Result<(), Error> {
        let both = ["cpu_s_per_gib", "requests_per_block"];
        let both = both.iter().any(|metric| self.plan.wants(metric));
        if self.plan.wants("load_cold") || both {
            let taken = self.load(depth, &report.interrupt)?;
            self.report(depth, ("load", "load_cold"), &taken, report)?;
        }
        if self.plan.wants("dump") || both {
            let taken = self.dump(depth, &report.interrupt)?;
            self.report(depth, ("dump", "dump"), &taken, report)?;
        }
        Ok(())
    }

    /// Loads the blocks that come next: none comes again before all have been.
    pub(super) fn load(&mut self, depth: usize, interrupt: &Interrupt) -> Result<Taken, Error> {
        let next = |all: &mut Self| {
            if all.at + all.batch > all.count {
                all.at = 0;
            }
            all.at += all.batch;
            all.at - all.batch..all.at
        };
        let before = |all: &mut Self, contender: usize| {
            let which = next(all);
            all.contenders[contender].cool(which.clone())?;
            Ok(which)
        };
        let load =
            |all: &mut Self, contender: usize, which| all.contenders[contender].load(which, depth);
        self.rounds(interrupt, before, load, |_, _| Ok(()))
    }

    fn dump(&mut self, depth: usize, interrupt: &Interrupt) -> Result<Taken, Error> {
        let before = |_: &mut Self, _| Ok(());
        let dump = |all: &mut Self, contender: usize, ()| all.contenders[contender].dump(depth);
        let after = |all: &mut Self, contender: usize| all.contenders[contender].remove();
        self.rounds(interrupt, before, dump, after)
    }

    /// Only what `run` does is counted, and not what is needed `before` and `after` it.
    fn rounds<T>(
        &mut self,
        interrupt: &Interrupt,
        before: impl Fn(&mut Self, usize) -> Result<T, Error>,
        run: impl Fn(&mut Self, usize, T) -> Result<f64, Error>,
        after: impl Fn(&mut Self, usize) -> Result<(), Error>,
    ) -> Result<Taken, Error> {
        let limits = self.contenders.len() - 1;
        let mut cpu = vec![Vec::new(); limits + 1];
        let (mut requests, mut blocks) = (0, 0);
        let seconds = Rounds::run(self.plan.rounds, limits, interrupt, |contender| {
            let prepared = before(self, contender)?;
            let asked = self.contenders[contender].asked();
            let began = process_time();
            let seconds = run(self, contender, prepared)?;
            cpu[contender].push((process_time() - began).as_secs_f64());
            if contender == limits {
                requests += self.contenders[contender].asked() - asked;
                blocks += self.batch as u64;
            }
            after(self, contender)?;
            Ok(seconds)
        })?;
        Ok(Taken {
            seconds,
            cpu,
            requests,
            blocks,
        })
    }

    fn report(
        &self,
        depth: usize,
        (op, rate): (&str, &'static str),
        taken: &Taken,
        report: &mut Report<'_>,
    ) -> Result<(), Error> {
        let mut case = self.cell.case(depth);
        if self.plan.wants(rate) {
            report.row(self.rate(case.clone(), rate, taken))?;
        }
        case["op"] = op.into();
        if self.plan.wants("cpu_s_per_gib") {
            let row = self.cpu(case.clone(), "cpu_s_per_gib", taken, &report.interrupt);
            report.row(row?)?;
        }
        if self.plan.wants("requests_per_block") && self.cell.tier == OBJECTS {
            let value = taken.requests as f64 / taken.blocks as f64;
            report.row(Row {
                unit: "requests",
                value,
                limit: Some(1.0),
                ratio: Some(1.0 / value),
                ..self.rate(case, "requests_per_block", taken)
            })?;
        }
        Ok(())
    }

    fn bytes(&self) -> f64 {
        (self.batch * self.cell.block) as f64
    }

    pub(super) fn rate(&self, case: Value, metric: &'static str, taken: &Taken) -> Row {
        let best = taken.seconds.best();
        Row {
            bench: "files",
            case,
            metric,
            unit: "GB/s",
            value: self.bytes() / taken.seconds.value() / 1e9,
            limit: best.map(|(_, seconds)| self.bytes() / seconds / 1e9),
            ratio: taken.seconds.ratio(),
            rounds: self.plan.rounds,
            limit_name: best.map(|(way, _)| self.contenders[way].name()),
        }
    }

    /// Processor time, against that of the fastest of the others.
    pub(super) fn cpu(
        &self,
        case: Value,
        metric: &'static str,
        taken: &Taken,
        interrupt: &Interrupt,
    ) -> Result<Row, Error> {
        let fastest = taken.seconds.best().map_or(0, |(way, _)| way);
        let all = [&taken.cpu[fastest], &taken.cpu[self.contenders.len() - 1]];
        // The round that warms up is among them.
        let mut all = all.map(|cpu| cpu.iter());
        let cpu = Rounds::run(self.plan.rounds, 1, interrupt, |contender| {
            Ok(all[contender].next().copied().unwrap_or_default())
        })?;
        let gib = self.bytes() / GIB;
        Ok(Row {
            unit: "s",
            value: cpu.value() / gib,
            limit: cpu.best().map(|(_, cpu)| cpu / gib),
            ratio: cpu.ratio(),
            ..self.rate(case, metric, taken)
        })
    }
}

/// Slots of a region in no order.
pub(super) fn shuffled(region: &Region, block: usize) -> Vec<usize> {
    let mut slots: Vec<usize> = (0..region.blocks(block)).collect();
    Random(11).shuffle(&mut slots);
    slots
}
