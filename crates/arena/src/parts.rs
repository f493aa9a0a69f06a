//! Blocks with several parts: the contribution of each rank of a split model, and the table that
//! binds them.
//!
//! A block with one part is only its payload. A block with several parts ends with a table of 32
//! bytes per part (offset, length, checksum), and the record's checksum covers the table. Parts and
//! table start at multiples of 4 KiB in the payload, so that devices can write a part separately.

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

/// Size of a table entry in bytes.
pub const ENTRY: u64 = size_of::<Row>() as u64;
/// Parts begin at multiples of it: pages, which devices and direct I/O ask for.
const ALIGN: u64 = GRANULE;

/// One part of a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Offset in the payload in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Checksum of the bytes, seeded with the identity.
    pub checksum: Checksum,
}

/// The parts of one block. Most blocks have one part, which needs no separate memory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "whoever asks has an answer for each"
)]
pub enum Parts {
    /// The whole block.
    One(Part),
    /// One part per rank.
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

/// Returns the only part of a block without a table, or `None` for a block with several parts.
pub fn single(place: &Place) -> Option<Parts> {
    let part = Part {
        offset: 0,
        len: place.len,
        checksum: place.checksum,
    };
    (place.parts == 1).then_some(Parts::One(part))
}

/// Returns the payload length in bytes for parts of these lengths, including the table.
pub fn payload_len(parts: &[u64]) -> u64 {
    match parts {
        [one] => *one,
        many => table_offset(many) + many.len() as u64 * ENTRY,
    }
}

fn table_offset(parts: &[u64]) -> u64 {
    parts.iter().map(|len| len.next_multiple_of(ALIGN)).sum()
}

/// Returns the parts of a block that is to be written, with zero checksums.
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
///
/// # Errors
///
/// [`Error::Input`] for no parts or too many, for an empty part, or if the total length exceeds the
/// maximum of a block.
pub fn check(parts: &[u64]) -> Result<(), Error> {
    if parts.is_empty() || parts.len() > usize::from(PARTS_MAX) {
        return Err(Error::input(
            "parts",
            parts.len(),
            format!("1 to {PARTS_MAX} parts per block"),
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
            format!("at most {PART_LEN_MAX} bytes per block"),
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

/// Returns the bytes of the table.
pub fn encode(parts: &[Part]) -> Vec<u8> {
    let row = |part: &Part| Row {
        offset: part.offset.into(),
        len: part.len.into(),
        checksum: part.checksum.0,
    };
    let rows: Vec<Row> = parts.iter().map(row).collect();
    rows.as_bytes().to_vec()
}

/// Returns the parts in a table.
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

/// Returns the seed for the checksum of a part.
pub fn part_id(identity: &Identity, part: u32, parts: u16) -> PartId {
    PartId {
        namespace: identity.namespace.0,
        key: identity.key.0,
        part,
        parts: parts.into(),
    }
}

/// Returns the record's checksum for a block with these parts.
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

/// Returns the bytes `[offset, offset + len)` of a payload as ranges of the arena.
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

/// Fills `buffers` with the bytes `[offset, offset + len)` of a payload, for batches.
///
/// # Errors
///
/// [`Error::Media`] if a range exceeds the medium.
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

/// Writes the table of a block with several parts to the end of its payload of `len` bytes.
///
/// # Errors
///
/// [`Error::Media`] if the table cannot be written.
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

/// Returns the parts of a published block, or `None` if its table fails verification.
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

/// Returns the parts in a table that starts at `begin` in the payload, or `None` if it fails
/// verification.
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

/// Returns the caller's bytes of a block with these parts.
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
