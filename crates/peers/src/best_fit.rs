//! Exact best fit: a tree by length, a tree by address.

use std::collections::{BTreeMap, BTreeSet};

/// Takes the smallest free extent that fits, the lowest of equals; merges at once. It is the
/// measure of utilisation, not of speed.
#[derive(Debug, Clone)]
pub struct BestFit {
    /// Free extents, by length and then start.
    by_len: BTreeSet<(u64, u64)>,
    /// The same extents: length by start.
    by_start: BTreeMap<u64, u64>,
}

impl BestFit {
    /// A pool of `size` bytes, all free.
    #[must_use]
    pub fn new(size: u64) -> BestFit {
        let mut pool = BestFit {
            by_len: BTreeSet::new(),
            by_start: BTreeMap::new(),
        };
        pool.insert(0, size);
        pool
    }

    /// Where `len` bytes begin, to the byte; none where no free extent fits.
    pub fn allocate(&mut self, len: u64) -> Option<u64> {
        let (room, start) = *self.by_len.range((len, 0)..).next()?;
        self.remove(start, room);
        self.insert(start + len, room - len);
        Some(start)
    }

    /// Frees what [`BestFit::allocate`] answered; the caller knows the length.
    pub fn free(&mut self, mut start: u64, mut len: u64) {
        if let Some((&before, &room)) = self.by_start.range(..start).next_back()
            && before + room == start
        {
            self.remove(before, room);
            (start, len) = (before, room + len);
        }
        if let Some(&room) = self.by_start.get(&(start + len)) {
            self.remove(start + len, room);
            len += room;
        }
        self.insert(start, len);
    }

    fn insert(&mut self, start: u64, len: u64) {
        if len > 0 {
            self.by_len.insert((len, start));
            self.by_start.insert(start, len);
        }
    }

    fn remove(&mut self, start: u64, len: u64) {
        self.by_len.remove(&(len, start));
        self.by_start.remove(&start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_that_fits_is_taken_and_neighbours_merge() {
        let mut pool = BestFit::new(100);
        let starts: Vec<_> = (0..5).map(|_| pool.allocate(20)).collect();
        assert_eq!(starts, [0, 20, 40, 60, 80].map(Some));
        assert_eq!(pool.allocate(1), None);
        pool.free(0, 20);
        pool.free(20, 20);
        pool.free(60, 20);
        assert_eq!(pool.allocate(15), Some(60));
        assert_eq!(pool.allocate(40), Some(0));
        assert_eq!(pool.allocate(6), None);
        assert_eq!(pool.allocate(5), Some(75));
    }
}
