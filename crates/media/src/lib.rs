//! How bytes move: shared memory, mapped files and DAX, copies with fused checksums.

#![expect(
    unsafe_code,
    reason = "this crate maps memory and moves bytes between raw addresses"
)]

mod buffer;
pub mod checksum;
mod copier;
pub mod cuda;
mod error;
mod lane;
mod memory;
#[cfg(feature = "sim")]
#[doc(hidden)]
pub mod sim;
mod slab;

pub use buffer::{Buffer, Owner, first_overlap};
pub use checksum::{Checksum, PartId};
pub use copier::{
    Batch, Copier, CopierConfig, Done, Failure, Outcome, PART_LEN_MAX, PARTS_MAX, Ticket,
};
pub use error::{Error, Result};
pub use memory::{Access, Descriptor, Flush, Kind, Mapping, Pages, Plain, page_size};
