//! The bytes and blocks that may wait in the upper tier of an edge for the lower one, by client.
//!
//! A put of this process moves on by itself: its lanes copy, the background thread writes on. One
//! of a client may stop on its way, for as long as that process is stopped: see [`Shares`].
//!
//! Each block that waits is pinned in the nearer tier. In a tier of files this is an open file,
//! which calls need too, so the number of blocks is limited as well as their bytes.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::shares::Shares;

/// The budget of a depot's write-back queue. Its lock is taken last, and nothing is done under it.
pub(crate) struct Budget {
    depth: u64,
    held: Mutex<Held>,
}

struct Held {
    bytes: Shares,
    blocks: Shares,
}

/// A block's part of the budget: from its admission until the far tier has it, or will not. Given
/// back when it is dropped.
#[must_use = "dropped, it is given back"]
pub(super) struct Share {
    budget: Arc<Budget>,
    seat: u64,
    bytes: u64,
}

impl Budget {
    /// Creates a budget of `depth` bytes and at most `blocks` blocks.
    pub(crate) fn new(depth: u64, blocks: u64) -> Arc<Budget> {
        let held = Held {
            bytes: Shares::new(depth),
            blocks: Shares::new(blocks),
        };
        Arc::new(Budget {
            depth,
            held: Mutex::new(held),
        })
    }

    /// Most bytes that wait.
    pub(super) fn depth(&self) -> u64 {
        self.depth
    }

    /// Room for a block, where the queue is not full, nor the caller's part of it.
    pub(super) fn admit(self: &Arc<Budget>, seat: u64, bytes: u64) -> Option<Share> {
        let mut held = self.held.lock();
        let fits = held.bytes.fits(seat, bytes) && held.blocks.fits(seat, 1);
        fits.then(|| self.enter(&mut held, seat, bytes))
    }

    /// Room for a block that is near already, and has to go on.
    pub(super) fn take(self: &Arc<Budget>, seat: u64, bytes: u64) -> Share {
        self.enter(&mut self.held.lock(), seat, bytes)
    }

    fn enter(self: &Arc<Budget>, held: &mut Held, seat: u64, bytes: u64) -> Share {
        held.bytes.take(seat, bytes);
        held.blocks.take(seat, 1);
        Share {
            budget: Arc::clone(self),
            seat,
            bytes,
        }
    }

    /// Bytes on their way to the far tier.
    pub(crate) fn bytes(&self) -> u64 {
        self.held.lock().bytes.held()
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut held = self.budget.held.lock();
        held.bytes.give_back(self.seat, self.bytes);
        held.blocks.give_back(self.seat, 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_ends_with_its_bytes_or_with_its_blocks() {
        for (depth, blocks, admitted) in [(100, 1000, 10), (1000, 7, 7)] {
            let budget = Budget::new(depth, blocks);
            let shares: Vec<Share> = std::iter::from_fn(|| budget.admit(0, 10)).collect();
            assert_eq!(
                (shares.len(), budget.bytes()),
                (admitted, 10 * admitted as u64)
            );
            let more = budget.take(0, 10);
            drop(shares);
            assert_eq!(budget.bytes(), 10);
            drop(more);
            assert!(budget.admit(1, depth).is_some());
        }
    }
}
