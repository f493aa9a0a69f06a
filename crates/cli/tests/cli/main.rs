//! The built command: what it prints, where, and with which exit status.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod bench;
mod bench_files;
mod bench_session;
mod bench_transfer;
mod doctor;
mod home;
mod quarantine;
mod read;
mod rm;
mod serve;
mod session;
mod session_payload;
mod targets;
