//! What the owner of a medium does: it keeps or lets go what it has opened, hands descriptors to
//! those who work for it, and waits for those who worked for the one before.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvdepot_alloc::Pool;
use kvdepot_host::fork::LentFd;
use kvdepot_media::{Access, Mapping};

use crate::body::{Arena, State};
use crate::error::Error;
use crate::format::GRANULE;
use crate::head::write_owner;
use crate::inode::Inode;
use crate::owner_lock::{OwnerLock, other_writers};
use crate::refused::Cause;

/// A record of a clean end of ownership, after which only workers of this depot could write the
/// medium.
#[derive(Clone, Copy, Debug)]
pub struct Parting {
    uuid: [u8; 16],
    generation: u64,
}

impl Arena {
    /// Returns the identity of its file or device; `None` for memory.
    pub fn inode(&self) -> Option<Inode> {
        self.table.as_ref().map(|table| table.inode)
    }

    /// Returns a record of the end of ownership, if workers that still have the medium have nothing
    /// to write there.
    ///
    /// Returns `None` if other processes might still write.
    pub fn parting(&self) -> Option<Parting> {
        let table = self.table.as_ref()?;
        self.orphans().is_none().then(|| Parting {
            uuid: table.uuid,
            generation: table.superblock.lock().generation,
        })
    }

    /// Returns true if this depot was the last owner of the medium and left it as `parting`
    /// describes.
    ///
    /// Its own workers then do not count as those of another owner.
    pub fn comes_back(&self, parting: &Parting) -> bool {
        let Some(table) = &self.table else {
            return false;
        };
        // Each opening begins a generation.
        let next = parting.generation + 1;
        let same = table.uuid == parting.uuid && table.superblock.lock().generation == next;
        if same && let Some(lock) = &*table.lock.lock() {
            lock.come_back(self.medium.load().as_ref().as_ref());
        }
        same
    }

    /// Keeps the file that this opening has created, also if the opening fails later.
    pub fn keep(&self) {
        if let Some(table) = &self.table
            && let Some(fresh) = table.fresh.lock().take()
        {
            fresh.keep();
        }
    }

    /// Releases ownership of the medium, so that another process can open it. The arena must not be
    /// written afterwards.
    pub fn close(&self) {
        if let Some(table) = &self.table {
            self.close_orphans();
            drop(table.fresh.lock().take());
            let _described = table.describing.lock();
            self.medium.load().unlock_writes();
            drop(table.lock.lock().take());
        }
    }

    /// Releases the medium and the index of a closed depot that is no longer used but whose
    /// namespaces still exist.
    ///
    /// Pins and reservations that end later have no effect.
    pub fn let_go(&self) {
        if self.last.set(self.stats()).is_err() {
            return;
        }
        let nothing = Mapping::anonymous("kvdepot-closed", GRANULE);
        let (Ok(nothing), Ok(pool)) = (nothing, Pool::new(GRANULE, GRANULE)) else {
            return;
        };
        self.medium.store(Arc::new(Arc::new(nothing)));
        let mut state = self.state.lock();
        let sequence = state.sequence;
        *state = State::new(pool, 0, sequence);
        self.index.let_go();
    }

    /// Writes the path of the owner's socket to the owner page.
    ///
    /// # Errors
    ///
    /// [`Error::Media`] if the page cannot be written.
    pub fn announce(&self, socket: &str) -> Result<(), Error> {
        if self.table.is_some() {
            write_owner(self.medium.load().as_ref().as_ref(), socket)
        } else {
            Ok(())
        }
    }

    /// Returns a descriptor for a process that reads or, with `write`, also writes this arena's
    /// medium.
    ///
    /// The Boolean is true if no later owner can reuse space for other blocks while that process
    /// has the descriptor.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`] if the arena is closed. [`Error::Media`], [`Error::Host`] and
    /// [`Error::Peer`] if a descriptor or its lock cannot be obtained.
    pub fn descriptor(&self, write: bool) -> Result<(LentFd, bool), Error> {
        let plain = |access| {
            let medium = self.medium.load();
            LentFd::open(|| Ok::<_, Error>(medium.opened().try_clone_fd(access)?))
        };
        match (&self.table, write) {
            (Some(table), _) => match &*table.lock.lock() {
                Some(lock) if write => lock.for_writer(self.medium.load().as_ref().as_ref()),
                // What a writer would have.
                Some(lock) => {
                    let alone = lock.alone(self.medium.load().as_ref().as_ref());
                    Ok((plain(Access::ReadOnly)?, alone))
                }
                None => Err(Error::Closed("")),
            },
            // Memory without a table has no later owner.
            (None, true) => Ok((plain(Access::ReadWrite)?, true)),
            (None, false) => Ok((plain(Access::ReadOnly)?, true)),
        }
    }
}

impl Arena {
    /// Why nothing can be written here, if processes that worked for the last owner may still
    /// write, or if it is closed.
    pub(crate) fn orphans(&self) -> Option<Cause> {
        let table = self.table.as_ref()?;
        let orphans = &table.orphans;
        if orphans.none.load(Ordering::Acquire) {
            return None;
        }
        let lock = table.lock.lock();
        let medium = self.medium.load();
        let is_alone = |lock: &OwnerLock| lock.alone(medium.as_ref().as_ref());
        if lock.as_ref().is_some_and(is_alone) {
            orphans.none.store(true, Ordering::Release);
            orphans.pids.lock().clear();
            if orphans.named.load(Ordering::Relaxed) {
                let path = table.path.display();
                tracing::info!(%path, "all workers of the previous owner have exited; writes \
                                       enabled");
            }
            return None;
        }
        orphans.noticed.store(lock.is_some(), Ordering::Relaxed);
        let pid = orphans.first.load(Ordering::Relaxed);
        Some(Cause::Orphans {
            pid: (pid > 0).then_some(pid),
        })
    }

    /// A closed arena is not written.
    pub(crate) fn close_orphans(&self) {
        if let Some(table) = &self.table {
            table.orphans.none.store(false, Ordering::Release);
        }
    }

    /// Returns true if workers of the previous owner prevent writes and have not been logged yet.
    pub fn has_unnamed_orphans(&self) -> bool {
        self.table.as_ref().is_some_and(|table| {
            let orphans = &table.orphans;
            orphans.noticed.load(Ordering::Relaxed)
                && !orphans.named.load(Ordering::Relaxed)
                && !orphans.none.load(Ordering::Relaxed)
        })
    }

    /// Logs the workers of the previous owner, once. The call inspects all processes.
    pub fn name_orphans(&self) {
        let (Some(table), Some(_)) = (&self.table, self.orphans()) else {
            return;
        };
        let found = other_writers(self.medium.load().as_ref().as_ref());
        let orphans = &table.orphans;
        let names: Vec<String> = found.iter().map(ToString::to_string).collect();
        let names = match names.is_empty() {
            true => "not visible from this process".into(),
            false => names.join(", "),
        };
        tracing::warn!(
            path = %table.path.display(),
            processes = names,
            "workers of the previous owner are still running; writes are disabled until the \
             workers exit"
        );
        let first = found.first().map_or(0, |holder| holder.pid);
        orphans.first.store(first, Ordering::Relaxed);
        *orphans.pids.lock() = found.into_iter().map(|holder| holder.pid).collect();
        orphans.named.store(true, Ordering::Relaxed);
    }

    /// Returns the process IDs of known workers of the previous owner, while they prevent writes.
    pub fn orphan_pids(&self) -> Vec<u32> {
        match (&self.table, self.orphans()) {
            (Some(table), Some(_)) => table.orphans.pids.lock().clone(),
            _ => Vec::new(),
        }
    }
}
