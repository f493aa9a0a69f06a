//! The extended attribute of a block file: a copy of the header fields that are needed to read the
//! payload.
//!
//! It saves the separate read of the header. The header has priority: a file without the attribute,
//! or with one that does not match its name, is read by its header.

use kvdepot_media::{Checksum, Mac, PART_LEN_MAX};
use xxhash_rust::xxh3::xxh3_64;
use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute, transmute_ref};

use super::record::PARTS_MAX;
use crate::key::Identity;

/// Name of the attribute.
pub const NAME: &str = "user.kvdepot";
/// Size of the attribute in bytes. It is so small that file systems store it together with the
/// file's metadata.
pub const LEN: usize = 56;
/// The version this release writes and reads.
const VERSION: u8 = 2;

/// The fields of the attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileNote {
    /// Length of the payload in bytes.
    pub len: u64,
    /// Number of parts of the payload.
    pub parts: u16,
    /// Checksum, the same as in the header.
    pub checksum: Checksum,
    /// MAC of the only part, if it has one; never all zeros.
    pub mac: Option<Mac>,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Body {
    len: U64,
    checksum: [u8; 16],
    parts: U16,
    version: u8,
    unused: [u8; 5],
    mac: [u8; 16],
    seal: U64,
}

impl Body {
    /// Over the identity too, so that no other file's note is taken for one of this block.
    fn seal(&self, identity: &Identity) -> u64 {
        let mut bytes = [0; 96];
        bytes[..16].copy_from_slice(&identity.namespace.0);
        bytes[16..48].copy_from_slice(&identity.key.0);
        bytes[48..].copy_from_slice(&self.as_bytes()[..48]);
        xxh3_64(&bytes)
    }
}

impl FileNote {
    /// Returns the attribute for the block `identity`.
    #[must_use]
    pub fn encode(&self, identity: &Identity) -> [u8; LEN] {
        let mut body = Body {
            len: self.len.into(),
            checksum: self.checksum.0,
            parts: self.parts.into(),
            version: VERSION,
            unused: [0; _],
            mac: self.mac.map_or([0; 16], |mac| mac.0),
            seal: 0.into(),
        };
        body.seal = body.seal(identity).into();
        transmute!(body)
    }

    /// Decodes the attribute of the block `identity`. Returns `None` if it belongs to another block
    /// or has another version.
    #[must_use]
    pub fn decode(bytes: &[u8; LEN], identity: &Identity) -> Option<FileNote> {
        let body: &Body = transmute_ref!(bytes);
        let is_known = body.seal.get() == body.seal(identity)
            && body.version == VERSION
            && (1..=PARTS_MAX).contains(&body.parts.get())
            && (body.parts.get() == 1 || body.mac == [0; 16])
            && (1..=PART_LEN_MAX).contains(&body.len.get());
        is_known.then(|| FileNote {
            len: body.len.get(),
            parts: body.parts.get(),
            checksum: Checksum(body.checksum),
            mac: Some(Mac(body.mac)).filter(|_| body.mac != [0; 16]),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{Key, NamespaceId};

    #[test]
    fn a_note_is_one_blocks_and_any_flipped_byte_is_noticed() {
        let identity = |byte| Identity {
            namespace: NamespaceId([1; 16]),
            key: Key([byte; 32]),
        };
        let mut note = FileNote {
            len: 1 << 20,
            parts: 2,
            checksum: Checksum([3; 16]),
            mac: None,
        };
        let bytes = note.encode(&identity(2));
        assert_eq!(FileNote::decode(&bytes, &identity(2)), Some(note));
        note.mac = Some(Mac([4; 16]));
        let several = note.encode(&identity(2));
        assert_eq!(
            FileNote::decode(&several, &identity(2)),
            None,
            "one MAC of two"
        );
        note.parts = 1;
        let bytes = note.encode(&identity(2));
        assert_eq!(FileNote::decode(&bytes, &identity(2)), Some(note));
        assert_eq!(FileNote::decode(&bytes, &identity(4)), None);
        for at in 0..LEN {
            let mut bad = bytes;
            bad[at] ^= 0x10;
            assert_eq!(FileNote::decode(&bad, &identity(2)), None, "byte {at}");
        }
    }
}
