//! The allocators that `kvdepot bench alloc` measures kvdepot's beside. No other crate uses them,
//! and nothing that is installed contains them.
//!
//! * [`Reference`]: 256 bins, sizes rounded up to a bin; what others use in kvdepot's place.
//! * [`BestFit`]: what an exact best fit reaches, with two ordinary trees.

#![forbid(unsafe_code)]

mod best_fit;
mod reference;

pub use best_fit::BestFit;
pub use reference::{Held, Reference};
