//! For whom lanes of this process are at work, as its owner can see it (the server's `roster`): it
//! locks the byte of a client, shared, while it is at placements of that client.

use std::collections::HashMap;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use kvdepot_host::fork::LockFd;
use kvdepot_host::lock::Kind;
use parking_lot::Mutex;

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

#[cfg(test)]
impl Duty {
    pub(crate) fn is_idle(&self) -> bool {
        self.seats.lock().is_empty()
    }

    /// Lets go of every seat, as the kernel does it when the process ends.
    pub(crate) fn die(&self) {
        kvdepot_host::lock::unlock_all(self.file.fd().unwrap()).unwrap();
    }
}

impl Shift {
    pub(crate) fn seat(&self) -> u64 {
        self.seat
    }

    /// Nobody can tell when it ends: it does with the process.
    pub(crate) fn keep(mut self) {
        // The lock ends with the file: that stays open, whatever becomes of the mover.
        let _open = ManuallyDrop::new(Arc::clone(&self.duty));
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
            tracing::debug!(%error, "cannot release the slot of a worker");
        }
    }
}
