//! One connection of a lane: who may send on it, who may receive, and its end.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvdepot_host::Condvar;
use parking_lot::Mutex;

use crate::line::Line;

/// A connection that was greeted.
pub(super) struct Conn {
    line: Line,
    /// Held while something is put into the row of what flies, and sent.
    pub(super) sending: Mutex<()>,
    /// Held by who receives answers: the lane's thread, or a caller that carries its own request.
    pub(super) receiving: Mutex<()>,
    /// Something flies for the lane's thread, or has been sent, or the connection is dead. With the
    /// lane's lock.
    pub(super) arrived: Condvar,
    is_dead: AtomicBool,
    /// This side ends it, for a slice that is not to go on.
    is_given_up: AtomicBool,
    sent: AtomicU64,
    /// Which of the engines that were there one after the other it leads to.
    pub(super) target: u32,
    /// Requests that may be unanswered.
    pub(super) window: usize,
}

impl Conn {
    pub(super) fn new(line: Line, target: u32, window: usize) -> Conn {
        Conn {
            line,
            sending: Mutex::new(()),
            receiving: Mutex::new(()),
            arrived: Condvar::new(),
            is_dead: AtomicBool::new(false),
            is_given_up: AtomicBool::new(false),
            sent: AtomicU64::new(0),
            target,
            window,
        }
    }

    /// The number of the next request. Under `sending`.
    pub(super) fn next_number(&self) -> u64 {
        self.sent.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn is_dead(&self) -> bool {
        self.is_dead.load(Ordering::Acquire)
    }

    /// Notes that this side is about to end it: nothing has failed.
    pub(super) fn give_up(&self) {
        self.is_given_up.store(true, Ordering::Release);
    }

    pub(super) fn is_given_up(&self) -> bool {
        self.is_given_up.load(Ordering::Acquire)
    }

    /// Ends it: nobody waits in it any more. Its thread sees to the rest.
    pub(super) fn kill(&self) {
        self.is_dead.store(true, Ordering::Release);
        self.line.shutdown();
    }
}

impl AsFd for Conn {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.line.as_fd()
    }
}
