//! What can go wrong, with the values that made it so.

use crate::extents::{Extent, MAX_EXTENTS, MAX_SIZE};
use core::fmt;

/// Why a call to the allocator was refused. A refused call changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// There is not enough room, or not in few enough pieces. All in bytes.
    Full {
        /// What was asked for, rounded up to the granule.
        requested: u64,
        /// What is free in total.
        free: u64,
    },
    /// An allocation, or an extent given to a rebuild, has no bytes.
    ZeroSize,
    /// The request exceeds the whole pool, so freeing others cannot help. In bytes.
    TooLarge {
        /// What was asked for.
        requested: u64,
        /// The size of the pool.
        size: u64,
    },
    /// No live extent starts there: freed already, or never handed out by this pool.
    NotLive {
        /// The offset that was given, in bytes.
        offset: u64,
    },
    /// Two extents given to a rebuild share bytes.
    Overlap {
        /// The extent that starts first.
        first: Extent,
        /// The extent that starts before the first one ends.
        second: Extent,
    },
    /// An extent given to a rebuild does not lie on granules.
    Misaligned {
        /// The extent.
        extent: Extent,
        /// The granule of the pool, in bytes.
        granule: u64,
    },
    /// An extent given to a rebuild ends beyond the pool.
    OutOfRange {
        /// The extent.
        extent: Extent,
        /// The size of the pool, in bytes.
        size: u64,
    },
    /// The granule is not a power of two.
    Granule {
        /// The granule that was given, in bytes.
        granule: u64,
    },
    /// The pool's size is zero, not a multiple of the granule, or beyond [`crate::MAX_SIZE`].
    Size {
        /// The size that was given, in bytes.
        size: u64,
        /// The granule that was given, in bytes.
        granule: u64,
    },
    /// A scattered allocation may have one to [`MAX_EXTENTS`] extents.
    ExtentLimit {
        /// The limit that was given.
        max_extents: usize,
    },
    /// The pool holds [`crate::MAX_LIVE`] live extents already.
    TooMany {
        /// How many live extents a pool can hold.
        limit: u64,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Full { requested, free } => write!(
                f,
                "no room for {requested} bytes: {free} bytes are free, in too small extents"
            ),
            Self::ZeroSize => f.write_str("length is 0 bytes, at least 1 is needed"),
            Self::TooLarge { requested, size } => {
                write!(f, "length is {requested} bytes, the whole pool has {size}")
            }
            Self::NotLive { offset } => write!(
                f,
                "no live extent starts at offset {offset}: \
                 it was freed before, or is not of this pool"
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
                write!(f, "granule is {granule} bytes, allowed are powers of two")
            }
            Self::Size { size, granule } => write!(
                f,
                "pool size is {size} bytes, allowed are multiples of the granule ({granule}) \
                 from {granule} to {}",
                MAX_SIZE
            ),
            Self::ExtentLimit { max_extents } => {
                write!(
                    f,
                    "max_extents is {max_extents}, allowed are 1 to {MAX_EXTENTS}"
                )
            }
            Self::TooMany { limit } => {
                write!(f, "the pool holds as many live extents as it can: {limit}")
            }
        }
    }
}

impl core::error::Error for Error {}
