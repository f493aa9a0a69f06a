//! `dump`, `load_cold`, `cpu_s_per_gib` and `requests_per_block` of the tier `S3`, against
//! `object_store` used bare by as many requests at a time.

use kvdepot_host::cpu::process_time;
use kvdepot_media::Buffer;
use kvdepot_store::{Config, Depot};
use serde_json::json;

use super::bare::{self, Bare, Bucket};
use super::blocks::Blocks;
use super::plan::{Cell, Plan};
use crate::bench::media::Region;
use crate::bench::random::Random;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::Rounds;
use crate::error::Error;

const GIB: f64 = (1u64 << 30) as f64;

/// The contenders over one bucket, each with its blocks.
struct Objects<'a> {
    plan: &'a Plan,
    cell: &'a Cell,
    region: &'a Region,
    blocks: Blocks,
    bare: Vec<Bare>,
    /// Plain objects: those that are loaded.
    numbers: Vec<usize>,
    /// Slots of the region, in no order, and what is in them.
    slots: Vec<usize>,
    ends: Vec<Buffer>,
    contents: Vec<bytes::Bytes>,
    at: usize,
}

/// What the rounds of one metric have taken.
struct Taken {
    seconds: Rounds,
    cpu: Vec<Vec<f64>>,
    requests: u64,
    blocks: u64,
}

pub(super) fn run(
    plan: &Plan,
    cell: &Cell,
    region: &Region,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let Some(bucket) = &Bucket::of(plan) else {
        return Ok(());
    };
    let run = format!("kvdepot-bench-{}", std::process::id());
    let measured = Objects::open(plan, cell, bucket, &run, region, report).and_then(|mut all| {
        for depth in cell.depths.iter().copied() {
            all.measure(depth, report)?;
            let block = cell.block;
            report.case_done(&format!("S3, {block} bytes, {depth} under way"));
        }
        Ok(())
    });
    // Its depot is closed.
    let clients = bare::clients(bucket, &run)?;
    let cleared = clients.first().map_or(Ok(()), Bare::clear);
    measured.and(cleared)
}

impl<'a> Objects<'a> {
    fn open(
        plan: &'a Plan,
        cell: &'a Cell,
        bucket: &Bucket,
        run: &str,
        region: &'a Region,
        report: &Report<'_>,
    ) -> Result<Objects<'a>, Error> {
        let block = cell.block;
        let mut slots: Vec<usize> = (0..region.blocks(block)).collect();
        Random(11).shuffle(&mut slots);
        let end = |slot: &usize| Ok(region.whole().slice(slot * block, block)?);
        let ends: Result<Vec<Buffer>, Error> = slots.iter().map(end).collect();
        let mut all = Objects {
            blocks: Blocks::new(depot(plan, cell, bucket, run)?, block)?,
            bare: bare::clients(bucket, run)?,
            numbers: (0..plan.size / block).collect(),
            ends: ends?,
            contents: bare::contents(region, block, &slots)?,
            slots,
            plan,
            cell,
            region,
            at: 0,
        };
        let count = all.numbers.len();
        let keys = all.blocks.fill(count, region, &report.interrupt)?;
        all.blocks.keep(keys);
        for some in all.numbers.chunks(all.slots.len()) {
            report.interrupt.check()?;
            all.bare[0].put(some, &all.contents, 8)?;
        }
        Random(17).shuffle(&mut all.numbers);
        Ok(all)
    }

    fn measure(&mut self, depth: usize, report: &mut Report<'_>) -> Result<(), Error> {
        let wants = |metrics: &[&str]| metrics.iter().any(|metric| self.plan.wants(metric));
        let both = ["cpu_s_per_gib", "requests_per_block"];
        let (loads, dumps) = (wants(&["load_cold"]), wants(&["dump"]));
        let both = wants(&both);
        if loads || both {
            let taken = self.load(depth, report)?;
            self.report(depth, ("load", "load_cold"), &taken, report)?;
        }
        if dumps || both {
            let taken = self.dump(depth, report)?;
            self.report(depth, ("dump", "dump"), &taken, report)?;
        }
        Ok(())
    }

    /// The blocks of the next run: none comes again before all have been.
    fn next(&mut self) -> std::ops::Range<usize> {
        let count = self.slots.len();
        if self.at + count > self.numbers.len() {
            self.at = 0;
        }
        self.at += count;
        self.at - count..self.at
    }

    fn load(&mut self, depth: usize, report: &Report<'_>) -> Result<Taken, Error> {
        let load = |all: &mut Self, contender: usize| {
            let range = all.next();
            match all.bare.get(contender) {
                Some(bare) => bare.get(&all.numbers[range], &all.ends, depth),
                None => {
                    let keys = &all.blocks.keys[range];
                    all.blocks.load(keys, &all.slots, all.region, depth)
                }
            }
        };
        self.rounds(report, load, |_, _| Ok(()))
    }

    fn dump(&mut self, depth: usize, report: &Report<'_>) -> Result<Taken, Error> {
        let made = self.numbers.len();
        let new: Vec<usize> = (made..made + self.slots.len()).collect();
        let dump = |all: &mut Self, contender: usize| match all.bare.get(contender) {
            Some(bare) => bare.put(&new, &all.contents, depth),
            None => {
                let keys = all.blocks.new_keys(all.slots.len());
                all.blocks.keys.extend(&keys);
                all.blocks.dump(&keys, &all.slots, all.region, depth)
            }
        };
        self.rounds(report, dump, |all, contender| {
            match all.bare.get(contender) {
                Some(bare) => bare.remove(&new),
                None => {
                    let written = all.blocks.keys.split_off(made);
                    all.blocks.remove(&written)
                }
            }
        })
    }

    /// Only what `run` does is counted, and not what it needs `after` it.
    fn rounds(
        &mut self,
        report: &Report<'_>,
        run: impl Fn(&mut Self, usize) -> Result<f64, Error>,
        after: impl Fn(&mut Self, usize) -> Result<(), Error>,
    ) -> Result<Taken, Error> {
        let limits = self.bare.len();
        let mut cpu = vec![Vec::new(); limits + 1];
        let (mut requests, mut blocks) = (0, 0);
        let seconds = Rounds::run(self.plan.rounds, limits, &report.interrupt, |contender| {
            let (asked, before) = (self.asked(), process_time());
            let seconds = run(self, contender)?;
            cpu[contender].push((process_time() - before).as_secs_f64());
            if contender == limits {
                requests += self.asked() - asked;
                blocks += self.slots.len() as u64;
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

    fn asked(&self) -> u64 {
        let tiers = self.blocks.depot().stats().tiers;
        tiers.iter().map(|tier| tier.requests).sum()
    }

    fn report(
        &self,
        depth: usize,
        (op, rate): (&str, &'static str),
        taken: &Taken,
        report: &mut Report<'_>,
    ) -> Result<(), Error> {
        let plan = self.plan;
        let bytes = (self.slots.len() * self.cell.block) as f64;
        let best = taken.seconds.best();
        let name = best.map(|(way, _)| self.bare[way].name);
        let mut case = self.cell.case(depth);
        let row = |case, metric, unit, value, limit, ratio| Row {
            bench: "files",
            case,
            metric,
            unit,
            value,
            limit,
            ratio,
            rounds: plan.rounds,
            limit_name: name,
        };
        if plan.wants(rate) {
            let limit = best.map(|(_, seconds)| bytes / seconds / 1e9);
            let value = bytes / taken.seconds.value() / 1e9;
            let ratio = taken.seconds.ratio();
            report.row(row(case.clone(), rate, "GB/s", value, limit, ratio))?;
        }
        case["op"] = op.into();
        if plan.wants("cpu_s_per_gib") {
            let fastest = best.map_or(0, |(way, _)| way);
            let all = [&taken.cpu[fastest], &taken.cpu[self.bare.len()]];
            let mut all = all.map(|cpu| cpu.iter());
            let cpu = Rounds::run(plan.rounds, 1, &report.interrupt, |contender| {
                Ok(all[contender].next().copied().unwrap_or_default())
            })?;
            let gib = bytes / GIB;
            let (value, limit) = (cpu.value() / gib, cpu.best().map(|(_, cpu)| cpu / gib));
            let ratio = cpu.ratio();
            report.row(row(case.clone(), "cpu_s_per_gib", "s", value, limit, ratio))?;
        }
        if plan.wants("requests_per_block") {
            let value = taken.requests as f64 / taken.blocks as f64;
            let ratio = Some(1.0 / value);
            let metric = "requests_per_block";
            report.row(row(case, metric, "requests", value, Some(1.0), ratio))?;
        }
        Ok(())
    }
}

/// A depot of the tier alone, with room for what is measured.
fn depot(plan: &Plan, cell: &Cell, bucket: &Bucket, run: &str) -> Result<Depot, Error> {
    let url = bucket.url.trim_end_matches('/');
    let written = (plan.rounds + 2) as u64 * plan.batch as u64;
    let deepest = cell.depths.iter().copied().max().unwrap_or(1);
    let mut s3 = json!({
        "url": format!("{url}/{run}/tier"),
        // The oldest would go otherwise.
        "capacity": 2 * (plan.size as u64 + written) + (1 << 30),
        // As many as are asked for at a time, both ways.
        "requests": (2 * deepest).clamp(64, 1024),
    });
    if let Some(endpoint) = &bucket.endpoint {
        s3["endpoint"] = endpoint.as_str().into();
        s3["allow_http"] = endpoint.starts_with("http://").into();
    }
    let settings = json!({"socket": "off", "s3": s3});
    Ok(kvdepot_service::open(&Config::new("S3", &settings)?)?)
}
