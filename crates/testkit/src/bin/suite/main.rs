//! Builds and runs the Rust tests of the workspace, and lists the names of all tests.
//!
//! * `suite run`: runs every test program, several at the same time, and lists the failed tests.
//! * `suite check CRATE`: runs the tests of one crate that take less than 5 s, and the simulator's
//!   fixed seeds for that crate.
//! * `suite names [PYTHON]`: prints one line per test. `PYTHON` is an interpreter with pytest.

#![forbid(unsafe_code)]
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "its output is for a person or a build server"
)]

mod names;
mod plan;
mod programs;
mod report;
mod run;

use std::io;
use std::path::Path;
use std::process::ExitCode;

use plan::Plan;

const USAGE: &str = "usage: suite run | check CRATE | names [PYTHON]";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = std::env::set_current_dir(root()).and_then(|()| match words[..] {
        ["run"] => plan::all().and_then(carry_out),
        ["check", name] => plan::check(name.trim_start_matches("kvdepot-")).and_then(carry_out),
        ["names"] => names::print(None),
        ["names", python] => names::print(Some(python)),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, USAGE)),
    });
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("suite: {error}");
            ExitCode::from(2)
        }
    }
}

/// Runs the plan's programs and reports; whether all passed.
fn carry_out(plan: Plan) -> io::Result<bool> {
    let outcomes = run::run(plan.jobs)?;
    report::write(&plan.results, &outcomes)?;
    report::print(&outcomes, &plan.left);
    Ok(outcomes.iter().all(|one| one.failed.is_empty()))
}

/// The root of the source tree.
fn root() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().and_then(Path::parent).unwrap_or(here)
}
