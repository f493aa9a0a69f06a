//! Eviction: least recently used prompts first, within a prompt its later blocks first. The
//! order of use sees to both; this takes from its tail. Where that would leave room enough but in
//! pieces too small, one hole is made instead, where the oldest blocks lie together.

use std::cmp::Reverse;
use std::sync::atomic::Ordering;

use kvdepot_alloc::Extent;

use super::{Arena, State, Token};
use crate::format::GRANULE;
use crate::format::record::{LEN, State as RecordState};
use crate::index::{Entry, KeyMap, Stage};
use crate::{Key, NamespaceId};

/// How far eviction runs ahead of need: one part in 64 of the arena (1.6 %, within the 2 % that
/// the protocol allows), so that a put in a full arena does not evict for each block alone and
/// finds free extents that are not all splinters.
const AHEAD: u64 = 64;

/// How far a hole runs ahead of need: one part in 256 of the arena, the rest of those 2 %. Finding
/// the place for it means to look at every block, and the next large blocks have room in it.
const HOLE_AHEAD: u64 = 256;

/// An extent of a block.
struct Taken {
    begin: u64,
    end: u64,
    /// When the block was used last; the greatest number where it must stay.
    stamp: u64,
    slot: u32,
}

impl Arena {
    /// Frees room for `need` bytes and a slot, and somewhat more. False when nothing more can go.
    ///
    /// The records are dead on the medium before their extents can be allocated again. Nothing
    /// goes when all that may go would not be enough.
    pub(super) fn evict(&self, state: &mut State, need: u64) -> bool {
        if state.pool.free_bytes() + state.entries.evictable_bytes() < need {
            return false;
        }
        let bytes_wanted = self.with_ahead(need);
        // A full table evicts like a full arena; one slot at a time is enough of it.
        let slots_wanted = 1 + self.layout().records / (AHEAD * 2);
        let mut victims = Vec::new();
        let mut bytes = state.pool.free_bytes();
        let mut slots = state.entries.vacant();
        let (bytes_before, slots_before) = (bytes, slots);
        while (bytes < bytes_wanted && bytes_before < need.max(1))
            || (slots < slots_wanted && slots_before == 0)
            || victims.is_empty()
        {
            let Some(slot) = state.entries.oldest() else {
                break;
            };
            bytes += state.entries.get(slot).extents.room();
            slots += 1;
            victims.push(slot);
        }
        self.evict_blocks(state, &victims) && !victims.is_empty()
    }

    /// `need`, and as much as eviction may run ahead of it.
    pub(super) fn with_ahead(&self, need: u64) -> u64 {
        need.saturating_add(self.layout().data_len() / AHEAD)
    }

    /// Makes room for `need` bytes in at most `pieces` extents where enough is free, but too
    /// scattered: a hole that runs ahead of need, or else the least that will do. False when
    /// there is no place for it: pinned and reserved blocks stay where they are.
    pub(super) fn make_hole(&self, state: &mut State, need: u64, pieces: usize) -> bool {
        let need = need.next_multiple_of(GRANULE);
        let ahead = self.layout().data_len() / HOLE_AHEAD;
        let ample = (ahead > need).then(|| self.around_hole(state, ahead, 1));
        let victims = ample
            .flatten()
            .or_else(|| self.around_hole(state, need, pieces));
        victims.is_some_and(|victims| self.evict_blocks(state, &victims))
    }

    /// The blocks that stand in the way of `pieces` free extents of `need` bytes together: the
    /// largest ones there are, and a hole for the rest. Of all places for it that one is taken
    /// whose last used block was used longest ago.
    fn around_hole(&self, state: &State, need: u64, pieces: usize) -> Option<Vec<u32>> {
        let mut taken: Vec<Taken> = Vec::new();
        for (slot, entry) in state.entries.used() {
            let stays = entry.stage != Stage::Live || entry.pins > 0;
            let stamp = if stays { u64::MAX } else { entry.stamp };
            let of = |(begin, len)| Taken {
                begin,
                end: begin + len,
                stamp,
                slot,
            };
            taken.extend(entry.extents.iter().map(of));
        }
        let (data, end) = (
            self.layout().data,
            self.layout().data + self.layout().data_len(),
        );
        // What is free already, and stays as it is.
        let gap = |free: Extent| Taken {
            begin: data + free.offset,
            end: data + free.end(),
            stamp: u64::MAX,
            slot: 0,
        };
        let mut gaps: Vec<Taken> = state.pool.free_extents().map(gap).collect();
        gaps.sort_unstable_by_key(|gap| Reverse(gap.end - gap.begin));
        gaps.truncate(pieces - 1);
        let there: u64 = gaps.iter().map(|gap| gap.end - gap.begin).sum();
        let need = need.saturating_sub(there);
        taken.extend(gaps);
        taken.sort_unstable_by_key(|block| block.begin);
        // Where a hole begins once all that was used up to `stamp` is gone.
        let hole = |stamp: u64| {
            let mut begin = data;
            for block in taken.iter().filter(|block| block.stamp > stamp) {
                if block.begin - begin >= need {
                    return Some(begin);
                }
                begin = block.end;
            }
            (end - begin >= need).then_some(begin)
        };
        let mut stamps: Vec<u64> = taken.iter().map(|block| block.stamp).collect();
        stamps.retain(|stamp| *stamp < u64::MAX);
        stamps.sort_unstable();
        let at = stamps.partition_point(|stamp| hole(*stamp).is_none());
        let begin = stamps.get(at).and_then(|stamp| hole(*stamp))?;
        let inside = |block: &&Taken| block.begin < begin + need && block.end > begin;
        let mut victims: Vec<u32> = taken
            .iter()
            .filter(inside)
            .map(|block| block.slot)
            .collect();
        victims.sort_unstable();
        victims.dedup();
        (!victims.is_empty()).then_some(victims)
    }

    /// Unpublishes and frees blocks that nobody has pinned; false when the medium could not be
    /// made to forget them.
    pub(super) fn evict_blocks(&self, state: &mut State, victims: &[u32]) -> bool {
        for slot in victims {
            let room = state.entries.get(*slot).extents.room();
            self.unpublish(state, *slot);
            self.counters.evicted_blocks.fetch_add(1, Ordering::Relaxed);
            self.counters
                .evicted_bytes
                .fetch_add(room, Ordering::Relaxed);
        }
        let dead = self.sync_records(victims);
        if dead {
            victims.iter().for_each(|slot| self.release(state, *slot));
        }
        dead
    }

    /// Takes a block out of the index and marks its record dead. Its extents stay allocated
    /// until [`Arena::release`].
    pub(super) fn unpublish(&self, state: &mut State, slot: u32) {
        let entry = *state.entries.get(slot);
        debug_assert_eq!(entry.stage, Stage::Live);
        state.live.remove(entry.namespace, &entry.key, slot);
        state.live_bytes -= entry.len;
        let identity = state.identity(&entry);
        state.roll.went(entry.namespace, identity, entry.len);
        if entry.pins == 0 {
            state.entries.unlink(slot);
        }
        state.entries.get_mut(slot).stage = Stage::Doomed;
        self.write_record(state, slot, RecordState::Dead);
    }

    /// Frees the extents and the slot of a block that is no longer published nor pinned, but for
    /// what the medium has lost.
    pub(super) fn release(&self, state: &mut State, slot: u32) {
        let entry = *state.entries.get(slot);
        debug_assert!(entry.pins == 0 && entry.stage != Stage::Live);
        for (offset, len) in entry.extents.iter() {
            if self.is_lost(offset, len) {
                self.lose(offset, len);
            } else if let Err(error) = state.pool.free(offset - self.layout().data) {
                tracing::error!(tier = self.name, offset, %error, "an extent was freed twice");
            }
        }
        // A record that the medium does not keep is no use to another block.
        let record = self.layout().record(slot);
        if self.table.is_none() || !self.is_lost(record, LEN as u64) {
            state.entries.give_back(slot);
        }
    }

    /// Unpublishes blocks; pinned ones give their extents back with the last pin. Where the
    /// medium cannot be made to forget a record, its extents are not used again before the next
    /// opening.
    pub(super) fn drop_blocks(&self, state: &mut State, slots: &[u32]) {
        for slot in slots {
            self.unpublish(state, *slot);
        }
        let dead = self.sync_records(slots);
        for slot in slots {
            let entry = state.entries.get_mut(*slot);
            if !dead {
                // A pin that nobody ends, and nobody waits for.
                state.pinned -= u64::from(entry.pins > 0);
                entry.pins += 1;
            }
            if entry.pins == 0 {
                self.release(state, *slot);
            }
        }
    }

    /// Removes blocks by key; how many were there.
    pub(crate) fn remove(&self, namespace: NamespaceId, keys: &[Key]) -> usize {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(number) = state.namespaces.number(namespace) else {
            return 0;
        };
        let of = |map: &KeyMap| -> Vec<u32> {
            let mut slots: Vec<u32> = keys.iter().filter_map(|key| map.get(number, key)).collect();
            slots.sort_unstable();
            slots.dedup();
            slots
        };
        let (live, reserved) = (of(&state.live), of(&state.reserved));
        self.remove_slots(state, &live, &reserved);
        live.len()
    }

    /// Removes published blocks, and sees to it that copies of removed blocks that are being
    /// written are not published. (A put under way comes after the removal.)
    fn remove_slots(&self, state: &mut State, live: &[u32], reserved: &[u32]) {
        for slot in live {
            state.entries.get_mut(*slot).removed = true;
        }
        for slot in reserved {
            let entry = state.entries.get_mut(*slot);
            entry.removed = entry.copy;
        }
        self.drop_blocks(state, live);
    }

    /// Removes every block of a namespace; how many there were.
    pub(crate) fn clear(&self, namespace: NamespaceId) -> usize {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(number) = state.namespaces.number(namespace) else {
            return 0;
        };
        let (live, reserved) = (state.live.slots(number), state.reserved.slots(number));
        self.remove_slots(state, &live, &reserved);
        live.len()
    }

    /// Unpublishes blocks that did not verify, if they are still what the tokens name, so that
    /// the next put writes them again instead of being told that they are there.
    pub(crate) fn discard(&self, tokens: &[Token]) -> usize {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let slots = state.live_slots(tokens);
        self.drop_blocks(state, &slots);
        self.counters
            .corrupt_blocks
            .fetch_add(slots.len() as u64, Ordering::Relaxed);
        slots.len()
    }
}

impl State {
    /// The slots of those tokens that name published blocks.
    pub(super) fn live_slots(&self, tokens: &[Token]) -> Vec<u32> {
        let is_live = |entry: &Entry| entry.stage == Stage::Live;
        let live = |token: &&Token| self.check(**token).is_some_and(is_live);
        let mut slots: Vec<u32> = tokens.iter().filter(live).map(|token| token.slot).collect();
        slots.sort_unstable();
        slots.dedup();
        slots
    }
}
