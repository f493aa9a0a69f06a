//! Reserve, commit, abort: how a block comes to be.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvdepot_alloc::{Extent, Hint, Pool};
use kvdepot_media::checksum::Checksum;
use parking_lot::MutexGuard;

use super::{Arena, Reserved, State, Token, Wanted};
use crate::format::record::{EXTENTS_MAX, Packed, State as RecordState};
use crate::index::{Entry, Stage};
use crate::{Error, NamespaceId, clock};

/// Bits of a sequence that count within one generation.
pub(super) const COUNTER_BITS: u32 = 40;

/// Why a key got no reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// It is published already.
    Present(Token),
    /// Another call is writing it.
    Reserved(Token),
    /// There is no room for it.
    Full(Full),
}

/// Why, and in which tier, there is no room for a block of `requested` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full {
    pub(crate) tier: &'static str,
    pub(crate) requested: u64,
    pub(crate) cause: Cause,
}

/// What stands in the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// Nothing that could be evicted is left, or the block is larger than the arena.
    Space { free: u64, capacity: u64 },
    /// More bytes than this would wait for the far tier.
    Queue { depth: u64 },
    /// Processes that worked for the previous owner may still write here.
    Orphans,
    /// Nothing is written to devices that are about to go, or have failed.
    Leaving,
}

impl From<Full> for Error {
    fn from(full: Full) -> Error {
        let Full {
            tier,
            requested,
            cause,
        } = full;
        let reason = match cause {
            Cause::Space { free, capacity } => {
                format!("{free} are free of {capacity}, the rest is pinned or reserved")
            }
            Cause::Queue { depth } => {
                format!("the write-back queue is full (write_back_depth = {depth})")
            }
            Cause::Leaving => "its devices are drained or have failed".into(),
            Cause::Orphans => "processes of its previous owner may still write".into(),
        };
        Error::Full {
            tier,
            requested,
            reason,
        }
    }
}

impl Arena {
    /// Reserves extents for blocks, given in prefix order. Neighbours
    /// in the call become neighbours in the arena where free space allows, so that a restore of
    /// the prompt needs few spans.
    pub(crate) fn reserve(
        self: &Arc<Arena>,
        namespace: NamespaceId,
        blocks: &[Wanted],
    ) -> Vec<Result<Reserved, Refused>> {
        let closed = self.closed_to_writes();
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let number = state.namespaces.intern(namespace);
        // Sequences fall along the prompt: after a restart the order of use is theirs.
        let first = state.sequence;
        state.sequence += blocks.len() as u64;
        let created = clock::unix_seconds();
        let mut behind = None;
        // More than that is more than any arena.
        let rooms = blocks.iter().map(|wanted| wanted.room());
        let mut followed_by = rooms.fold(0, u64::saturating_add);
        let mut present = Vec::new();
        let reserved = blocks
            .iter()
            .enumerate()
            .map(|(index, wanted)| {
                let Wanted {
                    key,
                    len,
                    parts,
                    stamp,
                    copy,
                    evict,
                } = wanted;
                followed_by = followed_by.saturating_sub(wanted.room());
                if let Some(slot) = state.live.get(number, key) {
                    // Being put again is a use, and the prompt's head must not make room for
                    // its tail.
                    state.entries.touch(slot, *stamp);
                    state.add_pin(slot);
                    let place = state.place(slot);
                    present.push(place.token);
                    behind = self.last_of(&place.extents);
                    return Err(Refused::Present(place.token));
                }
                if let Some(slot) = state.reserved.get(number, key) {
                    let place = state.place(slot);
                    behind = self.last_of(&place.extents);
                    return Err(Refused::Reserved(place.token));
                }
                if let Some(cause) = closed {
                    return Err(self.full(*len, cause));
                }
                let hint = Hint {
                    behind,
                    followed_by,
                };
                let (slot, extents) = self
                    .make_room(state, number, *len, *evict, hint)
                    .inspect_err(|_| {
                        self.counters.full.fetch_add(1, Ordering::Relaxed);
                    })?;
                behind = self.last_of(&extents);
                let mut entry = Entry::new(*key, number, extents, *len);
                entry.parts = *parts;
                entry.sequence = first + (blocks.len() - 1 - index) as u64;
                entry.created = created;
                entry.stamp = *stamp;
                entry.copy = *copy;
                entry.stage = Stage::Reserved;
                state.entries.set(slot, entry);
                state.reserved.insert(number, key, slot);
                Ok(Reserved::new(self, state.place(slot)))
            })
            .collect();
        self.unpin_in(state, present.into_iter());
        reserved
    }

    /// A slot and extents for `len` bytes, evicting as needed if that is allowed.
    fn make_room(
        &self,
        state: &mut State,
        namespace: u32,
        len: u64,
        evict: bool,
        hint: Hint,
    ) -> Result<(u32, Packed), Refused> {
        let pieces = if state.contiguous.contains(&namespace) {
            1
        } else {
            EXTENTS_MAX
        };
        let full = |pool: &Pool| {
            let (free, capacity) = (pool.free_bytes(), self.layout().data_len());
            self.full(len, Cause::Space { free, capacity })
        };
        if len == 0 || len > self.layout().data_len() {
            return Err(full(&state.pool));
        }
        loop {
            let vacant = state.entries.vacant() > 0;
            if vacant && let Some(extents) = self.allocate(&mut state.pool, len, pieces, hint) {
                // Vacant, so there is one.
                let slot = state.entries.take().ok_or_else(|| full(&state.pool))?;
                return Ok((slot, extents));
            }
            // With all that eviction may run ahead, and still in pieces.
            let scattered = vacant && state.pool.free_bytes() >= self.with_ahead(len);
            let freed = match scattered {
                _ if !evict => false,
                true => self.make_hole(state, len, pieces),
                false => self.evict(state, len),
            };
            if !freed {
                return Err(full(&state.pool));
            }
        }
    }

    /// Where a block's last extent begins, as the pool counts.
    fn last_of(&self, extents: &Packed) -> Option<u64> {
        let last = extents.iter().last();
        last.map(|(offset, _)| offset - self.layout().data)
    }

    fn full(&self, requested: u64, cause: Cause) -> Refused {
        Refused::Full(Full {
            tier: self.name,
            requested,
            cause,
        })
    }

    fn allocate(&self, pool: &mut Pool, len: u64, pieces: usize, hint: Hint) -> Option<Packed> {
        let data = self.layout().data;
        let lost = |piece: &Extent| self.is_lost(data + piece.offset, piece.len);
        let taken = loop {
            let taken = pool.allocate_scattered(len, pieces, hint).ok()?;
            if !taken.iter().any(lost) {
                break taken;
            }
            for piece in &taken {
                if lost(piece) {
                    self.lose(data + piece.offset, piece.len);
                } else if let Err(error) = pool.free(piece.offset) {
                    tracing::error!(tier = self.name, %error, "an extent was freed twice");
                }
            }
        };
        let mut extents = [(0, 0); EXTENTS_MAX];
        for (packed, extent) in extents.iter_mut().zip(taken.iter()) {
            *packed = (extent.offset + data, extent.len);
        }
        Packed::new(extents.get(..taken.len())?)
    }

    /// Publishes reserved blocks whose bytes are in place; true where the token was a
    /// reservation, but for copies of blocks that were removed meanwhile. On return the blocks are
    /// durable as far as the arena's durability says. With `pinned` each is born with a pin, for
    /// the mover that takes it to the next tier.
    pub(crate) fn commit(&self, blocks: &[(Token, Checksum)], pinned: bool) -> Vec<bool> {
        let mut state = self.state.lock();
        let claimed = state.claim(blocks.iter().map(|(token, _)| *token));
        self.publish_claimed(state, blocks, claimed, pinned)
    }

    /// Takes reservations for [`Arena::commit_claimed`], so that nobody can end them meanwhile;
    /// true where the token was a reservation.
    pub(crate) fn claim(&self, tokens: &[Token]) -> Vec<bool> {
        self.state.lock().claim(tokens.iter().copied())
    }

    /// Makes claimed reservations plain ones again.
    pub(crate) fn unclaim(&self, tokens: &[Token]) {
        let mut state = self.state.lock();
        for token in tokens {
            let entry = state.check(*token);
            if entry.is_some_and(|entry| entry.stage == Stage::Committing) {
                state.entries.get_mut(token.slot).stage = Stage::Reserved;
            }
        }
    }

    /// As [`Arena::commit`], for tokens that the caller has claimed.
    pub(crate) fn commit_claimed(&self, blocks: &[(Token, Checksum)], pinned: bool) -> Vec<bool> {
        let claimed = vec![true; blocks.len()];
        self.publish_claimed(self.state.lock(), blocks, claimed, pinned)
    }

    /// Records, and only then visible. For a power cut: payload, fence, record, fence.
    fn publish_claimed<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        blocks: &[(Token, Checksum)],
        mut claimed: Vec<bool>,
        pinned: bool,
    ) -> Vec<bool> {
        if self.is_durable() {
            let extents = |(token, _): &(Token, Checksum)| state.entries.get(token.slot).extents;
            let places: Vec<Option<Packed>> = blocks
                .iter()
                .zip(&claimed)
                .map(|(block, claimed)| claimed.then(|| extents(block)))
                .collect();
            drop(state);
            let synced = |(offset, len)| self.sync(offset, len);
            let durable: Vec<bool> = places
                .iter()
                .map(|place| place.is_some_and(|extents| extents.iter().all(synced)))
                .collect();
            state = self.state.lock();
            self.withdraw(&mut state, blocks, &mut claimed, &durable);
        }
        let is_removed = |state: &State, slot| state.entries.get(slot).removed;
        for ((token, _), claimed) in blocks.iter().zip(&mut claimed) {
            if *claimed && is_removed(&state, token.slot) {
                *claimed = false;
                self.give_up(&mut state, token.slot);
            }
        }
        let mut slots: Vec<u32> = blocks
            .iter()
            .zip(&claimed)
            .filter(|(_, claimed)| **claimed)
            .map(|((token, checksum), _)| {
                state.entries.get_mut(token.slot).checksum = *checksum;
                self.write_record(&state, token.slot, RecordState::Live);
                token.slot
            })
            .collect();
        let durable = match self.is_durable() {
            true => {
                drop(state);
                let durable = self.sync_records(&slots);
                state = self.state.lock();
                durable
            }
            false => self.sync_records(&slots),
        };
        if !durable {
            let none = vec![false; blocks.len()];
            self.withdraw(&mut state, blocks, &mut claimed, &none);
            return claimed;
        }
        for slot in &slots {
            self.publish(&mut state, *slot, pinned);
        }
        // Those removed while their records were being made durable.
        slots.retain(|slot| is_removed(&state, *slot));
        self.drop_blocks(&mut state, &slots);
        claimed
    }

    /// Gives claimed blocks up that the medium could not take. Their extents are not used again
    /// before the next opening: nobody knows what became of them.
    fn withdraw(
        &self,
        state: &mut State,
        blocks: &[(Token, Checksum)],
        claimed: &mut [bool],
        durable: &[bool],
    ) {
        for (((token, _), claimed), durable) in blocks.iter().zip(claimed).zip(durable) {
            if *claimed && !durable {
                *claimed = false;
                let entry = *state.entries.get(token.slot);
                state
                    .reserved
                    .remove(entry.namespace, &entry.key, token.slot);
                state.entries.get_mut(token.slot).stage = Stage::Doomed;
                self.write_record(state, token.slot, RecordState::Dead);
            }
        }
    }

    fn publish(&self, state: &mut State, slot: u32, pinned: bool) {
        let entry = *state.entries.get(slot);
        state.reserved.remove(entry.namespace, &entry.key, slot);
        state.entries.get_mut(slot).stage = Stage::Live;
        state.live.insert(entry.namespace, &entry.key, slot);
        state.live_bytes += entry.len;
        state.roll.came(entry.namespace, entry.len);
        state.entries.link(slot);
        if pinned {
            state.add_pin(slot);
        }
        self.counters.stored_blocks.fetch_add(1, Ordering::Relaxed);
        self.counters
            .stored_bytes
            .fetch_add(entry.len, Ordering::Relaxed);
    }

    /// Gives reservations back; how many bytes of payload they were for. Whoever wrote into them
    /// must have stopped.
    pub(crate) fn abort(&self, tokens: &[Token]) -> u64 {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let mut freed = 0;
        for token in tokens {
            if !state.is_reserved(*token) {
                continue;
            }
            freed += state.entries.get(token.slot).len;
            self.give_up(state, token.slot);
        }
        freed
    }

    /// Frees a reservation. Nothing of it is on the medium: the slot still holds an empty or a
    /// dead record.
    fn give_up(&self, state: &mut State, slot: u32) {
        let entry = *state.entries.get(slot);
        state.reserved.remove(entry.namespace, &entry.key, slot);
        self.release(state, slot);
    }

    /// Keeps every block of a namespace in one piece, for engines whose own copy engine moves
    /// it.
    pub(crate) fn keep_contiguous(&self, namespace: NamespaceId) {
        let mut state = self.state.lock();
        let number = state.namespaces.intern(namespace);
        if !state.contiguous.contains(&number) {
            state.contiguous.push(number);
        }
    }

    /// Notes what a namespace means in the arena's directory, if it has room.
    pub(crate) fn describe(&self, namespace: NamespaceId, description: &str) {
        use crate::format::{directory, layout};
        let Some(table) = &self.table else { return };
        // A closed arena may have another owner.
        let lock = table.lock.lock();
        let mut state = self.state.lock();
        if lock.is_none() || state.described.contains(&Some(namespace)) {
            return;
        }
        let Some(index) = state.described.iter().position(Option::is_none) else {
            return;
        };
        let at = layout::DIRECTORY + (index * directory::LEN) as u64;
        if let Err(error) = self
            .mapping
            .load()
            .write_from(at, &directory::encode(namespace, description))
        {
            tracing::warn!(tier = self.name, %error, "a namespace could not be described");
        }
        state.described[index] = Some(namespace);
    }
}

impl State {
    fn is_reserved(&self, token: Token) -> bool {
        self.check(token)
            .is_some_and(|entry| entry.stage == Stage::Reserved)
    }

    fn claim(&mut self, tokens: impl Iterator<Item = Token>) -> Vec<bool> {
        let mut take = |token: Token| {
            let reserved = self.is_reserved(token);
            if reserved {
                self.entries.get_mut(token.slot).stage = Stage::Committing;
            }
            reserved
        };
        tokens.map(&mut take).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Key;

    #[test]
    fn a_copy_of_a_block_that_is_removed_meanwhile_is_never_published() {
        let arena = Arc::new(Arena::volatile("Cache", 0, 1 << 20).unwrap());
        let namespace = NamespaceId([1; 16]);
        let keys = [Key([1; 32]), Key([2; 32])];
        for clear in [false, true] {
            let wanted = |copy: bool| Wanted {
                key: keys[usize::from(copy)],
                len: 5000,
                parts: 1,
                stamp: 0,
                copy,
                evict: true,
            };
            let reserved = arena.reserve(namespace, &[wanted(false), wanted(true)]);
            let tokens: Vec<Token> = reserved
                .iter()
                .map(|place| place.as_ref().ok().unwrap().token)
                .collect();
            let removed = if clear {
                arena.clear(namespace)
            } else {
                arena.remove(namespace, &keys)
            };
            assert_eq!(removed, 0);
            let written = tokens.iter().map(|token| (*token, Checksum([0; 16])));
            let written: Vec<_> = written.collect();
            assert_eq!(
                arena.commit(&written, false),
                [true, false],
                "a put is its own"
            );
            let mut found = [false; 2];
            arena.contains(namespace, &keys, &mut found);
            assert_eq!(found, [true, false]);
            assert_eq!(arena.remove(namespace, &keys), 1);
            let stats = arena.stats();
            assert_eq!((stats.reserved_blocks, stats.free_bytes), (0, 1 << 20));
        }
    }
}
