//! Blocks in parts: what each rank of a split model contributes, and the table that binds them.
//!
//! A block of one part is its payload. A block of several ends in a table of 32 bytes a part
//! (offset, length, checksum), and its record's checksum covers the table. Parts and table begin
//! at multiples of 4 KiB of the payload, so that devices can write a part on its own.

use kvdepot_media::checksum::{self, Checksum, PartId};
use kvdepot_media::{Buffer, PART_LEN_MAX};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute_ref};

use crate::error::Error;
use crate::format::GRANULE;
use crate::format::record::{PARTS_MAX, Packed};
use crate::key::Identity;
use crate::medium::Medium;
use crate::place::Place;

/// Bytes of a table entry.
pub const ENTRY: u64 = size_of::<Row>() as u64;
/// Parts begin at multiples of it: pages, which devices and direct I/O ask for.
const ALIGN: u64 = GRANULE;

/// One part of a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Where it begins in the payload.
    pub offset: u64,
    /// Its bytes.
    pub len: u64,
    /// Of its bytes, seeded with the identity.
    pub checksum: Checksum,
}

/// The parts of one block; nearly all have one, which costs no memory of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "whoever asks has an answer for each"
)]
pub enum Parts {
    /// The whole block.
    One(Part),
    /// One a rank.
    Many(Vec<Part>),
}

impl std::ops::Deref for Parts {
    type Target = [Part];

    fn deref(&self) -> &[Part] {
        match self {
            Parts::One(part) => std::slice::from_ref(part),
            Parts::Many(parts) => parts,
        }
    }
}

impl From<Vec<Part>> for Parts {
    fn from(parts: Vec<Part>) -> Parts {
        match parts.as_slice() {
            [one] => Parts::One(*one),
            _ => Parts::Many(parts),
        }
    }
}

/// The one part of a block that has no table.
pub fn single(place: &Place) -> Option<Parts> {
    let part = Part {
        offset: 0,
        len: place.len,
        checksum: place.checksum,
    };
    (place.parts == 1).then_some(Parts::One(part))
}

/// Bytes of a payload whose parts have these lengths, table included.
pub fn payload_len(parts: &[u64]) -> u64 {
    match parts {
        [one] => *one,
        many => table_offset(many) + many.len() as u64 * ENTRY,
    }
}

fn table_offset(parts: &[u64]) -> u64 {
    parts.iter().map(|len| len.next_multiple_of(ALIGN)).sum()
}

/// The parts of a block about to be written, their checksums still zero.
pub fn blank(parts: &[u64]) -> Vec<Part> {
    let mut offset = 0;
    let place = |len: &u64| {
        let part = Part {
            offset,
            len: *len,
            checksum: Checksum::default(),
        };
        offset += len.next_multiple_of(ALIGN);
        part
    };
    parts.iter().map(place).collect()
}

/// Checks the part lengths of a reservation.
pub fn check(parts: &[u64]) -> Result<(), Error> {
    if parts.is_empty() || parts.len() > usize::from(PARTS_MAX) {
        return Err(Error::input(
            "parts",
            parts.len(),
            format!("1 to {PARTS_MAX}"),
        ));
    }
    if parts.contains(&0) {
        let field = if parts.len() == 1 {
            "lengths"
        } else {
            "part_lengths"
        };
        return Err(Error::input(field, 0, "at least one byte"));
    }
    let total = parts
        .iter()
        .fold(0, |sum: u64, len| sum.saturating_add(*len));
    if total > PART_LEN_MAX {
        return Err(Error::input(
            "lengths",
            total,
            format!("at most {PART_LEN_MAX} bytes a block"),
        ));
    }
    Ok(())
}

/// A table entry.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Row {
    pub(crate) offset: U64,
    pub(crate) len: U64,
    pub(crate) checksum: [u8; 16],
}

/// The table's bytes.
pub fn encode(parts: &[Part]) -> Vec<u8> {
    let row = |part: &Part| Row {
        offset: part.offset.into(),
        len: part.len.into(),
        checksum: part.checksum.0,
    };
    let rows: Vec<Row> = parts.iter().map(row).collect();
    rows.as_bytes().to_vec()
}

/// The parts that a table names.
pub fn decode(table: &[u8]) -> Vec<Part> {
    let (entries, _) = table.as_chunks::<{ size_of::<Row>() }>();
    let part = |entry: &[u8; size_of::<Row>()]| {
        let row: &Row = transmute_ref!(entry);
        Part {
            offset: row.offset.get(),
            len: row.len.get(),
            checksum: Checksum(row.checksum),
        }
    };
    entries.iter().map(part).collect()
}

/// What the checksum of a part is seeded with.
pub fn part_id(identity: &Identity, part: u32, parts: u16) -> PartId {
    PartId {
        namespace: identity.namespace.0,
        key: identity.key.0,
        part,
        parts: parts.into(),
    }
}

/// The record's checksum of a block with these parts.
pub fn record_checksum(identity: &Identity, parts: &[Part]) -> Checksum {
    match parts {
        [one] => one.checksum,
        many => checksum::of_table(
            &identity.namespace.0,
            &identity.key.0,
            many.len() as u32,
            &encode(many),
        ),
    }
}

/// The bytes `[offset, offset + len)` of a payload as ranges of the arena.
pub fn ranges(extents: &Packed, offset: u64, len: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
    let (mut skip, mut left) = (offset, len);
    extents.iter().filter_map(move |(at, room)| {
        let begin = skip.min(room);
        skip -= begin;
        let take = (room - begin).min(left);
        left -= take;
        (take > 0).then_some((at + begin, take))
    })
}

/// Fills `buffers` with the same bytes.
pub fn buffers(
    medium: &dyn Medium,
    extents: &Packed,
    (offset, len): (u64, u64),
    buffers: &mut Vec<Buffer>,
) -> Result<(), Error> {
    buffers.clear();
    for (at, len) in ranges(extents, offset, len) {
        buffers.push(medium.buffer(at, len)?);
    }
    // Parts begin at pages, and what is behind the last one is of no meaning.
    if let Some(last) = buffers.last_mut() {
        last.pad();
    }
    Ok(())
}

/// Writes the table of a block in several parts to its place at the payload's end.
pub fn write_table(
    medium: &dyn Medium,
    extents: &Packed,
    len: u64,
    parts: &[Part],
) -> Result<(), Error> {
    let table = encode(parts);
    let mut rest = table.as_slice();
    for (at, len) in ranges(extents, len - table.len() as u64, table.len() as u64) {
        let (now, later) = rest.split_at(len as usize);
        medium.write_at(at, now)?;
        rest = later;
    }
    Ok(())
}

/// The parts of a published block; `None` when its table does not verify.
pub fn read(
    medium: &dyn Medium,
    identity: &Identity,
    extents: &Packed,
    len: u64,
    parts: u16,
    checksum: Checksum,
) -> Option<Vec<Part>> {
    if parts == 1 {
        return Some(vec![Part {
            offset: 0,
            len,
            checksum,
        }]);
    }
    let table_len = u64::from(parts) * ENTRY;
    let begin = len.checked_sub(table_len)?;
    let mut table = vec![0; table_len as usize];
    let mut at = 0;
    for (offset, len) in ranges(extents, begin, table_len) {
        medium
            .read_at(offset, &mut table[at..at + len as usize])
            .ok()?;
        at += len as usize;
    }
    of_table(identity, &table, begin, checksum)
}

/// The parts that a table names, which begins at `begin` of the payload; `None` when it does not
/// verify.
pub fn of_table(
    identity: &Identity,
    table: &[u8],
    begin: u64,
    checksum: Checksum,
) -> Option<Vec<Part>> {
    let found = decode(table);
    if record_checksum(identity, &found) != checksum {
        return None;
    }
    let inside = |part: &Part| {
        part.offset
            .checked_add(part.len)
            .is_some_and(|end| end <= begin)
    };
    found.iter().all(inside).then_some(found)
}

/// The caller's bytes of a block with these parts.
#[must_use]
pub fn bytes(found: &[Part]) -> u64 {
    found.iter().map(|part| part.len).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_cut_across_extents() {
        let extents = Packed::new(&[(8192, 4096), (65536, 8192)]).unwrap();
        let all: Vec<_> = ranges(&extents, 4000, 200).collect();
        assert_eq!(all, [(8192 + 4000, 96), (65536, 104)]);
        assert_eq!(
            ranges(&extents, 4096, 8192).collect::<Vec<_>>(),
            [(65536, 8192)]
        );
    }

    #[test]
    fn the_table_follows_the_parts_aligned() {
        assert_eq!(payload_len(&[100]), 100);
        assert_eq!(payload_len(&[100, 100]), 8192 + 64);
        let parts = blank(&[100, 100]);
        assert_eq!(parts[1].offset, 4096);
        assert_eq!(decode(&encode(&parts)), parts);
    }

    #[test]
    fn it_is_what_the_page_says() {
        crate::format::assert_documented!(
            "### Several parts",
            Row { offset, len, checksum } unused {  }
        );
    }
}
