//! `messages_per_s`: batches of messages of one size.

use serde_json::Value;

use super::near::Layout;
use super::plan::{Batch, Plan};
use super::table::{LIMITS, Movers};
use crate::bench::report::{Report, Row};
use crate::bench::rounds::Rounds;
use crate::error::Error;

pub(super) const METRIC: &str = "messages_per_s";

/// Bytes of a batch, and most messages of one.
pub(super) const BYTES: u64 = 256 << 20;
const COUNT: usize = 50_000;

pub(super) fn run(
    plan: &Plan,
    bytes: u64,
    movers: &Movers<'_>,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let chunks = ((BYTES / bytes) as usize).clamp(1, COUNT);
    let layout = Layout::new(Batch {
        chunks,
        chunk: bytes,
    });
    for op in plan.ops.iter().copied() {
        let times =
            Rounds::run(
                plan.rounds,
                LIMITS.len(),
                &report.interrupt,
                |contender| match contender {
                    contender if contender == LIMITS.len() => {
                        let seconds = movers.near.batch(op, &layout)?;
                        movers.near.check(&layout, movers.plain)?;
                        Ok(seconds)
                    }
                    streams => movers
                        .plain
                        .whole(op, layout.batch.bytes(), LIMITS[streams].1),
                },
            )?;
        let case: Value = plan.case(op, bytes, chunks);
        let best = times.best();
        report.row(Row {
            bench: "transfer",
            case,
            metric: METRIC,
            unit: "1/s",
            value: chunks as f64 / times.value(),
            limit: best.map(|(_, seconds)| chunks as f64 / seconds),
            ratio: times.ratio(),
            rounds: plan.rounds,
            limit_name: best.map(|(best, _)| LIMITS[best].0),
        })?;
    }
    Ok(())
}
