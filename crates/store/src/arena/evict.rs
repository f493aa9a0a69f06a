//! Eviction: least recently used prompts first, within a prompt its later blocks first. The
//! order of use sees to both; this takes from its tail. Where that would leave room enough but in
//! pieces too small, one hole is made instead, where the oldest blocks lie together.

use std::cmp::Reverse;
use std::sync::atomic::Ordering;

use kvdepot_alloc::Extent;

use super::bury::{BATCH, Dying};
use super::{Arena, State, Token};
use crate::format::GRANULE;
use crate::held::Guard;
use crate::index::{Entry, KeyMap, Stage};
use crate::{Key, NamespaceId};

/// How far eviction runs ahead of need: one part in 64 of the arena (1.6 %, within the 2 % that
/// the protocol allows), so that a put in a full arena does not evict for each block alone and
/// finds free extents that are not all splinters.
const AHEAD: u64 = 64;

/// How far a hole runs ahead of need: one part in 256 of the arena, the rest of those 2 %. Finding
/// the place for it means to look at every block, and the next large blocks have room in it.
const HOLE_AHEAD: u64 = 256;

/// Fewest blocks that go in one go where there is room enough, but in pieces.
const FEW: usize = 8;

/// An extent of a block.
#[derive(Clone, Copy)]
struct Taken {
    begin: u64,
    end: u64,
    /// When the block was used last; the greatest number where it must stay.
    stamp: u64,
    slot: u32,
    sequence: u64,
}

impl Arena {
    /// Evicts for a block of a namespace that found no room, and somewhat more. False when nothing
    /// more can go, or nothing that went has left room.
    pub(super) fn evict_for(
        &self,
        state: &mut Guard<'_, State>,
        namespace: u32,
        need: u64,
    ) -> bool {
        // With all that eviction may run ahead, and still in pieces.
        let scattered =
            state.entries.vacant() > 0 && state.pool.free_bytes() >= self.with_ahead(need);
        let victims = match scattered {
            true => {
                let pieces = state.pieces(namespace);
                self.hole(state, need, pieces)
            }
            false => self.oldest(state, need),
        };
        victims.is_some_and(|victims| self.evict_blocks(state, &victims))
    }

    /// Evicts ahead of need what one burial takes, where there was need before. False when there
    /// is nothing to do.
    pub(crate) fn evict_ahead(&self) -> bool {
        self.evict_some_ahead(false)
    }

    /// As [`Arena::evict_ahead`], where there was need on a device beside this one.
    pub(crate) fn evict_ahead_for_all(&self) -> bool {
        self.evict_some_ahead(true)
    }

    /// Whether blocks had to go here for others; whoever asks sees to it.
    pub(crate) fn hear_need(&self) -> bool {
        self.low.store(false, Ordering::Relaxed);
        self.state.lock().pressed
    }

    fn evict_some_ahead(&self, needed: bool) -> bool {
        self.low.store(false, Ordering::Relaxed);
        if self.closed_to_writes().is_some() {
            return false;
        }
        let mut state = self.state.lock();
        state.pressed |= needed;
        self.await_burials(&mut state);
        let (bytes, slots) = (state.pool.free_bytes(), state.entries.vacant());
        let (bytes_wanted, slots_wanted) = (self.with_ahead(0), self.slots_ahead());
        if !state.pressed || (bytes >= bytes_wanted && slots >= slots_wanted) {
            // Room enough without eviction: whoever finds none again says so.
            state.pressed &= bytes <= 4 * bytes_wanted || slots <= 4 * slots_wanted;
            return false;
        }
        let victims = self.least_used(&mut state, BATCH, |room, count| {
            bytes + room >= bytes_wanted && slots + count >= slots_wanted
        });
        !victims.is_empty() && self.evict_blocks(&mut state, &victims)
    }

    /// Whether the next blocks will find little room where others had to go before.
    pub(super) fn is_low_in(&self, state: &State) -> bool {
        state.pressed
            && (state.pool.free_bytes() < self.with_ahead(0) / 2
                || state.entries.vacant() < self.slots_ahead() / 2)
    }

    /// The least recently used blocks, until there is enough of them: `enough` is asked with their
    /// bytes and their number.
    fn least_used(
        &self,
        state: &mut State,
        most: usize,
        enough: impl Fn(u64, u64) -> bool,
    ) -> Vec<u32> {
        let mut victims = Vec::new();
        let mut bytes = 0;
        while victims.len() < most && !enough(bytes, victims.len() as u64) {
            let Some(slot) = state.entries.oldest() else {
                break;
            };
            bytes += state.entries.get(slot).extents.room();
            victims.push(slot);
        }
        victims
    }

    /// Whom to evict for `need` bytes and a slot. `None` when all that may go would not be enough.
    fn oldest(&self, state: &mut State, need: u64) -> Option<Vec<u32>> {
        let (bytes, slots) = (state.pool.free_bytes(), state.entries.vacant());
        if bytes + state.entries.evictable_bytes() < need {
            return None;
        }
        let bytes_wanted = self.with_ahead(need);
        // A full table evicts like a full arena.
        let slots_wanted = 1 + self.slots_ahead();
        // No more than one burial takes, but for what is needed.
        let victims = self.least_used(state, usize::MAX, |room, taken| {
            let needed = bytes + room < need || slots + taken == 0;
            let ahead = match (bytes < need.max(1), slots == 0) {
                (true, _) if bytes + room < bytes_wanted => BATCH,
                (_, true) if slots + taken < slots_wanted => BATCH,
                (false, false) if bytes + room < bytes_wanted => FEW,
                _ => 1,
            };
            !needed && taken as usize >= ahead
        });
        (!victims.is_empty()).then_some(victims)
    }

    fn slots_ahead(&self) -> u64 {
        self.layout().records / (AHEAD * 2)
    }

    /// `need`, and as much as eviction may run ahead of it.
    pub(super) fn with_ahead(&self, need: u64) -> u64 {
        need.saturating_add(self.layout().data_len() / AHEAD)
    }

    /// Whom to evict for `need` bytes in at most `pieces` extents where enough is free, but too
    /// scattered: for a hole that runs ahead of need, or else for the least that will do. `None`
    /// when there is no place for it: pinned and reserved blocks stay where they are.
    fn hole(&self, state: &mut Guard<'_, State>, need: u64, pieces: usize) -> Option<Vec<u32>> {
        let need = need.next_multiple_of(GRANULE);
        let ahead = self.layout().data_len() / HOLE_AHEAD;
        let taken = self.taken(state);
        let free: Vec<Extent> = state.pool.free_extents().collect();
        // Sorting what a large arena has takes longer than anybody should wait for the lock.
        let chosen = state.unlocked(|| {
            let ample = (ahead > need).then(|| self.around_hole(&taken, &free, ahead, 1));
            ample
                .flatten()
                .or_else(|| self.around_hole(&taken, &free, need, pieces))
        });
        let mut victims = chosen?;
        // What has been pinned meanwhile stays, and what is gone is gone.
        victims.retain(|(slot, sequence)| {
            let entry = state.entries.check(*slot, *sequence);
            entry.is_some_and(|entry| entry.stage == Stage::Live && entry.pins == 0)
        });
        Some(victims.into_iter().map(|(slot, _)| slot).collect())
    }

    fn taken(&self, state: &State) -> Vec<Taken> {
        let mut taken: Vec<Taken> = Vec::new();
        for (slot, entry) in state.entries.used() {
            let stays = entry.stage != Stage::Live || entry.pins > 0;
            let stamp = if stays { u64::MAX } else { entry.stamp };
            let of = |(begin, len)| Taken {
                begin,
                end: begin + len,
                stamp,
                slot,
                sequence: entry.sequence,
            };
            taken.extend(entry.extents.iter().map(of));
        }
        let lost = |(begin, len): &(u64, u64)| Taken {
            begin: *begin,
            end: begin + len,
            stamp: u64::MAX,
            slot: 0,
            sequence: u64::MAX,
        };
        taken.extend(state.lost.iter().map(lost));
        taken
    }

    /// The blocks that stand in the way of `pieces` free extents of `need` bytes together: the
    /// largest ones there are, and a hole for the rest. Of all places for it that one is taken
    /// whose last used block was used longest ago.
    fn around_hole(
        &self,
        blocks: &[Taken],
        free: &[Extent],
        need: u64,
        pieces: usize,
    ) -> Option<Vec<(u32, u64)>> {
        let mut taken = blocks.to_vec();
        let (data, end) = (
            self.layout().data,
            self.layout().data + self.layout().data_len(),
        );
        // What is free already, and stays as it is.
        let gap = |free: &Extent| Taken {
            begin: data + free.offset,
            end: data + free.end(),
            stamp: u64::MAX,
            slot: 0,
            sequence: 0,
        };
        let mut gaps: Vec<Taken> = free.iter().map(gap).collect();
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
        let mut victims: Vec<(u32, u64)> = taken
            .iter()
            .filter(inside)
            .map(|block| (block.slot, block.sequence))
            .collect();
        victims.sort_unstable();
        victims.dedup();
        (!victims.is_empty()).then_some(victims)
    }

    /// Unpublishes, buries and frees blocks that nobody has pinned; false when the medium could
    /// not be made to forget any of them.
    pub(super) fn evict_blocks(&self, state: &mut Guard<'_, State>, victims: &[u32]) -> bool {
        let mut dying = Dying::default();
        for slot in victims {
            let room = state.entries.get(*slot).extents.room();
            self.unpublish(state, *slot, &mut dying);
            self.counters.evicted_blocks.fetch_add(1, Ordering::Relaxed);
            self.counters
                .evicted_bytes
                .fetch_add(room, Ordering::Relaxed);
        }
        dying.is_empty() || self.bury(state, dying) > 0
    }

    /// Removes blocks by key; how many were there.
    pub(crate) fn remove(&self, namespace: NamespaceId, keys: &[Key]) -> usize {
        let of = |map: &KeyMap, number| {
            let mut slots: Vec<u32> = keys.iter().filter_map(|key| map.get(number, key)).collect();
            slots.sort_unstable();
            slots.dedup();
            slots
        };
        self.remove_those(namespace, of, |key| keys.contains(key))
    }

    /// Removes every block of a namespace; how many there were.
    pub(crate) fn clear(&self, namespace: NamespaceId) -> usize {
        self.remove_those(namespace, |map, number| map.slots(number), |_| true)
    }

    /// Removes published blocks, and sees to it that copies of removed blocks that are being
    /// written are not published, nor those of what is out of the index and still pinned. (A put
    /// under way comes after the removal.)
    fn remove_those(
        &self,
        namespace: NamespaceId,
        of: impl Fn(&KeyMap, u32) -> Vec<u32>,
        is_one: impl Fn(&Key) -> bool,
    ) -> usize {
        let tokens: Vec<Token> = {
            let mut guard = self.state.lock();
            let state = &mut *guard;
            let Some(number) = state.namespaces.number(namespace) else {
                return 0;
            };
            for slot in of(&state.reserved, number) {
                let entry = state.entries.get_mut(slot);
                entry.removed = entry.copy;
            }
            for slot in &state.lingering {
                let entry = state.entries.get_mut(*slot);
                entry.removed |= entry.namespace == number && is_one(&entry.key);
            }
            let live = of(&state.live, number);
            for slot in &live {
                state.entries.get_mut(*slot).removed = true;
            }
            let token = |slot: u32| state.place(slot).token;
            live.into_iter().map(token).collect()
        };
        self.drop_blocks(&tokens, false)
    }

    /// Unpublishes blocks that did not verify, if they are still what the tokens name, so that
    /// the next put writes them again instead of being told that they are there.
    pub(crate) fn discard(&self, tokens: &[Token]) -> usize {
        let count = self.drop_blocks(tokens, false);
        self.counters
            .corrupt_blocks
            .fetch_add(count as u64, Ordering::Relaxed);
        count
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
