//! Transfer engines: batches, faults, paths and the wire protocol.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;

mod crowds;
mod engine;
mod faults;
mod local;
mod model_homes;
mod paths;
mod wire;

/// What is asked of this program as another process.
#[test]
fn plays_a_peer() {
    common::peer::play();
}
