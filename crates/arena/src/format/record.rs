//! The record: the 128 bytes that make extents a published block. Writing it whole, after the
//! payload, is what commits.

use kvdepot_media::checksum::Checksum;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{GRANULE, get, get_u32, get_u64, put};
use crate::key::{Identity, Key, NamespaceId};

/// Bytes of a record.
pub const LEN: usize = 128;
/// Extents a block may have.
pub const EXTENTS_MAX: usize = 4;
/// Parts a block may have: more ranks than any deployment splits a model over.
pub const PARTS_MAX: u16 = 4096;
/// Bits of a sequence that count within one generation.
pub(crate) const COUNTER_BITS: u32 = 40;
const CHECKSUM_AT: usize = LEN - 8;
/// Where a record says when its block was put.
pub(crate) const CREATED_AT: u64 = 4;
/// Low bits of a packed extent: its offset in granules (4 EiB of arena).
const OFFSET_BITS: u32 = 40;
/// Longest extent: 24 bits of granules, 64 GiB.
const GRANULES_MAX: u64 = (1 << 24) - 1;

/// Whether a record's block may be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// Published.
    Live,
    /// Evicted or removed; its sequence still outranks older records of the same bytes.
    Dead,
}

/// Up to four extents in payload order, packed as on the medium: offset in granules in the low
/// 40 bits, length in granules in the high 24; unused ones are zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packed(pub [u64; EXTENTS_MAX]);

impl Packed {
    /// Packs extents of `(offset, length)` bytes; `None` when there are none or too many, or one
    /// is out of the format's range or not granular.
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

    /// The extents as `(offset, length)` in bytes.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().filter(|packed| **packed != 0).map(|packed| {
            (
                (packed & ((1 << OFFSET_BITS) - 1)) * GRANULE,
                (packed >> OFFSET_BITS) * GRANULE,
            )
        })
    }

    /// Whether no extent is empty and none shares bytes with another.
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

    /// How many extents there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.iter().count()
    }

    /// Bytes that the extents hold together.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.iter().map(|(_, len)| len).sum()
    }
}

/// A record's fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Live or dead.
    pub state: State,
    /// Parts of the payload.
    pub parts: u16,
    /// Unix seconds of the put.
    pub created: u32,
    /// The arena's generation (24 bits) followed by a counter (40 bits).
    pub sequence: u64,
    /// Whose bytes these are.
    pub identity: Identity,
    /// Where they are.
    pub extents: Packed,
    /// Payload bytes, at most what the extents hold.
    pub len: u64,
    /// The payload's checksum, under the identity.
    pub checksum: Checksum,
}

/// What a record slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Slot {
    /// Never written.
    Empty,
    /// A record that verifies.
    Used(Record),
    /// Bytes that are no record: torn by a crash or rotted.
    Damaged,
}

/// The seed that ties a record to its arena and slot: a record copied elsewhere does not verify.
#[must_use]
pub fn seed(uuid: &[u8; 16], slot: u32) -> u64 {
    get_u64(uuid, 0) ^ u64::from(slot)
}

impl Record {
    /// The record as it stands in its slot.
    #[must_use]
    pub fn encode(&self, seed: u64) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        bytes[0] = match self.state {
            State::Live => 1,
            State::Dead => 2,
        };
        bytes[1] = self.extents.count() as u8;
        put(&mut bytes, 2, &self.parts.to_le_bytes());
        put(&mut bytes, 4, &self.created.to_le_bytes());
        put(&mut bytes, 8, &self.sequence.to_le_bytes());
        put(&mut bytes, 16, &self.identity.namespace.0);
        put(&mut bytes, 32, &self.identity.key.0);
        for (index, packed) in self.extents.0.iter().enumerate() {
            put(&mut bytes, 64 + 8 * index, &packed.to_le_bytes());
        }
        put(&mut bytes, 96, &self.len.to_le_bytes());
        put(&mut bytes, 104, &self.checksum.0);
        let checksum = xxh3_64_with_seed(&bytes[..CHECKSUM_AT], seed);
        put(&mut bytes, CHECKSUM_AT, &checksum.to_le_bytes());
        bytes
    }

    /// Reads a slot. Verifying is all it does: whether the extents lie inside the arena is for
    /// the caller, who knows it.
    #[must_use]
    pub fn decode(bytes: &[u8; LEN], seed: u64) -> Slot {
        if bytes[0] == 0 && *bytes == [0; LEN] {
            return Slot::Empty;
        }
        if get_u64(bytes, CHECKSUM_AT) != xxh3_64_with_seed(&bytes[..CHECKSUM_AT], seed) {
            return Slot::Damaged;
        }
        let state = match bytes[0] {
            1 => State::Live,
            2 => State::Dead,
            _ => return Slot::Damaged,
        };
        let extents = Packed(std::array::from_fn(|index| get_u64(bytes, 64 + 8 * index)));
        let record = Record {
            state,
            parts: u16::from_le_bytes(get(bytes, 2)),
            created: get_u32(bytes, 4),
            sequence: get_u64(bytes, 8),
            identity: Identity {
                namespace: NamespaceId(get(bytes, 16)),
                key: Key(get(bytes, 32)),
            },
            extents,
            len: get_u64(bytes, 96),
            checksum: Checksum(get(bytes, 104)),
        };
        let sound = usize::from(bytes[1]) == extents.count()
            && extents.is_sound()
            && (1..=PARTS_MAX).contains(&record.parts)
            && record.len > 0
            && record.len <= extents.room();
        if sound {
            Slot::Used(record)
        } else {
            Slot::Damaged
        }
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
}
