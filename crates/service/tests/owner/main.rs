//! A depot in the process that opened it: opening, devices, damage, ownership.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;

mod compat_arena;
mod concurrency;
mod corrupt;
mod devices_change;
mod disk;
mod model_depot;
mod opening;
mod ownership;
mod parts;
mod two_phase;
