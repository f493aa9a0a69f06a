//! Opening: find or make the medium, become its owner, recover what it holds.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use kvdepot_alloc::Pool;
use kvdepot_host::fork::LentFd;
use kvdepot_host::{dirs, limits, peer};
use kvdepot_media::{Access, Flush, Mapping};
use parking_lot::{Condvar, Mutex};

use crate::arena::{Arena, Counters, State, Table};
use crate::create::{Promised, format, open_error};
use crate::erase::unmake;
use crate::error::Error;
use crate::format::layout::{self, Layout};
use crate::format::superblock::{self, Refusal, Superblock};
use crate::format::{GRANULE, directory, owner};
use crate::index::{Index, Order, Records, Reservations, Uses};
use crate::leave::Inode;
use crate::new::{Treatment, treatment};
use crate::options::{Durability, Options};
use crate::orphans::Orphans;
use crate::owner_lock::OwnerLock;
use crate::recover::Opening;
use crate::roll::Roll;
use crate::take::{Taken, take};
use crate::{create, held, publish, recover, size};

/// A medium that is this depot's, and whose records have not been read yet.
pub struct Acquired {
    name: &'static str,
    number: u32,
    path: PathBuf,
    durability: Durability,
    sized: bool,
    created: bool,
    /// Before the lock, which is held when the file goes.
    fresh: Option<Fresh>,
    superblock: Superblock,
    lock: OwnerLock,
    mapping: Arc<Mapping>,
}

impl Acquired {
    /// The second half of [`Arena::open`].
    pub fn read(self) -> Result<(Arena, Opening), Error> {
        let (mapping, superblock) = (self.mapping, self.superblock);
        let layout = Layout {
            capacity: superblock.capacity,
            records: superblock.records,
            data: superblock.data,
        };
        let found = recover::recover(&mapping, layout, &superblock.uuid)?;
        let opening = Opening {
            created: self.created,
            ..found.opening
        };
        // Above everything in the table, also when a rotted superblock made a generation repeat
        // or its 24 bits ran out.
        let generation = (superblock.generation & 0xFF_FFFF) << publish::COUNTER_BITS;
        let first = generation.max(found.highest.saturating_add(1));
        if layout.capacity > mapping.len() {
            tracing::warn!(
                path = %self.path.display(),
                capacity = %size::show(layout.capacity),
                medium = %size::show(mapping.len()),
                "the arena was truncated: blocks beyond its end are misses"
            );
        }
        let mut state = State::new(found.pool, layout.records as u32, first);
        state.records = found.records;
        let blocks = found.shares.iter().map(|(blocks, _)| *blocks as u32);
        state.borne = blocks.collect();
        state.live_bytes = found.shares.iter().map(|(_, bytes)| bytes).sum();
        state.roll = Roll::of(found.shares);
        (state.described, state.undescribed) = described(&mapping)?;
        let table = Table {
            sized: self.sized,
            uuid: superblock.uuid,
            inode: Inode::of(&self.path).ok_or_else(|| Error::Corrupt {
                path: self.path.clone(),
                reason: "it was removed while it was being opened".into(),
            })?,
            path: self.path,
            fresh: Mutex::new(self.fresh),
            superblock: Mutex::new(superblock),
            lock: Mutex::new(Some(self.lock)),
            orphans: Orphans::default(),
        };
        let arena = Arena {
            name: self.name,
            number: self.number,
            opened: layout.on(mapping.len()),
            capacity: AtomicU64::new(layout.on(mapping.len()).capacity),
            leaving: AtomicBool::new(false),
            durability: self.durability,
            table: Some(table),
            index: found.index,
            state: held::Mutex::new(state),
            burial: Condvar::new(),
            low: AtomicBool::new(false),
            counters: Counters::default(),
            last: OnceLock::new(),
            mapping: ArcSwap::new(mapping),
        };
        arena.outrank(&found.outranked);
        arena.mend(&found.damaged);
        Ok((arena, opening))
    }
}

impl Arena {
    /// Refuses a capacity that [`Arena::volatile`] would.
    pub fn check_volatile(name: &str, capacity: u64) -> Result<(), Error> {
        let refused = |allowed: String| {
            let field = format!("{}.capacity", name.to_ascii_lowercase());
            Err(Error::config(field, size::show(capacity), allowed))
        };
        if capacity < GRANULE {
            return refused("at least 4KiB".into());
        }
        match limits::memory_allowed() {
            Ok(memory) if capacity > memory => refused(format!(
                "at most the {} of memory that this process may use",
                size::show(memory)
            )),
            _ => Ok(()),
        }
    }

    /// An arena in memory that dies with the process.
    pub fn volatile(name: &'static str, number: u32, capacity: u64) -> Result<Arena, Error> {
        Arena::check_volatile(name, capacity)?;
        let capacity = capacity / GRANULE * GRANULE;
        let mapping = Mapping::anonymous("kvdepot-cache", capacity).map_err(|error| {
            let field = format!("{}.capacity", name.to_ascii_lowercase());
            Error::config(
                field,
                size::show(capacity),
                format!("memory that the system can map ({error})"),
            )
        })?;
        // Slots are cheap here: one for each granule that a block could begin at.
        let records = (capacity / GRANULE).min(u64::from(u32::MAX) - 1);
        let layout = Layout {
            capacity,
            records,
            data: 0,
        };
        let pool = new_pool(layout)?;
        Ok(Arena {
            name,
            number,
            mapping: ArcSwap::new(mapping),
            opened: layout,
            capacity: AtomicU64::new(layout.capacity),
            leaving: AtomicBool::new(false),
            durability: Durability::Process,
            table: None,
            index: Index::new(layout.records),
            state: held::Mutex::new(State::new(pool, layout.records as u32, 0)),
            burial: Condvar::new(),
            low: AtomicBool::new(false),
            counters: Counters::default(),
            last: OnceLock::new(),
        })
    }

    /// Refuses a medium that [`Arena::open`] would, and changes nothing. What a process owns is
    /// not looked into: that is its own affair, and may be ours by the time it is opened. What it
    /// would take of a disk is promised to it.
    pub fn check(
        path: &Path,
        config: &Options,
        field: &impl Fn(&str) -> String,
        promised: &mut Promised,
    ) -> Result<(), Error> {
        let mapping = match Mapping::open(path, Access::ReadWrite) {
            Ok(mapping) => mapping,
            Err(error) if error.is_not_found() => {
                return create::check(path, config, field, promised);
            }
            Err(error) => return Err(open_error(path, error, field)),
        };
        if OwnerLock::is_taken(&mapping)? {
            return Ok(());
        }
        match treatment(path, &mapping, config, field)? {
            Treatment::Open => {
                let superblock = read_superblock(path, &mapping)?;
                check_capacity(&superblock, &mapping, config, path, field)
            }
            Treatment::Blank | Treatment::Lost => {
                create::layout_for(&mapping, config, field).map(drop)
            }
        }
    }

    /// Opens the arena on a device or file as its owner, making it when the file is missing.
    /// `field` names an option in errors. Its blocks have to be [ranked](Arena::rank) then.
    pub fn open(
        named: (&'static str, u32),
        path: &Path,
        config: &Options,
        field: &impl Fn(&str) -> String,
        lock_wait: Duration,
    ) -> Result<(Arena, Opening), Error> {
        Arena::acquire(named, path, config, field, lock_wait)?.read()
    }

    /// The first half of [`Arena::open`], which may wait for another owner, and is done by the
    /// thread that was asked: a signal ends its wait.
    pub fn acquire(
        (name, number): (&'static str, u32),
        path: &Path,
        config: &Options,
        field: &impl Fn(&str) -> String,
        lock_wait: Duration,
    ) -> Result<Acquired, Error> {
        let Taken {
            mapping,
            lock,
            created,
        } = take(path, config, lock_wait, field)?;
        let space = |capacity: u64| {
            let fail = |error| create::space_error(path, capacity, error, field);
            mapping.allocate(capacity.min(mapping.len())).map_err(fail)
        };
        let treatment = match created {
            true => Treatment::Open,
            false => treatment(path, &mapping, config, field)?,
        };
        let mut fresh = None;
        let superblock = if treatment == Treatment::Open {
            let superblock = read_superblock(path, &mapping)?;
            // Another owner may have been faster, and has used it.
            if created && superblock.generation == 0 {
                fresh = Some(Fresh(path.into(), Arc::clone(&mapping)));
            }
            superblock
        } else {
            if treatment == Treatment::Blank {
                tracing::info!(
                    path = %path.display(),
                    medium = %size::show(mapping.len()),
                    "a new medium: it holds zeros, and becomes an arena"
                );
            }
            if !lock.alone() {
                return Err(Error::config(
                    field("path"),
                    path.display(),
                    "a medium for a new arena once the processes that worked for its last owner \
                     have ended",
                ));
            }
            // Before anything of the old content is gone.
            space(config.capacity.unwrap_or_else(|| mapping.len()))?;
            format(&mapping, config, treatment == Treatment::Blank, field)?
        };
        check_capacity(&superblock, &mapping, config, path, field)?;
        if !created {
            space(superblock.capacity)?;
        }
        for at in dead_superblocks(&mapping, &superblock)? {
            // Into the place of the one that is dead.
            tracing::warn!(path = %path.display(), at, "a superblock was damaged, and is written anew");
        }
        let superblock = advance(&mapping, superblock)?;
        write_owner(&mapping, "")?;
        Ok(Acquired {
            name,
            number,
            path: path.into(),
            durability: config.durability,
            sized: created && config.capacity.is_none(),
            created: created || treatment != Treatment::Open,
            fresh,
            superblock,
            lock,
            mapping,
        })
    }

    /// Has its blocks used just now, by the order of their sequences, before anybody else sees it.
    pub fn rank(&mut self, uses: &Uses) {
        self.index.rank(uses);
        self.state.get_mut().order = Order::of(&self.index);
    }

    /// A file that this opening has made stays, whatever happens.
    pub fn keep(&self) {
        if let Some(table) = &self.table
            && let Some(fresh) = table.fresh.lock().take()
        {
            fresh.keep();
        }
    }

    /// Lets the next owner in. Nothing may be written afterwards.
    pub fn close(&self) {
        if let Some(table) = &self.table {
            self.close_orphans();
            drop(table.fresh.lock().take());
            drop(table.lock.lock().take());
        }
    }

    /// Lets medium and index go, after the close of a depot that nobody uses any more but whose
    /// namespaces are still kept. Pins and reservations that end later name nothing.
    pub fn let_go(&self) {
        if self.last.set(self.stats()).is_err() {
            return;
        }
        let nothing = Mapping::anonymous("kvdepot-closed", GRANULE);
        let (Ok(nothing), Ok(pool)) = (nothing, Pool::new(GRANULE, GRANULE)) else {
            return;
        };
        self.mapping.store(nothing);
        let mut state = self.state.lock();
        let sequence = state.sequence;
        *state = State::new(pool, 0, sequence);
        self.index.let_go();
    }

    /// Says in the owner page where the owner's socket is.
    pub fn announce(&self, socket: &str) -> Result<(), Error> {
        if self.table.is_some() {
            write_owner(&self.mapping.load(), socket)
        } else {
            Ok(())
        }
    }

    /// A descriptor for a process that reads or writes this arena's medium, and whether no later
    /// owner gives room to other blocks while that process has it.
    pub fn descriptor(&self, write: bool) -> Result<(LentFd, bool), Error> {
        let plain = |access| {
            let mapping = self.mapping.load();
            LentFd::open(|| Ok::<_, Error>(mapping.try_clone_fd(access)?))
        };
        match (&self.table, write) {
            (Some(table), _) => match &*table.lock.lock() {
                Some(lock) if write => lock.for_writer(&self.mapping.load()),
                // What a writer would have.
                Some(lock) => Ok((plain(Access::ReadOnly)?, lock.alone())),
                None => Err(Error::Closed("")),
            },
            // Memory without a table has no later owner.
            (None, true) => Ok((plain(Access::ReadWrite)?, true)),
            (None, false) => Ok((plain(Access::ReadOnly)?, true)),
        }
    }
}

impl State {
    fn new(pool: Pool, records: u32, sequence: u64) -> State {
        State {
            pool,
            records: Records::new(records),
            order: Order::new(),
            reserved: Reservations::new(),
            borne: Vec::new(),
            sequence,
            live_bytes: 0,
            lingering: HashSet::new(),
            burials: 0,
            buried: 0,
            set_aside: 0,
            pressed: false,
            promised: (0, 0),
            digs: 0,
            lost: Vec::new(),
            losses: 0,
            carving: None,
            described: HashSet::new(),
            undescribed: Vec::new(),
            contiguous: HashSet::new(),
            roll: Roll::default(),
        }
    }
}

/// A file that goes again unless it is [kept](Fresh::keep), while the lock on it is held.
#[derive(Debug)]
pub(crate) struct Fresh(PathBuf, Arc<Mapping>);

impl Fresh {
    fn keep(mut self) {
        self.0 = PathBuf::new();
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        if self.0.as_os_str().is_empty() {
            return;
        }
        match unmake(&self.0, &self.1) {
            Ok(()) => tracing::info!(path = %self.0.display(), "the new arena is removed again"),
            Err(error) => tracing::warn!(%error, "a new arena could not be removed again"),
        }
    }
}

fn new_pool(layout: Layout) -> Result<Pool, Error> {
    Pool::new(layout.data_len(), GRANULE)
        .map_err(|error| Error::config("capacity", size::show(layout.capacity), error.to_string()))
}

/// The default arena: in the user's cache directory, one an instance.
pub fn default_path(instance: Option<&str>) -> Result<PathBuf, Error> {
    let name = match instance {
        None => "arena.kvd".to_owned(),
        Some(instance) => format!("arena-{instance}.kvd"),
    };
    Ok(dirs::cache_dir()?.join(name))
}

pub(crate) fn read_page(mapping: &Mapping, offset: u64) -> Result<[u8; superblock::LEN], Error> {
    let mut page = [0; superblock::LEN];
    mapping.read_into(offset, &mut page)?;
    Ok(page)
}

/// The newer of the two superblocks that verify.
pub fn read_superblock(path: &Path, mapping: &Mapping) -> Result<Superblock, Error> {
    let corrupt = |reason: String| Error::Corrupt {
        path: path.into(),
        reason,
    };
    let len = mapping.len();
    if len < layout::CAPACITY_MIN {
        let mut bytes = vec![0; len as usize];
        mapping.read_into(0, &mut bytes)?;
        // Whoever keeps something here is not told to remove it.
        let is_ours = bytes.starts_with(&superblock::MAGIC) || bytes.iter().all(|byte| *byte == 0);
        return Err(corrupt(if is_ours {
            format!("it has {}: {}", size::show(len), create::enlarge(path))
        } else {
            "it is not a kvdepot arena; name another path".into()
        }));
    }
    let [a, b] = COPIES.map(|at| read_page(mapping, at).map(|page| Superblock::decode(&page)));
    let (a, b) = (a?, b?);
    let newest = [&a, &b]
        .into_iter()
        .flatten()
        .max_by_key(|superblock| superblock.generation);
    if let Some(superblock) = newest {
        return Ok(superblock.clone());
    }
    let hint = "set format: true to make a new arena here (everything in it is lost)";
    Err(corrupt(match (a, b) {
        (Err(Refusal::Version(version)), _) | (_, Err(Refusal::Version(version))) => format!(
            "format version {version} is not the version {} that this release reads; use the \
             release that wrote it, or {hint}",
            superblock::VERSION
        ),
        (Err(Refusal::Damaged), _) | (_, Err(Refusal::Damaged)) => {
            format!("both superblocks are damaged; {hint}")
        }
        _ => format!("it is not a kvdepot arena; name another path, or {hint}"),
    }))
}

/// Where the superblocks are.
const COPIES: [u64; 2] = [0, layout::SUPERBLOCK_B];

/// The offsets of superblocks that do not verify, beside the one in force. An arena that nobody
/// has opened has one alone.
pub fn dead_superblocks(mapping: &Mapping, in_force: &Superblock) -> Result<Vec<u64>, Error> {
    let mut dead = Vec::new();
    for at in COPIES {
        let page = read_page(mapping, at)?;
        let is_unused = in_force.generation == 0 && page == [0; superblock::LEN];
        if !is_unused && Superblock::decode(&page).is_err() {
            dead.push(at);
        }
    }
    Ok(dead)
}

fn check_capacity(
    superblock: &Superblock,
    mapping: &Mapping,
    config: &Options,
    path: &Path,
    field: &impl Fn(&str) -> String,
) -> Result<(), Error> {
    if superblock.data >= mapping.len() {
        return Err(Error::Corrupt {
            path: path.into(),
            reason: format!(
                "it was truncated to {}, inside the record table; set format: true to start anew",
                size::show(mapping.len())
            ),
        });
    }
    match config.capacity {
        Some(asked) if asked / GRANULE * GRANULE != superblock.capacity => Err(Error::config(
            field("capacity"),
            size::show(asked),
            format!(
                "{}, which the arena {} has (leave the option out, or set format: force to make \
                 a new one)",
                size::show(superblock.capacity),
                path.display()
            ),
        )),
        _ => Ok(()),
    }
}

/// Begins a new generation, in the older copy: the newer one stays whole meanwhile.
pub(crate) fn advance(mapping: &Mapping, superblock: Superblock) -> Result<Superblock, Error> {
    let next = Superblock {
        generation: superblock.generation + 1,
        ..superblock
    };
    let at = if next.generation.is_multiple_of(2) {
        0
    } else {
        layout::SUPERBLOCK_B
    };
    mapping.write_from(at, &next.encode())?;
    mapping.sync(at, superblock::LEN as u64, Flush::Power)?;
    Ok(next)
}

fn write_owner(mapping: &Mapping, socket: &str) -> Result<(), Error> {
    let pid = std::process::id();
    let page = owner::Owner {
        pid,
        start_time: peer::start_ticks(pid).ok().flatten().unwrap_or(0),
        host: peer::hostname(),
        socket: socket.to_owned(),
    };
    Ok(mapping.write_from(layout::OWNER, &page.encode())?)
}

/// The namespaces of the directory, and its entries without one, the first one last.
fn described(mapping: &Mapping) -> Result<(HashSet<crate::NamespaceId>, Vec<u32>), Error> {
    let entries = read_directory(mapping)?;
    let taken: HashSet<u64> = entries.iter().map(|(index, _, _)| *index).collect();
    let free = (0..directory::ENTRIES)
        .rev()
        .filter(|index| !taken.contains(index));
    let free = free.map(|index| index as u32).collect();
    Ok((entries.into_iter().map(|(_, id, _)| id).collect(), free))
}

/// The namespaces that the arena describes, with the number of their entry.
pub fn read_directory(mapping: &Mapping) -> Result<Vec<(u64, crate::NamespaceId, String)>, Error> {
    let mut entries = Vec::new();
    for index in 0..directory::ENTRIES {
        let mut bytes = [0; directory::LEN];
        mapping.read_into(
            layout::DIRECTORY + index * directory::LEN as u64,
            &mut bytes,
        )?;
        if let Some((id, text)) = directory::decode(&bytes) {
            entries.push((index, id, text));
        }
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capacity_that_is_too_small_is_shown_as_it_was_given() {
        let error = Arena::volatile("Cache", 0, 100).err().unwrap().to_string();
        assert_eq!(
            error,
            "cache.capacity: 100 B is not allowed; allowed: at least 4KiB"
        );
    }
}
