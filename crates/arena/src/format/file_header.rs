//! The header of a block file, which contains one block. It has the block's identity, so that a
//! single file can be verified alone.
//!
//! The header fills whole pages and the payload follows it, so that direct I/O can read the
//! payload.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute, transmute_ref};

use super::Sealed;
use super::record::PARTS_MAX;
use crate::key::{Identity, Key, NamespaceId};
use kvdepot_media::{Checksum, Mac, PART_LEN_MAX};

/// Size of a header in bytes, and offset of the payload.
pub const LEN: usize = 4096;
/// First bytes of every block file.
pub const MAGIC: [u8; 8] = *b"KVDBLOCK";
/// Format version that this release writes and reads.
pub const VERSION: u32 = 1;
/// Maximum number of MACs and leaf digests in a header. If the digests do not all fit, the header
/// contains none.
pub const SUMS_MAX: usize = 249;

/// The fields of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileHeader {
    /// Identity of the block.
    pub identity: Identity,
    /// Length of the payload in bytes, including the part table if there are several parts.
    pub len: u64,
    /// Number of parts of the payload.
    pub parts: u16,
    /// Checksum of the payload or, for several parts, of the part table at its end; the same as in
    /// a record.
    pub checksum: Checksum,
    /// Time of writing in Unix seconds, by the writer's clock; for people.
    pub created: u64,
}

type Page = Sealed<Body>;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Body {
    magic: [u8; 8],
    version: U32,
    header_len: U32,
    namespace: [u8; 16],
    key: [u8; 32],
    len: U64,
    checksum: [u8; 16],
    created: U64,
    parts: U16,
    macs: U16,
    leaves: U32,
    sums: [[u8; 16]; SUMS_MAX],
}

impl FileHeader {
    /// Returns the header page with the MACs of the parts and the digests of the leaves.
    ///
    /// `macs` has at most [`SUMS_MAX`] entries; it is empty without authentication. The page
    /// contains `leaves` only if all of them fit.
    #[must_use]
    pub fn encode(&self, macs: &[Mac], leaves: &[u128]) -> [u8; LEN] {
        let leaves = Some(leaves).filter(|all| macs.len() + all.len() <= SUMS_MAX);
        let leaves = leaves.unwrap_or_default();
        let mut sums = [[0; 16]; SUMS_MAX];
        let digests = leaves.iter().map(|digest| digest.to_le_bytes());
        let each = macs.iter().map(|mac| mac.0).chain(digests);
        for (room, sum) in sums.iter_mut().zip(each) {
            *room = sum;
        }
        let body = Body {
            magic: MAGIC,
            version: VERSION.into(),
            header_len: (LEN as u32).into(),
            namespace: self.identity.namespace.0,
            key: self.identity.key.0,
            len: self.len.into(),
            checksum: self.checksum.0,
            created: self.created.into(),
            parts: self.parts.into(),
            macs: (macs.len() as u16).into(),
            leaves: (leaves.len() as u32).into(),
            sums,
        };
        transmute!(Page::new(body, 0))
    }

    /// Decodes a header page. Returns `None` if this release did not write such a page.
    ///
    /// The call does not check the digests of leaves; [`leaves`] does.
    #[must_use]
    pub fn decode(page: &[u8; LEN]) -> Option<FileHeader> {
        let page: &Page = transmute_ref!(page);
        let body = page.verified(0)?;
        let is_known = body.magic == MAGIC
            && body.version == VERSION
            && body.header_len == LEN as u32
            && (1..=PARTS_MAX).contains(&body.parts.get())
            && (body.macs == 0 || body.macs == body.parts)
            && (1..=PART_LEN_MAX).contains(&body.len.get());
        is_known.then(|| FileHeader {
            identity: Identity {
                namespace: NamespaceId(body.namespace),
                key: Key(body.key),
            },
            len: body.len.get(),
            parts: body.parts.get(),
            checksum: Checksum(body.checksum),
            created: body.created.get(),
        })
    }
}

impl FileHeader {
    /// Returns true if the page is the header of a later release, which this release cannot read.
    #[must_use]
    pub fn is_newer(page: &[u8; LEN]) -> bool {
        let page: &Page = transmute_ref!(page);
        page.body.magic == MAGIC && page.body.version.get() > VERSION
    }
}

/// Returns the digests of leaves in a header page; empty if the header does not contain any.
///
/// The caller compares their number with the payload, and their composition with the checksums.
///
/// # Errors
///
/// The number of digests, if it exceeds the space of a page.
pub fn leaves(page: &[u8; LEN]) -> Result<Vec<u128>, u32> {
    let page: &Page = transmute_ref!(page);
    let count = page.body.leaves.get();
    let behind = page.body.sums.get(page.body.macs.get() as usize..);
    let found = behind.and_then(|behind| behind.get(..count as usize));
    let found = found.ok_or(count)?;
    Ok(found.iter().map(|one| u128::from_le_bytes(*one)).collect())
}

/// Returns the MACs of the parts in a header page; empty if the block is not authenticated.
#[must_use]
pub fn macs(page: &[u8; LEN]) -> Vec<Mac> {
    let page: &Page = transmute_ref!(page);
    let found = page.body.sums.iter().take(page.body.macs.get() as usize);
    found.map(|one| Mac(*one)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> FileHeader {
        FileHeader {
            identity: Identity {
                namespace: NamespaceId([1; 16]),
                key: Key([2; 32]),
            },
            len: 1 << 20,
            parts: 1,
            checksum: Checksum([3; 16]),
            created: 1_700_000_000,
        }
    }

    #[test]
    fn survives_a_round_trip() {
        assert_eq!(
            FileHeader::decode(&sample().encode(&[], &[])),
            Some(sample())
        );
    }

    #[test]
    fn leaves_are_recorded_where_all_fit() {
        for count in [0, 1, 2, SUMS_MAX, SUMS_MAX + 1, 16_384] {
            let digests: Vec<u128> = (0..count).map(|one| (one as u128) << 70 | 5).collect();
            for proofs in [&[] as &[Mac], &[Mac([9; 16])]] {
                let page = sample().encode(proofs, &digests);
                let fits = proofs.len() + count <= SUMS_MAX;
                let kept = if fits { &*digests } else { &[] };
                assert_eq!(leaves(&page).as_deref(), Ok(kept), "{count}");
                assert_eq!(macs(&page), proofs, "{count}");
                assert_eq!(FileHeader::decode(&page), Some(sample()), "{count}");
            }
        }
        let two = sample().encode(&[Mac([9; 16]); 2], &[]);
        assert_eq!(FileHeader::decode(&two), None, "one part has one MAC");
        let mut page = sample().encode(&[], &[]);
        page[100..104].copy_from_slice(&250_u32.to_le_bytes());
        assert_eq!(leaves(&page), Err(250));
    }

    #[test]
    fn any_flipped_byte_is_noticed() {
        let page = sample().encode(&[Mac([8; 16])], &[1 << 90, 7]);
        for at in 0..LEN {
            let mut bad = page;
            bad[at] ^= 0x10;
            assert_eq!(FileHeader::decode(&bad), None, "byte {at}");
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for (len, parts) in [(0, 1), (PART_LEN_MAX + 1, 1), (1, 0), (1, PARTS_MAX + 1)] {
            let forged = FileHeader {
                len,
                parts,
                ..sample()
            };
            assert_eq!(
                FileHeader::decode(&forged.encode(&[], &[])),
                None,
                "{len} {parts}"
            );
        }
    }

    #[test]
    fn it_is_what_the_page_says() {
        crate::format::assert_documented!(
            "## A block's file",
            Body {
                magic, version, header_len, namespace, key, len, checksum, created, parts,
                macs, leaves, sums
            } unused {}
        );
    }
}
