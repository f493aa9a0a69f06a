//! Serialized placements: a scheduler sends them to its workers.
//!
//! All numbers are little-endian. The fields are, in this order:
//!
//! | field | type |
//! | --- | --- |
//! | version | u32 |
//! | medium | u32 |
//! | session | u64 |
//! | seat | u64 |
//! | namespace | 16 bytes |
//! | key | 32 bytes |
//! | packed extents | 4 × u64 |
//! | payload length | u64 |
//! | number of parts | u32 |
//! | length of the file name | u32 |
//! | each part: offset, length and checksum | 32 bytes |
//!
//! The checksum of a part that is about to be written is zero. A block outside of all media has no
//! extents. Then number (u64), offset (u64) and name of its [`Outside`] follow.

use kvdepot_arena::format::record::{PARTS_MAX, Packed};
use kvdepot_arena::parts::{self, Part};
use kvdepot_arena::{Error, Identity, Key, NamespaceId, Place};
use kvdepot_host::fds;

use crate::tier::{Outside, TIERS_MAX};

/// Maximum number of media of a depot that can be mapped.
///
/// One message over a socket carries the descriptors of the media. It also carries those of the
/// tiers' directories, and those of the remote reader and the arena of a tier.
pub const MEDIA_MAX: usize = fds::DESCRIPTORS_MAX - 1 - 2 * TIERS_MAX;

const VERSION: u32 = 3;
const HEAD: usize = 120;

/// Holder of a pin or a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Session of the depot that granted the pin or reservation.
    pub session: u64,
    /// Number of the client that requested it; 0 for the depot's own process.
    pub seat: u64,
}

/// A decoded placement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Number of the medium in its depot. Media are never renumbered.
    pub medium: u32,
    /// Holder of the pin or reservation.
    pub holder: Holder,
    /// Namespace and key of the block.
    pub identity: Identity,
    /// Location of the block in the medium.
    pub extents: Packed,
    /// Payload length in bytes.
    pub len: u64,
    /// Parts of the block.
    pub parts: Vec<Part>,
    /// Location of a block outside of all media: in a directory or on another host.
    pub outside: Option<Outside>,
}

pub(crate) fn encode(
    holder: Holder,
    place: &Place,
    found: &[Part],
    file: Option<&Outside>,
) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEAD + found.len() * parts::ENTRY as usize);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&place.token.device.to_le_bytes());
    bytes.extend_from_slice(&holder.session.to_le_bytes());
    bytes.extend_from_slice(&holder.seat.to_le_bytes());
    bytes.extend_from_slice(&place.identity.namespace.0);
    bytes.extend_from_slice(&place.identity.key.0);
    // What a tier of files notes there is its own affair.
    let extents = file.map_or(place.extents, |_| Packed::default());
    for packed in extents.0 {
        bytes.extend_from_slice(&packed.to_le_bytes());
    }
    bytes.extend_from_slice(&place.len.to_le_bytes());
    bytes.extend_from_slice(&(found.len() as u32).to_le_bytes());
    let name = file.map_or("", |file| file.name.as_str());
    bytes.extend_from_slice(&(name.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&parts::encode(found));
    if let Some(file) = file {
        bytes.extend_from_slice(&file.number.to_le_bytes());
        bytes.extend_from_slice(&file.offset.to_le_bytes());
        bytes.extend_from_slice(name.as_bytes());
    }
    bytes
}

/// Decodes a placement.
///
/// # Errors
///
/// [`Error::Input`] if `bytes` are not a placement, or come from another release.
pub fn decode(bytes: &[u8]) -> Result<Placement, Error> {
    let wrong = |what: &str| {
        Error::input(
            "placements",
            what.to_owned(),
            "a placement from a server of the same release",
        )
    };
    let (head, table) = bytes
        .split_first_chunk::<HEAD>()
        .ok_or_else(|| wrong("too few bytes"))?;
    let u32_at = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().unwrap_or_default());
    let u64_at = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().unwrap_or_default());
    if u32_at(0) != VERSION {
        return Err(wrong(&format!("version {}", u32_at(0))));
    }
    let (count, named) = (u32_at(112) as usize, u32_at(116) as usize);
    let table = (1..=usize::from(PARTS_MAX))
        .contains(&count)
        .then_some(table);
    let split = table.and_then(|rest| rest.split_at_checked(count * parts::ENTRY as usize));
    let Some((table, file)) = split else {
        return Err(wrong(&format!("{count} parts in {} bytes", bytes.len())));
    };
    let file = file_of(file, named).map_err(wrong)?;
    let parts = parts::decode(table);
    let len = u64_at(104);
    let extents = Packed(std::array::from_fn(|index| u64_at(72 + 8 * index)));
    let fits = match &file {
        Some(file) => extents.room() == 0 && file.offset.checked_add(len).is_some(),
        None => len <= extents.room(),
    };
    let sound = fits
        && parts.iter().all(|part| {
            part.offset
                .checked_add(part.len)
                .is_some_and(|end| end <= len)
        });
    if !sound {
        return Err(wrong("inconsistent lengths"));
    }
    Ok(Placement {
        medium: u32_at(4),
        holder: Holder {
            session: u64_at(8),
            seat: u64_at(16),
        },
        identity: Identity {
            namespace: NamespaceId(head[24..40].try_into().unwrap_or_default()),
            key: Key(head[40..72].try_into().unwrap_or_default()),
        },
        extents,
        len,
        parts,
        outside: file,
    })
}

/// What stands behind the parts: nothing, or a file whose name has so many bytes.
fn file_of(bytes: &[u8], named: usize) -> Result<Option<Outside>, &'static str> {
    if named == 0 && bytes.is_empty() {
        return Ok(None);
    }
    let (Some((number, rest)), true) = (bytes.split_first_chunk(), named > 0) else {
        return Err("unexpected bytes after the parts");
    };
    let Some((offset, name)) = rest.split_first_chunk() else {
        return Err("too few bytes");
    };
    match str::from_utf8(name) {
        Ok(name) if name.len() == named => Ok(Some(Outside {
            name: name.to_owned(),
            number: u64::from_le_bytes(*number),
            offset: u64::from_le_bytes(*offset),
        })),
        _ => Err("an invalid file name"),
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_arena::Token;
    use kvdepot_media::Checksum;

    use super::*;

    #[test]
    fn survives_a_round_trip_and_refuses_damage() {
        let identity = Identity {
            namespace: NamespaceId([1; 16]),
            key: Key([2; 32]),
        };
        let place = Place {
            token: Token {
                device: 1,
                slot: 0,
                sequence: 9,
            },
            identity,
            extents: Packed::new(&[(4096, 8192)]).unwrap(),
            len: 8192,
            parts: 2,
            checksum: Checksum::default(),
            stamp: 0,
        };
        let found = parts::blank(&[4000, 4000]);
        let holder = Holder {
            session: 77,
            seat: 3,
        };
        let bytes = encode(holder, &place, &found, None);
        let read = decode(&bytes).unwrap();
        assert_eq!((read.holder, read.medium, read.len), (holder, 1, 8192));
        assert_eq!(
            (read.identity, read.extents, &read.parts),
            (identity, place.extents, &found)
        );
        let file = Outside {
            name: "ab/cd".into(),
            number: 7,
            offset: 4096,
        };
        let named = encode(holder, &place, &read.parts, Some(&file));
        assert_eq!(decode(&named).unwrap().outside, Some(file));
        for bytes in [&bytes, &named] {
            for len in 0..bytes.len() {
                assert!(decode(&bytes[..len]).is_err());
            }
            assert!(decode(&[&bytes[..], &[0]].concat()).is_err());
        }
    }
}
