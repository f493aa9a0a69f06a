//! A part of the entries, and their keys.
//!
//! Entries are in chunks, so that there is nothing to copy when there are more of them. The map
//! holds numbers alone, and compares through the entries, so that a key is kept once. Stamps lie by
//! themselves: the order of use reads all of them, and nothing else. So do the blocks' places,
//! which no lookup reads.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use kvdepot_host::cpu::prefetch;
use kvdepot_media::checksum::Checksum;

use super::entry::{Entry, Kept, Room, Stage, Wide};
use super::hash::Secret;
use super::map::Map;
use crate::format::record::Packed;
use crate::key::Key;

/// Entries of a chunk: few chunks, each large enough for huge pages. What is not used yet of one
/// takes no memory.
const CHUNK: usize = 1 << 15;

/// The stamp of a slot that holds nothing.
const NEVER: u64 = u64::MAX;

/// Entries by their numbers, and the numbers of those that are published by their keys. Apart from
/// its lock, or else what all readers read would travel from core to core with that.
#[repr(align(128))]
pub(crate) struct Shard {
    map: Map,
    chunks: Vec<Chunk>,
    /// What a chunk is made for: the few entries of a small arena are less than one.
    room: usize,
    used: u32,
    /// Numbers used before and free again.
    free: Vec<u32>,
    wide: HashMap<u32, Wide>,
}

struct Chunk {
    entries: Vec<Kept>,
    rooms: Vec<Room>,
    stamps: Vec<AtomicU64>,
}

impl Shard {
    /// For about so many blocks.
    pub(super) fn new(blocks: u64) -> Shard {
        Shard {
            map: Map::new(blocks),
            chunks: Vec::new(),
            room: blocks.min(CHUNK as u64) as usize,
            used: 0,
            free: Vec::new(),
            wide: HashMap::new(),
        }
    }

    /// Numbers that were ever used.
    pub(super) fn used(&self) -> u32 {
        self.used
    }

    pub(super) fn has(&self, local: u32) -> bool {
        local < self.used
    }

    fn kept(&self, local: u32) -> &Kept {
        &self.chunks[local as usize / CHUNK].entries[local as usize % CHUNK]
    }

    fn kept_mut(&mut self, local: u32) -> &mut Kept {
        &mut self.chunks[local as usize / CHUNK].entries[local as usize % CHUNK]
    }

    fn stamp_of(&self, local: u32) -> &AtomicU64 {
        &self.chunks[local as usize / CHUNK].stamps[local as usize % CHUNK]
    }

    fn room_of(&self, local: u32) -> Room {
        self.chunks[local as usize / CHUNK].rooms[local as usize % CHUNK]
    }

    fn room_mut(&mut self, local: u32) -> &mut Room {
        &mut self.chunks[local as usize / CHUNK].rooms[local as usize % CHUNK]
    }

    pub(crate) fn entry(&self, local: u32) -> Entry {
        let wide = || self.wide.get(&local).copied();
        let kept = self.kept(local);
        kept.entry(self.room_of(local), wide, self.stamp(local))
    }

    pub(super) fn extents(&self, local: u32) -> Packed {
        let wide = || self.wide.get(&local).copied();
        self.room_of(local).extents(wide).0
    }

    /// Whether a slot holds that sequence.
    pub(super) fn holds(&self, local: u32, sequence: u64) -> bool {
        let kept = self.kept(local);
        kept.stage() != Stage::Free && kept.sequence() == sequence
    }

    pub(crate) fn stage(&self, local: u32) -> Stage {
        self.kept(local).stage()
    }

    pub(super) fn namespace(&self, local: u32) -> u32 {
        self.kept(local).namespace()
    }

    pub(super) fn pins(&self, local: u32) -> u32 {
        self.kept(local).pins()
    }

    pub(super) fn pin(&self, local: u32) -> Option<bool> {
        self.kept(local).pin()
    }

    pub(super) fn unpin(&self, local: u32) -> Option<(bool, bool)> {
        self.kept(local).unpin()
    }

    pub(super) fn set_aside(&self, local: u32) -> bool {
        self.kept(local).set_aside()
    }

    #[inline]
    pub(super) fn is_bound(&self, local: u32) -> bool {
        self.kept(local).is_bound()
    }

    pub(super) fn bind(&self, local: u32, bound: bool) {
        self.kept(local).bind(bound);
    }

    pub(super) fn stamp(&self, local: u32) -> u64 {
        self.stamp_of(local).load(Ordering::Relaxed)
    }

    /// Gives a block another stamp, and answers that.
    pub(super) fn set_rank(&self, local: u32, rank: impl Fn(u64) -> u64) -> u64 {
        let stamp = self.stamp_of(local);
        let mut known = stamp.load(Ordering::Relaxed);
        loop {
            let new = rank(known);
            let set = stamp.compare_exchange_weak(known, new, Ordering::Relaxed, Ordering::Relaxed);
            match set {
                Ok(_) => return new,
                Err(other) => known = other,
            }
        }
    }

    /// Notes a use of a block that is in no group.
    pub(crate) fn touch(&self, local: u32, stamp: u64) {
        self.stamp_of(local).fetch_max(stamp, Ordering::Relaxed);
    }

    pub(super) fn stamps(&self, begin: u32, end: u32, mut each: impl FnMut(u32, u64)) {
        let mut at = begin as usize;
        while at < end as usize {
            let chunk = &self.chunks[at / CHUNK].stamps;
            let some = &chunk[at % CHUNK..CHUNK.min(at % CHUNK + end as usize - at)];
            for (local, stamp) in (at as u32..).zip(some) {
                let stamp = stamp.load(Ordering::Relaxed);
                if stamp != NEVER {
                    each(local, stamp);
                }
            }
            at += some.len();
        }
    }

    /// Enters a block under a number of its own. `None` when there are no more.
    pub(super) fn enter(&mut self, entry: &Entry) -> Option<u32> {
        let (kept, (room, wide)) = (Kept::of(entry), Room::of(entry));
        let local = if let Some(local) = self.free.pop() {
            *self.kept_mut(local) = kept;
            *self.room_mut(local) = room;
            self.set_stamp(local, entry.stamp);
            local
        } else {
            if self.used == self.map.numbers() {
                return None;
            }
            if self.used as usize == self.chunks.len() * CHUNK {
                self.chunks.push(Chunk {
                    entries: Vec::with_capacity(self.room),
                    rooms: Vec::with_capacity(self.room),
                    stamps: Vec::with_capacity(self.room),
                });
            }
            let chunk = self.chunks.last_mut()?;
            chunk.entries.push(kept);
            chunk.rooms.push(room);
            chunk.stamps.push(AtomicU64::new(entry.stamp));
            self.used += 1;
            self.used - 1
        };
        if let Some(wide) = wide {
            self.wide.insert(local, wide);
        }
        Some(local)
    }

    /// Empties a slot.
    pub(super) fn leave(&mut self, local: u32) {
        if self.room_of(local).is_wide() {
            self.wide.remove(&local);
        }
        *self.kept_mut(local) = Kept::free();
        *self.room_mut(local) = Room::default();
        self.set_stamp(local, NEVER);
        self.free.push(local);
    }

    pub(super) fn set_stage(&mut self, local: u32, stage: Stage) {
        self.kept_mut(local).set_stage(stage);
    }

    pub(super) fn set_stamp(&self, local: u32, stamp: u64) {
        self.stamp_of(local).store(stamp, Ordering::Relaxed);
    }

    pub(super) fn set_checksum(&mut self, local: u32, checksum: Checksum) {
        self.kept_mut(local).set_checksum(checksum);
    }

    pub(super) fn set_removed(&mut self, local: u32) {
        self.room_mut(local).set_removed();
    }

    /// Has the processor fetch what a search for this hash will begin with.
    #[inline]
    pub(super) fn fetch(&self, hash: u64) {
        self.map.fetch(hash);
    }

    /// A number that may be that of a key with this hash, and mostly is if there is one.
    #[inline]
    pub(super) fn candidate(&self, hash: u64) -> Option<u32> {
        self.map.find(hash, |_| true)
    }

    /// Has the processor fetch what a lookup compares.
    #[inline]
    pub(super) fn fetch_entry(&self, local: u32) {
        prefetch(self.kept(local));
    }

    /// As [`Shard::find`], where this is the candidate.
    #[inline]
    pub(super) fn confirm(
        &self,
        candidate: u32,
        hash: u64,
        namespace: u32,
        key: &Key,
    ) -> Option<u32> {
        let kept = self.kept(candidate);
        if kept.key == *key && kept.namespace() == namespace {
            return Some(candidate);
        }
        self.find(hash, namespace, key)
    }

    /// The number of a published block.
    #[inline]
    pub(crate) fn find(&self, hash: u64, namespace: u32, key: &Key) -> Option<u32> {
        self.map.find(hash, |local| {
            let kept = self.kept(local);
            kept.key == *key && kept.namespace() == namespace
        })
    }

    /// Enters a block that is published already, if no other one has its identity, or one of a
    /// lower rank. Answers which of the two is not here.
    pub(super) fn add(&mut self, hash: u64, entry: &Entry, secret: &Secret) -> Option<Entry> {
        let twin = self.find(hash, entry.namespace, &entry.key);
        let known = twin.map(|local| (local, self.entry(local)));
        if let Some((local, known)) = known {
            if known.rank() > entry.rank() {
                return Some(*entry);
            }
            self.map_out(hash, local);
            self.leave(local);
        }
        // No table has more records than there are numbers.
        if let Some(local) = self.enter(entry) {
            self.map_in(hash, local, secret);
        }
        known.map(|(_, known)| known)
    }

    /// Makes room for about so many blocks, where there is none yet.
    pub(super) fn make_room(&mut self, blocks: u64) {
        self.map.make_room(blocks);
    }

    /// Gives all that slots hold other stamps.
    pub(super) fn restamp(&mut self, mut stamp: impl FnMut(u64) -> u64) {
        let stamps = self.chunks.iter_mut().flat_map(|chunk| &mut chunk.stamps);
        for known in stamps.map(AtomicU64::get_mut) {
            if *known != NEVER {
                *known = stamp(*known);
            }
        }
    }

    pub(super) fn map_in(&mut self, hash: u64, local: u32, secret: &Secret) {
        let chunks = &self.chunks;
        self.map.insert(hash, local, |local| {
            let kept = &chunks[local as usize / CHUNK].entries[local as usize % CHUNK];
            secret.hash(kept.namespace(), &kept.key)
        });
    }

    pub(super) fn map_out(&mut self, hash: u64, local: u32) {
        self.map.remove(hash, local);
    }
}
