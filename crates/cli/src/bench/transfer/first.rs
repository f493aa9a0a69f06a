//! `first_byte_on_over_off`: how soon the first bytes of a large batch are on their way, with
//! slices handed on at a watermark while the rest is being planned, and without.

use kvdepot_transfer::{Op, Options};

use super::near::{Layout, Near, done};
use super::plan::{Batch, Plan};
use super::table::Movers;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::Rounds;
use crate::error::Error;

pub(super) const METRIC: &str = "first_byte_on_over_off";

/// The batch of the published table that has the most pieces.
pub(super) const BATCH: Batch = Batch {
    chunks: 20_000,
    chunk: 35_000,
};

pub(super) fn run(plan: &Plan, movers: &Movers<'_>, report: &mut Report<'_>) -> Result<(), Error> {
    let layout = Layout::new(BATCH);
    for op in plan.ops.iter().copied() {
        let times = Rounds::run(
            plan.rounds,
            1,
            &report.interrupt,
            |contender| match contender {
                0 => first(movers.plan_off, op, &layout),
                _ => first(movers.near, op, &layout),
            },
        )?;
        let (off, ratio) = times.against(0);
        report.row(Row {
            bench: "transfer",
            case: plan.case(op, BATCH.bytes(), BATCH.chunks),
            metric: METRIC,
            unit: "us",
            value: times.value() * 1e6,
            limit: Some(off * 1e6),
            ratio: Some(1.0 / ratio),
            rounds: plan.rounds,
            limit_name: Some("without watermark and merged tails"),
        })?;
    }
    Ok(())
}

/// Seconds until the kernel was given the first bytes of a batch.
fn first(near: &Near, op: Op, layout: &Layout) -> Result<f64, Error> {
    let requests = near.requests(op, layout.batch.chunk, &layout.pieces);
    let task = near.engine.submit(requests, Options::default())?;
    let _over = task.wait(None);
    done(&task)?;
    let sent = task.first_sent();
    sent.map(|after| after.as_secs_f64())
        .ok_or_else(|| Error::Bench("a batch completed without sending data".into()))
}
