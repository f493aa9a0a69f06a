//! Clients of a depot over its socket.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../../../store/tests/common/folder.rs"]
mod folder;
#[path = "../../../store/tests/common/realm.rs"]
mod realm;
#[path = "../../../store/tests/common/rotten.rs"]
mod rotten;
#[path = "../../../store/tests/tiers/mod.rs"]
mod tiers;

mod compat_socket;
mod files;
mod groups;
#[cfg(debug_assertions)]
mod linear;
mod loads;
mod lookups;
mod service;
mod service_ends;
