//! Numbers of a state, in their order, and never beyond its end.

use super::error::{Error, refuse};

/// A place in a state.
#[derive(Clone, Copy)]
pub(super) struct Reader<'a> {
    state: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(state: &'a [u8]) -> Reader<'a> {
        Reader { state, at: 0 }
    }

    /// Bytes before this place.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// Bytes from here on.
    pub(super) fn left(&self) -> usize {
        self.state.len().saturating_sub(self.at)
    }

    /// Goes over so many bytes.
    pub(super) fn skip(&mut self, field: &'static str, bytes: Option<usize>) -> Result<(), Error> {
        match bytes {
            Some(bytes) if bytes <= self.left() => {
                self.at += bytes;
                Ok(())
            }
            _ => {
                let value = bytes.map_or_else(|| "beyond 64 bits".into(), |all| all.to_string());
                let allowed = format_args!("at most the remaining {} bytes", self.left());
                refuse(field, value, allowed)
            }
        }
    }

    fn take<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], Error> {
        let rest = self.state.get(self.at..).unwrap_or_default();
        match rest.first_chunk::<N>() {
            Some(bytes) => {
                self.at += N;
                Ok(*bytes)
            }
            None => refuse(field, "incomplete", format_args!("{N} bytes")),
        }
    }

    pub(super) fn number(&mut self, field: &'static str) -> Result<u32, Error> {
        self.take(field).map(u32::from_le_bytes)
    }

    pub(super) fn signed(&mut self, field: &'static str) -> Result<i32, Error> {
        self.take(field).map(i32::from_le_bytes)
    }

    pub(super) fn long(&mut self, field: &'static str) -> Result<u64, Error> {
        self.take(field).map(u64::from_le_bytes)
    }

    /// A number that can be but one.
    pub(super) fn expect(&mut self, field: &'static str, only: u32) -> Result<(), Error> {
        match self.number(field)? {
            found if found == only => Ok(()),
            found => refuse(field, found, only),
        }
    }
}
