//! The superblock: the parameters of an arena. There are two copies; the valid one with the higher
//! generation counts.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute, transmute_ref};

use super::layout::{self, Layout};
use super::{Sealed, Text, record};

/// Size of a superblock in bytes.
pub const LEN: usize = 4096;
/// First bytes of every arena.
pub const MAGIC: [u8; 8] = *b"KVDEPOT\0";
/// Format version that this release writes and reads.
pub const VERSION: u32 = 1;

/// The fields of a superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Random ID from the formatting of the arena; it seeds the checksums of records.
    pub uuid: [u8; 16],
    /// Length of the arena in bytes.
    pub capacity: u64,
    /// Number of entries in the record table.
    pub records: u64,
    /// Offset of the first extent in bytes.
    pub data: u64,
    /// Number of openings. Its low 24 bits are the high bits of the sequences that were assigned
    /// since.
    pub generation: u64,
    /// Time of the formatting in Unix seconds.
    pub created: u64,
    /// Name of the program that formatted the arena.
    pub created_by: String,
}

/// The reason for which this release cannot use a page as a superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// The page does not start with the magic number.
    NotAnArena,
    /// A newer format version wrote the page.
    Version(u32),
    /// The magic number is correct, but the checksum is wrong.
    Damaged,
}

/// A superblock as it stands on the medium.
type Page = Sealed<Body>;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Body {
    magic: [u8; 8],
    version: U32,
    record_len: U32,
    uuid: [u8; 16],
    capacity: U64,
    table: U64,
    records: U64,
    data: U64,
    generation: U64,
    created: U64,
    created_by: Text<32>,
    unused: [u8; 3976],
}

impl Superblock {
    /// Returns the page for the medium.
    #[must_use]
    pub fn encode(&self) -> [u8; LEN] {
        let body = Body {
            magic: MAGIC,
            version: VERSION.into(),
            record_len: (record::LEN as u32).into(),
            uuid: self.uuid,
            capacity: self.capacity.into(),
            table: layout::TABLE.into(),
            records: self.records.into(),
            data: self.data.into(),
            generation: self.generation.into(),
            created: self.created.into(),
            created_by: Text::new(&self.created_by),
            unused: [0; _],
        };
        transmute!(Page::new(body, 0))
    }

    /// Decodes a page.
    ///
    /// # Errors
    ///
    /// The reason for which this release cannot use the page.
    pub fn decode(page: &[u8; LEN]) -> Result<Superblock, Refusal> {
        if !page.starts_with(&MAGIC) {
            return Err(Refusal::NotAnArena);
        }
        let page: &Page = transmute_ref!(page);
        let body = page.verified(0).ok_or(Refusal::Damaged)?;
        if body.version != VERSION {
            return Err(Refusal::Version(body.version.get()));
        }
        let superblock = Superblock {
            uuid: body.uuid,
            capacity: body.capacity.get(),
            records: body.records.get(),
            data: body.data.get(),
            generation: body.generation.get(),
            created: body.created.get(),
            created_by: (&body.created_by).into(),
        };
        let layout = Layout::new(superblock.capacity, superblock.records);
        match layout {
            Some(layout) if layout.data == superblock.data => Ok(superblock),
            _ => Err(Refusal::Damaged),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Superblock {
        let layout = Layout::new(1 << 20, 16).unwrap();
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
        let forged: Page = transmute!(page);
        let page = transmute!(Page::new(forged.body, 0));
        assert_eq!(Superblock::decode(&page), Err(Refusal::Version(9)));
    }

    #[test]
    fn it_is_what_the_page_says() {
        crate::format::assert_documented!(
            "## Superblock",
            Body {
                magic, version, record_len, uuid, capacity, table, records, data, generation,
                created, created_by
            } unused { unused }
        );
    }
}
