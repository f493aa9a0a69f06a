//! Names of all tests, one per line: the diff of two lists shows the tests that were lost.

use std::io;
use std::path::Path;
use std::process::Command;

use crate::plan;
use crate::programs::{self, WORKSPACE};

/// Prints the sorted names. The name of an integration test leaves out program and module, and that
/// of a documentation test its line number: a test that moves keeps its name.
pub(crate) fn print(python: Option<&str>) -> io::Result<bool> {
    let mut names = c_programs()?;
    for program in programs::build(&WORKSPACE)? {
        let mut list = Command::new(&program.path);
        let list = answer(
            list.args(["--list", "--format=terse"])
                .current_dir(&program.directory),
        )?;
        let is_unit = ["unit", "bin"].contains(&program.target.as_str());
        for name in list.lines().filter_map(|line| line.strip_suffix(": test")) {
            let last = name.rsplit("::").next().unwrap_or(name);
            names.push(format!(
                "{} {}",
                program.package,
                if is_unit { name } else { last }
            ));
        }
    }
    let list = answer(plan::loom().args(["--", "--list", "--format=terse"]))?;
    let list = list.lines().filter_map(|line| line.strip_suffix(": test"));
    names.extend(list.map(|name| format!("plan {name}")));
    let list = answer(plan::documentation().args(["--", "--list", "--format=terse"]))?;
    for name in list.lines().filter_map(|line| line.strip_suffix(": test")) {
        let (before, behind) = name.split_once(" (line ").unwrap_or((name, ""));
        let behind = behind.split_once(')').map_or("", |(_, behind)| behind);
        names.push(format!("doc {before}{behind}"));
    }
    if let Some(python) = python {
        let mut collect = Command::new(python);
        let list = answer(collect.args(["-m", "pytest", "--collect-only", "-q"]))?;
        let ids = list.lines().filter(|line| line.contains("::"));
        names.extend(ids.map(str::to_owned));
    }
    names.sort();
    names.iter().for_each(|name| println!("{name}"));
    Ok(true)
}

/// Programs in C and C++ that tests build and run.
fn c_programs() -> io::Result<Vec<String>> {
    let all = answer(Command::new("git").args(["ls-files", "crates", "examples", "tests"]))?;
    let is_one = |path: &&str| {
        let is_c = path.ends_with(".c") || path.ends_with(".cpp");
        let text = || std::fs::read_to_string(Path::new(path)).unwrap_or_default();
        is_c && text().contains("int main(")
    };
    Ok(all
        .lines()
        .filter(is_one)
        .map(|path| format!("c {path}"))
        .collect())
}

/// Runs a command and returns its output.
fn answer(command: &mut Command) -> io::Result<String> {
    let output = command.output()?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        return Err(io::Error::other(format!("{command:?}: {errors}")));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
