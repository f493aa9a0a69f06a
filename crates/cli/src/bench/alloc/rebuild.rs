//! How soon a pool is back from the list of its live extents.

use std::time::Instant;

use kvdepot_alloc::{Extent, Pool};
use serde_json::json;

use super::contenders::refused;
use super::plan::Plan;
use crate::bench::random::Random;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::Rounds;
use crate::error::Error;

const GRANULE: u64 = 4096;

/// With gaps or without, in the order of addresses or in none.
pub(super) const CASES: [(bool, &str); 4] = [
    (false, "address"),
    (false, "random"),
    (true, "address"),
    (true, "random"),
];

pub(super) fn run(plan: &Plan, report: &mut Report<'_>) -> Result<(), Error> {
    for (gaps, order) in CASES {
        let mut random = Random(17);
        let mut live = Vec::with_capacity(plan.extents);
        let mut end = 0;
        for _ in 0..plan.extents {
            // Every second extent has a gap before it, on average.
            let gap = if gaps {
                random.below(2) * random.within(1, 64)
            } else {
                0
            };
            let offset = end + gap * GRANULE;
            let len = random.within(1, 256) * GRANULE;
            live.push(Extent { offset, len });
            end = offset + len;
        }
        if order == "random" {
            random.shuffle(&mut live);
        }
        let times = Rounds::run(plan.rounds, 0, &report.interrupt, |_| {
            let given = live.clone();
            let start = Instant::now();
            let pool = Pool::rebuild(end, GRANULE, given).map_err(refused)?;
            let seconds = start.elapsed().as_secs_f64();
            if pool.live_count() != live.len() {
                return Err(Error::Bench("the rebuild lost extents".into()));
            }
            Ok(seconds)
        })?;
        report.row(Row {
            bench: "alloc",
            case: json!({"extents": plan.extents, "gaps": gaps, "order": order}),
            metric: "rebuild",
            unit: "ms",
            value: times.value() * 1e3,
            limit: None,
            ratio: None,
            rounds: plan.rounds,
            limit_name: None,
        })?;
        report.case_done("rebuild");
    }
    Ok(())
}
