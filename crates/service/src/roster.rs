//! Whom movers work for: what a client held outlives it for as long as a mover is still at it.
//!
//! One byte of a memory file for each client, its *seat*. A mover locks the byte, shared, while
//! its lanes are at placements of that client; the owner locks it exclusively, and for good,
//! before it gives back what a client that is gone has held. A mover that is told late, by a
//! message that outlived its sender, is refused; one that dies lets go by the kernel's hand
//! ([`lock`](kvdepot_host::lock)).

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvdepot_arena::Error;
use kvdepot_host::fds;
use kvdepot_host::fork::LockFd;
use kvdepot_host::lock::Kind;
use parking_lot::Mutex;

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
    pub(crate) fn descriptor(&self) -> Result<OwnedFd, Error> {
        Ok(fds::reopen(self.file.fd()?, true)?)
    }

    /// Once true, no mover is at a placement of this seat, nor ever will be. False when some are
    /// still after `timeout`.
    pub(crate) fn close(&self, seat: u64, timeout: Duration) -> Result<bool, Error> {
        Ok(self.file.lock_timeout(seat, Kind::Exclusive, timeout)?)
    }
}

/// A mover's end.
pub(crate) struct Duty {
    file: LockFd,
    /// Batches at each seat's placements, by the seat: the lock is one for all of them.
    seats: Mutex<HashMap<u64, usize>>,
}

/// Placements of one seat are in use until this is dropped.
pub(crate) struct Shift {
    duty: Arc<Duty>,
    seat: u64,
    kept: bool,
}

impl Duty {
    pub(crate) fn new(file: LockFd) -> Arc<Duty> {
        Arc::new(Duty {
            file,
            seats: Mutex::new(HashMap::new()),
        })
    }

    /// Before the first byte of a seat's placement is touched; `None` when its client is gone.
    pub(crate) fn begin(self: &Arc<Duty>, seat: u64) -> Option<Shift> {
        let mut seats = self.seats.lock();
        let count = seats.entry(seat).or_insert(0);
        if *count == 0 {
            let locked = self.file.try_lock(seat, Kind::Shared);
            if !locked.unwrap_or(false) {
                seats.remove(&seat);
                return None;
            }
        }
        *count += 1;
        Some(Shift {
            duty: Arc::clone(self),
            seat,
            kept: false,
        })
    }
}

impl Shift {
    pub(crate) fn seat(&self) -> u64 {
        self.seat
    }

    /// Nobody can tell when it ends: it does with the process.
    pub(crate) fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Shift {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        let mut seats = self.duty.seats.lock();
        let Some(count) = seats.get_mut(&self.seat) else {
            return;
        };
        *count -= 1;
        if *count > 0 {
            return;
        }
        seats.remove(&self.seat);
        if let Err(error) = self.duty.file.unlock(self.seat) {
            // In a forked child, which holds nothing.
            tracing::debug!(%error, "a seat could not be left");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(one.seats.lock().is_empty());
    }

    #[test]
    fn a_mover_that_is_gone_is_at_nothing() {
        let roster = Roster::new().unwrap();
        let (gone, seat) = (duty(&roster), roster.seat());
        gone.begin(seat).unwrap().keep();
        assert!(!roster.close(seat, Duration::ZERO).unwrap());
        // As the kernel does it when the process ends.
        kvdepot_host::lock::unlock_all(gone.file.fd().unwrap()).unwrap();
        assert!(roster.close(seat, Duration::ZERO).unwrap());
    }
}
