//! Batches: those of the published table, beside plain streams, and piece by piece.

use kvdepot_transfer::Op;

use super::near::{Layout, Near, Streams};
use super::plan::{Batch, Plan};
use super::target::Target;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::{Rounds, median};
use crate::error::Error;

/// Metrics that are figures of the same runs.
pub(super) const METRICS: [&str; 5] = [
    "batch_over_tcp",
    "cpu_s_per_gb",
    "total_on_over_off",
    "batch_over_one_by_one",
    "one_by_one_over_pingpong",
];

/// Pieces that are moved one by one in a round.
const SINGLES: usize = 500;

/// Bytes of a question, and of an answer without bytes: those of a frame's head.
pub(super) const HEAD: usize = 40;

/// Contenders, by their places in the rounds.
pub(super) const LIMITS: [(&str, usize); 2] = [("1 plain stream", 1), ("2 plain streams", 2)];
const SINGLE: usize = 2;
const PONG: usize = 3;
const PLAN_OFF: usize = 4;
const SUMMED: usize = 5;
const OURS: usize = 6;
const CONTENDERS: usize = 7;

/// What moves batches.
pub(super) struct Movers<'a> {
    pub(super) target: &'a Target,
    pub(super) plain: &'a Streams,
    pub(super) near: &'a Near,
    pub(super) summed: &'a Near,
    pub(super) plan_off: &'a Near,
}

/// What came of one batch.
struct Runs {
    batch: Batch,
    seconds: Rounds,
    /// Processor seconds of both processes, of each contender in each round.
    cpu: Vec<Vec<f64>>,
    rounds: usize,
}

pub(super) fn run(
    plan: &Plan,
    batch: Batch,
    movers: &Movers<'_>,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let layout = Layout::new(batch);
    for op in plan.ops.iter().copied() {
        let runs = measure(plan, op, &layout, movers, report)?;
        for row in runs.rows(plan, op) {
            if plan.wants(row.metric) {
                report.row(row)?;
            }
        }
    }
    Ok(())
}

fn measure(
    plan: &Plan,
    op: Op,
    layout: &Layout,
    movers: &Movers<'_>,
    report: &Report<'_>,
) -> Result<Runs, Error> {
    let batch = layout.batch;
    let by_one = plan.wants_any(&["batch_over_one_by_one", "one_by_one_over_pingpong"]);
    let singles = if by_one { SINGLES.min(batch.chunks) } else { 1 };
    let some = &layout.pieces[..singles];
    // What all pieces would take.
    let all = |each: &[f64]| each.iter().sum::<f64>() * batch.chunks as f64 / singles as f64;
    let (asked, said) = match op {
        Op::Write => (HEAD + batch.chunk as usize, HEAD),
        Op::Read => (HEAD, HEAD + batch.chunk as usize),
    };
    let mut cpu = vec![Vec::new(); CONTENDERS];
    let seconds = Rounds::run_ways(
        plan.rounds,
        LIMITS.len(),
        CONTENDERS - LIMITS.len(),
        &report.interrupt,
        |contender| {
            let before = movers.target.processor_seconds()?;
            let seconds = match contender {
                SINGLE => all(&movers.near.one_by_one(op, batch.chunk, some)?),
                PONG => all(&movers.plain.ping_pong(asked, said, singles)?),
                PLAN_OFF if !plan.wants("total_on_over_off") => 0.0,
                PLAN_OFF => movers.plan_off.batch(op, layout)?,
                SUMMED => movers.summed.batch(op, layout)?,
                OURS => movers.near.batch(op, layout)?,
                streams => movers.plain.whole(op, batch.bytes(), LIMITS[streams].1)?,
            };
            cpu[contender].push(movers.target.processor_seconds()? - before);
            if contender == OURS {
                movers.near.check(layout, movers.plain)?;
            }
            Ok(seconds)
        },
    )?;
    // The first warms up.
    for all in &mut cpu {
        all.remove(0);
    }
    Ok(Runs {
        batch,
        seconds,
        cpu,
        rounds: plan.rounds,
    })
}

impl Runs {
    fn rows(&self, plan: &Plan, op: Op) -> Vec<Row> {
        let Some((best, _)) = self.seconds.best() else {
            return Vec::new();
        };
        let case = |checksum: &str| {
            let mut case = plan.case(op, self.batch.bytes(), self.batch.chunks);
            case["checksum"] = checksum.into();
            case
        };
        let mut rows = Vec::new();
        for (checksum, ours) in [("off", OURS), ("on", SUMMED)] {
            let ratio = self.seconds.quotient(best, ours);
            let (value, limit) = (self.rate(ours), self.rate(best));
            let name = Some(LIMITS[best].0);
            let row = self.row(case(checksum), "batch_over_tcp", "GB/s");
            rows.push(row.with(value, limit, ratio, name));
            let of =
                |contender: usize| median(self.cpu[contender].clone()) / self.batch.gigabytes();
            let row = self.row(case(checksum), "cpu_s_per_gb", "s");
            rows.push(row.with(of(ours), of(best), of(best) / of(ours), name));
        }
        let on_over_off = self.seconds.quotient(OURS, PLAN_OFF);
        let row = self.row(case("off"), "total_on_over_off", "ratio");
        let name = Some("without watermark and merged tails");
        rows.push(row.with(on_over_off, 1.0, 1.0 / on_over_off, name));
        if self.batch.chunks > 1 {
            let row = self.row(case("off"), "batch_over_one_by_one", "GB/s");
            let ratio = self.seconds.quotient(SINGLE, OURS);
            let (value, limit) = (self.rate(OURS), self.rate(SINGLE));
            rows.push(row.with(value, limit, ratio, Some("one by one")));
            let each = |contender| self.seconds.median(contender) / self.batch.chunks as f64 * 1e6;
            let row = self.row(case("off"), "one_by_one_over_pingpong", "us");
            let ratio = self.seconds.quotient(PONG, SINGLE);
            let name = Some("a ping-pong of that size");
            rows.push(row.with(each(SINGLE), each(PONG), ratio, name));
        }
        rows
    }

    /// Gigabytes a second.
    fn rate(&self, contender: usize) -> f64 {
        self.batch.gigabytes() / self.seconds.median(contender)
    }

    fn row(&self, case: serde_json::Value, metric: &'static str, unit: &'static str) -> Row {
        Row {
            bench: "transfer",
            case,
            metric,
            unit,
            value: 0.0,
            limit: None,
            ratio: None,
            rounds: self.rounds,
            limit_name: None,
        }
    }
}
