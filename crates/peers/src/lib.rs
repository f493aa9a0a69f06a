//! What the benchmarks of the command measure kvdepot beside. No other crate uses it, and nothing
//! that is installed contains it.
//!
//! * [`Reference`]: 256 bins, sizes rounded up to a bin; what others use in place of kvdepot's
//!   allocator.
//! * [`BestFit`]: what an exact best fit reaches, with two ordinary trees.
//! * [`Fused`]: a plain loop that copies a block and computes a checksum.

#![expect(unsafe_code, reason = "a plain copy loop is written in intrinsics")]

mod best_fit;
mod fused;
mod reference;

pub use best_fit::BestFit;
pub use fused::Fused;
pub use reference::{Held, Reference};
