//! The owner page: the process that has the arena open. It is informative; the lock decides.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute, transmute_ref};

use super::{Sealed, Text};

/// Size of the owner page in bytes.
pub const LEN: usize = 4096;
const MAGIC: [u8; 8] = *b"KVOWNER\0";

/// The process that opened the arena last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Process ID, in the PID namespace of that process.
    pub pid: u32,
    /// Start time of the process in clock ticks since boot, which identifies a reused process ID.
    pub start_time: u64,
    /// Name of its host.
    pub host: String,
    /// Path of the socket from which it sends descriptors; empty if there is none.
    pub socket: String,
}

/// The owner page as it stands on the medium.
type Page = Sealed<Body>;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Body {
    magic: [u8; 8],
    pid: U32,
    unused: [u8; 4],
    start_time: U64,
    host: Text<64>,
    socket: Text<108>,
    rest: [u8; 3892],
}

impl Owner {
    /// Returns the page for the medium.
    #[must_use]
    pub fn encode(&self) -> [u8; LEN] {
        let body = Body {
            magic: MAGIC,
            pid: self.pid.into(),
            unused: [0; _],
            start_time: self.start_time.into(),
            host: Text::new(&self.host),
            socket: Text::new(&self.socket),
            rest: [0; _],
        };
        transmute!(Page::new(body, 0))
    }

    /// Decodes a page. Returns `None` if it was never written or fails verification.
    #[must_use]
    pub fn decode(page: &[u8; LEN]) -> Option<Owner> {
        let page: &Page = transmute_ref!(page);
        let body = page.verified(0).filter(|body| body.magic == MAGIC)?;
        Some(Owner {
            pid: body.pid.get(),
            start_time: body.start_time.get(),
            host: (&body.host).into(),
            socket: (&body.socket).into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_what_the_page_says() {
        crate::format::assert_documented!(
            "## Owner page",
            Body { magic, pid, start_time, host, socket } unused { unused, rest }
        );
    }
}
