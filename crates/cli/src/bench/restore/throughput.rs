//! `throughput`: bytes a second of a get, direct and staged, and of the best plain copy.

use super::cells::{Cell, MODES, Runs};
use crate::bench::report::Row;

pub(super) fn rows(cell: &Cell, runs: &Runs) -> Vec<Row> {
    // Of all calls of a run together.
    let bytes = cell.run_bytes() as f64;
    let best = runs.seconds.best();
    let row = |(number, mode): (usize, &&str)| {
        let ours = runs.mode(number);
        Row {
            bench: "restore",
            case: cell.case_with(mode),
            metric: "throughput",
            unit: "GB/s",
            value: bytes / runs.seconds.median(ours) / 1e9,
            limit: best.map(|(_, seconds)| bytes / seconds / 1e9),
            ratio: best.map(|(limit, _)| runs.seconds.quotient(limit, ours)),
            rounds: runs.rounds,
            limit_name: best.map(|(limit, _)| runs.limit_name(limit)),
        }
    };
    MODES.iter().enumerate().map(row).collect()
}
