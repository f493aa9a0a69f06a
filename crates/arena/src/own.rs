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

/// How a depot left a medium that only its own workers could write.
#[derive(Clone, Copy, Debug)]
pub struct Parting {
    uuid: [u8; 16],
    generation: u64,
}

impl Arena {
    /// What tells its file from others.
    pub fn inode(&self) -> Option<Inode> {
        self.table.as_ref().map(|table| table.inode)
    }

    /// What is known of a medium that this depot lets go while nobody works on it: whoever of its
    /// workers still has it has nothing to write there. `None` where others might.
    pub fn parting(&self) -> Option<Parting> {
        let table = self.table.as_ref()?;
        self.orphans().is_none().then(|| Parting {
            uuid: table.uuid,
            generation: table.superblock.lock().generation,
        })
    }

    /// Whether this depot was the last that had this medium, which it left so; its workers do not
    /// count as another's then.
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
            let _described = table.describing.lock();
            self.medium.load().unlock_writes();
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
        self.medium.store(Arc::new(Arc::new(nothing)));
        let mut state = self.state.lock();
        let sequence = state.sequence;
        *state = State::new(pool, 0, sequence);
        self.index.let_go();
    }

    /// Says in the owner page where the owner's socket is.
    pub fn announce(&self, socket: &str) -> Result<(), Error> {
        if self.table.is_some() {
            write_owner(self.medium.load().as_ref().as_ref(), socket)
        } else {
            Ok(())
        }
    }

    /// A descriptor for a process that reads or writes this arena's medium, and whether no later
    /// owner gives room to other blocks while that process has it.
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
                tracing::info!(%path, "nobody works for its previous owner any more");
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

    /// Whether there are orphans that nobody has been told of.
    pub fn has_unnamed_orphans(&self) -> bool {
        self.table.as_ref().is_some_and(|table| {
            let orphans = &table.orphans;
            orphans.noticed.load(Ordering::Relaxed)
                && !orphans.named.load(Ordering::Relaxed)
                && !orphans.none.load(Ordering::Relaxed)
        })
    }

    /// Names them in the log, once. It looks at all processes.
    pub fn name_orphans(&self) {
        let (Some(table), Some(_)) = (&self.table, self.orphans()) else {
            return;
        };
        let found = other_writers(self.medium.load().as_ref().as_ref());
        let orphans = &table.orphans;
        let names: Vec<String> = found.iter().map(ToString::to_string).collect();
        let names = match names.is_empty() {
            true => "not visible from here".into(),
            false => names.join(", "),
        };
        tracing::warn!(
            path = %table.path.display(),
            processes = names,
            "processes that worked for its previous owner may still write to it: nothing is \
             stored there before they have ended"
        );
        let first = found.first().map_or(0, |holder| holder.pid);
        orphans.first.store(first, Ordering::Relaxed);
        *orphans.pids.lock() = found.into_iter().map(|holder| holder.pid).collect();
        orphans.named.store(true, Ordering::Relaxed);
    }

    /// Those that are known, while they keep it from being written.
    pub fn orphan_pids(&self) -> Vec<u32> {
        match (&self.table, self.orphans()) {
            (Some(table), Some(_)) => table.orphans.pids.lock().clone(),
            _ => Vec::new(),
        }
    }
}
