//! Sockets that a forked child does not keep.
//!
//! A duplicate in a child keeps a connection, or a port, alive after the death of the parent:
//! whoever is at the other end waits for an answer that never comes. So the handler puts an event
//! that nobody else has in the place of each [`Unshared`] socket of the child. The number stays
//! taken: what the child drops later closes that, and not something else that got the number.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};

use rustix::event::EventfdFlags;

use super::between_forks;
use crate::{Error, Result};

/// Descriptors of a process have numbers below this one, unless the system was told otherwise.
const NUMBERS: usize = 1 << 20;

/// A bit for each number.
static SOCKETS: [AtomicU64; NUMBERS / 64] = [const { AtomicU64::new(0) }; NUMBERS / 64];
/// Words before this one have been used.
static USED: AtomicUsize = AtomicUsize::new(0);

/// What the handler does in the child: atomics and system calls alone.
pub(super) fn leave_in_child() {
    let used = USED.load(SeqCst);
    if used == 0 {
        return;
    }
    // SAFETY: a system call without pointers.
    let event = || unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    let (mut nothing, mut is_spare) = (event(), true);
    for (word, bits) in SOCKETS.iter().enumerate().take(used) {
        let mut bits = bits.swap(0, SeqCst);
        while bits != 0 {
            let number = (word * 64) as i32 + bits.trailing_zeros() as i32;
            bits &= bits - 1;
            // SAFETY: an `Unshared` of the parent has registered the number and keeps it in use
            // until it takes the bit back. Its twin in this process finds something else there.
            let replace = |by| unsafe { libc::dup3(by, number, libc::O_CLOEXEC) == number };
            if replace(nothing) {
                continue;
            }
            // SAFETY: as above.
            unsafe { libc::close(number) };
            if nothing < 0 {
                // A process that had no number left has this one now.
                nothing = event();
                is_spare = nothing != number;
                let _replaced = is_spare && replace(nothing);
            }
        }
    }
    if nothing >= 0 && is_spare {
        // SAFETY: it was opened above, and is at no number of an `Unshared`.
        unsafe { libc::close(nothing) };
    }
}

/// A socket that only this process has: a forked child does not keep it.
///
/// A duplicate is a separate descriptor. A child keeps the duplicate unless it is an `Unshared`
/// too.
#[derive(Debug)]
pub struct Unshared<T: AsFd>(T);

impl<T: AsFd> Unshared<T> {
    /// Takes the socket that `open` returns. It calls `open` again if another thread forks at the
    /// same time.
    ///
    /// # Errors
    ///
    /// The errors of `open` and of [`between_forks`]. [`Error::Input`] if the descriptor number is
    /// too large for the fork handler.
    pub fn open<E: From<Error>>(
        mut open: impl FnMut() -> std::result::Result<T, E>,
    ) -> std::result::Result<Unshared<T>, E> {
        between_forks(|| Ok(Unshared::new(open()?)?))
    }

    /// Takes a socket. Call it only within [`between_forks`].
    ///
    /// # Errors
    ///
    /// [`Error::Input`] if the descriptor number is too large for the fork handler.
    pub fn new(socket: T) -> Result<Unshared<T>> {
        let number = number(&socket);
        let bits = SOCKETS.get(number / 64).ok_or_else(|| Error::Input {
            field: "socket",
            value: number.to_string(),
            allowed: format!("numbers below {NUMBERS}"),
        })?;
        USED.fetch_max(number / 64 + 1, SeqCst);
        bits.fetch_or(1 << (number % 64), SeqCst);
        Ok(Unshared(socket))
    }

    /// Converts the socket to another type with the same descriptor.
    pub fn map<U: AsFd>(self, same: impl FnOnce(T) -> U) -> Unshared<U> {
        let this = ManuallyDrop::new(self);
        // SAFETY: what was read from is neither used nor dropped any more.
        let socket = unsafe { std::ptr::read(&raw const this.0) };
        Unshared(same(socket))
    }
}

impl Unshared<UnixStream> {
    /// Creates a connection within this process, and returns both of its ends.
    ///
    /// # Errors
    ///
    /// The error of the system, and the errors of [`Unshared::open`].
    pub fn pair() -> io::Result<(Unshared<UnixStream>, Unshared<UnixStream>)> {
        between_forks(|| {
            let (one, other) = UnixStream::pair()?;
            Ok((Unshared::new(one)?, Unshared::new(other)?))
        })
    }
}

fn number(socket: &impl AsFd) -> usize {
    usize::try_from(socket.as_fd().as_raw_fd()).unwrap_or(usize::MAX)
}

impl<T: AsFd> std::ops::Deref for Unshared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: AsFd> AsFd for Unshared<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl<T: AsFd> Drop for Unshared<T> {
    fn drop(&mut self) {
        let number = number(&self.0);
        let Some(bits) = SOCKETS.get(number / 64) else {
            return;
        };
        // A child that is forked between taking the bit back and closing would keep the socket, so
        // something else takes the number first.
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        if let Ok(nothing) = rustix::event::eventfd(0, flags) {
            // SAFETY: both numbers are open, and the second is this one's.
            unsafe { libc::dup3(nothing.as_raw_fd(), number as i32, libc::O_CLOEXEC) };
        }
        bits.fetch_and(!(1 << (number % 64)), SeqCst);
    }
}
