//! Fault injection, crash and model helpers for kvdepot's tests.
//!
//! * [`sim`]: seeded histories of everything at once, against a twin, shrunk when they fail.
//! * [`seed`]: random numbers from a printed seed, and how many rounds a test runs.
//! * [`child`]: the running test binary once more, as a process that can be killed.
//! * [`worker`]: the same, as a process that is told line by line what to do.
//! * [`command`]: a command that one of ours runs, and clears up behind.
//! * [`double`]: doubles of libraries, which are built for a test.
//! * [`bytes`]: the content of a block from its number, checked without keeping it.
//! * [`rot`]: bytes of a file flipped, zeroed, swapped, cut off.
//! * [`log`]: what is logged, as text.
//! * [`etcd`]: a real one, started and killed.
//! * [`proxy`]: a TCP connection's bytes late, changed, cut off.
//! * [`model`]: what a depot may answer, as a plain map.
//! * [`write_log`]: what a disk may hold after a power cut.
//! * [`runs`]: files that are mostly zeros, as fixtures.
//! * `s3`, with the feature of that name: an object store over a directory.
//!
//! It knows nothing of the crates under test.

#![forbid(unsafe_code)]
#![expect(
    clippy::missing_panics_doc,
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and its output is for the person who reads it"
)]

pub mod bytes;
pub mod child;
pub mod command;
pub mod double;
pub mod etcd;
pub mod log;
pub mod model;
pub mod proxy;
pub mod rot;
pub mod runs;
#[cfg(feature = "s3")]
pub mod s3;
pub mod seed;
pub mod sim;
pub mod worker;
pub mod write_log;

pub use seed::{Rng, few_rounds, rounds};
