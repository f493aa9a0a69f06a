//! One trial: the scratch copy is built, and the simulator runs in it.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::scratch::Scratch;
use super::{Mutation, named};

/// What the simulator may take to find a fault.
pub const SECONDS: u64 = 120;

/// What it may take beyond that to end, before it counts as hanging.
const GRACE: Duration = Duration::from_secs(45);

/// Building takes less than that, also on a busy machine.
const BUILD_MAX: Duration = Duration::from_secs(1800);

/// Age of a simulator's directory that nobody uses any more.
const OLD: Duration = Duration::from_secs(600);

/// Pause between two looks at a process.
const LOOK: Duration = Duration::from_millis(50);

/// Most memory of one process, in KiB: a fault may ask for any amount.
const MEMORY_MAX: u64 = 24 << 20;

/// What became of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The simulator failed.
    Caught,
    /// It, or what it watches, did not end.
    Hung,
    /// It failed, and does so in the same way without the fault: nothing is known.
    Doubtful,
    /// It found nothing.
    Survived,
    /// The code does not compile, or the edit does not apply: no fault at all.
    Unbuildable,
}

impl Outcome {
    const ALL: [Outcome; 5] = [
        Outcome::Caught,
        Outcome::Hung,
        Outcome::Doubtful,
        Outcome::Survived,
        Outcome::Unbuildable,
    ];

    /// As it stands in the results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Caught => "caught",
            Outcome::Hung => "hung",
            Outcome::Doubtful => "doubtful",
            Outcome::Survived => "survived",
            Outcome::Unbuildable => "unbuildable",
        }
    }

    /// From its name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Outcome> {
        Outcome::ALL.into_iter().find(|known| known.name() == name)
    }
}

/// What was seen.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Trial {
    /// What became of it.
    pub outcome: Outcome,
    /// How long the simulator ran.
    pub elapsed: Duration,
    /// The line that says what it saw.
    pub said: String,
}

/// The command of the simulator: for a shell, in the scratch copy.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Plan {
    /// Builds, without running.
    pub build: String,
    /// Runs what is built.
    pub run: String,
    /// What the simulator gets.
    pub seconds: u64,
}

impl Default for Plan {
    fn default() -> Plan {
        Plan::of_test("sim")
    }
}

impl Plan {
    /// Another test of the store in the simulator's place.
    #[must_use]
    pub fn of_test(name: &str) -> Plan {
        let run = format!("cargo test --quiet -p kvdepot-service --test {name}");
        Plan {
            build: format!("{run} --no-run"),
            run,
            seconds: SECONDS,
        }
    }

    fn command(&self, scratch: &Scratch, what: &str) -> Command {
        let mut command = Command::new("sh");
        command
            .arg("-c")
            .arg(format!("ulimit -c 0; ulimit -v {MEMORY_MAX}; exec {what}"))
            .current_dir(scratch.tree())
            .env("CARGO_TARGET_DIR", scratch.target())
            .env("CARGO_INCREMENTAL", "1")
            // Most of a trial is building.
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            .env("CARGO_PROFILE_TEST_DEBUG", "0")
            .env("SIM_SECONDS", self.seconds.to_string())
            .env("SIM_SHRINK", "0")
            .env("RUST_BACKTRACE", "0")
            .env_remove("SIM_BREAK")
            .stdin(Stdio::null())
            // A group of its own, which ends as one.
            .process_group(0);
        command
    }
}

/// Runs the simulator with a change, and all that it says for people to read; whether it is fine.
///
/// # Errors
/// The change does not apply, or a process cannot be started.
pub fn in_sight(root: &Path, change: &Mutation) -> io::Result<bool> {
    let mut scratch = Scratch::new(root, 0)?;
    scratch.apply(change).map_err(io::Error::other)?;
    let mut command = Command::new("cargo");
    command
        .args(["test", "-p", "kvdepot-service", "--test", "sim"])
        .current_dir(scratch.tree())
        .env("CARGO_TARGET_DIR", scratch.target())
        .env_remove("SIM_BREAK");
    let status = command.status();
    scratch.restore()?;
    Ok(status?.success())
}

/// Builds the scratch copy and runs the simulator in it.
///
/// # Errors
/// A process cannot be started, or its output not be written down.
pub fn run(scratch: &Scratch, plan: &Plan) -> io::Result<Trial> {
    let log = scratch.target().with_extension("log");
    let build = plan.command(scratch, &plan.build);
    let built = watch(build, BUILD_MAX, &log)?;
    if !built.is_some_and(|status| status.success()) {
        return Ok(Trial {
            outcome: Outcome::Unbuildable,
            elapsed: Duration::ZERO,
            said: telling(&log, &["error"]),
        });
    }
    let begun = Instant::now();
    let limit = Duration::from_secs(plan.seconds) + GRACE;
    let ended = watch(plan.command(scratch, &plan.run), limit, &log)?;
    clean(Path::new("/dev/shm"));
    let outcome = match ended {
        None => Outcome::Hung,
        Some(status) if status.success() => Outcome::Survived,
        _ if sound(scratch).exists() && fails_anyway(scratch, &log)? => Outcome::Doubtful,
        Some(_) => Outcome::Caught,
    };
    let said: &[&str] = match outcome {
        // How to replay a failure of the tree itself.
        Outcome::Doubtful => &["replay:"],
        _ => &["FAILED", "panicked at", "signal:", "sim:"],
    };
    Ok(Trial {
        outcome,
        elapsed: begun.elapsed(),
        said: telling(&log, said),
    })
}

/// Keeps the simulator that was built without a fault, to ask it whether it fails too.
///
/// # Errors
/// It cannot be found or copied.
pub fn keep_sound(scratch: &Scratch, plan: &Plan) -> io::Result<()> {
    let build = format!("{} --message-format=json", plan.build);
    let told = plan.command(scratch, &build).output()?;
    let text = String::from_utf8_lossy(&told.stdout).into_owned();
    let mut built = text.lines().filter_map(|line| {
        let value: serde_json::Value = serde_json::from_str(line).ok()?;
        value["executable"].as_str().map(str::to_owned)
    });
    let missing = || io::Error::other("cargo did not say what it has built");
    let built = built.next_back().ok_or_else(missing)?;
    fs::copy(&built, sound(scratch)).map_err(named(Path::new(&built)))?;
    Ok(())
}

fn sound(scratch: &Scratch) -> PathBuf {
    scratch.target().with_file_name("sound")
}

/// Whether what failed, by the line that says how to replay it, fails without the fault too. Twice
/// is asked: real threads do not repeat themselves.
fn fails_anyway(scratch: &Scratch, log: &Path) -> io::Result<bool> {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text).into_owned();
    let replay = text.lines().find(|line| line.contains("KVDEPOT_SEED="));
    let seed = replay.and_then(|line| line.split("KVDEPOT_SEED=").nth(1)?.split(' ').next());
    let name = replay.and_then(|line| line.split_whitespace().last());
    let (Some(seed), Some(name)) = (seed, name) else {
        return Ok(false);
    };
    for _ in 0..2 {
        let mut command = Command::new(sound(scratch));
        command
            .arg(name)
            .current_dir(scratch.tree())
            .env("KVDEPOT_SEED", seed)
            .env("SIM_HISTORIES", "1")
            .env("SIM_SHRINK", "0")
            .stdin(Stdio::null())
            .process_group(0);
        let aside = log.with_extension("sound.log");
        let ended = watch(command, Duration::from_secs(SECONDS), &aside)?;
        if !ended.is_some_and(|status| status.success()) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Runs a command with its output in a file; `None` when it took too long and was ended.
fn watch(mut command: Command, limit: Duration, log: &Path) -> io::Result<Option<ExitStatus>> {
    let file = File::create(log).map_err(named(log))?;
    command.stdout(file.try_clone()?).stderr(file);
    let mut process = command.spawn()?;
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = process.try_wait()? {
            break Some(status);
        }
        if begun.elapsed() > limit {
            break None;
        }
        std::thread::sleep(LOOK);
    };
    // With those that it started and left behind.
    let group = format!("-{}", process.id());
    let mut kill = Command::new("kill");
    let _nobody_left = kill
        .args(["-KILL", "--", &group])
        .stderr(Stdio::null())
        .status();
    let _reaped = process.wait();
    Ok(status)
}

/// Removes what simulators that were ended have left: no history takes so long.
fn clean(folder: &Path) {
    let is_old = |path: &Path| {
        let at = fs::metadata(path).and_then(|at| at.modified());
        at.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > OLD))
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    for path in entries.map(|entry| entry.path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("kvsim") && is_old(&path) {
            let _somebody_else_did = fs::remove_dir_all(&path);
        }
    }
}

/// The first line with one of these words, the earlier words first.
fn telling(log: &Path, words: &[&str]) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text).into_owned();
    let with = |word: &&str| {
        let mut lines = text.lines().enumerate();
        let (at, line) = lines.find(|(_, line)| line.contains(*word))?;
        // A panic's message is on the line that follows its place.
        let next = text.lines().nth(at + 1).unwrap_or_default();
        let more = match line.contains("panicked at") {
            true => next,
            false => "",
        };
        Some(format!("{} {more}", line.trim()).trim().to_owned())
    };
    let found = words.iter().find_map(with).unwrap_or_default();
    found.chars().take(300).collect()
}
