//! Tiers for tests, by nothing but what any crate above the store has: one of one file a block,
//! and one that answers late and fails at random.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::allow_attributes,
    reason = "each test binary uses its own part of this"
)]

pub mod files;
pub mod late;
