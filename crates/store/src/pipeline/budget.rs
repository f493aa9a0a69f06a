//! How many bytes may wait in the near tier for the far one, and whose they are.
//!
//! A put of this process moves on by itself: its lanes copy, the background thread writes on. One
//! of a client may stop on its way, for as long as that process is stopped. So a client gets no
//! more than is left for everybody else together, and whatever clients stop, some of the queue
//! remains: half of it behind one of them, a third behind two. The first block of a client is let
//! in as anybody's, so that the tier which a block goes to does not depend on who puts it.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

/// The budget of a depot's write-back queue. Its lock is taken last, and nothing is done under it.
pub(crate) struct Budget {
    depth: u64,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    all: u64,
    /// By seat; the owner's own process has seat 0, and no entry.
    clients: HashMap<u64, u64>,
}

/// Bytes of the budget: from the admission of a block until the far tier has it, or will not.
/// Given back when it is dropped.
#[must_use = "dropped, it is given back"]
pub(super) struct Share {
    budget: Arc<Budget>,
    seat: u64,
    bytes: u64,
}

impl Budget {
    /// With room for `depth` bytes.
    pub(crate) fn new(depth: u64) -> Arc<Budget> {
        Arc::new(Budget {
            depth,
            held: Mutex::default(),
        })
    }

    /// Most bytes that wait.
    pub(super) fn depth(&self) -> u64 {
        self.depth
    }

    /// Room for a block, where the queue is not full, nor the caller's part of it.
    pub(super) fn admit(self: &Arc<Budget>, seat: u64, bytes: u64) -> Option<Share> {
        let mut held = self.held.lock();
        let left = self.depth.saturating_sub(held.all);
        let own = held.clients.get(&seat).copied().unwrap_or(0);
        if bytes > left || (own > 0 && own + bytes > left - bytes) {
            return None;
        }
        Some(self.enter(&mut held, seat, bytes))
    }

    /// Room for a block that is near already, and has to go on.
    pub(super) fn take(self: &Arc<Budget>, seat: u64, bytes: u64) -> Share {
        self.enter(&mut self.held.lock(), seat, bytes)
    }

    fn enter(self: &Arc<Budget>, held: &mut Held, seat: u64, bytes: u64) -> Share {
        held.all += bytes;
        if seat > 0 {
            *held.clients.entry(seat).or_default() += bytes;
        }
        Share {
            budget: Arc::clone(self),
            seat,
            bytes,
        }
    }

    /// Bytes on their way to the far tier.
    pub(crate) fn bytes(&self) -> u64 {
        self.held.lock().all
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut held = self.budget.held.lock();
        held.all -= self.bytes;
        if self.seat == 0 {
            return;
        }
        let own = held.clients.get_mut(&self.seat);
        let left = own.map_or(0, |own| {
            *own -= self.bytes;
            *own
        });
        if left == 0 {
            held.clients.remove(&self.seat);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks of 10 bytes that a caller is given, until it is given no more.
    fn fill(budget: &Arc<Budget>, seat: u64) -> Vec<Share> {
        std::iter::from_fn(|| budget.admit(seat, 10)).collect()
    }

    #[test]
    fn clients_never_hold_all_of_it_and_the_owner_may() {
        let budget = Budget::new(1200);
        let stopped: Vec<_> = (1..4).map(|seat| fill(&budget, seat)).collect();
        let each: Vec<usize> = stopped.iter().map(Vec::len).collect();
        assert_eq!(each, [60, 30, 15]);
        assert!(budget.admit(1, 10).is_none() && budget.admit(9, 10).is_some());
        assert_eq!(fill(&budget, 0).len(), 15);
        drop(stopped);
        assert_eq!((budget.bytes(), fill(&budget, 2).len()), (0, 60));
        assert!(budget.held.lock().clients.is_empty());
    }

    #[test]
    fn the_largest_block_finds_room_in_an_empty_queue() {
        let budget = Budget::new(1001);
        for seat in [0, 1] {
            assert!(budget.admit(seat, budget.depth()).is_some());
            assert!(budget.admit(seat, budget.depth() + 1).is_none());
        }
    }
}
