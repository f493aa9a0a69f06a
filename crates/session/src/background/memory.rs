//! The bound on what snapshots have in memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// Bytes that may be taken, all together.
pub(super) struct Memory {
    most: u64,
    used: Mutex<u64>,
    freed: Condvar,
}

/// Bytes that were taken; given back when dropped.
pub(super) struct Taken {
    memory: Arc<Memory>,
    bytes: u64,
}

impl Memory {
    pub(super) fn new(most: u64) -> Arc<Memory> {
        Arc::new(Memory {
            most,
            used: Mutex::new(0),
            freed: Condvar::new(),
        })
    }

    pub(super) fn most(&self) -> u64 {
        self.most
    }

    pub(super) fn used(&self) -> u64 {
        *self.used.lock()
    }

    /// So many bytes, where they are free within some time; for ever without one.
    pub(super) fn take(self: &Arc<Memory>, bytes: u64, within: Option<Duration>) -> Option<Taken> {
        let until = within.and_then(|within| Instant::now().checked_add(within));
        let mut used = self.used.lock();
        while bytes > self.most - *used {
            if bytes > self.most {
                return None;
            }
            let is_late = match until {
                None => {
                    self.freed.wait(&mut used);
                    false
                }
                Some(until) => self.freed.wait_until(&mut used, until).timed_out(),
            };
            if is_late && bytes > self.most - *used {
                return None;
            }
        }
        *used += bytes;
        Some(Taken {
            memory: Arc::clone(self),
            bytes,
        })
    }
}

impl Taken {
    /// Some of them apart from the rest.
    pub(super) fn split(&mut self, bytes: u64) -> Taken {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Taken {
            memory: Arc::clone(&self.memory),
            bytes,
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        *self.memory.used.lock() -= self.bytes;
        self.memory.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Option<Duration> = Some(Duration::ZERO);

    #[test]
    fn no_more_is_taken_than_there_is() {
        let memory = Memory::new(100);
        let mut most = memory.take(90, NOW).unwrap();
        assert!(memory.take(11, NOW).is_none());
        assert!(memory.take(101, None).is_none(), "it never will be free");
        let some = most.split(40);
        drop(most);
        assert_eq!(memory.used(), 40);
        let rest = memory.take(60, NOW).unwrap();
        let waiting = std::thread::spawn({
            let memory = Arc::clone(&memory);
            move || memory.take(100, None).is_some()
        });
        drop((some, rest));
        assert!(waiting.join().unwrap());
        assert_eq!(memory.used(), 0);
    }
}
