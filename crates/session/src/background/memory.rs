//! The bound on what snapshots have in memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_host::Condvar;
use parking_lot::Mutex;

/// Bytes that may be taken, all together.
pub(super) struct Memory {
    most: u64,
    used: Mutex<Used>,
    freed: Condvar,
}

#[derive(Default)]
struct Used {
    bytes: u64,
    /// Of them those of saves that want more, and how much each wants at a time.
    held: u64,
    wanted: Vec<u64>,
}

impl Used {
    /// Whether so many more leave room for what each save that holds some wants: else all of them
    /// might wait for each other.
    fn leaves_room(&self, bytes: u64, wanted: u64, most: u64) -> bool {
        let largest = self.wanted.iter().copied().max().unwrap_or(0).max(wanted);
        let all = self.held.saturating_add(bytes).saturating_add(largest);
        bytes <= most - self.bytes && (wanted == 0 || all <= most)
    }
}

/// Bytes that were taken; given back when dropped.
pub(super) struct Taken {
    memory: Arc<Memory>,
    bytes: u64,
    /// What else its save wants at a time; none where it wants no more.
    wanted: u64,
}

impl Memory {
    pub(super) fn new(most: u64) -> Arc<Memory> {
        Arc::new(Memory {
            most,
            used: Mutex::default(),
            freed: Condvar::new(),
        })
    }

    pub(super) fn most(&self) -> u64 {
        self.most
    }

    pub(super) fn used(&self) -> u64 {
        self.used.lock().bytes
    }

    /// So many bytes, where they are free within some time; for ever without one.
    pub(super) fn take(self: &Arc<Memory>, bytes: u64, within: Option<Duration>) -> Option<Taken> {
        self.hold(bytes, 0, within)
    }

    /// The same of bytes that are held while `wanted` more are taken again and again.
    pub(super) fn hold(
        self: &Arc<Memory>,
        bytes: u64,
        wanted: u64,
        within: Option<Duration>,
    ) -> Option<Taken> {
        let until = within.and_then(|within| Instant::now().checked_add(within));
        let mut used = self.used.lock();
        while !used.leaves_room(bytes, wanted, self.most) {
            if bytes.saturating_add(wanted) > self.most {
                return None;
            }
            let is_late = match until {
                None => {
                    self.freed.wait(&mut used);
                    false
                }
                Some(until) => self.freed.wait_until(&mut used, until).timed_out(),
            };
            if is_late && !used.leaves_room(bytes, wanted, self.most) {
                return None;
            }
        }
        used.bytes += bytes;
        if wanted > 0 {
            used.held += bytes;
            used.wanted.push(wanted);
        }
        Some(Taken {
            memory: Arc::clone(self),
            bytes,
            wanted,
        })
    }
}

impl Taken {
    /// Some of them apart from the rest, of what is not held.
    pub(super) fn split(&mut self, bytes: u64) -> Taken {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Taken {
            memory: Arc::clone(&self.memory),
            bytes,
            wanted: 0,
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut used = self.memory.used.lock();
        used.bytes -= self.bytes;
        if self.wanted > 0 {
            used.held -= self.bytes;
            let at = used.wanted.iter().position(|one| *one == self.wanted);
            at.map(|at| used.wanted.swap_remove(at));
        }
        drop(used);
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
