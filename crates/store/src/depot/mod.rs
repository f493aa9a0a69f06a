//! The public face: a depot, opened here or served by another process, and the namespaces in it.

mod group;
mod local;
mod namespace;
mod started;
mod verbs;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub use group::Group;
use kvdepot_arena::{Error, NamespaceId, Opening, default_capacity};
use kvdepot_host::limits;
use local::Local;
pub use local::Serves;
pub use namespace::Namespace;
pub use started::Started;
pub use verbs::{About, Together, Verbs};

use crate::NamespaceSpec;
use crate::config::Config;
use crate::devices::{DeviceStats, DrainTo};
use crate::listing::Gone;
use crate::metrics::Stats;
use crate::opening::Opened;
use crate::pipeline::{Core, Drained};
use crate::tier::NamespaceUsage;
use crate::tier::{DAX, NVME};

/// A pipeline of tiers, opened by this process or by another one of the host. Clones share it.
#[derive(Clone)]
pub struct Depot {
    verbs: Arc<dyn Verbs>,
}

impl Depot {
    /// Opens the tiers of a configuration, making what does not exist yet. When another process
    /// owns the default arena, a pipeline with a `Cache` opens without its far tier, and warns.
    ///
    /// # Errors
    /// [`Error::Config`] for what the configuration says, [`Error::Locked`] when another process
    /// owns the arena, [`Error::Corrupt`] when the medium holds something else,
    /// [`Error::Media`] for what the system refuses.
    pub fn open(config: &Config) -> Result<Depot, Error> {
        Ok(Depot::start(config)?.keep())
    }

    /// As [`Depot::open`], for callers that may not want it any more when it is open: what has
    /// been made for it is there to stay only with [`Started::keep`]. Within [`interruptible`] it
    /// waits for no other owner once a signal has come.
    ///
    /// [`interruptible`]: crate::interruptible
    ///
    /// # Errors
    /// Those of [`Depot::open`], and [`Error::Interrupted`].
    pub fn start(config: &Config) -> Result<Started, Error> {
        Depot::start_serving(config, |_, _| Ok(None))
    }

    /// As [`Depot::start`], with `serve` to let other processes in, before anybody can find it.
    ///
    /// # Errors
    /// Those of [`Depot::start`], and of `serve`.
    pub fn start_serving(
        config: &Config,
        serve: impl FnOnce(&Arc<Core>, &About) -> Result<Option<Box<dyn Serves>>, Error>,
    ) -> Result<Started, Error> {
        let verbs = Arc::new(Local::start(config, serve)?);
        Ok(Started(Depot { verbs }))
    }

    /// A depot whose index is elsewhere.
    #[must_use]
    pub fn over(verbs: Arc<dyn Verbs>) -> Depot {
        Depot { verbs }
    }

    /// Whether calls have somebody who answers: false in a client whose owner is gone, and until
    /// it has found the next one.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.verbs.is_connected()
    }

    /// A namespace by everything that must match for bytes to be reusable.
    ///
    /// # Errors
    /// [`Error::Input`] when a required field is missing; [`Error::Closed`].
    pub fn namespace(&self, spec: &NamespaceSpec) -> Result<Namespace, Error> {
        let id = spec.id()?;
        let description = spec.describe();
        self.verbs
            .describe(id, &description, spec.salt.as_deref())?;
        Ok(self.namespace_by_id(id))
    }

    /// A namespace by its digest, for tools that have read it from a medium.
    #[must_use]
    pub fn namespace_by_id(&self, id: NamespaceId) -> Namespace {
        Namespace::new(Arc::clone(&self.verbs), id)
    }

    /// Whether another process has its index: calls then wait for that process.
    #[must_use]
    pub fn is_served(&self) -> bool {
        self.verbs.is_served()
    }

    /// Makes the tiers present in this process, in a thread of its own: memory is allocated now
    /// and not by the first calls. Of a file only what is in memory already is mapped.
    ///
    /// # Errors
    /// [`Error::Io`] when the thread cannot be started.
    pub fn populate_aside(&self) -> Result<(), Error> {
        self.verbs.populate_aside()
    }

    fn about(&self) -> &About {
        self.verbs.about()
    }

    /// The tiers' names, near to far.
    #[must_use]
    pub fn tiers(&self) -> Vec<&str> {
        self.about().tiers.iter().map(String::as_str).collect()
    }

    /// Position of the nearest tier that acknowledges puts.
    #[must_use]
    pub fn acknowledging(&self) -> usize {
        self.about().ack.unwrap_or(0)
    }

    /// Where the lasting tier is, if there is one.
    #[must_use]
    pub fn path(&self) -> Option<PathBuf> {
        self.about().path.clone()
    }

    /// One line for a log: the tiers, their sizes and where they are, and what was chosen for
    /// this machine.
    #[must_use]
    pub fn description(&self) -> &str {
        &self.about().description
    }

    /// What opening found.
    #[must_use]
    pub fn opening(&self) -> Opening {
        self.about().opening
    }

    /// Where other processes attach; `None` with `socket: off`.
    #[must_use]
    pub fn socket(&self) -> Option<PathBuf> {
        self.verbs.socket()
    }

    /// Counters and fill: the owner's, and in a client that has lost it those of an empty depot.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.verbs.stats()
    }

    /// The namespaces that have or had blocks in the last tier since it was opened, and those that
    /// its directory describes.
    ///
    /// # Errors
    /// [`Error::Closed`]; [`Error::Media`] when the directory cannot be read.
    pub fn namespaces(&self) -> Result<Vec<NamespaceUsage>, Error> {
        self.verbs.namespaces()
    }

    /// The blocks that have left the depot since the last call, by eviction, removal or rot. They
    /// are noted from the first call on, at most the last `limit` of each device. A client that
    /// has found another owner, or did not hear what the last call was answered, is told of an
    /// overflow.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn gone(&self, limit: usize) -> Result<Gone, Error> {
        self.verbs.gone(limit)
    }

    /// The media of the `Dax` tier, in the order in which they were named.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn devices(&self) -> Result<Vec<DeviceStats>, Error> {
        self.verbs.devices()
    }

    /// Adds a device or file to the `Dax` tier, making a file that is missing, and serves at once
    /// what it holds. Adding one again that is there changes nothing, but for one that was
    /// drained: it takes writes again.
    ///
    /// # Errors
    /// [`Error::Input`] for a capacity that it does not have, or another name of a device that is
    /// there; else as [`Depot::open`].
    pub fn add_device(&self, path: &Path, capacity: Option<u64>) -> Result<Opening, Error> {
        self.verbs.add_device(path, capacity)
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
        self.verbs.drain_device(path, to, patience)
    }

    /// Lets a drained or empty device go: another depot can open it then. With `force` whatever
    /// it holds is evicted first.
    ///
    /// # Errors
    /// [`Error::Input`] for one that holds blocks, or is the last; with `force`, [`Error::Busy`].
    pub fn remove_device(&self, path: &Path, force: bool, patience: Duration) -> Result<(), Error> {
        self.verbs.remove_device(path, force, patience)
    }

    /// Gives a device `capacity` bytes while it serves. Its record table stays as it is.
    ///
    /// # Errors
    /// [`Error::Input`] for less than it has, or more than its medium has.
    pub fn grow_device(&self, path: &Path, capacity: u64) -> Result<(), Error> {
        self.verbs.grow_device(path, capacity)
    }

    /// Bytes admitted that the far tier has not got yet.
    #[must_use]
    pub fn pending_bytes(&self) -> u64 {
        self.stats().write_back_bytes
    }

    /// Waits until the far tier has everything that was committed before; false at the time-out.
    /// In a client false also without an owner, and once after blocks of this process were dropped
    /// or lost with one.
    #[must_use]
    pub fn drain(&self, timeout: Duration) -> bool {
        self.verbs.drain(timeout)
    }

    /// What the background thread would do next; false when there is nothing, or when another
    /// process owns it.
    #[cfg(feature = "sim")]
    #[doc(hidden)]
    #[must_use]
    pub fn step_background(&self) -> bool {
        self.verbs.step_background()
    }

    /// The same of the thread that evicts ahead of need.
    #[cfg(feature = "sim")]
    #[doc(hidden)]
    #[must_use]
    pub fn step_evictor(&self) -> bool {
        self.verbs.step_evictor()
    }

    /// Refuses new calls, waits for those under way, drains the write-back queue as long as
    /// `close_timeout` allows, lets its memory go and the next owner in, also where namespaces of
    /// it are kept. Correctness never depends on it. Whoever closes it again waits for the first.
    pub fn close(&self) {
        self.verbs.close()
    }
}

impl Config {
    /// Refuses what [`Depot::open`] would refuse of this configuration on this machine, as it is
    /// now, and makes nothing. What another process owns is not looked into.
    ///
    /// # Errors
    /// Those of [`Depot::open`], but for [`Error::Locked`].
    pub fn check(&self) -> Result<(), Error> {
        self.copier()?;
        Opened::check(self)
    }

    /// Where the arena of the `Dax` tier lies: `dax.path`, or the default for the instance.
    ///
    /// # Errors
    /// [`Error::Host`] when the user has no cache directory, or not alone.
    pub fn arena_path(&self) -> Result<PathBuf, Error> {
        self.path_of(DAX)
    }

    /// Where the arena of the `Nvme` tier lies: `nvme.path`, or the default for the instance.
    ///
    /// # Errors
    /// As [`Config::arena_path`].
    pub fn nvme_path(&self) -> Result<PathBuf, Error> {
        self.path_of(NVME)
    }

    /// Bytes that a new arena would get: `dax.capacity`, or 20 % of the free disk divided by
    /// `shares`, at most 64 GiB.
    ///
    /// # Errors
    /// Those of [`Config::arena_path`].
    pub fn arena_capacity(&self) -> Result<u64, Error> {
        match self.dax.capacity {
            Some(capacity) => Ok(capacity),
            None => Ok(default_capacity(&self.arena_path()?, self.shares)),
        }
    }

    /// Bytes of the `Cache` tier: `cache.capacity`, or 10 % of the memory that the control group
    /// allows divided by `shares`, at most 8 GiB, in whole MiB.
    ///
    /// # Errors
    /// [`Error::Host`] when `/proc` cannot be read.
    pub fn cache_capacity(&self) -> Result<u64, Error> {
        match self.cache.capacity {
            Some(capacity) => Ok(capacity),
            None => {
                let share = limits::memory_allowed()? / 10 / self.shares;
                Ok(share.min(8 << 30) >> 20 << 20)
            }
        }
    }
}
