//! How blocks' files are named, and what they take.

use kvdepot_arena::format::GRANULE;
use kvdepot_arena::{Identity, Key, NamespaceId};
use kvdepot_media::PART_LEN_MAX;

/// The folder that has those of published blocks.
pub(in crate::tier) const BLOCKS: &str = "blocks";

/// The longest file of a block.
pub(super) const LEN_MAX: u64 = PART_LEN_MAX + 2 * GRANULE;

/// What a file of so many bytes takes.
pub(super) fn room_of(len: u64) -> u64 {
    len.next_multiple_of(GRANULE)
}

/// Keys are hashes mostly, and not always: each byte has its weight.
pub(in crate::tier) fn spread(identity: &Identity) -> u32 {
    let bytes = identity.namespace.0.iter().chain(&identity.key.0);
    let weighted = (0u32..)
        .zip(bytes)
        .map(|(at, byte)| (2 * at + 1).wrapping_mul(u32::from(*byte)));
    weighted.fold(0, u32::wrapping_add)
}

pub(super) fn folder_name(number: u32) -> String {
    format!("{number:03x}")
}

pub(super) fn file_of(identity: &Identity) -> String {
    format!("{}-{}", identity.key, identity.namespace)
}

/// The path of a block's file in the directory.
pub(in crate::tier) fn path_of(identity: &Identity, folder: u32) -> String {
    // At once, as it is needed for each key of a lookup.
    let Identity { namespace, key } = identity;
    format!("{BLOCKS}/{folder:03x}/{key}-{namespace}")
}

/// Whose file has this name.
pub(in crate::tier) fn identity_of(name: &str) -> Option<Identity> {
    let (key, namespace) = name.split_once('-')?;
    Some(Identity {
        namespace: NamespaceId(bytes_of(namespace)?),
        key: Key(bytes_of(key)?),
    })
}

/// The namespace whose digest this is.
pub(in crate::tier) fn namespace_of(name: &str) -> Option<NamespaceId> {
    bytes_of(name).map(NamespaceId)
}

/// Lower-case hexadecimal digits, as they are written.
pub(in crate::tier) fn bytes_of<const LEN: usize>(text: &str) -> Option<[u8; LEN]> {
    let digits = text.as_bytes();
    if digits.len() != 2 * LEN {
        return None;
    }
    let digit = |at: usize| match digits[at] {
        digit @ b'0'..=b'9' => Some(digit - b'0'),
        digit @ b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; LEN];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = digit(2 * at)? * 16 + digit(2 * at + 1)?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_whose_file_it_is() {
        let identity = Identity {
            namespace: NamespaceId([0x1f; 16]),
            key: Key(std::array::from_fn(|at| at as u8 * 8)),
        };
        let name = file_of(&identity);
        assert_eq!(identity_of(&name), Some(identity));
        assert_eq!(identity_of(&name.to_uppercase()), None);
        assert_eq!(identity_of(&name[1..]), None);
        assert_eq!(identity_of("alive"), None);
    }
}
