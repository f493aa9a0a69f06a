//! The index of one arena: which identities it holds, where, and in which order they were used.
//! It knows what exists and never moves a byte.
//!
//! Whoever changes what exists holds the arena's `state`, and the lock of one shard for each
//! change. Readers hold shards for reading only, and never wait for `state`: lookups, pins and
//! uses do not exclude each other.

mod arrivals;
mod bound;
mod entry;
mod hash;
mod map;
mod names;
mod order;
mod records;
mod reservations;
mod shard;
mod view;

use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) use arrivals::Arrivals;
use bound::Bound;

pub(crate) use entry::{Entry, Stage};
pub use entry::{Stamps, Use, Uses};
use hash::Secret;
use kvdepot_media::checksum::Checksum;
use map::LOCAL_BITS;
pub(crate) use names::Namespaces;
pub(crate) use order::{Oldest, Order};
pub(crate) use records::Records;
pub(crate) use reservations::Reservations;
use shard::Shard;

use crate::held;
use crate::key::{Key, NamespaceId};

/// Most shards. Readers take the locks of all that their keys are in, and what they take travels
/// from core to core; fewer of them, and whoever changes one waits for more readers.
const SHARDS: usize = 16;
/// An arena of no more records has one shard.
const RECORDS_FEW: u64 = 4096;

/// Stamps that an opening takes at most, so that there are always more.
const RANK_BITS: u32 = 55;

/// The blocks of an arena, a slot each: a shard's number, and a number within it.
pub(crate) struct Index {
    names: held::RwLock<Namespaces>,
    shards: Vec<held::RwLock<Shard>>,
    secret: Secret,
    /// Published blocks.
    live: AtomicU64,
    /// Blocks with pins.
    pinned: AtomicU64,
    /// Bytes of the extents of published blocks that nobody pins.
    evictable_bytes: AtomicU64,
    /// Slots that were set aside by the order of use, and are not pinned any more.
    returned: held::Mutex<Vec<u32>>,
    bound: Bound,
}

/// A published block, as far as the order of use asks.
#[derive(Clone, Copy)]
pub(crate) struct Standing {
    pub(crate) stamp: u64,
    pub(crate) pinned: bool,
}

impl Index {
    /// For an arena of so many records.
    pub(crate) fn new(records: u64) -> Index {
        let count = shards_for(records);
        let shard = |_| held::RwLock::new(Shard::new(records.div_ceil(count)));
        Index {
            names: held::RwLock::new(Namespaces::default()),
            shards: (0..count).map(shard).collect(),
            secret: Secret::new(),
            live: AtomicU64::new(0),
            pinned: AtomicU64::new(0),
            evictable_bytes: AtomicU64::new(0),
            returned: held::Mutex::default(),
            bound: Bound::new(),
        }
    }

    fn shard_of(&self, hash: u64) -> usize {
        // Of the high end: the map takes what is below.
        (((hash >> 32) * self.shards.len() as u64) >> 32) as usize
    }

    fn at(&self, slot: u32) -> Option<(&held::RwLock<Shard>, u32)> {
        let shard = self.shards.get((slot >> LOCAL_BITS) as usize)?;
        Some((shard, slot & ((1 << LOCAL_BITS) - 1)))
    }

    fn read<R>(&self, slot: u32, read: impl FnOnce(&Shard, u32) -> R) -> Option<R> {
        held::stepped();
        let (shard, local) = self.at(slot)?;
        let shard = shard.read();
        shard.has(local).then(|| read(&shard, local))
    }

    fn change<R>(&self, slot: u32, change: impl FnOnce(&mut Shard, u32) -> R) -> Option<R> {
        held::stepped();
        let (shard, local) = self.at(slot)?;
        let mut shard = shard.write();
        shard.has(local).then(|| change(&mut shard, local))
    }

    /// Whether somebody changes the index now.
    pub(crate) fn is_busy(&self) -> bool {
        self.shards.iter().any(held::RwLock::is_being_changed)
    }

    pub(crate) fn live(&self) -> u64 {
        self.live.load(Ordering::Relaxed)
    }

    pub(crate) fn pinned(&self) -> u64 {
        self.pinned.load(Ordering::Relaxed)
    }

    /// Bytes that evicting everything that nobody pins would free.
    pub(crate) fn evictable_bytes(&self) -> u64 {
        // Whoever pins what another one has just unpinned may count first: below zero for a moment.
        let bytes = self.evictable_bytes.load(Ordering::Relaxed);
        bytes.cast_signed().max(0).cast_unsigned()
    }

    /// As if the first shard were being changed.
    #[cfg(test)]
    pub(crate) fn hold(&self) -> held::WriteGuard<'_, Shard> {
        self.shards[0].write()
    }

    /// What is in a slot; nothing of note where that is nothing.
    pub(crate) fn get(&self, slot: u32) -> Entry {
        self.read(slot, Shard::entry).unwrap_or(Entry::FREE)
    }

    /// The entry, when the slot still holds that sequence.
    pub(crate) fn check(&self, slot: u32, sequence: u64) -> Option<Entry> {
        let entry = self.read(slot, |shard, local| {
            shard.holds(local, sequence).then(|| shard.entry(local))
        });
        entry.flatten()
    }

    /// The namespace that has a number.
    pub(crate) fn id(&self, number: u32) -> NamespaceId {
        self.names.read().id(number)
    }

    /// The number that a namespace has.
    pub(crate) fn number(&self, id: NamespaceId) -> Option<u32> {
        self.names.read().number(id)
    }

    /// The number of a namespace, which it has until the next one is asked for, or as long as
    /// `is_used`.
    pub(crate) fn intern(&self, id: NamespaceId, is_used: impl Fn(u32) -> bool) -> u32 {
        let known = self.number(id);
        known.unwrap_or_else(|| self.names.write().intern(id, is_used))
    }

    /// Namespaces that have numbers.
    pub(crate) fn named(&self) -> Vec<(NamespaceId, u32)> {
        self.names.read().known().collect()
    }

    /// The slot of a published block.
    pub(crate) fn find(&self, namespace: u32, key: &Key) -> Option<u32> {
        held::stepped();
        let hash = self.secret.hash(namespace, key);
        let shard = self.shard_of(hash);
        let local = self.shards[shard].read().find(hash, namespace, key)?;
        Some(slot(shard, local))
    }

    /// Enters a block, which nobody finds yet. `None` when there are more than slots have numbers.
    pub(crate) fn enter(&self, entry: &Entry) -> Option<u32> {
        let shard = self.shard_of(self.secret.hash(entry.namespace, &entry.key));
        let local = self.shards[shard].write().enter(entry)?;
        Some(slot(shard, local))
    }

    /// Empties the index, and lets its memory go. No slot names anything any more.
    pub(crate) fn let_go(&self) {
        for shard in &self.shards {
            *shard.write() = Shard::new(0);
        }
        *self.names.write() = Namespaces::default();
        self.bound.let_go();
        for count in [&self.live, &self.pinned, &self.evictable_bytes] {
            count.store(0, Ordering::Relaxed);
        }
    }

    /// Makes room for about so many blocks, before there are any.
    pub(crate) fn make_room(&mut self, blocks: u64) {
        let each = blocks.div_ceil(self.shards.len() as u64);
        let shards = self.shards.iter_mut();
        shards.for_each(|shard| shard.get_mut().make_room(each));
    }

    /// Enters blocks of a shard, with the hashes of their identities; see [`Arrivals`].
    fn add(&self, shard: usize, blocks: &[(u64, Entry)]) -> Vec<Entry> {
        let mut beaten = Vec::new();
        let (mut live, mut room) = (0_u64, 0_u64);
        let mut shard = self.shards[shard].write();
        blocks.iter().for_each(|(hash, _)| shard.fetch(*hash));
        for (hash, entry) in blocks {
            live += 1;
            room = room.wrapping_add(entry.extents.room());
            if let Some(one) = shard.add(*hash, entry, &self.secret) {
                live -= 1;
                room = room.wrapping_sub(one.extents.room());
                beaten.push(one);
            }
        }
        drop(shard);
        self.live.fetch_add(live, Ordering::Relaxed);
        self.evictable_bytes.fetch_add(room, Ordering::Relaxed);
        beaten
    }

    /// Takes a block out again that was added.
    pub(crate) fn drop_added(&self, slot: u32) {
        self.unpublish(slot, None);
        self.forget(slot);
    }

    /// Stamps all blocks, whose stamps are their sequences, as if they had been used in that order
    /// just now.
    pub(crate) fn rank(&mut self, uses: &Uses) {
        let (mut lowest, mut highest) = (u64::MAX, 0);
        self.restamp(|sequence| {
            (lowest, highest) = (lowest.min(sequence), highest.max(sequence));
            sequence
        });
        if lowest > highest {
            return;
        }
        // Sequences may span all their bits; of blocks so far apart some that are near each other
        // become equal.
        let coarse = (highest - lowest)
            .checked_ilog2()
            .unwrap_or(0)
            .saturating_sub(RANK_BITS);
        let first = uses.span(((highest - lowest) >> coarse) + 1);
        self.restamp(|sequence| first + ((sequence - lowest) >> coarse));
    }

    fn restamp(&mut self, mut stamp: impl FnMut(u64) -> u64) {
        for shard in &mut self.shards {
            shard.get_mut().restamp(&mut stamp);
        }
    }

    /// Lets a block be found from now on, pinned or not, and answers what it is; unless somebody
    /// has asked for its removal.
    pub(crate) fn publish(&self, slot: u32, checksum: Checksum, pinned: bool) -> Option<Entry> {
        let published = self.change(slot, |shard, local| {
            shard.set_checksum(local, checksum);
            let entry = shard.entry(local);
            if entry.removed {
                return None;
            }
            let hash = self.secret.hash(entry.namespace, &entry.key);
            shard.set_stage(local, Stage::Live);
            shard.map_in(hash, local, &self.secret);
            self.live.fetch_add(1, Ordering::Relaxed);
            self.evictable_bytes
                .fetch_add(entry.extents.room(), Ordering::Relaxed);
            // The first one is never too many.
            let _pinned = pinned && self.pin(shard, local);
            Some(entry)
        });
        published.flatten()
    }

    /// Takes a published block out, and answers what it was; with `unused` only one that nobody has
    /// pinned, and nobody has used since that stamp, if there is one.
    pub(crate) fn unpublish(&self, slot: u32, unused: Option<Option<u64>>) -> Option<Entry> {
        let gone = self.change(slot, |shard, local| {
            let entry = shard.entry(local);
            let is_used = |since: Option<u64>| {
                let used = |since| self.rank_of(shard, local, slot) != since;
                entry.pins > 0 || since.is_some_and(used)
            };
            if entry.stage != Stage::Live || unused.is_some_and(is_used) {
                return None;
            }
            let hash = self.secret.hash(entry.namespace, &entry.key);
            shard.map_out(hash, local);
            shard.set_stage(local, Stage::Dying);
            self.live.fetch_sub(1, Ordering::Relaxed);
            if entry.pins == 0 {
                self.evictable_bytes
                    .fetch_sub(entry.extents.room(), Ordering::Relaxed);
            }
            Some(entry)
        });
        gone.flatten()
    }

    /// Sets the stage of a block that is not published, and answers whether anybody has it pinned.
    pub(crate) fn set_stage(&self, slot: u32, stage: Stage) -> bool {
        let pinned = self.change(slot, |shard, local| {
            shard.set_stage(local, stage);
            shard.pins(local) > 0
        });
        pinned.unwrap_or(false)
    }

    /// Takes a reservation that a token names for its commit; false where there is none.
    pub(crate) fn claim(&self, slot: u32, sequence: u64) -> bool {
        let claimed = self.change(slot, |shard, local| {
            let is_reserved = shard.holds(local, sequence) && shard.stage(local) == Stage::Reserved;
            if is_reserved {
                shard.set_stage(local, Stage::Committing);
            }
            is_reserved
        });
        claimed.unwrap_or(false)
    }

    /// Notes that somebody has asked for a block's removal.
    pub(crate) fn set_removed(&self, slot: u32) {
        self.change(slot, Shard::set_removed);
    }

    /// Forgets a block that is not published.
    pub(crate) fn forget(&self, slot: u32) {
        self.change(slot, Shard::leave);
    }

    /// Notes a use, if the slot still holds that sequence.
    pub(crate) fn touch(&self, slot: u32, sequence: u64, stamp: u64) {
        self.read(slot, |shard, local| {
            if shard.holds(local, sequence) {
                self.note_use(shard, local, slot, stamp);
            }
        });
    }

    #[inline]
    fn note_use(&self, shard: &Shard, local: u32, slot: u32, stamp: u64) {
        match shard.is_bound(local) {
            false => shard.touch(local, stamp),
            true => self.use_groups(shard, local, slot, stamp),
        }
    }

    /// False where that would be too many pins.
    fn pin(&self, shard: &Shard, local: u32) -> bool {
        let first = shard.pin(local);
        if first == Some(true) {
            self.pinned.fetch_add(1, Ordering::Relaxed);
            self.evictable_bytes
                .fetch_sub(shard.extents(local).room(), Ordering::Relaxed);
        }
        first.is_some()
    }

    /// Pins a published block, if the slot still holds that sequence.
    pub(crate) fn pin_slot(&self, slot: u32, sequence: u64) -> Option<Entry> {
        let entry = self.read(slot, |shard, local| {
            let live = shard.holds(local, sequence) && shard.stage(local) == Stage::Live;
            (live && self.pin(shard, local)).then(|| shard.entry(local))
        });
        entry.flatten()
    }

    /// Counts a block no more whose last pin ended when it was doomed: it is free now.
    pub(crate) fn freed_doomed(&self) {
        self.pinned.fetch_sub(1, Ordering::Relaxed);
    }

    /// Ends a pin. `None` where there was none; true where it was the last one of a doomed block,
    /// which the caller frees.
    pub(crate) fn unpin(&self, slot: u32, sequence: u64) -> Option<bool> {
        let ended = self.read(slot, |shard, local| {
            let (last, aside) = (shard.holds(local, sequence)).then(|| shard.unpin(local))??;
            if !last {
                return Some((false, false));
            }
            let stage = shard.stage(local);
            // A doomed one counts until its room is free.
            if stage != Stage::Doomed {
                self.pinned.fetch_sub(1, Ordering::Relaxed);
            }
            if stage == Stage::Live {
                self.evictable_bytes
                    .fetch_add(shard.extents(local).room(), Ordering::Relaxed);
            }
            Some((stage == Stage::Doomed, aside))
        });
        let (doomed, aside) = ended.flatten()?;
        if aside {
            self.returned.lock().push(slot);
        }
        Some(doomed)
    }

    /// A published block as the order of use sees it.
    fn standing(&self, slot: u32) -> Option<Standing> {
        let standing = self.read(slot, |shard, local| {
            (shard.stage(local) == Stage::Live).then(|| Standing {
                stamp: self.rank_of(shard, local, slot),
                pinned: shard.pins(local) > 0,
            })
        });
        standing.flatten()
    }

    /// Has the last unpin of a block report it; false where nobody has it pinned any more.
    fn set_aside(&self, slot: u32) -> bool {
        self.change(slot, |shard, local| shard.set_aside(local))
            .unwrap_or(false)
    }

    fn take_returned(&self, most: usize) -> Vec<u32> {
        let mut returned = self.returned.lock();
        let left = returned.len().saturating_sub(most);
        returned.split_off(left)
    }

    /// Calls `each` for at most `count` slots from one on that hold something, and answers where
    /// the next ones are; `None` behind the last. No more than a shard's lock is held.
    pub(crate) fn page(
        &self,
        from: u32,
        count: u32,
        mut each: impl FnMut(u32, &Shard, u32) -> bool,
    ) -> Option<u32> {
        let (shard, begin) = self.at(from)?;
        let number = from >> LOCAL_BITS;
        let shard = shard.read();
        let end = shard.used().min(begin.saturating_add(count));
        for local in begin..end {
            held::worked();
            if shard.stage(local) != Stage::Free
                && !each(number << LOCAL_BITS | local, &shard, local)
            {
                return Some(number << LOCAL_BITS | (local + 1));
            }
        }
        if end < shard.used() {
            return Some(number << LOCAL_BITS | end);
        }
        let next = number + 1;
        ((next as usize) < self.shards.len()).then_some(next << LOCAL_BITS)
    }

    /// As [`Index::page`], for what a namespace has; `None` also where that has nothing.
    pub(crate) fn page_of(
        &self,
        namespace: NamespaceId,
        from: u32,
        count: u32,
        mut each: impl FnMut(u32, Entry) -> bool,
    ) -> Option<u32> {
        // Held, so that the number is the namespace's meanwhile.
        let names = self.names.read();
        let number = names.number(namespace)?;
        self.page(from, count, |slot, shard, local| {
            shard.namespace(local) != number || each(slot, shard.entry(local))
        })
    }

    /// Calls `each` for all that is in the index, some at a time: what comes or goes meanwhile may
    /// be missed.
    pub(crate) fn walk(&self, mut each: impl FnMut(u32, Entry)) {
        let mut at = Some(0);
        while let Some(from) = at {
            at = self.page(from, STEP, |slot, shard, local| {
                each(slot, shard.entry(local));
                true
            });
        }
    }

    /// As [`Index::page`], for the stamps alone.
    fn stamps(&self, from: u32, count: u32, mut each: impl FnMut(u32, u64)) -> (u32, Option<u32>) {
        let Some((shard, begin)) = self.at(from) else {
            return (count, None);
        };
        let number = from >> LOCAL_BITS;
        let shard = shard.read();
        let end = shard.used().min(begin.saturating_add(count));
        shard.stamps(begin, end, |local, stamp| {
            each(number << LOCAL_BITS | local, stamp);
        });
        let next = if end < shard.used() {
            Some(number << LOCAL_BITS | end)
        } else {
            let next = number + 1;
            ((next as usize) < self.shards.len()).then_some(next << LOCAL_BITS)
        };
        (end.saturating_sub(begin), next)
    }
}

/// Slots that are looked at while a shard's lock is held: some tens of microseconds.
pub(crate) const STEP: u32 = 4096;

fn slot(shard: usize, local: u32) -> u32 {
    (shard as u32) << LOCAL_BITS | local
}

/// How many shards there are for so many records.
fn shards_for(records: u64) -> u64 {
    if records <= RECORDS_FEW {
        1
    } else {
        SHARDS as u64
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;
    use crate::format::record::Packed;

    #[test]
    fn a_full_index_takes_less_than_96_bytes_a_block() {
        let entry = size_of::<entry::Kept>() + size_of::<entry::Room>() + size_of::<u64>();
        for records in [1_001_024_u64, 10_001_024, 100_001_024] {
            // A list and twice one to come. What the map takes has a test of its own.
            let order = (records / 64).min(16_384) * 16 * 3;
            let each = entry as f64 + 5.1 + order as f64 / records as f64;
            assert!(each < 96.0, "{records}: {each} bytes a block");
        }
    }

    #[test]
    fn lookups_do_not_wait_for_one_another() {
        let index = Index::new(100_000);
        let namespace = NamespaceId([1; 16]);
        let number = index.intern(namespace, |_| true);
        let keys: Vec<Key> = (0..64).map(|byte| Key([byte; 32])).collect();
        for (at, key) in (1..).zip(&keys) {
            let extents = Packed::new(&[(at * 4096, 4096)]).unwrap();
            let mut entry = Entry::new(*key, number, extents, 9);
            entry.sequence = at;
            let slot = index.enter(&entry).unwrap();
            index.publish(slot, Checksum([0; 16]), false);
        }
        let met = Barrier::new(2);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut found = 0;
                    index.look_up(namespace, &keys, |position, block| {
                        found += usize::from(block.is_some());
                        // Both are in the middle, and hold all that they need.
                        if position == 40 {
                            met.wait();
                        }
                        true
                    });
                    assert_eq!(found, keys.len());
                });
            }
        });
        assert!(!index.is_busy());
    }

    #[test]
    fn bytes_that_may_go_are_never_more_than_there_are_while_pins_come_and_go() {
        let index = Index::new(8);
        let extents = Packed::new(&[(4096, 4096)]).unwrap();
        let slot = index
            .enter(&Entry::new(Key([1; 32]), 0, extents, 9))
            .unwrap();
        index.publish(slot, Checksum([0; 16]), false);
        std::thread::scope(|scope| {
            let pinning = [(); 2].map(|()| {
                scope.spawn(|| {
                    for _ in 0..500_000 {
                        index.pin_slot(slot, 0).unwrap();
                        // The other one may be in the middle of its unpin.
                        assert!(index.evictable_bytes() <= 4096);
                        index.unpin(slot, 0).unwrap();
                    }
                })
            });
            for thread in pinning {
                thread.join().unwrap();
            }
        });
        assert_eq!((index.evictable_bytes(), index.pinned()), (4096, 0));
    }
}
