//! `first_hit`: from the opening of an arena until its first block is in the caller's memory.

use std::path::Path;
use std::time::Instant;

use kvdepot_store::{BlockBuffers, Buffer};
use serde_json::json;

use super::served::Served;
use crate::bench::media::spec;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::median;
use crate::error::Error;

const BLOCK: usize = 4096;
const BLOCKS: usize = 100_000;
/// With `--quick`.
const BLOCKS_QUICK: usize = 10_000;

pub(super) fn run(
    dir: &Path,
    quick: bool,
    rounds: usize,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let blocks = if quick { BLOCKS_QUICK } else { BLOCKS };
    let mut served = Served::new(dir, blocks, BLOCK, 1)?;
    let mut times = Vec::new();
    for round in 0..=rounds {
        report.interrupt.check()?;
        served.depot.close();
        let start = Instant::now();
        served.open_again()?;
        let found = served.depot.opening().blocks;
        let ns = served.depot.namespace(&spec())?;
        let buffer = Buffer::from_vec(vec![0; BLOCK]);
        let key = served.keys[round * 37 % blocks];
        let task = ns.get(vec![key], BlockBuffers::whole([buffer.clone()]))?;
        let got = task.wait(None)?;
        let seconds = start.elapsed().as_secs_f64();
        if got != [true] || buffer.to_vec() != [7; BLOCK] || found != blocks as u64 {
            return Err(Error::Bench(format!(
                "only {found} of {blocks} blocks were recovered"
            )));
        }
        if round > 0 {
            times.push(seconds * 1e3);
        }
    }
    report.row(Row {
        bench: "restore",
        case: json!({"blocks": blocks}),
        metric: "first_hit",
        unit: "ms",
        value: median(times),
        limit: None,
        ratio: None,
        rounds,
        limit_name: None,
    })
}
