//! Several threads on one pool, against as many that have a pool each.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::Instant;

use kvdepot_alloc::{Pool, Shared};
use serde_json::json;

use super::contenders::{Common, Contiguous, OneOf, Ours, check, refused};
use super::driver::{AtRandom, Contender, Driver, Record, Silent};
use super::plan::Plan;
use super::workloads::{THREADS_GRANULE, THREADS_POOL, threads_sizes};
use crate::bench::random::Random;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::Rounds;
use crate::error::Error;
use crate::interrupt::Interrupt;

pub(super) const THREADS: [usize; 4] = [1, 2, 4, 8];

/// Contenders: the limit of the scaling, and what a plain lock reaches.
const INDEPENDENT: usize = 0;
const MUTEX: usize = 1;

type Sizes = fn(&mut Random) -> [u64; 1];
type OneDriver<'a, C, R> = Driver<'a, C, R, AtRandom, Sizes, 1>;

/// The live bytes of all threads, averaged over the samples of one.
struct Total<'a> {
    live: &'a AtomicU64,
    sum: u128,
    samples: u64,
}

impl<'a> Total<'a> {
    fn new(live: &'a AtomicU64) -> Total<'a> {
        Total {
            live,
            sum: 0,
            samples: 0,
        }
    }

    /// Over the threads of a run.
    fn utilisation<'b>(totals: impl Iterator<Item = &'b Total<'a>>) -> f64
    where
        'a: 'b,
    {
        let (sum, samples) = totals.fold((0, 0), |(sum, samples), total| {
            (sum + total.sum, samples + total.samples)
        });
        sum as f64 / samples as f64 / THREADS_POOL as f64
    }
}

impl Record for Total<'_> {
    type Kept = u64;

    fn allocated(&mut self, bytes: u64, _: impl Fn() -> usize) -> u64 {
        let before = self.live.fetch_add(bytes, Ordering::Relaxed);
        self.sum += u128::from(before + bytes);
        self.samples += 1;
        bytes
    }

    fn freed(&mut self, bytes: u64) {
        self.live.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn restart(&mut self) {
        (self.sum, self.samples) = (0, 0);
    }
}

pub(super) fn run(plan: &Plan, report: &mut Report<'_>) -> Result<(), Error> {
    for threads in THREADS {
        scaling(threads, plan, report)?;
        utilisation(threads, plan, report)?;
        report.case_done(&format!("{threads} threads"));
    }
    Ok(())
}

fn scaling(threads: usize, plan: &Plan, report: &mut Report<'_>) -> Result<(), Error> {
    let interrupt = &report.interrupt;
    let times = Rounds::run(plan.rounds, 2, interrupt, |contender| match contender {
        INDEPENDENT => {
            let size = THREADS_POOL / threads as u64;
            let pools = (0..threads).map(|_| Contiguous::new(size, THREADS_GRANULE));
            let pools = pools.collect::<Result<_, _>>()?;
            let (seconds, pools) = race(pools, || Silent, plan, interrupt)?;
            pools.iter().try_for_each(|(pool, _)| pool.check())?;
            Ok(seconds)
        }
        MUTEX => {
            let pool = Pool::new(THREADS_POOL, THREADS_GRANULE).map_err(refused)?;
            Ok(common(&Mutex::new(pool), threads, || Silent, plan, interrupt)?.0)
        }
        _ => {
            let pool = Shared::new(THREADS_POOL, THREADS_GRANULE).map_err(refused)?;
            Ok(common(&pool, threads, || Silent, plan, interrupt)?.0)
        }
    })?;
    let allocations = (plan.each(threads) * threads) as f64;
    for (metric, limit, name) in [
        ("scaling", INDEPENDENT, "independent pools"),
        ("scaling_over_mutex", MUTEX, "pool behind a mutex"),
    ] {
        let (seconds, ratio) = times.against(limit);
        report.row(Row {
            bench: "alloc",
            case: json!({"workload": "threads", "threads": threads, "pool": THREADS_POOL}),
            metric,
            unit: "allocations/s",
            value: allocations / times.value(),
            limit: Some(allocations / seconds),
            ratio: Some(ratio),
            rounds: plan.rounds,
            limit_name: Some(name),
        })?;
    }
    Ok(())
}

/// How full the shared pool is while the threads allocate and free, against one thread with one
/// plain pool.
fn utilisation(threads: usize, plan: &Plan, report: &mut Report<'_>) -> Result<(), Error> {
    let interrupt = &report.interrupt;
    let live = AtomicU64::new(0);
    let single = Contiguous::new(THREADS_POOL, THREADS_GRANULE)?;
    let (_, single) = race(vec![single], || Total::new(&live), plan, interrupt)?;
    let single = Total::utilisation(single.iter().map(|(_, total)| total));
    let live = AtomicU64::new(0);
    let pool = Shared::new(THREADS_POOL, THREADS_GRANULE).map_err(refused)?;
    let (_, totals) = common(&pool, threads, || Total::new(&live), plan, interrupt)?;
    let shared = Total::utilisation(totals.iter());
    report.row(Row {
        bench: "alloc",
        case: json!({
            "workload": "threads", "threads": threads, "pool": THREADS_POOL, "max_extents": 1,
        }),
        metric: "utilisation_avg",
        unit: "of the pool",
        value: shared,
        limit: Some(single),
        ratio: Some(shared / single),
        rounds: 1,
        limit_name: Some("single pool"),
    })
}

/// Several threads on one pool.
fn common<P: Common, R: Record<Kept: Send> + Send>(
    pool: &P,
    threads: usize,
    record: impl Fn() -> R,
    plan: &Plan,
    interrupt: &Interrupt,
) -> Result<(f64, Vec<R>), Error> {
    let contenders = (0..threads).map(|_| OneOf::new(pool)).collect();
    let (seconds, ended) = race(contenders, record, plan, interrupt)?;
    ended.iter().try_for_each(|(one, _)| check(one.wrong))?;
    Ok((
        seconds,
        ended.into_iter().map(|(_, record)| record).collect(),
    ))
}

/// Each contender in a thread of its own: seconds from the moment when all of them have filled
/// their share of the pool until the last of them has done its share of the operations.
fn race<C, R>(
    contenders: Vec<C>,
    record: impl Fn() -> R,
    plan: &Plan,
    interrupt: &Interrupt,
) -> Result<(f64, Vec<(C, R)>), Error>
where
    C: Contender<Held: Send> + Send,
    R: Record<Kept: Send> + Send,
{
    let threads = contenders.len();
    let start = Barrier::new(threads + 1);
    std::thread::scope(|scope| {
        let run = |(index, contender): (usize, C)| {
            let (record, start) = (record(), &start);
            scope.spawn(move || {
                let seed = index as u64 + 1;
                let sizes: Sizes = threads_sizes;
                let mut driver: OneDriver<'_, C, R> =
                    Driver::new(contender, record, sizes, seed, interrupt);
                let filled = driver.fill(THREADS_POOL / threads as u64);
                driver.record.restart();
                // Also after an error: the others wait for all.
                start.wait();
                filled?;
                driver.churn(plan.each(threads))?;
                // One that was left behind with nothing of its own to free could not go on.
                driver.empty();
                Ok((driver.contender, driver.record))
            })
        };
        let running: Vec<_> = contenders.into_iter().enumerate().map(run).collect();
        start.wait();
        let began = Instant::now();
        let ended: Vec<_> = running.into_iter().map(|thread| thread.join()).collect();
        let seconds = began.elapsed().as_secs_f64();
        let died = |_| Error::Bench("a benchmark thread panicked".into());
        let ended = ended.into_iter().map(|ended| ended.map_err(died)?);
        Ok((seconds, ended.collect::<Result<_, Error>>()?))
    })
}
