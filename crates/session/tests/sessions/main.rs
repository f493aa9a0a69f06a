//! Sessions in a depot: saves, streams, restores and kills.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;

mod background;
mod crash_kill9;
mod crash_steps;
mod histories;
mod lasting;
mod meanwhile;
mod sessions;
mod streams;
mod trimmed;
