//! Arguments of a kernel: the source and destination of the bytes, and the kind of stores.

#[cfg(all(target_arch = "x86_64", not(miri)))]
use super::xxh3::{BLOCK_STRIPES, STRIPE};

/// The stores of a kernel, which also hashes the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    /// Nothing: hash in place.
    Nothing,
    /// Ordinary stores, which leave the destination in the caches.
    Cached,
    /// Streaming stores, which leave the caches alone and save reading the destination first.
    /// They are weakly ordered: [`fence`] before anybody is told. Where the processor or the
    /// alignment does not allow them, ordinary stores are used.
    Streaming,
    /// Block by block, ordinary stores to the run's desk, and from there to its destination as
    /// above, whatever its alignment. Only for whole blocks and [`Isa::together`].
    Through,
}

/// One run of stripes: where it is read, where it is stored, by way of what unless null, and what
/// this lane reads after it, to be fetched early (null when unknown).
#[derive(Clone, Copy)]
pub(crate) struct Run {
    pub(crate) src: *const u8,
    pub(crate) dst: *mut u8,
    pub(crate) desk: *mut u8,
    pub(crate) next: *const u8,
}

impl Run {
    /// What is fetched while a block is moved, after which `left` whole ones remain: what comes a
    /// block later or, for a run alone, two; at the end of the run what this lane reads next.
    /// Measured: one block is too late for a single stream, and two of four streams are too much.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[inline]
    pub(crate) fn ahead(&self, ways: usize, left: usize) -> *const u8 {
        let blocks = if ways == 1 { 2 } else { 1 };
        match left < blocks {
            true => self
                .next
                .wrapping_add((blocks - 1 - left) * BLOCK_STRIPES * STRIPE),
            false => self.src.wrapping_add(blocks * BLOCK_STRIPES * STRIPE),
        }
    }

    /// The run without its first bytes.
    #[inline]
    pub(crate) fn at(self, bytes: usize) -> Self {
        Self {
            src: self.src.wrapping_add(bytes),
            dst: self.dst.wrapping_add(bytes),
            ..self
        }
    }
}
