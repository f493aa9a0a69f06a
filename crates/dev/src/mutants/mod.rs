//! How sharp the simulator is: small faults put into the code, one at a time, and whether it
//! notices.
//!
//! Forty-five are made by hand (`crates/dev/mutants/hand.yaml`), in places that matter; forty are
//! drawn by seed from what `cargo-mutants` proposes for four folders of the store. Each is applied
//! to a scratch copy of the tree, built, and the simulator runs for at most two minutes. What was
//! found is appended to `crates/dev/mutants/results.jsonl`, so that the command goes on where it
//! was stopped, and a table of it stands in `docs/testing.md`.
//!
//! `crates/dev/mutants/fixes.yaml` takes fixes back by the same means.

pub mod campaign;
pub mod draw;
pub mod edit;
pub mod report;
pub mod scratch;
pub mod trial;

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use edit::Edit;

/// Where a mutation comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Set {
    /// Written by somebody who thought of it.
    Hand,
    /// Drawn from what `cargo-mutants` proposes.
    Drawn,
}

impl Set {
    /// As it stands in the results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Set::Hand => "hand",
            Set::Drawn => "drawn",
        }
    }

    /// How many of them a campaign tries.
    #[must_use]
    pub fn wanted(self) -> usize {
        match self {
            Set::Hand => 45,
            Set::Drawn => 40,
        }
    }
}

/// A change of the tree.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Mutation {
    /// Names it in the results, whatever lines move.
    pub id: String,
    /// Where it comes from.
    pub set: Set,
    /// What it does, for people.
    pub why: String,
    /// All of it.
    pub edits: Vec<Edit>,
}

impl Mutation {
    /// Whether it can be made in a tree.
    ///
    /// # Errors
    /// Says which edit cannot.
    pub fn applies(&self, root: &Path) -> Result<(), String> {
        let mut texts: HashMap<&Path, String> = HashMap::new();
        for edit in &self.edits {
            let text = match texts.remove(edit.file.as_path()) {
                Some(text) => text,
                None => fs::read_to_string(root.join(&edit.file))
                    .map_err(|error| format!("{}: {error}", edit.file.display()))?,
            };
            texts.insert(&edit.file, edit.apply(&text)?);
        }
        Ok(())
    }
}

/// As `hand.yaml` and `fixes.yaml` have it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    name: String,
    why: String,
    edits: Vec<WrittenEdit>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenEdit {
    file: PathBuf,
    old: String,
    new: String,
}

/// The folder of the mutations and their results.
#[must_use]
pub fn folder(root: &Path) -> PathBuf {
    root.join("crates/dev/mutants")
}

fn read(path: &Path) -> io::Result<Vec<Mutation>> {
    let text = fs::read_to_string(path).map_err(named(path))?;
    let all: Vec<Written> = serde_yaml_ng::from_str(&text)
        .map_err(|error| io::Error::other(format!("{}: {error}", path.display())))?;
    let mutation = |written: Written| Mutation {
        id: written.name,
        set: Set::Hand,
        why: written.why.trim().to_owned(),
        edits: written.edits.into_iter().map(Edit::from).collect(),
    };
    Ok(all.into_iter().map(mutation).collect())
}

impl From<WrittenEdit> for Edit {
    fn from(written: WrittenEdit) -> Edit {
        Edit::new(written.file, &written.old, &written.new)
    }
}

/// The mutations that were written by hand.
///
/// # Errors
/// The file cannot be read.
pub fn by_hand(root: &Path) -> io::Result<Vec<Mutation>> {
    read(&folder(root).join("hand.yaml"))
}

/// What takes fixes back, by the fixes' names.
///
/// # Errors
/// The file cannot be read.
pub fn fixes(root: &Path) -> io::Result<Vec<Mutation>> {
    read(&folder(root).join("fixes.yaml"))
}

/// A mutation that changes nothing that could be noticed.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Equivalent {
    /// Of the mutation.
    pub id: String,
    /// Why it changes nothing.
    pub why: String,
}

/// Those that were looked at and found to change nothing.
///
/// # Errors
/// The file cannot be read.
pub fn equivalents(root: &Path) -> io::Result<Vec<Equivalent>> {
    let path = folder(root).join("equivalent.yaml");
    let text = fs::read_to_string(&path).map_err(named(&path))?;
    serde_yaml_ng::from_str(&text)
        .map_err(|error| io::Error::other(format!("{}: {error}", path.display())))
}

/// What a program writes. What it says when it fails stands in the error.
fn output_of(command: &mut Command) -> io::Result<Vec<u8>> {
    let output = command.output()?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(said.trim().to_owned()))
}

/// An error of the file system that says where.
pub(crate) fn named(path: &Path) -> impl Fn(io::Error) -> io::Error + '_ {
    move |error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
