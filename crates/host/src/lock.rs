//! Byte-range locks that belong to an open file description.
//!
//! Each byte of a medium is a separate lock. Its content does not matter, and it may be after the
//! end of the file. The locks are advisory. They work on regular files and on character devices
//! such as `/dev/dax0.0`. An exclusive lock needs a writable descriptor, a shared one a readable
//! descriptor.
//!
//! The kernel releases the locks with the last reference to the description. A duplicate in another
//! process keeps them; a `kill -9` of the only holder releases them immediately.
//!
//! Descriptors from two `open` calls exclude each other, even within one process.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::thread;
use std::time::{Duration, Instant};

use super::{Error, Result};

/// First pause of a waiting locker. An owner that is just closing is gone within this.
const PAUSE_FIRST: Duration = Duration::from_millis(1);
/// Longest pause of a waiting locker: short against a human's patience, and twenty system calls a
/// second cost nothing.
const PAUSE_LONGEST: Duration = Duration::from_millis(50);

/// Mode of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "the kernel knows these two and no others"
)]
pub enum Kind {
    /// Any number of descriptions may hold the byte at the same time.
    Shared,
    /// One description holds the byte, and no other description has any lock on it.
    Exclusive,
}

/// Locks `byte` without waiting. Returns false if another description prevents it.
///
/// A description that already holds the byte converts its lock to `kind`.
///
/// # Errors
///
/// [`Error::Input`] for a byte above 2⁶³−1. [`Error::Os`] if the medium cannot be locked: the
/// descriptor lacks the required access, or the file system does not support locks.
pub fn try_lock(fd: impl AsFd, byte: u64, kind: Kind) -> Result<bool> {
    let lock_type = match kind {
        Kind::Shared => libc::F_RDLCK,
        Kind::Exclusive => libc::F_WRLCK,
    };
    match set(fd, byte, lock_type) {
        Ok(()) => Ok(true),
        Err(error) if error.io_kind() == Some(io::ErrorKind::WouldBlock) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Locks `byte` and waits at most for `timeout` until other descriptions release it. Returns false
/// on time-out.
///
/// There is no queue: the first attempt after a release gets the lock.
///
/// # Errors
///
/// The errors of [`try_lock`].
pub fn lock_timeout(fd: impl AsFd, byte: u64, kind: Kind, timeout: Duration) -> Result<bool> {
    let start = Instant::now();
    let mut pause = PAUSE_FIRST;
    loop {
        if try_lock(&fd, byte, kind)? {
            return Ok(true);
        }
        let left = timeout.saturating_sub(start.elapsed());
        if left.is_zero() {
            return Ok(false);
        }
        thread::sleep(pause.min(left));
        pause = (pause * 2).min(PAUSE_LONGEST);
    }
}

/// Releases `byte`. The call has no effect if this description does not hold it.
///
/// # Errors
///
/// The errors of [`try_lock`].
pub fn unlock(fd: impl AsFd, byte: u64) -> Result<()> {
    set(fd, byte, libc::F_UNLCK)
}

/// Releases every byte that this description holds.
///
/// # Errors
///
/// [`Error::Os`] if the medium cannot be locked.
pub fn unlock_all(fd: impl AsFd) -> Result<()> {
    // From the start, and without an end.
    call(fd, libc::F_OFD_SETLK, 0, 0, libc::F_UNLCK).map(drop)
}

/// Returns the mode in which *another* description holds `byte`, or `None` if it is free.
///
/// The result may be outdated when the call returns; only [`try_lock`] decides. The descriptor may
/// have any access mode.
///
/// # Errors
///
/// The errors of [`try_lock`].
pub fn held_by_other(fd: impl AsFd, byte: u64) -> Result<Option<Kind>> {
    let flock = call(fd, libc::F_OFD_GETLK, byte, 1, libc::F_WRLCK)?;
    Ok(match i32::from(flock.l_type) {
        libc::F_UNLCK => None,
        libc::F_RDLCK => Some(Kind::Shared),
        _ => Some(Kind::Exclusive),
    })
}

/// Returns true if another description holds `byte` in any mode; see [`held_by_other`].
///
/// # Errors
///
/// The errors of [`try_lock`].
pub fn is_locked(fd: impl AsFd, byte: u64) -> Result<bool> {
    Ok(held_by_other(fd, byte)?.is_some())
}

fn set(fd: impl AsFd, byte: u64, lock_type: i32) -> Result<()> {
    call(fd, libc::F_OFD_SETLK, byte, 1, lock_type).map(drop)
}

fn call(fd: impl AsFd, command: i32, byte: u64, len: i64, lock_type: i32) -> Result<libc::flock> {
    let start = i64::try_from(byte).map_err(|_| Error::Input {
        field: "byte",
        value: byte.to_string(),
        allowed: format!("0 to {}", i64::MAX),
    })?;
    let mut flock = libc::flock {
        l_type: i16::try_from(lock_type).unwrap_or(i16::MAX),
        l_whence: 0, // SEEK_SET
        l_start: start,
        l_len: len,
        l_pid: 0, // the kernel refuses anything else for this kind of lock
    };
    let raw = fd.as_fd().as_raw_fd();
    loop {
        // SAFETY: `raw` is open while `fd` is borrowed, and both commands read and write one
        // `flock` through the pointer, which is exclusive for the call.
        let result = unsafe { libc::fcntl(raw, command, &raw mut flock) };
        if result == 0 {
            return Ok(flock);
        }
        let error = Error::last_os("lock a byte of the medium");
        // Network file systems answer a lock over the wire and can be interrupted.
        if error.io_kind() != Some(io::ErrorKind::Interrupted) {
            return Err(error);
        }
    }
}
