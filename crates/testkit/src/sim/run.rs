//! The loop: histories from rising seeds, until the time is over or one fails.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::shrink::shrink;
use super::tally::Tally;
use super::{History, Subject, watch};
use crate::seed::Rng;

/// How long shrinking may take.
const SHRINK_MAX: Duration = Duration::from_secs(60);

/// What went wrong in any thread: panics, and what the subject's log says at its highest level.
static WRONG: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Notes something that no history may cause.
pub fn wrong(what: String) {
    let mut all = WRONG.lock().unwrap_or_else(PoisonError::into_inner);
    if all.len() < 10 {
        all.push(what);
    }
}

/// What was noted since the last call.
#[must_use]
pub fn take_wrong() -> Vec<String> {
    std::mem::take(&mut *WRONG.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Has panics of all threads noted.
pub fn note_panics() {
    std::panic::set_hook(Box::new(|info| wrong(format!("a thread panicked: {info}"))));
}

/// How a simulation is run.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "settings of a test")]
pub struct Plan {
    /// The first history's seed; the others' follow it.
    pub seed: u64,
    /// How long.
    pub time: Duration,
    /// At most so many histories, for a replay.
    pub histories: u64,
    /// Whether a failing history is shrunk.
    pub shrink: bool,
    /// The longest that one history may take.
    pub limit: Duration,
    /// The command that replays a history, but for its seed.
    pub command: String,
}

/// Runs histories of a subject; false when one failed, which was printed.
pub fn run<S: Subject>(subject: &S, plan: &Plan, tally: &mut Tally) -> bool {
    let begun = Instant::now();
    for number in 0..plan.histories {
        let seed = plan.seed + number;
        if number > 0 && begun.elapsed() >= plan.time {
            break;
        }
        let history = draw(subject, seed);
        let replay = format!(
            "replay: KVDEPOT_SEED={seed} {} {}",
            plan.command,
            subject.name()
        );
        if let Err(broken) = attempt(subject, &history, plan.limit, &replay, tally) {
            println!(
                "\nFAILED after {number} histories of {}: {broken}",
                subject.name()
            );
            println!("{replay}");
            if plan.shrink {
                report(subject, history, plan, &replay);
            }
            return false;
        }
        tally.history(subject.name());
    }
    true
}

fn draw<S: Subject>(subject: &S, seed: u64) -> History<S::Shape, S::Step> {
    let (shape, steps) = subject.draw(&mut Rng::new(seed));
    let steps = (1..).zip(steps).collect();
    History { seed, shape, steps }
}

/// Runs one history; the law that it broke.
fn attempt<S: Subject>(
    subject: &S,
    history: &History<S::Shape, S::Step>,
    limit: Duration,
    replay: &str,
    tally: &mut Tally,
) -> Result<(), String> {
    let text = format!("{replay}\n{}", listing(history));
    watch::begin(limit, text);
    let caught = catch_unwind(AssertUnwindSafe(|| subject.run(history, tally)));
    watch::end();
    let wrong = take_wrong();
    match caught {
        Ok(Ok(())) if wrong.is_empty() => Ok(()),
        Ok(Ok(())) => Err(wrong.join("\n")),
        Ok(Err(broken)) if wrong.is_empty() => Err(broken),
        Ok(Err(broken)) => Err(format!("{broken}\n{}", wrong.join("\n"))),
        Err(_) => Err(wrong.join("\n")),
    }
}

fn report<S: Subject>(subject: &S, history: History<S::Shape, S::Step>, plan: &Plan, replay: &str) {
    let steps = history.steps.len();
    // One has failed, and the shortest is run once more.
    let left = Cell::new(subject.failures_max().saturating_sub(2));
    let fails = |candidate: &History<S::Shape, S::Step>| {
        let tally = &mut Tally::default();
        let fails =
            left.get() > 0 && attempt(subject, candidate, plan.limit, replay, tally).is_err();
        left.set(left.get() - usize::from(fails));
        fails
    };
    let short = shrink(subject, history, SHRINK_MAX, fails);
    println!("shrunk from {steps} steps to {}:", short.steps.len());
    println!("{}", listing(&short));
    match attempt(subject, &short, plan.limit, replay, &mut Tally::default()) {
        Err(broken) => println!("which fails with: {broken}"),
        Ok(()) => println!("which fails only sometimes"),
    }
}

fn listing<Shape: std::fmt::Debug, Step: std::fmt::Debug>(
    history: &History<Shape, Step>,
) -> String {
    let mut text = format!("  {:?}", history.shape);
    for (number, step) in &history.steps {
        text += &format!("\n  {number:3}. {step:?}");
    }
    text
}
