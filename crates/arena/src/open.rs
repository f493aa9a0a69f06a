//! Opening: find or make the medium, become its owner, recover what it holds.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use kvdepot_alloc::Pool;
use kvdepot_host::Condvar;
use kvdepot_host::limits;
use kvdepot_media::Mapping;
use parking_lot::Mutex;

use crate::body::{Arena, State, Table};
use crate::error::Error;
use crate::format::GRANULE;
use crate::format::layout::Layout;
use crate::format::record::COUNTER_BITS;
use crate::format::superblock::Superblock;
use crate::head::{advance, dead_superblocks, described, read_superblock, write_owner};
use crate::index::{Index, Order, Uses};
use crate::inode::Inode;
use crate::last_tier::LastTier;
use crate::make::{self, Fresh, Promised, Taken, Treatment, format, open_error, take, treatment};
use crate::medium::{self, Medium, Shared};
use crate::options::{Durability, Options};
use crate::orphans::Orphans;
use crate::owner_lock::OwnerLock;
use crate::recover::{self, Opening};
use crate::roll::Roll;
use crate::stats::Counters;
use crate::{held, size};

/// A medium that this depot owns and whose records have not been read yet.
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
    medium: Shared,
}

impl Acquired {
    /// Reads the records: the second half of [`Arena::open`].
    ///
    /// # Errors
    ///
    /// [`Error::Media`] if the medium cannot be read, [`Error::Corrupt`] if it is not valid or was
    /// removed.
    pub fn read(self) -> Result<(Arena, Opening), Error> {
        let (medium, superblock) = (self.medium, self.superblock);
        let layout = Layout {
            capacity: superblock.capacity,
            records: superblock.records,
            data: superblock.data,
        };
        let found = recover::recover(medium.as_ref(), layout, &superblock.uuid)?;
        let opening = Opening {
            created: self.created,
            ..found.opening
        };
        // Above everything in the table, also when a rotted superblock made a generation repeat
        // or its 24 bits ran out.
        let generation = (superblock.generation & 0xFF_FFFF) << COUNTER_BITS;
        let first = generation.max(found.highest.saturating_add(1));
        if layout.capacity > medium.len() {
            tracing::warn!(
                path = %self.path.display(),
                capacity = %size::show(layout.capacity),
                medium = %size::show(medium.len()),
                "arena file is truncated: blocks after its end are misses"
            );
        }
        let mut state = State::new(found.pool, layout.records as u32, first);
        state.records = found.records;
        let blocks = found.shares.iter().map(|(blocks, _)| *blocks as u32);
        state.borne = blocks.collect();
        state.live_bytes = found.shares.iter().map(|(_, bytes)| bytes).sum();
        state.roll = Roll::of(found.shares);
        (state.described, state.undescribed) = described(medium.as_ref())?;
        let table = Table {
            sized: self.sized,
            uuid: superblock.uuid,
            inode: Inode::of(&self.path).ok_or_else(|| Error::Corrupt {
                path: self.path.clone(),
                reason: "another process deleted the file during the open; open the depot again"
                    .into(),
            })?,
            path: self.path,
            fresh: Mutex::new(self.fresh),
            superblock: Mutex::new(superblock),
            lock: Mutex::new(Some(self.lock)),
            describing: Mutex::new(()),
            orphans: Orphans::default(),
        };
        let arena = Arena {
            name: self.name,
            number: self.number,
            opened: layout.on(medium.len()),
            capacity: AtomicU64::new(layout.on(medium.len()).capacity),
            leaving: AtomicBool::new(false),
            last_tier: LastTier::default(),
            durability: self.durability,
            table: Some(table),
            index: found.index,
            state: held::Mutex::new(state),
            burial: Condvar::new(),
            low: AtomicBool::new(false),
            counters: Counters::default(),
            last: OnceLock::new(),
            medium: ArcSwap::from_pointee(medium),
        };
        arena.outrank(&found.outranked);
        arena.mend(&found.damaged);
        Ok((arena, opening))
    }
}

impl Arena {
    /// Checks that [`Arena::volatile`] would accept a capacity.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if the capacity is too small or exceeds the memory that this process may
    /// use.
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
                "at most {}, the memory that this process may use",
                size::show(memory)
            )),
            _ => Ok(()),
        }
    }

    /// Creates an arena of `capacity` bytes in memory, which does not survive the process.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if the capacity is not allowed or the memory cannot be mapped.
    pub fn volatile(name: &'static str, number: u32, capacity: u64) -> Result<Arena, Error> {
        Arena::check_volatile(name, capacity)?;
        let capacity = capacity / GRANULE * GRANULE;
        let medium = Mapping::anonymous("kvdepot-cache", capacity).map_err(|error| {
            let field = format!("{}.capacity", name.to_ascii_lowercase());
            Error::config(
                field,
                size::show(capacity),
                format!("an amount of memory that the system can map (mmap failed: {error})"),
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
            medium: ArcSwap::from_pointee(Arc::new(medium) as Shared),
            opened: layout,
            capacity: AtomicU64::new(layout.capacity),
            leaving: AtomicBool::new(false),
            last_tier: LastTier::default(),
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

    /// Checks that [`Arena::open`] would accept a medium, without a change.
    ///
    /// A medium that another process owns is not examined, because it may be free by the time it is
    /// opened. Disk space that a new arena would need is added to `promised`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] for options that the medium does not allow, [`Error::Corrupt`] if it is
    /// not an arena, [`Error::Media`].
    pub fn check(
        path: &Path,
        config: &Options,
        field: &impl Fn(&str) -> String,
        promised: &mut Promised,
    ) -> Result<(), Error> {
        let medium = match medium::open(path, config.access) {
            Ok(medium) => medium,
            Err(error) if error.is_not_found() => {
                return make::check(path, config, field, promised);
            }
            Err(error) => return Err(open_error(path, error, field)),
        };
        if OwnerLock::is_taken(medium.as_ref())? {
            return Ok(());
        }
        match treatment(path, medium.as_ref(), config, field)? {
            Treatment::Open => {
                let superblock = read_superblock(path, medium.as_ref())?;
                check_capacity(&superblock, medium.as_ref(), config, path, field)
            }
            Treatment::Blank | Treatment::Lost => {
                make::layout_for(medium.as_ref(), config, field).map(drop)
            }
        }
    }

    /// Opens the arena on a device or file as its owner, and creates it if the file is missing.
    ///
    /// `named` is the name of the tier and the number of the device. `field` returns the full name
    /// of an option for errors. `lock_wait` is the maximum time to wait for another owner.
    /// Afterwards call [`Arena::rank`] to order the blocks.
    ///
    /// # Errors
    ///
    /// [`Error::Locked`] if another process owns the arena, [`Error::Config`] for options that the
    /// medium does not allow, [`Error::Corrupt`] if it is not an arena, [`Error::Media`].
    pub fn open(
        named: (&'static str, u32),
        path: &Path,
        config: &Options,
        field: &impl Fn(&str) -> String,
        lock_wait: Duration,
    ) -> Result<(Arena, Opening), Error> {
        Arena::acquire(named, path, config, field, lock_wait)?.read()
    }

    /// Takes ownership of a medium: the first half of [`Arena::open`].
    ///
    /// It may wait for another owner. Call it in the thread of the caller, so that a signal can end
    /// the wait.
    ///
    /// # Errors
    ///
    /// The errors of [`Arena::open`], and [`Error::Interrupted`] if a signal ends the wait.
    pub fn acquire(
        (name, number): (&'static str, u32),
        path: &Path,
        config: &Options,
        field: &impl Fn(&str) -> String,
        lock_wait: Duration,
    ) -> Result<Acquired, Error> {
        let Taken {
            medium,
            lock,
            created,
        } = take(path, config, lock_wait, field)?;
        let space = |capacity: u64| {
            let fail = |error| make::space_error(path, capacity, error, field);
            medium
                .opened()
                .allocate(capacity.min(medium.len()))
                .map_err(fail)
        };
        let treatment = match created {
            true => Treatment::Open,
            false => treatment(path, medium.as_ref(), config, field)?,
        };
        make_private(path, medium.as_ref(), field)?;
        let mut fresh = None;
        let superblock = if treatment == Treatment::Open {
            let superblock = read_superblock(path, medium.as_ref())?;
            // Another owner may have been faster, and has used it.
            if created && superblock.generation == 0 {
                fresh = Some(Fresh(path.into(), Arc::clone(&medium)));
            }
            superblock
        } else {
            if treatment == Treatment::Blank {
                tracing::info!(
                    path = %path.display(),
                    medium = %size::show(medium.len()),
                    "medium contains only zeros; creating a new arena"
                );
            }
            if !lock.alone(medium.as_ref()) {
                return Err(Error::config(
                    field("path"),
                    path.display(),
                    "a medium without running workers; end the workers of its last owner first",
                ));
            }
            // Before anything of the old content is gone.
            space(config.capacity.unwrap_or_else(|| medium.len()))?;
            format(
                medium.as_ref(),
                config,
                treatment == Treatment::Blank,
                field,
            )?
        };
        check_capacity(&superblock, medium.as_ref(), config, path, field)?;
        if !created {
            space(superblock.capacity)?;
        }
        for at in dead_superblocks(medium.as_ref(), &superblock)? {
            // Into the place of the one that is dead.
            tracing::warn!(path = %path.display(), at, "damaged superblock restored from the \
                                                        other copy");
        }
        let superblock = advance(medium.as_ref(), superblock)?;
        write_owner(medium.as_ref(), "")?;
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
            medium,
        })
    }

    /// Gives each block a time of use, in the order of their sequences. Call it before other
    /// threads use the arena.
    pub fn rank(&mut self, uses: &Uses) {
        self.index.rank(uses);
        self.state.get_mut().order = Order::of(&self.index);
    }
}

/// An arena, or what becomes one, is its user's alone. Kubernetes gives the files of a volume to
/// the group `fsGroup` each time that a pod starts.
fn make_private(
    path: &Path,
    medium: &dyn Medium,
    field: &impl Fn(&str) -> String,
) -> Result<(), Error> {
    let before = medium.opened().make_private();
    if let Some(before) = before.map_err(|error| open_error(path, error, field))? {
        tracing::warn!(path = %path.display(), before = format!("{before:04o}"),
            "arena file was writable by other users; mode changed to 0600 (in a pod with fsGroup, \
             set fsGroupChangePolicy: OnRootMismatch)");
    }
    Ok(())
}

fn new_pool(layout: Layout) -> Result<Pool, Error> {
    Pool::new(layout.data_len(), GRANULE)
        .map_err(|error| Error::config("capacity", size::show(layout.capacity), error.to_string()))
}

fn check_capacity(
    superblock: &Superblock,
    medium: &dyn Medium,
    config: &Options,
    path: &Path,
    field: &impl Fn(&str) -> String,
) -> Result<(), Error> {
    if superblock.data >= medium.len() {
        return Err(Error::Corrupt {
            path: path.into(),
            reason: format!(
                "the file was truncated to {}, inside the record table; set format: true to create \
                 a new arena (all content is lost)",
                size::show(medium.len())
            ),
        });
    }
    match config.capacity {
        Some(asked) if asked / GRANULE * GRANULE != superblock.capacity => Err(Error::config(
            field("capacity"),
            size::show(asked),
            format!(
                "{}, the size of the existing arena {} (omit the option, or set format: force to \
                 create a new arena; its content is lost)",
                size::show(superblock.capacity),
                path.display()
            ),
        )),
        _ => Ok(()),
    }
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
