//! The tiers `Posix` and `Ds3fs`: files in a shared directory.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/folder.rs"]
mod folder;
#[path = "../common/fuse.rs"]
mod fuse;
#[path = "../common/realm.rs"]
mod realm;

mod ds3fs;
mod pipeline_holes;
mod posix;
mod posix_bounds;
mod posix_disks;
mod posix_faults;
mod posix_hung;
mod posix_linear;
mod posix_outside;
mod posix_waiting;
