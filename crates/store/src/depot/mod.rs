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

/// A pipeline of tiers, opened by this process or by another process of the host.
///
/// Clones share the depot.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
///
/// use kvdepot_store::{BlockBuffers, Buffer, Config, Depot, Key, NamespaceSpec};
/// use serde_json::json;
///
/// let dir = tempfile::tempdir()?;
/// let settings = json!({
///     "cache": {"capacity": "1MiB"},
///     "dax": {"path": dir.path().join("arena.kvd"), "capacity": "16MiB"},
/// });
/// let config = Config::new("Cache|Dax", &settings)?;
/// let depot = Depot::open(&config)?;
/// assert_eq!(depot.tiers(), ["Cache", "Dax"]);
///
/// let blocks = depot.namespace(&NamespaceSpec {
///     model: "llama-3-8b".into(),
///     dtype: "bfloat16".into(),
///     block_tokens: 16,
///     ..NamespaceSpec::default()
/// })?;
/// let block = Buffer::from_vec(vec![7; 4096]);
/// blocks.put(vec![Key([1; 32])], BlockBuffers::whole([block]))?.wait(None)?;
/// assert!(depot.drain(Duration::from_secs(10)));
/// depot.close();
///
/// // The arena keeps its blocks.
/// let depot = Depot::open(&config)?;
/// assert_eq!(depot.opening().blocks, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Depot {
    verbs: Arc<dyn Verbs>,
}

impl Depot {
    /// Opens the tiers of a configuration and creates missing arenas.
    ///
    /// If another process owns the default arena, a pipeline with other tiers opens without it and
    /// logs a warning.
    ///
    /// # Errors
    ///
    /// * [`Error::Config`] for settings that cannot be used on this machine.
    /// * [`Error::Locked`] if another process owns an arena.
    /// * [`Error::Corrupt`] if a medium has other content than a valid arena.
    /// * [`Error::Media`] if the system rejects a request.
    pub fn open(config: &Config) -> Result<Depot, Error> {
        Ok(Depot::start(config)?.keep())
    }

    /// Opens a depot that a caller may discard again.
    ///
    /// [`Started::keep`] makes its arenas permanent; otherwise new ones are removed. Within
    /// [`interruptible`](crate::interruptible), a signal ends the wait for another owner.
    ///
    /// # Errors
    ///
    /// Those of [`Depot::open`], and [`Error::Interrupted`].
    pub fn start(config: &Config) -> Result<Started, Error> {
        Depot::start_serving(config, |_, _| Ok(None))
    }

    /// Opens a depot like [`Depot::start`] and calls `serve` to start a server.
    ///
    /// `serve` runs before other processes can find the depot. It returns `None` to start without a
    /// server.
    ///
    /// # Errors
    ///
    /// Those of [`Depot::start`] and of `serve`.
    pub fn start_serving(
        config: &Config,
        serve: impl FnOnce(&Arc<Core>, &About) -> Result<Option<Box<dyn Serves>>, Error>,
    ) -> Result<Started, Error> {
        let verbs = Arc::new(Local::start(config, serve)?);
        Ok(Started(Depot { verbs }))
    }

    /// Creates a depot whose index is in another process, which `verbs` calls.
    #[must_use]
    pub fn over(verbs: Arc<dyn Verbs>) -> Depot {
        Depot { verbs }
    }

    /// Returns true if calls are answered.
    ///
    /// It is false in a client without a server, until the client has connected to the next one. It
    /// is also false in a forked child.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.verbs.is_connected()
    }

    /// Returns the namespace of `spec`, and records its description in the tiers.
    ///
    /// # Errors
    ///
    /// * [`Error::Input`] if a required field of `spec` is missing, or its salt has no key in
    ///   `mac_key_file`.
    /// * [`Error::Closed`].
    pub fn namespace(&self, spec: &NamespaceSpec) -> Result<Namespace, Error> {
        let id = spec.id()?;
        let description = spec.describe();
        self.verbs
            .describe(id, &description, spec.salt.as_deref())?;
        Ok(self.namespace_by_id(id))
    }

    /// Returns the namespace with the digest `id`, for tools that have read it from a medium.
    #[must_use]
    pub fn namespace_by_id(&self, id: NamespaceId) -> Namespace {
        Namespace::new(Arc::clone(&self.verbs), id)
    }

    /// Returns true if another process has the index. Calls then wait for that process.
    #[must_use]
    pub fn is_served(&self) -> bool {
        self.verbs.is_served()
    }

    /// Prefaults the tiers on a separate thread.
    ///
    /// Memory is allocated now instead of by the first calls. Of a file, only the pages that are
    /// already in memory are mapped.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the thread cannot be started.
    pub fn populate_aside(&self) -> Result<(), Error> {
        self.verbs.populate_aside()
    }

    /// Reads the credentials of asynchronous tiers again: tokens, certificates and keys in files.
    ///
    /// New connections use the new credentials, and existing connections continue. In a client, the
    /// call has no effect.
    ///
    /// # Errors
    ///
    /// The error of a credential that cannot be used. The tier keeps the credentials that it has.
    pub fn renew(&self) -> Result<(), Error> {
        self.verbs.renew()
    }

    fn about(&self) -> &About {
        self.verbs.about()
    }

    /// Returns the names of the tiers, first to last.
    #[must_use]
    pub fn tiers(&self) -> Vec<&str> {
        self.about().tiers.iter().map(String::as_str).collect()
    }

    /// Returns the position of the first tier that acknowledges puts.
    #[must_use]
    pub fn acknowledging(&self) -> usize {
        self.about().ack.unwrap_or(0)
    }

    /// Returns the path of the first medium that survives the process, if there is one.
    #[must_use]
    pub fn path(&self) -> Option<PathBuf> {
        self.about().path.clone()
    }

    /// Returns a line for a log: tiers, their sizes and locations, and automatic choices.
    #[must_use]
    pub fn description(&self) -> &str {
        &self.about().description
    }

    /// Returns the result of opening the arenas.
    #[must_use]
    pub fn opening(&self) -> Opening {
        self.about().opening
    }

    /// Returns the socket on which other processes attach, or `None` with `socket: off`.
    #[must_use]
    pub fn socket(&self) -> Option<PathBuf> {
        self.verbs.socket()
    }

    /// Returns the address of the HTTP server of this process, as in the option `http`.
    ///
    /// The port is the one at which the server listens. The result is `None` without an HTTP
    /// server, and in a client.
    #[must_use]
    pub fn http(&self) -> Option<String> {
        self.verbs.http()
    }

    /// Returns counters and usage.
    ///
    /// In a client they are those of the server, or those of an empty depot if the server is lost.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.verbs.stats()
    }

    /// Returns the namespaces of the depot with their usage.
    ///
    /// They are those that have or had blocks in the last in-process tier since it was opened,
    /// those that its directory describes, and those of asynchronous tiers.
    ///
    /// # Errors
    ///
    /// * [`Error::Closed`].
    /// * [`Error::Media`] if the directory of an arena cannot be read.
    /// * [`Error::Silent`] if an asynchronous tier does not respond.
    pub fn namespaces(&self) -> Result<Vec<NamespaceUsage>, Error> {
        self.verbs.namespaces()
    }

    /// Returns the blocks that were removed from the depot since the last call.
    ///
    /// Removed blocks are evicted, deleted or corrupt ones. kvdepot records them from the first
    /// call on, at most the last `limit` of each device. A client that has connected to another
    /// server, or has lost the response to its last call, receives an overflow.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`].
    pub fn gone(&self, limit: usize) -> Result<Gone, Error> {
        self.verbs.gone(limit)
    }

    /// Returns the media of the `Dax` and `Nvme` tiers, in the order in which they were configured.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`].
    pub fn devices(&self) -> Result<Vec<DeviceStats>, Error> {
        self.verbs.devices()
    }

    /// Adds a device or file to the first `Dax` or `Nvme` tier, and serves its content immediately.
    ///
    /// `capacity` is the size of the medium in bytes. A missing file is created. Adding a device
    /// again changes nothing, except that a drained device accepts writes again.
    ///
    /// # Errors
    ///
    /// * [`Error::Input`] if the device has another capacity, or is in the depot under another
    ///   name.
    /// * Those of [`Depot::open`].
    pub fn add_device(&self, path: &Path, capacity: Option<u64>) -> Result<Opening, Error> {
        self.verbs.add_device(path, capacity)
    }

    /// Stops writes to a device and empties it, so that it can be removed.
    ///
    /// Its blocks can be loaded at every moment. The call waits up to `patience` for blocks that
    /// are pinned or being written.
    ///
    /// # Errors
    ///
    /// * [`Error::Busy`] if `patience` was too short. The device then accepts writes again.
    /// * [`Error::Input`] if `path` is not a device of the depot, or if no other device can take
    ///   its blocks.
    pub fn drain_device(
        &self,
        path: &Path,
        to: DrainTo,
        patience: Duration,
    ) -> Result<Drained, Error> {
        self.verbs.drain_device(path, to, patience)
    }

    /// Removes a drained or empty device, so that another depot can open it.
    ///
    /// If `force` is true, its blocks are evicted first. The call then waits up to `patience` for
    /// blocks that are pinned or being written.
    ///
    /// # Errors
    ///
    /// * [`Error::Input`] if the device holds blocks, or is the last of its tier.
    /// * [`Error::Busy`] if `force` is true and `patience` was too short.
    pub fn remove_device(&self, path: &Path, force: bool, patience: Duration) -> Result<(), Error> {
        self.verbs.remove_device(path, force, patience)
    }

    /// Grows a device to `capacity` bytes while it is in use. Its record table keeps its size.
    ///
    /// # Errors
    ///
    /// [`Error::Input`] if `capacity` is below the current one, or above the size of the medium.
    pub fn grow_device(&self, path: &Path, capacity: u64) -> Result<(), Error> {
        self.verbs.grow_device(path, capacity)
    }

    /// Returns the bytes that wait for write-back to lower tiers.
    #[must_use]
    pub fn pending_bytes(&self) -> u64 {
        self.stats().write_back_bytes
    }

    /// Waits until the lower tiers have every block that was queued for write-back before.
    ///
    /// Returns false at the time-out. In a client it also returns false without a server, and once
    /// after blocks of this process were dropped or lost.
    #[must_use]
    pub fn drain(&self, timeout: Duration) -> bool {
        self.verbs.drain(timeout)
    }

    /// Does the next step of the background thread.
    ///
    /// Returns false if there is no step, or if another process has the index.
    #[cfg(feature = "sim")]
    #[doc(hidden)]
    #[must_use]
    pub fn step_background(&self) -> bool {
        self.verbs.step_background()
    }

    /// Does the next step of the thread that evicts in advance; returns like
    /// [`Depot::step_background`].
    #[cfg(feature = "sim")]
    #[doc(hidden)]
    #[must_use]
    pub fn step_evictor(&self) -> bool {
        self.verbs.step_evictor()
    }

    /// Closes the depot.
    ///
    /// The call rejects new calls, waits for those in progress, and writes back queued blocks, for
    /// at most `close_timeout` in all. After that time it starts no further copy: puts in progress
    /// store no further block, and gets end as misses. A copy that a medium has begun uses the
    /// memory of its caller, so the close waits for it without a limit, and logs the calls that it
    /// waits for. Then it releases memory and arenas, even if a [`Namespace`]
    /// still exists. A second close waits for the first one. Correctness does not depend on a
    /// close.
    pub fn close(&self) {
        self.verbs.close()
    }
}

impl Config {
    /// Checks whether [`Depot::open`] would succeed on this machine now, without creating anything.
    ///
    /// Arenas of other processes are not examined.
    ///
    /// # Errors
    ///
    /// Those of [`Depot::open`] except [`Error::Locked`].
    pub fn check(&self) -> Result<(), Error> {
        self.copier()?;
        Opened::check(self)
    }

    /// Returns the path of the `Dax` arena: `dax.path`, or the default of the instance.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if the path is missing and the user has no private cache directory.
    pub fn arena_path(&self) -> Result<PathBuf, Error> {
        self.path_of(DAX)
    }

    /// Returns the path of the `Nvme` arena: `nvme.path`, or the default of the instance.
    ///
    /// # Errors
    ///
    /// Those of [`Config::arena_path`].
    pub fn nvme_path(&self) -> Result<PathBuf, Error> {
        self.path_of(NVME)
    }

    /// Returns the size of a new `Dax` arena in bytes.
    ///
    /// It is `dax.capacity`, or 20 % of the free disk divided by `shares`, at most 64 GiB.
    ///
    /// # Errors
    ///
    /// Those of [`Config::arena_path`].
    pub fn arena_capacity(&self) -> Result<u64, Error> {
        match self.dax.capacity {
            Some(capacity) => Ok(capacity),
            None => Ok(default_capacity(&self.arena_path()?, self.shares)),
        }
    }

    /// Returns the size of the `Cache` tier in bytes.
    ///
    /// It is `cache.capacity`, or 10 % of the memory that the control group allows, divided by
    /// `shares`, at most 8 GiB, in whole MiB.
    ///
    /// # Errors
    ///
    /// [`Error::Host`] if `/proc` cannot be read.
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
