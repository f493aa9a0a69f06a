//! Errors of the allocator, with the values that caused them.

use crate::extents::{Extent, MAX_EXTENTS, MAX_SIZE};
use core::fmt;

/// An error of the allocator. A call that returns an error changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// No free extent is long enough, or `max_extents` of them are too short together.
    Full {
        /// Requested length in bytes, rounded up to the granule.
        requested: u64,
        /// Total free space in bytes.
        free: u64,
    },
    /// An allocation, or an extent passed to [`Pool::rebuild`](crate::Pool::rebuild), has no bytes.
    ZeroSize,
    /// The request exceeds the size of the pool, so freeing other extents cannot help.
    TooLarge {
        /// Requested length in bytes.
        requested: u64,
        /// Size of the pool in bytes.
        size: u64,
    },
    /// No live extent starts at this offset: it was freed already, or the pool never handed it out.
    NotLive {
        /// The offset in the call, in bytes.
        offset: u64,
    },
    /// Two extents passed to [`Pool::rebuild`](crate::Pool::rebuild) share bytes.
    Overlap {
        /// The extent that starts first.
        first: Extent,
        /// The extent that starts before the first one ends.
        second: Extent,
    },
    /// An extent passed to [`Pool::rebuild`](crate::Pool::rebuild) does not start and end at
    /// multiples of the granule.
    Misaligned {
        /// The extent.
        extent: Extent,
        /// Granule of the pool in bytes.
        granule: u64,
    },
    /// An extent passed to [`Pool::rebuild`](crate::Pool::rebuild) ends after the end of the pool.
    OutOfRange {
        /// The extent.
        extent: Extent,
        /// Size of the pool in bytes.
        size: u64,
    },
    /// The granule is not a power of two.
    Granule {
        /// The granule in the call, in bytes.
        granule: u64,
    },
    /// The pool's size is zero, not a multiple of the granule, or larger than [`crate::MAX_SIZE`].
    Size {
        /// The size in the call, in bytes.
        size: u64,
        /// Granule of the pool in bytes.
        granule: u64,
    },
    /// The extent limit of a scattered allocation is outside 1 to [`MAX_EXTENTS`].
    ExtentLimit {
        /// The limit in the call.
        max_extents: usize,
    },
    /// The pool already holds [`crate::MAX_LIVE`] live extents.
    TooMany {
        /// Maximum number of live extents in a pool.
        limit: u64,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Full { requested, free } => write!(
                f,
                "no free extent of {requested} bytes; {free} bytes are free in smaller extents"
            ),
            Self::ZeroSize => f.write_str("length is 0 bytes; allowed: at least 1"),
            Self::TooLarge { requested, size } => {
                write!(
                    f,
                    "length is {requested} bytes; the whole pool has {size} bytes"
                )
            }
            Self::NotLive { offset } => write!(
                f,
                "no live extent starts at offset {offset}: it was already freed, or belongs to \
                 another pool"
            ),
            Self::Overlap { first, second } => {
                write!(f, "live extents {first} and {second} overlap")
            }
            Self::Misaligned { extent, granule } => {
                write!(
                    f,
                    "live extent {extent} is not a multiple of the granule, {granule} bytes"
                )
            }
            Self::OutOfRange { extent, size } => {
                write!(
                    f,
                    "live extent {extent} ends beyond the pool, which has {size} bytes"
                )
            }
            Self::Granule { granule } => {
                write!(f, "granule is {granule} bytes; allowed: powers of two")
            }
            Self::Size { size, granule } => write!(
                f,
                "pool size is {size} bytes; allowed: multiples of the granule ({granule}), \
                 {granule} to {} bytes",
                MAX_SIZE
            ),
            Self::ExtentLimit { max_extents } => {
                write!(
                    f,
                    "max_extents is {max_extents}; allowed: 1 to {MAX_EXTENTS}"
                )
            }
            Self::TooMany { limit } => {
                write!(
                    f,
                    "the pool has its maximum of {limit} live extents; free some first"
                )
            }
        }
    }
}

impl core::error::Error for Error {}
