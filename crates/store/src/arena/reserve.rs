//! Reserving: room for blocks under their keys, at once or not at all. What does not fit is given
//! room by `space`, off all locks, and reserved there.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvdepot_alloc::Hint;

use super::space::Space;
use super::{Arena, Place, Reserved, State, Token, Wanted};
use crate::format::record::Packed;
use crate::index::{Entry, Stage};
use crate::{Error, NamespaceId, clock};

/// Why a key got no reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// It is published already.
    Present(Token),
    /// Another call is writing it.
    Reserved(Token),
    /// There is no room for it.
    Full(Full),
    /// It left unread, and others would have to go for it.
    Declined,
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
    /// Each record of the table has a block that nothing may evict.
    Records { records: u64 },
    /// More bytes than this would wait for the far tier.
    Queue { depth: u64 },
    /// Processes that worked for the previous owner may still write here: one of them, as far as
    /// it is known.
    Orphans { pid: Option<u32> },
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
            Cause::Space { capacity, .. } if requested > capacity => {
                format!("the block is larger than all of its medium, {capacity} bytes")
            }
            Cause::Space { free, capacity } => {
                format!("{free} are free of {capacity}, the rest is pinned or reserved")
            }
            Cause::Records { records } => format!(
                "each of its {records} records has a block that is pinned or reserved; a new arena \
                 has more with dax.records"
            ),
            Cause::Queue { depth } => {
                format!("the write-back queue is full (write_back_depth = {depth})")
            }
            Cause::Leaving => "its devices are drained or have failed".into(),
            Cause::Orphans { pid: None } => {
                "processes of its previous owner may still write".into()
            }
            Cause::Orphans { pid: Some(pid) } => {
                format!("process {pid} of its previous owner may still write")
            }
        };
        Error::Full {
            tier,
            requested,
            reason,
        }
    }
}

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
    /// Reserves extents for blocks, given in prefix order: for all for which there may be room, or
    /// for none. `None` when others have to go first: see [`Arena::make_space`]. Neighbours in the
    /// call become neighbours in the arena where free space allows, so that a restore of the
    /// prompt needs few spans.
    pub(crate) fn reserve(
        self: &Arc<Arena>,
        namespace: NamespaceId,
        blocks: &[Wanted],
    ) -> Option<Vec<Result<Reserved, Refused>>> {
        let closed = self.closed_to_writes();
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let number = self.intern(state, namespace);
        self.carve_lost(state);
        if closed.is_none() && self.lacks_room(state, number, blocks) {
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
            let found = self.find_space(state, number, wanted.len, hint);
            let Some((record, extents)) = found else {
                if self.may_evict(state, wanted) {
                    let made = answers.iter().flatten();
                    made.for_each(|place| self.give_up(state, place.token.slot));
                    return None;
                }
                answers.push(Err(self.refuse(state, wanted.len)));
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
        let reserved = |answer: Result<Place, Refused>| answer.map(|at| Reserved::new(self, at));
        Some(answers.into_iter().map(reserved).collect())
    }

    /// Reserves blocks, in prefix order, in room that was made for them.
    pub(crate) fn reserve_in(
        self: &Arc<Arena>,
        namespace: NamespaceId,
        blocks: Vec<(Wanted, Space)>,
    ) -> Vec<Result<Reserved, Refused>> {
        // What is not needed is given back once the lock is free.
        let mut spare = Vec::new();
        let mut state = self.state.lock();
        let number = self.intern(&state, namespace);
        // Of now, above those of all blocks that were ever here.
        let mut sequence = state.sequence + blocks.len() as u64;
        state.sequence = sequence;
        let created = clock::unix_seconds();
        let mut answers = Vec::with_capacity(blocks.len());
        for (wanted, mut space) in blocks {
            sequence -= 1;
            if let Some((refused, _)) = self.known_in(&state, number, &wanted) {
                spare.push(space);
                answers.push(Err(refused));
                continue;
            }
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
        let reserved = |answer: Result<Place, Refused>| answer.map(|at| Reserved::new(self, at));
        answers.into_iter().map(reserved).collect()
    }

    /// Whether blocks must go before all of these fit. Those for which nothing may, or for which
    /// nothing is left, find out for themselves.
    fn lacks_room(&self, state: &State, namespace: u32, blocks: &[Wanted]) -> bool {
        let (free, vacant) = (state.pool.free_bytes(), state.records.vacant());
        let fits = |rooms: u64, count: usize| rooms <= free && count as u64 <= vacant;
        let sum = |rooms: u64, wanted: &Wanted| rooms.saturating_add(wanted.room());
        if fits(blocks.iter().fold(0, sum), blocks.len()) {
            return false;
        }
        let absent = blocks.iter().filter(|wanted| {
            let key = &wanted.key;
            let known = || {
                self.index.find(namespace, key).is_some()
                    || state.reserved.get(namespace, key).is_some()
            };
            self.may_evict(state, wanted) && !known()
        });
        !fits(absent.clone().fold(0, sum), absent.count())
    }

    /// Whether others might make room for this block.
    fn may_evict(&self, state: &State, wanted: &Wanted) -> bool {
        let could = self.index.evictable_bytes() > 0 || state.burials > 0;
        wanted.evict && could && wanted.len > 0 && wanted.len <= self.layout().data_len()
    }

    /// Notes when little room is left; see [`Arena::evict_ahead`].
    fn note_room(&self, state: &State) {
        if self.is_low_in(state) {
            self.low.store(true, Ordering::Relaxed);
        }
    }

    /// Whether eviction shall run ahead now.
    pub(crate) fn is_low(&self) -> bool {
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
            return Err(self.refuse(state, wanted.len));
        };
        state
            .reserved
            .insert(at.namespace, &wanted.key, slot, at.created);
        Ok(self.place_of(slot, &entry, at.id))
    }
}
