//! Processes that worked for an owner that is gone: while one of them may still write, nothing is
//! stored on the medium. A stopped one can hold that up for as long as it likes, so somebody says
//! who it is: once in the log, and in statistics and errors for as long as it lasts.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use parking_lot::Mutex;

use crate::arena::Arena;
use crate::owner_lock::other_writers;
use crate::reserve::Cause;

#[derive(Default)]
pub(crate) struct Orphans {
    /// Whether there are none, for good.
    none: AtomicBool,
    /// Whether somebody was kept from writing.
    noticed: AtomicBool,
    /// Whether the log has named them.
    named: AtomicBool,
    /// One of them; 0 as long as none is known.
    first: AtomicU32,
    pids: Mutex<Vec<u32>>,
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
        if lock
            .as_ref()
            .is_some_and(crate::owner_lock::OwnerLock::alone)
        {
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
        let found = other_writers(&self.mapping());
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
