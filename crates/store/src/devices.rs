//! The media of a depot's `Dax` tier, and how they come and go while it serves.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvdepot_arena::{Arena, Error, Format, Opening, Options};

use crate::pipeline::{Core, Drained};
use crate::placement::MEDIA_MAX;
use crate::tier::{Arenas, DAX, Stage};

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

impl Core {
    /// As [`Depot::devices`](crate::Depot::devices).
    pub fn devices(&self) -> Result<Vec<DeviceStats>, Error> {
        let _pass = self.gate.enter()?;
        let media = self.media();
        Ok(media
            .iter()
            .filter_map(|arena| DeviceStats::of(arena))
            .collect())
    }

    /// As [`Depot::add_device`](crate::Depot::add_device).
    pub fn add_device(&self, path: &Path, capacity: Option<u64>) -> Result<Opening, Error> {
        let core = self;
        let _pass = core.gate.enter()?;
        if core.media().len() >= MEDIA_MAX {
            let allowed = format!("at most {MEDIA_MAX} media in a depot: remove one first");
            return Err(Error::input("path", path.display(), allowed));
        }
        let (_, tier) = self.dax_tier()?;
        let config = &self.config;
        let settings = Options {
            capacity,
            format: Format::Never,
            ..config.dax.options()
        };
        let socket = self.socket.get().map(|path| path.display().to_string());
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

    /// As [`Depot::drain_device`](crate::Depot::drain_device).
    pub fn drain_device(
        &self,
        path: &Path,
        to: DrainTo,
        patience: Duration,
    ) -> Result<Drained, Error> {
        // Its own passes: a close does not wait for all of it.
        drop(self.gate.enter()?);
        let (index, tier, arena) = self.device(path)?;
        if to == DrainTo::Others && !tier.has_beside(&arena) {
            let allowed = "\"nowhere\" where no other device takes writes: its blocks are evicted";
            return Err(Error::input("to", "\"others\"", allowed));
        }
        self.clear_out(index, &arena, to == DrainTo::Others, patience)
    }

    /// As [`Depot::remove_device`](crate::Depot::remove_device).
    pub fn remove_device(&self, path: &Path, force: bool, patience: Duration) -> Result<(), Error> {
        drop(self.gate.enter()?);
        let (index, tier, arena) = self.device(path)?;
        if tier.arenas().len() == 1 {
            let allowed = "a device beside others: a tier keeps one (add another first)";
            return Err(Error::input("path", path.display(), allowed));
        }
        if force {
            self.clear_out(index, &arena, false, patience)?;
        }
        let _pass = self.gate.enter()?;
        if !tier.take_out(&arena) {
            let allowed = "a drained or empty device (drain_device empties it; or force)";
            return Err(Error::input("path", path.display(), allowed));
        }
        self.on_removal
            .get()
            .iter()
            .for_each(|tell| tell(arena.number()));
        tracing::info!(path = %path.display(), "device removed");
        Ok(())
    }

    /// As [`Depot::grow_device`](crate::Depot::grow_device).
    pub fn grow_device(&self, path: &Path, capacity: u64) -> Result<(), Error> {
        let _pass = self.gate.enter()?;
        let (_, tier, arena) = self.device(path)?;
        tier.grow(&arena, path, capacity)
    }

    fn dax_tier(&self) -> Result<(usize, &Arenas), Error> {
        let mut tiers = self.arenas();
        let found = tiers.find(|(_, tier)| tier.name() == DAX);
        found.ok_or_else(|| {
            let tiers: Vec<&str> = self.tiers.iter().map(Stage::name).collect();
            let tiers = tiers.join("|");
            Error::input(
                "pipeline",
                tiers,
                "one with a Dax tier, which alone has devices",
            )
        })
    }

    fn device(&self, path: &Path) -> Result<(usize, &Arenas, Arc<Arena>), Error> {
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
