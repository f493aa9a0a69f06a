//! The media of a depot's tiers, as people see them.

use std::path::PathBuf;

use kvdepot_arena::Arena;

/// What a device is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum DeviceState {
    /// Blocks are read from it and written to it.
    Serving,
    /// Its blocks are read; nothing new is written to it.
    Draining,
    /// Its superblocks or its record table are gone.
    Failed,
}

impl DeviceState {
    /// As it stands in statistics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            DeviceState::Serving => "serving",
            DeviceState::Draining => "draining",
            DeviceState::Failed => "failed",
        }
    }
}

/// One medium of a tier.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct DeviceStats {
    /// The tier.
    pub tier: String,
    /// The device or file.
    pub path: PathBuf,
    /// What it is doing.
    pub state: DeviceState,
    /// Bytes of the arena, as the option `capacity` has them.
    pub capacity_bytes: u64,
    /// Bytes of data it can hold.
    pub data_bytes: u64,
    /// Bytes of data that are allocated.
    pub used_bytes: u64,
    /// Bytes of payload published.
    pub live_bytes: u64,
    /// Blocks published.
    pub blocks: u64,
    /// Blocks pinned by readers.
    pub pinned_blocks: u64,
    /// Blocks being written.
    pub reserved_blocks: u64,
    /// Blocks evicted since it was opened.
    pub evicted_blocks: u64,
    /// Bytes that are not used again, because the medium failed under them.
    pub lost_bytes: u64,
    /// Processes that worked for its previous owner and may still write to it, as far as they are
    /// known: nothing is stored here before they have ended.
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

/// Where the blocks of a drained device go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DrainTo {
    /// To the other devices of its tier, as far as they have room.
    Others,
    /// Nowhere: they are evicted.
    Nowhere,
}
