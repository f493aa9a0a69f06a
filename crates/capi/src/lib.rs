//! The C interface: `include/kvdepot.h`, for engines that are written in C and C++.
//!
//! A thin layer: it reads arguments, calls the crates below, and says what became of it. The
//! header is the contract, which says of every pointer who owns it and how long; `tests/layout.rs`
//! compares its structs, numbers and functions with these.
//!
//! What C hands over are raw pointers, and this crate believes what the header says of them, in few
//! places. The types of `given` and `handle` are made by C callers only, refuse what can be seen to
//! be wrong (null, unaligned, longer than memory), and are read by safe functions. `memory` makes
//! buffers of addresses, and `save` calls the program's function. `guard` lets no panic out, and
//! keeps the message of an error for the thread that has caused it.

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
