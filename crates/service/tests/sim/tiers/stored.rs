//! A block where a tier has stored it.

use kvdepot_arena::Place;
use kvdepot_arena::parts::{self, Part};
use kvdepot_media::{Checksum, checksum};
use kvdepot_store::Identity;

use super::memory::Memory;

/// A block that is stored.
#[derive(Clone)]
pub struct Stored {
    pub memory: Memory,
    pub len: u64,
    pub parts: u16,
    pub checksum: Checksum,
}

impl Stored {
    pub fn new(memory: Memory, len: u64, parts: u16, checksum: Checksum) -> Stored {
        Stored {
            memory,
            len,
            parts,
            checksum,
        }
    }

    pub fn is_sound(&self, identity: &Identity) -> bool {
        let (bytes, count) = (self.memory.to_vec(), self.parts);
        let found = self.table(identity, &bytes).unwrap_or_default();
        let sound = |(number, part): (usize, &Part)| {
            let id = parts::part_id(identity, number as u32, count);
            let range = part.offset as usize..(part.offset + part.len) as usize;
            checksum::of(&id, &bytes[range]) == part.checksum
        };
        !found.is_empty() && found.iter().enumerate().all(sound)
    }

    /// The parts, where their table verifies.
    pub fn table(&self, identity: &Identity, bytes: &[u8]) -> Option<Vec<Part>> {
        let place = Place {
            len: self.len,
            parts: self.parts,
            checksum: self.checksum,
            ..Place::of(*identity)
        };
        if let Some(parts) = parts::single(&place) {
            return Some(parts.to_vec());
        }
        let begin = self.len - u64::from(self.parts) * parts::ENTRY;
        parts::of_table(identity, &bytes[begin as usize..], begin, self.checksum)
    }
}
