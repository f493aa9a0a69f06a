//! Transfer planning: one algorithm for memory copies, file I/O and network transfer.
//!
//! A movement starts as two lists of [`Range`]s: the sources and the destinations of the bytes.
//! [`zip`] turns the lists into [`Span`]s and joins adjacent ones. [`zip_units`] also marks units
//! that must never be divided (leaves of a checksum).
//!
//! A [`Planner`] packs units or single spans into [`Slice`]s and assigns each slice to the lane
//! (copy thread) with the fewest bytes. It hands slices out as soon as a watermark of them is
//! ready, while it still plans the rest.
//!
//! A [`Join`] owns everything that the lanes use. It releases these resources only after the last
//! lane has stopped, also after a failure.
//!
//! The crate has no I/O, no threads, and no clock except for the deadline of [`Waiter::wait`]. It
//! treats addresses as numbers and never dereferences them. A warm [`Planner`] allocates no memory.
//!
//! # Examples
//!
//! ```
//! use kvdepot_plan::{zip, Join, Limits, Planner, Range};
//!
//! let mut spans = Vec::new();
//! let bytes = zip(&[Range::new(0, 10), Range::new(10, 6)], &[Range::new(64, 16)], &mut spans)?;
//! assert_eq!((bytes, spans.len()), (16, 1)); // the two sources touch: one span
//!
//! let limits = Limits { slice_size: 4, tail_merge: 1, lanes: 2, watermark: 2 };
//! let mut planner = Planner::new(limits)?;
//! let join = Join::new(vec![0u8; 16], |_buffer, _ending| { /* publish */ });
//! let waiter = join.waiter();
//! for span in spans {
//!     for (slice, pieces) in planner.push_span(0, span)? {
//!         let guard = join.guard(); // moves to lane `slice.lane` together with `pieces`
//!         assert!(!pieces.is_empty() && slice.bytes <= 5);
//!         drop(guard); // the lane has stopped
//!     }
//! }
//! for (_slice, _pieces) in planner.finish() {}
//! drop(join); // nothing more will be handed out
//! assert!(waiter.wait(None));
//! assert!(waiter.ending().is_some_and(|ending| ending.is_clean()));
//! # Ok::<(), kvdepot_plan::Error>(())
//! ```

#![forbid(unsafe_code)]

mod coalesce;
mod error;
mod join;
mod lane;
mod planner;
mod slice;
mod span;
mod sync;

pub use coalesce::{Side, coalesce, zip, zip_units};
pub use error::Error;
pub use join::{Ending, Guard, Join, Waiter};
pub use planner::Planner;
pub use slice::{Limits, Piece, Ready, ReadyIter, Slice, Unit};
pub use span::{Range, Span};
