//! The end of blocks: out of the index under the lock, dead on the medium without it, and only
//! then room for others.
//!
//! `Live → Dying → Doomed → Free`. A dying block is invisible, and its record may still be live on
//! the medium: its extents and its slot are nobody's, so that after a crash an old record never
//! describes another block's bytes. Its slot belongs to whoever unpublished it, who writes the
//! dead record, and syncs it where blocks shall outlive a power cut, while no lock is held. Then it
//! is doomed: its room is free once its last pin has ended. Where the medium does not take the
//! dead record it stays dying, and is not used again before the next opening.

use std::sync::atomic::Ordering;

use crate::body::{Arena, State};
use crate::format::record::{CREATED_AT, Packed, Record, State as RecordState, seed};
use crate::held::{self, Guard};
use crate::index::{Entry, Stage};
use crate::medium::Written;
use crate::place::Token;

/// Most blocks that end in one go: what others wait for, of the lock and of the medium.
pub(crate) const BATCH: usize = 512;

/// Blocks that leave the index, or whose room is freed, before others who wait for the lock have
/// it: some microseconds.
pub(crate) fn bite_len() -> usize {
    kvdepot_media::items_per_turn(2, 8)
}

/// Blocks that are out of the index, each with the record that is to be written. Whoever has them
/// buries them; until then those who need room wait for it.
#[must_use = "until they are buried nobody gets their room"]
#[derive(Default)]
pub(crate) struct Dying(Vec<Grave>);

/// A block that is to be evicted: its slot, and its stamp when it was chosen for that.
pub(crate) type Victim = (u32, Option<u64>);

/// A block's slot, and its record.
struct Grave {
    slot: u32,
    record: (u32, Record),
}

impl Dying {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

impl Arena {
    /// Takes a block out of the index; whether it was there. The caller [buries](Arena::bury) it.
    pub(crate) fn unpublish(&self, state: &mut State, slot: u32, dying: &mut Dying) -> bool {
        let entry = self.index.unpublish(slot, None);
        if let Some(entry) = &entry {
            self.gone(state, slot, entry, dying);
        }
        entry.is_some()
    }

    /// Notes that a block is out of the index.
    fn gone(&self, state: &mut State, slot: u32, entry: &Entry, dying: &mut Dying) {
        state.live_bytes -= entry.len;
        if entry.bound {
            self.index.loosen(slot);
        }
        let identity = self.identity(entry);
        state.roll.went(entry.namespace, identity, entry.len);
        if entry.pins > 0 {
            state.lingering.insert(slot);
        }
        if self.table.is_none() {
            // Nothing outlives this process, so nothing has to be forgotten.
            return self.doom(state, slot);
        }
        // When it was stored is on the medium.
        let record = self.record(entry, RecordState::Dead, 0);
        dying.0.push(Grave {
            slot,
            record: (entry.record, record),
        });
    }

    /// Sends a block on its way that was written and that nobody shall find. The caller
    /// [buries](Arena::bury) it.
    pub(crate) fn pass_over(&self, state: &mut State, slot: u32, dying: &mut Dying) {
        let entry = self.index.get(slot);
        state.reserved.remove(entry.namespace, &entry.key, slot);
        self.index.set_stage(slot, Stage::Dying);
        let record = self.record(&entry, RecordState::Dead, 0);
        dying.0.push(Grave {
            slot,
            record: (entry.record, record),
        });
    }

    /// As [`Arena::unpublish`], where nobody has pinned the block, or used it since that stamp;
    /// else it is kept.
    pub(crate) fn evict(
        &self,
        state: &mut State,
        (slot, since): Victim,
        dying: &mut Dying,
    ) -> bool {
        let Some(entry) = self.index.unpublish(slot, Some(since)) else {
            state.order.keep(&self.index, slot);
            return false;
        };
        if entry.bound {
            self.break_groups(state, slot);
        }
        self.gone(state, slot, &entry, dying);
        self.counters.evicted_blocks.fetch_add(1, Ordering::Relaxed);
        self.counters
            .evicted_bytes
            .fetch_add(entry.extents.room(), Ordering::Relaxed);
        true
    }

    /// Makes the medium forget blocks, without the lock meanwhile, and frees their room, in bites
    /// between which others may have the lock, and room that nobody is promised; how many it has
    /// forgotten.
    pub(crate) fn bury(&self, state: &mut Guard<'_, State>, dying: Dying) -> usize {
        if dying.len() == 0 {
            return 0;
        }
        let burial = state.burials.begin();
        let dead = state.unlocked(|| self.write_dead(dying));
        for (at, some) in dead.chunks(bite_len()).enumerate() {
            if at > 0 {
                state.give_way();
            }
            some.iter().for_each(|slot| self.doom(state, *slot));
        }
        self.end_burial(state, burial);
        dead.len()
    }

    /// Writes the records of dying blocks, and answers the slots of those that the medium has
    /// forgotten.
    fn write_dead(&self, dying: Dying) -> Vec<u32> {
        let graves = dying.0.into_iter();
        let (slots, mut records): (Vec<u32>, Vec<(u32, Record)>) =
            graves.map(|Grave { slot, record }| (slot, record)).unzip();
        self.read_created(&mut records);
        let dead = self.write_records(&records);
        let dead = slots.into_iter().zip(dead).filter(|(_, dead)| *dead);
        dead.map(|(slot, _)| slot).collect()
    }

    /// Ends a burial that has begun.
    pub(crate) fn end_burial(&self, state: &mut State, burial: u64) {
        state.burials.end(burial);
        self.burial.notify_all();
    }

    /// Waits for the burials that others are at; false when there is none.
    pub(crate) fn await_burials(&self, state: &mut Guard<'_, State>) -> bool {
        let (next, waits) = (state.burials.next(), state.burials.count() > 0);
        while state.burials.has_before(next) {
            state.wait(&self.burial);
        }
        waits
    }

    /// Waits until the medium has forgotten what nobody shall find any more: what others are
    /// burying, and copies whose records were on their way when their removal was asked for.
    pub(crate) fn await_forgotten(&self) {
        if self.table.is_none() {
            return;
        }
        let mut state = self.state.lock();
        let (burials, commits) = (state.burials.next(), state.commits.next());
        while state.burials.has_before(burials) || state.commits.has_before(commits) {
            state.wait(&self.burial);
        }
    }

    /// What is dead on the medium is free with its last pin.
    fn doom(&self, state: &mut State, slot: u32) {
        let is_pinned = self.index.set_stage(slot, Stage::Doomed);
        if !is_pinned {
            self.release(state, slot);
        }
    }

    /// Enters a block that nobody finds yet.
    pub(crate) fn enter(&self, state: &mut State, entry: &Entry) -> Option<u32> {
        let slot = self.index.enter(entry)?;
        state.bear(entry.namespace);
        Some(slot)
    }

    /// Empties a slot, and nothing else.
    pub(crate) fn forget(&self, state: &mut State, slot: u32) -> Entry {
        let entry = self.index.get(slot);
        state.borne[entry.namespace as usize] -= 1;
        self.index.forget(slot);
        entry
    }

    pub(crate) fn free_extents(&self, state: &mut State, extents: &Packed) {
        for (offset, len) in extents.iter() {
            if self.is_lost(offset, len) {
                self.lose(state, offset, len);
            } else if let Err(error) = state.pool.free(offset - self.layout().data) {
                tracing::error!(tier = self.name, offset, %error,
                    "internal error: extent freed twice; the second free is ignored");
            }
        }
    }

    /// Frees the extents and the slot of a block that nobody can see or has pinned, but for what
    /// the medium has lost.
    pub(crate) fn release(&self, state: &mut State, slot: u32) {
        let entry = self.forget(state, slot);
        debug_assert!(entry.pins == 0 && !matches!(entry.stage, Stage::Live | Stage::Dying));
        state.lingering.remove(&slot);
        self.free_extents(state, &entry.extents);
        // A record that the medium does not keep is no use to another block.
        if self.keeps_record(entry.record) {
            state.records.give_back(entry.record);
        }
    }

    /// Ends blocks that nobody asked for by their room: unpublishes those that these tokens name,
    /// some at a time. For each token, whether it named one: of equal tokens the first. Pinned ones
    /// give their room back with the last pin.
    pub(crate) fn drop_blocks(&self, tokens: &[Token], moving: bool) -> Vec<bool> {
        let mut gone = Vec::with_capacity(tokens.len());
        for some in tokens.chunks(BATCH) {
            let mut state = self.state.lock();
            // From the first of them on those who need room wait for theirs.
            let burial = state.burials.begin();
            let mut dying = Dying::default();
            for (at, few) in some.chunks(bite_len()).enumerate() {
                if at > 0 {
                    state.give_way();
                }
                let live = few.iter().enumerate();
                let live = live.filter(|(_, token)| self.is_live(**token));
                let mut live: Vec<(u32, usize)> =
                    live.map(|(at, token)| (token.slot, at)).collect();
                live.sort_unstable();
                let first = gone.len();
                gone.resize(first + few.len(), false);
                state.roll.moving = moving;
                for (slot, at) in live {
                    gone[first + at] = self.unpublish(&mut state, slot, &mut dying);
                }
                state.roll.moving = false;
            }
            self.bury(&mut state, dying);
            self.end_burial(&mut state, burial);
        }
        gone
    }

    /// Takes from the medium when the blocks of these records were stored.
    pub(crate) fn read_created(&self, records: &mut [(u32, Record)]) {
        let (medium, layout) = (self.medium.load(), self.layout());
        for (number, record) in records {
            let mut created = [0; 4];
            let at = layout.record(*number) + CREATED_AT;
            if medium.read_at(at, &mut created).is_ok() {
                record.created = u32::from_le_bytes(created);
            }
        }
    }

    /// Writes records, durably if blocks shall outlive a power cut; for each, whether the medium
    /// has it. Each of these slots is the caller's alone.
    pub(crate) fn write_records(&self, records: &[(u32, Record)]) -> Vec<bool> {
        let Some(table) = &self.table else {
            return vec![true; records.len()];
        };
        held::may_wait();
        let layout = self.layout();
        let written = |(number, record): &(u32, Record)| {
            (
                layout.record(*number),
                record.encode(seed(&table.uuid, *number)),
            )
        };
        let written: Vec<Written> = records.iter().map(written).collect();
        self.medium.load().commit(&written, self.is_durable())
    }

    /// Makes ranges durable if blocks shall outlive a power cut; for each, whether it is.
    pub(crate) fn sync_each(&self, ranges: &[(u64, u64)]) -> Vec<bool> {
        held::may_wait();
        match self.is_durable() {
            true => self.medium.load().sync(ranges),
            false => vec![true; ranges.len()],
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;
    use std::time::Duration;

    use kvdepot_alloc::Hint;
    use kvdepot_media::checksum::Checksum;

    use super::*;
    use crate::index::Uses;
    use crate::inspect::Inspection;
    use crate::key::{Key, NamespaceId};
    use crate::options::{Durability, Options};
    use crate::place::{Token, Wanted};

    const NAMESPACE: NamespaceId = NamespaceId([1; 16]);
    const LEN_OF_ALL: u64 = 4 << 10;

    fn open(path: &Path) -> Arc<Arena> {
        let config = Options {
            capacity: Some(1 << 20),
            records: Some(512),
            durability: Durability::Power,
            ..Options::default()
        };
        let (wait, uses) = (Duration::ZERO, Uses::default());
        let field = |option: &str| option.to_owned();
        let (mut arena, _) = Arena::open(("Dax", 0), path, &config, &field, wait).unwrap();
        arena.rank(&uses);
        arena.keep();
        Arc::new(arena)
    }

    fn wanted(key: u8) -> Wanted {
        Wanted {
            key: Key([key; 32]),
            len: LEN_OF_ALL,
            parts: 1,
            stamp: u64::from(key),
            copy: false,
            evict: true,
        }
    }

    fn store(arena: &Arc<Arena>, key: u8, checksum: u8) -> Token {
        let reserved = arena.reserve(NAMESPACE, &[wanted(key)]).unwrap();
        let token = reserved
            .into_iter()
            .next()
            .unwrap()
            .ok()
            .unwrap()
            .hand_out()
            .token;
        assert_eq!(
            arena.commit(&[(token, Checksum([checksum; 16]))], false),
            [true]
        );
        token
    }

    impl Arena {
        /// Unpublishes blocks that are buried later.
        fn disown(&self, tokens: &[Token]) -> Dying {
            let mut dying = Dying::default();
            let mut state = self.state.lock();
            for slot in self.live_slots(tokens) {
                self.unpublish(&mut state, slot, &mut dying);
            }
            dying
        }

        fn bury_later(&self, dying: Dying) {
            self.bury(&mut self.state.lock(), dying);
        }
    }

    fn has(arena: &Arena, key: u8) -> bool {
        let mut found = [false];
        arena.contains(NAMESPACE, &[Key([key; 32])], &mut found);
        found[0]
    }

    fn on_medium(path: &Path) -> usize {
        let inspection = Inspection::open(path).unwrap();
        inspection.blocks().unwrap().0.len()
    }

    #[test]
    fn room_is_free_once_the_record_is_dead_on_the_medium_and_the_last_pin_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("arena");
        let arena = open(&path);
        let empty = arena.stats().free_bytes;
        for pinned in [false, true] {
            let token = store(&arena, 7, 7);
            if pinned {
                arena.pin_token(token).unwrap();
            }
            let dying = arena.disown(&[token]);
            assert!(!has(&arena, 7));
            assert!(arena.pin_token(token).is_none());
            assert_eq!(on_medium(&path), 1, "a crash now brings it back, whole");
            assert_eq!(arena.stats().free_bytes, empty - LEN_OF_ALL);
            if pinned {
                arena.unpin([token].into_iter());
                assert_eq!(arena.stats().free_bytes, empty - LEN_OF_ALL, "not dead yet");
                arena.bury_later(dying);
            } else {
                arena.bury_later(dying);
            }
            assert_eq!(on_medium(&path), 0);
            assert_eq!(arena.stats().free_bytes, empty);
        }
        let token = store(&arena, 7, 7);
        arena.pin_token(token).unwrap();
        assert_eq!(arena.discard(&[token]), 1);
        assert_eq!(on_medium(&path), 0);
        assert_eq!(arena.stats().free_bytes, empty - LEN_OF_ALL, "still read");
        arena.unpin([token].into_iter());
        assert_eq!(arena.stats().free_bytes, empty);
    }

    #[test]
    fn a_block_that_is_stored_anew_while_the_old_one_dies_is_the_one_after_a_crash() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("arena");
        let arena = open(&path);
        let old = store(&arena, 7, 1);
        let dying = arena.disown(&[old]);
        store(&arena, 7, 2);
        assert_eq!(on_medium(&path), 1, "the newer of two");
        // The process dies before the old record is written.
        drop((dying, arena));
        let arena = open(&path);
        let found = arena.find_again(NAMESPACE, &Key([7; 32]), 0).unwrap();
        assert_eq!(found.checksum, Checksum([2; 16]));
        assert_eq!(arena.stats().blocks, 1);
    }

    #[test]
    fn who_needs_room_waits_for_a_burial_that_makes_it_and_evicts_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let arena = open(&dir.path().join("arena"));
        let mut tokens = Vec::new();
        for key in 0..=u8::MAX {
            if arena.stats().free_bytes < LEN_OF_ALL {
                break;
            }
            tokens.push(store(&arena, key, key));
        }
        let blocks = arena.stats().blocks;
        let mut state = arena.state.lock();
        let burial = state.burials.begin();
        drop(state);
        let dying = arena.disown(&tokens[100..104]);
        let space = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                arena
                    .make_space(NAMESPACE, &wanted(u8::MAX), Hint::default())
                    .ok()
                    .unwrap()
            });
            std::thread::sleep(Duration::from_millis(20));
            assert!(
                !waiting.is_finished(),
                "the medium has not forgotten any yet"
            );
            assert!(has(&arena, 0), "the index answers meanwhile");
            let mut state = arena.state.lock();
            state.burials.end(burial);
            arena.bury(&mut state, dying);
            drop(state);
            waiting.join().unwrap()
        });
        let stats = arena.stats();
        assert_eq!((stats.blocks, stats.evicted_blocks), (blocks - 4, 0));
        assert_eq!(stats.free_bytes, 3 * LEN_OF_ALL, "one is set aside");
        assert!(!arena.device().empty);
        drop(space);
        assert_eq!(arena.stats().free_bytes, 4 * LEN_OF_ALL);
    }

    #[test]
    fn who_has_waited_for_one_burial_waits_for_the_next_where_all_else_has_gone() {
        let dir = tempfile::tempdir().unwrap();
        let arena = open(&dir.path().join("arena"));
        let mut tokens = Vec::new();
        while arena.stats().free_bytes >= LEN_OF_ALL {
            let key = tokens.len() as u8;
            tokens.push(store(&arena, key, key));
        }
        let burial = arena.state.lock().burials.begin();
        let dying = arena.disown(&tokens);
        let space = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let wanted = wanted(u8::MAX);
                arena
                    .make_space(NAMESPACE, &wanted, Hint::default())
                    .is_ok()
            });
            std::thread::sleep(Duration::from_millis(20));
            // One burial ends, whose room somebody else has, and another one has begun.
            let mut state = arena.state.lock();
            let next = state.burials.begin();
            arena.end_burial(&mut state, burial);
            drop(state);
            std::thread::sleep(Duration::from_millis(20));
            let mut state = arena.state.lock();
            state.burials.end(next);
            arena.bury(&mut state, dying);
            drop(state);
            waiting.join().unwrap()
        });
        assert!(space, "there was room for all");
    }

    #[test]
    fn a_lookup_that_does_not_wait_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let arena = open(&dir.path().join("arena"));
        store(&arena, 7, 7);
        let ask = || has(&arena, 7);
        assert_eq!(held::at_once(ask), Ok(true));
        let state = arena.state.lock();
        assert_eq!(held::at_once(ask), Ok(true), "nor does it for a put");
        drop(state);
        let changed = arena.index.hold();
        assert!(held::at_once(ask).is_err() && arena.is_busy());
        drop(changed);
        assert_eq!(held::at_once(ask), Ok(true));
    }
}
