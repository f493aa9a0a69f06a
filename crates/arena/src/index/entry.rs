//! One block of an arena: as it is worked with, and as it is kept.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use kvdepot_media::checksum::Checksum;

use crate::format::GRANULE;
use crate::format::record::Packed;
use crate::group::ORDINARY;
use crate::key::Key;

/// A clock that counts uses, shared by all tiers of a depot. A block keeps its rank from tier to
/// tier.
pub struct Uses(AtomicU64);

/// The stamps of a call's blocks, in prefix order.
///
/// The later blocks of a prompt always have older stamps than its first ones. This holds regardless
/// of the order in which blocks move, of their tier, and of the number of calls that store them.
///
/// ```text
///   63 62 61                 20 19                           2 1      0
///  | class | time of use       | number of later blocks       | state  |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamps {
    /// Of the first of the blocks that were there, and how many these are.
    there: (u64, usize),
    /// Of the first of the others.
    first: u64,
}

/// Blocks of a prompt whose stamps differ: those behind them are as old as the last of these.
const DEPTH_BITS: u32 = 18;
const DEPTH: u64 = (1 << DEPTH_BITS) - 1;
const DEPTH_SHIFT: u32 = 2;
/// One use. Each takes two: what is new behind blocks that were there is older than these.
const USE: u64 = 1 << (DEPTH_SHIFT + DEPTH_BITS);

/// What is known of a prompt at a use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sight {
    /// It is offered for the first time.
    First = 0,
    /// It is offered again; it found no space before.
    Again = 1,
    /// It is stored.
    There = 2,
    /// It belongs to an explicit save.
    Saved = 3,
}

impl Default for Uses {
    fn default() -> Uses {
        Uses(AtomicU64::new(ORDINARY))
    }
}

impl Uses {
    /// Returns stamps for stored blocks.
    pub fn asked(&self) -> Stamps {
        self.call(usize::MAX)
    }

    /// Returns stamps for blocks of a put, of which the first `there` are stored.
    pub fn call(&self, there: usize) -> Stamps {
        let now = self.0.fetch_add(2 * USE, Ordering::Relaxed) + USE;
        Stamps {
            there: (now | DEPTH << DEPTH_SHIFT | Sight::There as u64, there),
            first: (now - USE) | DEPTH << DEPTH_SHIFT,
        }
    }

    /// Returns a stamp later than all uses until now.
    pub fn now(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// The first of so many stamps.
    pub(super) fn span(&self, stamps: u64) -> u64 {
        let uses = stamps.next_multiple_of(2 * USE);
        self.0.fetch_add(uses, Ordering::Relaxed)
    }
}

impl Stamps {
    /// Returns the stamps of offered blocks that follow a block with the stamp `stamp` in their
    /// prompt.
    #[must_use]
    pub fn behind(stamp: u64) -> Stamps {
        let next = deeper(stamp, 1);
        let first = match is_there(stamp) {
            true => ((stamp & !(USE - 1)) - USE) | (DEPTH << DEPTH_SHIFT),
            false => next,
        };
        Stamps {
            there: (next, 0),
            first,
        }
    }

    /// Returns the stamps for a call whose first `stored` blocks are stored.
    ///
    /// If the previous block is new itself, these blocks count as new: their stamps are older than
    /// its stamp.
    #[must_use]
    pub fn with_stored(self, stored: usize) -> Stamps {
        let (there, _) = self.there;
        let count = if is_there(there) { stored } else { 0 };
        Stamps {
            there: (there, count),
            ..self
        }
    }

    /// Returns the stamps for blocks that are offered again, because they found no space the first
    /// time.
    #[must_use]
    pub fn again(self) -> Stamps {
        Stamps {
            first: self.first | Sight::Again as u64,
            ..self
        }
    }

    /// Returns the stamps for blocks of an explicit save.
    #[must_use]
    pub fn saved(self) -> Stamps {
        let (there, count) = self.there;
        Stamps {
            there: (there | Sight::Saved as u64, count),
            first: self.first | Sight::Saved as u64,
        }
    }

    /// Returns the stamps for new blocks whose position in their prompt is unknown. They count as
    /// the last ones.
    #[must_use]
    pub fn deepest(self) -> Stamps {
        Stamps {
            first: self.first & !(DEPTH << DEPTH_SHIFT),
            ..self
        }
    }

    /// Returns the stamp of a block of this use that has the position and the sight of `stamp`,
    /// which counts uses of another depot.
    #[must_use]
    pub fn like(self, stamp: u64) -> u64 {
        let (there, _) = self.there;
        let first = if stamp & USE == 0 { self.first } else { there };
        first & !(USE - 1) | stamp & (USE - 1)
    }

    /// Returns the stamp of the block at `index` in the call.
    #[must_use]
    pub fn of(self, index: usize) -> u64 {
        let (there, count) = self.there;
        match index.checked_sub(count) {
            Some(new) => deeper(self.first, new),
            None => deeper(there, index),
        }
    }
}

/// Blocks behind one with this stamp that have other stamps.
fn behind_at_most(stamp: u64) -> u64 {
    stamp >> DEPTH_SHIFT & DEPTH
}

fn is_there(stamp: u64) -> bool {
    stamp & 3 == Sight::There as u64
}

fn deeper(stamp: u64, blocks: usize) -> u64 {
    stamp - (behind_at_most(stamp).min(blocks as u64) << DEPTH_SHIFT)
}

/// The fields of a stamp.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Use {
    /// First stamp of the use.
    pub began: u64,
    /// True if the blocks are offered for the first time.
    pub is_first: bool,
    /// True if the blocks are offered again, because they found no space the first time.
    pub is_again: bool,
    /// True if the blocks belong to an explicit save.
    pub is_saved: bool,
    /// Number of new blocks of the prompt before this one; [`u64::MAX`] if it is unknown or exceeds
    /// the range of a stamp.
    pub depth: u64,
}

impl Use {
    /// Number of low bits in a stamp that encode the position of a block in its prompt.
    pub const BITS: u32 = DEPTH_SHIFT + DEPTH_BITS;

    /// Returns these bits for the block at `index` of a call, which is stored.
    #[must_use]
    pub fn within(index: usize) -> u64 {
        deeper(DEPTH << DEPTH_SHIFT, index) | Sight::There as u64
    }

    /// Decodes a stamp.
    #[must_use]
    pub fn of(stamp: u64) -> Use {
        Use {
            began: stamp & !(USE - 1),
            is_first: stamp & 3 == Sight::First as u64,
            is_again: stamp & 3 == Sight::Again as u64,
            is_saved: stamp & 3 == Sight::Saved as u64,
            depth: match behind_at_most(stamp) {
                0 => u64::MAX,
                behind => DEPTH - behind,
            },
        }
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
    fn a_prompts_last_block_is_its_oldest_however_many_calls_bring_it() {
        let uses = Uses::default();
        let one = uses.call(1);
        let rest = Stamps::behind(one.of(2));
        let two = uses.asked();
        let new = Stamps::behind(two.of(7));
        let stamps = [
            rest.of(1),
            rest.of(0),
            one.of(2),
            one.of(1),
            one.of(0),
            new.of(1),
            new.of(0),
            two.of(1),
            two.of(0),
        ];
        assert!(stamps.is_sorted_by(|a, b| a < b), "{stamps:?}");
        let uses = stamps.map(Use::of);
        let of = |at: usize| (uses[at].is_first, uses[at].depth);
        assert_eq!([of(0), of(3), of(4)], [(true, 3), (true, 0), (false, 0)]);
        assert_eq!([of(5), of(6), of(7)], [(true, 1), (true, 0), (false, 1)]);
        assert!(uses[0].began == uses[3].began && stamps[3] >= uses[0].began);
        let again = Stamps::behind(rest.again().of(5));
        assert!(!Use::of(again.of(0)).is_first && again.of(0) > uses[0].began);
        // Deeper than that all are as old.
        let deep = Stamps::behind(one.of(1 << 40));
        assert_eq!((deep.of(0), deep.of(7)), (uses[0].began, uses[0].began));
        let unknown = Stamps::behind(one.deepest().of(1)).of(7);
        assert_eq!(Use::of(unknown).depth, u64::MAX);
    }

    #[test]
    fn blocks_that_are_there_are_not_new_behind_others_that_are() {
        let uses = Uses::default();
        let asked = uses.asked();
        let rest = Stamps::behind(asked.of(3)).with_stored(2);
        let stamps = [rest.of(3), rest.of(2), rest.of(1), rest.of(0), asked.of(3)];
        assert!(stamps.is_sorted_by(|a, b| a < b), "{stamps:?}");
        let of = |stamp| (Use::of(stamp).is_first, Use::of(stamp).depth);
        let each = stamps.map(of);
        assert_eq!(each[..2], [(true, 1), (true, 0)]);
        assert_eq!(each[2..], [(false, 5), (false, 4), (false, 3)]);
        // Behind new blocks they are as old as new ones.
        let new = Stamps::behind(rest.of(3)).with_stored(2);
        assert_eq!([0, 2].map(|at| of(new.of(at))), [(true, 2), (true, 4)]);
        let saved = [rest, new].map(|stamps| Use::of(stamps.saved().of(0)));
        assert!(saved.iter().all(|one| one.is_saved && !one.is_first));
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
