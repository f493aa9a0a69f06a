//! A depot whose index is in this process.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvdepot_arena::gate::Gate;
use kvdepot_arena::{Arena, Class, Error, Key, NamespaceId, Opening, Uses, clock, size};
use kvdepot_media::{Checksum, Copier};

use super::verbs::{About, Together, Verbs};
use crate::buffers::BlockBuffers;
use crate::config::{Admission, Config};
use crate::devices::{DeviceStats, DrainTo};
use crate::listing::{BlockPage, Cursor, Gone};
use crate::metrics::{Metrics, Stats};
use crate::opening::Opened;
use crate::pipeline::{
    Awaited, Background, Bell, Core, Drained, Edge, Evictor, GetOptions, Grouped, Learned, Ledger,
    Loads, NoRoom, Pin, Prompts, Reservation,
};
use crate::placement::Holder;
use crate::populate;
use crate::task::Task;
use crate::tier::NamespaceUsage;
use crate::tier::{Apart, Stage};

/// This process among those that ask what left; others have their numbers.
const OWN_LISTENER: u64 = 0;

/// A server that lets other processes use a depot of this process.
pub trait Serves: Send + Sync {
    /// Returns the path of the socket.
    fn path(&self) -> &Path;
    /// Returns the address of the HTTP server, or `None` without one.
    fn http(&self) -> Option<String> {
        None
    }
    /// Rejects new clients and waits at most `timeout` for copies of the connected ones.
    fn retire(&self, timeout: Duration);
    /// Stops the server. A second call does nothing.
    fn stop(&self);
}

/// Time that calls have to end once they are asked to: longer is worth a warning.
const TO_END: Duration = Duration::from_secs(1);

pub(super) struct Local {
    core: Arc<Core>,
    background: Background,
    evictor: Evictor,
    server: Option<Box<dyn Serves>>,
    about: About,
}

impl Local {
    /// Opens the tiers, and has `serve` let others in before anybody can find them.
    pub(super) fn start(
        config: &Config,
        serve: impl FnOnce(&Arc<Core>, &About) -> Result<Option<Box<dyn Serves>>, Error>,
    ) -> Result<Local, Error> {
        // Before anything costs time, memory or room on a disk.
        config.check()?;
        let uses = Uses::default();
        let Opened {
            tiers,
            opening,
            without,
            next,
            alarm,
            keys,
        } = Opened::open(config, &uses)?;
        let tiers: Vec<Stage> = tiers.into_iter().map(|(_, tier)| tier).collect();
        if let Some(last) = tiers.last().and_then(Stage::here) {
            last.set_last();
        }
        // What a tier apart has is not known without asking it.
        let known = tiers.iter().all(|tier| tier.apart().is_none());
        let learns = known && config.admission == Admission::Learned;
        let learned = learns.then(|| Learned::new(&tiers));
        let saved = Arc::default();
        let session = new_session();
        let loads = Loads::new(&tiers, config, alarm)?;
        let copier = config.copier()?;
        let mut idle = copier.clone();
        idle.nice = 19;
        let core = Arc::new(Core {
            copier: Copier::new(copier)?,
            idle_copier: (tiers.len() > 1).then(|| Copier::new(idle)).transpose()?,
            ledger: Ledger::new(tiers.len() - 1),
            loads,
            awaited: Awaited::new(),
            bell: Bell::default(),
            gate: Gate::new()?,
            metrics: Metrics::default(),
            overload: config.overload,
            edges: Edge::all(&tiers, config, &saved),
            ack: tiers.iter().position(Stage::lasts).unwrap_or(0),
            promote: config.promote,
            learned,
            opened: uses.now(),
            saved,
            uses,
            prompts: Prompts::default(),
            keys,
            next_medium: AtomicU32::new(next),
            next_group: AtomicU64::new(1),
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
            lookup_timeout: core.is_apart().then_some(config.lookup_timeout),
            groups: true,
            ack: Some(core.ack),
        };
        let server = serve(&core, &about)?;
        // Its threads have the arenas, and with them their locks.
        let undo = |_: &Error| {
            server
                .iter()
                .for_each(|server| server.retire(Duration::ZERO));
            server.iter().for_each(|server| server.stop());
            core.tiers.iter().for_each(Stage::close);
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
            background.stop(&core);
            undo(error);
        })?;
        log_opening(&about);
        Ok(Local {
            core,
            background,
            evictor,
            server,
            about,
        })
    }

    /// Who holds what this process asks for.
    fn holder(&self) -> Holder {
        Holder {
            session: self.about.session,
            seat: 0,
        }
    }

    /// Refuses reservations or pins of another depot, or of the one that this process had open
    /// before: they name other blocks. And those of a client: its owner ends them with it.
    fn owns(&self, mut holders: impl Iterator<Item = Holder>) -> bool {
        let mine = self.holder();
        let other = holders.find(|holder| *holder != mine);
        if let Some(Holder { session, .. }) = other {
            tracing::error!(
                session,
                "internal error: a call passed reservations or pins of another depot; kvdepot \
                 ignores the call"
            );
        }
        other.is_none()
    }

    fn end(&self) {
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
        let hurry = || {
            core.gate.hurry();
            let apart = core.tiers.iter().filter_map(Stage::apart);
            apart.for_each(Apart::hurry);
            core.loads.hurry();
            core.copier.give_up();
            core.idle_copier.iter().for_each(Copier::give_up);
        };
        if !core.gate.wait_empty(left()) {
            hurry();
            if !core.gate.wait_empty(TO_END) {
                warn_of_calls(core);
            }
        }
        // What touches a caller's memory has no time-out: it ends by itself.
        core.gate.wait_empty(Duration::MAX);
        if !core.ledger.drain(left()) {
            let bytes = size::show(core.queued_bytes());
            let media = core.media();
            let orphans = media.iter().flat_map(|arena| arena.orphan_pids());
            let orphans: Vec<u32> = orphans.collect();
            tracing::warn!(
                %bytes,
                ?orphans,
                "close_timeout expired; blocks in the write-back queue are lost"
            );
        }
        // What the threads still ask is for nobody.
        hurry();
        self.background.stop(core);
        self.evictor.stop(core);
        core.copier.close();
        core.idle_copier.iter().for_each(Copier::close);
        if let Some(server) = &self.server {
            server.stop();
        }
        core.tiers.iter().for_each(Stage::close);
        core.loads.close();
    }
}

impl Verbs for Local {
    fn about(&self) -> &About {
        &self.about
    }

    fn is_served(&self) -> bool {
        false
    }

    fn is_connected(&self) -> bool {
        !self.core.gate.forked()
    }

    fn is_busy(&self) -> bool {
        self.core.is_busy()
    }

    fn socket(&self) -> Option<PathBuf> {
        self.server.as_ref().map(|server| server.path().into())
    }

    fn http(&self) -> Option<String> {
        self.server.as_ref().and_then(|server| server.http())
    }

    fn populate_aside(&self) -> Result<(), Error> {
        let media = self.core.media();
        // What has no addresses has no pages to bring.
        let media = media.iter().filter_map(|arena| arena.mapping().ok());
        populate::aside(media.collect(), Arc::clone(&self.core.gate))
    }

    fn renew(&self) -> Result<(), Error> {
        self.core.renew()
    }

    fn gone(&self, limit: usize) -> Result<Gone, Error> {
        self.core.gone(OWN_LISTENER, limit)
    }

    fn drain(&self, timeout: Duration) -> bool {
        !self.core.gate.forked() && self.core.ledger.drain(timeout)
    }

    fn keep(&self) {
        self.core.media().iter().for_each(|arena| arena.keep());
    }

    fn close(&self) {
        self.end();
    }

    fn lookup(&self, id: NamespaceId, keys: &[Key]) -> Result<Task, Error> {
        self.core.lookup(id, keys, None)
    }

    fn prefetch(&self, id: NamespaceId, keys: &[Key]) -> Result<Task, Error> {
        self.core.prefetch(0, id, keys, None)
    }

    fn reserve(
        &self,
        id: NamespaceId,
        after: Option<Key>,
        blocks: &[(Key, Vec<u64>)],
        no_room: NoRoom,
    ) -> Result<Vec<Option<Reservation>>, Error> {
        self.core.reserve(self.holder(), id, after, blocks, no_room)
    }

    fn commit(
        &self,
        reservations: &[Reservation],
        checksums: &[Vec<Checksum>],
    ) -> Result<Vec<bool>, Error> {
        let mine = self.holder();
        let mut holders = reservations.iter().map(|one| one.holder);
        if let Some(other) = holders.find(|holder| *holder != mine) {
            return Err(Error::input(
                "reservations",
                format!(
                    "a reservation of another depot or client (session {:x}, seat {})",
                    other.session, other.seat
                ),
                format!(
                    "reservations of this depot (session {:x}, seat 0)",
                    mine.session
                ),
            ));
        }
        self.core.commit(reservations, checksums)
    }

    fn abort(&self, reservations: &[Reservation]) {
        if self.owns(reservations.iter().map(|mine| mine.holder)) {
            self.core.abort(reservations);
        }
    }

    fn pin(&self, id: NamespaceId, keys: &[Key], prefix: bool) -> Result<Vec<Option<Pin>>, Error> {
        self.core.pin(self.holder(), id, keys, prefix)
    }

    fn unpin(&self, pins: &[Pin], served: bool) {
        if self.owns(pins.iter().map(|pin| pin.holder)) {
            self.core.unpin(pins, served);
        }
    }

    fn discard(&self, pins: &[Pin]) -> usize {
        match self.owns(pins.iter().map(|pin| pin.holder)) {
            true => self.core.discard(pins),
            false => 0,
        }
    }

    #[cfg(feature = "sim")]
    fn step_background(&self) -> bool {
        self.core.step()
    }

    #[cfg(feature = "sim")]
    fn step_evictor(&self) -> bool {
        self.core.step_evictor()
    }

    fn describe(
        &self,
        id: NamespaceId,
        description: &str,
        salt: Option<&str>,
    ) -> Result<(), Error> {
        self.core.describe(id, description, salt)
    }

    fn stats(&self) -> Stats {
        self.core.stats()
    }

    fn namespaces(&self) -> Result<Vec<NamespaceUsage>, Error> {
        self.core.namespaces()
    }

    fn devices(&self) -> Result<Vec<DeviceStats>, Error> {
        self.core.devices()
    }

    fn add_device(&self, path: &Path, capacity: Option<u64>) -> Result<Opening, Error> {
        self.core.add_device(path, capacity)
    }

    fn drain_device(&self, path: &Path, to: DrainTo, patience: Duration) -> Result<Drained, Error> {
        self.core.drain_device(path, to, patience)
    }

    fn remove_device(&self, path: &Path, force: bool, patience: Duration) -> Result<(), Error> {
        self.core.remove_device(path, force, patience)
    }

    fn grow_device(&self, path: &Path, capacity: u64) -> Result<(), Error> {
        self.core.grow_device(path, capacity)
    }

    fn contains(&self, id: NamespaceId, keys: &[Key]) -> Result<Vec<bool>, Error> {
        self.core.contains(id, keys)
    }

    fn prefix(&self, id: NamespaceId, keys: &[Key]) -> Result<usize, Error> {
        self.core.prefix(id, keys)
    }

    fn nearest(&self, id: NamespaceId, keys: &[Key]) -> Result<Vec<Option<usize>>, Error> {
        self.core.nearest(id, keys)
    }

    fn acknowledged(&self, id: NamespaceId, keys: &[Key]) -> Result<Vec<Option<u64>>, Error> {
        self.core.acknowledged(id, keys)
    }

    fn put(
        &self,
        id: NamespaceId,
        after: Option<Key>,
        keys: Vec<Key>,
        buffers: BlockBuffers,
    ) -> Result<Task, Error> {
        self.core.put(id, after, keys, buffers)
    }

    fn get(
        &self,
        id: NamespaceId,
        keys: Vec<Key>,
        buffers: BlockBuffers,
        options: GetOptions,
    ) -> Result<Task, Error> {
        self.core.get(id, keys, buffers, options)
    }

    fn remove(&self, id: NamespaceId, keys: &[Key]) -> Result<usize, Error> {
        self.core.remove(id, keys)
    }

    fn clear(&self, id: NamespaceId) -> Result<usize, Error> {
        self.core.clear(id)
    }

    fn block_page(
        &self,
        id: NamespaceId,
        from: Option<Cursor>,
        limit: usize,
    ) -> Result<BlockPage, Error> {
        self.core.block_page(id, from, limit)
    }

    fn group(
        &self,
        id: NamespaceId,
        keys: &[Key],
        class: Class,
    ) -> Result<Box<dyn Together>, Error> {
        Ok(Box::new(self.core.group(id, keys, class)?))
    }
}

impl Together for Grouped {
    fn add(&self, keys: &[Key]) -> Result<(), Error> {
        Grouped::add(self, keys)
    }

    fn set_class(&self, class: Class) -> Result<(), Error> {
        Grouped::set_class(self, class)
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.end();
    }
}

/// Reports the calls that a close still waits for.
fn warn_of_calls(core: &Core) {
    let named = core.gate.named();
    if named.is_empty() {
        tracing::warn!("close_timeout expired; close waits for calls in progress");
        return;
    }
    let calls = named.iter();
    let calls: Vec<String> = calls
        .map(|one| format!("{}: {} calls, {} keys", one.op, one.calls, one.keys))
        .collect();
    tracing::warn!(
        calls = calls.join(", "),
        "close_timeout expired; close waits for calls that use memory of their callers"
    );
}

fn describe(core: &Core, config: &Config, without: Option<&str>) -> String {
    let by = match config.shares {
        1 => String::new(),
        shares => format!(", divided by {shares}"),
    };
    let arena = |tier: &Arena| {
        let size = size::show(tier.layout().capacity);
        match tier.path() {
            Some(path) if tier.is_a_share() => {
                let path = path.display();
                let name = tier.name();
                format!("{name} {size} (20 % of the free disk space{by}) at {path}")
            }
            Some(path) => format!("{} {size} at {}", tier.name(), path.display()),
            None if config.cache.capacity.is_none() => {
                format!("{} {size} (10 % of the allowed memory{by})", tier.name())
            }
            None => format!("{} {size}", tier.name()),
        }
    };
    let each = core.tiers.iter().flat_map(|tier| match tier {
        Stage::Here(arenas) => arenas.arenas().iter().map(|one| arena(one)).collect(),
        Stage::Apart(apart) => vec![apart.tier().about()],
    });
    let tiers = each.collect::<Vec<_>>().join(" | ");
    match without {
        None => tiers,
        Some(reason) => format!("{tiers} only: {reason}"),
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

fn new_session() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one((std::process::id(), clock::now()))
}
