//! Room for blocks that do not fit: made by eviction while no lock is held, and set aside for who
//! asked, so that nobody else takes it meanwhile.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvdepot_alloc::{Extent, Hint};

use crate::body::{Arena, State};
use crate::format::record::{EXTENTS_MAX, Packed};
use crate::index::{Entry, Stage};
use crate::key::NamespaceId;
use crate::place::Wanted;
use crate::refused::{Cause, Full, Refused};
use crate::turnover::EvictionLimit;

/// A slot and extents that are set aside and belong to no block yet. Dropping the value frees them.
#[must_use = "dropped, it is given back"]
pub struct Space {
    arena: Arc<Arena>,
    slot: u32,
    record: u32,
    extents: Packed,
    ours: bool,
}

impl Space {
    /// Returns the number of the arena in its depot.
    pub fn device(&self) -> u32 {
        self.arena.number
    }

    /// Returns the pool offset of the last extent, for placement hints.
    pub fn last(&self) -> Option<u64> {
        self.arena.last_of(&self.extents)
    }

    /// Takes its record and its extents for a block; the lock is held.
    pub(crate) fn take(&mut self, state: &mut State) -> (u32, Packed) {
        self.ours = false;
        state.set_aside -= 1;
        self.arena.forget(state, self.slot);
        (self.record, self.extents)
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        if self.ours {
            let mut state = self.arena.state.lock();
            state.set_aside -= 1;
            self.arena.release(&mut state, self.slot);
        }
    }
}

impl Arena {
    /// A record and extents for a block, where nothing may be evicted for it or nothing must.
    pub(crate) fn find_space(
        &self,
        state: &mut State,
        len: u64,
        hint: Hint,
    ) -> Option<(u32, Packed)> {
        self.carve_lost(state);
        let record = self.take_record(state)?;
        let extents = self.allocate(state, len, hint);
        if extents.is_none() {
            state.records.give_back(record);
        }
        Some((record, extents?))
    }

    /// Obtains space for a block by eviction.
    ///
    /// The call waits only for the medium and for other evictions in progress.
    ///
    /// # Errors
    ///
    /// The reason for which the block gets no space.
    pub fn make_space(
        self: &Arc<Arena>,
        namespace: NamespaceId,
        wanted: &Wanted,
        hint: Hint,
    ) -> Result<Space, Refused> {
        crate::held::may_wait();
        let len = wanted.len;
        if let Some(cause) = self.closed_to_writes() {
            return Err(self.full(len, cause));
        }
        let mut state = self.state.lock();
        // Whether what is promised is ours.
        let mut ours = false;
        let (mut waited, mut last) = (false, false);
        loop {
            while state.digs > 0 && !ours {
                state.wait(&self.burial);
            }
            // Anew each time: a number that no block bears may go to another namespace.
            let number = self.intern(&state, namespace);
            if len == 0 || len > self.layout().data_len() {
                return Err(self.no_room(&state, wanted));
            }
            let may_take = std::mem::take(&mut ours) || self.may_use_free(&mut state, wanted);
            let space = may_take.then(|| self.set_aside(&mut state, number, wanted, hint));
            if let Some(answer) = space.flatten() {
                return answer;
            }
            if last {
                return Err(self.no_room(&state, wanted));
            }
            // What others have evicted may do.
            if !std::mem::replace(&mut waited, true) && self.await_burials(&mut state) {
                continue;
            }
            waited = false;
            // What there is to evict others may have begun to bury since; and while a place was
            // looked for they may have given back room, so that nothing need go.
            self.may_evict_oldest(&mut state, wanted);
            ours = self.evict_for(&mut state, wanted);
            last = !ours && !self.await_burials(&mut state);
        }
    }

    /// Sets room aside for a block; `None` where it finds none.
    pub(crate) fn set_aside(
        self: &Arc<Arena>,
        state: &mut State,
        namespace: u32,
        wanted: &Wanted,
        hint: Hint,
    ) -> Option<Result<Space, Refused>> {
        let (record, extents) = self.find_space(state, wanted.len, hint)?;
        let mut entry = Entry::new(wanted.key, namespace, extents, wanted.len);
        entry.stage = Stage::SetAside;
        entry.record = record;
        // Of no token.
        entry.sequence = u64::MAX;
        let Some(slot) = self.enter(state, &entry) else {
            self.free_extents(state, &extents);
            state.records.give_back(record);
            return Some(Err(self.no_room(state, wanted)));
        };
        state.set_aside += 1;
        Some(Ok(Space {
            arena: Arc::clone(self),
            slot,
            record,
            extents,
            ours: true,
        }))
    }

    /// Refuses a block that finds no space.
    pub(crate) fn no_room(&self, state: &State, wanted: &Wanted) -> Refused {
        self.counters.full.fetch_add(1, Ordering::Relaxed);
        let (layout, free) = (self.layout(), state.pool.free_bytes());
        let (records, capacity) = (layout.records, layout.data_len());
        let has_limit = || self.eviction_limit(state, wanted) != EvictionLimit::NONE;
        let cause = match state.records.vacant() {
            _ if wanted.len > capacity => Cause::Space { free, capacity },
            _ if self.may_evict(state, wanted) && has_limit() => Cause::Limit,
            0 => Cause::Records { records },
            _ => Cause::Space { free, capacity },
        };
        self.full(wanted.len, cause)
    }

    /// Rejects a block for the same reason as an earlier block of its call, without another search.
    pub fn refuse_like(&self, full: Full, requested: u64) -> Refused {
        let is_for_space = matches!(
            full.cause,
            Cause::Space { .. } | Cause::Records { .. } | Cause::Limit
        );
        if is_for_space {
            self.counters.full.fetch_add(1, Ordering::Relaxed);
        }
        self.full(requested, full.cause)
    }

    pub(crate) fn full(&self, requested: u64, cause: Cause) -> Refused {
        Refused::Full(Full {
            tier: self.name,
            requested,
            cause,
        })
    }

    /// Where a block's last extent begins, as the pool counts.
    pub(crate) fn last_of(&self, extents: &Packed) -> Option<u64> {
        let last = extents.iter().last();
        last.map(|(offset, _)| offset - self.layout().data)
    }

    fn allocate(&self, state: &mut State, len: u64, hint: Hint) -> Option<Packed> {
        let data = self.layout().data;
        let lost = |piece: &Extent| self.is_lost(data + piece.offset, piece.len);
        let taken = loop {
            let taken = state.pool.allocate_scattered(len, EXTENTS_MAX, hint).ok()?;
            if !taken.iter().any(lost) {
                break taken;
            }
            for piece in &taken {
                if lost(piece) {
                    self.lose(state, data + piece.offset, piece.len);
                } else if let Err(error) = state.pool.free(piece.offset) {
                    tracing::error!(tier = self.name, %error,
                        "internal error: extent freed twice; the second free is ignored");
                }
            }
        };
        let mut extents = [(0, 0); EXTENTS_MAX];
        for (packed, extent) in extents.iter_mut().zip(taken.iter()) {
            *packed = (extent.offset + data, extent.len);
        }
        Packed::new(extents.get(..taken.len())?)
    }
}
