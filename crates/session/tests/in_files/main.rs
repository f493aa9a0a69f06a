//! Session files: the native format, ds4 and llama.cpp.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../files/mod.rs"]
mod files;
#[path = "../parts/mod.rs"]
mod parts;

mod corrupt_files;
mod crash_files;
mod ds4_format;
mod ds4_sessions;
mod llama_state;
mod one_file;
mod session_files;
