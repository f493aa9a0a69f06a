//! One arena: access, recovery, corruption, kills.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;

mod access;
mod corrupt;
mod crash_kill9;
mod recovery;
