//! An offset allocator: it decides *where in an arena* something lives and never touches the
//! arena itself, which may be memory, a device, a file or another host's address space.
//!
//! [`Pool`] hands out [`Extent`]s of a range `0..size` in multiples of a granule. What it promises:
//!
//! * **Exact best fit.** The smallest free extent that fits is used, the lowest of equals, and an
//!   allocation fails only when no free extent fits.
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
//! Free extents are filed in bins, 32 to a power of two, found by a two-level bitmap; a bin is a
//! balanced search tree (a treap). An allocation looks into at most two bins and touches one free
//! extent; a free touches at most three. Each costs a constant number of hash-table and bitmap
//! steps and expected `2 ln n` tree steps, where `n` counts the free extents in *one bin*, usually
//! a handful; even 2³² of them in a single bin make fewer than 50. Tables grow by rehashing, which
//! is amortised; [`Pool::reserve`] moves that cost to a moment of the caller's choice.
//!
//! A pool of less than 2³² − 1 granules needs 10 to 16 bytes a live extent and 36 to 62 a free one;
//! a larger pool twice that, and a small one a few KiB in any case.
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
mod bitmap;
mod check;
mod core;
mod error;
mod extents;
mod free_set;
#[cfg(feature = "std")]
mod handle;
mod live;
mod pool;
mod rebuild;
mod report;
#[cfg(feature = "std")]
mod shared;
mod table;
mod tree;
mod word;

pub use error::Error;
pub use extents::{Extent, Extents, MAX_EXTENTS};
#[cfg(feature = "std")]
pub use handle::Handle;
pub use pool::{FreeExtents, LiveExtents, MAX_LIVE, MAX_SIZE, Pool};
pub use report::Report;
#[cfg(feature = "std")]
pub use shared::Shared;
