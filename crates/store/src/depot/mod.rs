//! The public face: a depot, opened here or served by another process, and the namespaces in it.

mod namespace;
mod started;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvdepot_arena::gate::Gate;
use kvdepot_arena::{
    Error, NamespaceId, Opening, Uses, clock, default_capacity, default_path, size,
};
use kvdepot_host::limits;
use kvdepot_media::Copier;
pub use namespace::Namespace;
pub use started::Started;

use crate::config::{Admission, Config};
use crate::devices::{DeviceStats, DrainTo};
use crate::listing::{Gone, NamespaceUsage};
use crate::metrics::{Metrics, Stats};
use crate::pipeline::{Background, Bell, Budget, Core, Drained, Evictor, Learned, Ledger};
use crate::share::placement::Holder;
use crate::share::{Client, Server};
use crate::tier::{Opened, Tier};
use crate::{NamespaceSpec, populate};

/// A pipeline of tiers, opened by this process or by another one of the host. Clones share it.
#[derive(Clone)]
pub struct Depot {
    at: At,
}

/// Where a depot's index is.
#[derive(Clone)]
enum At {
    Here(Arc<Inner>),
    There(Arc<Client>),
}

/// What a depot says of itself.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct About {
    pub(crate) session: u64,
    pub(crate) tiers: Vec<String>,
    pub(crate) path: Option<PathBuf>,
    pub(crate) description: String,
    pub(crate) opening: Opening,
    /// What its configuration says of a client's calls.
    #[serde(default)]
    pub(crate) timeout: Option<Duration>,
}

/// This process among those that ask what left; clients have their numbers.
const OWN_LISTENER: u64 = 0;

struct Inner {
    core: Arc<Core>,
    background: Background,
    evictor: Evictor,
    server: Option<Server>,
    about: About,
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
        // Before anything costs time, memory or room on a disk.
        config.check()?;
        let uses = Uses::default();
        let Opened {
            tiers,
            opening,
            without,
            next,
        } = Tier::open(config, &uses)?;
        let near_data = tiers[0].block_max();
        let learns = config.admission == Admission::Learned;
        let learned = learns.then(|| Learned::new(&tiers));
        let session = new_session();
        let copier = config.copier()?;
        let mut idle = copier.clone();
        idle.nice = 19;
        let core = Arc::new(Core {
            copier: Copier::new(copier)?,
            idle_copier: (tiers.len() > 1).then(|| Copier::new(idle)).transpose()?,
            ledger: Ledger::new(),
            bell: Bell::default(),
            gate: Gate::new()?,
            metrics: Metrics::default(),
            overload: config.overload,
            budget: Budget::new(config.write_back_depth.unwrap_or(near_data / 2)),
            promote: config.promote,
            learned,
            uses,
            next_medium: AtomicU32::new(next),
            config: config.clone(),
            socket: OnceLock::new(),
            on_removal: OnceLock::new(),
            tiers,
        });
        let about = About {
            session,
            tiers: core
                .tiers
                .iter()
                .map(|tier| tier.name().to_owned())
                .collect(),
            path: core
                .media()
                .iter()
                .find_map(|arena| arena.path().map(Into::into)),
            description: describe(&core, config, without.as_deref()),
            opening,
            timeout: config.timeout,
        };
        let server = Server::start(config, &core, &about)?;
        // Its threads have the arenas, and with them their locks.
        let undo = |_: &Error| {
            server
                .iter()
                .for_each(|server| server.retire(Duration::ZERO));
            server.iter().for_each(Server::stop);
            core.tiers.iter().for_each(Tier::close);
        };
        if let Some(server) = &server {
            core.socket.get_or_init(|| server.path().into());
            let socket = server.path().display().to_string();
            let media = core.media();
            let announced = media.iter().try_for_each(|arena| arena.announce(&socket));
            announced.inspect_err(undo)?;
        }
        let background = Background::start(&core).inspect_err(undo)?;
        let evictor = Evictor::start(&core).inspect_err(|error| {
            core.ledger.stop();
            background.join();
            undo(error);
        })?;
        log_opening(&about);
        Ok(Started(Depot {
            at: At::Here(Arc::new(Inner {
                core,
                background,
                evictor,
                server,
                about,
            })),
        }))
    }

    /// Uses a depot that another process of this host serves at `socket`: its index answers, and
    /// `lanes` threads of this process move the bytes. When the owner goes away, every key is a
    /// miss and nothing is stored until one listens there again.
    ///
    /// # Errors
    /// [`Error::Peer`] when nobody answers there, or with a refusal.
    pub fn connect(socket: &Path, lanes: Option<usize>) -> Result<Depot, Error> {
        Depot::connect_within(socket, lanes, None)
    }

    /// As [`Depot::connect`], with the longest wait for the owner's answer to a call: an owner that
    /// takes longer is taken for one that is gone. Without it the owner's `timeout` holds.
    ///
    /// # Errors
    /// Those of [`Depot::connect`].
    pub fn connect_within(
        socket: &Path,
        lanes: Option<usize>,
        timeout: Option<Duration>,
    ) -> Result<Depot, Error> {
        Ok(Depot {
            at: At::There(Client::connect(socket, lanes, timeout)?),
        })
    }

    /// Whether calls have somebody who answers: false in a client whose owner is gone, and until
    /// it has found the next one.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        match &self.at {
            At::Here(inner) => !inner.core.gate.forked(),
            At::There(client) => client.is_connected(),
        }
    }

    /// A namespace by everything that must match for bytes to be reusable.
    ///
    /// # Errors
    /// [`Error::Input`] when a required field is missing; [`Error::Closed`].
    pub fn namespace(&self, spec: &NamespaceSpec) -> Result<Namespace, Error> {
        let id = spec.id()?;
        let description = spec.describe();
        match &self.at {
            At::Here(inner) => inner.core.describe(id, &description)?,
            At::There(client) => client.describe(id, &description)?,
        }
        Ok(self.namespace_by_id(id))
    }

    /// A namespace by its digest, for tools that have read it from a medium.
    #[must_use]
    pub fn namespace_by_id(&self, id: NamespaceId) -> Namespace {
        Namespace::new(self.at.clone(), id)
    }

    /// Whether another process has its index: calls then wait for that process.
    #[must_use]
    pub fn is_served(&self) -> bool {
        matches!(self.at, At::There(_))
    }

    /// Makes the tiers present in this process, in a thread of its own: memory is allocated now
    /// and not by the first calls. Of a file only what is in memory already is mapped.
    ///
    /// # Errors
    /// [`Error::Io`] when the thread cannot be started.
    pub fn populate_aside(&self) -> Result<(), Error> {
        match &self.at {
            At::Here(inner) => {
                let core = &inner.core;
                let media = core.media();
                let media = media.iter().map(|arena| arena.mapping());
                populate::aside(media.collect(), Arc::clone(&core.gate))
            }
            At::There(client) => client.populate_aside(),
        }
    }

    fn about(&self) -> &About {
        match &self.at {
            At::Here(inner) => &inner.about,
            At::There(client) => client.about(),
        }
    }

    /// The tiers' names, near to far.
    #[must_use]
    pub fn tiers(&self) -> Vec<&str> {
        self.about().tiers.iter().map(String::as_str).collect()
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
        match &self.at {
            At::Here(inner) => inner.server.as_ref().map(|server| server.path().into()),
            At::There(client) => Some(client.socket().into()),
        }
    }

    /// Counters and fill: the owner's, and in a client that has lost it those of an empty depot.
    #[must_use]
    pub fn stats(&self) -> Stats {
        match &self.at {
            At::Here(inner) => inner.core.stats(),
            At::There(client) => client.stats(),
        }
    }

    /// The namespaces that have or had blocks in the last tier since it was opened, and those that
    /// its directory describes.
    ///
    /// # Errors
    /// [`Error::Closed`]; [`Error::Media`] when the directory cannot be read.
    pub fn namespaces(&self) -> Result<Vec<NamespaceUsage>, Error> {
        match &self.at {
            At::Here(inner) => inner.core.namespaces(),
            At::There(client) => client.namespaces(),
        }
    }

    /// The blocks that have left the depot since the last call, by eviction, removal or rot. They
    /// are noted from the first call on, at most the last `limit` of each device. A client that
    /// has found another owner, or did not hear what the last call was answered, is told of an
    /// overflow.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn gone(&self, limit: usize) -> Result<Gone, Error> {
        match &self.at {
            At::Here(inner) => inner.core.gone(OWN_LISTENER, limit),
            At::There(client) => client.gone(limit),
        }
    }

    /// The media of the `Dax` tier, in the order in which they were named.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn devices(&self) -> Result<Vec<DeviceStats>, Error> {
        match &self.at {
            At::Here(inner) => inner.core.devices(),
            At::There(client) => client.devices(),
        }
    }

    /// Adds a device or file to the `Dax` tier, making a file that is missing, and serves at once
    /// what it holds. Adding one again that is there changes nothing, but for one that was
    /// drained: it takes writes again.
    ///
    /// # Errors
    /// [`Error::Input`] for a capacity that it does not have, or another name of a device that is
    /// there; else as [`Depot::open`].
    pub fn add_device(&self, path: &Path, capacity: Option<u64>) -> Result<Opening, Error> {
        match &self.at {
            At::Here(inner) => inner.core.add_device(path, capacity),
            At::There(client) => client.add_device(path, capacity),
        }
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
        match &self.at {
            At::Here(inner) => inner.core.drain_device(path, to, patience),
            At::There(client) => client.drain_device(path, to, patience),
        }
    }

    /// Lets a drained or empty device go: another depot can open it then. With `force` whatever
    /// it holds is evicted first.
    ///
    /// # Errors
    /// [`Error::Input`] for one that holds blocks, or is the last; with `force`, [`Error::Busy`].
    pub fn remove_device(&self, path: &Path, force: bool, patience: Duration) -> Result<(), Error> {
        match &self.at {
            At::Here(inner) => inner.core.remove_device(path, force, patience),
            At::There(client) => client.remove_device(path, force, patience),
        }
    }

    /// Gives a device `capacity` bytes while it serves. Its record table stays as it is.
    ///
    /// # Errors
    /// [`Error::Input`] for less than it has, or more than its medium has.
    pub fn grow_device(&self, path: &Path, capacity: u64) -> Result<(), Error> {
        match &self.at {
            At::Here(inner) => inner.core.grow_device(path, capacity),
            At::There(client) => client.grow_device(path, capacity),
        }
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
        match &self.at {
            At::Here(inner) => !inner.core.gate.forked() && inner.core.ledger.drain(timeout),
            At::There(client) => client.drain(timeout),
        }
    }

    /// What the background thread would do next; false when there is nothing, or when another
    /// process owns it.
    #[cfg(feature = "sim")]
    #[doc(hidden)]
    #[must_use]
    pub fn step_background(&self) -> bool {
        match &self.at {
            At::Here(inner) => inner.core.step(),
            At::There(_) => false,
        }
    }

    /// The same of the thread that evicts ahead of need.
    #[cfg(feature = "sim")]
    #[doc(hidden)]
    #[must_use]
    pub fn step_evictor(&self) -> bool {
        match &self.at {
            At::Here(inner) => inner.core.step_evictor(),
            At::There(_) => false,
        }
    }

    /// Refuses new calls, waits for those under way, drains the write-back queue as long as
    /// `close_timeout` allows, lets its memory go and the next owner in, also where namespaces of
    /// it are kept. Correctness never depends on it. Whoever closes it again waits for the first.
    pub fn close(&self) {
        match &self.at {
            At::Here(inner) => inner.close(),
            At::There(client) => client.close(),
        }
    }
}

impl Inner {
    /// Who holds what this process asks for.
    fn holder(&self) -> Holder {
        Holder {
            session: self.about.session,
            seat: 0,
        }
    }

    fn close(&self) {
        let core = &self.core;
        if core.gate.forked() {
            return;
        }
        let Some(_closing) = core.gate.close() else {
            return;
        };
        let begun = clock::now();
        let left = || core.config.close_timeout.saturating_sub(begun.elapsed());
        core.ledger.part_from_held();
        if let Some(server) = &self.server {
            server.retire(left());
        }
        #[cfg(feature = "sim")]
        core.settle();
        // Copies that touch a caller's memory have no time-out: they end by themselves.
        core.gate.wait_empty(Duration::MAX);
        if !core.ledger.drain(left()) {
            let bytes = size::show(core.budget.bytes());
            let media = core.media();
            let orphans = media.iter().flat_map(|arena| arena.orphan_pids());
            let orphans: Vec<u32> = orphans.collect();
            tracing::warn!(
                %bytes,
                ?orphans,
                "close_timeout passed before the write-back queue was empty"
            );
        }
        core.ledger.stop();
        self.background.join();
        self.evictor.stop(core);
        core.copier.close();
        core.idle_copier.iter().for_each(Copier::close);
        if let Some(server) = &self.server {
            server.stop();
        }
        core.tiers.iter().for_each(Tier::close);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
    }
}

fn describe(core: &Core, config: &Config, without: Option<&str>) -> String {
    let media = core.media();
    let each = media.iter().map(|tier| {
        let size = size::show(tier.layout().capacity);
        match tier.path() {
            Some(path) if tier.is_a_share() => {
                let path = path.display();
                format!("{} {size} (20 % of the free disk) at {path}", tier.name())
            }
            Some(path) => format!("{} {size} at {}", tier.name(), path.display()),
            None if config.cache.capacity.is_none() => {
                format!("{} {size} (10 % of the memory allowed)", tier.name())
            }
            None => format!("{} {size}", tier.name()),
        }
    });
    let tiers = each.collect::<Vec<_>>().join(" | ");
    match without {
        None => tiers,
        Some(reason) => format!("{tiers} alone: {reason}"),
    }
}

fn log_opening(about: &About) {
    let Opening {
        blocks,
        damaged,
        outranked,
        ..
    } = about.opening;
    let tiers = &about.description;
    tracing::info!(tiers, blocks, damaged, outranked, "depot open");
}

impl Config {
    /// Refuses what [`Depot::open`] would refuse of this configuration on this machine, as it is
    /// now, and makes nothing. What another process owns is not looked into.
    ///
    /// # Errors
    /// Those of [`Depot::open`], but for [`Error::Locked`].
    pub fn check(&self) -> Result<(), Error> {
        self.copier()?;
        Tier::check(self)?;
        Server::check(self)
    }

    /// Where the arena of the `Dax` tier lies: `dax.path`, or the default for the instance.
    ///
    /// # Errors
    /// [`Error::Host`] when the user has no cache directory, or not alone.
    pub fn arena_path(&self) -> Result<PathBuf, Error> {
        match &self.dax.path {
            Some(path) => Ok(path.clone()),
            None => default_path(self.instance.as_deref()),
        }
    }

    /// Bytes that a new arena would get: `dax.capacity`, or 20 % of the free disk, at most 64 GiB.
    ///
    /// # Errors
    /// Those of [`Config::arena_path`].
    pub fn arena_capacity(&self) -> Result<u64, Error> {
        match self.dax.capacity {
            Some(capacity) => Ok(capacity),
            None => Ok(default_capacity(&self.arena_path()?)),
        }
    }

    /// Bytes of the `Cache` tier: `cache.capacity`, or 10 % of the memory that the control group
    /// allows, at most 8 GiB, in whole MiB.
    ///
    /// # Errors
    /// [`Error::Host`] when `/proc` cannot be read.
    pub fn cache_capacity(&self) -> Result<u64, Error> {
        match self.cache.capacity {
            Some(capacity) => Ok(capacity),
            None => Ok((limits::memory_allowed()? / 10).min(8 << 30) >> 20 << 20),
        }
    }
}

fn new_session() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one((std::process::id(), clock::now()))
}
