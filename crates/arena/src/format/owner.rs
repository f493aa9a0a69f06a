//! The owner page: who has the arena open. Informative; the lock decides.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute, transmute_ref};

use super::{Sealed, Text};

/// Bytes of the owner page.
pub const LEN: usize = 4096;
const MAGIC: [u8; 8] = *b"KVOWNER\0";

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
    /// The page as it stands on the medium.
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

    /// Reads a page; `None` when nobody has written one, or it does not verify.
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
