//! Fork safety: a forked child owns nothing.
//!
//! After `fork` the child has a duplicate of every descriptor. Each duplicate would keep a lock
//! alive after the death of the parent that holds the lock. Therefore descriptors that carry locks
//! are kept as [`LockFd`]. A handler that the C library runs in the child closes the child's
//! duplicates immediately and leaves the parent's locks unchanged.
//!
//! Sockets are kept as [`Unshared`], so that the peer can detect the death of the parent. The
//! handler also advances the [`epoch`] of the process. Objects that were opened before the fork can
//! compare it and return an error in the child.
//!
//! The handler runs while another thread may be stopped at any point. Therefore it uses only atomic
//! integers and system calls. Code that runs before the fork does not wait for a lock either. Two
//! races remain, because another thread may open and close descriptors during the fork, and because
//! the kernel copies descriptors and memory at different moments:
//!
//! * *Opened but not yet registered.* [`LockFd::open`] counts forks before and after, and opens a
//!   new description if a fork was in progress. The child may keep a description that never carries
//!   a lock.
//! * *Closed or unregistered in one copy but not in the other.* Dropping first releases the locks,
//!   with a call that applies to all duplicates. The child may keep a description without locks.
//!
//! The handlers of the C library do not run for a bare `clone` system call, nor between
//! `posix_spawn` (or `vfork`) and its `exec`, which closes the descriptors. These two cases are not
//! covered.

mod sockets;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::{DupFlags, Errno, FdFlags};

use super::{Error, Result};
use crate::lock::{self, Kind};
pub use sockets::Unshared;

/// Maximum number of lock descriptors in a process. A process opens one or two per arena, and the
/// handler visits every slot.
pub const LOCK_FDS_MAX: usize = 1024;

/// How long to wait for a moment without a fork. One fork takes milliseconds, or some hundreds of
/// them when the process has much memory mapped.
const QUIET_WAIT: Duration = Duration::from_secs(10);

/// A slot of the registry that holds no descriptor.
const FREE: i32 = -1;

static LOCK_FDS: [AtomicI32; LOCK_FDS_MAX] = [const { AtomicI32::new(FREE) }; LOCK_FDS_MAX];
static EPOCH: AtomicU64 = AtomicU64::new(0);
/// Forks of this process that have begun, and of those the ones that are over.
static FORKS_BEGUN: AtomicU64 = AtomicU64::new(0);
static FORKS_ENDED: AtomicU64 = AtomicU64::new(0);

extern "C" fn before_fork() {
    FORKS_BEGUN.fetch_add(1, SeqCst);
}

/// Runs in the parent, also when the fork failed.
extern "C" fn after_fork_in_parent() {
    FORKS_ENDED.fetch_add(1, SeqCst);
}

extern "C" fn after_fork_in_child() {
    for slot in &LOCK_FDS {
        let fd = slot.swap(FREE, SeqCst);
        if fd != FREE {
            // SAFETY: the number was registered by a `LockFd` or `LentFd` of the parent, which
            // keeps it in use until the slot is free again; its twin in this process sees the
            // changed epoch and never touches the number any more.
            unsafe { libc::close(fd) };
        }
    }
    sockets::leave_in_child();
    EPOCH.fetch_add(1, SeqCst);
    // Forks that other threads of the parent were in the middle of are none of this process.
    FORKS_ENDED.store(FORKS_BEGUN.load(SeqCst), SeqCst);
}

/// Returns a number that differs between a process and the processes from which it was forked.
///
/// The number changes only after [`install`] was called.
#[must_use]
pub fn epoch() -> u64 {
    EPOCH.load(SeqCst)
}

/// Installs the fork handlers, which run at every later fork. Later calls are cheap.
///
/// # Errors
///
/// [`Error::Os`] if the system is out of memory.
pub fn install() -> Result<()> {
    // No lock: another thread may fork while this one holds it, and the child would wait for it for
    // ever. Handlers that two threads install at once run twice, which changes nothing.
    static INSTALLED: AtomicBool = AtomicBool::new(false);
    if INSTALLED.load(SeqCst) {
        return Ok(());
    }
    let (before, in_parent) = (
        Some(before_fork as Handler),
        Some(after_fork_in_parent as Handler),
    );
    // SAFETY: they use atomics and system calls, and do not unwind.
    unsafe { at_fork(before, in_parent, after_fork_in_child) }?;
    INSTALLED.store(true, SeqCst);
    Ok(())
}

/// A function that the C library calls at a fork.
pub type Handler = unsafe extern "C" fn();

/// Registers functions that the C library calls at every later fork.
///
/// # Safety
///
/// The functions use only atomics and calls that a signal handler may make, and they do not unwind.
///
/// # Errors
///
/// [`Error::Os`] if the system is out of memory.
pub unsafe fn at_fork(
    before: Option<Handler>,
    after_in_parent: Option<Handler>,
    after_in_child: Handler,
) -> Result<()> {
    if cfg!(miri) {
        return Ok(()); // Has no processes.
    }
    // SAFETY: functions live as long as the code, and these are made for this as promised.
    let code = unsafe { libc::pthread_atfork(before, after_in_parent, Some(after_in_child)) };
    match code {
        0 => Ok(()),
        code => Err(Error::os("install the fork handlers")(
            Errno::from_raw_os_error(code),
        )),
    }
}

/// The process that created an object, distinguished from processes that were forked from it.
///
/// A process ID does not suffice: a child can get the ID of its parent after the parent's death, or
/// in a PID namespace of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    epoch: u64,
}

impl Origin {
    /// Returns the calling process.
    ///
    /// # Errors
    ///
    /// The errors of [`install`].
    pub fn here() -> Result<Origin> {
        install()?;
        Ok(Origin { epoch: epoch() })
    }

    /// Returns true in the process that created the value, and false in its forked children.
    #[must_use]
    pub fn is_here(self) -> bool {
        self.epoch == epoch()
    }
}

/// Calls `open` until one call completes without a fork by another thread.
///
/// `open` opens or receives descriptors and registers them. Any later child then finds them
/// registered.
///
/// # Errors
///
/// The errors of `open`. [`Error::Os`] if other threads fork without a pause for ten seconds.
pub fn between_forks<T, E: From<Error>>(
    mut open: impl FnMut() -> std::result::Result<T, E>,
) -> std::result::Result<T, E> {
    install()?;
    let start = Instant::now();
    while start.elapsed() < QUIET_WAIT {
        let begun = FORKS_BEGUN.load(SeqCst);
        if FORKS_ENDED.load(SeqCst) != begun {
            thread::sleep(Duration::from_millis(1));
            continue;
        }
        let opened = open()?;
        // A fork that begins after this reading copies the registered slots.
        if FORKS_BEGUN.load(SeqCst) == begun {
            return Ok(opened);
        }
    }
    Err(Error::os("open a lock descriptor between two forks")(Errno::TIMEDOUT).into())
}

/// Sees to it that the child of a fork closes a descriptor.
fn register(fd: &OwnedFd) -> Result<&'static AtomicI32> {
    rustix::io::fcntl_setfd(fd, FdFlags::CLOEXEC)
        .map_err(Error::os("close a descriptor on exec"))?;
    let raw = fd.as_raw_fd();
    let claimed = LOCK_FDS
        .iter()
        .find(|slot| slot.compare_exchange(FREE, raw, SeqCst, SeqCst).is_ok());
    claimed.ok_or_else(|| Error::Input {
        field: "lock descriptors",
        value: (LOCK_FDS_MAX + 1).to_string(),
        allowed: format!("at most {LOCK_FDS_MAX} per process"),
    })
}

/// A descriptor that belongs to another process, together with the locks on its description.
///
/// A forked child keeps no duplicate, which would keep the locks alive. Dropping the value closes
/// the descriptor and leaves the locks unchanged.
#[derive(Debug)]
pub struct LentFd {
    /// `None` only while dropping.
    fd: Option<OwnedFd>,
    slot: &'static AtomicI32,
    epoch: u64,
}

impl LentFd {
    /// Takes the descriptor that `open` returns. It calls `open` again if another thread forks at
    /// the same time.
    ///
    /// # Errors
    ///
    /// The errors of `open` and of [`between_forks`]. [`Error::Input`] for more than
    /// [`LOCK_FDS_MAX`] descriptors.
    pub fn open<E: From<Error>>(
        mut open: impl FnMut() -> std::result::Result<OwnedFd, E>,
    ) -> std::result::Result<LentFd, E> {
        between_forks(|| {
            let fd = open()?;
            let slot = register(&fd)?;
            Ok(LentFd {
                fd: Some(fd),
                slot,
                epoch: epoch(),
            })
        })
    }

    /// Returns another descriptor of the same description.
    ///
    /// # Errors
    ///
    /// The errors of [`LentFd::open`], and [`Error::Forked`] in a forked child.
    pub fn try_clone(&self) -> Result<LentFd> {
        let twin = |fd: BorrowedFd<'_>| fd.try_clone_to_owned();
        let failed = |error: io::Error| {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            Error::os("duplicate a descriptor")(errno)
        };
        LentFd::open(|| twin(self.fd()?).map_err(failed))
    }

    /// Returns the descriptor.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`] in a forked child.
    pub fn fd(&self) -> Result<BorrowedFd<'_>> {
        match &self.fd {
            Some(fd) if self.epoch == epoch() => Ok(fd.as_fd()),
            _ => Err(Error::Forked),
        }
    }
}

impl Drop for LentFd {
    fn drop(&mut self) {
        let Some(mut fd) = self.fd.take() else { return };
        if self.epoch != epoch() {
            // As for a `LockFd`.
            let _closed = fd.into_raw_fd();
            return;
        }
        // A child that is forked between giving the slot back and closing would keep the
        // description, so something without locks takes the number first.
        if let Ok(nothing) = std::fs::File::open("/dev/null") {
            let _replaced = rustix::io::dup3(&nothing, &mut fd, DupFlags::CLOEXEC);
        }
        self.slot.store(FREE, SeqCst);
    }
}

/// A descriptor for locks that a forked child does not inherit.
///
/// Its description must not be mapped, sent or duplicated (see [`host`](super)). The exception is a
/// description that was received with a lock on it. That lock then lasts as long as this value and
/// all mappings made from it.
///
/// Dropping the value releases all locks of the description immediately and closes the descriptor.
/// In a forked child every method fails with [`Error::Forked`], and dropping has no effect.
#[derive(Debug)]
pub struct LockFd {
    /// `None` only while dropping.
    fd: Option<OwnedFd>,
    slot: &'static AtomicI32,
    epoch: u64,
}

impl LockFd {
    /// Takes the descriptor that `open` returns, which must have a new description at each call.
    ///
    /// It calls `open` again if another thread forks at the same time.
    ///
    /// # Errors
    ///
    /// The errors of `open`, of [`LockFd::adopt`] and of [`between_forks`].
    pub fn open(mut open: impl FnMut() -> Result<OwnedFd>) -> Result<LockFd> {
        between_forks(|| LockFd::adopt(open()?))
    }

    /// Opens a separate description for the file or device of `fd` (see
    /// [`reopen`](crate::fds::reopen)).
    ///
    /// # Errors
    ///
    /// The errors of [`reopen`](crate::fds::reopen) and of [`LockFd::open`].
    pub fn reopen(fd: impl AsFd, read_only: bool) -> Result<LockFd> {
        LockFd::open(|| crate::fds::reopen(&fd, read_only))
    }

    /// Takes a descriptor. Call it only within [`between_forks`].
    ///
    /// # Errors
    ///
    /// [`Error::Input`] for more than [`LOCK_FDS_MAX`] descriptors.
    pub fn adopt(fd: OwnedFd) -> Result<LockFd> {
        let slot = register(&fd)?;
        Ok(LockFd {
            fd: Some(fd),
            slot,
            epoch: epoch(),
        })
    }

    /// Returns the descriptor.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`] in a forked child, as for all methods below.
    pub fn fd(&self) -> Result<BorrowedFd<'_>> {
        match &self.fd {
            Some(fd) if self.epoch == epoch() => Ok(fd.as_fd()),
            _ => Err(Error::Forked),
        }
    }

    /// Locks `byte` without waiting; see [`lock::try_lock`].
    ///
    /// # Errors
    ///
    /// [`Error::Forked`], or the errors of [`lock::try_lock`].
    pub fn try_lock(&self, byte: u64, kind: Kind) -> Result<bool> {
        lock::try_lock(self.fd()?, byte, kind)
    }

    /// Locks `byte`, waiting at most for `timeout`; see [`lock::lock_timeout`].
    ///
    /// # Errors
    ///
    /// [`Error::Forked`], or the errors of [`lock::try_lock`].
    pub fn lock_timeout(&self, byte: u64, kind: Kind, timeout: Duration) -> Result<bool> {
        lock::lock_timeout(self.fd()?, byte, kind, timeout)
    }

    /// Releases `byte`; see [`lock::unlock`].
    ///
    /// # Errors
    ///
    /// [`Error::Forked`], or the errors of [`lock::try_lock`].
    pub fn unlock(&self, byte: u64) -> Result<()> {
        lock::unlock(self.fd()?, byte)
    }

    /// Returns the lock that another description has on `byte`; see [`lock::held_by_other`].
    ///
    /// # Errors
    ///
    /// [`Error::Forked`], or the errors of [`lock::try_lock`].
    pub fn held_by_other(&self, byte: u64) -> Result<Option<Kind>> {
        lock::held_by_other(self.fd()?, byte)
    }

    /// Returns true if another description has a lock on `byte`; see [`lock::is_locked`].
    ///
    /// # Errors
    ///
    /// [`Error::Forked`], or the errors of [`lock::try_lock`].
    pub fn is_locked(&self, byte: u64) -> Result<bool> {
        lock::is_locked(self.fd()?, byte)
    }
}

impl Drop for LockFd {
    fn drop(&mut self) {
        let Some(fd) = self.fd.take() else { return };
        if self.epoch != epoch() {
            // The handler has closed the number, and it may stand for something else by now.
            let _closed = fd.into_raw_fd();
            return;
        }
        // Explicitly, not by the close below: a child whose handler has not run yet, or that is
        // about to execute another program, has a duplicate. Should it fail, the last close
        // releases the locks all the same.
        let _released = lock::unlock_all(&fd);
        // Before the number can be reused.
        self.slot.store(FREE, SeqCst);
    }
}
