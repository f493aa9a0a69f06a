//! Logic that stands in two places, found by jscpd over what is no test.
//!
//! Names must be the same and literals need not be. What may stand twice is listed with its reason
//! in `crates/dev/repeats.yaml`, and a reason that nothing needs any more is an offence too.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;

/// Tokens from which on a run is a repeat: some eight lines. From 40 on, most finds are lists of
/// arguments and headings of tables.
const TOKENS_LEAST: &str = "50";
/// What is no code of ours, or tests. A stub repeats what it is a stub of.
const IGNORED: &str =
    "**/tests/**,**/tests.rs,**/target/**,**/build/**,**/dist/**,**/.venv/**,**/*.pyi";

/// Two places with the same tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Repeat {
    /// From the root of the tree, in the order of their names.
    pub files: [String; 2],
    /// First and last line in each.
    pub lines: [(usize, usize); 2],
    /// How long it is.
    pub tokens: usize,
}

/// A pair of files that may have something in common.
#[derive(Clone, Debug, Deserialize)]
pub struct Excepted {
    /// From the root of the tree.
    pub files: [String; 2],
    /// The longest run that may.
    pub tokens: usize,
    /// Why it may.
    pub why: String,
}

#[derive(Deserialize)]
struct Report {
    duplicates: Vec<Duplicate>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Duplicate {
    first_file: Place,
    second_file: Place,
    tokens: usize,
}

#[derive(Deserialize)]
struct Place {
    name: PathBuf,
    start: usize,
    end: usize,
}

/// Offences of the tree.
///
/// # Errors
/// The program is not installed or fails, or it does not find what it must.
pub fn check(root: &Path) -> io::Result<Vec<String>> {
    canary(root)?;
    let listed = fs::read_to_string(root.join("crates/dev/repeats.yaml"))?;
    let excepted: Vec<Excepted> = serde_yaml_ng::from_str(&listed).map_err(io::Error::other)?;
    Ok(judge(&find(root, root)?, &excepted))
}

/// Repeats that no exception covers, and exceptions that no repeat needs.
#[must_use]
pub fn judge(repeats: &[Repeat], excepted: &[Excepted]) -> Vec<String> {
    let same = |one: &Excepted, repeat: &Repeat| {
        let [a, b] = &one.files;
        repeat.files == one.files || repeat.files == [b.clone(), a.clone()]
    };
    let covered = |repeat: &Repeat| {
        let mut all = excepted.iter();
        all.any(|one| same(one, repeat) && repeat.tokens <= one.tokens && !one.why.is_empty())
    };
    let place = |file: &str, (first, last)| format!("{file}:{first}-{last}");
    let repeated = repeats.iter().filter(|one| !covered(one)).map(|one| {
        let [a, b] = [0, 1].map(|side| place(&one.files[side], one.lines[side]));
        format!("{a} and {b}: {} tokens are the same", one.tokens)
    });
    let needless = excepted
        .iter()
        .filter(|one| !repeats.iter().any(|repeat| same(one, repeat)))
        .map(|one| {
            format!(
                "{} and {}: no exception is needed",
                one.files[0], one.files[1]
            )
        });
    repeated.chain(needless).collect()
}

/// What stands twice below a folder, but for unit tests.
fn find(root: &Path, folder: &Path) -> io::Result<Vec<Repeat>> {
    let program = root.join(".venv/bin/jscpd");
    let output = root.join("build/repeats");
    fs::create_dir_all(&output)?;
    let mut jscpd = Command::new(&program);
    jscpd.args(["--min-tokens", TOKENS_LEAST, "--min-lines", "5"]);
    jscpd.args([
        "--mode",
        "weak",
        "--ignore-literals",
        "--format",
        "rust,python",
    ]);
    jscpd.args(["--ignore", IGNORED, "--ignore-pattern", "use [^;]*;"]);
    jscpd.args(["--absolute", "--reporters", "json,silent", "--output"]);
    let status = jscpd
        .arg(&output)
        .arg(folder)
        .stdout(Stdio::null())
        .status();
    let status = status.map_err(|error| {
        let program = program.display();
        io::Error::new(
            error.kind(),
            format!("{program}: {error}\nhint: make lint installs it"),
        )
    })?;
    if !status.success() {
        return Err(io::Error::other(format!("{}: {status}", program.display())));
    }
    let report = fs::read_to_string(output.join("jscpd-report.json"))?;
    let report: Report = serde_json::from_str(&report)?;
    let mut repeats = Vec::new();
    for one in report.duplicates {
        let mut places = [one.first_file, one.second_file];
        places.sort_by(|a, b| a.name.cmp(&b.name));
        if in_unit_tests(&places[0])? || in_unit_tests(&places[1])? {
            continue;
        }
        let [a, b] = &places;
        let name = |place: &Place| {
            let name = place.name.strip_prefix(folder).unwrap_or(&place.name);
            name.to_string_lossy().into_owned()
        };
        repeats.push(Repeat {
            files: [name(a), name(b)],
            lines: [(a.start, a.end), (b.start, b.end)],
            tokens: one.tokens,
        });
    }
    repeats.sort_by(|a, b| (&a.files, a.lines).cmp(&(&b.files, b.lines)));
    Ok(repeats)
}

/// Unit tests stand at the bottom of a file.
fn in_unit_tests(place: &Place) -> io::Result<bool> {
    let text = fs::read_to_string(&place.name)?;
    let tests = text.find("\n#[cfg(test)]\nmod ");
    Ok(tests.is_some_and(|at| text[..at].lines().count() < place.end))
}

/// Fails unless a repeat is found that differs in a literal, and none where names differ.
fn canary(root: &Path) -> io::Result<()> {
    // Not below `build`, which is ignored.
    let name = format!("kvdepot-repeats-{}", std::process::id());
    let folder = std::env::temp_dir().join(name);
    fs::create_dir_all(&folder)?;
    let text = |number: u32, of: &str| {
        let term = format!("    total += {of}.iter().filter(|one| **one > {number}).count();\n");
        format!(
            "fn f({of}: &[u32]) -> usize {{\n    let mut total = 0;\n{}    total\n}}\n",
            term.repeat(4)
        )
    };
    let written = [
        ("a.rs", text(1, "items")),
        ("b.rs", text(2, "items")),
        ("c.rs", text(2, "list")),
    ];
    for (name, text) in written {
        fs::write(folder.join(name), text)?;
    }
    let found = find(root, &folder);
    fs::remove_dir_all(&folder)?;
    let found = found?;
    let pair = ["a.rs".to_owned(), "b.rs".to_owned()];
    let across = found.iter().filter(|one| one.files[0] != one.files[1]);
    match across.map(|one| &one.files).collect::<Vec<_>>()[..] {
        [files] if *files == pair => Ok(()),
        _ => Err(io::Error::other(format!("the canary: {found:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repeat(tokens: usize) -> Repeat {
        Repeat {
            files: ["a.rs".into(), "b.rs".into()],
            lines: [(1, 9), (2, 10)],
            tokens,
        }
    }

    fn excepted(a: &str, b: &str, why: &str) -> Excepted {
        Excepted {
            files: [a.into(), b.into()],
            tokens: 60,
            why: why.into(),
        }
    }

    #[test]
    fn a_repeat_needs_an_exception_that_is_long_enough_and_has_a_reason() {
        let listed = [excepted("b.rs", "a.rs", "for now")];
        assert!(judge(&[repeat(60)], &listed).is_empty());
        assert_eq!(judge(&[repeat(61)], &listed).len(), 1);
        assert_eq!(
            judge(&[repeat(60)], &[excepted("a.rs", "b.rs", "")]).len(),
            1
        );
        assert_eq!(judge(&[repeat(60)], &[]).len(), 1);
    }

    #[test]
    fn an_exception_that_nothing_needs_offends() {
        assert_eq!(judge(&[], &[excepted("a.rs", "b.rs", "for now")]).len(), 1);
        let other = excepted("a.rs", "c.rs", "for now");
        assert_eq!(judge(&[repeat(60)], &[other]).len(), 2);
    }
}
