//! Reads the output of test programs, and prints a summary.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use serde_json::json;

use crate::plan::LONG;

/// Number of programs in the list of the slowest.
const SLOWEST: usize = 10;

pub(crate) struct Outcome {
    pub(crate) label: String,
    pub(crate) failed: Vec<String>,
    log: PathBuf,
    seconds: f64,
    passed: usize,
    skipped: usize,
    /// Duration of each test in seconds.
    times: Vec<(String, f64)>,
}

impl Outcome {
    /// Reads the output of Rust's test harness. A program without it counts as one test.
    pub(crate) fn read(
        label: String,
        log: &Path,
        took: Duration,
        status: ExitStatus,
        stalls: bool,
    ) -> io::Result<Outcome> {
        let text = fs::read(log)?;
        let text = String::from_utf8_lossy(&text);
        let results: Vec<[usize; 3]> = text.lines().filter_map(counts).collect();
        // A test may start its program again, which prints a result before that of the program.
        // Cargo runs several programs in sequence.
        let is_cargo = ["documentation", "plan loom"].contains(&label.as_str());
        let own = match is_cargo {
            true => &results[..],
            false => &results[results.len().saturating_sub(1)..],
        };
        let sum = |which: usize| own.iter().map(|each| each[which]).sum::<usize>();
        let mut failed = if sum(1) > 0 {
            failures(&text)
        } else {
            Vec::new()
        };
        if !status.success() && failed.is_empty() {
            let running = match unfinished(&text) {
                running if running.is_empty() => String::new(),
                running => format!(", running: {}", running.join(", ")),
            };
            let how = if stalls {
                "stalls, killed"
            } else {
                "the program"
            };
            failed.push(format!("{how} ({status}{running})"));
        }
        // The simulator has a harness of its own, which prints no result.
        let is_one = label == "service sim" && results.is_empty() && status.success();
        if !is_one && results.is_empty() && failed.is_empty() {
            failed.push("it has printed no result".into());
        }
        Ok(Outcome {
            failed: failed
                .iter()
                .map(|name| format!("{label}: {name}"))
                .collect(),
            label,
            log: log.to_owned(),
            seconds: took.as_secs_f64(),
            passed: sum(0) + usize::from(is_one),
            skipped: sum(2),
            times: text.lines().filter_map(time).collect(),
        })
    }
}

/// Parses a line `test result: …` into the numbers of passed, failed and ignored tests.
fn counts(line: &str) -> Option<[usize; 3]> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let mut numbers = counts
        .split("; ")
        .map(|part| part.split(' ').next()?.parse().ok());
    Some([numbers.next()??, numbers.next()??, numbers.next()??])
}

/// Returns the names below the last `failures:` of each program.
fn failures(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut lines = text.lines();
    while lines.by_ref().any(|line| line == "failures:") {
        let indented = lines.by_ref().map_while(|line| line.strip_prefix("    "));
        names.extend(indented.map(str::to_owned));
    }
    names
}

/// Parses a line `test name ... ok <1.234s>`.
fn time(line: &str) -> Option<(String, f64)> {
    let (name, rest) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let (_, seconds) = rest.strip_suffix("s>")?.rsplit_once('<')?;
    Some((name.to_owned(), seconds.parse().ok()?))
}

/// Returns the tests that the harness reported as running for over 60 s and not as ended.
fn unfinished(text: &str) -> Vec<&str> {
    let long = text.lines().filter_map(|line| {
        let (name, _) = line
            .strip_prefix("test ")?
            .split_once(" has been running for over")?;
        Some(name)
    });
    long.filter(|name| !text.contains(&format!("test {name} ... ")))
        .collect()
}

/// Prints one line about a program that has ended, and its output if it failed.
pub(crate) fn say(outcome: &Outcome) -> io::Result<()> {
    let Outcome {
        label,
        seconds,
        passed,
        failed,
        ..
    } = outcome;
    if failed.is_empty() {
        println!("{seconds:7.1} s  {label}: {passed} passed");
    } else {
        println!("{}", String::from_utf8_lossy(&fs::read(&outcome.log)?));
        println!(
            "{seconds:7.1} s  {label}: {} FAILED, as above",
            failed.len()
        );
    }
    Ok(())
}

/// Writes results and durations as JSON, and the list of slow tests.
pub(crate) fn write(to: &Path, outcomes: &[Outcome]) -> io::Result<()> {
    let programs: Vec<_> = outcomes
        .iter()
        .map(|one| {
            let tests = one.times.iter().filter(|(_, seconds)| *seconds >= 1.0);
            json!({
                "program": one.label, "seconds": one.seconds, "passed": one.passed,
                "failed": one.failed, "skipped": one.skipped,
                "tests_of_a_second": tests.collect::<Vec<_>>(),
            })
        })
        .collect();
    let mut slow = Vec::new();
    for one in outcomes {
        for (test, seconds) in one.times.iter().filter(|(_, seconds)| *seconds >= LONG) {
            slow.push((format!("{} {test}", one.label), seconds));
        }
    }
    slow.sort_by(|one, other| one.0.cmp(&other.0));
    let slow: String = slow
        .iter()
        .map(|(name, seconds)| format!("{seconds:.0} {name}\n"))
        .collect();
    fs::write(
        to.with_extension("json"),
        format!("{:#}\n", json!(programs)),
    )?;
    fs::write(to.with_extension("slow"), slow)
}

/// Prints the slowest programs, the skipped tests, the failed tests and the counts.
pub(crate) fn print(outcomes: &[Outcome], left: &[String]) {
    let mut slowest: Vec<&Outcome> = outcomes.iter().collect();
    slowest.sort_by(|one, other| other.seconds.total_cmp(&one.seconds));
    let slowest = slowest.iter().take(SLOWEST);
    let slowest: Vec<_> = slowest
        .map(|one| format!("{} {:.0} s", one.label, one.seconds))
        .collect();
    println!("\nslowest: {}", slowest.join(", "));
    if !left.is_empty() {
        println!("left to make test: {}\n  {}", left.len(), left.join("\n  "));
    }
    let failed: Vec<&String> = outcomes.iter().flat_map(|one| &one.failed).collect();
    failed.iter().for_each(|name| println!("FAILED {name}"));
    let sum = |of: fn(&Outcome) -> usize| outcomes.iter().map(of).sum::<usize>();
    let [passed, skipped] = [sum(|one| one.passed), sum(|one| one.skipped)];
    println!(
        "{passed} passed, {} failed, {skipped} skipped",
        failed.len()
    );
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    fn outcome(text: &str, signal: i32, stalls: bool) -> Outcome {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        let status = ExitStatus::from_raw(signal);
        let took = Duration::from_secs(1);
        Outcome::read("store files".into(), file.path(), took, status, stalls).unwrap()
    }

    #[test]
    fn failed_tests_are_named_and_counted_by_the_program_s_own_result() {
        let text = "\
running 3 tests
test a::one ... ok <0.001s>
running 1 test
test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 9 filtered out
test a::two ... FAILED <7.500s>

failures:

---- a::two stdout ----
    an indented line

failures:
    a::two

test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out
";
        let outcome = outcome(text, 101 << 8, false);
        assert_eq!(outcome.failed, ["store files: a::two"]);
        assert_eq!((outcome.passed, outcome.skipped), (1, 1));
        assert_eq!(outcome.times[1], ("a::two".to_owned(), 7.5));
    }

    #[test]
    fn a_program_that_ends_without_a_result_fails_and_names_what_was_running() {
        let text = "test slow has been running for over 60 seconds
test done has been running for over 60 seconds
test done ... ok
";
        let ended = outcome(text, 9, true);
        assert_eq!(ended.failed.len(), 1);
        assert!(ended.failed[0].contains("stalls"), "{:?}", ended.failed);
        assert!(ended.failed[0].ends_with("running: slow)"));
        let silent = outcome("said", 0, false);
        assert_eq!(silent.failed, ["store files: it has printed no result"]);
    }
}
