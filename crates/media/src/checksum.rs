//! Checksums of block parts: XXH3-128 over leaves, seeded with the identity. Every format uses
//! them.
//!
//! The bytes of a part are divided into *leaves* of [`LEAF`] bytes; the last one may be shorter.
//! The checksum of the part covers its identity, its length and the digest of every leaf:
//!
//! ```text
//! leaf digest  L_i = XXH3-128(bytes of leaf i)                       seed 0, default secret
//! part checksum    = XXH3-128(namespace 16 | key 32 | part u32 | parts u32 | length u64
//!                             | L_0 | L_1 | ..)
//! table checksum   = XXH3-128(namespace 16 | key 32 | 0xFFFF_FFFF u32 | parts u32 | length u64
//!                             | XXH3-128(table))
//! ```
//!
//! Everything is little-endian; a digest is written as its low half, then its high half. Correct
//! bytes under a wrong key, at a wrong position of a split block or of another length do not match.
//! Different copy threads can hash different leaves.
//!
//! The checksum detects faults. It does not protect against an attacker; a [MAC](MacKey) does.

mod mac;

use crate::buffer::Buffer;
use crate::memory::kernel::Isa;
use crate::memory::leaf::{Leaf, Plan};
use crate::memory::xxh3::SHORT_MAX;
pub(crate) use mac::LeafMac;
pub use mac::{Mac, MacKey};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// Size of a leaf in bytes. It is large enough that the cost of a digest is negligible, and small
/// enough that the leaves of one block occupy several copy threads.
pub const LEAF: u64 = 1 << 20;

/// The part number that marks the checksum of a part table.
const TABLE_PART: u32 = u32::MAX;

/// Bytes of identity and length in front of the digests.
const PREFIX: usize = 64;

/// Digests that are composed without streaming state: together with the prefix they fit the
/// short form of the hash, which is several times cheaper than starting a stream.
const INLINE_DIGESTS: usize = (SHORT_MAX - PREFIX) / 16;

/// A checksum in the form of a record: 128 bits, low half first, little-endian.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Checksum(pub [u8; 16]);

impl Checksum {
    /// Creates the checksum with this XXH3-128 value.
    #[must_use]
    pub const fn from_u128(value: u128) -> Self {
        Self(value.to_le_bytes())
    }

    /// Returns the XXH3-128 value of this checksum.
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

/// The identity of a part. The part's checksum covers all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PartId {
    /// Digest of the namespace.
    pub namespace: [u8; 16],
    /// Key of the block.
    pub key: [u8; 32],
    /// Number of the part in its block, from 0.
    pub part: u32,
    /// Number of parts of the block.
    pub parts: u32,
}

impl PartId {
    /// Creates the identity of the only part of a block that is not split.
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

/// Returns the number of leaves in a part of `len` bytes.
#[must_use]
pub const fn leaves(len: u64) -> u64 {
    len.div_ceil(LEAF)
}

/// Returns the checksum of the part `id` with the content `bytes`.
#[must_use]
pub fn of(id: &PartId, bytes: &[u8]) -> Checksum {
    let leaves = bytes.chunks(LEAF as usize).map(digest);
    compose(id, bytes.len() as u64, leaves)
}

/// Returns the checksum of the part `id` whose content is the concatenation of `buffers`. The
/// calling thread computes it.
#[must_use]
pub fn of_buffers(id: &PartId, buffers: &[Buffer]) -> Checksum {
    let mut part = PartSum::new(buffers.iter().map(|buffer| buffer.len() as u64).sum());
    for buffer in buffers {
        // SAFETY: the buffer's owner keeps its bytes readable.
        unsafe { part.feed(buffer.as_ptr(), buffer.len()) };
    }
    part.finish(id)
}

/// Returns the checksum of the part table of a block with `parts` parts.
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

/// Returns the checksum of the part `id` of `len` bytes from the digests of its leaves, in order.
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

/// Returns the XXH3-128 of `bytes` with seed 0 and the default secret: the digest of a leaf.
#[must_use]
pub fn digest(bytes: &[u8]) -> u128 {
    let mut leaf = Leaf::new(bytes.len() as u64);
    leaf.update(bytes);
    leaf.finish()
}

/// An incremental XXH3-128 (seed 0, default secret) of bytes that are in several places.
pub struct Sum(Leaf);

impl Sum {
    /// Starts a sum over a total of `len` bytes.
    #[must_use]
    pub fn new(len: u64) -> Self {
        Self(Leaf::new(len))
    }

    /// Adds the next `len` bytes, at address `at`.
    ///
    /// # Safety
    ///
    /// The bytes are readable, and the total does not exceed the length passed to [`Sum::new`].
    /// Other threads may change the bytes during the call; the sum is then that of any mixture.
    pub unsafe fn feed(&mut self, at: *const u8, len: usize) {
        // SAFETY: the caller's promise; nothing is stored.
        unsafe {
            self.0
                .feed(Isa::best(), at, std::ptr::null_mut(), len, Plan::HASH);
        }
    }

    /// Adds the next bytes.
    ///
    /// # Panics
    ///
    /// If the total exceeds the length passed to [`Sum::new`].
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the sum, after all bytes were added.
    ///
    /// # Panics
    ///
    /// If fewer bytes were added than passed to [`Sum::new`].
    #[must_use]
    pub fn finish(&self) -> Checksum {
        Checksum::from_u128(self.0.finish())
    }
}

/// An incremental checksum of a part that comes in pieces.
pub struct PartSum {
    len: u64,
    leaf: Leaf,
    /// Bytes that the current leaf still needs, and that come after it.
    leaf_left: u64,
    later: u64,
    digests: Vec<u128>,
}

impl PartSum {
    /// Starts the checksum of a part of `len` bytes.
    #[must_use]
    pub fn new(len: u64) -> Self {
        let first = len.min(LEAF);
        let digests = Vec::with_capacity(leaves(len) as usize);
        Self {
            len,
            leaf: Leaf::new(first),
            leaf_left: first,
            later: len - first,
            digests,
        }
    }

    /// Adds the next bytes.
    ///
    /// # Panics
    ///
    /// If the total exceeds the length passed to [`PartSum::new`].
    pub fn add(&mut self, bytes: &[u8]) {
        assert!(bytes.len() as u64 <= self.leaf_left + self.later);
        // SAFETY: the slice is readable, and no longer than what is missing.
        unsafe { self.feed(bytes.as_ptr(), bytes.len()) };
    }

    /// Returns the checksum of the part `id`, after all bytes were added.
    #[must_use]
    pub fn finish(self, id: &PartId) -> Checksum {
        compose(id, self.len, self.digests)
    }

    /// # Safety
    ///
    /// `len` bytes are readable at `at`; no more than the part's length are fed in all.
    unsafe fn feed(&mut self, mut at: *const u8, len: usize) {
        let mut left = len as u64;
        while left > 0 {
            let take = left.min(self.leaf_left) as usize;
            // SAFETY: `take` is at most what is left at `at`; nothing is stored.
            unsafe {
                self.leaf
                    .feed(Isa::best(), at, std::ptr::null_mut(), take, Plan::HASH);
            }
            at = at.wrapping_add(take);
            left -= take as u64;
            self.leaf_left -= take as u64;
            if self.leaf_left == 0 {
                self.digests.push(self.leaf.finish());
                self.leaf_left = self.later.min(LEAF);
                self.later -= self.leaf_left;
                self.leaf = Leaf::new(self.leaf_left);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: PartId = PartId {
        namespace: [1; 16],
        key: [2; 32],
        part: 3,
        parts: 4,
    };

    /// The definition, word for word, with the published hash.
    fn defined(id: &PartId, bytes: &[u8]) -> Checksum {
        let mut input = Vec::new();
        input.extend(id.namespace);
        input.extend(id.key);
        input.extend(id.part.to_le_bytes());
        input.extend(id.parts.to_le_bytes());
        input.extend((bytes.len() as u64).to_le_bytes());
        for leaf in bytes.chunks(1 << 20) {
            let digest = xxh3_128(leaf);
            input.extend((digest as u64).to_le_bytes());
            input.extend(((digest >> 64) as u64).to_le_bytes());
        }
        Checksum::from_u128(xxh3_128(&input))
    }

    #[test]
    fn a_part_of_any_number_of_leaves_is_what_the_format_says() {
        let leaf = LEAF as usize;
        let most = if cfg!(miri) { 0 } else { 13 * leaf };
        let bytes: Vec<u8> = (0..most + 1000).map(|i| (i * 7 + i / 256) as u8).collect();
        for len in [
            0,
            1,
            240,
            1000,
            leaf,
            leaf + 1,
            11 * leaf,
            11 * leaf + 1,
            13 * leaf,
        ] {
            if len > bytes.len() {
                continue;
            }
            let part = &bytes[..len];
            assert_eq!(of(&ID, part), defined(&ID, part), "{len} bytes");
            let whole = Buffer::from_vec(part.to_vec());
            let cut = len / 3;
            let pieces = [
                whole.slice(0, cut),
                whole.slice(cut, 0),
                whole.slice(cut, len - cut),
            ];
            let pieces = pieces.map(Result::unwrap);
            assert_eq!(
                of_buffers(&ID, &pieces),
                defined(&ID, part),
                "{len} bytes in pieces"
            );
        }
    }

    #[test]
    fn everything_of_the_identity_is_under_the_checksum() {
        let bytes = [5; 100];
        let others = [
            PartId {
                namespace: [0; 16],
                ..ID
            },
            PartId { key: [0; 32], ..ID },
            PartId { part: 0, ..ID },
            PartId { parts: 5, ..ID },
        ];
        for other in others {
            assert_ne!(of(&other, &bytes), of(&ID, &bytes));
        }
        assert_ne!(of(&ID, &[]), of(&PartId { part: 4, ..ID }, &[]));
    }

    #[test]
    fn a_table_is_no_part() {
        let table = [9; 96];
        let sum = of_table(&ID.namespace, &ID.key, 4, &table);
        let as_part = PartId {
            part: u32::MAX,
            ..ID
        };
        assert_eq!(sum, defined(&as_part, &table));
        assert_ne!(sum, of_table(&ID.namespace, &ID.key, 3, &table));
    }

    #[test]
    fn a_checksum_is_written_low_half_first() {
        let sum = Checksum::from_u128(0x0F0E_0D0C_0B0A_0908_0706_0504_0302_0100);
        assert_eq!(
            sum.0,
            [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
        );
        assert_eq!(sum.to_string(), "0f0e0d0c0b0a09080706050403020100");
        assert_eq!(Checksum::from_u128(sum.to_u128()), sum);
    }
}
