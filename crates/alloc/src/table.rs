//! One table of live extents by start: linear probing, no tombstones, no pointers.

use crate::bins::NIL;
use crate::word::{Word, spread};
use alloc::{boxed::Box, vec};

/// Beyond 4/5 of the slots in use, probing slows down faster than memory is saved.
const LOAD: (usize, usize) = (4, 5);

/// How many extents so many slots may hold.
pub(crate) const fn dense_extents(slots: usize) -> usize {
    slots / LOAD.1 * LOAD.0
}

/// How many slots so many extents need.
pub(crate) const fn dense_slots(extents: usize) -> usize {
    extents.div_ceil(LOAD.0).saturating_mul(LOAD.1)
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot<W> {
    pub(crate) start: W,
    pub(crate) len: W,
    pub(crate) link: u32,
}

impl<W: Word> Slot<W> {
    pub(crate) const EMPTY: Self = Self {
        start: W::EMPTY,
        len: W::EMPTY,
        link: NIL,
    };

    fn is_empty(&self) -> bool {
        self.start == W::EMPTY
    }

    pub(crate) fn hash(&self) -> u32 {
        spread(self.start.get())
    }
}

/// The slot of a start is its hash scaled to the number of slots, so that a table may grow by an
/// eighth rather than double: the order of the slots stays what it was, so that growing is one pass
/// through memory.
#[derive(Debug, Clone)]
pub(crate) struct Table<W> {
    slots: Box<[Slot<W>]>,
    used: u32,
    /// Extents that the slots may hold.
    room: u32,
    /// So many of the high bits of all hashes are the same.
    depth: u32,
}

impl<W: Word> Table<W> {
    /// A table of so many slots that may hold so many extents, fewer than that, whose hashes begin
    /// with the same bits, so many of them.
    pub(crate) fn new(slots: usize, room: usize, depth: u32) -> Self {
        Self {
            slots: vec![Slot::EMPTY; slots].into_boxed_slice(),
            used: 0,
            room: room as u32,
            depth,
        }
    }

    /// A table for so many extents that takes little memory.
    pub(crate) fn dense(extents: usize, depth: u32) -> Self {
        let slots = dense_slots(extents.max(1));
        Self::new(slots, dense_extents(slots), depth)
    }

    #[inline]
    pub(crate) const fn used(&self) -> usize {
        self.used as usize
    }

    #[inline]
    pub(crate) const fn room(&self) -> usize {
        self.room as usize
    }

    pub(crate) const fn depth(&self) -> u32 {
        self.depth
    }

    #[inline]
    pub(crate) const fn is_full(&self) -> bool {
        self.used == self.room
    }

    #[inline]
    pub(crate) const fn slots(&self) -> usize {
        self.slots.len()
    }

    /// The slots that are in use, in the order of their hashes but for the first few.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Slot<W>> {
        self.slots.iter().filter(|slot| !slot.is_empty())
    }

    /// The slot in which the search for a hash begins.
    #[inline]
    fn home(&self, hash: u32) -> usize {
        let rest = hash << self.depth;
        ((u64::from(rest) * self.slots.len() as u64) >> 32) as usize
    }

    /// The slot of the extent that starts here, or else the empty one in which its search ended.
    #[inline]
    pub(crate) fn find(&self, hash: u32, start: W) -> usize {
        let mut at = self.home(hash);
        loop {
            // Not `||`: whether it is there is for the caller to branch on, once.
            let here = self.slots[at].start;
            if (here == start) | (here == W::EMPTY) {
                return at;
            }
            at = self.after(at);
        }
    }

    #[inline]
    const fn after(&self, at: usize) -> usize {
        let next = at + 1;
        if next == self.slots.len() { 0 } else { next }
    }

    /// What a slot holds; none if it is empty.
    #[inline]
    pub(crate) fn at(&self, at: usize) -> Option<Slot<W>> {
        let slot = self.slots[at];
        (!slot.is_empty()).then_some(slot)
    }

    /// Adds an extent; no other starts there, and there is room.
    #[inline]
    pub(crate) fn insert(&mut self, hash: u32, slot: Slot<W>) {
        let at = self.find(hash, slot.start);
        self.slots[at] = slot;
        self.used += 1;
    }

    /// Moves all extents to so many slots.
    pub(crate) fn resize(&mut self, slots: usize, room: usize) {
        let old = core::mem::replace(self, Self::new(slots, room, self.depth));
        old.iter().for_each(|slot| self.insert(slot.hash(), *slot));
    }

    /// Takes the extent of a slot out. Later ones of its run move up, so that no search ends early.
    #[inline]
    pub(crate) fn remove_at(&mut self, hole: usize) {
        let next = self.after(hole);
        let hole = if self.slots[next].is_empty() {
            hole
        } else {
            self.move_up(hole, next)
        };
        self.slots[hole].start = W::EMPTY;
        self.used -= 1;
    }

    /// Moves extents of the run behind a hole into it; gives the hole that is left in the end.
    fn move_up(&mut self, mut hole: usize, mut at: usize) -> usize {
        while !self.slots[at].is_empty() {
            let home = self.home(self.slots[at].hash());
            if self.distance(home, at) >= self.distance(hole, at) {
                self.slots[hole] = self.slots[at];
                hole = at;
            }
            at = self.after(at);
        }
        hole
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

    /// How many slots the search for an extent passes.
    #[cfg(test)]
    pub(crate) fn probes(&self, start: u64) -> usize {
        let hash = spread(start);
        self.distance(self.home(hash), self.find(hash, W::pack(start)))
    }
}
