//! Where blocks are, and what wants to be: words between an arena and whoever asks it.

use kvdepot_media::checksum::Checksum;

use crate::format::GRANULE;
use crate::format::record::Packed;
use crate::key::{Identity, Key};

/// A handle of one reservation or pin. A slot may be reused, but the sequences of a device never
/// repeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token {
    /// Number of the arena in its depot.
    pub device: u32,
    /// Slot in the index.
    pub slot: u32,
    /// Sequence of the record.
    pub sequence: u64,
}

/// The location of a block in an arena, with the values to verify it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Handle of the reservation or pin.
    pub token: Token,
    /// Identity of the block.
    pub identity: Identity,
    /// Extents in the medium.
    pub extents: Packed,
    /// Length of the payload in bytes, including a part table.
    pub len: u64,
    /// Number of parts of the block.
    pub parts: u16,
    /// Checksum from the record.
    pub checksum: Checksum,
    /// Stamp of the last use, in the depot's count of uses.
    pub stamp: u64,
}

impl Place {
    /// Creates a location without extents for a block with one part. A tier fills in the other
    /// fields.
    #[must_use]
    pub fn of(identity: Identity) -> Place {
        Place {
            token: Token {
                device: 0,
                slot: 0,
                sequence: 0,
            },
            identity,
            extents: Packed::default(),
            len: 0,
            parts: 1,
            checksum: Checksum::default(),
            stamp: 0,
        }
    }
}

/// A request for the space of a block.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Key of the block.
    pub key: Key,
    /// Length of the payload in bytes.
    pub len: u64,
    /// Number of parts of the block.
    pub parts: u16,
    /// Stamp of this use.
    pub stamp: u64,
    /// True if the block is copied from another tier or device.
    pub copy: bool,
    /// True if other blocks may be evicted for it.
    pub evict: bool,
}

impl Wanted {
    /// Returns the payload length rounded up to the granule of the arena, or unchanged if it is too
    /// large to round.
    pub fn room(&self) -> u64 {
        self.len
            .checked_next_multiple_of(GRANULE)
            .unwrap_or(self.len)
    }
}
