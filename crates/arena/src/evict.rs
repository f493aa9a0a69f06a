//! Eviction: least recently used prompts first, within a prompt its later blocks first. The
//! order of use sees to both; this takes from its tail. Where that would leave room enough but in
//! pieces too small, one hole is made instead, where the oldest blocks lie together.

use std::cmp::Reverse;
use std::ops::ControlFlow;
use std::sync::atomic::Ordering;

use crate::bind::Fallen;
use crate::body::{Arena, State};
use crate::bury::{BATCH, Dying, Victim, bite_len};
use crate::chosen::Chosen;
use crate::format::GRANULE;
use crate::format::record::EXTENTS_MAX;
use crate::held::Guard;
use crate::index::{Oldest, Stage};
use crate::place::Wanted;
use crate::turnover::EvictionLimit;

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
    /// Evicts for a block that found no room, and somewhat more. False when nothing
    /// more can go, or nothing that went has left room.
    pub(crate) fn evict_for(&self, state: &mut Guard<'_, State>, wanted: &Wanted) -> bool {
        let limit = self.eviction_limit(state, wanted);
        // With all that eviction may run ahead, and still in pieces.
        let (bytes, slots) = state.unpromised();
        if slots > 0 && bytes >= self.with_ahead(wanted.len) {
            return self.dig(state, wanted.len, limit);
        }
        self.evict_oldest(state, wanted.len, limit)
    }

    /// Evicts one batch of blocks ahead of need, if recent blocks needed an eviction.
    ///
    /// Returns false if there is nothing to evict.
    pub fn evict_ahead(&self) -> bool {
        self.evict_some_ahead(None)
    }

    /// Evicts ahead of need as [`Arena::evict_ahead`] does, with the eviction limit of another
    /// device of the tier.
    pub fn evict_ahead_for_all(&self, need: EvictionLimit) -> bool {
        self.evict_some_ahead(Some(need))
    }

    /// Returns the limit of eviction ahead of need, or `None` if no block needed an eviction here.
    /// The caller evicts.
    pub fn hear_need(&self) -> Option<EvictionLimit> {
        self.low.store(false, Ordering::Relaxed);
        self.state.lock().need
    }

    fn evict_some_ahead(&self, need: Option<EvictionLimit>) -> bool {
        self.low.store(false, Ordering::Relaxed);
        if self.closed_to_writes().is_some() {
            return false;
        }
        let mut state = self.state.lock();
        state.need = state.need.max(need);
        self.await_burials(&mut state);
        let (bytes, slots) = (state.pool.free_bytes(), state.records.vacant());
        let (bytes_wanted, slots_wanted) = (self.with_ahead(0), self.slots_ahead());
        let (Some(limit), false) = (state.need, bytes >= bytes_wanted && slots >= slots_wanted)
        else {
            // Room enough without eviction: whoever finds none again says so.
            let is_little = bytes <= 4 * bytes_wanted || slots <= 4 * slots_wanted;
            state.need = state.need.filter(|_| is_little);
            return false;
        };
        let (mut room, mut count) = (0, 0);
        let (evicted, buried) = self.evict_each(&mut state, |state, fallen| {
            let few = bite_len().min(BATCH - count);
            let enough = |more, taken| {
                let room = bytes + room + fallen.bytes + more;
                let slots = slots + count as u64 + fallen.blocks + taken;
                room >= bytes_wanted && slots >= slots_wanted
            };
            let (victims, more) = self.least_used(state, few, limit, enough)?;
            (room, count) = (room + more, count + victims.len());
            Some(victims)
        });
        evicted > 0 && buried
    }

    /// Unpublishes what `choose` answers, a few blocks at a time, and what is in a group with
    /// them, until that is none, and then buries and frees them: how many nobody had pinned or
    /// used, and false when the medium could not be made to forget any of them. `choose` is told
    /// what has left that it did not choose. Others have the lock in between; those who need room
    /// meanwhile wait for this.
    fn evict_each(
        &self,
        state: &mut Guard<'_, State>,
        mut choose: impl FnMut(&mut State, Fallen) -> Option<Vec<Victim>>,
    ) -> (usize, bool) {
        let burial = state.burials.begin();
        let (mut dying, mut fallen) = (Dying::default(), Fallen::default());
        let (mut count, mut died, mut buried) = (0, 0, 0);
        loop {
            if !self.evict_fallen(state, &mut dying, &mut fallen) {
                let Some(victims) = choose(state, fallen) else {
                    break;
                };
                for victim in victims {
                    count += usize::from(self.evict(state, victim, &mut dying));
                }
            }
            if fallen.blocks > 0 && dying.len() >= BATCH {
                // A group may be of any size.
                died += dying.len();
                buried += self.bury(state, std::mem::take(&mut dying));
            }
            state.give_way();
        }
        state.order.give_up();
        died += dying.len();
        buried += self.bury(state, dying);
        self.end_burial(state, burial);
        (count + fallen.blocks as usize, died == 0 || buried > 0)
    }

    /// Whether the next blocks will find little room where others had to go before.
    pub(crate) fn is_low_in(&self, state: &State) -> bool {
        state.need.is_some()
            && (state.pool.free_bytes() < self.with_ahead(0) / 2
                || state.records.vacant() < self.slots_ahead() / 2)
    }

    /// Returns the free bytes and the free records, without those that eviction keeps free ahead of
    /// need.
    pub fn spare(&self) -> (u64, u64) {
        if self.closed_to_writes().is_some() {
            return (0, 0);
        }
        let state = self.state.lock();
        let (bytes, records) = (state.pool.free_bytes(), state.records.vacant());
        match state.need {
            Some(_) => (
                bytes.saturating_sub(self.with_ahead(0)),
                records.saturating_sub(self.slots_ahead()),
            ),
            None => (bytes, records),
        }
    }

    /// The least recently used blocks, up to the limit or until there is enough of them, and their
    /// bytes: `enough` is asked with these and their number. None yet, or fewer, where more
    /// had to be looked at than a turn allows; `None` when there is enough, or there are no more.
    pub(crate) fn least_used(
        &self,
        state: &mut State,
        most: usize,
        limit: EvictionLimit,
        enough: impl Fn(u64, u64) -> bool,
    ) -> Option<(Vec<Victim>, u64)> {
        let mut victims = Vec::new();
        let mut bytes = 0;
        while victims.len() < most && !enough(bytes, victims.len() as u64) {
            match state.order.oldest(&self.index) {
                Oldest::Block(slot, stamp) | Oldest::Used(slot, stamp) if !limit.allows(stamp) => {
                    state.order.keep(&self.index, slot);
                    break;
                }
                found @ (Oldest::Block(slot, _) | Oldest::Used(slot, _)) => {
                    bytes += self.index.get(slot).extents.room();
                    let since = match found {
                        Oldest::Block(_, stamp) => Some(stamp),
                        _ => None,
                    };
                    victims.push((slot, since));
                }
                Oldest::NotYet => return Some((victims, bytes)),
                Oldest::Nothing => break,
            }
        }
        (!victims.is_empty()).then_some((victims, bytes))
    }

    /// Evicts the least recently used blocks for `need` bytes and a slot, which nobody else gets
    /// meanwhile. Returns false, and evicts nothing, if the limit leaves too little.
    fn evict_oldest(&self, state: &mut Guard<'_, State>, need: u64, limit: EvictionLimit) -> bool {
        let (bytes, slots) = state.unpromised();
        if bytes + self.index.evictable_bytes() < need {
            return false;
        }
        let bytes_wanted = self.with_ahead(need);
        // A full table evicts like a full arena.
        let slots_wanted = 1 + self.slots_ahead();
        // Whether these bytes and slots, once free, are what is needed.
        let does = |room: u64, taken: u64| bytes + room >= need && slots + taken > 0;
        // No more than one burial takes, but for what is needed.
        let enough = |room: u64, taken: u64| {
            let ahead = match (bytes < need.max(1), slots == 0) {
                (true, _) if bytes + room < bytes_wanted => BATCH,
                (_, true) if slots + taken < slots_wanted => BATCH,
                (false, false) if bytes + room < bytes_wanted => FEW,
                _ => 1,
            };
            does(room, taken) && taken as usize >= ahead
        };
        let promised = (need.next_multiple_of(GRANULE), 1);
        state.promise(promised);
        let mut chosen = Chosen::within(limit);
        let (mut room, mut count) = (0, 0);
        let (gone, buried) = self.evict_each(state, |state, fallen| {
            // With a limit, nothing goes before it is known that enough may.
            if let ControlFlow::Break(some) = self.choose(state, &mut chosen, does) {
                return some;
            }
            let freed = chosen.room() + room + fallen.bytes;
            let taken = chosen.count() + count + fallen.blocks;
            let enough = |more: u64, few: u64| enough(freed + more, taken + few);
            let (victims, more) = self.least_used(state, bite_len(), limit, enough)?;
            (room, count) = (room + more, count + victims.len() as u64);
            Some(victims)
        });
        state.keep_promise(promised);
        (chosen.count() + count > 0 || gone > 0) && buried
    }

    pub(crate) fn slots_ahead(&self) -> u64 {
        self.layout().records / (AHEAD * 2)
    }

    /// `need`, and as much as eviction may run ahead of it.
    pub(crate) fn with_ahead(&self, need: u64) -> u64 {
        need.saturating_add(self.layout().data_len() / AHEAD)
    }

    /// Evicts for `need` bytes, where enough is free but too scattered for one block's extents: for
    /// a hole that runs ahead of need, or else for the least that will do. Nobody else gets any
    /// of it meanwhile. False when there is no place for it, because pinned and reserved blocks
    /// stay where they are, or when nothing stands in its way any more.
    fn dig(&self, state: &mut Guard<'_, State>, need: u64, limit: EvictionLimit) -> bool {
        let need = need.next_multiple_of(GRANULE);
        let ahead = self.layout().data_len() / HOLE_AHEAD;
        let lost = self.lost(state);
        // Looking at all that a large arena has takes longer than anybody should wait for the lock.
        let chosen = state.unlocked(|| {
            let taken = self.taken(&lost, limit);
            let ample = (ahead > need).then(|| self.around_hole(&taken, ahead, 1));
            ample
                .flatten()
                .or_else(|| self.around_hole(&taken, need, EXTENTS_MAX))
                // Pieces that do by a hair the allocator does not find: to it those of a bin are
                // alike.
                .or_else(|| self.around_hole(&taken, need, 1))
        });
        let Some(victims) = chosen else { return false };
        state.digs += 1;
        let mut some = victims.chunks(bite_len());
        let (_, buried) = self.evict_each(state, |_, _| {
            // What has been pinned meanwhile stays, and what is gone is gone.
            let stays = |(slot, sequence): &&(u32, u64)| {
                let entry = self.index.check(*slot, *sequence);
                entry.is_some_and(|entry| entry.stage == Stage::Live && entry.pins == 0)
            };
            let some = some.next()?.iter().filter(stays);
            Some(some.map(|(slot, _)| (*slot, None)).collect())
        });
        state.digs -= 1;
        buried
    }

    fn taken(&self, lost: &[(u64, u64)], limit: EvictionLimit) -> Vec<Taken> {
        let mut taken: Vec<Taken> = Vec::new();
        self.index.walk(|slot, entry| {
            let stays = entry.stage != Stage::Live || entry.pins > 0;
            let stamp = self.index.stamp_of(slot, &entry);
            let stamp = match stays || !limit.allows(stamp) {
                true => u64::MAX,
                false => stamp,
            };
            let of = |(begin, len)| Taken {
                begin,
                end: begin + len,
                stamp,
                slot,
                sequence: entry.sequence,
            };
            taken.extend(entry.extents.iter().map(of));
        });
        let of_lost = |(begin, len): &(u64, u64)| Taken {
            begin: *begin,
            end: begin + len,
            stamp: u64::MAX,
            slot: 0,
            sequence: u64::MAX,
        };
        taken.extend(lost.iter().map(of_lost));
        taken.sort_unstable_by_key(|block| block.begin);
        taken
    }

    /// What lies between blocks, which are in order: it is free, and stays as it is.
    fn gaps(&self, taken: &[Taken]) -> Vec<Taken> {
        let layout = self.layout();
        let (mut at, end) = (layout.data, layout.data + layout.data_len());
        let mut gaps = Vec::new();
        let ends = taken.iter().map(|block| (block.begin, block.end));
        for (begin, behind) in ends.chain([(end, end)]) {
            if begin > at {
                gaps.push(Taken {
                    begin: at,
                    end: begin,
                    stamp: u64::MAX,
                    slot: 0,
                    sequence: 0,
                });
            }
            at = at.max(behind);
        }
        gaps
    }

    /// The blocks that stand in the way of `pieces` free extents of `need` bytes together: the
    /// largest ones there are, and a hole for the rest. Of all places for it that one is taken
    /// whose last used block was used longest ago.
    fn around_hole(&self, blocks: &[Taken], need: u64, pieces: usize) -> Option<Vec<(u32, u64)>> {
        let (data, end) = (
            self.layout().data,
            self.layout().data + self.layout().data_len(),
        );
        let mut gaps = self.gaps(blocks);
        gaps.sort_unstable_by_key(|gap| Reverse(gap.end - gap.begin));
        gaps.truncate(pieces - 1);
        let there: u64 = gaps.iter().map(|gap| gap.end - gap.begin).sum();
        let need = need.saturating_sub(there);
        let mut taken = blocks.to_vec();
        taken.extend(gaps);
        taken.sort_unstable_by_key(|block| block.begin);
        // Where a hole begins once all that was used up to `stamp` is gone. These were not all
        // there at one moment, so some lie where others did.
        let hole = |stamp: u64| {
            let mut begin = data;
            for block in taken.iter().filter(|block| block.stamp > stamp) {
                if block.begin.saturating_sub(begin) >= need {
                    return Some(begin);
                }
                begin = begin.max(block.end);
            }
            (end.saturating_sub(begin) >= need).then_some(begin)
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

    /// Unpublishes, buries and frees those of these blocks that nobody has pinned; how many.
    pub(crate) fn evict_blocks(&self, state: &mut Guard<'_, State>, victims: &[Victim]) -> usize {
        let mut some = victims.chunks(bite_len());
        self.evict_each(state, |_, _| some.next().map(<[Victim]>::to_vec))
            .0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kvdepot_alloc::Hint;
    use kvdepot_media::checksum::Checksum;

    use super::*;
    use crate::group::{Class, Group};
    use crate::held;
    use crate::index::Uses;
    use crate::key::{Key, NamespaceId};
    use crate::place::Wanted;
    use crate::reserved::Reserved;

    const NAMESPACE: NamespaceId = NamespaceId([1; 16]);
    const GRANULES: u64 = 8192;

    fn wanted(key: u64, granules: u64) -> Wanted {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&key.to_le_bytes());
        Wanted {
            key: Key(bytes),
            len: granules * GRANULE,
            parts: 1,
            stamp: key,
            copy: false,
            evict: true,
        }
    }

    fn reserve(arena: &Arc<Arena>, wanted: Wanted) -> Reserved {
        let mut answers = arena.reserve(NAMESPACE, &[wanted]).unwrap();
        answers.pop().unwrap().ok().unwrap()
    }

    fn store(arena: &Arc<Arena>, wanted: Wanted) {
        let token = reserve(arena, wanted).hand_out().token;
        assert_eq!(arena.commit(&[(token, Checksum([0; 16]))], false), [true]);
    }

    impl Arena {
        /// Evicts the block that is the next to go, and what leaves with it; false where none can.
        pub(crate) fn evict_one(&self) -> bool {
            let mut taken = false;
            let mut state = self.state.lock();
            self.evict_each(&mut state, |state, _| {
                let (victims, _) = (!taken)
                    .then(|| self.least_used(state, 1, EvictionLimit::NONE, |_, _| false))??;
                taken = !victims.is_empty();
                Some(victims)
            });
            taken
        }
    }

    fn arena() -> Arc<Arena> {
        Arc::new(Arena::volatile("Cache", 0, GRANULES * GRANULE).unwrap())
    }

    /// Fills what is left with blocks of so many granules each, under keys from 1000 on.
    fn fill(arena: &Arc<Arena>, granules: u64) {
        for key in 1000.. {
            let left = arena.stats().free_bytes / GRANULE;
            if left == 0 {
                break;
            }
            store(arena, wanted(key, left.min(granules)));
        }
    }

    fn remove(arena: &Arena, keys: impl Iterator<Item = u64>) {
        keys.for_each(|key| assert_eq!(arena.remove(NAMESPACE, &[wanted(key, 1).key]), 1));
    }

    fn has_room_for(arena: &Arc<Arena>, wanted: &Wanted) -> bool {
        let space = arena.make_space(NAMESPACE, wanted, Hint::default());
        space.is_ok()
    }

    /// An arena that is the last tier by itself.
    fn last() -> Arc<Arena> {
        let arena = arena();
        arena.set_last(&[Arc::clone(&arena)], &Arc::default());
        arena
    }

    fn used(key: u64, granules: u64, stamp: u64) -> Wanted {
        Wanted {
            stamp,
            ..wanted(key, granules)
        }
    }

    #[test]
    fn a_block_that_finds_too_little_within_its_limit_evicts_nothing() {
        let arena = last();
        let uses = Uses::default();
        store(&arena, used(1, 1, uses.call(0).of(0)));
        let prompt = uses.call(0);
        store(&arena, used(2, GRANULES - 1, prompt.of(0)));
        assert!(!has_room_for(&arena, &used(3, 2, prompt.of(1))));
        assert_eq!(arena.stats().evicted_blocks, 0);
        // It is the oldest all the same.
        assert!(has_room_for(&arena, &used(4, 1, prompt.of(1))));
        assert_eq!(arena.remove(NAMESPACE, &[wanted(1, 1).key]), 0);
    }

    #[test]
    fn a_block_that_is_listed_twice_counts_once_within_a_limit() {
        let arena = last();
        let uses = Uses::default();
        store(&arena, used(1, 1, uses.call(0).of(0)));
        // What joins a group is listed again.
        let group = Arc::new(Group::new(NAMESPACE, Class::Ordinary));
        group.add(&[wanted(1, 1).key]);
        arena.join(&group, 0);
        let prompt = uses.call(0);
        store(&arena, used(2, GRANULES - 1, prompt.of(0)));
        assert!(!has_room_for(&arena, &used(3, 2, prompt.of(1))));
        assert_eq!(arena.stats().evicted_blocks, 0, "it is one block");
    }

    #[test]
    fn what_was_chosen_in_vain_is_listed_again_in_turns_and_in_its_order() {
        const OLD: u64 = 3072;
        /// Far more steps than a turn takes, and far fewer than all.
        const MOST: u32 = 1000;
        let arena = last();
        let uses = Uses::default();
        (0..OLD).for_each(|key| store(&arena, used(key, 1, uses.call(0).of(0))));
        let prompt = uses.call(0);
        store(&arena, used(OLD, GRANULES - OLD, prompt.of(0)));
        held::most_steps();
        assert!(!has_room_for(&arena, &used(OLD + 1, OLD + 1, prompt.of(0))));
        let most = held::most_steps();
        assert!((1..MOST).contains(&most), "{most} steps under one lock");
        assert_eq!(arena.stats().evicted_blocks, 0);
        assert!(arena.evict_one());
        let is_there = arena.remove(NAMESPACE, &[wanted(0, 1).key]) > 0;
        assert!(!is_there, "the oldest one goes first");
        // Whether or not it finds an extent for itself, all the others may go for it.
        let _found = has_room_for(&arena, &used(OLD + 1, OLD, prompt.of(0)));
        assert_eq!(arena.stats().evicted_blocks, OLD);
    }

    #[test]
    fn nothing_is_too_little_before_others_have_listed_again_what_they_chose() {
        let arena = arena();
        let mut state = arena.state.lock();
        let mut chosen = Chosen::within(EvictionLimit(0));
        let mut step = |state: &mut State| arena.choose(state, &mut chosen, |_, count| count > 0);
        state.relisting += 1;
        let again = ControlFlow::Break(Some(Vec::new()));
        assert_eq!(step(&mut state), again);
        state.relisting -= 1;
        assert_eq!(step(&mut state), ControlFlow::Break(None));
        assert_eq!(state.relisting, 0);
    }

    #[test]
    fn a_block_that_is_used_once_it_is_chosen_stays_if_it_is_above_the_limit() {
        let arena = last();
        let uses = Uses::default();
        store(&arena, used(1, 1, uses.call(0).of(0)));
        let limit = EvictionLimit(uses.now());
        let mut chosen = Chosen::within(limit);
        let mut state = arena.state.lock();
        let slot = loop {
            match state.order.oldest(&arena.index) {
                Oldest::Block(slot, _) => break slot,
                found => assert_eq!(found, Oldest::NotYet),
            }
        };
        // As one that is used all the time.
        chosen.add(&arena.index, vec![(slot, None)]);
        let sequence = arena.index.get(slot).sequence;
        arena.index.touch(slot, sequence, uses.call(0).of(0));
        let gone = arena.choose(&mut state, &mut chosen, |_, count| count > 0);
        assert_eq!(gone, ControlFlow::Break(Some(Vec::new())));
        drop(state);
        assert!(arena.evict_one(), "it is listed again");
    }

    #[test]
    fn pieces_that_would_just_do_and_that_the_allocator_does_not_tell_apart_refuse_nobody() {
        let arena = arena();
        // Of one bin, and apart. The longer ones would do.
        for key in 0..8 {
            store(&arena, wanted(2 * key, 249 - key / 4));
            store(&arena, wanted(2 * key + 1, 16));
        }
        fill(&arena, 16);
        remove(&arena, (0..16).step_by(2));
        let need = wanted(5000, 4 * 249);
        assert!(arena.reserve(NAMESPACE, &[need]).is_none(), "it fits");
        assert!(has_room_for(&arena, &need));
        assert!(arena.stats().evicted_blocks > 0);
    }

    #[test]
    fn a_hole_is_made_by_class_and_takes_whole_groups() {
        let arena = arena();
        fill(&arena, 16);
        remove(&arena, (1000..1512).step_by(2));
        let uses = Uses::default();
        let odd = |from: u64, to: u64| (from..to).step_by(2).map(|key| wanted(key, 1).key);
        for key in odd(1001, 1512) {
            arena.touch(NAMESPACE, [(&key, uses.asked().of(0))].into_iter());
        }
        let group = |class, keys: Vec<Key>| {
            let group = Arc::new(Group::new(NAMESPACE, class));
            group.add(&keys);
            arena.join(&group, 0);
        };
        group(Class::Last, odd(1003, 1201).collect());
        group(
            Class::First,
            odd(1401, 1433).chain(odd(1001, 1002)).collect(),
        );
        assert!(has_room_for(&arena, &wanted(5000, 256)));
        let mut left = vec![false; 256];
        let all: Vec<Key> = odd(1001, 1512).collect();
        arena.contains(NAMESPACE, &all, &mut left);
        let gone: Vec<u64> = (1001..1512)
            .step_by(2)
            .zip(left)
            .filter(|(_, left)| !left)
            .map(|(key, _)| key)
            .collect();
        let expected: Vec<u64> = [1001].into_iter().chain((1401..1433).step_by(2)).collect();
        assert_eq!(gone, expected, "also the one that is not in the way");
    }

    #[test]
    fn room_that_others_give_back_while_a_place_is_looked_for_is_taken() {
        let arena = arena();
        let need = wanted(5000, 256);
        // Not in the shard at which the look begins; which it is nobody chooses.
        let mut pending = (0..).map(|key| reserve(&arena, wanted(key, 256)));
        let pending = pending
            .find(|pending| pending.token.slot >> 28 > 0)
            .unwrap();
        fill(&arena, 16);
        remove(&arena, (1000..1100).step_by(2));
        // The order of use has found the oldest block, in another shard than the one held below.
        let shard_of_oldest = || loop {
            match arena.state.lock().order.look(&arena.index) {
                Oldest::Block(slot, _) | Oldest::Used(slot, _) => return slot >> 28,
                Oldest::NotYet | Oldest::Nothing => {}
            }
        };
        let mut oldest = (1001..1100).step_by(2);
        while shard_of_oldest() == 0 {
            remove(&arena, oldest.by_ref().take(1));
        }
        let look = arena.index.hold();
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| has_room_for(&arena, &need));
            // Whoever lacks room notes it, and lets go of the lock for the look.
            while arena.state.lock().need.is_none() {
                std::thread::yield_now();
            }
            drop(pending);
            drop(look);
            assert!(asking.join().unwrap());
        });
        assert_eq!(arena.stats().evicted_blocks, 0);
    }
}
