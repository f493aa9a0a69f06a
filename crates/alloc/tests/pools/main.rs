//! Pools: contract, models, threads and long histories.

#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/model.rs"]
mod model;
#[path = "../common/twin.rs"]
mod twin;

mod model_pool;
mod pool;
#[cfg(feature = "std")]
mod shared;
mod soak;
mod utilisation;
