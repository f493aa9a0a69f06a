//! Memory media and the copies between them.

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod avx2;
mod dax;
mod flush;
pub(crate) mod kernel;
pub(crate) mod leaf;
mod mapping;
pub(crate) mod mover;
mod plain;
pub(crate) mod xxh3;

pub use mapping::{Access, Flush, Kind, Mapping, page_size};
pub use plain::Plain;
