//! Room for new sessions: those go that save the least compute a byte.
//!
//! A depot evicts block by block, by use; this keeps sessions whole. What a session's removal gives
//! back is what it alone names: pieces that others share stay. The order is `policy::choose`'s.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use kvdepot_store::Key;

use crate::error::Error;
use crate::index::Id;
use crate::manifest::{Manifest, Reason};
use crate::policy;
use crate::store::Sessions;
use crate::usage::{Usage, now};

/// Result of a trim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Trimmed {
    /// IDs of the removed sessions, in the order of removal.
    pub removed: Vec<Id>,
    /// Size of all sessions before the trim, in bytes, each block counted once.
    pub bytes_before: u64,
    /// Size of all sessions after the trim, in bytes, each block counted once.
    pub bytes: u64,
}

/// One of the sessions, as long as it is there.
struct Kept {
    id: Id,
    manifest: Manifest,
    /// Its blocks, each once: key and bytes.
    blocks: Vec<(Key, u64)>,
    usage: Usage,
    is_bad: bool,
}

/// All sessions, and how many name each block.
struct Room {
    kept: Vec<Kept>,
    named: HashMap<Key, u64>,
    bytes: u64,
}

impl Room {
    fn add(&mut self, one: Kept) {
        for (key, bytes) in &one.blocks {
            let count = self.named.entry(*key).or_default();
            self.bytes += if *count == 0 { *bytes } else { 0 };
            *count += 1;
        }
        self.kept.push(one);
    }

    fn remove(&mut self, at: usize) {
        let one = self.kept.remove(at);
        for (key, bytes) in one.blocks {
            if let Some(count) = self.named.get_mut(&key) {
                *count -= 1;
                self.bytes -= if *count == 0 { bytes } else { 0 };
            }
        }
    }

    /// As the policy sees them: numbered by their places.
    fn entries(&self, keep: &HashSet<Id>) -> Vec<policy::Entry> {
        let alone = |one: &Kept| {
            let each = one.blocks.iter();
            each.filter(|(key, _)| self.named.get(key) == Some(&1))
                .map(|(_, bytes)| bytes)
                .sum()
        };
        let parents = self.parents();
        let entry = |((at, one), parent): ((usize, &Kept), Option<usize>)| policy::Entry {
            id: at as u64,
            parent: parent.map(|at| at as u64),
            reason: reason_of(one.manifest.reason),
            tokens: if one.is_bad {
                0
            } else {
                one.manifest.tokens.len() as u64
            },
            bytes: alone(one),
            hits: one.usage.hits,
            used: Duration::from_secs(one.usage.used.max(one.manifest.created)),
            pins: u32::from(keep.contains(&one.id)),
        };
        self.kept
            .iter()
            .enumerate()
            .zip(parents)
            .map(entry)
            .collect()
    }

    /// Of each the longest other one that it begins with. Sorted, those lie before it: not all are
    /// compared with all.
    fn parents(&self) -> Vec<Option<usize>> {
        let tokens = |at: usize| &self.kept[at].manifest.tokens[..];
        let mut sorted: Vec<usize> = (0..self.kept.len()).collect();
        sorted.sort_by_key(|at| tokens(*at));
        let mut parents = vec![None; sorted.len()];
        // Each of these begins with the one before.
        let mut begun: Vec<usize> = Vec::new();
        for at in sorted {
            while begun
                .pop_if(|last| !tokens(at).starts_with(tokens(*last)))
                .is_some()
            {}
            let shorter = |other: &&usize| tokens(**other).len() < tokens(at).len();
            parents[at] = begun.iter().rev().find(shorter).copied();
            begun.push(at);
        }
        parents
    }
}

/// A policy knows none that was asked for: that stays as long as one that was taken for others.
fn reason_of(reason: Reason) -> policy::Reason {
    match reason {
        Reason::Cold | Reason::Asked => policy::Reason::Cold,
        Reason::Continued => policy::Reason::Continued,
        Reason::Evict => policy::Reason::Evict,
        Reason::Shutdown => policy::Reason::Shutdown,
    }
}

impl Sessions {
    /// Removes sessions until all of them together have at most `most` bytes, each block counted
    /// once.
    ///
    /// Superseded sessions are removed first, then those that save the least compute per byte
    /// ([`policy::choose`]). Sessions in `keep` stay in any case, for example those that are about
    /// to be loaded or extended.
    ///
    /// The call reads all manifests. Sessions that other processes save at the same time are not
    /// counted.
    ///
    /// # Errors
    /// [`Error::Depot`] if the depot fails.
    pub fn trim(&self, most: u64, keep: &[Id]) -> Result<Trimmed, Error> {
        self.refresh()?;
        let keep: HashSet<Id> = keep.iter().copied().collect();
        let mut room = self.room()?;
        let mut trimmed = Trimmed {
            bytes_before: room.bytes,
            bytes: room.bytes,
            ..Trimmed::default()
        };
        let now = Duration::from_secs(now());
        while room.bytes > most {
            // What one gives back depends on which others are there: the first goes, then anew.
            let over = room.bytes - most;
            let entries = room.entries(&keep);
            let able: u64 = entries
                .iter()
                .map(|one| one.bytes * u64::from(one.pins == 0))
                .sum();
            let chosen = policy::choose(&entries, over.min(able), now).unwrap_or_default();
            let first = chosen.first().copied();
            // Where each block is shared by two that may go, none gives anything back alone: the
            // oldest, which is the last one.
            let mut oldest = entries.iter().rev();
            let shared = || oldest.find(|one| one.pins == 0).map(|one| one.id);
            let Some(at) = first.or_else(shared).map(|at| at as usize) else {
                break;
            };
            let id = room.kept[at].id;
            match self.remove(id) {
                Ok(()) => trimmed.removed.push(id),
                // Another has removed it, or saved it anew.
                Err(Error::Unknown(_)) => {}
                Err(error) => return Err(error),
            }
            room.remove(at);
            trimmed.bytes = room.bytes;
        }
        Ok(trimmed)
    }

    fn room(&self) -> Result<Room, Error> {
        let listed = self.list();
        let ids: Vec<Id> = listed.iter().map(|one| one.id).collect();
        let mut room = Room {
            kept: Vec::new(),
            named: HashMap::new(),
            bytes: 0,
        };
        for (one, usage) in listed.into_iter().zip(self.usage(&ids)?) {
            let manifest = match self.manifest(one.id) {
                Ok(manifest) => manifest,
                Err(Error::Unknown(_) | Error::Malformed { .. }) => continue,
                Err(error) => return Err(error),
            };
            let Some((key, len)) = self.block_of(one.id) else {
                continue;
            };
            let pieces = manifest.keys().into_iter();
            let pieces = pieces.zip(manifest.piece_bytes.iter().copied());
            let objects = manifest.object_keys().into_iter();
            let objects = objects.zip(manifest.objects.iter().map(|object| object.bytes));
            let all: HashMap<Key, u64> = pieces.chain(objects).chain([(key, len)]).collect();
            room.add(Kept {
                id: one.id,
                blocks: all.into_iter().collect(),
                manifest,
                usage,
                is_bad: one.is_bad,
            });
        }
        Ok(room)
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_testkit::Rng;

    use super::*;
    use crate::manifest::sample;

    fn parent(room: &Room, of: usize) -> Option<usize> {
        let tokens = &room.kept[of].manifest.tokens;
        let shorter = room.kept.iter().enumerate().filter(|(_, other)| {
            other.manifest.tokens.len() < tokens.len() && tokens.starts_with(&other.manifest.tokens)
        });
        let longest = shorter.max_by_key(|(_, other)| other.manifest.tokens.len());
        longest.map(|(at, _)| at)
    }

    #[test]
    fn a_parent_is_the_longest_other_one_that_a_session_begins_with() {
        let mut rng = Rng::for_test("a_parent_is_the_longest_other_one_that_a_session_begins_with");
        let mut room = Room {
            kept: Vec::new(),
            named: HashMap::new(),
            bytes: 0,
        };
        for at in 0..200 {
            let mut manifest = sample();
            let count = 1 + rng.below(7);
            manifest.tokens = (0..count).map(|_| rng.below(2) as u32).collect();
            room.add(Kept {
                id: Id([at; 16]),
                manifest,
                blocks: Vec::new(),
                usage: Usage::default(),
                is_bad: false,
            });
        }
        let wanted: Vec<_> = (0..200).map(|at| parent(&room, at)).collect();
        assert_eq!(room.parents(), wanted);
    }
}
