//! Opening: find or make the medium, become its owner, recover what it holds.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use arc_swap::ArcSwap;
use kvdepot_alloc::Pool;
use kvdepot_media::host::fork::LentFd;
use kvdepot_media::host::{dirs, peer};
use kvdepot_media::{Access, Flush, Mapping};
use parking_lot::{Condvar, Mutex};

use super::create::{format, path_error};
use super::new::{Treatment, treatment};
use super::orphans::Orphans;
use super::owner_lock::OwnerLock;
use super::recover::Opening;
use super::roll::Roll;
use super::{Arena, Counters, Inode, State, Table, create, publish, recover};
use crate::Error;
use crate::config::{DaxConfig, Durability, size};
use crate::format::layout::{self, Layout};
use crate::format::superblock::{self, Refusal, Superblock};
use crate::format::{GRANULE, directory, owner};
use crate::held;
use crate::index::{Entries, KeyMap, Namespaces, Uses};

impl Arena {
    /// An arena in memory that dies with the process.
    pub(crate) fn volatile(name: &'static str, number: u32, capacity: u64) -> Result<Arena, Error> {
        if capacity < GRANULE {
            return Err(Error::config(
                format!("{}.capacity", name.to_ascii_lowercase()),
                size::show(capacity),
                "at least 4KiB",
            ));
        }
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
            state: held::Mutex::new(State::new(number, pool, layout.records as u32, 0)),
            burial: Condvar::new(),
            low: AtomicBool::new(false),
            counters: Counters::default(),
        })
    }

    /// Opens the arena on a device or file as its owner, making it when the file is missing.
    /// `field` names an option in errors.
    pub(crate) fn open(
        (name, number): (&'static str, u32),
        path: &Path,
        config: &DaxConfig,
        field: &impl Fn(&str) -> String,
        lock_wait: Duration,
        uses: &Uses,
    ) -> Result<(Arena, Opening), Error> {
        let mut created = false;
        let mapping = loop {
            match Mapping::open(path, Access::ReadWrite) {
                Ok(mapping) => break mapping,
                Err(error) if error.is_not_found() => {
                    created = create::create(path, config, lock_wait, field)?;
                }
                Err(error) => return Err(path_error(path, error, field)),
            }
        };
        let lock = OwnerLock::acquire(path, &mapping, lock_wait)?;
        let space = |capacity: u64| {
            let fail = |error| create::space_error(path, capacity, error, field);
            mapping.allocate(capacity.min(mapping.len())).map_err(fail)
        };
        let treatment = match created {
            true => Treatment::Open,
            false => treatment(path, &mapping, config, field)?,
        };
        let superblock = if treatment == Treatment::Open {
            read_superblock(path, &mapping)?
        } else {
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
        let superblock = advance(&mapping, superblock)?;
        write_owner(&mapping, "")?;
        let layout = Layout {
            capacity: superblock.capacity,
            records: superblock.records,
            data: superblock.data,
        };
        let found = recover::recover(&mapping, layout, &superblock.uuid, uses)?;
        let opening = Opening {
            created: created || treatment != Treatment::Open,
            ..found.opening
        };
        // Above everything in the table, also when a rotted superblock made a generation repeat
        // or its 24 bits ran out.
        let generation = (superblock.generation & 0xFF_FFFF) << publish::COUNTER_BITS;
        let first = generation.max(found.highest.saturating_add(1));
        if layout.capacity > mapping.len() {
            tracing::warn!(
                path = %path.display(),
                capacity = %size::show(layout.capacity),
                medium = %size::show(mapping.len()),
                "the arena was truncated: blocks beyond its end are misses"
            );
        }
        let mut state = State::new(number, found.pool, layout.records as u32, first);
        state.adopt(
            found.entries,
            found.live,
            found.namespaces,
            found.live_bytes,
        );
        (state.described, state.undescribed) = described(&mapping)?;
        let arena = Arena {
            name,
            number,
            opened: layout.on(mapping.len()),
            capacity: AtomicU64::new(layout.on(mapping.len()).capacity),
            leaving: AtomicBool::new(false),
            durability: config.durability,
            table: Some(Table {
                path: path.into(),
                uuid: superblock.uuid,
                inode: Inode::of(path).ok_or_else(|| Error::Corrupt {
                    path: path.into(),
                    reason: "it was removed while it was being opened".into(),
                })?,
                superblock: Mutex::new(superblock),
                lock: Mutex::new(Some(lock)),
                orphans: Orphans::default(),
            }),
            state: held::Mutex::new(state),
            burial: Condvar::new(),
            low: AtomicBool::new(false),
            counters: Counters::default(),
            mapping: ArcSwap::new(mapping),
        };
        arena.outrank(&found.outranked);
        Ok((arena, opening))
    }

    /// Lets the next owner in. Nothing may be written afterwards.
    pub(crate) fn close(&self) {
        if let Some(table) = &self.table {
            self.close_orphans();
            drop(table.lock.lock().take());
        }
    }

    /// Says in the owner page where the owner's socket is.
    pub(crate) fn announce(&self, socket: &str) -> Result<(), Error> {
        if self.table.is_some() {
            write_owner(&self.mapping.load(), socket)
        } else {
            Ok(())
        }
    }

    /// A descriptor for a process that reads or writes this arena's medium, and whether no later
    /// owner gives room to other blocks while that process has it.
    pub(crate) fn descriptor(&self, write: bool) -> Result<(LentFd, bool), Error> {
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
    fn new(device: u32, pool: Pool, slots: u32, sequence: u64) -> State {
        State {
            device,
            pool,
            entries: Entries::new(slots),
            live: KeyMap::with_capacity(0),
            reserved: KeyMap::with_capacity(0),
            namespaces: Namespaces::default(),
            sequence,
            live_bytes: 0,
            pinned: 0,
            lingering: HashSet::new(),
            burials: 0,
            buried: 0,
            set_aside: 0,
            pressed: false,
            lost: Vec::new(),
            losses: 0,
            described: HashSet::new(),
            undescribed: Vec::new(),
            contiguous: HashSet::new(),
            roll: Roll::default(),
        }
    }

    fn adopt(&mut self, entries: Entries, live: KeyMap, namespaces: Namespaces, live_bytes: u64) {
        self.entries = entries;
        self.live = live;
        self.namespaces = namespaces;
        self.live_bytes = live_bytes;
    }
}

fn new_pool(layout: Layout) -> Result<Pool, Error> {
    Pool::new(layout.data_len(), GRANULE)
        .map_err(|error| Error::config("capacity", size::show(layout.capacity), error.to_string()))
}

/// The default arena: in the user's cache directory, one an instance.
pub(crate) fn default_path(instance: Option<&str>) -> Result<PathBuf, Error> {
    let name = match instance {
        None => "arena.kvd".to_owned(),
        Some(instance) => format!("arena-{instance}.kvd"),
    };
    Ok(dirs::cache_dir()?.join(name))
}

pub(super) fn read_page(mapping: &Mapping, offset: u64) -> Result<[u8; superblock::LEN], Error> {
    let mut page = [0; superblock::LEN];
    mapping.read_into(offset, &mut page)?;
    Ok(page)
}

/// The newer of the two superblocks that verify.
pub(crate) fn read_superblock(path: &Path, mapping: &Mapping) -> Result<Superblock, Error> {
    let corrupt = |reason: String| Error::Corrupt {
        path: path.into(),
        reason,
    };
    if mapping.len() < layout::CAPACITY_MIN {
        return Err(corrupt(format!(
            "{} is too small for an arena, which needs {}; name another path",
            size::show(mapping.len()),
            size::show(layout::CAPACITY_MIN)
        )));
    }
    let copies = [0, layout::SUPERBLOCK_B]
        .map(|offset| read_page(mapping, offset).map(|page| Superblock::decode(&page)));
    let [a, b] = copies;
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

fn check_capacity(
    superblock: &Superblock,
    mapping: &Mapping,
    config: &DaxConfig,
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
pub(super) fn advance(mapping: &Mapping, superblock: Superblock) -> Result<Superblock, Error> {
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
pub(crate) fn read_directory(
    mapping: &Mapping,
) -> Result<Vec<(u64, crate::NamespaceId, String)>, Error> {
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
        assert_eq!(error, "cache.capacity: 100 B is not allowed: at least 4KiB");
    }
}
