//! `keyed_over_plain` and `keyed_cpu_s_per_gib`: cold loads of blocks of 1 MiB from `Posix` that
//! are authenticated (`mac_key_file`), beside the same without a key.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::beside::{Beside, Contender, Ours, shuffled};
use super::plan::{Cell, Plan};
use super::tier::{Tier, open, settings};
use crate::bench::media::Region;
use crate::bench::report::Report;
use crate::error::Error;
use crate::leftovers::Scratch;

pub(super) const METRICS: [&str; 2] = ["keyed_over_plain", "keyed_cpu_s_per_gib"];

const BLOCK: usize = 1 << 20;

/// `cell` is the case of `Posix` whose depths and way are taken.
pub(super) fn run(
    plan: &Plan,
    cell: &Cell,
    region: &Region,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    // One block at least.
    let few = (plan.batch < BLOCK)
        .then(|| Region::filled(BLOCK))
        .transpose()?;
    let region = few.as_ref().unwrap_or(region);
    let plan = &Plan {
        size: plan.size.max(BLOCK),
        batch: plan.batch.max(BLOCK),
        ..plan.clone()
    };
    let cell = &Cell {
        block: BLOCK,
        ..cell.clone()
    };
    let count = plan.size / BLOCK;
    let slots = shuffled(region, BLOCK);
    let scratch = Scratch::new(&plan.dir)?;
    let keys = keys(scratch.path())?;
    let ours = |name: &'static str, is_keyed: bool| {
        let path = scratch.path().join(name);
        let mut settings = settings(&path, "Posix", cell.direct, "process", plan, BLOCK);
        if is_keyed {
            settings["mac_key_file"] = json!(keys);
        }
        let depot = open("Posix", &settings)?;
        let interrupt = &report.interrupt;
        let tier = Tier::filled(depot, Some(path), (BLOCK, count), region, interrupt)?;
        let tier = if cell.direct { tier } else { tier.cached()? };
        Ok::<_, Error>(Box::new(Ours::new(name, tier, region, &slots)) as Box<dyn Contender>)
    };
    let both = vec![ours("without a key", false)?, ours("with a key", true)?];
    let mut all = Beside::new(plan, cell, both, &slots);
    let [rate, cpu] = METRICS;
    for depth in cell.depths.iter().copied() {
        let taken = all.load(depth, &report.interrupt)?;
        let case = cell.case(depth);
        if plan.wants(rate) {
            report.row(all.rate(case.clone(), rate, &taken))?;
        }
        if plan.wants(cpu) {
            report.row(all.cpu(case, cpu, &taken, &report.interrupt)?)?;
        }
    }
    Ok(())
}

/// A file with one key, of this user alone.
fn keys(dir: &Path) -> Result<PathBuf, Error> {
    let path = dir.join("keys");
    let mut options = OpenOptions::new();
    let file = options.write(true).create_new(true).mode(0o600).open(&path);
    let line = format!("- {}\n", "17".repeat(32));
    file.and_then(|mut file| file.write_all(line.as_bytes()))
        .map_err(Error::io(&path))?;
    Ok(path)
}
