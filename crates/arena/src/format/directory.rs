//! The namespace directory: digests with the description that made them, so that tools can say
//! which model a block belongs to. Informative: a namespace that finds no room is served alike.

use xxhash_rust::xxh3::xxh3_64;

use super::{get, get_text, get_u64, layout, put, put_text};
use crate::key::NamespaceId;

/// Bytes of an entry.
pub const LEN: usize = 512;
/// Entries of the directory.
pub const ENTRIES: u64 = (layout::TABLE - layout::DIRECTORY) / LEN as u64;
const TEXT_AT: usize = 16;
const CHECKSUM_AT: usize = LEN - 8;

/// Encodes one entry; a long description is cut.
#[must_use]
pub fn encode(id: NamespaceId, description: &str) -> [u8; LEN] {
    let mut entry = [0; LEN];
    put(&mut entry, 0, &id.0);
    put_text(&mut entry, TEXT_AT, CHECKSUM_AT - TEXT_AT, description);
    let checksum = xxh3_64(&entry[..CHECKSUM_AT]);
    put(&mut entry, CHECKSUM_AT, &checksum.to_le_bytes());
    entry
}

/// Decodes one entry; `None` when it is unused or does not verify.
#[must_use]
pub fn decode(entry: &[u8; LEN]) -> Option<(NamespaceId, String)> {
    if get_u64(entry, CHECKSUM_AT) != xxh3_64(&entry[..CHECKSUM_AT]) {
        return None;
    }
    Some((
        NamespaceId(get(entry, 0)),
        get_text(entry, TEXT_AT, CHECKSUM_AT - TEXT_AT),
    ))
}
