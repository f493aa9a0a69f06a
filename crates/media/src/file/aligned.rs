//! Memory as direct I/O takes it.

use std::ops::{Deref, DerefMut};

/// Alignment of offsets, lengths and addresses for direct I/O, in bytes; sufficient on every file
/// system.
pub const PAGE: usize = 4096;

/// Zeroed memory that consists of whole pages and starts at a page boundary.
#[derive(Debug)]
pub struct Aligned {
    bytes: Vec<u8>,
    begin: usize,
    len: usize,
}

impl Aligned {
    /// Allocates `len` bytes, rounded up to whole pages.
    #[must_use]
    pub fn new(len: usize) -> Self {
        let len = len.next_multiple_of(PAGE);
        let bytes = vec![0; len + PAGE];
        let begin = bytes.as_ptr().align_offset(PAGE);
        Self { bytes, begin, len }
    }
}

impl Deref for Aligned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.begin..][..self.len]
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.begin..][..self.len]
    }
}
