//! The tier `Ds3fs` beside `Posix` on the same file system.

use super::beside::{Beside, Contender, Ours, shuffled};
use super::plan::{Cell, Plan, RINGS};
use super::tier::{Tier, open, settings};
use crate::bench::media::Region;
use crate::bench::report::Report;
use crate::error::Error;
use crate::leftovers::Scratch;

pub(super) fn run(
    plan: &Plan,
    cell: &Cell,
    region: &Region,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let scratch = Scratch::new(plan.dir_of(RINGS))?;
    let block = cell.block;
    let count = plan.size / block;
    let slots = shuffled(region, block);
    let ours = |name: &'static str| {
        let path = scratch.path().join(name);
        let depot = open(name, &settings(&path, name, true, "process", plan, block))?;
        let tier = Tier::filled(depot, Some(path), (block, count), region, &report.interrupt)?;
        // Whether 3FS keeps payloads in the page cache is its own affair.
        let tier = if name == RINGS {
            tier.maybe_cached()?
        } else {
            tier
        };
        Ok::<_, Error>(Box::new(Ours::new(name, tier, region, &slots)) as Box<dyn Contender>)
    };
    let both = vec![ours("Posix")?, ours(RINGS)?];
    Beside::new(plan, cell, both, &slots).measure_all(report)
}
