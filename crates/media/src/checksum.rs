//! The checksum that is part of every format: XXH3-128 over leaves, seeded with the identity.
//!
//! A part's bytes are cut into *leaves* of [`LEAF`] bytes (the last one shorter). The part's
//! checksum covers the part's identity and length and the digest of every leaf:
//!
//! ```text
//! leaf digest    L_i = XXH3-128(bytes of leaf i)                seed 0, default secret
//! part checksum      = XXH3-128( namespace 16 | key 32 | part u32 | parts u32 | length u64 | L_0 | L_1 | .. )
//! table checksum     = XXH3-128( namespace 16 | key 32 | 0xFFFF_FFFF u32 | parts u32 | length u64 | XXH3-128(table) )
//! ```
//!
//! Everything is little-endian; a digest is written as its low half, then its high half. Right
//! bytes under a wrong key, in a wrong place of a split block or of another length do not match.
//! Leaves can be hashed by different lanes. The hash finds faults, it does not stop an adversary.

use crate::memory::leaf::Leaf;
use crate::memory::xxh3::SHORT_MAX;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// Bytes in a leaf: big enough that its digest costs nothing beside it, small enough that the
/// leaves of one block keep several lanes busy.
pub const LEAF: u64 = 1 << 20;

/// The part number that marks the checksum of a part table.
const TABLE_PART: u32 = u32::MAX;

/// Bytes of identity and length in front of the digests.
const PREFIX: usize = 64;

/// Digests that are composed without streaming state: together with the prefix they fit the
/// short form of the hash, which is several times cheaper than starting a stream.
const INLINE_DIGESTS: usize = (SHORT_MAX - PREFIX) / 16;

/// A checksum as it stands in a record: 128 bits, low half first, little-endian.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Checksum(pub [u8; 16]);

impl Checksum {
    /// The checksum that has this XXH3-128 value.
    #[must_use]
    pub const fn from_u128(value: u128) -> Self {
        Self(value.to_le_bytes())
    }

    /// The XXH3-128 value of this checksum.
    #[must_use]
    pub const fn to_u128(self) -> u128 {
        u128::from_le_bytes(self.0)
    }
}

impl std::fmt::Display for Checksum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.to_u128())
    }
}

impl std::fmt::Debug for Checksum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Checksum({self})")
    }
}

/// Whose bytes a part holds; all of it is under the part's checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PartId {
    /// The digest of the namespace.
    pub namespace: [u8; 16],
    /// The key of the block.
    pub key: [u8; 32],
    /// The number of the part in its block, from 0.
    pub part: u32,
    /// How many parts the block has.
    pub parts: u32,
}

impl PartId {
    /// The only part of a block that is not split.
    #[must_use]
    pub const fn whole(namespace: [u8; 16], key: [u8; 32]) -> Self {
        Self {
            namespace,
            key,
            part: 0,
            parts: 1,
        }
    }

    fn prefix(&self, len: u64) -> [u8; PREFIX] {
        let mut out = [0; PREFIX];
        out[..16].copy_from_slice(&self.namespace);
        out[16..48].copy_from_slice(&self.key);
        out[48..52].copy_from_slice(&self.part.to_le_bytes());
        out[52..56].copy_from_slice(&self.parts.to_le_bytes());
        out[56..].copy_from_slice(&len.to_le_bytes());
        out
    }
}

/// How many leaves a part of `len` bytes has.
#[must_use]
pub const fn leaves(len: u64) -> u64 {
    len.div_ceil(LEAF)
}

/// The checksum of a part whose bytes are at hand.
#[must_use]
pub fn of(id: &PartId, bytes: &[u8]) -> Checksum {
    compose(
        id,
        bytes.len() as u64,
        bytes.chunks(LEAF as usize).map(digest),
    )
}

/// The checksum of the table of a block with several parts.
#[must_use]
pub fn of_table(namespace: &[u8; 16], key: &[u8; 32], parts: u32, table: &[u8]) -> Checksum {
    let id = PartId {
        namespace: *namespace,
        key: *key,
        part: TABLE_PART,
        parts,
    };
    compose(&id, table.len() as u64, std::iter::once(digest(table)))
}

/// The checksum of a part of `len` bytes whose leaves have these digests, in order.
#[must_use]
pub fn compose(id: &PartId, len: u64, digests: impl IntoIterator<Item = u128>) -> Checksum {
    let prefix = id.prefix(len);
    let mut inline = [0; PREFIX + INLINE_DIGESTS * 16];
    inline[..PREFIX].copy_from_slice(&prefix);
    let mut used = PREFIX;
    let mut digests = digests.into_iter();
    for digest in digests.by_ref().take(INLINE_DIGESTS) {
        inline[used..used + 16].copy_from_slice(&digest.to_le_bytes());
        used += 16;
    }
    let Some(next) = digests.next() else {
        return Checksum::from_u128(xxh3_128(&inline[..used]));
    };
    let mut hash = Xxh3::new();
    hash.update(&inline[..used]);
    hash.update(&next.to_le_bytes());
    for digest in digests {
        hash.update(&digest.to_le_bytes());
    }
    Checksum::from_u128(hash.digest128())
}

/// XXH3-128 of `bytes`, seed 0, default secret: the digest of a leaf.
#[must_use]
pub fn digest(bytes: &[u8]) -> u128 {
    let mut leaf = Leaf::new(bytes.len() as u64);
    leaf.update(bytes);
    leaf.finish()
}
