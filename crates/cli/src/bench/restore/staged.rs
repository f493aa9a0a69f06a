//! `staged_over_direct`: what the way through the staging slab costs.

use super::cells::{Cell, Runs};
use crate::bench::report::Row;

pub(super) fn row(cell: &Cell, runs: &Runs) -> Row {
    let value = runs.seconds.quotient(runs.mode(0), runs.mode(1));
    Row {
        bench: "restore",
        case: cell.case(),
        metric: "staged_over_direct",
        unit: "ratio",
        value,
        limit: Some(1.0),
        ratio: Some(value),
        rounds: runs.rounds,
        limit_name: Some("direct"),
    }
}
