//! Hit rate of a trace among documents that are larger than the tier.

use std::collections::HashSet;
use std::path::Path;

use kvdepot_store::Key;
use serde_json::json;

use super::store::{Memory, STEP, Store, is_of_files, row};
use crate::args::Pressure;
use crate::bench::random::Random;
use crate::bench::report::Report;
use crate::bench::trace::{self, Prompt};
use crate::error::Error;

/// One document in so many requests.
const EACH: usize = 100;
/// Requests at most.
const QUICK: usize = 2000;
/// Requests over a tier of files at most: each block costs several system calls.
const FILES: usize = 3000;

/// Blocks of the tier, of a hundred different ones.
const PART: usize = 20;

pub(super) fn run(
    args: &Pressure,
    dir: &Path,
    tier: &str,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let mut prompts = trace::requests(args.trace.as_deref(), args.quick)?.prompts;
    match (args.quick, is_of_files(tier)) {
        (true, _) => prompts.truncate(QUICK),
        (false, true) => prompts.truncate(FILES),
        (false, false) => {}
    }
    let blocks: HashSet<u64> = prompts
        .iter()
        .flat_map(|prompt| prompt.blocks.iter().copied())
        .collect();
    let capacity = (blocks.len() * PART / 100).max(64);
    let [without, with] =
        [false, true].map(|documents| replay(dir, tier, &prompts, (capacity, documents), report));
    let (without, with) = (without?, with?);
    let case = json!({"tier": tier, "blocks": capacity, "requests": prompts.len()});
    let row = row("token_hit_rate", "", case, with);
    report.row(row.with(with, without, with / without, Some("without documents")))?;
    report.case_done(tier);
    Ok(())
}

/// Returns the part of the blocks in the trace that were stored when a request asked for them.
fn replay(
    dir: &Path,
    tier: &str,
    prompts: &[Prompt],
    (capacity, documents): (usize, bool),
    report: &Report<'_>,
) -> Result<f64, Error> {
    let store = Store::new(dir, tier, capacity as u64, "all")?;
    let memory = Memory::new(STEP)?;
    let mut random = Random(53);
    let (mut there, mut all) = (0, 0);
    for (number, prompt) in (1..).zip(prompts) {
        report.interrupt.check()?;
        let keys: Vec<Key> = prompt.blocks.iter().map(|at| Random(*at).key()).collect();
        there += store.serve(&keys, &memory)?;
        all += keys.len();
        if documents && number % EACH == 0 {
            let document: Vec<Key> = (0..capacity * 3 / 2).map(|_| random.key()).collect();
            store.serve(&document, &memory)?;
        }
    }
    Ok(there as f64 / all.max(1) as f64)
}
