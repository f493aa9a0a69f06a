//! C and C++ programs over the library.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../programs/mod.rs"]
mod programs;

mod layout;
mod llama_in_cpp;
mod meanwhile;
mod programs_in_c;
