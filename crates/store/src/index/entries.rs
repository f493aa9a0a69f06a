//! The entries of one arena, a slot each (the same number as its record's), and the order in
//! which they were used.
//!
//! A use stamps its entry, which costs a store. The order lags behind: a heap of older stamps,
//! corrected when an eviction asks for the oldest, at most once for each use.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicU64, Ordering};

use kvdepot_media::checksum::Checksum;

use crate::Key;
use crate::format::record::Packed;

/// Counts uses, for all tiers of a depot, so that a block keeps its rank from tier to tier.
#[derive(Default)]
pub(crate) struct Uses(AtomicU64);

/// The stamps of one call's keys, which are in prefix order: a prompt's tail is always older than
/// its head, whichever of them moves first and wherever it goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stamps {
    first: u64,
    keys: u64,
}

impl Uses {
    /// Stamps for a call of so many keys.
    pub(crate) fn call(&self, keys: usize) -> Stamps {
        let keys = keys as u64;
        Stamps {
            first: self.0.fetch_add(keys, Ordering::Relaxed),
            keys,
        }
    }
}

impl Stamps {
    /// The stamp of the key at `index`.
    pub(crate) fn of(self, index: usize) -> u64 {
        self.first + self.keys - 1 - index as u64
    }
}

/// What a slot is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Nothing.
    Free,
    /// Nobody's yet: room that was made for a block.
    SetAside,
    /// Being written; invisible.
    Reserved,
    /// Written, and on the way to be published: nobody else may commit or abort it.
    Committing,
    /// Published.
    Live,
    /// Unpublished, while its record may still be live on the medium.
    Dying,
    /// Dead on the medium too, while pinned: its extents are freed with the last pin.
    Doomed,
}

/// One block of the arena.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) key: Key,
    pub(crate) namespace: u32,
    pub(crate) extents: Packed,
    pub(crate) len: u64,
    pub(crate) checksum: Checksum,
    pub(crate) sequence: u64,
    pub(crate) created: u32,
    pub(crate) pins: u32,
    pub(crate) parts: u16,
    pub(crate) stage: Stage,
    /// Whether its bytes come from another tier, not from a put.
    pub(crate) copy: bool,
    /// Whether somebody has asked for its removal; a copy being written is not published then.
    pub(crate) removed: bool,
    /// Whether the order has an item that stands for this entry.
    ranked: bool,
    /// When it was used last.
    pub(crate) stamp: u64,
}

impl Entry {
    const FREE: Entry = Entry {
        key: Key([0; 32]),
        namespace: 0,
        extents: Packed([0; 4]),
        len: 0,
        checksum: Checksum([0; 16]),
        sequence: 0,
        created: 0,
        pins: 0,
        parts: 1,
        stage: Stage::Free,
        copy: false,
        removed: false,
        ranked: false,
        stamp: 0,
    };

    pub(crate) fn new(key: Key, namespace: u32, extents: Packed, len: u64) -> Entry {
        Entry {
            key,
            namespace,
            extents,
            len,
            ..Entry::FREE
        }
    }
}

/// The slots and the order of use.
pub(crate) struct Entries {
    slots: Vec<Entry>,
    /// Slots used before and free again.
    free: Vec<u32>,
    /// How many slots there may be.
    limit: u32,
    /// Slots by stamps that are not above their entries'. Items of entries that are gone or
    /// pinned are dropped when they come up.
    order: BinaryHeap<Reverse<(u64, u32)>>,
    /// Slots that each namespace has, by its number.
    borne: Vec<u32>,
    /// Entries that can be evicted, and the bytes of their extents.
    evictable: u64,
    evictable_bytes: u64,
}

impl Entries {
    pub(crate) fn new(limit: u32) -> Entries {
        Entries {
            slots: Vec::new(),
            free: Vec::new(),
            limit,
            order: BinaryHeap::new(),
            borne: Vec::new(),
            evictable: 0,
            evictable_bytes: 0,
        }
    }

    /// A free slot, or `None` when the table is full.
    pub(crate) fn take(&mut self) -> Option<u32> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        let slot = self.slots.len() as u32;
        (slot < self.limit).then(|| {
            self.slots.push(Entry::FREE);
            slot
        })
    }

    /// Gives a slot back.
    pub(crate) fn give_back(&mut self, slot: u32) {
        self.put(slot, Entry::FREE);
        self.free.push(slot);
    }

    /// Slots that can still be taken.
    pub(crate) fn vacant(&self) -> u64 {
        u64::from(self.limit) - self.slots.len() as u64 + self.free.len() as u64
    }

    /// Fills the slots from a recovered table: live entries by rising slot, the rest of the
    /// `used` slots free. The order of use is that of their sequences.
    pub(crate) fn restore(
        &mut self,
        recovered: impl Iterator<Item = (u32, Entry)>,
        used: u32,
        uses: &Uses,
    ) {
        let mut order: Vec<(u64, u32)> = Vec::with_capacity(used as usize);
        self.slots = Vec::with_capacity(used as usize);
        for (slot, entry) in recovered {
            order.push((entry.sequence, slot));
            self.evictable_bytes += entry.extents.room();
            self.free.extend(self.slots.len() as u32..slot);
            self.slots.resize(slot as usize, Entry::FREE);
            self.bear(entry.namespace);
            self.slots.push(Entry {
                ranked: true,
                ..entry
            });
        }
        self.free.extend(self.slots.len() as u32..used);
        self.slots.resize(used as usize, Entry::FREE);
        // Low slots are taken first, so that a table fills from its beginning.
        self.free.reverse();
        order.sort_unstable();
        self.evictable = order.len() as u64;
        let stamps = uses.call(order.len());
        let newest = order.len();
        for (rank, (sequence, slot)) in order.iter_mut().enumerate() {
            *sequence = stamps.of(newest - 1 - rank);
            self.slots[*slot as usize].stamp = *sequence;
        }
        // Rising stamps are a heap already; making it one only looks.
        self.order = order.into_iter().map(Reverse).collect::<Vec<_>>().into();
    }

    /// All that is not free, by slot.
    pub(crate) fn used(&self) -> impl Iterator<Item = (u32, &Entry)> {
        let slots = (0..).zip(&self.slots);
        slots.filter(|(_, entry)| entry.stage != Stage::Free)
    }

    /// The slots from this one on; none behind the last that was ever used.
    pub(crate) fn from(&self, slot: u32) -> &[Entry] {
        self.slots.get(slot as usize..).unwrap_or_default()
    }

    pub(crate) fn get(&self, slot: u32) -> &Entry {
        &self.slots[slot as usize]
    }

    pub(crate) fn get_mut(&mut self, slot: u32) -> &mut Entry {
        &mut self.slots[slot as usize]
    }

    pub(crate) fn set(&mut self, slot: u32, entry: Entry) {
        self.put(slot, entry);
    }

    fn put(&mut self, slot: u32, entry: Entry) {
        if entry.stage != Stage::Free {
            self.bear(entry.namespace);
        }
        let before = std::mem::replace(&mut self.slots[slot as usize], entry);
        if before.stage != Stage::Free {
            self.borne[before.namespace as usize] -= 1;
        }
    }

    fn bear(&mut self, namespace: u32) {
        let index = namespace as usize;
        if self.borne.len() <= index {
            self.borne.resize(index + 1, 0);
        }
        self.borne[index] += 1;
    }

    /// Whether any slot bears a namespace's number.
    pub(crate) fn bears(&self, namespace: u32) -> bool {
        self.borne
            .get(namespace as usize)
            .is_some_and(|slots| *slots > 0)
    }

    /// The entry, when the slot still holds that sequence.
    pub(crate) fn check(&self, slot: u32, sequence: u64) -> Option<&Entry> {
        self.slots
            .get(slot as usize)
            .filter(|entry| entry.stage != Stage::Free && entry.sequence == sequence)
    }

    /// Brings entries into the caches before each is worked on. They lie far apart: one look at
    /// each of them, none of which waits for another, costs a fraction of as many single misses.
    pub(crate) fn fetch(&self, slots: impl Iterator<Item = u32>) {
        let glance = |slot: u32| {
            let entry = self.get(slot);
            // Fields of the first, the middle and the last cache line, wherever those are.
            entry.stamp ^ entry.len ^ entry.extents.0[3] ^ u64::from(entry.key.0[0])
        };
        std::hint::black_box(slots.fold(0, |seen, slot| seen ^ glance(slot)));
    }

    /// Notes a use.
    pub(crate) fn touch(&mut self, slot: u32, stamp: u64) {
        let entry = self.get_mut(slot);
        entry.stamp = entry.stamp.max(stamp);
    }

    /// From now on the entry can be evicted.
    pub(crate) fn link(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        self.evictable += 1;
        self.evictable_bytes += entry.extents.room();
        if !std::mem::replace(&mut entry.ranked, true) {
            self.order.push(Reverse((entry.stamp, slot)));
        }
        // Items of entries that went another way than by eviction.
        if self.order.len() as u64 > 2 * self.evictable + 1024 {
            self.rank_anew();
        }
    }

    /// From now on the entry cannot be evicted.
    pub(crate) fn unlink(&mut self, slot: u32) {
        self.evictable -= 1;
        self.evictable_bytes -= self.get(slot).extents.room();
    }

    /// Bytes that evicting everything that nobody pins would free.
    pub(crate) fn evictable_bytes(&self) -> u64 {
        self.evictable_bytes
    }

    /// The least recently used entry that nobody pins. The caller takes it out of the index.
    pub(crate) fn oldest(&mut self) -> Option<u32> {
        self.oldest_stamp()?;
        let Reverse((_, slot)) = self.order.pop()?;
        self.slots[slot as usize].ranked = false;
        Some(slot)
    }

    /// When that one was used.
    pub(crate) fn oldest_stamp(&mut self) -> Option<u64> {
        while let Some(Reverse((stamp, slot))) = self.order.peek().copied() {
            let entry = &mut self.slots[slot as usize];
            let is_ranked = entry.stage == Stage::Live && entry.ranked;
            if is_ranked && entry.pins == 0 && entry.stamp == stamp {
                return Some(stamp);
            }
            self.order.pop();
            if is_ranked && entry.pins > 0 {
                // Its last unpin ranks it again.
                entry.ranked = false;
            } else if is_ranked && entry.stamp > stamp {
                self.order.push(Reverse((entry.stamp, slot)));
            }
        }
        None
    }

    fn rank_anew(&mut self) {
        let mut items = std::mem::take(&mut self.order).into_vec();
        items.clear();
        for (slot, entry) in self.slots.iter_mut().enumerate() {
            entry.ranked = entry.stage == Stage::Live && entry.pins == 0;
            if entry.ranked {
                items.push(Reverse((entry.stamp, slot as u32)));
            }
        }
        self.order = items.into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn live(entries: &mut Entries, stamp: u64) -> u32 {
        let slot = entries.take().unwrap();
        let extents = Packed::new(&[(u64::from(slot) * 4096, 4096)]).unwrap();
        let mut entry = Entry::new(Key([0; 32]), 0, extents, 1);
        entry.stage = Stage::Live;
        entry.stamp = stamp;
        entries.set(slot, entry);
        entries.link(slot);
        slot
    }

    fn evict(entries: &mut Entries) -> Option<u32> {
        let slot = entries.oldest()?;
        entries.unlink(slot);
        entries.give_back(slot);
        Some(slot)
    }

    #[test]
    fn the_oldest_stamp_goes_first_whatever_was_touched_or_pinned_since() {
        let mut entries = Entries::new(8);
        let slots: Vec<u32> = [5, 3, 9, 7].map(|stamp| live(&mut entries, stamp)).into();
        entries.touch(slots[1], 20);
        entries.touch(slots[1], 1);
        // Pinned while its item comes up, and unpinned later.
        entries.get_mut(slots[0]).pins = 1;
        entries.unlink(slots[0]);
        assert_eq!(entries.evictable_bytes(), 3 * 4096);
        assert_eq!(evict(&mut entries), Some(slots[3]));
        entries.get_mut(slots[0]).pins = 0;
        entries.link(slots[0]);
        assert_eq!(evict(&mut entries), Some(slots[0]));
        assert_eq!(evict(&mut entries), Some(slots[2]));
        assert_eq!(evict(&mut entries), Some(slots[1]));
        assert_eq!(evict(&mut entries), None);
        assert_eq!(entries.evictable_bytes(), 0);
    }

    #[test]
    fn slots_that_come_and_go_without_evictions_leave_nothing_behind() {
        let mut entries = Entries::new(8);
        let kept = live(&mut entries, 0);
        for stamp in 1..10_000 {
            let slot = live(&mut entries, stamp);
            entries.unlink(slot);
            entries.give_back(slot);
        }
        assert!(entries.order.len() < 2_000, "{}", entries.order.len());
        assert_eq!(evict(&mut entries), Some(kept));
        assert_eq!(evict(&mut entries), None);
    }

    #[test]
    fn a_call_stamps_its_last_key_oldest() {
        let uses = Uses::default();
        let (one, two) = (uses.call(3), uses.call(2));
        let stamps = [one.of(2), one.of(1), one.of(0), two.of(1), two.of(0)];
        assert!(stamps.is_sorted_by(|a, b| a < b), "{stamps:?}");
    }
}
