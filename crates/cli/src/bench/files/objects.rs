//! The tier `S3` beside `object_store` used bare by as many requests at a time.

use kvdepot_store::Depot;
use serde_json::json;

use super::bare::{self, Bare, Bucket, Objects};
use super::beside::{Beside, Contender, Ours, shuffled};
use super::plan::{Cell, OBJECTS, Plan};
use super::tier::{self, Tier};
use crate::bench::media::Region;
use crate::bench::report::Report;
use crate::error::Error;

pub(super) fn run(
    plan: &Plan,
    cell: &Cell,
    region: &Region,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let Some(bucket) = &Bucket::of(plan) else {
        return Ok(());
    };
    let run = format!("kvdepot-bench-{}", std::process::id());
    // Before the others: it chooses who encrypts in this process.
    let depot = depot(plan, cell, bucket, &run)?;
    let measured = measure(plan, cell, bucket, (&run, depot), region, report);
    // Its depot is closed.
    let clients = bare::clients(bucket, &run)?;
    let cleared = clients.first().map_or(Ok(()), Bare::clear);
    measured.and(cleared)
}

fn measure(
    plan: &Plan,
    cell: &Cell,
    bucket: &Bucket,
    (run, depot): (&str, Depot),
    region: &Region,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let block = cell.block;
    let count = plan.size / block;
    let slots = shuffled(region, block);
    let tier = Tier::filled(depot, None, (block, count), region, &report.interrupt)?;
    let objects = Objects::new(count, region, block, &slots)?;
    let clients = bare::clients(bucket, run)?;
    if let Some(first) = clients.first() {
        objects.fill(first, &report.interrupt)?;
    }
    let client = |bare| Box::new(bare::Client::new(bare, &objects)) as Box<dyn Contender>;
    let mut contenders: Vec<_> = clients.into_iter().map(client).collect();
    contenders.push(Box::new(Ours::new(OBJECTS, tier, region, &slots)));
    Beside::new(plan, cell, contenders, &slots).measure_all(report)
}

/// A depot of the tier alone, with room for what is measured.
fn depot(plan: &Plan, cell: &Cell, bucket: &Bucket, run: &str) -> Result<Depot, Error> {
    let url = bucket.url.trim_end_matches('/');
    let written = (plan.rounds + 2) as u64 * plan.batch as u64;
    let deepest = cell.depths.iter().copied().max().unwrap_or(1);
    let mut s3 = json!({
        "url": format!("{url}/{run}/tier"),
        // The oldest would go otherwise.
        "capacity": 2 * (plan.size as u64 + written) + (1 << 30),
        // As many as are asked for at a time, both ways.
        "requests": (2 * deepest).clamp(64, 1024),
    });
    if let Some(endpoint) = &bucket.endpoint {
        s3["endpoint"] = endpoint.as_str().into();
        s3["allow_http"] = endpoint.starts_with("http://").into();
    }
    tier::open(OBJECTS, &json!({"socket": "off", "s3": s3}))
}
