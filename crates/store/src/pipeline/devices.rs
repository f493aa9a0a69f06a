//! The media of a depot's `Dax` tier, or its `Nvme`: how they come and go while it serves.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_arena::{Arena, Error, Format, Opening, Options};

use super::{Core, Drained};
use crate::devices::{DeviceStats, DrainTo};
use crate::placement::MEDIA_MAX;
use crate::tier::{Arenas, Sort, Stage};

impl Core {
    /// Returns the media of the depot, like [`Depot::devices`](crate::Depot::devices).
    ///
    /// # Errors
    ///
    /// Those of [`Depot::devices`](crate::Depot::devices).
    pub fn devices(&self) -> Result<Vec<DeviceStats>, Error> {
        let _pass = self.gate.enter()?;
        let media = self.media();
        Ok(media
            .iter()
            .filter_map(|arena| DeviceStats::of(arena))
            .collect())
    }

    /// Adds a device, like [`Depot::add_device`](crate::Depot::add_device).
    ///
    /// # Errors
    ///
    /// Those of [`Depot::add_device`](crate::Depot::add_device).
    pub fn add_device(&self, path: &Path, capacity: Option<u64>) -> Result<Opening, Error> {
        let core = self;
        let _pass = core.gate.enter()?;
        if core.media().len() >= MEDIA_MAX {
            let allowed = format!("at most {MEDIA_MAX} media in a depot; remove one first");
            return Err(Error::input("path", path.display(), allowed));
        }
        let (sort, _, tier) = self.first_of_devices()?;
        let config = &self.config;
        let settings = Options {
            capacity,
            format: Format::Never,
            ..config.section(sort).options(sort.access, config.shares)
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

    /// Empties a device, like [`Depot::drain_device`](crate::Depot::drain_device).
    ///
    /// # Errors
    ///
    /// Those of [`Depot::drain_device`](crate::Depot::drain_device).
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
            let allowed = "\"evict\", because no other device of the tier accepts writes";
            return Err(Error::input("to", "\"other_devices\"", allowed));
        }
        self.clear_out(index, &arena, to == DrainTo::Others, patience)
    }

    /// Removes a device, like [`Depot::remove_device`](crate::Depot::remove_device).
    ///
    /// # Errors
    ///
    /// Those of [`Depot::remove_device`](crate::Depot::remove_device).
    pub fn remove_device(&self, path: &Path, force: bool, patience: Duration) -> Result<(), Error> {
        drop(self.gate.enter()?);
        let (index, tier, arena) = self.device(path)?;
        if tier.arenas().len() == 1 {
            let allowed = "a device of a tier with several devices; add another device first";
            return Err(Error::input("path", path.display(), allowed));
        }
        if force {
            self.clear_out(index, &arena, false, patience)?;
        }
        let _pass = self.gate.enter()?;
        if !tier.take_out(&arena) {
            let allowed = "a drained or empty device; call drain_device first, or use force";
            return Err(Error::input("path", path.display(), allowed));
        }
        self.on_removal
            .get()
            .iter()
            .for_each(|tell| tell(arena.number()));
        tracing::info!(path = %path.display(), "device removed");
        Ok(())
    }

    /// Grows a device, like [`Depot::grow_device`](crate::Depot::grow_device).
    ///
    /// # Errors
    ///
    /// Those of [`Depot::grow_device`](crate::Depot::grow_device).
    pub fn grow_device(&self, path: &Path, capacity: u64) -> Result<(), Error> {
        let _pass = self.gate.enter()?;
        let (_, tier, arena) = self.device(path)?;
        tier.grow(&arena, path, capacity)
    }

    /// The nearest tier that has devices.
    fn first_of_devices(&self) -> Result<(Sort, usize, &Arenas), Error> {
        let mut tiers = self.arenas();
        let found = tiers.find_map(|(index, tier)| {
            let mut sorts = self.config.arenas().map(|(_, sort)| sort);
            let sort = sorts.find(|sort| sort.name == tier.name())?;
            Some((sort, index, tier))
        });
        found.ok_or_else(|| {
            let tiers: Vec<&str> = self.tiers.iter().map(Stage::name).collect();
            let allowed = "a pipeline with a Dax or Nvme tier";
            Error::input("pipeline", tiers.join("|"), allowed)
        })
    }

    fn device(&self, path: &Path) -> Result<(usize, &Arenas, Arc<Arena>), Error> {
        let _some = self.first_of_devices()?;
        let mut tiers = self.arenas();
        let found = tiers.find_map(|(index, tier)| Some((index, tier, tier.at(path)?)));
        match found {
            Some(found) => Ok(found),
            None => {
                let media = self.media();
                let known = media.iter().filter_map(|arena| arena.path());
                let known: Vec<String> = known.map(|path| path.display().to_string()).collect();
                let allowed = format!("one of the devices of this depot: {}", known.join(", "));
                Err(Error::input("path", path.display(), allowed))
            }
        }
    }
}
