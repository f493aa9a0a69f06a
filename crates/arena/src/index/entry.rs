//! One block of an arena: as it is worked with, and as it is kept.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use kvdepot_media::checksum::Checksum;

use crate::format::GRANULE;
use crate::format::record::Packed;
use crate::group::ORDINARY;
use crate::key::Key;

/// Counts uses, for all tiers of a depot, so that a block keeps its rank from tier to tier.
pub struct Uses(AtomicU64);

/// The stamps of one call's keys, which are in prefix order: a prompt's tail is always older than
/// its head, whichever of them moves first and wherever it goes.
#[derive(Clone, Copy, Debug)]
pub struct Stamps {
    first: u64,
    keys: u64,
}

impl Default for Uses {
    fn default() -> Uses {
        Uses(AtomicU64::new(ORDINARY))
    }
}

impl Uses {
    /// Stamps for a call of so many keys.
    pub fn call(&self, keys: usize) -> Stamps {
        let keys = keys as u64;
        Stamps {
            first: self.0.fetch_add(keys, Ordering::Relaxed),
            keys,
        }
    }

    /// The first of so many stamps.
    pub(super) fn span(&self, stamps: u64) -> u64 {
        self.0.fetch_add(stamps, Ordering::Relaxed)
    }
}

impl Stamps {
    /// The stamp of the key at `index`.
    pub fn of(self, index: usize) -> u64 {
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

impl Stage {
    const ALL: [Stage; 7] = [
        Stage::Free,
        Stage::SetAside,
        Stage::Reserved,
        Stage::Committing,
        Stage::Live,
        Stage::Dying,
        Stage::Doomed,
    ];
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
    /// Its record in the arena's table.
    pub(crate) record: u32,
    pub(crate) pins: u32,
    pub(crate) parts: u16,
    pub(crate) stage: Stage,
    /// Whether its bytes come from another tier, not from a put.
    pub(crate) copy: bool,
    /// Whether somebody has asked for its removal; a copy being written is not published then.
    pub(crate) removed: bool,
    /// Whether it is in a group.
    pub(crate) bound: bool,
    /// When it was used last, under its class.
    pub(crate) stamp: u64,
}

impl Entry {
    pub(super) const FREE: Entry = Entry {
        key: Key([0; 32]),
        namespace: 0,
        extents: Packed([0; 4]),
        len: 0,
        checksum: Checksum([0; 16]),
        sequence: 0,
        record: 0,
        pins: 0,
        parts: 1,
        stage: Stage::Free,
        copy: false,
        removed: false,
        bound: false,
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

/// Several extents, or more room than a rounding's: kept apart, as most blocks have neither.
#[derive(Clone, Copy)]
pub(super) struct Wide {
    pub(super) extents: Packed,
    pub(super) len: u64,
}

/// What is kept of an entry, but for its room and its stamp: a line of the processor's caches, so
/// that a lookup reads no other.
#[repr(C, align(64))]
pub(super) struct Kept {
    pub(super) key: Key,
    /// The namespace above the stage.
    bears: u32,
    pins: AtomicU32,
    sequence: u64,
    checksum: Checksum,
}

const _: () = assert!(size_of::<Kept>() == 64);

/// Where an entry's bytes are.
#[derive(Clone, Copy, Default)]
pub(super) struct Room {
    /// As on the medium.
    extent: u64,
    record: u32,
    /// Flags, room that the payload leaves, and parts.
    shape: u32,
}

const _: () = assert!(size_of::<Room>() == 16);

const STAGE_BITS: u32 = 3;
const COPY: u32 = 1;
const REMOVED: u32 = 2;
const WIDE: u32 = 4;
const SLACK_SHIFT: u32 = 3;
const SLACK_BITS: u32 = GRANULE.ilog2();
const PARTS_SHIFT: u32 = SLACK_SHIFT + SLACK_BITS;
/// Among the pins: whoever ends the last of them reports the block.
const ASIDE: u32 = 1 << 31;
/// Among the pins: the block is in a group.
const BOUND: u32 = 1 << 30;
const PINS: u32 = !(ASIDE | BOUND);
/// Most pins of a block: whoever never ends any reaches no other bit.
const PINS_MAX: u32 = 1 << 29;

impl Kept {
    pub(super) const fn free() -> Kept {
        Kept {
            key: Key([0; 32]),
            bears: 0,
            pins: AtomicU32::new(0),
            sequence: 0,
            checksum: Checksum([0; 16]),
        }
    }

    pub(super) fn of(entry: &Entry) -> Kept {
        Kept {
            key: entry.key,
            bears: entry.namespace << STAGE_BITS | entry.stage as u32,
            pins: AtomicU32::new(entry.pins),
            sequence: entry.sequence,
            checksum: entry.checksum,
        }
    }

    /// The entry again.
    pub(super) fn entry(
        &self,
        room: Room,
        wide: impl FnOnce() -> Option<Wide>,
        stamp: u64,
    ) -> Entry {
        let (extents, len) = room.extents(wide);
        Entry {
            key: self.key,
            namespace: self.namespace(),
            extents,
            len,
            checksum: self.checksum,
            sequence: self.sequence,
            record: room.record,
            pins: self.pins(),
            parts: (room.shape >> PARTS_SHIFT) as u16 + 1,
            stage: self.stage(),
            copy: room.shape & COPY > 0,
            removed: room.shape & REMOVED > 0,
            bound: self.is_bound(),
            stamp,
        }
    }

    pub(super) fn namespace(&self) -> u32 {
        self.bears >> STAGE_BITS
    }

    pub(super) fn stage(&self) -> Stage {
        let number = self.bears & ((1 << STAGE_BITS) - 1);
        Stage::ALL
            .get(number as usize)
            .copied()
            .unwrap_or(Stage::Free)
    }

    pub(super) fn set_stage(&mut self, stage: Stage) {
        self.bears = self.namespace() << STAGE_BITS | stage as u32;
    }

    pub(super) fn sequence(&self) -> u64 {
        self.sequence
    }

    pub(super) fn set_checksum(&mut self, checksum: Checksum) {
        self.checksum = checksum;
    }

    pub(super) fn pins(&self) -> u32 {
        self.pins.load(Ordering::Relaxed) & PINS
    }

    pub(super) fn is_bound(&self) -> bool {
        self.pins.load(Ordering::Relaxed) & BOUND > 0
    }

    pub(super) fn bind(&self, bound: bool) {
        match bound {
            true => self.pins.fetch_or(BOUND, Ordering::Relaxed),
            false => self.pins.fetch_and(!BOUND, Ordering::Relaxed),
        };
    }

    /// Whether this pin is the first; `None` where there are too many, and this is none.
    pub(super) fn pin(&self) -> Option<bool> {
        // Those who come at the same moment are far fewer than there is room above.
        let before = self.pins.fetch_add(1, Ordering::Relaxed) & PINS;
        if before >= PINS_MAX {
            self.pins.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(before == 0)
    }

    /// Whether that pin was the last, and has to be reported; `None` where there was none.
    pub(super) fn unpin(&self) -> Option<(bool, bool)> {
        let fewer = |pins: u32| (pins & PINS > 0).then(|| pins - 1);
        let before = self
            .pins
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, fewer)
            .ok()?;
        let last = before & PINS == 1;
        let aside = last && before & ASIDE > 0;
        if aside {
            self.pins.fetch_and(!ASIDE, Ordering::Relaxed);
        }
        Some((last, aside))
    }

    /// False where nobody has it pinned.
    pub(super) fn set_aside(&self) -> bool {
        let is_pinned = self.pins() > 0;
        if is_pinned {
            self.pins.fetch_or(ASIDE, Ordering::Relaxed);
        }
        is_pinned
    }
}

impl Room {
    /// That of an entry, and what does not fit in it.
    pub(super) fn of(entry: &Entry) -> (Room, Option<Wide>) {
        let slack = entry.extents.room() - entry.len;
        let is_wide = entry.extents.count() > 1 || slack >= GRANULE;
        let wide = is_wide.then_some(Wide {
            extents: entry.extents,
            len: entry.len,
        });
        let flag = |is_set: bool, bit: u32| if is_set { bit } else { 0 };
        let slack = if is_wide { 0 } else { slack as u32 };
        let shape = flag(entry.copy, COPY)
            | flag(entry.removed, REMOVED)
            | flag(is_wide, WIDE)
            | slack << SLACK_SHIFT
            | u32::from(entry.parts.saturating_sub(1)) << PARTS_SHIFT;
        let room = Room {
            extent: entry.extents.0[0],
            record: entry.record,
            shape,
        };
        (room, wide)
    }

    /// The extents, and the bytes of the payload.
    pub(super) fn extents(self, wide: impl FnOnce() -> Option<Wide>) -> (Packed, u64) {
        if let Some(wide) = self.is_wide().then(wide).flatten() {
            return (wide.extents, wide.len);
        }
        let extents = Packed([self.extent, 0, 0, 0]);
        let slack = self.shape >> SLACK_SHIFT & ((1 << SLACK_BITS) - 1);
        (extents, extents.room() - u64::from(slack))
    }

    pub(super) fn is_wide(self) -> bool {
        self.shape & WIDE > 0
    }

    pub(super) fn set_removed(&mut self) {
        self.shape |= REMOVED;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_stamps_its_last_key_oldest() {
        let uses = Uses::default();
        let (one, two) = (uses.call(3), uses.call(2));
        let stamps = [one.of(2), one.of(1), one.of(0), two.of(1), two.of(0)];
        assert!(stamps.is_sorted_by(|a, b| a < b), "{stamps:?}");
    }

    #[test]
    fn pins_that_nobody_ends_do_not_add_up_to_none() {
        let extents = Packed::new(&[(4096, 4096)]).unwrap();
        let kept = Kept::of(&Entry {
            pins: PINS_MAX - 1,
            ..Entry::new(Key([5; 32]), 0, extents, 1)
        });
        assert_eq!((kept.pin(), kept.pin()), (Some(false), None));
        assert_eq!(kept.pins(), PINS_MAX);
        assert_eq!(kept.unpin(), Some((false, false)));
        assert_eq!(kept.pin(), Some(false));
    }

    #[test]
    fn an_entry_is_kept_whole() {
        let one = Packed::new(&[(1 << 50, 8192)]).unwrap();
        let two = Packed::new(&[(4096, 4096), (1 << 20, 4096)]).unwrap();
        let rooms = [(one, 8192), (one, 4097), (one, 1), (two, 8192), (two, 5000)];
        for (extents, len) in rooms {
            let entry = Entry {
                checksum: Checksum([7; 16]),
                sequence: 3 << 40 | 9,
                record: u32::MAX - 2,
                pins: 3,
                parts: 4096,
                stage: Stage::Doomed,
                copy: len % 2 == 0,
                removed: len % 2 == 1,
                stamp: 11,
                ..Entry::new(Key([5; 32]), (1 << 29) - 1, extents, len)
            };
            let (room, wide) = Room::of(&entry);
            let again = Kept::of(&entry).entry(room, || wide, 11);
            assert_eq!(format!("{entry:?}"), format!("{again:?}"));
        }
    }
}
