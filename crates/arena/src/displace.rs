//! What may go for a block: how much a prompt displaces, so that one that is as large as the
//! arena takes neither the other prompts' room nor its own head's.
//!
//! Nothing that was used since its prompt began goes for a block; so a prompt never displaces its
//! own head. What is new in a prompt displaces an eighth of the arena's bytes by the order of use
//! alone, as all of a small prompt does. Behind that it finds free room, and displaces what has not
//! been used while as many bytes were stored as the arena has; and nothing behind half of the
//! arena. What found no room then, and is offered again, displaces whatever was not used since.

use std::collections::VecDeque;

use crate::body::{Arena, State};
use crate::group::{Class, ordinary};
use crate::index::{Oldest, Use};
use crate::place::Wanted;

/// Of the arena, what is new in a prompt displaces by the order of use alone, and in all: one part
/// in so many.
const SMALL: u64 = 8;
const MOST: u64 = 2;

/// Marks that are made while as many bytes are stored as the arena has.
const MARKS: usize = 16;

/// When blocks were used while the arena's bytes were stored: marks of the last few rounds.
#[derive(Default)]
pub(crate) struct Turnover {
    /// The latest use before each, the oldest first.
    marks: VecDeque<u64>,
    latest: u64,
    /// Bytes that were stored since the last one.
    stored: u64,
}

impl Turnover {
    /// Notes that so many bytes were stored in an arena of that capacity.
    pub(crate) fn note(&mut self, bytes: u64, stamp: u64, capacity: u64) {
        self.latest = self.latest.max(ordinary(stamp));
        self.stored += bytes;
        let part = (capacity / MARKS as u64).max(1);
        // More rounds than are kept leave no trace.
        for _ in 0..(self.stored / part).min(3 * MARKS as u64) {
            self.marks.push_back(self.latest);
        }
        self.stored %= part;
        self.marks
            .drain(..self.marks.len().saturating_sub(3 * MARKS));
    }

    /// The use before which nothing was stored for a whole round when a prompt began.
    fn before(&self, began: u64) -> u64 {
        let marks = self.marks.partition_point(|mark| *mark < began);
        match marks.checked_sub(MARKS) {
            Some(at) => self.marks[at] + 1,
            None => 0,
        }
    }
}

impl State {
    /// The use before which blocks may go for this one; 0 for none.
    fn limit(&self, wanted: &Wanted, capacity: u64) -> u64 {
        let use_ = Use::of(ordinary(wanted.stamp));
        let before = use_.depth.saturating_mul(wanted.room());
        match () {
            () if !wanted.evict => 0,
            () if !use_.is_first || before < capacity / SMALL => use_.began,
            () if before < capacity / MOST => use_.began.min(self.turnover.before(use_.began)),
            () => 0,
        }
    }
}

/// What goes before a use: what others have superseded does always.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Before(u64);

impl Before {
    /// Whatever has been used.
    pub(crate) const ALL: Before = Before(u64::MAX);

    /// Whether a block of this stamp goes.
    pub(crate) fn takes(self, stamp: u64) -> bool {
        ordinary(stamp) < self.0 || stamp < Class::Ordinary.first()
    }
}

impl Arena {
    /// What may go for a block.
    pub(crate) fn displaced_by(&self, state: &State, wanted: &Wanted) -> Before {
        Before(state.limit(wanted, self.layout().data_len()))
    }

    /// Whether a block may have free room: what eviction keeps free ahead of need is for those for
    /// which something may go.
    pub(crate) fn may_take(&self, state: &mut State, wanted: &Wanted) -> bool {
        let room = wanted.room();
        if !state.is_free(room) || !state.pressed {
            return state.is_free(room);
        }
        let (bytes, slots) = state.unpromised();
        if bytes >= self.with_ahead(room) && slots > self.slots_ahead() {
            return true;
        }
        let before = self.displaced_by(state, wanted);
        match state.order.look(&self.index) {
            Oldest::Block(_, stamp) | Oldest::Used(_, stamp) => before.takes(stamp),
            // Nobody knows yet.
            Oldest::NotYet => true,
            Oldest::Nothing => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Uses;

    #[test]
    fn a_round_is_as_many_bytes_as_the_arena_has() {
        let uses = Uses::default();
        let mut turnover = Turnover::default();
        let mut stamps = Vec::new();
        for _ in 0..48 {
            let stamp = uses.call(0).of(0);
            stamps.push(stamp);
            turnover.note(100, stamp, 1600);
        }
        assert_eq!(turnover.before(stamps[15]), 0, "no round has passed");
        assert_eq!(turnover.before(stamps[16]), stamps[0] + 1);
        assert_eq!(turnover.before(stamps[40]), stamps[24] + 1);
        assert_eq!(turnover.before(uses.call(0).of(0)), stamps[32] + 1);
        // Whoever stores more than the arena has in one go leaves nothing that is older.
        turnover.note(1 << 40, uses.call(0).of(0), 1600);
        assert_eq!(turnover.before(stamps[40]), 0);
    }
}
