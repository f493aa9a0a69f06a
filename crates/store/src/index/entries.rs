//! The entries of one arena, a slot each (the same number as its record's), and the order of
//! use: a list through the entries that nobody pins, oldest at the tail.

use kvdepot_media::checksum::Checksum;

use crate::Key;
use crate::format::record::Packed;

/// No slot.
pub(crate) const NONE: u32 = u32::MAX;

/// What a slot is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Nothing.
    Free,
    /// Being written; invisible.
    Reserved,
    /// Published.
    Live,
    /// Unpublished while pinned: its extents are freed with the last pin.
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
    newer: u32,
    older: u32,
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
        newer: NONE,
        older: NONE,
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
    newest: u32,
    oldest: u32,
}

impl Entries {
    pub(crate) fn new(limit: u32) -> Entries {
        Entries {
            slots: Vec::new(),
            free: Vec::new(),
            limit,
            newest: NONE,
            oldest: NONE,
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
        self.slots[slot as usize] = Entry::FREE;
        self.free.push(slot);
    }

    /// Slots that can still be taken.
    pub(crate) fn vacant(&self) -> u64 {
        u64::from(self.limit) - self.slots.len() as u64 + self.free.len() as u64
    }

    /// Fills the slots from a recovered table: one entry a slot, `None` where it is free.
    pub(crate) fn restore(&mut self, recovered: impl Iterator<Item = (u32, Entry)>, used: u32) {
        self.slots = vec![Entry::FREE; used as usize];
        for (slot, entry) in recovered {
            self.slots[slot as usize] = entry;
        }
        // Low slots are taken first, so that a table fills from its beginning.
        self.free = (0..used)
            .rev()
            .filter(|slot| self.slots[*slot as usize].stage == Stage::Free)
            .collect();
    }

    pub(crate) fn get(&self, slot: u32) -> &Entry {
        &self.slots[slot as usize]
    }

    pub(crate) fn get_mut(&mut self, slot: u32) -> &mut Entry {
        &mut self.slots[slot as usize]
    }

    pub(crate) fn set(&mut self, slot: u32, entry: Entry) {
        self.slots[slot as usize] = entry;
    }

    /// The entry, when the slot still holds that sequence.
    pub(crate) fn check(&self, slot: u32, sequence: u64) -> Option<&Entry> {
        self.slots
            .get(slot as usize)
            .filter(|entry| entry.stage != Stage::Free && entry.sequence == sequence)
    }

    /// Enters an entry as the most recently used.
    pub(crate) fn link(&mut self, slot: u32) {
        let newest = self.newest;
        let entry = self.get_mut(slot);
        entry.newer = NONE;
        entry.older = newest;
        match newest {
            NONE => self.oldest = slot,
            newest => self.get_mut(newest).newer = slot,
        }
        self.newest = slot;
    }

    /// Takes an entry out of the order.
    pub(crate) fn unlink(&mut self, slot: u32) {
        let (newer, older) = (self.get(slot).newer, self.get(slot).older);
        match newer {
            NONE => self.newest = older,
            newer => self.get_mut(newer).older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.get_mut(older).newer = newer,
        }
    }

    /// The least recently used entry that nobody pins.
    pub(crate) fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }
}
