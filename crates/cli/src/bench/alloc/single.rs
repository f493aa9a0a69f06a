//! One thread: utilisation and time of a workload.
//!
//! Utilisation is recorded in runs that nobody times, time is taken in runs that record nothing.

use std::time::Instant;

use serde_json::{Value, json};

use super::contenders::{BestFit, Contiguous, Ours, PEERS, Reference, Scattered};
use super::driver::{Contender, Driver, Frees, Record, Silent, Watch};
use super::plan::Plan;
use super::workloads::Workload;
use crate::bench::random::Random;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::{Rounds, median};
use crate::error::Error;

/// Metrics of utilisation: kvdepot's, the reference's, and which of the samples, in order, is
/// it: the share of samples below it. The average has none.
const SUMMARY: [(&str, &str, Option<f64>); 6] = [
    ("utilisation_min", "reference_utilisation_min", Some(0.0)),
    ("utilisation_p99", "reference_utilisation_p99", Some(0.01)),
    ("utilisation_p90", "reference_utilisation_p90", Some(0.1)),
    ("utilisation_p50", "reference_utilisation_p50", Some(0.5)),
    ("utilisation_max", "reference_utilisation_max", Some(1.0)),
    ("utilisation_avg", "reference_utilisation_avg", None),
];

/// Fewer live allocations say nothing of the memory that each needs: the tables' fixed part is
/// most of it.
const MEMORY_LIVE: u64 = 1 << 16;

/// The most extents of an allocation whose time is taken, beside one.
const TIMED_EXTENTS: usize = 4;

/// Utilisation as [`SUMMARY`] names it.
type Summary = [f64; SUMMARY.len()];

fn summary(mut live: Vec<u64>, pool: u64) -> Summary {
    let last = live.len().saturating_sub(1);
    let sum: u128 = live.iter().map(|live| u128::from(*live)).sum();
    let average = sum as f64 / live.len() as f64;
    live.sort_unstable();
    SUMMARY.map(|(_, _, share)| {
        let sample = |share: f64| live.get((share * last as f64) as usize);
        let bytes = match share {
            Some(share) => sample(share).map_or(f64::NAN, |live| *live as f64),
            None => average,
        };
        bytes / pool as f64
    })
}

/// What the runs of an allocator with different random numbers came to.
#[derive(Default)]
struct Watched {
    seeds: Vec<Summary>,
    /// Pieces over allocations, in each run.
    pieces: Vec<f64>,
}

impl Watched {
    fn figure(&self, metric: usize) -> f64 {
        median(self.seeds.iter().map(|seed| seed[metric]).collect())
    }

    fn over(&self, other: &Watched, metric: usize) -> f64 {
        let pairs = self.seeds.iter().zip(&other.seeds);
        median(pairs.map(|(a, b)| a[metric] / b[metric]).collect())
    }
}

pub(super) fn measure<S, F, const PARTS: usize>(
    workload: &Workload<S, F, PARTS>,
    plan: &Plan,
    report: &mut Report<'_>,
) -> Result<(), Error>
where
    S: FnMut(&mut Random) -> [u64; PARTS] + Clone,
    F: Frees,
{
    let best = match PEERS {
        true => Some(workload.others(plan, report)?),
        false => None,
    };
    for pieces in workload.max_extents {
        let best = best.as_ref();
        match pieces {
            1 => workload.ours::<Contiguous>(1, best, plan, report)?,
            2 => workload.ours::<Scattered<2>>(2, best, plan, report)?,
            4 => workload.ours::<Scattered<4>>(4, best, plan, report)?,
            _ => workload.ours::<Scattered<8>>(8, best, plan, report)?,
        }
    }
    let size = workload
        .size
        .map_or_else(String::new, |size| format!(" {size}"));
    report.case_done(&format!("{}{size}", workload.name));
    Ok(())
}

impl<S, F, const PARTS: usize> Workload<S, F, PARTS>
where
    S: FnMut(&mut Random) -> [u64; PARTS] + Clone,
    F: Frees,
{
    fn case(&self, max_extents: usize) -> Value {
        let mut case = json!({
            "workload": self.name, "pool": self.pool, "max_extents": max_extents,
        });
        if let Some(size) = self.size {
            case["size"] = size.into();
        }
        case
    }

    fn row(&self, max_extents: usize, metric: &'static str, unit: &'static str) -> Row {
        Row {
            bench: "alloc",
            case: self.case(max_extents),
            metric,
            unit,
            value: f64::NAN,
            limit: None,
            ratio: None,
            rounds: 1,
            limit_name: None,
        }
    }

    /// Runs one allocator and records; the allocator comes back full.
    fn watch<C: Contender>(
        &self,
        contender: C,
        seed: u64,
        plan: &Plan,
        report: &Report<'_>,
        watched: &mut Watched,
    ) -> Result<C, Error> {
        let mut driver: Driver<'_, C, Watch, F, S, PARTS> = Driver::new(
            contender,
            Watch::default(),
            self.sizes.clone(),
            seed,
            &report.interrupt,
        );
        driver.fill(self.pool)?;
        driver.record.restart();
        driver.churn(plan.operations)?;
        let Watch {
            samples, pieces, ..
        } = driver.record;
        let allocations = samples.len() * PARTS;
        watched.pieces.push(pieces as f64 / allocations as f64);
        watched.seeds.push(summary(samples, self.pool));
        Ok(driver.contender)
    }

    /// Seconds of what is measured, filling left out.
    fn seconds<C: Contender>(
        &self,
        contender: C,
        plan: &Plan,
        report: &Report<'_>,
    ) -> Result<(f64, C), Error> {
        let mut driver: Driver<'_, C, Silent, F, S, PARTS> =
            Driver::new(contender, Silent, self.sizes.clone(), 1, &report.interrupt);
        driver.fill(self.pool)?;
        let start = Instant::now();
        driver.churn(plan.operations)?;
        Ok((start.elapsed().as_secs_f64(), driver.contender))
    }

    /// Utilisation of the reference, against exact best fit, which is answered.
    fn others(&self, plan: &Plan, report: &mut Report<'_>) -> Result<Watched, Error> {
        let (mut best, mut reference) = (Watched::default(), Watched::default());
        for seed in 1..=self.seeds {
            self.watch(BestFit::new(self.pool), seed, plan, report, &mut best)?;
            let contender = Reference::new(self.pool, self.live)?;
            self.watch(contender, seed, plan, report, &mut reference)?;
        }
        for (index, (_, metric, _)) in SUMMARY.into_iter().enumerate() {
            report.row(Row {
                value: reference.figure(index),
                limit: Some(best.figure(index)),
                ratio: Some(reference.over(&best, index)),
                rounds: self.seeds as usize,
                limit_name: Some("exact best fit"),
                ..self.row(1, metric, "of the pool")
            })?;
        }
        Ok(best)
    }

    fn ours<C: Ours>(
        &self,
        max_extents: usize,
        best: Option<&Watched>,
        plan: &Plan,
        report: &mut Report<'_>,
    ) -> Result<(), Error> {
        let mut watched = Watched::default();
        let mut memory = None;
        for seed in 1..=self.seeds {
            let contender = C::new(self.pool, self.granule)?;
            let contender = self.watch(contender, seed, plan, report, &mut watched)?;
            contender.check()?;
            memory = Some(contender.inner().pool.report());
        }
        for (index, (metric, _, _)) in SUMMARY.into_iter().enumerate() {
            report.row(Row {
                value: watched.figure(index),
                limit: best.map(|best| best.figure(index)),
                ratio: best.map(|best| watched.over(best, index)),
                rounds: self.seeds as usize,
                limit_name: best.map(|_| "exact best fit"),
                ..self.row(max_extents, metric, "of the pool")
            })?;
        }
        if max_extents > 1 {
            report.row(Row {
                value: median(watched.pieces),
                rounds: self.seeds as usize,
                ..self.row(max_extents, "extents_per_allocation", "extents")
            })?;
        }
        if let Some(memory) = memory.filter(|memory| memory.live_extents >= MEMORY_LIVE) {
            report.row(Row {
                value: memory.memory_bytes as f64 / memory.live_extents as f64,
                ..self.row(max_extents, "bytes_per_allocation", "bytes")
            })?;
        }
        if max_extents == 1 || max_extents == TIMED_EXTENTS {
            self.time::<C>(max_extents, plan, report)?;
        }
        Ok(())
    }

    fn time<C: Ours>(
        &self,
        max_extents: usize,
        plan: &Plan,
        report: &mut Report<'_>,
    ) -> Result<(), Error> {
        let limits = usize::from(PEERS);
        let times = Rounds::run(plan.rounds, limits, &report.interrupt, |contender| {
            if contender < limits {
                let contender = Reference::new(self.pool, self.live)?;
                return Ok(self.seconds(contender, plan, report)?.0);
            }
            let contender = C::new(self.pool, self.granule)?;
            let (seconds, contender) = self.seconds(contender, plan, report)?;
            contender.check()?;
            Ok(seconds)
        })?;
        let each = 1e9 / (plan.operations * PARTS) as f64;
        report.row(Row {
            value: times.value() * each,
            limit: times.best().map(|(_, seconds)| seconds * each),
            ratio: times.ratio(),
            rounds: plan.rounds,
            limit_name: times.best().map(|_| "reference"),
            ..self.row(max_extents, "time", "ns/allocation")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_the_samples_is_below_each_figure() {
        let live: Vec<u64> = (0..=1000).rev().collect();
        assert_eq!(summary(live, 1000), [0.0, 0.01, 0.1, 0.5, 1.0, 0.5]);
    }
}
