//! The C interface: `include/kvdepot.h`, for engines that are written in C and C++.
//!
//! This crate is a thin layer: it reads arguments, calls the crates below, and returns their
//! results. The header is the contract, with the owner and the lifetime of every pointer.
//! `tests/in_c` compares its structs, numbers and functions with those of this crate.
//!
//! C callers pass raw pointers. Few places of this crate rely on the header's contract for them:
//!
//! * The types of [`given`] and [`handle`] come only from C callers. They reject pointers that are
//!   visibly wrong (null, unaligned, longer than memory), and safe functions read them.
//! * [`memory`] makes buffers from addresses.
//! * [`save`] calls the program's function.
//!
//! [`guard`] catches panics, and keeps the error message of each thread.

#![expect(
    unsafe_code,
    reason = "pointers of C callers are read, and symbols are exported"
)]

#[macro_use]
pub mod guard;

pub mod batch;
pub mod blocks;
pub mod catalogue;
pub mod depot;
pub mod digest;
pub mod engine;
pub mod given;
pub mod handle;
pub mod llama;
pub mod log;
pub mod memory;
pub mod mover;
pub mod policy;
pub mod save;
pub mod sessions;
pub mod task;
pub mod two_phase;
pub mod upkeep;
