//! `kvdepot-dev generate [--check]`: writes the generated files, or says which are stale.

use std::io::{self, Write};
use std::process::ExitCode;

use kvdepot_dev::generate::{PAGES, Verdict};

const USAGE: &str = "usage: kvdepot-dev generate [--check]";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let check = match arguments[..] {
        ["generate"] => false,
        ["generate", "--check"] => true,
        _ => {
            let _ = writeln!(io::stderr(), "{USAGE}");
            return ExitCode::from(2);
        }
    };
    match generate(check) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            let _ = writeln!(io::stderr(), "kvdepot-dev: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether the tree is as it should be, after writing where that was asked for.
fn generate(check: bool) -> io::Result<bool> {
    let root = kvdepot_dev::root();
    let mut fine = true;
    for page in PAGES {
        let verdict = if check {
            page.check(root)?
        } else {
            page.write(root)?
        };
        match (verdict, check) {
            (Verdict::Stale, false) => writeln!(io::stdout(), "wrote {}", page.path)?,
            (Verdict::Stale, true) => {
                fine = false;
                writeln!(io::stderr(), "{} is stale\nhint: make docs", page.path)?;
            }
            _ => {}
        }
    }
    Ok(fine)
}
