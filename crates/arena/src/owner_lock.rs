//! One owner, and nobody left over from the one before.
//!
//! Byte 0 of the medium is locked by the owner, byte 1 by every process that can write it (open
//! file description locks: they die with their holders, and on device DAX they work like on
//! files). A new owner serves at once, but allocates only after it has once held byte 1 alone:
//! then nobody who worked for an earlier owner can still write.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvdepot_host::fork::{LentFd, LockFd};
use kvdepot_host::holders::{self, Holder, holders};
use kvdepot_host::lock::Kind;
use kvdepot_host::{fds, lock};
use parking_lot::Mutex;

use crate::error::Error;
use crate::gate;
use crate::head::read_owner;
use crate::medium::Medium;
use crate::patience::is_interrupted;

const OWNER_BYTE: u64 = 0;
const WRITERS_BYTE: u64 = 1;

/// How long somebody may be waited for before it is looked at who it is.
const LOOK: Duration = Duration::from_millis(200);

/// The owner's hold on its medium. The locks go when the descriptors are closed, and a forked
/// child does not inherit them.
#[derive(Debug)]
pub(crate) struct OwnerLock {
    /// Of a block device: nobody mounts it meanwhile. Goes before the lock.
    pub(crate) claim: Option<LockFd>,
    /// Held for its lock alone.
    _owner: LockFd,
    writers: LockFd,
    /// Whether byte 1 was held alone since this owner opened.
    alone: AtomicBool,
    /// Twins of the descriptions that went to processes before that. They hold the writers' lock
    /// from the moment on in which there can be a reservation for them to write.
    early: Mutex<Vec<LentFd>>,
}

impl OwnerLock {
    /// Takes the owner's lock, waiting up to `wait` since `begun` for another owner to go. One in
    /// this process is waited for only while it closes: else it would be until whoever waits here
    /// has ended. A signal ends the wait within [`LOOK`].
    pub(crate) fn acquire(
        path: &Path,
        medium: &dyn Medium,
        (begun, wait): (Instant, Duration),
    ) -> Result<OwnerLock, Error> {
        // Descriptions of our own: a lock lives with its description, and these never leave
        // this process.
        let owner = LockFd::reopen(medium.opened().fd()?, false)?;
        let writers = LockFd::reopen(medium.opened().fd()?, false)?;
        let mut told = false;
        loop {
            let left = wait.saturating_sub(begun.elapsed());
            let is_ours = holders::is_held_here(owner.fd()?, OWNER_BYTE);
            let patience = match is_ours && !gate::is_any_closing() {
                true => Duration::ZERO,
                false => left.min(LOOK),
            };
            if owner.lock_timeout(OWNER_BYTE, Kind::Exclusive, patience)? {
                break;
            }
            if is_interrupted() {
                return Err(Error::Interrupted);
            }
            let name = read_owner(medium);
            if patience == LOOK {
                if !std::mem::replace(&mut told, true) {
                    let (pid, host) = name.map_or((0, String::new()), |name| (name.pid, name.host));
                    tracing::warn!(path = %path.display(), pid, host, lock_wait = ?wait,
                        "arena is in use by another process; waiting until the process closes the \
                         arena");
                }
                continue;
            }
            return Err(Error::Locked {
                path: path.into(),
                pid: name.as_ref().map_or(0, |owner| owner.pid),
                host: name.map_or_else(|| "unknown".into(), |owner| owner.host),
                lock_wait_s: wait.as_secs_f64(),
            });
        }
        Ok(OwnerLock {
            claim: None,
            _owner: owner,
            writers,
            alone: AtomicBool::new(false),
            early: Mutex::new(Vec::new()),
        })
    }

    /// Whether somebody has the owner's lock now.
    pub(crate) fn is_taken(medium: &dyn Medium) -> Result<bool, Error> {
        Ok(lock::is_locked(medium.opened().fd()?, OWNER_BYTE)?)
    }

    /// Whether nobody of an earlier owner can still write. Once true it stays true.
    pub(crate) fn alone(&self, medium: &dyn Medium) -> bool {
        if self.alone.load(Ordering::Acquire) {
            return true;
        }
        let take = |kind| matches!(self.writers.try_lock(WRITERS_BYTE, kind), Ok(true));
        // The owner writes too, so it stays among the writers.
        // Held to the end: whoever is given a description now is among these, or has the lock.
        let mut early = self.early.lock();
        let mut alone = take(Kind::Exclusive) && take(Kind::Shared);
        if alone {
            early.retain(|fd| {
                let shared = fd
                    .fd()
                    .and_then(|fd| lock::try_lock(fd, WRITERS_BYTE, Kind::Shared));
                !matches!(shared, Ok(true))
            });
            alone = early.is_empty();
        }
        if alone {
            medium.lock_writes(shared);
        }
        self.alone.fetch_or(alone, Ordering::AcqRel);
        alone
    }

    /// Takes whoever may write for a worker of this owner, which had the medium to itself before
    /// and comes back to it.
    pub(crate) fn come_back(&self, medium: &dyn Medium) {
        if matches!(self.writers.try_lock(WRITERS_BYTE, Kind::Shared), Ok(true)) {
            medium.lock_writes(shared);
            self.alone.store(true, Ordering::Release);
        }
    }

    /// A descriptor for a process that may write: its own description, already holding the
    /// writers' lock, which thereby lives exactly as long as that process keeps it. While
    /// processes of an earlier owner may still write it comes without the lock, which would keep
    /// this owner from ever finding itself alone; whether it has it is the second answer.
    pub(crate) fn for_writer(&self, medium: &dyn Medium) -> Result<(LentFd, bool), Error> {
        let fd = LentFd::open(|| Ok::<_, Error>(fds::reopen(medium.opened().fd()?, false)?))?;
        let alone = self.alone(medium);
        let mut early = self.early.lock();
        // It may have come to be alone since then.
        if !alone && !self.alone.load(Ordering::Acquire) {
            early.push(fd.try_clone()?);
            return Ok((fd, false));
        }
        drop(early);
        if !lock::lock_timeout(fd.fd()?, WRITERS_BYTE, Kind::Shared, Duration::from_secs(1))? {
            return Err(Error::Peer {
                socket: "(here)".into(),
                reason: "another process has locked the arena against new writers; attach again"
                    .into(),
            });
        }
        Ok((fd, true))
    }
}

/// Takes the writers' lock as one of them.
fn shared(fd: BorrowedFd<'_>) -> bool {
    matches!(lock::try_lock(fd, WRITERS_BYTE, Kind::Shared), Ok(true))
}

/// Who else may write to this medium, as far as they can be seen. It looks at all processes.
pub(crate) fn other_writers(medium: &dyn Medium) -> Vec<Holder> {
    let mut found = medium
        .opened()
        .fd()
        .map_or_else(|_| Vec::new(), |fd| holders(fd, WRITERS_BYTE));
    found.retain(|holder| holder.pid != std::process::id());
    found
}

/// Returns the visible workers of an earlier owner that may still write to this medium. The calling
/// process does not own the medium.
pub fn orphans_of(medium: &dyn Medium) -> Vec<Holder> {
    let Ok(fd) = medium.opened().fd() else {
        return Vec::new();
    };
    let writers = holders(fd, WRITERS_BYTE);
    // An owner that has been alone holds this lock too, and whoever else does works for it.
    let owners = holders(fd, OWNER_BYTE);
    let is_owned = writers
        .iter()
        .any(|writer| owners.iter().any(|owner| owner.pid == writer.pid));
    if is_owned { Vec::new() } else { writers }
}

#[cfg(test)]
mod tests {
    use kvdepot_media::{Access, Mapping};

    use super::*;
    use crate::clock;
    use crate::gate::Gate;

    #[test]
    fn an_owner_in_this_process_is_waited_for_only_while_something_closes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("arena");
        Mapping::create(&path, 4096).unwrap();
        let mapping = Mapping::open(&path, Access::ReadWrite).unwrap();
        let wait = (clock::now(), Duration::from_secs(20));
        let lock = OwnerLock::acquire(&path, &mapping, wait).unwrap();
        let gate = Gate::new().unwrap();
        let closing = gate.close().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(LOOK * 2);
                drop(lock);
                drop(closing);
            });
            OwnerLock::acquire(&path, &mapping, wait).unwrap();
        });
    }
}
