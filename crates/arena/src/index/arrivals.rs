//! Blocks that are published already, on their way into an index that is being filled.

use std::cmp::Reverse;

use super::{Entry, Index};

/// Blocks of one shard that enter it in one go: their lines of the map are fetched before any of
/// them is looked for, and the shard's lock is taken once.
const TOGETHER: usize = 32;

/// What one thread has read and not entered yet, by shard.
pub(crate) struct Arrivals<'a> {
    index: &'a Index,
    waiting: Vec<Vec<(u64, Entry)>>,
    beaten: Vec<Entry>,
}

impl<'a> Arrivals<'a> {
    pub(crate) fn new(index: &'a Index) -> Arrivals<'a> {
        let none = || Vec::with_capacity(TOGETHER);
        let waiting = std::iter::repeat_with(none).take(index.shards.len());
        Arrivals {
            index,
            waiting: waiting.collect(),
            beaten: Vec::new(),
        }
    }

    /// Enters a block, as [`Index::enter`] and [`Index::publish`] would.
    #[inline]
    pub(crate) fn add(&mut self, entry: Entry) {
        let hash = self.index.secret.hash(entry.namespace, &entry.key);
        let shard = self.index.shard_of(hash);
        self.waiting[shard].push((hash, entry));
        if self.waiting[shard].len() == TOGETHER {
            self.enter(shard);
        }
    }

    fn enter(&mut self, shard: usize) {
        let beaten = self.index.add(shard, &self.waiting[shard]);
        self.beaten.extend(beaten);
        self.waiting[shard].clear();
    }

    /// All of them are in the index then, but for those that have the identity of another one of a
    /// higher [rank](Entry::rank), which are answered.
    pub(crate) fn end(mut self) -> Vec<Entry> {
        for shard in 0..self.waiting.len() {
            self.enter(shard);
        }
        self.beaten
    }
}

impl Entry {
    /// Which of two records counts: the one of the higher sequence, and of equal ones, which no
    /// sound arena holds, the lower record.
    pub(crate) fn rank(&self) -> (u64, Reverse<u32>) {
        (self.sequence, Reverse(self.record))
    }
}
