//! A compact hash table from position to number: linear probing, no tombstones, no pointers.

use crate::word::{Word, spread};
use alloc::{vec, vec::Vec};

/// The first table of a pool. Small, because a pool may hold only a handful of extents.
const SLOTS_MIN: usize = 32;

/// Up to so many slots (16 or 32 KiB, a first-level cache) a table stays three quarters empty, so
/// that nearly every key is in its own slot and the processor guesses right.
const SLOTS_SPARSE: usize = 2048;

/// Beyond 4/5 of the slots in use, probing slows down faster than memory is saved.
const LOAD: (usize, usize) = (4, 5);

/// How many keys a table of so many slots may hold.
const fn keys_max(slots: usize) -> usize {
    if slots <= SLOTS_SPARSE {
        slots / 4
    } else {
        slots / LOAD.1 * LOAD.0
    }
}

#[derive(Debug, Clone, Copy)]
struct Slot<W> {
    key: W,
    value: W,
}

/// Maps positions to numbers. The slot of a key is its hash scaled to the number of slots, so that
/// the table may grow by half rather than double.
#[derive(Debug, Clone)]
pub(crate) struct Table<W> {
    slots: Vec<Slot<W>>,
    used: usize,
}

impl<W: Word> Table<W> {
    pub(crate) const fn new() -> Self {
        Self {
            slots: Vec::new(),
            used: 0,
        }
    }

    #[inline]
    pub(crate) const fn len(&self) -> usize {
        self.used
    }

    /// The bytes that the table occupies.
    pub(crate) const fn memory_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot<W>>()
    }

    /// Makes room for this many keys in all, so that inserting them does not rehash.
    pub(crate) fn reserve(&mut self, keys: usize) {
        if keys > keys_max(self.slots.len()) {
            let dense = keys.div_ceil(LOAD.0).saturating_mul(LOAD.1);
            let slots = if dense > SLOTS_SPARSE {
                dense
            } else {
                (keys * 4).min(SLOTS_SPARSE * 2)
            };
            self.resize(slots.max(SLOTS_MIN));
        }
    }

    /// The slot in which the search for a key begins.
    #[inline]
    fn home(&self, key: u64) -> usize {
        ((u128::from(spread(key)) * self.slots.len() as u128) >> 64) as usize
    }

    /// The slot that holds the key, or else the empty one in which its search ended. The table has
    /// slots, and one of them is empty.
    #[inline]
    fn find(&self, key: u64) -> usize {
        let packed = W::pack(key);
        let mut at = self.home(key);
        while self.slots[at].key != packed && self.slots[at].key != W::EMPTY {
            at = self.after(at);
        }
        at
    }

    #[inline]
    const fn after(&self, at: usize) -> usize {
        if at + 1 == self.slots.len() {
            0
        } else {
            at + 1
        }
    }

    /// The slot that holds the key. Valid until a key is inserted or removed.
    #[inline]
    pub(crate) fn slot_of(&self, key: u64) -> Option<usize> {
        if self.used == 0 {
            return None;
        }
        let at = self.find(key);
        (self.slots[at].key != W::EMPTY).then_some(at)
    }

    #[inline]
    pub(crate) fn key_at(&self, at: usize) -> u64 {
        self.slots[at].key.get()
    }

    #[inline]
    pub(crate) fn value_at(&self, at: usize) -> u64 {
        self.slots[at].value.get()
    }

    #[inline]
    pub(crate) fn set_at(&mut self, at: usize, value: u64) {
        self.slots[at].value = W::pack(value);
    }

    #[inline]
    pub(crate) fn get(&self, key: u64) -> Option<u64> {
        self.slot_of(key).map(|at| self.value_at(at))
    }

    /// Adds a key or changes its value.
    #[inline]
    pub(crate) fn insert(&mut self, key: u64, value: u64) {
        if self.used == keys_max(self.slots.len()) {
            let factor = if self.slots.len() <= SLOTS_SPARSE {
                (2, 1)
            } else {
                (3, 2)
            };
            self.resize((self.slots.len() * factor.0 / factor.1).max(SLOTS_MIN));
        }
        let at = self.find(key);
        self.used += usize::from(self.slots[at].key == W::EMPTY);
        self.slots[at] = Slot {
            key: W::pack(key),
            value: W::pack(value),
        };
    }

    /// Takes a key out.
    #[inline]
    pub(crate) fn remove(&mut self, key: u64) {
        if let Some(at) = self.slot_of(key) {
            self.remove_at(at);
        }
    }

    /// Takes the key of a slot out. Later keys of its run move up, so that no search ends early.
    #[inline]
    pub(crate) fn remove_at(&mut self, mut hole: usize) {
        let mut at = self.after(hole);
        while self.slots[at].key != W::EMPTY {
            let home = self.home(self.slots[at].key.get());
            if self.distance(home, at) >= self.distance(hole, at) {
                self.slots[hole] = self.slots[at];
                hole = at;
            }
            at = self.after(at);
        }
        self.slots[hole].key = W::EMPTY;
        self.used -= 1;
    }

    /// How many steps forward lead from one slot to another.
    #[inline]
    const fn distance(&self, from: usize, to: usize) -> usize {
        if to >= from {
            to - from
        } else {
            to + self.slots.len() - from
        }
    }

    #[cold]
    fn resize(&mut self, slots: usize) {
        let empty = Slot {
            key: W::EMPTY,
            value: W::EMPTY,
        };
        let old = core::mem::replace(&mut self.slots, vec![empty; slots]);
        for slot in old.into_iter().filter(|slot| slot.key != W::EMPTY) {
            let at = self.find(slot.key.get());
            self.slots[at] = slot;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::word::mix;
    use alloc::collections::BTreeMap;

    #[test]
    fn behaves_like_a_map_while_it_grows_and_empties() {
        let (mut table, mut map, mut state) = (Table::<u32>::new(), BTreeMap::new(), 1);
        for step in 0..60_000_u64 {
            state = mix(state + step);
            // Few distinct keys, in strides as allocators make them, so that runs form and wrap.
            let key = (state >> 20) % 3000 * 512;
            // Grow first, then shrink.
            if state % 100 < if step < 30_000 { 60 } else { 40 } {
                table.insert(key, step);
                map.insert(key, step);
            } else {
                table.remove(key);
                map.remove(&key);
            }
            assert_eq!(table.len(), map.len());
            assert_eq!(table.get(key), map.get(&key).copied());
        }
        for key in (0..3000).map(|key| key * 512) {
            assert_eq!(table.get(key), map.get(&key).copied());
        }
    }

    #[test]
    fn reserving_avoids_rehashing() {
        let mut table = Table::<u64>::new();
        table.reserve(10_000);
        let before = table.memory_bytes();
        (0..10_000).for_each(|key| table.insert(key, key));
        assert_eq!(table.memory_bytes(), before);
    }
}
