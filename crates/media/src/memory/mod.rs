//! Memory media and the copies between them.

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod avx2;
pub(crate) mod kernel;
pub(crate) mod leaf;
pub(crate) mod xxh3;
