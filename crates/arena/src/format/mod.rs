//! The on-media format, encode and decode only: no I/O, and no panic on any bytes.
//! `docs/format.md` specifies it byte by byte.

pub mod directory;
pub mod layout;
pub mod owner;
pub mod record;
pub mod superblock;

/// Unit of extents: every extent begins at a multiple of it and is as long as a multiple of it.
pub const GRANULE: u64 = 4096;

fn get<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    // The callers pass fixed-size pages and constant offsets inside them; a short slice would
    // read as zeros, which no checksum accepts.
    bytes
        .get(at..at + N)
        .and_then(|slice| slice.try_into().ok())
        .unwrap_or([0; N])
}

fn get_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(get(bytes, at))
}

fn get_u64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(get(bytes, at))
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(slot) = bytes.get_mut(at..at + value.len()) {
        slot.copy_from_slice(value);
    }
}

/// Text in a fixed field: as many whole characters as fit, the rest zeros.
fn put_text(bytes: &mut [u8], at: usize, room: usize, text: &str) {
    let mut end = text.len().min(room);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    put(bytes, at, &text.as_bytes()[..end]);
}

fn get_text(bytes: &[u8], at: usize, room: usize) -> String {
    let field = bytes.get(at..at + room).unwrap_or_default();
    let end = field
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(field.len());
    String::from_utf8_lossy(field.get(..end).unwrap_or_default()).into_owned()
}
