//! When blocks were used, as this process knows it sooner than the files tell.
//!
//! A file's time is its block's last use. It is moved seldom, so that reads do not write; uses in
//! between are kept here, and whoever collects looks here before a file goes. Within a use the time
//! says where in its prompt a block stands: a prompt's tail is always older than its head.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};

use kvdepot_arena::{Identity, Use};
use parking_lot::Mutex;

/// Blocks, and prompts, that are kept: so many of the last ones, and at most twice as many.
const KEPT: usize = 1 << 17;
const PROMPTS: usize = 1 << 12;

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

    fn set(&mut self, number: u64, time: i64) {
        if self.now.len() >= self.most {
            self.before = std::mem::take(&mut self.now);
        }
        self.now.insert(number, time);
    }
}

pub(super) struct Uses {
    secret: RandomState,
    blocks: Mutex<Times>,
    prompts: Mutex<Times>,
}

impl Uses {
    pub(super) fn new() -> Uses {
        Uses {
            secret: RandomState::new(),
            blocks: Mutex::new(Times::new(KEPT)),
            prompts: Mutex::new(Times::new(PROMPTS)),
        }
    }

    /// The time of a use now, in nanoseconds since 1970: of a block with that stamp. All of one
    /// prompt have the time at which the first of them came.
    pub(super) fn of(&self, stamp: u64, now: i64) -> i64 {
        let began = Use::of(stamp).began;
        let mut prompts = self.prompts.lock();
        let first = prompts.get(began).unwrap_or_else(|| {
            prompts.set(began, now);
            now
        });
        at(first, stamp)
    }

    /// Notes that a block is used, at the time that is answered: the one at `index` of a call.
    pub(super) fn note(&self, name: &Identity, index: usize, now: i64) -> i64 {
        let time = at(now, Use::within(index));
        let number = self.secret.hash_one(name);
        self.blocks.lock().set(number, time);
        time
    }

    /// When a block was used last, as far as it is known here.
    pub(super) fn last(&self, name: &Identity) -> Option<i64> {
        let number = self.secret.hash_one(name);
        self.blocks.lock().get(number)
    }
}

/// A time, with the place in the prompt that a stamp names in its last bits.
fn at(time: i64, stamp: u64) -> i64 {
    let bits = (1 << Use::BITS) - 1;
    time & !bits | stamp as i64 & bits
}

#[cfg(test)]
mod tests {
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
        let times = [0, 1, 2].map(|index| uses.note(&name(index as u8), index, now));
        assert!(times.is_sorted_by(|a, b| a > b));
        assert_eq!(
            (uses.last(&name(1)), uses.last(&name(9))),
            (Some(times[1]), None)
        );
    }
}
