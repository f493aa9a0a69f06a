//! The media of a depot's tiers, as people see them.

use std::path::PathBuf;

use kvdepot_arena::Arena;

/// State of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum DeviceState {
    /// The tier reads blocks from the device and writes blocks to it.
    Serving,
    /// The tier reads blocks from the device and writes no new ones to it.
    Draining,
    /// The superblocks or the record table of the device are lost.
    Failed,
}

impl DeviceState {
    /// Returns the name of the state in statistics, for example `serving`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            DeviceState::Serving => "serving",
            DeviceState::Draining => "draining",
            DeviceState::Failed => "failed",
        }
    }
}

/// Statistics of one medium of a tier.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct DeviceStats {
    /// Name of the tier.
    pub tier: String,
    /// Path of the device or file.
    pub path: PathBuf,
    /// State of the device.
    pub state: DeviceState,
    /// Size of the arena in bytes, as in the option `capacity`.
    pub capacity_bytes: u64,
    /// Space for data, in bytes.
    pub data_bytes: u64,
    /// Allocated part of [`DeviceStats::data_bytes`], in bytes.
    pub used_bytes: u64,
    /// Payload of published blocks, in bytes.
    pub live_bytes: u64,
    /// Number of published blocks.
    pub blocks: u64,
    /// Number of blocks that readers have pinned.
    pub pinned_blocks: u64,
    /// Number of blocks that are being written.
    pub reserved_blocks: u64,
    /// Number of blocks evicted since the device was opened.
    pub evicted_blocks: u64,
    /// Space that is no longer used because the medium failed there, in bytes.
    pub lost_bytes: u64,
    /// Process IDs of workers of the previous owner that may still write to the device, as far as
    /// known.
    ///
    /// The tier stores blocks on the device only after they have exited.
    #[serde(default)]
    pub orphans: Vec<u32>,
}

impl DeviceStats {
    pub(crate) fn of(arena: &Arena) -> Option<DeviceStats> {
        let stats = arena.stats();
        let device = arena.device();
        Some(DeviceStats {
            tier: stats.tier,
            path: arena.path()?.into(),
            state: match () {
                () if device.failed => DeviceState::Failed,
                () if device.leaving => DeviceState::Draining,
                () => DeviceState::Serving,
            },
            capacity_bytes: arena.layout().capacity,
            data_bytes: stats.capacity_bytes,
            used_bytes: stats.capacity_bytes - stats.free_bytes,
            live_bytes: stats.live_bytes,
            blocks: stats.blocks,
            pinned_blocks: stats.pinned_blocks,
            reserved_blocks: stats.reserved_blocks,
            evicted_blocks: stats.evicted_blocks,
            lost_bytes: stats.lost_bytes,
            orphans: arena.orphan_pids(),
        })
    }
}

/// Destination of the blocks of a drained device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DrainTo {
    /// The other devices of the tier. Blocks for which they have no space are evicted.
    Others,
    /// No destination: all blocks are evicted.
    Nowhere,
}
