//! The live extents by start: one hash table, or parts of one, so that growing moves few of them at
//! a time.

use crate::table::{Slot, Table, dense_extents, dense_slots};
use crate::word::{Word, spread};
use alloc::{vec, vec::Vec};

/// The first table of a pool. Small, because a pool may hold only a handful of extents.
const SLOTS_MIN: usize = 32;

/// Up to so many slots (16 or 32 KiB, a first-level cache) a table stays three quarters empty, so
/// that nearly every key is in its own slot and the processor guesses right.
const SLOTS_SPARSE: usize = 2048;

/// Up to so many slots (a quarter of a second-level cache) a table stays half empty.
const SLOTS_HALF: usize = 8192;

/// Extents to a part, on average over the parts: some have half of it, some twice as many. That is
/// the most that are moved in one step, which takes some 50 µs.
const PART: usize = 4096;

/// Up to so many extents there is one table.
const ONE_MAX: usize = 2 * PART;

/// What is made for extents that are known has room for one in so many more: the first ones that
/// come do not find it full.
pub(crate) const SPARE: usize = 32;

/// A large set is filled in so many goes, each of which takes memory for its share of the extents
/// alone.
const GOES: usize = 4;

/// How many extents a table of so many slots may hold, where there is one.
const fn extents_max(slots: usize) -> usize {
    if slots <= SLOTS_SPARSE {
        slots / 4
    } else if slots <= SLOTS_HALF {
        slots / 2
    } else {
        dense_extents(slots)
    }
}

/// How many slots so many extents need, where there is one table.
fn slots_for(extents: usize) -> usize {
    if extents <= SLOTS_SPARSE / 4 {
        extents * 4
    } else if extents <= SLOTS_HALF / 2 {
        (extents * 2).max(SLOTS_SPARSE + 1)
    } else {
        dense_slots(extents).max(SLOTS_HALF + 1)
    }
}

/// How hashes, by their high bits, belong to parts. Parts are in the order of hashes and divided in
/// turn (linear hashing): the first ones have been, and have one bit more.
#[derive(Debug, Clone, Copy)]
struct Parting {
    /// The bits that every part has.
    bits: u32,
    /// How many parts have one more: what was divided since.
    longer: u32,
}

impl Parting {
    const fn new(parts: usize) -> Self {
        let bits = parts.ilog2();
        Self {
            bits,
            longer: 2 * (parts - (1 << bits)) as u32,
        }
    }

    #[inline]
    fn part_of(self, hash: u32) -> usize {
        let part = hash >> (31 - self.bits);
        // Of the longer ones this is the first number, of others the second. No branch: nobody
        // could guess it.
        part.min((part + self.longer) / 2) as usize
    }

    /// The bits that the hashes of a part have in common.
    const fn depth(self, part: usize) -> u32 {
        self.bits + (part < self.longer as usize) as u32
    }
}

/// A live extent but for its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Live {
    pub(crate) len: u64,
    /// Its place among all extents.
    pub(crate) link: u32,
}

/// Where the search for an extent ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    part: u32,
    slot: u32,
}

impl Place {
    pub(crate) const NONE: Self = Self { part: 0, slot: 0 };
}

/// Live extents, by start. The number of parts follows that of the extents, and each grows by an
/// eighth in between: memory follows it, too.
#[derive(Debug, Clone)]
pub(crate) struct LiveSet<W> {
    /// The only table of a small set; one without slots beside parts.
    one: Table<W>,
    parts: Vec<Table<W>>,
    parting: Parting,
    used: usize,
}

impl<W: Word> LiveSet<W> {
    /// A set with room for the first extents: there is always an empty slot.
    pub(crate) fn new() -> Self {
        Self {
            one: Table::new(SLOTS_MIN, extents_max(SLOTS_MIN), 0),
            parts: Vec::new(),
            parting: Parting::new(1),
            used: 0,
        }
    }

    #[inline]
    pub(crate) const fn len(&self) -> usize {
        self.used
    }

    /// The bytes that the tables occupy.
    pub(crate) fn memory_bytes(&self) -> usize {
        let tables = self.parts.iter().chain([&self.one]);
        let slots: usize = tables.map(Table::slots).sum();
        slots * size_of::<Slot<W>>() + self.parts.capacity() * size_of::<Table<W>>()
    }

    #[inline]
    const fn is_one(&self) -> bool {
        self.one.slots() != 0
    }

    #[inline]
    fn part_of(&self, hash: u32) -> usize {
        if self.is_one() {
            0
        } else {
            self.parting.part_of(hash)
        }
    }

    #[inline]
    fn table(&self, part: usize) -> &Table<W> {
        if self.is_one() {
            &self.one
        } else {
            &self.parts[part]
        }
    }

    #[inline]
    fn table_mut(&mut self, part: usize) -> &mut Table<W> {
        if self.is_one() {
            &mut self.one
        } else {
            &mut self.parts[part]
        }
    }

    /// Makes room for this many extents in all, so that inserting them moves none (where there are
    /// parts: unless one of them gets far more than its share).
    pub(crate) fn reserve(&mut self, extents: usize) {
        if extents <= self.used {
            return;
        }
        if self.is_one() && extents <= ONE_MAX {
            if extents > self.one.room() {
                self.resize_one(slots_for(extents).max(SLOTS_MIN));
            }
            return;
        }
        while self.parts.len() < extents.div_ceil(PART) {
            self.split();
        }
        for table in &mut self.parts {
            let share = extents.div_ceil(1 << table.depth());
            // Six standard deviations, but for rounding.
            let slots = dense_slots(share + 6 * (share.isqrt() + 1));
            if slots > table.slots() {
                table.resize(slots, dense_extents(slots));
            }
        }
    }

    fn resize_one(&mut self, slots: usize) {
        self.one.resize(slots, extents_max(slots));
    }

    #[cold]
    fn grow(&mut self, part: usize) {
        let slots = self.table(part).slots();
        if !self.is_one() {
            // Of few slots an eighth more has room for none more.
            let least = dense_slots(self.parts[part].room() + 1);
            let slots = (slots + slots.div_ceil(8)).max(least);
            self.parts[part].resize(slots, dense_extents(slots));
        } else if slots < SLOTS_HALF {
            self.resize_one(slots * 2);
        } else {
            self.resize_one(slots / 8 * 9);
        }
    }

    /// Makes two parts of one.
    #[cold]
    fn split(&mut self) {
        if self.is_one() {
            let one = core::mem::replace(&mut self.one, Table::new(0, 0, 0));
            self.parts.push(one);
        }
        let part = self.parting.longer as usize;
        let both = &self.parts[part];
        let depth = both.depth() + 1;
        let is_high = |slot: &Slot<W>| slot.hash() << (depth - 1) >> 31 == 1;
        let highs = both.iter().filter(|slot| is_high(slot)).count();
        // With room for an eighth more.
        let table = |extents| Table::dense(extents + extents / 8 + 1, depth);
        let (mut low, mut high) = (table(both.used() - highs), table(highs));
        for slot in both.iter() {
            let table = if is_high(slot) { &mut high } else { &mut low };
            table.insert(slot.hash(), *slot);
        }
        self.parts[part] = low;
        // What moves up is a few words of each part.
        self.parts.insert(part + 1, high);
        self.parting = Parting::new(self.parts.len());
    }

    /// The place of the extent that starts here, or else the empty one in which its search ended.
    /// Places are valid until an extent is added or removed.
    #[inline]
    pub(crate) fn find(&self, start: u64) -> Place {
        let hash = spread(start);
        let part = self.part_of(hash);
        let slot = self.table(part).find(hash, W::pack(start));
        Place {
            part: part as u32,
            slot: slot as u32,
        }
    }

    /// What is there; none if the place is empty.
    #[inline]
    pub(crate) fn at(&self, place: Place) -> Option<Live> {
        let slot = self.table(place.part as usize).at(place.slot as usize)?;
        Some(Live {
            len: slot.len.get(),
            link: slot.link,
        })
    }

    #[inline]
    pub(crate) fn get(&self, start: u64) -> Option<Live> {
        self.at(self.find(start))
    }

    /// Adds an extent; no other starts there.
    #[inline]
    pub(crate) fn insert(&mut self, start: u64, Live { len, link }: Live) {
        let slot = Slot {
            start: W::pack(start),
            len: W::pack(len),
            link,
        };
        let hash = spread(start);
        // One that has no slots is full.
        if self.one.is_full() {
            self.insert_beside(hash, slot);
        } else {
            self.one.insert(hash, slot);
        }
        self.used += 1;
    }

    /// Adds an extent to a part, or to the only table, which is full.
    #[inline(never)]
    fn insert_beside(&mut self, hash: u32, slot: Slot<W>) {
        let mut part = self.part_of(hash);
        if self.used >= self.parts.len().max(2) * PART {
            self.split();
            part = self.part_of(hash);
        }
        if self.table(part).is_full() {
            self.grow(part);
        }
        self.table_mut(part).insert(hash, slot);
    }

    /// Takes the extent in a place out.
    #[inline]
    pub(crate) fn remove_at(&mut self, place: Place) {
        let table = self.table_mut(place.part as usize);
        table.remove_at(place.slot as usize);
        self.used -= 1;
    }

    /// Fills an empty set with so many extents. Part after part, or else every extent would miss
    /// the processor's caches.
    pub(crate) fn fill(
        &mut self,
        extents: usize,
        items: impl Iterator<Item = (u64, Live)> + Clone,
    ) {
        let room = extents + extents / SPARE;
        if room <= ONE_MAX {
            self.reserve(room);
            items.for_each(|(start, live)| self.insert(start, live));
            return;
        }
        let parts = room.div_ceil(PART);
        let parting = Parting::new(parts);
        let part = |start| parting.part_of(spread(start));
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
            sorted.resize(next[some.end] - begin, Slot::EMPTY);
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
            let mut rest = &sorted[..];
            for part in some {
                // By now each number is where the next part begins.
                let taken = sorted.len() - rest.len();
                let (slots, others) = rest.split_at(next[part] - begin - taken);
                let mut table =
                    Table::dense(slots.len() + slots.len() / SPARE, parting.depth(part));
                slots
                    .iter()
                    .for_each(|slot| table.insert(slot.hash(), *slot));
                self.parts.push(table);
                rest = others;
            }
        }
        (self.one, self.parting) = (Table::new(0, 0, 0), parting);
        self.used = extents;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::word::Halves;
    use alloc::collections::BTreeMap;
    use core::cmp::Ordering;

    /// The finaliser of SplitMix64.
    fn mix(mut x: u64) -> u64 {
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn live(len: u64) -> Live {
        Live { len, link: 7 }
    }

    /// Few distinct starts, in strides as allocators make them, so that runs form and wrap.
    fn behaves_like_a_map(starts: u64, steps: u64) {
        let (mut set, mut map, mut state) = (LiveSet::<u32>::new(), BTreeMap::new(), 1);
        for step in 0..steps {
            state = mix(state + step);
            let start = (state >> 20) % starts * 512;
            let at = set.find(start);
            assert_eq!(set.at(at), map.get(&start).copied());
            // Grow first, then shrink.
            if state % 100 < if step < steps / 2 { 60 } else { 40 } {
                if map.insert(start, live(step)).is_some() {
                    set.remove_at(at);
                }
                set.insert(start, live(step));
            } else if map.remove(&start).is_some() {
                set.remove_at(at);
            }
            assert_eq!(set.len(), map.len());
            assert_eq!(set.get(start), map.get(&start).copied());
        }
        for start in (0..starts).map(|start| start * 512) {
            assert_eq!(set.get(start), map.get(&start).copied());
        }
    }

    #[test]
    fn behaves_like_a_map_while_it_grows_and_empties() {
        behaves_like_a_map(3000, 60_000);
    }

    #[test]
    fn behaves_like_a_map_in_parts_too() {
        behaves_like_a_map(60_000, 300_000);
    }

    #[test]
    fn filling_is_inserting() {
        for extents in [100, ONE_MAX as u64, 60_000] {
            let items = (0..extents).map(|i| (i * 96, live(i)));
            let mut set = LiveSet::<u32>::new();
            set.fill(extents as usize, items.clone());
            assert_eq!(set.len(), extents as usize);
            items.for_each(|(start, live)| assert_eq!(set.get(start), Some(live)));
            assert_eq!(set.get(extents * 96), None);
            // It goes on as if it had grown.
            let more = (extents..2 * extents).map(|i| (i * 96, live(i)));
            more.clone()
                .for_each(|(start, live)| set.insert(start, live));
            more.for_each(|(start, live)| assert_eq!(set.get(start), Some(live)));
        }
    }

    #[test]
    fn so_many_slots_hold_so_many_extents() {
        for extents in (0..20_000).chain([1 << 32, usize::MAX / 2]) {
            assert!(extents_max(slots_for(extents)) >= extents, "{extents}");
        }
    }

    #[test]
    fn reserving_avoids_rehashing() {
        for extents in [5000, 10_000, 300_000] {
            let mut set = LiveSet::<Halves>::new();
            set.reserve(extents as usize);
            let before = set.memory_bytes();
            (0..extents).for_each(|start| set.insert(start, live(1)));
            assert_eq!(set.memory_bytes(), before, "{extents}");
        }
    }

    /// What an insertion moves is in the table that it makes, and what it takes is known.
    #[test]
    fn no_insertion_moves_many() {
        let mut set = LiveSet::<u32>::new();
        let slot = size_of::<Slot<u32>>();
        for start in 0..400_000 {
            let before = set.memory_bytes();
            set.insert(start * 24, live(1));
            let grown = set.memory_bytes() - before;
            assert!(grown <= 2 * PART * slot, "{grown} bytes more at {start}");
            let (largest, len) = (set.parts.iter().map(Table::used).max(), set.len());
            assert!(
                largest.is_none_or(|used| used <= 2 * PART + PART / 2),
                "{largest:?} of {len}"
            );
            if len > ONE_MAX {
                assert!(set.memory_bytes() <= len * 17 + (64 << 10), "{len}");
            }
        }
    }

    #[test]
    fn parts_are_in_the_order_of_hashes_and_divided_in_turn() {
        for hash in (0..1000).map(|i| mix(i) as u32).chain([0, u32::MAX]) {
            for parts in 1..300_usize {
                let (now, then) = (Parting::new(parts), Parting::new(parts + 1));
                let (part, later) = (now.part_of(hash), then.part_of(hash));
                let divided = now.longer as usize;
                let depth = now.depth(part) + u32::from(part == divided);
                let low_or_high = (hash << now.depth(part) >> 31) as usize;
                assert!(part < parts);
                assert_eq!(then.depth(later), depth);
                assert_eq!(
                    later,
                    match part.cmp(&divided) {
                        Ordering::Less => part,
                        Ordering::Equal => part + low_or_high,
                        Ordering::Greater => part + 1,
                    }
                );
            }
        }
    }

    /// Blocks of 71 MiB, of a size that all hash to one part in four.
    #[test]
    fn a_part_that_a_stride_has_left_empty_grows() {
        let mut set = LiveSet::<u32>::new();
        let stride = 18_233;
        (0..16_384).for_each(|i| set.insert(i * stride, live(1)));
        let parts = |set: &LiveSet<u32>| set.parts.iter().map(Table::used).min();
        assert_eq!(parts(&set), Some(0));
        let others = (0..1000).map(|i| mix(i) >> 36);
        for start in others.filter(|start| start % stride != 0) {
            set.insert(start, live(2));
            let has_room = |table: &Table<u32>| table.used() <= table.room();
            assert!(set.parts.iter().all(has_room), "a search would not end");
            assert_eq!(set.get(start), Some(live(2)));
        }
        assert!(parts(&set) > Some(100));
    }

    /// Blocks of one size start in strides, which a weak hash maps to few slots, or few parts.
    #[test]
    fn strides_scatter() {
        let sizes = [1, 3, 4096, 131_089, 3_274_752, 0x9e37_79b9];
        for stride in sizes.into_iter().chain((0..63).map(|bit| 1 << bit)) {
            let mut set = LiveSet::<Halves>::new();
            let starts = (0..4000_u64).filter_map(|i| i.checked_mul(stride));
            let starts: Vec<u64> = starts.take_while(|&start| start < 1 << 63).collect();
            starts.iter().for_each(|&start| set.insert(start, live(1)));
            let all: usize = starts.iter().map(|&start| set.one.probes(start)).sum();
            assert!(all <= starts.len() * 4, "stride {stride}: {all} probes");
        }
        for stride in sizes.into_iter().chain((0..45).map(|bit| 1 << bit)) {
            let mut set = LiveSet::<Halves>::new();
            (0..50_000).for_each(|i| set.insert(i * stride, live(1)));
            let largest = set.parts.iter().map(Table::used).max();
            assert!(largest <= Some(3 * PART), "stride {stride}: {largest:?}");
            let probes = |i| {
                let part = set.part_of(spread(i * stride));
                set.parts[part].probes(i * stride)
            };
            let all: usize = (0..50_000).map(probes).sum();
            assert!(all <= 50_000 * 8, "stride {stride}: {all} probes");
        }
    }
}
