//! `submit_ns`: what handing over one of very many requests takes.

use std::time::Instant;

use kvdepot_host::cpu;
use kvdepot_transfer::Options;

use super::near::{Layout, done};
use super::plan::{Batch, Plan};
use super::table::Movers;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::median;
use crate::error::Error;

pub(super) const METRIC: &str = "submit_ns";

const REQUESTS: usize = 100_000;
const BYTES: u64 = 2048;
/// Bytes of all.
pub(super) const ALL: u64 = REQUESTS as u64 * BYTES;

pub(super) fn run(plan: &Plan, movers: &Movers<'_>, report: &mut Report<'_>) -> Result<(), Error> {
    let layout = Layout::new(Batch {
        chunks: REQUESTS,
        chunk: BYTES,
    });
    for op in plan.ops.iter().copied() {
        let (mut wall, mut thread) = (Vec::new(), Vec::new());
        for round in 0..=plan.rounds {
            report.interrupt.check()?;
            let requests = movers.near.requests(op, BYTES, &layout.pieces);
            let (start, before) = (Instant::now(), cpu::time_of_this_thread());
            let task = movers.near.engine.submit(requests, Options::default())?;
            let spent = (cpu::time_of_this_thread() - before, start.elapsed());
            let _over = task.wait(None);
            done(&task)?;
            if round > 0 {
                thread.push(spent.0.as_nanos() as f64 / REQUESTS as f64);
                wall.push(spent.1.as_nanos() as f64 / REQUESTS as f64);
            }
        }
        for (clock, nanoseconds) in [("thread", thread), ("wall", wall)] {
            let mut case = plan.case(op, layout.batch.bytes(), REQUESTS);
            case["clock"] = clock.into();
            report.row(Row {
                bench: "transfer",
                case,
                metric: METRIC,
                unit: "ns",
                value: median(nanoseconds),
                limit: None,
                ratio: None,
                rounds: plan.rounds,
                limit_name: None,
            })?;
        }
    }
    Ok(())
}
