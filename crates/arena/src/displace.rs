//! What may go for a block: how much a prompt displaces, so that one that is as large as the
//! arena takes neither the other prompts' room nor its own head's.
//!
//! Nothing that was used since its prompt began goes for a block; so a prompt never displaces its
//! own head. What is new in a prompt displaces an eighth of the arena's bytes by the order of use
//! alone, as all of a small prompt does. Behind that it finds free room, and displaces what has not
//! been used while as many bytes were stored as the arena has; and nothing behind half of the
//! arena. What found no room then, and is offered again, displaces whatever was not used since.

use crate::body::{Arena, State};
use crate::group::{Class, ordinary};
use crate::index::{Oldest, Use};
use crate::place::Wanted;

/// Of the arena, what is new in a prompt displaces by the order of use alone, and in all: one part
/// in so many.
const SMALL: u64 = 8;
const MOST: u64 = 2;

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
        self.may_displace(state, wanted)
    }

    /// Whether anything goes for a block, as far as that is known at once.
    pub(crate) fn may_displace(&self, state: &mut State, wanted: &Wanted) -> bool {
        let before = self.displaced_by(state, wanted);
        match state.order.look(&self.index) {
            Oldest::Block(_, stamp) | Oldest::Used(_, stamp) => before.takes(stamp),
            Oldest::NotYet | Oldest::Nothing => true,
        }
    }
}
