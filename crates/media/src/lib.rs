//! Data movement: shared memory, mapped files and DAX, and batched copies that compute checksums.
//!
//! A [`Copier`] moves a [`Batch`] of parts between [`Buffer`]s. A buffer is memory of this process,
//! memory of a GPU, or a range that an I/O backend ([`Carrier`]) reads and writes, such as a
//! [`file::File`]. A [`Mapping`] is a medium that is mapped into memory.

#![expect(
    unsafe_code,
    reason = "this crate maps memory and moves bytes between raw addresses"
)]

mod buffer;
mod carrier;
pub mod checksum;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod conformance;
mod copier;
pub mod copy_kernel;
pub mod cuda;
mod end;
mod error;
pub mod file;
mod lane;
mod library;
mod memory;
mod once;
mod shm;
#[cfg(feature = "sim")]
#[doc(hidden)]
pub mod sim;
mod simulated;
mod slab;
pub mod stream;
mod tried;
mod turns;
mod way;

pub use buffer::{Buffer, Owner, first_overlap};
pub use carrier::{Alignment, Carrier, Op, Receipt, Registration, SlabMemory};
pub use checksum::{Checksum, Mac, MacKey, PartId};
pub use copier::{Batch, Copier, CopierConfig, Done, Outcome, PART_LEN_MAX, PARTS_MAX, Ticket};
pub use error::{Error, Failure, Result};
pub use library::Library;
pub use memory::{
    Access, Descriptor, Flush, Kind, Mapping, Opened, Pages, Plain, copy, fence, page_size,
};
#[doc(hidden)]
#[cfg(feature = "sim")]
pub use simulated::shorten_turns;
pub use simulated::{is_simulated, items_per_turn};
