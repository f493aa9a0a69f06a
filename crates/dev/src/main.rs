//! `kvdepot-dev`: writes generated files, measures what the simulator catches, and compares the
//! figures of two states of the tree.

use std::io::{self, Write};
use std::process::ExitCode;

use kvdepot_dev::generate::{PAGES, Verdict};
use kvdepot_dev::mutants::campaign::{self, Options};
use kvdepot_dev::mutants::trial::{self, Plan};
use kvdepot_dev::mutants::{self, report};
use kvdepot_dev::root;
use kvdepot_dev::{paired, repeats};

const USAGE: &str = "\
usage: kvdepot-dev generate [--check]          writes the generated files, or says which are stale
       kvdepot-dev mutants run [OPTIONS]       goes on with the campaign where it was stopped
           --jobs N             so many at a time
           --again-survivors    tries those again that were not caught
           --only TEXT          tries those, again, whose name has this in it
           --no-baseline        not the tree as it is first
           --seconds N          of the simulator for each, instead of 120
           --test NAME          another test of the store in the simulator's place
       kvdepot-dev mutants list                the campaign's mutations, and what was found
       kvdepot-dev mutants check               whether what is written by hand still applies
       kvdepot-dev mutants table [--check]     writes the table in docs/testing.md
       kvdepot-dev mutants break FIX           runs the simulator without that fix
       kvdepot-dev paired BASE [OPTIONS]       measures the tree beside a commit
           --rounds N           so many pairs, instead of 30
           --command NAME       only memory, restore, index or reopen; may be given again
           --json               rows, then verdicts
       kvdepot-dev repeats                     says what stands in two places; needs .venv";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments[..] {
        ["generate"] => generate(false),
        ["generate", "--check"] => generate(true),
        ["mutants", "run", ref options @ ..] => match parse(options) {
            Some(options) => campaign::run(root(), &options).map(|()| true),
            None => return usage(),
        },
        ["mutants", "list"] => list(),
        ["mutants", "check"] => check(),
        ["mutants", "table"] => table(false),
        ["mutants", "table", "--check"] => table(true),
        ["mutants", "break", name] => without(name),
        ["repeats"] => repeated(),
        ["paired", base, ref options @ ..] => match parse_paired(base, options) {
            Some(options) => paired::run(root(), &options),
            None => return usage(),
        },
        _ => return usage(),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            let _ = writeln!(io::stderr(), "kvdepot-dev: {error}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    let _ = writeln!(io::stderr(), "{USAGE}");
    ExitCode::from(2)
}

fn parse(arguments: &[&str]) -> Option<Options> {
    let mut options = Options::default();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match *argument {
            "--jobs" => options.jobs = rest.next()?.parse().ok()?,
            "--again-survivors" => options.again_survivors = true,
            "--only" => options.only = Some((*rest.next()?).to_owned()),
            "--no-baseline" => options.no_baseline = true,
            "--test" => {
                let plan = Plan::of_test(rest.next()?);
                options.plan.build = plan.build;
                options.plan.run = plan.run;
            }
            "--seconds" => options.plan.seconds = rest.next()?.parse().ok()?,
            _ => return None,
        }
    }
    Some(options)
}

fn parse_paired(base: &str, arguments: &[&str]) -> Option<paired::Options> {
    let mut options = paired::Options::new(base);
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match *argument {
            "--rounds" => {
                options.rounds = rest.next()?.parse().ok().filter(|rounds| *rounds > 1)?
            }
            "--command" => options = options.only(rest.next()?)?,
            "--json" => options.json = true,
            _ => return None,
        }
    }
    Some(options)
}

/// Whether the tree is as it should be, after writing where that was asked for.
fn generate(check: bool) -> io::Result<bool> {
    let mut fine = true;
    for page in PAGES {
        let verdict = if check {
            page.check(root())?
        } else {
            page.write(root())?
        };
        fine &= tell(verdict, check, page.path, "make docs")?;
    }
    Ok(fine)
}

fn tell(verdict: Verdict, check: bool, path: &str, hint: &str) -> io::Result<bool> {
    match (verdict, check) {
        (Verdict::Stale, false) => writeln!(io::stdout(), "wrote {path}")?,
        (Verdict::Stale, true) => {
            writeln!(io::stderr(), "{path} is stale\nhint: {hint}")?;
            return Ok(false);
        }
        _ => {}
    }
    Ok(true)
}

fn table(check: bool) -> io::Result<bool> {
    let hint = "cargo run -p kvdepot-dev -- mutants table";
    tell(
        report::update(root(), check)?,
        check,
        "docs/testing.md",
        hint,
    )
}

fn list() -> io::Result<bool> {
    let found = campaign::results(root())?;
    for mutation in campaign::chosen(root(), &found)? {
        let outcome = found.get(&mutation.id).map_or("", |found| &found.outcome);
        writeln!(
            io::stdout(),
            "{outcome:12}{:6}{}",
            mutation.set.name(),
            mutation.id
        )?;
    }
    Ok(true)
}

fn check() -> io::Result<bool> {
    let mut fine = true;
    for mutation in mutants::by_hand(root())?
        .iter()
        .chain(&mutants::fixes(root())?)
    {
        if let Err(error) = mutation.applies(root()) {
            fine = false;
            writeln!(io::stderr(), "{}: {error}", mutation.id)?;
        }
    }
    Ok(fine)
}

fn repeated() -> io::Result<bool> {
    let offences = repeats::check(root())?;
    for offence in &offences {
        writeln!(io::stderr(), "{offence}")?;
    }
    Ok(offences.is_empty())
}

/// Runs the simulator without a fix; it ends as the simulator does.
fn without(name: &str) -> io::Result<bool> {
    let fixes = mutants::fixes(root())?;
    let Some(fix) = fixes.iter().find(|fix| fix.id == name) else {
        let known: Vec<&str> = fixes.iter().map(|fix| fix.id.as_str()).collect();
        let known = known.join(", ");
        return Err(io::Error::other(format!(
            "{name} is unknown: allowed are {known}"
        )));
    };
    writeln!(io::stdout(), "without the fix {name}: {}", fix.why)?;
    trial::in_sight(root(), fix)
}
