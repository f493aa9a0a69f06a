//! Clients that hang, flood the server, send malformed frames or vanish.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../../../store/tests/tiers/mod.rs"]
mod tiers;

mod share_bounds;
mod share_breaks;
mod share_calls;
mod share_files;
mod share_hung;
mod share_limits;
mod share_unheard;
