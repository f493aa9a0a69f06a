//! The superblock: what an arena is. Two copies; the higher generation that verifies counts.

use xxhash_rust::xxh3::xxh3_64;

use super::{get, get_text, get_u32, get_u64, put, put_text};

/// Bytes of a superblock.
pub const LEN: usize = 4096;
/// First bytes of every arena.
pub const MAGIC: [u8; 8] = *b"KVDEPOT\0";
/// The version this release writes and reads.
pub const VERSION: u32 = 1;
const CHECKSUM_AT: usize = LEN - 8;

/// The superblock's fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Drawn at random when the arena is formatted; seeds the record checksums.
    pub uuid: [u8; 16],
    /// Length of the arena in bytes.
    pub capacity: u64,
    /// Entries of the record table.
    pub records: u64,
    /// Offset where extents begin.
    pub data: u64,
    /// Counts openings; its low 24 bits are the high bits of the sequences given out since.
    pub generation: u64,
    /// Unix seconds of the formatting.
    pub created: u64,
    /// What formatted it.
    pub created_by: String,
}

/// Why a page is not a superblock this release can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// It does not begin with the magic number.
    NotAnArena,
    /// Written by a newer format version.
    Version(u32),
    /// The magic number is there, the checksum is wrong.
    Damaged,
}

impl Superblock {
    /// The page as it stands on the medium.
    #[must_use]
    pub fn encode(&self) -> [u8; LEN] {
        let mut page = [0; LEN];
        put(&mut page, 0, &MAGIC);
        put(&mut page, 8, &VERSION.to_le_bytes());
        put(&mut page, 12, &(super::record::LEN as u32).to_le_bytes());
        put(&mut page, 16, &self.uuid);
        put(&mut page, 32, &self.capacity.to_le_bytes());
        put(&mut page, 40, &super::layout::TABLE.to_le_bytes());
        put(&mut page, 48, &self.records.to_le_bytes());
        put(&mut page, 56, &self.data.to_le_bytes());
        put(&mut page, 64, &self.generation.to_le_bytes());
        put(&mut page, 72, &self.created.to_le_bytes());
        put_text(&mut page, 80, 32, &self.created_by);
        let checksum = xxh3_64(&page[..CHECKSUM_AT]);
        put(&mut page, CHECKSUM_AT, &checksum.to_le_bytes());
        page
    }

    /// Reads a page.
    ///
    /// # Errors
    /// What keeps it from being used.
    pub fn decode(page: &[u8; LEN]) -> Result<Superblock, Refusal> {
        if get::<8>(page, 0) != MAGIC {
            return Err(Refusal::NotAnArena);
        }
        if get_u64(page, CHECKSUM_AT) != xxh3_64(&page[..CHECKSUM_AT]) {
            return Err(Refusal::Damaged);
        }
        let version = get_u32(page, 8);
        if version != VERSION {
            return Err(Refusal::Version(version));
        }
        let superblock = Superblock {
            uuid: get(page, 16),
            capacity: get_u64(page, 32),
            records: get_u64(page, 48),
            data: get_u64(page, 56),
            generation: get_u64(page, 64),
            created: get_u64(page, 72),
            created_by: get_text(page, 80, 32),
        };
        let layout = super::layout::Layout::new(superblock.capacity, superblock.records);
        if layout.is_none_or(|layout| layout.data != superblock.data) {
            return Err(Refusal::Damaged);
        }
        Ok(superblock)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Superblock {
        let layout = super::super::layout::Layout::new(1 << 20, 16).unwrap();
        Superblock {
            uuid: [7; 16],
            capacity: layout.capacity,
            records: layout.records,
            data: layout.data,
            generation: 3,
            created: 1_700_000_000,
            created_by: "kvdepot 0.1.0".into(),
        }
    }

    #[test]
    fn survives_a_round_trip() {
        assert_eq!(Superblock::decode(&sample().encode()), Ok(sample()));
    }

    #[test]
    fn any_flipped_byte_is_noticed() {
        let page = sample().encode();
        for at in 0..LEN {
            let mut bad = page;
            bad[at] ^= 0x10;
            assert!(Superblock::decode(&bad).is_err(), "byte {at}");
        }
    }

    #[test]
    fn a_newer_version_is_named() {
        let mut page = sample().encode();
        page[8] = 9;
        let checksum = xxh3_64(&page[..CHECKSUM_AT]);
        page[CHECKSUM_AT..].copy_from_slice(&checksum.to_le_bytes());
        assert_eq!(Superblock::decode(&page), Err(Refusal::Version(9)));
    }
}
