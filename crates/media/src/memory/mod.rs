//! Memory media and the copies between them.

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod avx2;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod avx512;
pub(crate) mod choice;
mod dax;
#[cfg(test)]
pub(crate) mod fault;
mod flush;
mod huge;
pub(crate) mod kernel;
pub(crate) mod leaf;
pub(crate) mod lost;
mod mapping;
mod medium;
pub(crate) mod mover;
mod opened;
mod plain;
mod present;
mod run;
pub(crate) mod staged;
pub(crate) mod xxh3;

pub use huge::Pages;
pub use kernel::{copy, fence};
pub use mapping::{Access, Flush, Mapping, page_size};
pub use medium::Kind;
pub use opened::{Descriptor, Opened};
pub use plain::Plain;
