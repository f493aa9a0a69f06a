//! Blocks that a prefetch has promoted, until a call reads them.
//!
//! Requests that wait at the same time would evict each other's blocks from a small first tier
//! before they are read, and read them from the slow tier again and again. So all such blocks
//! together have at most half of the first tier, and one client has at most as many bytes as stay
//! free for others. A prefetch beyond that is dropped, and its caller prefetches again later. A
//! block that is not read within [`HOLD`] of its promotion no longer counts.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvdepot_arena::{Identity, Key, NamespaceId, clock};
use parking_lot::Mutex;

use crate::shares::Shares;

/// Time for which a block is held for the request that prefetched it.
const HOLD: Duration = Duration::from_secs(10);

/// The awaited blocks of a depot.
pub(crate) struct Awaited {
    /// False while there are none: most gets look no further.
    has_some: AtomicBool,
    state: Mutex<State>,
}

struct State {
    bytes: Shares,
    blocks: HashMap<Identity, Block>,
    /// In the order of their end. One that was read since has no block, or one with another end.
    ends: VecDeque<(Instant, Identity)>,
}

struct Block {
    seat: u64,
    bytes: u64,
    /// `None` until it has been promoted.
    end: Option<Instant>,
}

impl Awaited {
    /// Creates an empty set.
    pub(crate) fn new() -> Awaited {
        Awaited {
            has_some: AtomicBool::new(false),
            state: Mutex::new(State {
                bytes: Shares::new(0),
                blocks: HashMap::new(),
                ends: VecDeque::new(),
            }),
        }
    }

    /// Adds a block of `bytes` bytes that is to be promoted for a client. Returns false if its
    /// bytes do not fit: all blocks have at most `most` bytes, or one block has more.
    pub(super) fn admit(&self, (seat, most): (u64, u64), block: Identity, bytes: u64) -> bool {
        let mut state = self.state.lock();
        state.expire(clock::now());
        if state.blocks.contains_key(&block) {
            return true;
        }
        state.bytes.resize(most);
        let fits = state.blocks.is_empty() || state.bytes.fits(seat, bytes);
        if fits {
            state.bytes.take(seat, bytes);
            let end = None;
            state.blocks.insert(block, Block { seat, bytes, end });
            self.has_some.store(true, Ordering::Relaxed);
        }
        fits
    }

    /// Notes that a block has been promoted.
    pub(super) fn arrived(&self, block: Identity) {
        let mut state = self.state.lock();
        let end = clock::now() + HOLD;
        if let Some(awaited) = state.blocks.get_mut(&block) {
            awaited.end = Some(end);
            state.ends.push_back((end, block));
        }
    }

    /// Removes blocks that a call has read, or that were not promoted after all.
    pub(super) fn end<'a>(&self, namespace: NamespaceId, keys: impl Iterator<Item = &'a Key>) {
        if !self.has_some.load(Ordering::Relaxed) {
            return;
        }
        let mut state = self.state.lock();
        state.expire(clock::now());
        for key in keys {
            let key = *key;
            state.remove(&Identity { namespace, key });
        }
        // Nothing but blocks that were read is left in it.
        if state.blocks.is_empty() {
            state.ends.clear();
            self.has_some.store(false, Ordering::Relaxed);
        }
    }
}

impl State {
    fn expire(&mut self, now: Instant) {
        while let Some((end, block)) = self.ends.front().copied()
            && end <= now
        {
            self.ends.pop_front();
            if self
                .blocks
                .get(&block)
                .is_some_and(|block| block.end == Some(end))
            {
                self.remove(&block);
            }
        }
    }

    fn remove(&mut self, block: &Identity) {
        if let Some(Block { seat, bytes, .. }) = self.blocks.remove(block) {
            self.bytes.give_back(seat, bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(number: u8) -> Identity {
        Identity {
            namespace: NamespaceId([1; 16]),
            key: Key([number; 32]),
        }
    }

    #[test]
    fn blocks_count_until_they_are_read_or_their_time_is_over() {
        let awaited = Awaited::new();
        let admit = |seat, number: u8, bytes| awaited.admit((seat, 40), block(number), bytes);
        assert_eq!((0..6).filter(|number| admit(0, *number, 10)).count(), 4);
        // One that is there already needs no more.
        assert!(admit(0, 0, 10));
        assert!(!admit(3, 9, 10));
        let keys = [block(0).key, block(1).key, block(8).key];
        awaited.end(block(0).namespace, keys.iter());
        // A client leaves as much for others.
        assert_eq!((6..9).filter(|number| admit(3, *number, 10)).count(), 1);
        (0..9).for_each(|number| awaited.arrived(block(number)));
        let later = clock::now() + 2 * HOLD;
        awaited.state.lock().expire(later);
        assert_eq!(awaited.state.lock().bytes.held(), 0);
        // One alone may be larger than all.
        assert!(admit(5, 10, 70) && !admit(0, 11, 1));
        awaited.end(block(10).namespace, [block(10).key].iter());
        let state = awaited.state.lock();
        assert_eq!((state.bytes.held(), state.ends.len()), (0, 0));
        assert!(!awaited.has_some.load(Ordering::Relaxed));
    }
}
