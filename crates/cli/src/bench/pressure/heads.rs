//! How much of a prompt that is in use stays stored while large prompts are stored.

use std::path::Path;

use kvdepot_store::Key;
use serde_json::json;

use super::store::{Memory, STEP, Store, row};
use crate::bench::random::Random;
use crate::bench::report::Report;
use crate::error::Error;

pub(super) const ADMISSIONS: [&str; 2] = ["all", "learned"];

/// Blocks of the last tier, and of the prompt in use.
const TIER: u64 = 1024;
const HOT: usize = 64;
/// Prompts of one step each that fill the tier first.
const USUAL: usize = 60;

/// Size of each large prompt, in quarters of the tier.
const LARGE: [u64; 3] = [2, 4, 8];

pub(super) fn run(dir: &Path, tier: &str, report: &mut Report<'_>) -> Result<(), Error> {
    for admission in ADMISSIONS {
        let store = Store::new(dir, tier, TIER, admission)?;
        let memory = Memory::new(STEP)?;
        let mut random = Random(29);
        let mut prompt = |blocks: usize| (0..blocks).map(|_| random.key()).collect::<Vec<Key>>();
        let hot = prompt(HOT);
        for _ in 0..USUAL {
            report.interrupt.check()?;
            store.serve(&prompt(STEP), &memory)?;
        }
        // Learned admission may decline its blocks at first.
        while store.serve(&hot, &memory)? < HOT {
            report.interrupt.check()?;
        }
        let mut kept = HOT;
        for quarters in LARGE {
            report.interrupt.check()?;
            store.serve(&prompt((quarters * TIER / 4) as usize), &memory)?;
            store.drain()?;
            kept = kept.min(store.serve(&hot, &memory)?);
        }
        let case = json!({"tier": tier, "admission": admission});
        report.row(row("head_kept", "", case, kept as f64 / HOT as f64))?;
        report.case_done(tier);
    }
    Ok(())
}
