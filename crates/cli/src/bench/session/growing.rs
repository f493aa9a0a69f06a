//! States that grow, and are saved again and again: what that writes, and how long it takes.

use serde_json::json;

use super::kept::{CUT, Cut, Kept};
use super::one_file::OneFile;
use super::plan::{Io, Plan};
use super::raw::{Raw, remove, staged};
use super::whole::{Memory, row};
use crate::bench::random::Random;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::median;
use crate::error::Error;
use crate::leftovers::Scratch;

pub(super) const SERIES: [&str; 2] = ["checkpoint_save_ms", "restore_ms"];

/// As a checkpoint of ds4 grows: 13.5 KiB a token, and 23 MiB that do not grow.
const DS4: Cut = Cut {
    row: 13_824,
    tokens: 512,
};
const FIXED: usize = 23 << 20;

/// `write_amplification`: what the files grow by, over the rows of the tokens that are new.
pub(super) fn amplification(
    plan: &Plan,
    io: Io,
    memory: &Memory,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let piece = (CUT.row * CUT.tokens) as f64;
    let room = memory.state.whole().len() / CUT.row;
    // 512 behind 8,192 tokens, or behind as many whole pieces as there is memory for.
    let more = 512.min(room / CUT.tokens / 2 * CUT.tokens);
    let base = 8192.min(room / CUT.tokens * CUT.tokens - more);
    let mut random = Random(41);
    let most = (room / 21).min(2000);
    let steps: Vec<usize> = (0..20).map(|_| 1 + random.next() as usize % most).collect();
    let workloads = [
        ("append512", base, vec![more], 1.1),
        ("random20", 0, steps.clone(), {
            let new: usize = steps.iter().sum();
            1.1 + 20.0 * piece / (new * CUT.row) as f64
        }),
    ];
    for (name, base, steps, limit) in workloads {
        report.interrupt.check()?;
        let scratch = Scratch::new(&plan.dir)?;
        let folder = scratch.path().join("depot");
        let mut kept = Kept::open(&folder, io, CUT, memory.state.whole().len())?;
        let all = kept.conversation(base + steps.iter().sum::<usize>());
        if base > 0 {
            kept.save(&all[..base], &memory.state, Vec::new())?;
        }
        kept.settle()?;
        let before = kept.on_disk()?;
        let mut end = base;
        for step in &steps {
            end += step;
            kept.save(&all[..end], &memory.state, Vec::new())?;
        }
        kept.settle()?;
        let value = (kept.on_disk()? - before) as f64 / ((end - base) * CUT.row) as f64;
        let case =
            json!({"bytes": end * CUT.row, "path": "delta", "io": io.name(), "workload": name});
        let row = row(plan, case, "write_amplification", value);
        report.row(row.with(value, limit, limit / value, Some("the target")))?;
    }
    Ok(())
}

/// Checkpoints at so many tokens.
fn series(most: usize) -> Vec<usize> {
    let room = most.saturating_sub(FIXED) / DS4.row;
    let step = if room >= 10_000 { 10_000 } else { 500 };
    (1..=13)
        .map(|at| at * step)
        .take_while(|at| *at <= room)
        .collect()
}

fn bytes_at(tokens: usize) -> usize {
    FIXED + tokens * DS4.row
}

/// How a checkpoint is saved.
const PATHS: [&str; 4] = ["staged", "direct", "delta", "one_file"];

/// Milliseconds of each checkpoint, by way and round.
struct Series<'a> {
    plan: &'a Plan,
    io: Io,
    memory: &'a Memory,
    steps: Vec<usize>,
    saves: [Vec<Vec<f64>>; 4],
    restores: Vec<f64>,
}

/// `checkpoint_save_ms` and `restore_ms`.
pub(super) fn checkpoints(
    plan: &Plan,
    io: Io,
    memory: &Memory,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let steps = series(memory.state.whole().len());
    let Some(last) = steps.last().copied() else {
        return Ok(());
    };
    let mut series = Series {
        plan,
        io,
        memory,
        saves: std::array::from_fn(|_| vec![Vec::new(); steps.len()]),
        steps,
        restores: Vec::new(),
    };
    for round in 0..=plan.rounds {
        for turn in 0..PATHS.len() {
            let path = (round + turn) % PATHS.len();
            let taken = series.run(PATHS[path], report)?;
            if round > 0 {
                for (all, one) in series.saves[path].iter_mut().zip(taken) {
                    all.push(one * 1e3);
                }
            }
        }
    }
    series.report(report)?;
    if plan.wants("restore_ms") {
        // The first one warms up.
        let restores = series.restores.split_off(1.min(series.restores.len() - 1));
        let case = json!({"tokens": last, "bytes": bytes_at(last), "io": io.name()});
        let row = row(plan, case, "restore_ms", median(restores));
        report.row(Row { unit: "ms", ..row })?;
    }
    Ok(())
}

impl Series<'_> {
    /// Saves all checkpoints in one way; seconds of each.
    fn run(&mut self, path: &str, report: &Report<'_>) -> Result<Vec<f64>, Error> {
        let scratch = Scratch::new(&self.plan.dir)?;
        let folder = scratch.path().join("depot");
        let mut ways = Raw::ways(self.io, self.memory.state.whole())?;
        let mut again = Raw::ways(self.io, self.memory.into.whole())?;
        let room = 8 * self.memory.state.whole().len();
        let mut kept = Kept::open(&folder, self.io, DS4, room)?;
        let all = kept.conversation(self.steps.last().copied().unwrap_or(0));
        let mut taken = Vec::new();
        for tokens in self.steps.clone() {
            report.interrupt.check()?;
            kept.settle()?;
            if path == "staged" {
                // Whole requests of a MiB.
                let bytes = bytes_at(tokens).next_multiple_of(1 << 20);
                let bytes = bytes.min(self.memory.state.whole().len() >> 20 << 20);
                let each = (&mut ways[0], &mut again[0]);
                taken.push(staged(each, scratch.path(), bytes)?);
                continue;
            }
            let fixed = self.memory.state.whole().slice(tokens * DS4.row, FIXED)?;
            let objects = vec![("window".to_owned(), fixed)];
            let state = &self.memory.state;
            if path == "one_file" {
                let one = OneFile::new(scratch.path(), self.io)?;
                taken.push(one.save(&all[..tokens], DS4, state, objects)?);
                remove(one.path())?;
            } else if path == "delta" {
                taken.push(kept.save(&all[..tokens], state, objects)?.0);
            } else {
                let new = kept.conversation(tokens);
                let (seconds, saved) = kept.save(&new, state, objects)?;
                kept.remove(saved.id)?;
                taken.push(seconds);
            }
        }
        if path == "delta" && self.plan.wants("restore_ms") {
            kept.cool()?;
            let seconds = kept.restore(&all, &self.memory.into)?;
            self.restores.push(seconds * 1e3);
        }
        Ok(taken)
    }

    fn report(&self, report: &mut Report<'_>) -> Result<(), Error> {
        if !self.plan.wants("checkpoint_save_ms") {
            return Ok(());
        }
        for (path, all) in PATHS.iter().zip(&self.saves) {
            for (at, (tokens, times)) in self.steps.iter().copied().zip(all).enumerate() {
                let (path, layout) = match *path {
                    "one_file" => ("direct", "one_file"),
                    "staged" => ("staged", "one_file"),
                    path => (path, "pieces"),
                };
                let case = json!({
                    "tokens": tokens, "bytes": bytes_at(tokens), "path": path,
                    "io": self.io.name(), "layout": layout,
                });
                let value = median(times.clone());
                let row = Row {
                    unit: "ms",
                    ..row(self.plan, case, "checkpoint_save_ms", value)
                };
                report.row(match path {
                    "delta" => {
                        let before = at.checked_sub(1).map_or(0, |before| self.steps[before]);
                        let new = FIXED + (tokens - before) * DS4.row;
                        let share = new as f64 / bytes_at(tokens) as f64;
                        let limit = median(self.saves[1][at].clone()) * share;
                        row.with(value, limit, limit / value, Some("direct's share"))
                    }
                    _ => row,
                })?;
            }
        }
        Ok(())
    }
}
