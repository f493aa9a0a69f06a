//! `kvdepot bench files`: what the tiers on files reach, against raw reads and writes of the same
//! sizes.
//!
//! `tier` is a depot with its `blocks`. `store` has one and plain files, and `moves` times loads
//! and dumps of both. `beside` does so for depots beside anything else: `objects` for those of a
//! bucket, `rings` for those of a 3FS. The others have a metric each.

#[cfg(feature = "s3")]
mod bare;
mod beside;
mod blocks;
mod commit;
mod hot;
mod hung;
mod keyed;
mod lookup;
mod moves;
#[cfg(feature = "s3")]
mod objects;
mod plan;
mod raw;
mod rings;
mod store;
mod tier;

use super::media::Region;
use super::report::Report;
use crate::args::Files;
use crate::error::Error;
use plan::{Cell, OBJECTS, Plan, RINGS};
use store::Store;

pub(super) fn cases(args: &Files) -> usize {
    let plan = Plan::new(args);
    let moves = plan.cells.iter().map(|cell| cell.depths.len()).sum();
    let others = [
        "commit_us",
        "lookup_hit",
        "hot_through_pipeline",
        keyed::METRICS[0],
    ];
    let others = others
        .iter()
        .filter(|metric| plan.has_files() && plan.wants(metric));
    others.count() + if plan.moves() { moves } else { 0 } + plan.hung().count()
}

pub(super) fn run(args: &Files, report: &mut Report<'_>) -> Result<(), Error> {
    let plan = Plan::new(args);
    plan.check(args)?;
    let region = Region::filled(plan.batch)?;
    if plan.moves() {
        for cell in &plan.cells {
            match cell.tier.as_str() {
                OBJECTS => objects(&plan, cell, &region, report)?,
                RINGS => rings::run(&plan, cell, &region, report)?,
                _ => on_disk(&plan, cell, &region, report)?,
            }
        }
    }
    for tier in plan.hung() {
        match tier.as_str() {
            RINGS => hung::rings(&plan, &region, report)?,
            _ => hung_objects(&plan, &region, report)?,
        }
        report.case_done("hits of the first tier while the next tier hangs");
    }
    if !plan.has_files() {
        return Ok(());
    }
    if plan.wants("commit_us") {
        commit::run(&plan, report)?;
        report.case_done("commits");
    }
    if lookup::METRICS.iter().any(|metric| plan.wants(metric)) {
        lookup::run(&plan, report)?;
        report.case_done("lookups");
    }
    if plan.wants("hot_through_pipeline") {
        hot::run(&plan, &region, report)?;
        report.case_done("hits of the first tier");
    }
    let posix = plan.cells.iter().find(|cell| cell.tier == "Posix");
    if let Some(cell) = posix
        && keyed::METRICS.iter().any(|metric| plan.wants(metric))
    {
        keyed::run(&plan, cell, &region, report)?;
        report.case_done("blocks with a MAC key");
    }
    Ok(())
}

fn on_disk(
    plan: &Plan,
    cell: &Cell,
    region: &Region,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let mut store = Store::open(plan, cell, region, &report.interrupt)?;
    for depth in cell.depths.iter().copied() {
        moves::run(plan, cell, depth, region, &mut store, report)?;
        let Cell { tier, block, .. } = cell;
        report.case_done(&format!("{tier}, {block} bytes, {depth} in flight"));
    }
    Ok(())
}

#[cfg(feature = "s3")]
fn objects(
    plan: &Plan,
    cell: &Cell,
    region: &Region,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    objects::run(plan, cell, region, report)
}

#[cfg(feature = "s3")]
fn hung_objects(plan: &Plan, region: &Region, report: &mut Report<'_>) -> Result<(), Error> {
    hung::objects(plan, region, report)
}

#[cfg(not(feature = "s3"))]
fn objects(_: &Plan, _: &Cell, _: &Region, _: &mut Report<'_>) -> Result<(), Error> {
    without_s3()
}

#[cfg(not(feature = "s3"))]
fn hung_objects(_: &Plan, _: &Region, _: &mut Report<'_>) -> Result<(), Error> {
    without_s3()
}

#[cfg(not(feature = "s3"))]
fn without_s3() -> Result<(), Error> {
    Err(Error::Usage {
        field: "--tier",
        value: OBJECTS.into(),
        allowed: "Posix, Nvme, Ds3fs: this command was built without s3".into(),
    })
}
