//! `read_rtt_us` and `read_rtt_over_pingpong`: one read of 4 KiB at a time, beside as many bytes
//! that go to and fro over a plain socket. Both wait in blocking calls; through shared memory there
//! is nothing to wait for.

use kvdepot_transfer::Op;

use super::near::{Layout, Near};
use super::plan::{Batch, Plan};
use super::table::{HEAD, Movers};
use crate::bench::report::{Report, Row};
use crate::bench::rounds::{Rounds, median};
use crate::error::Error;

pub(super) const METRICS: [&str; 2] = ["read_rtt_us", "read_rtt_over_pingpong"];

const BYTES: u64 = 4096;
/// Trips of a round, whose median counts.
const TRIPS: usize = 200;
/// Rounds for one of the others: whether both ends have one processor or two, which the scheduler
/// decides anew now and then, is worth a factor of three to either.
const SHORT: usize = 10;
/// Bytes of all.
pub(super) const ALL: u64 = TRIPS as u64 * BYTES;

pub(super) fn run(
    plan: &Plan,
    movers: &Movers<'_>,
    shared: Option<&Near>,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let layout = Layout::new(Batch {
        chunks: TRIPS,
        chunk: BYTES,
    });
    let (asked, said) = (HEAD, HEAD + BYTES as usize);
    let rounds = plan.rounds * SHORT;
    let ours = 1 + usize::from(shared.is_some());
    let times = Rounds::run_ways(rounds, 1, ours, &report.interrupt, |contender| {
        let each = match (contender, shared) {
            (0, _) => movers.plain.ping_pong(asked, said, layout.pieces.len())?,
            (1, Some(shared)) => shared.one_by_one(Op::Read, BYTES, &layout.pieces)?,
            _ => movers.near.one_by_one(Op::Read, BYTES, &layout.pieces)?,
        };
        Ok(median(each))
    })?;
    let (pong, ratio) = times.against(0);
    let row = |metric, unit, value, limit| Row {
        bench: "transfer",
        case: plan.case(Op::Read, BYTES, 1),
        metric,
        unit,
        value,
        limit: Some(limit),
        ratio: Some(ratio),
        rounds,
        limit_name: Some("a ping-pong of that size"),
    };
    let mut rows = vec![
        row(METRICS[0], "us", times.value() * 1e6, pong * 1e6),
        row(METRICS[1], "ratio", times.quotient(ours, 0), 1.0),
    ];
    if shared.is_some() {
        let mut near = row(METRICS[0], "us", times.median(1) * 1e6, pong * 1e6);
        near.case["transport"] = "shared".into();
        near.ratio = Some(times.quotient(0, 1));
        rows.insert(1, near);
    }
    let wanted = rows.into_iter().filter(|row| plan.wants(row.metric));
    wanted.into_iter().try_for_each(|row| report.row(row))
}
