//! Depots with a `Peer` tier: these processes register that kind.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;

mod doors;
mod far_tiers;
