//! `lookup_us`: the longest beginning of a prompt, among many sessions.

use std::time::Instant;

use serde_json::json;

use super::kept::{Cut, Kept, fail};
use super::plan::{Io, Plan};
use crate::bench::media::Region;
use crate::bench::random::Random;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::median;
use crate::error::Error;
use crate::leftovers::Scratch;

/// What a lookup does is not about rows: small ones.
const CUT: Cut = Cut {
    row: 16,
    tokens: 256,
};

/// Tokens of a session: what sessions begin with in common, and what is behind.
const SHARED: usize = 1024;
const OWN: usize = 512;

/// Lookups of a round.
const LOOKUPS: usize = 200;

pub(super) fn run(plan: &Plan, report: &mut Report<'_>) -> Result<(), Error> {
    let scratch = Scratch::new(&plan.dir)?;
    let state = Region::filled(1 << 20)?;
    let folder = scratch.path().join("depot");
    // Room for a file's page and more for each block of each session.
    let room = (plan.sessions + 1) * 64 * 1024;
    let kept = Kept::open(&folder, Io::Buffered, CUT, room)?;
    let mut random = Random(43);
    // Ten conversations a beginning, as with a system prompt.
    let tokens = |number: usize| -> Vec<u32> {
        let shared = (0..SHARED).map(|at| (at + number / 10 * 7919) as u32);
        let own = (0..OWN).map(|at| (at + (number + 1) * 104_729) as u32);
        shared.chain(own).collect()
    };
    for number in 0..plan.sessions {
        report.interrupt.check()?;
        kept.save(&tokens(number), &state, Vec::new())?;
    }
    let mut times = Vec::new();
    for round in 0..=plan.rounds {
        report.interrupt.check()?;
        for _ in 0..LOOKUPS {
            let mut prompt = tokens(random.next() as usize % plan.sessions);
            prompt.extend(0..100);
            let begun = Instant::now();
            let found = kept.sessions.lookup(&prompt, 1).map_err(fail)?;
            let taken = begun.elapsed().as_secs_f64() * 1e6;
            if found.first().map(|one| one.tokens.len()) != Some(SHARED + OWN) {
                return Err(Error::Bench("a saved session was not found".into()));
            }
            if round > 0 {
                times.push(taken);
            }
        }
    }
    report.row(Row {
        bench: "session",
        case: json!({"sessions": plan.sessions, "tokens": SHARED + OWN}),
        metric: "lookup_us",
        unit: "us",
        value: median(times),
        limit: None,
        ratio: None,
        rounds: plan.rounds,
        limit_name: None,
    })
}
