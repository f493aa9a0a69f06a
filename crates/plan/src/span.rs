//! Ranges and spans: addresses as plain numbers, each in its own address space.

use crate::Error;

/// One contiguous range of a source or of a destination, in its own address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Range {
    /// First address, for example in memory, in a file or in an arena.
    pub addr: u64,
    /// Length in bytes. Empty ranges are allowed and are skipped.
    pub len: u64,
}

impl Range {
    /// Creates a range of `len` bytes at `addr`. Calls that use the range check it.
    pub const fn new(addr: u64, len: u64) -> Range {
        Range { addr, len }
    }
}

/// One contiguous move: `len` bytes from `src` to `dst`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Span {
    /// First address of the source.
    pub src: u64,
    /// First address of the destination.
    pub dst: u64,
    /// Length in bytes.
    pub len: u64,
}

impl Span {
    /// Creates a span of `len` bytes. Calls that use the span check it.
    pub const fn new(src: u64, dst: u64, len: u64) -> Span {
        Span { src, dst, len }
    }

    /// Returns true if `next` starts exactly at the end of this span, on both sides.
    pub fn continues_in(&self, next: &Span) -> bool {
        self.src.checked_add(self.len) == Some(next.src)
            && self.dst.checked_add(self.len) == Some(next.dst)
    }

    /// Both ends must be addresses.
    pub(crate) fn check(&self) -> Result<(), Error> {
        check_end(self.src, self.len)?;
        check_end(self.dst, self.len)
    }
}

/// The bytes in all ranges; each must end inside the address space.
pub(crate) fn total(ranges: &[Range]) -> Result<u64, Error> {
    ranges.iter().try_fold(0u64, |sum, range| {
        check_end(range.addr, range.len)?;
        sum.checked_add(range.len).ok_or(Error::TotalOverflow)
    })
}

/// The address after the last byte must fit as well: lanes compute it.
fn check_end(addr: u64, len: u64) -> Result<(), Error> {
    match addr.checked_add(len) {
        Some(_) => Ok(()),
        None => Err(Error::RangeOverflow { addr, len }),
    }
}
