//! An offset allocator: it chooses the position of each allocation in an arena and never reads or
//! writes the arena itself.
//!
//! The arena may be memory, a device, a file or the address space of another host. A [`Pool`] hands
//! out [`Extent`]s of the range `0..size`; their lengths are multiples of a granule. Guarantees:
//!
//! * **Best fit.** An allocation uses a shortest free extent that is long enough. The choice is
//!   exact unless more than 16 such extents share a bin; then the length differs by less than 1/64.
//!   An allocation fails only if no free extent fits. An allocation of exactly the length that was
//!   freed last reuses that extent.
//! * **Immediate merging.** Two free extents are never adjacent. Therefore
//!   [`Pool::largest_free_extent`] is exactly the largest length that the next allocation can have.
//! * **Scattered allocation.** If no single free extent fits, [`Pool::allocate_scattered`] combines
//!   a few extents. It allocates all of them or none.
//! * **Misuse is an error**, in release builds too. For example, the pool rejects a double free, a
//!   free of an offset that it never handed out, and empty or oversized requests.
//! * **Recovery.** [`Pool::rebuild`] restores a pool from its live extents.
//!
//! # Bounds
//!
//! All extents are in a list by address. Live extents are also in a hash table by start offset.
//! Free extents are also in lists by size: 64 bins per power of two, found through a two-level
//! bitmap.
//!
//! An allocation reads at most two bins, compares at most 32 free extents and changes one. A free
//! reads one slot of the table and changes at most three extents. Both take constant time, with
//! these exceptions:
//!
//! * A lookup in the hash table takes expected constant time.
//! * Sometimes a part of the table or of a list grows, which moves at most 65,536 entries
//!   regardless of the size of the pool. This cost is amortized; [`Pool::reserve`] pays it in
//!   advance.
//! * Before the pool rejects a request, it compares all extents in the request's bin. It repeats
//!   this comparison only after a request might fit again.
//!
//! [`Pool::largest_free_extent`] compares all extents in the highest bin in use.
//!
//! Memory use per extent depends on the size of the pool. In addition, each pool needs about 8 KiB.
//!
//! | pool | live extent | free extent |
//! | --- | --- | --- |
//! | less than 2³² − 1 granules | 27 to 30 bytes | 32 to 34 bytes |
//! | larger | up to 41 bytes | up to 43 bytes |
//!
//! # Features
//!
//! The feature `std` (default) adds [`Shared`], a pool with a lock, and [`Handle`], an allocation
//! that is freed when it is dropped. Without `std` the crate needs only `alloc`.
//!
//! # Examples
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
