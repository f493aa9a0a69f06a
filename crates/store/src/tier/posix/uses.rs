//! When blocks were used, as this process knows it sooner than the files tell.
//!
//! A file's time is its block's last use. It is moved seldom, so that reads do not write; uses in
//! between are kept here, and whoever collects looks here before a file goes. Within a use the time
//! says where in its prompt a block stands: a prompt's tail is always older than its head.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};

use kvdepot_arena::{Identity, Use};
use parking_lot::Mutex;

/// Blocks, and uses, that are kept: so many of the last ones, and at most twice as many.
const KEPT: usize = 1 << 17;
const USES: usize = 1 << 14;

/// Names that a call notes at a time: others have their turn between them.
const NAMES_TURN: usize = 256;

/// Times by numbers, of which the oldest go.
struct Times {
    most: usize,
    now: HashMap<u64, i64>,
    before: HashMap<u64, i64>,
}

impl Times {
    fn new(most: usize) -> Times {
        Times {
            most,
            now: HashMap::new(),
            before: HashMap::new(),
        }
    }

    fn get(&self, number: u64) -> Option<i64> {
        let known = self.now.get(&number).or_else(|| self.before.get(&number));
        known.copied()
    }

    /// The later of two uses counts: calls that note the same blocks take turns.
    fn set(&mut self, number: u64, time: i64) {
        let time = self.get(number).map_or(time, |known| known.max(time));
        if self.now.len() >= self.most {
            self.before = std::mem::take(&mut self.now);
        }
        self.now.insert(number, time);
    }
}

pub(super) struct Uses {
    secret: RandomState,
    blocks: Mutex<Times>,
    /// The times of uses, by their first stamps.
    times: Mutex<Times>,
}

impl Uses {
    pub(super) fn new() -> Uses {
        Uses {
            secret: RandomState::new(),
            blocks: Mutex::new(Times::new(KEPT)),
            times: Mutex::new(Times::new(USES)),
        }
    }

    /// The time of a use, in nanoseconds since 1970: of a block with that stamp. All blocks of one
    /// use have the time at which the first of them came, but for those that are new behind a
    /// prefix: they are older than the prefix, and not by much.
    pub(super) fn of(&self, stamp: u64, now: i64) -> i64 {
        let began = Use::of(stamp).began;
        let is_new = began & UNIT as u64 == 0;
        let both = began & !(UNIT as u64);
        let mut times = self.times.lock();
        let first = times.get(both).unwrap_or_else(|| {
            times.set(both, now);
            now
        });
        at(if is_new { first - UNIT } else { first }, stamp)
    }

    /// The time before which files may be evicted for a block with that stamp: those of its prompt
    /// have this time or a later one.
    pub(super) fn limit(&self, stamp: u64, now: i64) -> i64 {
        let began = Use::of(stamp).began & !(UNIT as u64);
        self.of(began, now) & !(UNIT - 1)
    }

    /// Notes that blocks with these stamps are used, at the times that are returned. They are in
    /// prefix order, and others have their turn between some of them: until a prompt's tail is
    /// noted it is older than its head, and eviction takes it first.
    pub(super) fn note(
        &self,
        mut used: impl Iterator<Item = (Identity, u64)>,
        now: i64,
    ) -> Vec<i64> {
        let mut noted = Vec::with_capacity(used.size_hint().0);
        loop {
            let some = used.by_ref().take(NAMES_TURN);
            let some = some.map(|(name, stamp)| (self.secret.hash_one(name), self.of(stamp, now)));
            let some: Vec<(u64, i64)> = some.collect();
            if some.is_empty() {
                return noted;
            }
            let mut blocks = self.blocks.lock();
            for (number, time) in some {
                blocks.set(number, time);
                noted.push(time);
            }
        }
    }

    /// When a block was used last, as far as it is known here.
    pub(super) fn last(&self, name: &Identity) -> Option<i64> {
        let number = self.secret.hash_one(name);
        self.blocks.lock().get(number)
    }
}

/// The difference of new blocks and their prefix, in stamps and in nanoseconds: a millisecond.
const UNIT: i64 = 1 << Use::BITS;

/// A time, with the position in the prompt that a stamp names in its last bits.
fn at(time: i64, stamp: u64) -> i64 {
    time & !(UNIT - 1) | stamp as i64 & (UNIT - 1)
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use kvdepot_arena::{Key, NamespaceId, Stamps};

    use super::*;

    #[test]
    fn a_prompts_tail_is_older_than_its_head_whenever_it_comes() {
        let (uses, stamps) = (Uses::new(), kvdepot_arena::Uses::default());
        let first = stamps.call(0);
        let rest = Stamps::behind(first.of(3));
        let now = 1_700_000_000_000_000_000;
        let head = uses.of(first.of(0), now);
        let tail = uses.of(rest.of(0), now + 5_000_000_000);
        assert!(tail < head && head - tail < 1 << Use::BITS);
        let other = uses.of(stamps.call(0).of(0), now + 5_000_000_000);
        assert!(other > head);
        let name = |byte| Identity {
            namespace: NamespaceId([1; 16]),
            key: Key([byte; 32]),
        };
        let asked = stamps.asked();
        let later = now + 9_000_000_000;
        let used = |range: Range<usize>| range.map(|at| (name(at as u8), asked.of(at)));
        let mut times = uses.note(used(0..2), later);
        times.extend(uses.note(used(2..3), later + 1_000_000_000));
        assert!(times.is_sorted_by(|a, b| a > b) && times[2] > other);
        assert_eq!(
            (uses.last(&name(1)), uses.last(&name(9))),
            (Some(times[1]), None)
        );
        // An earlier use that is noted later changes nothing.
        drop(uses.note(std::iter::once((name(1), first.of(0))), later));
        assert_eq!(uses.last(&name(1)), Some(times[1]));
        let behind = Stamps::behind(asked.of(2));
        let new = [0, 1].map(|index| uses.of(behind.of(index), later + 7_000_000_000));
        assert!(new[1] < new[0] && new[0] < times[2] && new[1] > other);
        // The blocks behind may come first.
        let (asked, behind) = {
            let asked = stamps.asked();
            (asked, Stamps::behind(asked.of(0)))
        };
        let new = uses.of(behind.of(0), later);
        assert!(uses.of(asked.of(0), later) > new);
    }

    #[test]
    fn a_call_lets_others_have_their_turn_between_its_blocks() {
        let (uses, stamps) = (Uses::new(), kvdepot_arena::Uses::default());
        let (call, now) = (stamps.call(0), 1_700_000_000_000_000_000);
        let name = |number: usize| {
            let mut key = [0; 32];
            key[..8].copy_from_slice(&(number as u64).to_le_bytes());
            Identity {
                namespace: NamespaceId([1; 16]),
                key: Key(key),
            }
        };
        let used = (0..3 * NAMES_TURN).map(|at| {
            let is_noted = at < NAMES_TURN || uses.last(&name(0)).is_some();
            assert!(is_noted, "all are noted at once");
            (name(at), call.of(at))
        });
        let times = uses.note(used, now);
        assert!(times.is_sorted_by(|a, b| a > b));
        assert_eq!(uses.last(&name(700)), Some(times[700]));
    }
}
