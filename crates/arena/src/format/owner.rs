//! The owner page: who has the arena open. Informative; the lock decides.

use xxhash_rust::xxh3::xxh3_64;

use super::{get, get_text, get_u32, get_u64, put, put_text};

/// Bytes of the owner page.
pub const LEN: usize = 4096;
const MAGIC: [u8; 8] = *b"KVOWNER\0";
const CHECKSUM_AT: usize = LEN - 8;

/// The process that opened the arena last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Its process id, in its own pid namespace.
    pub pid: u32,
    /// Its start time in clock ticks since boot, which tells a reused pid.
    pub start_time: u64,
    /// Its host's name.
    pub host: String,
    /// Path of the socket where it hands out descriptors, empty when it has none.
    pub socket: String,
}

impl Owner {
    /// The page as it stands on the medium.
    #[must_use]
    pub fn encode(&self) -> [u8; LEN] {
        let mut page = [0; LEN];
        put(&mut page, 0, &MAGIC);
        put(&mut page, 8, &self.pid.to_le_bytes());
        put(&mut page, 16, &self.start_time.to_le_bytes());
        put_text(&mut page, 24, 64, &self.host);
        put_text(&mut page, 88, 108, &self.socket);
        let checksum = xxh3_64(&page[..CHECKSUM_AT]);
        put(&mut page, CHECKSUM_AT, &checksum.to_le_bytes());
        page
    }

    /// Reads a page; `None` when nobody has written one, or it does not verify.
    #[must_use]
    pub fn decode(page: &[u8; LEN]) -> Option<Owner> {
        if get::<8>(page, 0) != MAGIC || get_u64(page, CHECKSUM_AT) != xxh3_64(&page[..CHECKSUM_AT])
        {
            return None;
        }
        Some(Owner {
            pid: get_u32(page, 8),
            start_time: get_u64(page, 16),
            host: get_text(page, 24, 64),
            socket: get_text(page, 88, 108),
        })
    }
}
