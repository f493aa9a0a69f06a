//! What became of a batch.

use super::cargo::Cargo;
use crate::checksum::{Checksum, Mac};
use crate::error::Failure;
use kvdepot_plan::Ending;

/// A part that was moved, or only read, as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome {
    /// The checksum of the bytes that were read, and that were stored if the part was copied.
    pub checksum: Checksum,
    /// Its MAC, where it was to be authenticated.
    pub mac: Option<Mac>,
    /// Whether both are the expected ones; none was expected if `None`.
    pub matches: Option<bool>,
}

/// A finished batch: all lanes have stopped and fenced, and its buffers are still held.
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

    /// The number of parts.
    #[must_use]
    pub fn len(&self) -> usize {
        self.cargo.parts.len()
    }

    /// Whether the batch had no parts.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.cargo.parts.is_empty()
    }

    /// The bytes of all parts together.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.cargo.bytes
    }

    /// The part that was added at position `index`: its tag, and what became of it. `None` beyond
    /// the last one.
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

    /// The digests of the leaves of the part at position `index`, in order, where the batch was to
    /// [keep](super::Batch::keep_leaves) them and the part has an outcome; else none. They compose
    /// to its checksum.
    pub fn leaves(&self, index: usize) -> impl Iterator<Item = u128> + use<'_> {
        let is_whole = self.cargo.keeps_leaves && matches!(self.part(index), Some((_, Ok(_))));
        self.cargo.leaves(index).filter(move |_| is_whole)
    }

    /// All parts in the order in which they were added.
    pub fn parts(&self) -> impl Iterator<Item = (u32, Result<Outcome, Failure>)> + use<'_> {
        (0..self.len()).filter_map(|index| self.part(index))
    }

    /// Whether every part has an outcome and none differs from what was expected.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.parts()
            .all(|(_, part)| part.is_ok_and(|outcome| outcome.matches != Some(false)))
    }
}
