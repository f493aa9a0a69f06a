//! What became of a batch.

use super::cargo::Cargo;
use crate::checksum::{Checksum, Mac};
use crate::error::Failure;
use kvdepot_plan::Ending;

/// The result of a part that was completely moved or hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome {
    /// Checksum of the bytes that were read, and stored if the part was copied.
    pub checksum: Checksum,
    /// MAC of the part, if it was to be authenticated.
    pub mac: Option<Mac>,
    /// True if checksum and MAC equal the expected ones; `None` if neither was expected.
    pub matches: Option<bool>,
}

/// A finished batch: all copy threads have stopped and fenced, and the buffers are still held.
#[derive(Debug)]
pub struct Done<'a> {
    cargo: &'a Cargo,
    ending: Ending,
    refused: bool,
}

impl<'a> Done<'a> {
    pub(super) fn new(cargo: &'a Cargo, ending: Ending, refused: bool) -> Self {
        Self {
            cargo,
            ending,
            refused,
        }
    }

    /// Returns the number of parts.
    #[must_use]
    pub fn len(&self) -> usize {
        self.cargo.parts.len()
    }

    /// Returns true if the batch had no parts.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.cargo.parts.is_empty()
    }

    /// Returns the total length of all parts in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.cargo.bytes
    }

    /// Returns the tag and the result of the part at position `index`, or `None` after the last
    /// one.
    #[must_use]
    pub fn part(&self, index: usize) -> Option<(u32, Result<Outcome, Failure>)> {
        let part = self.cargo.parts.get(index)?;
        let outcome = match (part.failure(), part.checksum()) {
            (Some(failure), _) => Err(failure),
            (None, Some(_)) if self.cargo.is_lost(index) => Err(Failure::MemoryLost),
            (None, Some(checksum)) => {
                let mac = part.mac();
                let sums = part.expected.map(|expected| expected == checksum);
                let macs = part.mac_expected.map(|expected| Some(expected) == mac);
                Ok(Outcome {
                    checksum,
                    mac,
                    matches: sums.map(|sums| sums && macs.unwrap_or(true)).or(macs),
                })
            }
            _ if self.refused => Err(Failure::Closed),
            _ if self.ending.panicked => Err(Failure::LanePanicked),
            _ => Err(Failure::Cancelled),
        };
        Some((part.tag, outcome))
    }

    /// Returns the digests of the leaves of the part at position `index`, in order.
    ///
    /// They compose to its checksum. The iterator is empty if the part failed, or if the batch did
    /// not [keep](super::Batch::keep_leaves) the digests.
    pub fn leaves(&self, index: usize) -> impl Iterator<Item = u128> + use<'_> {
        let is_whole = self.cargo.keeps_leaves && matches!(self.part(index), Some((_, Ok(_))));
        self.cargo.leaves(index).filter(move |_| is_whole)
    }

    /// Returns the tags and results of all parts, in the order in which they were added.
    pub fn parts(&self) -> impl Iterator<Item = (u32, Result<Outcome, Failure>)> + use<'_> {
        (0..self.len()).filter_map(|index| self.part(index))
    }

    /// Returns true if every part succeeded and matches the expected checksum and MAC.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.parts()
            .all(|(_, part)| part.is_ok_and(|outcome| outcome.matches != Some(false)))
    }
}
