//! The record: 128 bytes that make extents a published block. Writing it as a whole, after the
//! payload, is the commit.

use std::mem::offset_of;

use kvdepot_media::checksum::Checksum;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute, transmute_ref};

use super::{GRANULE, Sealed};
use crate::key::{Identity, Key, NamespaceId};

/// Size of a record in bytes.
pub const LEN: usize = size_of::<Row>();
/// Maximum number of extents of a block.
pub const EXTENTS_MAX: usize = 4;
/// Maximum number of parts of a block. It is larger than the number of ranks over which any
/// deployment splits a model.
pub const PARTS_MAX: u16 = 4096;
/// Bits of a sequence that count within one generation.
pub(crate) const COUNTER_BITS: u32 = 40;
/// Where a record says when its block was put.
pub(crate) const CREATED_AT: u64 = offset_of!(Body, created) as u64;
/// Low bits of a packed extent: its offset in granules (4 EiB of arena).
const OFFSET_BITS: u32 = 40;
/// Longest extent: 24 bits of granules, 64 GiB.
const GRANULES_MAX: u64 = (1 << 24) - 1;

/// State of a record, which decides whether its block may be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// Published.
    Live,
    /// Evicted or removed. Its sequence still supersedes older records of the same bytes.
    Dead,
}

/// Up to four extents in payload order, packed as on the medium.
///
/// Each value has the offset in granules in its low 40 bits and the length in granules in its high
/// 24 bits; unused values are zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packed(pub [u64; EXTENTS_MAX]);

impl Packed {
    /// Packs extents of `(offset, length)` in bytes.
    ///
    /// Returns `None` if there are none or too many, or if a value is not a multiple of the granule
    /// or exceeds the format.
    #[must_use]
    pub fn new(extents: &[(u64, u64)]) -> Option<Packed> {
        if extents.is_empty() || extents.len() > EXTENTS_MAX {
            return None;
        }
        let mut packed = [0; EXTENTS_MAX];
        for (slot, (offset, len)) in packed.iter_mut().zip(extents) {
            let (at, granules) = (offset / GRANULE, len / GRANULE);
            let fits = offset % GRANULE == 0
                && len % GRANULE == 0
                && at < 1 << OFFSET_BITS
                && (1..=GRANULES_MAX).contains(&granules);
            if !fits {
                return None;
            }
            *slot = granules << OFFSET_BITS | at;
        }
        Some(Packed(packed))
    }

    /// Returns an iterator over the extents as `(offset, length)` in bytes.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().filter(|packed| **packed != 0).map(|packed| {
            (
                (packed & ((1 << OFFSET_BITS) - 1)) * GRANULE,
                (packed >> OFFSET_BITS) * GRANULE,
            )
        })
    }

    /// Returns true if no extent is empty and no two extents overlap.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let apart = |(at, len): (u64, u64), (other, room): (u64, u64)| {
            at + len <= other || other + room <= at
        };
        self.iter().enumerate().all(|(index, extent)| {
            extent.1 > 0
                && self
                    .iter()
                    .skip(index + 1)
                    .all(|other| apart(extent, other))
        })
    }

    /// Returns the number of extents.
    #[must_use]
    pub fn count(&self) -> usize {
        self.iter().count()
    }

    /// Returns the total length of the extents in bytes.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.iter().map(|(_, len)| len).sum()
    }
}

/// The fields of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// State of the block: live or dead.
    pub state: State,
    /// Number of parts of the payload.
    pub parts: u16,
    /// Time of the put in Unix seconds.
    pub created: u32,
    /// Sequence number: the arena's generation (24 bits) followed by a counter (40 bits).
    pub sequence: u64,
    /// Identity of the block.
    pub identity: Identity,
    /// Extents of the block.
    pub extents: Packed,
    /// Length of the payload in bytes, at most the total length of the extents.
    pub len: u64,
    /// Checksum of the payload, seeded with the identity.
    pub checksum: Checksum,
}

/// The content of a record slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Slot {
    /// Never written.
    Empty,
    /// A record that passes verification.
    Used(Record),
    /// Bytes that are not a record, after a crash during a write or because of corruption.
    Damaged,
}

/// A record as it stands in its slot.
type Row = Sealed<Body>;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Body {
    state: u8,
    extents_count: u8,
    parts: U16,
    created: U32,
    sequence: U64,
    namespace: NamespaceId,
    key: Key,
    extents: [U64; EXTENTS_MAX],
    len: U64,
    payload_checksum: [u8; 16],
}

/// Returns the seed that binds a record to its arena and slot. A record that is copied to another
/// place fails verification.
#[must_use]
pub fn seed(uuid: &[u8; 16], slot: u32) -> u64 {
    let [first, _]: [U64; 2] = transmute!(*uuid);
    first.get() ^ u64::from(slot)
}

impl Record {
    /// Returns the bytes of the record for its slot.
    #[must_use]
    pub fn encode(&self, seed: u64) -> [u8; LEN] {
        let body = Body {
            state: match self.state {
                State::Live => 1,
                State::Dead => 2,
            },
            extents_count: self.extents.count() as u8,
            parts: self.parts.into(),
            created: self.created.into(),
            sequence: self.sequence.into(),
            namespace: self.identity.namespace,
            key: self.identity.key,
            extents: self.extents.0.map(U64::new),
            len: self.len.into(),
            payload_checksum: self.checksum.0,
        };
        transmute!(Row::new(body, seed))
    }

    /// Decodes a slot and verifies it. The caller checks that the extents are inside the arena.
    #[must_use]
    pub fn decode(bytes: &[u8; LEN], seed: u64) -> Slot {
        if bytes[0] == 0 && *bytes == [0; LEN] {
            return Slot::Empty;
        }
        let row: &Row = transmute_ref!(bytes);
        let record = row.verified(seed).and_then(Body::record);
        record.map_or(Slot::Damaged, Slot::Used)
    }
}

impl Body {
    #[inline]
    fn record(&self) -> Option<Record> {
        let record = Record {
            state: match self.state {
                1 => State::Live,
                2 => State::Dead,
                _ => return None,
            },
            parts: self.parts.get(),
            created: self.created.get(),
            sequence: self.sequence.get(),
            identity: Identity {
                namespace: self.namespace,
                key: self.key,
            },
            extents: Packed(self.extents.map(U64::get)),
            len: self.len.get(),
            checksum: Checksum(self.payload_checksum),
        };
        let sound = usize::from(self.extents_count) == record.extents.count()
            && record.extents.is_sound()
            && (1..=PARTS_MAX).contains(&record.parts)
            && record.len > 0
            && record.len <= record.extents.room();
        sound.then_some(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Record {
        Record {
            state: State::Live,
            parts: 1,
            created: 1_700_000_000,
            sequence: 1 << 40 | 17,
            identity: Identity {
                namespace: NamespaceId([3; 16]),
                key: Key([9; 32]),
            },
            extents: Packed::new(&[(1 << 20, 8192), (4 << 20, 4096)]).unwrap(),
            len: 10_000,
            checksum: Checksum([5; 16]),
        }
    }

    #[test]
    fn survives_a_round_trip() {
        assert_eq!(
            Record::decode(&sample().encode(42), 42),
            Slot::Used(sample())
        );
    }

    #[test]
    fn any_flipped_bit_or_other_slot_is_damage() {
        let bytes = sample().encode(42);
        assert_eq!(Record::decode(&bytes, 43), Slot::Damaged);
        for bit in 0..LEN * 8 {
            let mut bad = bytes;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Record::decode(&bad, 42), Slot::Damaged, "bit {bit}");
        }
    }

    #[test]
    fn zeros_are_an_empty_slot() {
        assert_eq!(Record::decode(&[0; LEN], 42), Slot::Empty);
    }

    #[test]
    fn extents_out_of_range_do_not_pack() {
        assert_eq!(Packed::new(&[]), None);
        assert_eq!(Packed::new(&[(1, 4096)]), None);
        assert_eq!(Packed::new(&[(0, 0)]), None);
        assert_eq!(Packed::new(&[(0, 4096); 5]), None);
        assert_eq!(Packed::new(&[(0, 1 << 40)]), None);
    }

    #[test]
    fn it_is_what_the_page_says() {
        crate::format::assert_documented!(
            "## Record",
            Body {
                state, extents_count, parts, created, sequence, namespace, key, extents, len,
                payload_checksum
            } unused {}
        );
    }
}
