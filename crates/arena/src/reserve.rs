//! Reserving: room for blocks under their keys, at once or not at all. What does not fit is given
//! room by `space`, off all locks, and reserved there.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvdepot_alloc::Hint;

use crate::body::{Arena, State};
use crate::clock;
use crate::format::record::Packed;
use crate::held::turn_len;
use crate::index::{Entry, Stage};
use crate::key::NamespaceId;
use crate::place::{Place, Token, Wanted};
use crate::refused::Refused;
use crate::reserved::Reserved;
use crate::space::Space;

/// Where a block is reserved, and as what.
struct Entering {
    namespace: u32,
    id: NamespaceId,
    record: u32,
    extents: Packed,
    sequence: u64,
    created: u32,
}

impl Arena {
    /// Reserves extents for blocks, given in prefix order, if space is available.
    ///
    /// Returns one result per block, or `None` if other blocks must be evicted first; see
    /// [`Arena::make_space`]. Blocks that are adjacent in the call become adjacent in the arena if
    /// free space allows it, so that restoring the prompt needs few spans.
    ///
    /// A call with more than [`turn_len`](crate::held::turn_len) keys must not contain a key twice.
    pub fn reserve(
        self: &Arc<Arena>,
        namespace: NamespaceId,
        blocks: &[Wanted],
    ) -> Option<Vec<Result<Reserved, Refused>>> {
        if blocks.len() > turn_len() {
            return self.reserve_in_turns(namespace, blocks);
        }
        let closed = self.closed_to_writes();
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let number = self.intern(state, namespace);
        self.carve_lost(state);
        let lacks =
            !fits(state, needs(blocks)) && !fits(state, needs(self.absent(state, number, blocks)));
        if closed.is_none() && lacks {
            return None;
        }
        // Sequences fall along the prompt: after a restart the order of use is theirs.
        let first = state.sequence;
        state.sequence += blocks.len() as u64;
        let created = clock::unix_seconds();
        let mut behind = None;
        // More than that is more than any arena.
        let rooms = blocks.iter().map(|wanted| wanted.room());
        let mut followed_by = rooms.fold(0, u64::saturating_add);
        let mut answers: Vec<Result<Place, Refused>> = Vec::with_capacity(blocks.len());
        for (index, wanted) in blocks.iter().enumerate() {
            followed_by = followed_by.saturating_sub(wanted.room());
            let known = self.known_in(state, number, wanted);
            if let Some((refused, slot)) = known {
                behind = self.last_of(&self.index.get(slot).extents);
                answers.push(Err(refused));
                continue;
            }
            if let Some(cause) = closed {
                answers.push(Err(self.full(wanted.len, cause)));
                continue;
            }
            let hint = Hint {
                behind,
                followed_by,
            };
            let may_use = self.may_use_free(state, wanted);
            let found = may_use.then(|| self.find_space(state, wanted.len, hint));
            let Some((record, extents)) = found.flatten() else {
                if self.may_evict(state, wanted) {
                    let made = answers.iter().flatten();
                    made.for_each(|place| self.give_up(state, place.token.slot));
                    return None;
                }
                answers.push(Err(self.no_room(state, wanted)));
                continue;
            };
            behind = self.last_of(&extents);
            let entering = Entering {
                namespace: number,
                id: namespace,
                record,
                extents,
                sequence: first + (blocks.len() - 1 - index) as u64,
                created,
            };
            answers.push(self.enter_reserved(state, wanted, &entering));
        }
        self.note_room(state);
        drop(guard);
        let reserved = |answer: Result<Place, Refused>| {
            answer.map(|at| Reserved::new(Arc::clone(self) as _, at))
        };
        Some(answers.into_iter().map(reserved).collect())
    }

    /// As [`Arena::reserve`], while others have the lock in between. All find room before anybody
    /// sees one of them: who did would wait for it, and never learn that it was given up.
    fn reserve_in_turns(
        self: &Arc<Arena>,
        namespace: NamespaceId,
        blocks: &[Wanted],
    ) -> Option<Vec<Result<Reserved, Refused>>> {
        let found = self.find_spaces(namespace, blocks, None, false)?;
        let found = blocks.iter().copied().zip(found);
        Some(self.settle(namespace, found.collect()))
    }

    /// Sets space aside for blocks, given in prefix order, under the rules of [`Arena::reserve`].
    ///
    /// `behind` is the pool offset of the previous block's last extent, a placement hint. With
    /// `until_full`, the call stops at the first block without space. Other threads get the lock
    /// from time to time. Returns `None` if other blocks must be evicted first.
    pub fn find_spaces(
        self: &Arc<Arena>,
        namespace: NamespaceId,
        blocks: &[Wanted],
        mut behind: Option<u64>,
        until_full: bool,
    ) -> Option<Vec<Result<Space, Refused>>> {
        let closed = self.closed_to_writes();
        if closed.is_none() && self.lacks_room(namespace, blocks) {
            return None;
        }
        let rooms = blocks.iter().map(|wanted| wanted.room());
        let mut followed_by = rooms.fold(0, u64::saturating_add);
        // What is given back once it is known that others must go takes the lock.
        let mut found: Vec<Result<Space, Refused>> = Vec::with_capacity(blocks.len());
        let mut state = self.state.lock();
        for (at, wanted) in blocks.iter().enumerate() {
            state.take_turns(at);
            followed_by = followed_by.saturating_sub(wanted.room());
            // Anew each time: a number that no block bears may go to another namespace.
            let number = self.intern(&state, namespace);
            if let Some((refused, slot)) = self.known_in(&state, number, wanted) {
                behind = self.last_of(&self.index.get(slot).extents);
                found.push(Err(refused));
                continue;
            }
            if let Some(cause) = closed {
                found.push(Err(self.full(wanted.len, cause)));
                continue;
            }
            let hint = Hint {
                behind,
                followed_by,
            };
            let may_use = self.may_use_free(&mut state, wanted);
            let space = may_use.then(|| self.set_aside(&mut state, number, wanted, hint));
            let space = match space.flatten() {
                Some(space) => space,
                None if self.may_evict(&state, wanted) => {
                    drop(state);
                    return None;
                }
                None => Err(self.no_room(&state, wanted)),
            };
            behind = space.as_ref().map_or(behind, Space::last);
            let is_full = space.is_err();
            found.push(space);
            if until_full && is_full {
                break;
            }
        }
        drop(state);
        Some(found)
    }

    /// Returns the pool offset of the last extent of the block that `token` names, for placement
    /// hints.
    pub fn end_of(&self, token: Token) -> Option<u64> {
        let entry = self.named(token)?;
        self.last_of(&entry.extents)
    }

    /// Reserves blocks, in prefix order, in space that was set aside for them. Returns one result
    /// per block.
    pub fn reserve_in(
        self: &Arc<Arena>,
        namespace: NamespaceId,
        blocks: Vec<(Wanted, Space)>,
    ) -> Vec<Result<Reserved, Refused>> {
        let blocks = blocks
            .into_iter()
            .map(|(wanted, space)| (wanted, Ok(space)));
        self.settle(namespace, blocks.collect())
    }

    /// Reserves those of these blocks that have room, in prefix order. The last ones come first,
    /// as sequences fall along the prompt, and each is of its own moment, above those of all
    /// blocks that were ever here.
    fn settle(
        self: &Arc<Arena>,
        namespace: NamespaceId,
        blocks: Vec<(Wanted, Result<Space, Refused>)>,
    ) -> Vec<Result<Reserved, Refused>> {
        // What is not needed is given back once the lock is free.
        let mut spare = Vec::new();
        let created = clock::unix_seconds();
        let mut answers = Vec::with_capacity(blocks.len());
        let mut state = self.state.lock();
        for (at, (wanted, space)) in blocks.into_iter().rev().enumerate() {
            state.take_turns(at);
            let mut space = match space {
                Ok(space) => space,
                Err(refused) => {
                    answers.push(Err(refused));
                    continue;
                }
            };
            let number = self.intern(&state, namespace);
            if let Some((refused, _)) = self.known_in(&state, number, &wanted) {
                spare.push(space);
                answers.push(Err(refused));
                continue;
            }
            let sequence = state.sequence;
            state.sequence += 1;
            let (record, extents) = space.take(&mut state);
            let entering = Entering {
                namespace: number,
                id: namespace,
                record,
                extents,
                sequence,
                created,
            };
            answers.push(self.enter_reserved(&mut state, &wanted, &entering));
        }
        self.note_room(&state);
        drop(state);
        let reserved = |answer: Result<Place, Refused>| {
            answer.map(|at| Reserved::new(Arc::clone(self) as _, at))
        };
        answers.into_iter().rev().map(reserved).collect()
    }

    /// Whether blocks must go before all of these fit. Those for which nothing may, or for which
    /// nothing is left, find out for themselves.
    fn lacks_room(&self, namespace: NamespaceId, blocks: &[Wanted]) -> bool {
        let all = needs(blocks);
        let mut state = self.state.lock();
        if fits(&state, all) {
            return false;
        }
        let (mut bytes, mut slots) = (0_u64, 0);
        for (turn, some) in blocks.chunks(turn_len()).enumerate() {
            state.take_turns(turn * turn_len());
            let number = self.intern(&state, namespace);
            let more = needs(self.absent(&state, number, some));
            (bytes, slots) = (bytes.saturating_add(more.0), slots + more.1);
        }
        !fits(&state, (bytes, slots))
    }

    /// Those of the blocks that are neither there nor being written, and for which others may go.
    fn absent<'a>(
        &self,
        state: &State,
        namespace: u32,
        blocks: &'a [Wanted],
    ) -> impl Iterator<Item = &'a Wanted> {
        blocks.iter().filter(move |wanted| {
            let key = &wanted.key;
            let known = || {
                self.index.find(namespace, key).is_some()
                    || state.reserved.get(namespace, key).is_some()
            };
            self.may_evict(state, wanted) && !known()
        })
    }

    /// Whether others might make room for this block.
    pub(crate) fn may_evict(&self, state: &State, wanted: &Wanted) -> bool {
        let could = self.index.evictable_bytes() > 0 || state.burials.count() > 0;
        wanted.evict && could && wanted.len > 0 && wanted.len <= self.layout().data_len()
    }

    /// Notes when little room is left; see [`Arena::evict_ahead`].
    fn note_room(&self, state: &State) {
        if self.is_low_in(state) {
            self.low.store(true, Ordering::Relaxed);
        }
    }

    /// Returns true if eviction ahead of need should run now.
    pub fn is_low(&self) -> bool {
        self.low.load(Ordering::Relaxed) || self.has_unnamed_orphans()
    }

    /// What a key that is published or being written is answered, and its slot.
    fn known_in(&self, state: &State, namespace: u32, wanted: &Wanted) -> Option<(Refused, u32)> {
        if let Some(slot) = self.index.find(namespace, &wanted.key) {
            let token = self.place(slot).token;
            // Being put again is a use.
            self.index.touch(slot, token.sequence, wanted.stamp);
            return Some((Refused::Present(token), slot));
        }
        let slot = state.reserved.get(namespace, &wanted.key)?;
        Some((Refused::Reserved(self.place(slot).token), slot))
    }

    fn enter_reserved(
        &self,
        state: &mut State,
        wanted: &Wanted,
        at: &Entering,
    ) -> Result<Place, Refused> {
        let mut entry = Entry::new(wanted.key, at.namespace, at.extents, wanted.len);
        entry.record = at.record;
        entry.parts = wanted.parts;
        entry.sequence = at.sequence;
        entry.stamp = wanted.stamp;
        entry.copy = wanted.copy;
        entry.stage = Stage::Reserved;
        let Some(slot) = self.enter(state, &entry) else {
            self.free_extents(state, &at.extents);
            state.records.give_back(at.record);
            return Err(self.no_room(state, wanted));
        };
        state
            .reserved
            .insert(at.namespace, &wanted.key, slot, at.created);
        Ok(self.place_of(slot, &entry, at.id))
    }
}

/// Bytes and slots that blocks take.
fn needs<'a>(blocks: impl IntoIterator<Item = &'a Wanted>) -> (u64, u64) {
    let each = blocks.into_iter();
    each.fold((0, 0), |(bytes, slots), wanted| {
        (bytes.saturating_add(wanted.room()), slots + 1)
    })
}

/// Whether so many are free, and promised to nobody.
fn fits(state: &State, (bytes, slots): (u64, u64)) -> bool {
    let (free, vacant) = state.unpromised();
    bytes <= free && slots <= vacant
}

#[cfg(test)]
mod tests {
    use kvdepot_media::checksum::Checksum;

    use super::*;
    use crate::format::GRANULE;
    use crate::held;
    use crate::key::Key;

    const NAMESPACE: NamespaceId = NamespaceId([1; 16]);
    const KEYS: u64 = 2000;
    /// Steps in the index that a key takes at most.
    const EACH: usize = 16;

    fn wanted(numbers: std::ops::Range<u64>) -> Vec<Wanted> {
        let wanted = |number: u64| {
            let mut key = [0; 32];
            key[..8].copy_from_slice(&number.to_le_bytes());
            Wanted {
                key: Key(key),
                len: GRANULE,
                parts: 1,
                stamp: number,
                copy: false,
                evict: true,
            }
        };
        numbers.map(wanted).collect()
    }

    fn reserve(arena: &Arc<Arena>, blocks: &[Wanted]) -> Vec<Token> {
        let answers = arena.reserve(NAMESPACE, blocks).unwrap().into_iter();
        let hand_out = |answer: Result<Reserved, Refused>| answer.ok().unwrap().hand_out().token;
        answers.map(hand_out).collect()
    }

    fn in_turns<R>(door: &str, ask: impl FnOnce() -> R) -> R {
        held::most_steps();
        let answer = ask();
        let most = held::most_steps();
        assert!(
            most > 0 && most as usize <= turn_len() * EACH,
            "{door}: {most} steps"
        );
        answer
    }

    #[test]
    fn what_goes_for_one_block_is_not_anothers_meanwhile() {
        let arena = Arc::new(Arena::volatile("Cache", 0, 8 * GRANULE).unwrap());
        let stored = reserve(&arena, &wanted(0..4)).into_iter();
        let stored: Vec<_> = stored.map(|token| (token, Checksum([0; 16]))).collect();
        arena.commit(&stored, false);
        let (one, mut quiet) = (wanted(8..9), wanted(9..10));
        quiet[0].evict = false;
        let others = || {
            let place = arena
                .reserve(NAMESPACE, &one)
                .map(|mut places| places.remove(0).is_ok());
            (place, arena.reserve(NAMESPACE, &quiet).unwrap()[0].is_ok())
        };
        let refused = (None, false);
        arena.state.lock().promise((3 * GRANULE, 1));
        assert_eq!(others(), (Some(true), true));
        arena.state.lock().promise((GRANULE, 1));
        assert_eq!(others(), refused, "four are free, and four promised");
        arena.state.lock().keep_promise((4 * GRANULE, 2));
        arena.state.lock().digs += 1;
        assert_eq!(others(), refused, "lest the hole be filled");
        std::thread::scope(|scope| {
            let digs_too = || {
                arena
                    .make_space(NAMESPACE, &one[0], Hint::default())
                    .is_ok()
            };
            let waiting = scope.spawn(digs_too);
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!waiting.is_finished());
            arena.state.lock().digs -= 1;
            arena.burial.notify_all();
            assert!(waiting.join().unwrap());
        });
        assert_eq!(others(), (Some(true), true));
        assert_eq!(arena.stats().evicted_blocks, 0);
    }

    #[test]
    fn no_call_keeps_the_lock_for_all_its_keys() {
        let arena = Arc::new(Arena::volatile("Cache", 0, KEYS * GRANULE).unwrap());
        let blocks = wanted(0..KEYS);
        let keys: Vec<Key> = blocks.iter().map(|block| block.key).collect();
        let tokens = in_turns("reserve", || reserve(&arena, &blocks));
        let mut known = vec![None; blocks.len()];
        let mut pins = Vec::new();
        in_turns("reserved", || {
            arena.reserved(NAMESPACE, &blocks, &mut known);
        });
        assert_eq!(known[9], Some(Refused::Reserved(tokens[9])));
        in_turns("abort", || arena.abort(&tokens));
        let tokens = reserve(&arena, &blocks);
        let sum = Checksum([0; 16]);
        let written: Vec<_> = tokens.iter().map(|token| (*token, sum)).collect();
        in_turns("claim", || arena.claim(&tokens));
        in_turns("unclaim", || arena.unclaim(&tokens));
        let stored = in_turns("commit", || arena.commit(&written, false));
        assert!(stored.iter().all(|stored| *stored));
        known.fill(None);
        in_turns("known", || {
            arena.known(NAMESPACE, &blocks, &mut known, &mut pins);
        });
        let again = in_turns("reserve again", || arena.reserve(NAMESPACE, &blocks));
        assert!(again.unwrap().into_iter().all(|answer| answer.is_err()));
        in_turns("remove", || arena.remove(NAMESPACE, &keys));
        in_turns("unpin", || arena.unpin(pins.into_iter()));
        let tokens = reserve(&arena, &blocks);
        let written: Vec<_> = tokens.into_iter().map(|token| (token, sum)).collect();
        arena.commit(&written, false);
        let mut large = wanted(KEYS..KEYS + 1);
        large[0].len = (KEYS - 100) * GRANULE;
        in_turns("evict", || {
            let hint = Hint::default();
            drop(arena.make_space(NAMESPACE, &large[0], hint).ok().unwrap());
        });
        in_turns("lacks room", || {
            assert!(arena.reserve(NAMESPACE, &wanted(KEYS..2 * KEYS)).is_none());
        });
        in_turns("clear", || arena.clear(NAMESPACE));
        assert_eq!(arena.stats().free_bytes, KEYS * GRANULE);
    }
}
