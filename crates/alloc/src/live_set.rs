//! The live extents by start, a compact hash table: linear probing, no tombstones, no pointers.

use crate::bins::NIL;
use crate::word::{Word, spread};
use alloc::{vec, vec::Vec};

/// The first table of a pool. Small, because a pool may hold only a handful of extents.
const SLOTS_MIN: usize = 32;

/// Up to so many slots (16 or 32 KiB, a first-level cache) a table stays three quarters empty, so
/// that nearly every key is in its own slot and the processor guesses right.
const SLOTS_SPARSE: usize = 2048;

/// Up to so many slots (a quarter of a second-level cache) a table stays half empty.
const SLOTS_HALF: usize = 8192;

/// Beyond 4/5 of the slots in use, probing slows down faster than memory is saved.
const LOAD: (usize, usize) = (4, 5);

/// Slots that a large table fills at a time: what a second-level cache holds.
const PART_SLOTS: usize = 1 << 14;

/// What is made for extents that are known has room for one in so many more: the first ones that
/// come do not find it full.
pub(crate) const SPARE: usize = 32;

/// A large table is filled in so many goes, each of which takes memory for its part of the extents
/// alone.
const GOES: usize = 4;

/// How many extents a table of so many slots may hold.
const fn extents_max(slots: usize) -> usize {
    if slots <= SLOTS_SPARSE {
        slots / 4
    } else if slots <= SLOTS_HALF {
        slots / 2
    } else {
        slots / LOAD.1 * LOAD.0
    }
}

/// How many slots so many extents need.
fn slots_for(extents: usize) -> usize {
    if extents <= SLOTS_SPARSE / 4 {
        extents * 4
    } else if extents <= SLOTS_HALF / 2 {
        (extents * 2).max(SLOTS_SPARSE + 1)
    } else {
        let dense = extents.div_ceil(LOAD.0).saturating_mul(LOAD.1);
        dense.max(SLOTS_HALF + 1)
    }
}

/// The slot, of so many, in which the search for a start begins.
#[inline]
fn home(start: u64, slots: usize) -> usize {
    ((u64::from(spread(start)) * slots as u64) >> 32) as usize
}

#[derive(Debug, Clone, Copy)]
struct Slot<W> {
    start: W,
    len: W,
    link: u32,
}

/// A live extent but for its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Live {
    pub(crate) len: u64,
    /// Its place among all extents.
    pub(crate) link: u32,
}

/// Live extents, by start. The slot of a start is its hash scaled to the number of slots, so that
/// the table may grow by an eighth rather than double: the order of the slots stays what it was, so
/// that growing is one pass through memory.
#[derive(Debug, Clone)]
pub(crate) struct LiveSet<W> {
    slots: Vec<Slot<W>>,
    used: usize,
    /// Extents that the slots may hold.
    room: usize,
}

impl<W: Word> LiveSet<W> {
    const EMPTY: Slot<W> = Slot {
        start: W::EMPTY,
        len: W::EMPTY,
        link: NIL,
    };

    /// A table with room for the first extents: there is always an empty slot.
    pub(crate) fn new() -> Self {
        let mut table = Self {
            slots: Vec::new(),
            used: 0,
            room: 0,
        };
        table.resize(SLOTS_MIN);
        table
    }

    #[inline]
    pub(crate) const fn len(&self) -> usize {
        self.used
    }

    /// The bytes that the table occupies.
    pub(crate) const fn memory_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot<W>>()
    }

    /// Makes room for this many extents in all, so that inserting them does not rehash.
    pub(crate) fn reserve(&mut self, extents: usize) {
        if extents > self.room {
            let slots = slots_for(extents);
            self.resize(slots.max(SLOTS_MIN));
        }
    }

    #[cold]
    fn grow(&mut self) {
        let slots = self.slots.len();
        self.resize(if slots < SLOTS_HALF {
            slots * 2
        } else {
            slots / 8 * 9
        });
    }

    /// The slot in which the search for a start begins.
    #[inline]
    fn home(&self, start: u64) -> usize {
        home(start, self.slots.len())
    }

    /// The slot of the extent that starts here, or else the empty one in which its search ended.
    #[inline]
    pub(crate) fn find(&self, start: u64) -> usize {
        let packed = W::pack(start);
        let mut at = self.home(start);
        loop {
            // Not `||`: whether it is there is for the caller to branch on, once.
            let here = self.slots[at].start;
            if (here == packed) | (here == W::EMPTY) {
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

    /// What a slot holds; none if it is empty. Slots are valid until an extent is added or removed.
    #[inline]
    pub(crate) fn at(&self, at: usize) -> Option<Live> {
        let slot = self.slots[at];
        (slot.start != W::EMPTY).then(|| Live {
            len: slot.len.get(),
            link: slot.link,
        })
    }

    /// Gives the extent of a slot another length.
    #[inline]
    pub(crate) fn set_len(&mut self, at: usize, len: u64) {
        self.slots[at].len = W::pack(len);
    }

    #[inline]
    pub(crate) fn get(&self, start: u64) -> Option<Live> {
        self.at(self.find(start))
    }

    /// Adds an extent; no other starts there.
    #[inline]
    pub(crate) fn insert(&mut self, start: u64, Live { len, link }: Live) {
        if self.used == self.room {
            self.grow();
        }
        let at = self.find(start);
        self.used += 1;
        self.slots[at] = Slot {
            start: W::pack(start),
            len: W::pack(len),
            link,
        };
    }

    /// Fills an empty table with so many extents. A large one is filled part by part, or else
    /// every extent would miss the processor's caches.
    pub(crate) fn fill(
        &mut self,
        extents: usize,
        items: impl Iterator<Item = (u64, Live)> + Clone,
    ) {
        self.reserve(extents + extents / SPARE);
        let parts = self.slots.len() / PART_SLOTS + 1;
        if parts == 1 {
            items.for_each(|(start, live)| self.insert(start, live));
            return;
        }
        let slots = self.slots.len();
        let part = |start| home(start, slots) / PART_SLOTS;
        let mut next = vec![0; parts + 1];
        for (start, _) in items.clone() {
            next[part(start) + 1] += 1;
        }
        for at in 1..=parts {
            next[at] += next[at - 1];
        }
        let mut sorted = Vec::new();
        for go in 0..GOES {
            let some = parts * go / GOES..parts * (go + 1) / GOES;
            let begin = next[some.start];
            sorted.resize(next[some.end] - begin, Self::EMPTY);
            for (start, Live { len, link }) in items.clone() {
                let part = part(start);
                if some.contains(&part) {
                    sorted[next[part] - begin] = Slot {
                        start: W::pack(start),
                        len: W::pack(len),
                        link,
                    };
                    next[part] += 1;
                }
            }
            for slot in sorted.drain(..) {
                let at = self.find(slot.start.get());
                self.slots[at] = slot;
            }
        }
        self.used = extents;
    }

    /// Takes the extent of a slot out. Later ones of its run move up, so that no search ends early.
    #[inline]
    pub(crate) fn remove_at(&mut self, hole: usize) {
        let next = self.after(hole);
        let hole = if self.slots[next].start == W::EMPTY {
            hole
        } else {
            self.move_up(hole, next)
        };
        self.slots[hole].start = W::EMPTY;
        self.used -= 1;
    }

    /// Moves extents of the run behind a hole into it; gives the hole that is left in the end.
    fn move_up(&mut self, mut hole: usize, mut at: usize) -> usize {
        while self.slots[at].start != W::EMPTY {
            let home = self.home(self.slots[at].start.get());
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

    fn resize(&mut self, slots: usize) {
        let old = core::mem::replace(&mut self.slots, vec![Self::EMPTY; slots]);
        self.room = extents_max(slots);
        for slot in old.into_iter().filter(|slot| slot.start != W::EMPTY) {
            let at = self.find(slot.start.get());
            self.slots[at] = slot;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::word::Halves;
    use alloc::collections::BTreeMap;

    /// The finaliser of SplitMix64.
    fn mix(mut x: u64) -> u64 {
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn live(len: u64) -> Live {
        Live { len, link: 7 }
    }

    #[test]
    fn behaves_like_a_map_while_it_grows_and_empties() {
        let (mut set, mut map, mut state) = (LiveSet::<u32>::new(), BTreeMap::new(), 1);
        for step in 0..60_000_u64 {
            state = mix(state + step);
            // Few distinct starts, in strides as allocators make them, so that runs form and wrap.
            let start = (state >> 20) % 3000 * 512;
            let at = set.find(start);
            assert_eq!(set.at(at), map.get(&start).copied());
            // Grow first, then shrink.
            if state % 100 < if step < 30_000 { 60 } else { 40 } {
                match map.insert(start, live(step)) {
                    Some(_) => set.set_len(at, step),
                    None => set.insert(start, live(step)),
                }
            } else if map.remove(&start).is_some() {
                set.remove_at(at);
            }
            assert_eq!(set.len(), map.len());
            assert_eq!(set.get(start), map.get(&start).copied());
        }
        for start in (0..3000).map(|start| start * 512) {
            assert_eq!(set.get(start), map.get(&start).copied());
        }
    }

    #[test]
    fn filling_is_inserting() {
        let extents = 60_000;
        let items = (0..extents).map(|i| (i * 96, live(i)));
        let mut set = LiveSet::<u32>::new();
        set.fill(extents as usize, items.clone());
        assert_eq!(set.len(), extents as usize);
        items.for_each(|(start, live)| assert_eq!(set.get(start), Some(live)));
        assert_eq!(set.get(extents * 96), None);
    }

    #[test]
    fn so_many_slots_hold_so_many_extents() {
        for extents in (0..20_000).chain([1 << 32, usize::MAX / 2]) {
            assert!(extents_max(slots_for(extents)) >= extents, "{extents}");
        }
    }

    #[test]
    fn reserving_avoids_rehashing() {
        let mut set = LiveSet::<Halves>::new();
        set.reserve(10_000);
        let before = set.memory_bytes();
        (0..10_000).for_each(|start| set.insert(start, live(1)));
        assert_eq!(set.memory_bytes(), before);
    }

    /// Blocks of one size start in strides, which a weak hash maps to few slots.
    #[test]
    fn strides_scatter() {
        let sizes = [1, 3, 4096, 131_089, 3_274_752, 0x9e37_79b9];
        for stride in sizes.into_iter().chain((0..63).map(|bit| 1 << bit)) {
            let mut set = LiveSet::<Halves>::new();
            let starts = (0..4000_u64).filter_map(|i| i.checked_mul(stride));
            let starts: Vec<u64> = starts.take_while(|&start| start < 1 << 63).collect();
            starts.iter().for_each(|&start| set.insert(start, live(1)));
            let probes = |&start| set.distance(set.home(start), set.find(start));
            let all: usize = starts.iter().map(probes).sum();
            assert!(all <= starts.len() * 4, "stride {stride}: {all} probes");
        }
    }
}
