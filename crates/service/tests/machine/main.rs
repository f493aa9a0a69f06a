//! Tests that need a block device, a DAX device or disks; `tests/vm/run.sh` provides them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;

mod block_device;
mod device_dax;
mod power_cuts;
