//! `kvdepot bench pressure`: what prompts and calls that are large do to the others.

mod calls;
mod heads;
mod hits;
mod small;
mod store;

use super::report::Report;
use crate::args::Pressure;
use crate::error::Error;
use crate::leftovers::Scratch;

const TIERS: [&str; 5] = ["Cache", "Dax", "Nvme", "Posix", "Cache|Posix"];

/// What is measured, where.
struct Plan<'a> {
    args: &'a Pressure,
    tiers: Vec<&'a str>,
}

impl Plan<'_> {
    fn is_wanted(&self, metric: &str) -> bool {
        let metrics = &self.args.metrics;
        metrics.is_empty() || metrics.iter().any(|wanted| wanted == metric)
    }
}

fn plan(args: &Pressure) -> Plan<'_> {
    let tiers = match args.tiers.is_empty() {
        true => TIERS.to_vec(),
        false => args.tiers.iter().map(String::as_str).collect(),
    };
    Plan { args, tiers }
}

pub(super) fn cases(args: &Pressure) -> usize {
    let plan = plan(args);
    let count = |metric, cases: usize| if plan.is_wanted(metric) { cases } else { 0 };
    let keys: usize = plan
        .tiers
        .iter()
        .map(|tier| calls::keys(args, tier).len())
        .sum();
    let tiers = plan.tiers.len();
    count("head_kept", tiers * heads::ADMISSIONS.len())
        + count("small_p99_ms", tiers * small::BESIDE.len())
        + count("call_ms", keys)
        + count("token_hit_rate", tiers)
}

pub(super) fn run(args: &Pressure, report: &mut Report<'_>) -> Result<(), Error> {
    let plan = plan(args);
    let dir = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let scratch = Scratch::new(&dir)?;
    let dir = scratch.path();
    for tier in &plan.tiers {
        if plan.is_wanted("head_kept") {
            heads::run(dir, tier, report)?;
        }
        if plan.is_wanted("small_p99_ms") {
            small::run(args, dir, tier, report)?;
        }
        if plan.is_wanted("call_ms") {
            calls::run(args, dir, tier, report)?;
        }
        if plan.is_wanted("token_hit_rate") {
            hits::run(args, dir, tier, report)?;
        }
    }
    Ok(())
}
