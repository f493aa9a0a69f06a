//! How bytes move: shared memory, mapped files and DAX, copies with fused checksums.

#![expect(
    unsafe_code,
    reason = "this crate maps memory and moves bytes between raw addresses"
)]

pub mod checksum;
mod error;
pub mod host;
mod memory;

pub use error::{Error, Result};
