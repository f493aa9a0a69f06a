//! An offset allocator: it decides *where in an arena* something lives and never touches the
//! arena itself, which may be memory, a device, a file or another host's address space.
//!
//! [`Pool`] hands out [`Extent`]s of a range `0..size` in multiples of a granule. What it promises:
//!
//! * **Best fit.** Of the free extents that are long enough, a shortest one is used: exactly,
//!   unless more than 16 of them share a bin, that is, a 64th of their size. An allocation fails
//!   only when no free extent fits. One of the size that was freed just before takes its place.
//! * **Immediate merging.** Two free extents never touch, so [`Pool::largest_free_extent`] is what
//!   can be allocated next, to the byte.
//! * **Scattered allocation.** When no single free extent fits, [`Pool::allocate_scattered`] takes
//!   a few; it takes all of them or none.
//! * **Misuse is an error**, in release builds too: freeing twice, freeing what was never handed
//!   out, empty and oversized requests.
//! * **Recovery.** [`Pool::rebuild`] restores a pool from its live extents.
//!
//! # Bounds
//!
//! All extents form a list by address, the live ones are in a hash table by start, the free ones in
//! lists by size: 64 bins to a power of two, found by a two-level bitmap. An allocation looks up at
//! most two bins, compares at most 32 free extents and changes one; a free looks up one slot of the
//! table and changes at most three extents. Both take constant time, with these exceptions: the
//! table's slots are expected constant time, as hash tables are; now and then a part of it or of a
//! list grows, which moves at most 65,536 entries however many there are (amortised, and
//! [`Pool::reserve`] does it at a moment of the caller's choice); and before a request is refused,
//! all extents that share its bin are compared, once until another one may fit.
//! [`Pool::largest_free_extent`] compares all that share the highest bin in use.
//!
//! A pool of less than 2³² − 1 granules needs 27 to 30 bytes a live extent, a free one 32 to 34, a
//! larger pool up to 41 and 43, and any pool some 8 KiB.
//!
//! # Features
//!
//! `std` (default) adds [`Shared`], the pool behind a lock, and [`Handle`], an allocation that
//! frees itself when dropped. Without it the crate needs only `alloc`.
//!
//! ```
//! use kvdepot_alloc::Pool;
//!
//! let mut pool = Pool::new(1 << 20, 4096)?;
//! let a = pool.allocate(10_000)?;
//! assert_eq!((a.offset, a.len), (0, 12_288)); // rounded up to the granule
//! let b = pool.allocate_near(4096, a.offset)?;
//! assert_eq!(b.offset, a.end());
//! pool.free(a.offset)?;
//! assert!(pool.free(a.offset).is_err()); // a double free is an error, always
//! # Ok::<(), kvdepot_alloc::Error>(())
//! ```

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

mod bins;
mod chunks;
mod core;
mod error;
mod extents;
mod free_set;
#[cfg(feature = "std")]
mod links;
mod live_set;
mod pool;
mod rebuild;
mod report;
#[cfg(feature = "std")]
mod shared;
mod table;
mod word;

pub use error::Error;
pub use extents::{Extent, Extents, Hint, MAX_EXTENTS, MAX_SIZE};
pub use pool::{FreeExtents, LiveExtents, MAX_LIVE, Pool};
pub use report::Report;
#[cfg(feature = "std")]
pub use shared::{Handle, Shared};
