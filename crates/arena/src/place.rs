//! Where blocks are, and what wants to be: words between an arena and whoever asks it.

use kvdepot_media::checksum::Checksum;

use crate::format::GRANULE;
use crate::format::record::Packed;
use crate::key::{Identity, Key};

/// Names one reservation or pin: the slot may be reused, the device's sequences never are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token {
    /// The arena's number in its depot.
    pub device: u32,
    /// Its slot in the table.
    pub slot: u32,
    /// The sequence of its record.
    pub sequence: u64,
}

/// Where a block's bytes are inside an arena, and how to know them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which one it is.
    pub token: Token,
    /// What it is.
    pub identity: Identity,
    /// Where it lies in the medium.
    pub extents: Packed,
    /// Payload bytes, with a part table.
    pub len: u64,
    /// Parts of the block.
    pub parts: u16,
    /// What its record says of the bytes.
    pub checksum: Checksum,
    /// When it was used last, in the depot's count of uses.
    pub stamp: u64,
}

impl Place {
    /// A block of one part that lies nowhere yet: what a tier says of one fills in the rest.
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

/// A block that wants room.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Its key.
    pub key: Key,
    /// Payload bytes.
    pub len: u64,
    /// Parts of the block.
    pub parts: u16,
    /// This use of it.
    pub stamp: u64,
    /// Whether it is copied from another tier or device.
    pub copy: bool,
    /// Whether others may be evicted for it.
    pub evict: bool,
}

impl Wanted {
    /// Payload bytes as the arena rounds them, if they are not far too many.
    pub fn room(&self) -> u64 {
        self.len
            .checked_next_multiple_of(GRANULE)
            .unwrap_or(self.len)
    }
}
