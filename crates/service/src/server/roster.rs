//! Whom movers work for: what a client held outlives it for as long as a mover is still at it.
//!
//! One byte of a memory file for each client, its *seat*. A mover locks the byte, shared, while
//! its lanes are at placements of that client; the owner locks it exclusively, and for good,
//! before it gives back what a client that is gone has held. A mover that is told late, by a
//! message that outlived its sender, is refused; one that dies lets go by the kernel's hand
//! ([`lock`](kvdepot_host::lock)).

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvdepot_arena::Error;
use kvdepot_host::fds;
use kvdepot_host::fork::{LentFd, LockFd};
use kvdepot_host::lock::Kind;

/// The owner's end.
pub(crate) struct Roster {
    file: LockFd,
    next: AtomicU64,
}

impl Roster {
    pub(crate) fn new() -> Result<Roster, Error> {
        Ok(Roster {
            file: LockFd::open(|| fds::memory_file("kvdepot-roster"))?,
            next: AtomicU64::new(1),
        })
    }

    /// A seat that nobody had before. They follow each other, so that the kernel keeps those that
    /// are closed as one range.
    pub(crate) fn seat(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// For one mover: the locks of a description are those of whoever has it.
    pub(crate) fn descriptor(&self) -> Result<LentFd, Error> {
        LentFd::open(|| Ok(fds::reopen(self.file.fd()?, true)?))
    }

    /// Once true, no mover is at a placement of this seat, nor ever will be. False when some are
    /// still after `timeout`.
    pub(crate) fn close(&self, seat: u64, timeout: Duration) -> Result<bool, Error> {
        Ok(self.file.lock_timeout(seat, Kind::Exclusive, timeout)?)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::mover::duty::Duty;

    fn duty(roster: &Roster) -> Arc<Duty> {
        Duty::new(LockFd::open(|| fds::reopen(roster.file.fd()?, true)).unwrap())
    }

    #[test]
    fn a_seat_is_closed_when_the_last_batch_has_left_it() {
        let roster = Roster::new().unwrap();
        let (one, other) = (duty(&roster), duty(&roster));
        let (seat, neighbour) = (roster.seat(), roster.seat());
        let now = Duration::ZERO;
        let shifts = [one.begin(seat), one.begin(seat), other.begin(seat)];
        assert!(roster.close(neighbour, now).unwrap());
        for shift in shifts {
            assert!(!roster.close(seat, now).unwrap());
            assert!(shift.is_some());
        }
        assert!(roster.close(seat, now).unwrap());
        assert!(one.begin(seat).is_none() && other.begin(neighbour).is_none());
        assert!(one.begin(roster.seat()).is_some());
        assert!(one.is_idle());
    }

    #[test]
    fn what_is_kept_outlives_the_mover() {
        let roster = Roster::new().unwrap();
        let (mover, seat) = (duty(&roster), roster.seat());
        mover.begin(seat).unwrap().keep();
        drop(mover);
        assert!(!roster.close(seat, Duration::ZERO).unwrap());
    }

    #[test]
    fn a_mover_that_is_gone_is_at_nothing() {
        let roster = Roster::new().unwrap();
        let (gone, seat) = (duty(&roster), roster.seat());
        gone.begin(seat).unwrap().keep();
        assert!(!roster.close(seat, Duration::ZERO).unwrap());
        // As the kernel does it when the process ends.
        gone.die();
        assert!(roster.close(seat, Duration::ZERO).unwrap());
    }
}
