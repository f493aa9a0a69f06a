//! Asynchronous tiers: admission, loads, time-outs and lost answers.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/bucket.rs"]
mod bucket;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/folder.rs"]
mod folder;
#[path = "../common/rotten.rs"]
mod rotten;
#[path = "../tiers/mod.rs"]
mod tiers;

mod admission;
mod closing;
mod discards;
mod edge_admission;
mod loads;
mod queue_bounds;
mod steps;
mod tiers_apart;
