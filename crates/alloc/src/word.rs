//! How wide the tables' numbers are. All arithmetic is in `u64`; a pool of few granules *stores*
//! its numbers in 32 bits, which halves its memory and the cache lines it touches.

use core::fmt::Debug;

/// A number of granules as it is stored.
pub(crate) trait Word: Copy + Eq + Debug {
    /// Marks an unused slot of a table; never a position in a pool.
    const EMPTY: Self;

    /// Stores a number. The pool has chosen a width in which all its numbers fit.
    fn pack(value: u64) -> Self;

    /// Gives the number back.
    fn get(self) -> u64;
}

impl Word for u32 {
    const EMPTY: Self = Self::MAX;

    #[inline]
    fn pack(value: u64) -> Self {
        debug_assert!(value < u64::from(Self::MAX), "{value} needs the wide pool");
        value as Self
    }

    #[inline]
    fn get(self) -> u64 {
        u64::from(self)
    }
}

/// A number of 64 bits as two halves: structures that hold it need no padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Halves([u32; 2]);

impl Word for Halves {
    const EMPTY: Self = Self([u32::MAX; 2]);

    #[inline]
    fn pack(value: u64) -> Self {
        Self([value as u32, (value >> 32) as u32])
    }

    #[inline]
    fn get(self) -> u64 {
        u64::from(self.0[0]) | u64::from(self.0[1]) << 32
    }
}

/// Scatters positions: blocks of one size start in arithmetic progression, which linear probing
/// must not see. (The multiplication of wyhash, whose halves are combined.)
#[inline]
pub(crate) const fn spread(x: u64) -> u32 {
    let product = x as u128 * 0x9e37_79b9_7f4a_7c15;
    product as u32 ^ (product >> 64) as u32
}
