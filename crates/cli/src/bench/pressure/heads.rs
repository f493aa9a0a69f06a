//! What of a prompt that is used again and again stays, while larger ones pass.

use std::path::Path;

use kvdepot_store::Key;
use serde_json::json;

use super::store::{Memory, STEP, Store, row};
use crate::bench::random::Random;
use crate::bench::report::Report;
use crate::error::Error;

pub(super) const ADMISSIONS: [&str; 2] = ["all", "learned"];

/// Blocks of a tier, and of the prompt that is used.
const TIER: u64 = 1024;
const HOT: usize = 64;
/// Prompts of usual size that are there before.
const USUAL: usize = 60;

/// Quarters of the tier that the large prompts have.
const LARGE: [u64; 3] = [2, 4, 8];

pub(super) fn run(dir: &Path, tier: &str, report: &mut Report<'_>) -> Result<(), Error> {
    for admission in ADMISSIONS {
        let store = Store::new(dir, tier, TIER, admission)?;
        let memory = Memory::new(STEP);
        let mut random = Random(29);
        let mut prompt = |blocks: usize| (0..blocks).map(|_| random.key()).collect::<Vec<Key>>();
        let hot = prompt(HOT);
        for _ in 0..USUAL {
            report.interrupt.check()?;
            store.serve(&prompt(STEP), &memory)?;
        }
        // Whatever is stored at the first sight alone, it is there in the end.
        while store.serve(&hot, &memory)? < HOT {
            report.interrupt.check()?;
        }
        let mut kept = HOT;
        for quarters in LARGE {
            report.interrupt.check()?;
            store.serve(&prompt((quarters * TIER / 4) as usize), &memory)?;
            // What was written to a nearer tier only does not count.
            store.drain()?;
            kept = kept.min(store.serve(&hot, &memory)?);
        }
        let case = json!({"tier": tier, "admission": admission});
        report.row(row("head_kept", "", case, kept as f64 / HOT as f64))?;
        report.case_done(tier);
    }
    Ok(())
}
