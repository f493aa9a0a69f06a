//! Mutations drawn from what `cargo-mutants` proposes, in an order that a seed makes and that
//! stays as it is where the code around them changes.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use super::edit::Edit;
use super::{Mutation, Set, output_of};

/// Where mutations are drawn from, by crate.
const ROOMS: [(&str, &str); 4] = [
    ("arena", ""),
    ("store", "tier/"),
    ("store", "pipeline/"),
    ("service", ""),
];

/// The draw of this project: another seed is another campaign.
pub const SEED: u64 = 10;

#[derive(Deserialize)]
struct Proposed {
    diff: String,
    file: PathBuf,
    name: String,
}

/// All that is proposed, in the order of the draw.
///
/// # Errors
/// `cargo-mutants` is missing, or fails.
pub fn draw(root: &Path, seed: u64) -> io::Result<Vec<Mutation>> {
    let mut command = Command::new("cargo");
    command
        .current_dir(root)
        .args(["mutants", "--list", "--json", "--diff"]);
    for (owner, room) in ROOMS {
        command.args(["-p", &format!("kvdepot-{owner}")]);
        command.args(["--file", &format!("crates/{owner}/src/{room}**")]);
    }
    let hint = "hint: cargo install cargo-mutants --locked";
    let listed = output_of(&mut command)
        .map_err(|error| io::Error::other(format!("cargo mutants: {error}\n{hint}")))?;
    let proposed: Vec<Proposed> = serde_json::from_slice(&listed)
        .map_err(|error| io::Error::other(format!("cargo mutants: {error}")))?;
    let mut seen: HashMap<String, u32> = HashMap::new();
    let mut drawn: Vec<(u64, Mutation)> = proposed
        .into_iter()
        .map(|proposed| {
            let what = describe(&proposed.name);
            let times = seen.entry(what.clone()).or_insert(0);
            *times += 1;
            let id = match *times {
                1 => what.clone(),
                times => format!("{what} ({times})"),
            };
            let mutation = Mutation {
                set: Set::Drawn,
                why: what,
                edits: Edit::of_diff(&proposed.file, &proposed.diff),
                id,
            };
            (rank(seed, &mutation.id), mutation)
        })
        .collect();
    drawn.sort_by(|a, b| (a.0, &a.1.id).cmp(&(b.0, &b.1.id)));
    Ok(drawn.into_iter().map(|(_, mutation)| mutation).collect())
}

/// A proposal's name without line and column.
fn describe(name: &str) -> String {
    let short = name.strip_prefix("crates/").unwrap_or(name);
    let short = short.replacen("/src/", "/", 1);
    let short = short.strip_prefix("store/").unwrap_or(&short);
    let mut pieces = short.splitn(4, ':');
    match (pieces.next(), pieces.nth(2)) {
        (Some(file), Some(what)) => format!("{file}:{what}"),
        _ => short.to_owned(),
    }
}

/// FNV-1a, and the last steps of SplitMix64: the same on every machine and for all time.
fn rank(seed: u64, id: &str) -> u64 {
    let mut hash = 0xCBF2_9CE4_8422_2325 ^ seed;
    for byte in id.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3);
    }
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    hash ^ (hash >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_what_and_not_on_which_line() {
        let name = "crates/arena/src/bury.rs:94:9: replace Wanted::room -> u64 with 0";
        assert_eq!(
            describe(name),
            "arena/bury.rs: replace Wanted::room -> u64 with 0"
        );
    }

    #[test]
    fn seeds_draw_in_different_orders() {
        assert_eq!(rank(1, "a"), rank(1, "a"));
        assert_ne!(rank(1, "a"), rank(2, "a"));
    }
}
