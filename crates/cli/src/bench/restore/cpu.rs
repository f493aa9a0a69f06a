//! `cpu_over_copy`: processor time of the lanes and the caller, over that of the plain copy.

use super::cells::{Cell, MODES, Runs};
use crate::bench::report::Row;

pub(super) fn rows(cell: &Cell, runs: &Runs) -> Vec<Row> {
    let Some((copy, _)) = runs.seconds.best() else {
        return Vec::new();
    };
    let row = |(number, mode): (usize, &&str)| {
        let value = runs.cpu.quotient(runs.mode(number), copy);
        Row {
            bench: "restore",
            case: cell.case_with(mode),
            metric: "cpu_over_copy",
            unit: "ratio",
            value,
            limit: Some(1.0),
            // Less is better.
            ratio: Some(1.0 / value),
            rounds: runs.rounds,
            limit_name: Some(runs.limit_name(copy)),
        }
    };
    MODES.iter().enumerate().map(row).collect()
}
