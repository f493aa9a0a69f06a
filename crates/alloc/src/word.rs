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

impl Word for u64 {
    const EMPTY: Self = Self::MAX;

    #[inline]
    fn pack(value: u64) -> Self {
        value
    }

    #[inline]
    fn get(self) -> u64 {
        self
    }
}

/// Spreads a position over the high bits, of which a table makes its slot: offsets are often an
/// arithmetic progression, and linear probing needs them scattered.
#[inline]
pub(crate) const fn spread(x: u64) -> u64 {
    let x = x.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x ^ (x >> 32)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

/// Spreads a number over all bits (the finaliser of SplitMix64).
#[inline]
pub(crate) const fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
