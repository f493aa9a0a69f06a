//! Two states of the tree, measured in pairs: the command of a commit and that of the working tree
//! take turns, so that what slows the machine slows both. docs/benchmarking.md says how to read it.

pub mod build;
pub mod interval;
pub mod rows;

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use build::Interrupt;
use interval::Interval;
use rows::Pairs;

/// What is measured. Pairs are the rounds that count, so each run has few of its own where rounds
/// are long, and more where they take milliseconds.
const COMMANDS: [(&str, &[&str]); 4] = [
    ("memory", &["--rounds", "1"]),
    ("restore", &["--rounds", "1"]),
    ("index", &["--rounds", "15"]),
    ("reopen", &["--rounds", "7"]),
];

/// What to compare, and how often.
#[derive(Debug)]
pub struct Options {
    /// The commit that the tree is compared with.
    pub base: String,
    /// Pairs of runs.
    pub rounds: usize,
    /// Only these; all when empty.
    pub commands: Vec<String>,
    /// Rows in place of the table.
    pub json: bool,
}

impl Options {
    /// Thirty rounds of all commands.
    #[must_use]
    pub fn new(base: &str) -> Options {
        Options {
            base: base.to_owned(),
            rounds: 30,
            commands: Vec::new(),
            json: false,
        }
    }

    /// Takes the name of a command.
    #[must_use]
    pub fn only(mut self, name: &str) -> Option<Options> {
        COMMANDS.iter().find(|(one, _)| *one == name)?;
        self.commands.push(name.to_owned());
        Some(self)
    }

    fn chosen(&self) -> Vec<(&'static str, &'static [&'static str])> {
        let wanted =
            |name: &str| self.commands.is_empty() || self.commands.iter().any(|one| one == name);
        COMMANDS
            .into_iter()
            .filter(|(name, _)| wanted(name))
            .collect()
    }
}

/// Builds both, measures, writes what was found; whether it will do.
///
/// # Errors
/// What [`build`] says; a benchmark that fails.
pub fn run(root: &Path, options: &Options) -> io::Result<bool> {
    let interrupt = Interrupt::catch()?;
    let mut stderr = io::stderr();
    writeln!(
        stderr,
        "building the command of {} and of the tree",
        options.base
    )?;
    let old = build::of_commit(root, &options.base, &interrupt)?;
    let new = build::of_tree(root, &interrupt)?;
    let chosen = options.chosen();
    let mut pairs: Vec<Pairs> = chosen.iter().map(|_| Pairs::default()).collect();
    for round in 0..options.rounds {
        writeln!(stderr, "round {} of {}", round + 1, options.rounds)?;
        for ((name, flags), pairs) in chosen.iter().zip(&mut pairs) {
            let mut figures = [rows::Figures::new(), rows::Figures::new()];
            // Whoever goes first finds the machine as the one before has left it: in turns.
            for side in [round % 2, 1 - round % 2] {
                let program: &PathBuf = [&old, &new][side];
                let output = program.with_extension("rows");
                let mut bench = Command::new(program);
                bench
                    .args(["bench", name, "--quick", "--json"])
                    .args(*flags);
                interrupt.run(&mut bench, Some(&output))?;
                let (rows, read) = rows::read(&fs::read_to_string(&output)?)?;
                figures[side] = read;
                if options.json {
                    for row in rows {
                        let side = ["old", "new"][side];
                        let row = json!({"round": round, "side": side, "row": row});
                        writeln!(io::stdout(), "{row}")?;
                    }
                }
            }
            let [old, new] = figures;
            pairs.add(old, new);
        }
    }
    let mut fine = true;
    for ((name, _), pairs) in chosen.iter().zip(&pairs) {
        fine &= tell(name, pairs, options)?;
    }
    Ok(fine)
}

/// Writes one command's cases and their mean; whether they will do.
fn tell(command: &str, pairs: &Pairs, options: &Options) -> io::Result<bool> {
    let mut fine = true;
    for case in pairs.cases() {
        let found = Interval::of(&case.logs);
        let lacks = options.rounds - case.logs.len();
        let holds = !case.gone && found.is_none_or(|found| found.case_holds());
        fine &= holds;
        line(options, command, &case.name, found, holds, lacks)?;
    }
    let mean = Interval::of(&pairs.means());
    let holds = mean.is_some_and(|mean| mean.mean_holds());
    let lacks = options.rounds - pairs.means().len();
    line(options, command, "geometric mean", mean, holds, lacks)?;
    Ok(fine && holds)
}

fn line(
    options: &Options,
    command: &str,
    case: &str,
    found: Option<Interval>,
    holds: bool,
    lacks: usize,
) -> io::Result<()> {
    let mut out = io::stdout();
    if options.json {
        let verdict = json!({
            "bench": command, "case": case, "ratio": found.map(|found| found.mean),
            "low": found.map(|found| found.low), "high": found.map(|found| found.high),
            "holds": holds, "rounds_without_ratio": lacks,
        });
        return writeln!(out, "{verdict}");
    }
    let numbers = found.map_or_else(
        || "    -".to_owned(),
        |found| format!("{:.3}  {:.3} to {:.3}", found.mean, found.low, found.high),
    );
    let verdict = if holds { "" } else { "  MISSED" };
    let lacks = match lacks {
        0 => String::new(),
        count => format!("  ({count} rounds without a ratio)"),
    };
    writeln!(out, "{command:8} {case:72} {numbers:23}{verdict}{lacks}")
}
