//! The public face: a depot, and the namespaces in it.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use kvdepot_media::host::limits;
use kvdepot_media::{Checksum, Copier, CopierConfig};

use crate::arena::{Opening, Refused, default_capacity, default_path};
use crate::buffers::BlockBuffers;
use crate::config::{Config, default_lanes, size};
use crate::devices::DeviceStats;
use crate::gate::Gate;
use crate::index::Uses;
use crate::metrics::{Metrics, Stats};
use crate::pipeline::{Background, Core, Ledger, Pin, Reservation};
use crate::populate;
use crate::share::Server;
use crate::task::Task;
use crate::tier::{Opened, Tier};
use crate::{Error, Key, NamespaceId, NamespaceSpec, clock};

/// A pipeline of tiers, opened by this process. Clones share it.
#[derive(Clone)]
pub struct Depot {
    inner: Arc<Inner>,
}

struct Inner {
    core: Arc<Core>,
    background: Background,
    server: Option<Server>,
    session: u64,
    config: Config,
    opening: Opening,
    description: String,
}

/// One namespace of a depot.
#[derive(Clone)]
pub struct Namespace {
    depot: Depot,
    id: NamespaceId,
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
        let uses = Uses::default();
        let Opened {
            tiers,
            opening,
            without,
            next,
        } = Tier::open(config, &uses)?;
        let near_data = tiers[0].block_max();
        let session = new_session();
        let mut copier = CopierConfig::default();
        copier.lanes = config.lanes.unwrap_or_else(default_lanes);
        copier.slice_size = config.slice_size;
        copier.staging_slab = config.staging_slab;
        copier.staging_regions = config.staging_regions;
        let mut idle = copier.clone();
        idle.nice = 19;
        let core = Arc::new(Core {
            copier: Copier::new(copier)?,
            idle_copier: (tiers.len() > 1).then(|| Copier::new(idle)).transpose()?,
            ledger: Ledger::new(),
            gate: Gate::new()?,
            metrics: Metrics::default(),
            overload: config.overload,
            write_back_depth: config.write_back_depth.unwrap_or(near_data / 2),
            promote: config.promote,
            uses,
            next_medium: AtomicU32::new(next),
            tiers,
        });
        let server = Server::start(config, &core.media(), session)?;
        if let Some(server) = &server {
            let socket = server.path().display().to_string();
            let media = core.media();
            media.iter().try_for_each(|arena| arena.announce(&socket))?;
        }
        let background = Background::start(&core).inspect_err(|_| {
            // Its thread holds the arenas, and with them their locks.
            server.iter().for_each(Server::stop);
        })?;
        let description = describe(&core, config, &opening, without.as_deref());
        log_opening(&description, &opening);
        Ok(Depot {
            inner: Arc::new(Inner {
                core,
                background,
                server,
                session,
                config: config.clone(),
                opening,
                description,
            }),
        })
    }

    pub(crate) fn config(&self) -> &Config {
        &self.inner.config
    }

    /// A namespace by everything that must match for bytes to be reusable.
    ///
    /// # Errors
    /// [`Error::Input`] when a required field is missing; [`Error::Closed`].
    pub fn namespace(&self, spec: &NamespaceSpec) -> Result<Namespace, Error> {
        let _pass = self.inner.core.gate.enter()?;
        let id = spec.id()?;
        let description = spec.describe();
        self.inner
            .core
            .tiers
            .iter()
            .for_each(|tier| tier.describe(id, &description));
        Ok(Namespace {
            depot: self.clone(),
            id,
        })
    }

    /// A namespace by its digest, for tools that have read it from a medium.
    #[must_use]
    pub fn namespace_by_id(&self, id: NamespaceId) -> Namespace {
        Namespace {
            depot: self.clone(),
            id,
        }
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.inner.core
    }

    /// Makes the tiers present in this process, in a thread of its own: memory is allocated now
    /// and not by the first calls. Of a file only what is in memory already is mapped.
    ///
    /// # Errors
    /// [`Error::Io`] when the thread cannot be started.
    pub fn populate_aside(&self) -> Result<(), Error> {
        let core = &self.inner.core;
        let media = core.media();
        let media = media.iter().map(|arena| arena.mapping());
        populate::aside(media.collect(), Arc::clone(&core.gate))
    }

    /// The tiers' names, near to far.
    #[must_use]
    pub fn tiers(&self) -> Vec<&'static str> {
        self.inner
            .core
            .tiers
            .iter()
            .map(|tier| tier.name())
            .collect()
    }

    /// Where the lasting tier is, if there is one.
    #[must_use]
    pub fn path(&self) -> Option<PathBuf> {
        let media = self.inner.core.media();
        media.iter().find_map(|arena| arena.path().map(Into::into))
    }

    /// One line for a log: the tiers, their sizes and where they are, and what was chosen for
    /// this machine.
    #[must_use]
    pub fn description(&self) -> &str {
        &self.inner.description
    }

    /// What opening found.
    #[must_use]
    pub fn opening(&self) -> Opening {
        self.inner.opening
    }

    /// Where other processes attach; `None` with `socket: off`.
    #[must_use]
    pub fn socket(&self) -> Option<PathBuf> {
        self.inner
            .server
            .as_ref()
            .map(|server| server.path().into())
    }

    /// Counters and fill.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let core = &self.inner.core;
        if core.gate.forked() {
            // Another thread of the parent may have held a lock for ever, as seen from here.
            return Stats::default();
        }
        let tiers = core.tiers.iter().map(Tier::stats).collect();
        let media = core.media();
        let devices = media.iter().filter_map(|arena| DeviceStats::of(arena));
        let queued = core.ledger.queued_bytes();
        core.metrics.read(tiers, devices.collect(), queued)
    }

    /// Bytes admitted that the far tier has not got yet.
    #[must_use]
    pub fn pending_bytes(&self) -> u64 {
        self.stats().write_back_bytes
    }

    /// Waits until the far tier has everything that was committed before; false at the time-out.
    #[must_use]
    pub fn drain(&self, timeout: Duration) -> bool {
        !self.inner.core.gate.forked() && self.inner.core.ledger.drain(timeout)
    }

    /// Refuses new calls, waits for those under way, drains the write-back queue as long as
    /// `close_timeout` allows, and lets the next owner in. Correctness never depends on it.
    /// Closing twice does nothing.
    pub fn close(&self) {
        self.inner.close();
    }
}

impl Inner {
    fn close(&self) {
        let core = &self.core;
        if core.gate.forked() || !core.gate.close() {
            return;
        }
        let begun = clock::now();
        let left = || self.config.close_timeout.saturating_sub(begun.elapsed());
        core.ledger.part_from_held();
        // Copies that touch a caller's memory have no time-out: they end by themselves.
        core.gate.wait_empty(Duration::MAX);
        if !core.ledger.drain(left()) {
            let bytes = size::show(core.ledger.queued_bytes());
            tracing::warn!(%bytes, "close_timeout passed before the write-back queue was empty");
        }
        core.ledger.stop();
        self.background.join();
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

fn describe(core: &Core, config: &Config, opening: &Opening, without: Option<&str>) -> String {
    let media = core.media();
    let each = media.iter().map(|tier| {
        let size = size::show(tier.layout().capacity);
        match tier.path() {
            Some(path) if opening.created && sizes_itself(config) => {
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

fn sizes_itself(config: &Config) -> bool {
    config.dax.capacity.is_none() && config.dax.devices.is_empty()
}

fn log_opening(tiers: &str, opening: &Opening) {
    let Opening {
        blocks,
        damaged,
        outranked,
        ..
    } = opening;
    tracing::info!(tiers, blocks, damaged, outranked, "depot open");
}

impl Config {
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

impl Namespace {
    /// Its digest.
    #[must_use]
    pub fn id(&self) -> NamespaceId {
        self.id
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        self.depot.core()
    }

    /// Whether each key's block is stored in some tier.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn contains(&self, keys: &[Key]) -> Result<Vec<bool>, Error> {
        let _pass = self.core().gate.enter()?;
        let mut found = vec![false; keys.len()];
        for tier in &self.core().tiers {
            tier.contains(self.id, keys, &mut found);
        }
        Ok(found)
    }

    /// How many of the first keys are stored without a gap: what an engine can skip.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn prefix(&self, keys: &[Key]) -> Result<usize, Error> {
        let _pass = self.core().gate.enter()?;
        let mut count = 0;
        // Tiers take turns: each goes on where the other has a gap.
        loop {
            let before = count;
            for tier in &self.core().tiers {
                count += tier.prefix(self.id, &keys[count..]);
            }
            if count == before || count == keys.len() {
                return Ok(count);
            }
        }
    }

    /// The nearest tier that has each key's block.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn nearest(&self, keys: &[Key]) -> Result<Vec<Option<&'static str>>, Error> {
        let _pass = self.core().gate.enter()?;
        let mut nearest = vec![None; keys.len()];
        for tier in &self.core().tiers {
            let mut found = vec![false; keys.len()];
            tier.contains(self.id, keys, &mut found);
            let here = nearest.iter_mut().zip(found).filter(|(_, found)| *found);
            here.for_each(|(nearest, _)| *nearest = nearest.or(Some(tier.name())));
        }
        Ok(nearest)
    }

    /// Stores blocks; keys in prefix order. See [`Task`] for the two milestones.
    ///
    /// # Errors
    /// [`Error::Input`] before a byte moves, [`Error::Closed`].
    pub fn put(&self, keys: Vec<Key>, buffers: BlockBuffers) -> Result<Task, Error> {
        self.core().put(self.id, keys, buffers)
    }

    /// Removes blocks from every tier; how many were in one.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn remove(&self, keys: &[Key]) -> Result<usize, Error> {
        let _pass = self.core().gate.enter()?;
        let count = self
            .contains(keys)?
            .into_iter()
            .filter(|found| *found)
            .count();
        // Near, far, near: a copy under way in either direction finds its source removed, or has
        // arrived where the next step looks.
        let tiers = &self.core().tiers;
        for tier in tiers.iter().chain(tiers.iter().rev().skip(1)) {
            tier.remove(self.id, keys);
        }
        Ok(count)
    }

    /// Removes every block of the namespace from every tier; how many the tiers held together.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn clear(&self) -> Result<usize, Error> {
        let _pass = self.core().gate.enter()?;
        // In the order of `remove`.
        let tiers = &self.core().tiers;
        Ok(tiers
            .iter()
            .chain(tiers.iter().rev().skip(1))
            .map(|tier| tier.clear(self.id))
            .sum())
    }

    /// Keeps every block of the namespace that is stored from now on in one extent, for engines
    /// whose own copy engine moves it: one address range a block.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn keep_contiguous(&self) -> Result<(), Error> {
        let _pass = self.core().gate.enter()?;
        self.core()
            .tiers
            .iter()
            .for_each(|tier| tier.keep_contiguous(self.id));
        Ok(())
    }

    /// Reserves room for blocks with parts of these lengths, in prefix order; `None` for a key
    /// that needs no writing (stored already, or being written) or finds no room.
    ///
    /// # Errors
    /// [`Error::Input`], [`Error::Closed`].
    pub fn reserve(&self, blocks: &[(Key, Vec<u64>)]) -> Result<Vec<Option<Reservation>>, Error> {
        let answers = self
            .core()
            .reserve(self.depot.inner.session, self.id, blocks)?;
        Ok(answers.into_iter().map(Result::ok).collect())
    }

    /// As [`Namespace::reserve`], with a full tier as an error. Nothing stays reserved then.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Input`], [`Error::Closed`].
    pub fn reserve_strict(
        &self,
        blocks: &[(Key, Vec<u64>)],
    ) -> Result<Vec<Option<Reservation>>, Error> {
        let answers = self
            .core()
            .reserve(self.depot.inner.session, self.id, blocks)?;
        let full = answers.iter().find_map(|answer| match answer {
            Err(Refused::Full(full)) => Some(Error::from(*full)),
            _ => None,
        });
        let reserved: Vec<Option<Reservation>> = answers.into_iter().map(Result::ok).collect();
        match full {
            None => Ok(reserved),
            Some(error) => {
                self.core()
                    .abort(&reserved.into_iter().flatten().collect::<Vec<_>>());
                Err(error)
            }
        }
    }

    /// Publishes reservations whose bytes are in place; `checksums` has one a part of each.
    ///
    /// # Errors
    /// [`Error::Input`], [`Error::Closed`].
    pub fn commit(
        &self,
        reservations: &[Reservation],
        checksums: &[Vec<Checksum>],
    ) -> Result<Vec<bool>, Error> {
        if reservations.len() != checksums.len() {
            return Err(Error::input(
                "checksums",
                format!(
                    "{} for {} reservations",
                    checksums.len(),
                    reservations.len()
                ),
                "one list a reservation",
            ));
        }
        let session = self.depot.inner.session;
        if let Some(other) = reservations.iter().find(|mine| mine.session != session) {
            return Err(Error::input(
                "reservations",
                format!("one of session {:x}", other.session),
                format!("reservations of this depot ({session:x})"),
            ));
        }
        self.core().commit(reservations, checksums)
    }

    /// Gives reservations back. Every mover that had one of their placements must have stopped.
    pub fn abort(&self, reservations: &[Reservation]) {
        if self.owns(reservations.iter().map(|reservation| reservation.session)) {
            self.core().abort(reservations);
        }
    }

    /// Whether reservations or pins were made here. Those of another depot, or of the one that
    /// this process had open before, name other blocks.
    fn owns(&self, mut sessions: impl Iterator<Item = u64>) -> bool {
        let other = sessions.find(|session| *session != self.depot.inner.session);
        if let Some(session) = other {
            tracing::error!(
                session,
                "reservations or pins of another depot were handed in"
            );
        }
        other.is_none()
    }

    /// Pins blocks where they are nearest; `None` for a miss. With `prefix` nothing behind the
    /// first miss is pinned.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn pin(&self, keys: &[Key], prefix: bool) -> Result<Vec<Option<Pin>>, Error> {
        let mut pins = self.core().pin(self.depot.inner.session, self.id, keys)?;
        let gap = pins.iter().position(Option::is_none);
        if let (true, Some(gap)) = (prefix, gap) {
            let behind: Vec<Pin> = pins[gap..].iter_mut().filter_map(Option::take).collect();
            self.unpin(&behind, false);
        }
        Ok(pins)
    }

    /// Ends pins, given in prefix order. `served` says that their bytes were used: it counts as
    /// hits, and far blocks are promoted.
    pub fn unpin(&self, pins: &[Pin], served: bool) {
        if self.owns(pins.iter().map(|pin| pin.session)) {
            self.core().unpin(pins, served);
        }
    }

    /// Unpublishes pinned blocks that did not verify, where they are pinned. The pins remain.
    pub fn discard(&self, pins: &[Pin]) -> usize {
        if self.owns(pins.iter().map(|pin| pin.session)) {
            self.core().discard(pins)
        } else {
            0
        }
    }
}
