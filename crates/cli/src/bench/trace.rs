//! Requests to an engine: which blocks each prompt consists of.

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use serde::Deserialize;

use super::random::Random;
use crate::error::Error;

/// Conversations at a time in made-up requests.
const CONVERSATIONS: u64 = 512;
/// System prompts that conversations begin with, and their most blocks.
const SYSTEMS: u64 = 4;
const SYSTEM_BLOCKS: u64 = 6;
/// Blocks that a turn adds to its conversation, at most; the first one may be a long document.
const TURN_BLOCKS: u64 = 8;
const DOCUMENT_BLOCKS: u64 = 64;
/// One turn in so many is the last of its conversation.
const LAST_TURN: u64 = 4;

/// Requests that come together where nothing says when they come.
const TOGETHER: usize = 8;

/// Prompts in the order of their requests.
pub(super) struct Requests {
    pub(super) prompts: Vec<Prompt>,
    /// Blocks that differ.
    pub(super) blocks: usize,
    /// Where they are from: `file` or `synthetic`.
    pub(super) source: &'static str,
}

/// The blocks of a request.
#[derive(Clone)]
pub(super) struct Prompt {
    /// Requests of one moment follow each other.
    pub(super) moment: u64,
    pub(super) blocks: Vec<u64>,
}

/// A line of the file; it may have more fields.
#[derive(Deserialize)]
struct Line {
    timestamp: Option<u64>,
    hash_ids: Vec<u64>,
}

pub(super) fn requests(path: Option<&Path>, quick: bool) -> Result<Requests, Error> {
    let prompts = match path {
        Some(path) => read(path)?,
        None => conversations(if quick { 3000 } else { 12_000 }),
    };
    let blocks: HashSet<u64> = prompts.iter().flat_map(|p| p.blocks.clone()).collect();
    Ok(Requests {
        prompts,
        blocks: blocks.len(),
        source: if path.is_some() { "file" } else { "synthetic" },
    })
}

/// The requests of a file.
pub(super) fn read(path: &Path) -> Result<Vec<Prompt>, Error> {
    let file = BufReader::new(File::open(path).map_err(Error::unreadable("--trace", path))?);
    let mut prompts = Vec::new();
    for (index, line) in file.lines().enumerate() {
        let line = line.map_err(Error::io(path))?;
        if line.trim().is_empty() {
            continue;
        }
        let line: Line = serde_json::from_str(&line).map_err(|error| Error::Usage {
            field: "--trace",
            value: format!("{}:{}", path.display(), index + 1),
            allowed: format!("a JSON object with hash_ids ({error})"),
        })?;
        prompts.push(Prompt {
            moment: line.timestamp.unwrap_or((prompts.len() / TOGETHER) as u64),
            blocks: line.hash_ids,
        });
    }
    if prompts.iter().all(|prompt| prompt.blocks.is_empty()) {
        return Err(Error::Usage {
            field: "--trace",
            value: path.display().to_string(),
            allowed: "a file with at least one request that has blocks".into(),
        });
    }
    Ok(prompts)
}

/// Requests of conversations that take turns at random: each turn sends all that was said before.
fn conversations(requests: usize) -> Vec<Prompt> {
    let mut random = Random(19);
    let systems: Vec<Vec<u64>> = (0..SYSTEMS)
        .map(|system| {
            let first = system * SYSTEM_BLOCKS;
            (first..first + random.within(1, SYSTEM_BLOCKS)).collect()
        })
        .collect();
    let mut next = SYSTEMS * SYSTEM_BLOCKS;
    let mut running = vec![Vec::new(); CONVERSATIONS as usize];
    let mut prompts = Vec::with_capacity(requests);
    for request in 0..requests {
        let talk = &mut running[random.below(CONVERSATIONS) as usize];
        let mut said = random.within(1, TURN_BLOCKS);
        if talk.is_empty() {
            talk.clone_from(&systems[random.below(SYSTEMS) as usize]);
            said = random.within(1, DOCUMENT_BLOCKS);
        }
        talk.extend(next..next + said);
        next += said;
        prompts.push(Prompt {
            moment: (request / TOGETHER) as u64,
            blocks: talk.clone(),
        });
        if random.below(LAST_TURN) == 0 {
            talk.clear();
        }
    }
    prompts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_continue_their_conversations() {
        let prompts = conversations(4000);
        let last = |blocks: &[u64]| blocks[blocks.len() - 1];
        let mut seen = HashSet::new();
        let mut continued = 0;
        for prompt in prompts.iter().map(|prompt| &prompt.blocks) {
            continued += usize::from(prompt.iter().any(|block| seen.contains(block)));
            assert!(seen.insert(last(prompt)), "each turn says something new");
        }
        assert!(continued > prompts.len() / 2, "{continued}");
    }
}
