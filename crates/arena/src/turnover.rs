//! Uses by stored bytes: which blocks were not used while the capacity was stored once.

use std::collections::VecDeque;

use crate::group::{Class, ordinary};
use crate::index::Use;

/// Marks that are made while as many bytes are stored as the arena has.
const MARKS: usize = 16;

/// A stamp below which blocks may be evicted. Superseded blocks may always be evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EvictionLimit(pub(crate) u64);

impl EvictionLimit {
    /// Every block may be evicted.
    pub(crate) const NONE: EvictionLimit = EvictionLimit(u64::MAX);

    /// Whether a block with this stamp may be evicted.
    pub(crate) fn allows(self, stamp: u64) -> bool {
        ordinary(stamp) < self.0 || stamp < Class::Ordinary.first()
    }
}

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

    /// The use before which nothing was stored for a whole round when a prompt began. A prompt that
    /// was being stored then counts as used since.
    pub(crate) fn before(&self, began: u64) -> u64 {
        let marks = self.marks.partition_point(|mark| *mark < began);
        match marks.checked_sub(MARKS) {
            Some(at) => pair_of(self.marks[at]),
            None => 0,
        }
    }
}

/// The first stamp of a prompt: its stored blocks and its new ones have two uses in a row.
fn pair_of(stamp: u64) -> u64 {
    Use::of(stamp).began & !(1 << Use::BITS)
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
        assert_eq!(turnover.before(stamps[16]), pair_of(stamps[0]));
        assert_eq!(turnover.before(stamps[40]), pair_of(stamps[24]));
        assert_eq!(turnover.before(uses.call(0).of(0)), pair_of(stamps[32]));
        // Whoever stores more than the arena has in one go leaves nothing that is older.
        turnover.note(1 << 40, uses.call(0).of(0), 1600);
        assert_eq!(turnover.before(stamps[40]), 0);
    }
}
