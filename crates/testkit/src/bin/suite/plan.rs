//! Selects the programs to run and their arguments.

use std::io;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::programs::{self, Program, WORKSPACE};

/// Time after which a program counts as stalled and is killed. Programs end in less than a tenth of
/// it on an idle machine.
const LIMIT: Duration = Duration::from_secs(600);

/// The same with `KVDEPOT_TEST_ALL`, which runs 20 times as many rounds.
const LIMIT_ALL: Duration = Duration::from_secs(3 * 3600);

/// Programs that run while no other does, each with the reason.
const ALONE: [(&str, &str); 0] = [];

/// Tests that took at least [`LONG`] in a run of all: seconds, crate, program, test. `suite run`
/// writes the list of its own run to `build/test-rust.slow`.
const SLOW: &str = include_str!("slow.txt");

/// Duration in seconds from which on only `make test` runs a test.
pub(crate) const LONG: f64 = 5.0;

/// Kinds of simulator histories that exercise a crate.
const SEEDS: [(&str, &[&str]); 6] = [
    ("arena", &["scheduled", "prompts"]),
    ("media", &["scheduled"]),
    ("service", &["served", "processes"]),
    ("session", &["talks"]),
    ("store", &["scheduled", "tiers", "shared", "prompts"]),
    ("transfer", &["hosts"]),
];

pub(crate) struct Job {
    pub(crate) label: String,
    pub(crate) command: Command,
    pub(crate) limit: Duration,
    pub(crate) alone: bool,
}

pub(crate) struct Plan {
    pub(crate) jobs: Vec<Job>,
    /// Path of the results, without an extension.
    pub(crate) results: PathBuf,
    /// Tests that are skipped.
    pub(crate) left: Vec<String>,
}

/// A line of the list of slow tests.
struct Slow {
    seconds: f64,
    label: &'static str,
    test: &'static str,
}

fn slow() -> impl Iterator<Item = Slow> {
    SLOW.lines().filter_map(|line| {
        let (seconds, rest) = line.split_once(' ')?;
        let (label, test) = rest.rsplit_once(' ')?;
        Some(Slow {
            seconds: seconds.parse().ok()?,
            label,
            test,
        })
    })
}

fn limit() -> Duration {
    let all = std::env::var_os("KVDEPOT_TEST_ALL").is_some_and(|value| value != "0");
    if all { LIMIT_ALL } else { LIMIT }
}

impl Job {
    fn of(program: &Program) -> Job {
        let label = program.label();
        let mut command = Command::new(&program.path);
        command
            // Stable Rust prints durations of tests only with this variable.
            .args(["-Zunstable-options", "--report-time"])
            .env("RUSTC_BOOTSTRAP", "1")
            .env("CARGO_MANIFEST_DIR", &program.directory)
            .current_dir(&program.directory);
        Job {
            limit: limit(),
            alone: ALONE.iter().any(|(known, _)| *known == label),
            label,
            command,
        }
    }

    /// A `cargo test` that builds its programs.
    fn of_cargo(label: &str, command: Command) -> Job {
        Job {
            label: label.to_owned(),
            command,
            limit: 3 * limit(),
            alone: false,
        }
    }
}

/// The documentation tests of the workspace.
pub(crate) fn documentation() -> Command {
    let mut command = programs::cargo();
    command
        .args(["test", "--doc", "--no-fail-fast"])
        .args(WORKSPACE);
    command
}

/// The model of the join, which needs a build of its own.
pub(crate) fn loom() -> Command {
    let target = std::env::var("CARGO_TARGET_DIR").unwrap_or_else(|_| "target".into());
    let mut command = programs::cargo();
    command
        .args([
            "test",
            "-p",
            "kvdepot-plan",
            "--test",
            "loom_join",
            "--release",
        ])
        .env("RUSTFLAGS", "--cfg loom")
        .env("CARGO_TARGET_DIR", format!("{target}/loom"));
    command
}

/// Selects all tests of the workspace: programs, documentation, and the loom model of the join.
pub(crate) fn all() -> io::Result<Plan> {
    let mut programs = programs::build(&WORKSPACE)?;
    // The slowest programs start first.
    let weight = |program: &Program| {
        let label = program.label();
        let mine = slow().filter(|one| one.label == label);
        mine.map(|one| one.seconds).sum::<f64>()
    };
    programs.sort_by(|one, other| weight(other).total_cmp(&weight(one)));
    let mut jobs = vec![
        Job::of_cargo("documentation", documentation()),
        Job::of_cargo("plan loom", loom()),
    ];
    jobs.extend(programs.iter().map(Job::of));
    Ok(Plan {
        jobs,
        results: "build/test-rust".into(),
        left: Vec::new(),
    })
}

/// Selects the quick tests of a crate, and the simulator's fixed seeds that exercise it.
pub(crate) fn check(name: &str) -> io::Result<Plan> {
    let package = format!("kvdepot-{name}");
    let mut left = vec!["documentation tests".to_owned()];
    let mut jobs = Vec::new();
    for program in programs::build(&["-p", &package])? {
        let mut job = Job::of(&program);
        for one in slow().filter(|one| one.label == job.label) {
            job.command.args(["--skip", one.test]);
            left.push(format!("{} {} ({} s)", one.label, one.test, one.seconds));
        }
        // `--skip` takes full names.
        job.command.arg("--exact");
        jobs.push(job);
    }
    if let Some((_, kinds)) = SEEDS.iter().find(|(of, _)| *of == name) {
        jobs.retain(|job| job.label != "service sim");
        let sim = programs::build(&["-p", "kvdepot-service", "--test", "sim"])?;
        for program in sim {
            let mut job = Job::of(&program);
            job.command.args(*kinds);
            jobs.insert(0, job);
        }
    }
    Ok(Plan {
        jobs,
        results: "build/check-rust".into(),
        left,
    })
}
