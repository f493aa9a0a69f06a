//! The media of a depot's `Dax` tier, and how they come and go while it serves.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::Error;
use crate::arena::{Arena, Opening};
use crate::config::DaxConfig;
use crate::depot::Depot;
use crate::pipeline::Drained;
use crate::tier::{DAX, Tier};

/// What a device is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
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
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
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

impl Depot {
    /// The media of the `Dax` tier, in the order in which they were named.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn devices(&self) -> Result<Vec<DeviceStats>, Error> {
        let _pass = self.core().gate.enter()?;
        let media = self.core().media();
        Ok(media
            .iter()
            .filter_map(|arena| DeviceStats::of(arena))
            .collect())
    }

    /// Adds a device or file to the `Dax` tier, making a file that is missing, and serves at once
    /// what it holds. Adding one again that is there changes nothing, but for one that was
    /// drained: it takes writes again.
    ///
    /// # Errors
    /// [`Error::Input`] for a capacity that it does not have, or another name of a device that is
    /// there; else as [`Depot::open`].
    pub fn add_device(&self, path: &Path, capacity: Option<u64>) -> Result<Opening, Error> {
        let core = self.core();
        let _pass = core.gate.enter()?;
        let (_, tier) = self.dax_tier()?;
        let config = self.config();
        let settings = DaxConfig {
            path: None,
            capacity,
            devices: Vec::new(),
            format: false,
            ..config.dax.clone()
        };
        let socket = self.socket().map(|path| path.display().to_string());
        let announce = |arena: &Arena| match &socket {
            Some(socket) => arena.announce(socket),
            None => Ok(()),
        };
        let number = || core.next_medium();
        let wait = config.lock_wait;
        let opening = tier.add(path, &settings, number, wait, &core.uses, announce)?;
        tracing::info!(path = %path.display(), blocks = opening.blocks, "device added");
        Ok(opening)
    }

    /// Takes no more writes to a device and empties it, so that it can be removed. Its blocks can
    /// be loaded at every moment, wherever they are. Waits up to `patience` for blocks that are
    /// pinned or being written.
    ///
    /// # Errors
    /// [`Error::Busy`] when that was not enough: the device then takes writes again.
    /// [`Error::Input`] for a path that is no device of this depot, or when no other is there to
    /// take its blocks.
    pub fn drain_device(
        &self,
        path: &Path,
        to: DrainTo,
        patience: Duration,
    ) -> Result<Drained, Error> {
        // Its own passes: a close does not wait for all of it.
        drop(self.core().gate.enter()?);
        let (index, tier, arena) = self.device(path)?;
        if to == DrainTo::Others && !tier.has_beside(&arena) {
            let allowed = "\"nowhere\" where no other device takes writes: its blocks are evicted";
            return Err(Error::input("to", "\"others\"", allowed));
        }
        self.core()
            .drain_device(index, &arena, to == DrainTo::Others, patience)
    }

    /// Lets a drained or empty device go: another depot can open it then. With `force` whatever
    /// it holds is evicted first.
    ///
    /// # Errors
    /// [`Error::Input`] for one that holds blocks, or is the last; with `force`, [`Error::Busy`].
    pub fn remove_device(&self, path: &Path, force: bool, patience: Duration) -> Result<(), Error> {
        drop(self.core().gate.enter()?);
        let (index, tier, arena) = self.device(path)?;
        if tier.arenas().len() == 1 {
            let allowed = "a device beside others: a tier keeps one (add another first)";
            return Err(Error::input("path", path.display(), allowed));
        }
        if force {
            self.core().drain_device(index, &arena, false, patience)?;
        }
        let _pass = self.core().gate.enter()?;
        if !tier.take_out(&arena) {
            let allowed = "a drained or empty device (drain_device empties it; or force)";
            return Err(Error::input("path", path.display(), allowed));
        }
        tracing::info!(path = %path.display(), "device removed");
        Ok(())
    }

    /// Gives a device `capacity` bytes while it serves. Its record table stays as it is.
    ///
    /// # Errors
    /// [`Error::Input`] for less than it has, or more than its medium has.
    pub fn grow_device(&self, path: &Path, capacity: u64) -> Result<(), Error> {
        let _pass = self.core().gate.enter()?;
        let (_, _, arena) = self.device(path)?;
        arena.grow(capacity)
    }

    fn dax_tier(&self) -> Result<(usize, &Tier), Error> {
        let mut tiers = self.core().tiers.iter().enumerate();
        let found = tiers.find(|(_, tier)| tier.name() == DAX);
        found.ok_or_else(|| {
            let tiers = self.tiers().join("|");
            Error::input(
                "pipeline",
                tiers,
                "one with a Dax tier, which alone has devices",
            )
        })
    }

    fn device(&self, path: &Path) -> Result<(usize, &Tier, Arc<Arena>), Error> {
        let (index, tier) = self.dax_tier()?;
        match tier.at(path) {
            Some(arena) => Ok((index, tier, arena)),
            None => {
                let arenas = tier.arenas();
                let known = arenas.iter().filter_map(|arena| arena.path());
                let known: Vec<String> = known.map(|path| path.display().to_string()).collect();
                let allowed = format!("a device of this depot: {}", known.join(", "));
                Err(Error::input("path", path.display(), allowed))
            }
        }
    }
}
