//! When blocks were used lately, as a store does not know it.
//!
//! Each process keeps the times of its own uses in memory. Once in a while it stores them as one
//! object, its *marks*, for whoever collects. Times are of the store's clock: hosts' clocks differ.

use std::collections::HashMap;
use std::time::Instant;

use kvdepot_arena::{Identity, clock};
use parking_lot::Mutex;

/// Most names of a generation: some tens of bytes each in memory, and 16 in the marks.
const NAMES_MAX: usize = 1 << 16;

/// Most names of others that one who collects remembers.
const MERGED_MAX: usize = 1 << 20;

/// Names that a call notes at a time: others have their turn between them.
const NAMES_TURN: usize = 256;

/// Times of some stores are of whole seconds: a use counts as of the end of its second, in
/// microseconds.
const GRAIN: i64 = 1_000_000;

const MAGIC: [u8; 8] = *b"KVDMARKS";

/// The store's time, in microseconds, at a moment of this host's clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct StoreTime {
    pub(super) micros: i64,
    pub(super) at: Instant,
}

/// Names are told by their hashes: of two that collide, one stays for longer.
fn hash_of(name: &Identity) -> u64 {
    let mut bytes = [0; 48];
    bytes[..16].copy_from_slice(&name.namespace.0);
    bytes[16..].copy_from_slice(&name.key.0);
    xxhash_rust::xxh3::xxh3_64(&bytes)
}

/// The uses of this process.
pub(super) struct Uses {
    begun: Instant,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Microseconds since `begun`.
    young: HashMap<u64, u64>,
    old: HashMap<u64, u64>,
    last: u64,
    /// There are some that the marks do not have.
    unsaid: bool,
}

impl Uses {
    pub(super) fn new() -> Uses {
        Uses {
            begun: clock::now(),
            state: Mutex::default(),
        }
    }

    /// Notes a use of names in prefix order: the last one is the oldest.
    pub(super) fn note(&self, names: impl DoubleEndedIterator<Item = Identity>) {
        let now = clock::since(self.begun).as_micros() as u64;
        let mut names = names.rev().map(|name| hash_of(&name));
        loop {
            let some: Vec<u64> = names.by_ref().take(NAMES_TURN).collect();
            if some.is_empty() {
                return;
            }
            let mut state = self.state.lock();
            if state.young.len() >= NAMES_MAX {
                state.old = std::mem::take(&mut state.young);
            }
            state.unsaid = true;
            for name in some {
                state.last = now.max(state.last + 1);
                let last = state.last;
                state.young.insert(name, last);
            }
        }
    }

    fn of(&self, name: u64) -> Option<u64> {
        let state = self.state.lock();
        let used = state.young.get(&name).or_else(|| state.old.get(&name));
        used.copied()
    }

    /// By the store's clock.
    fn time(&self, used: u64, now: StoreTime) -> i64 {
        let then = now.at.saturating_duration_since(self.begun).as_micros() as i64;
        now.micros + GRAIN + (used as i64 - then)
    }

    /// Whether there are uses that the marks do not have.
    pub(super) fn is_unsaid(&self) -> bool {
        self.state.lock().unsaid
    }

    /// The newest uses, as marks, which have them all from now on.
    pub(super) fn marks(&self, now: StoreTime) -> Vec<u8> {
        let mut all: Vec<(u64, u64)> = {
            let mut state = self.state.lock();
            state.unsaid = false;
            let young = state.young.iter().map(|(name, used)| (*used, *name));
            let old = state.old.iter();
            let old = old.filter(|(name, _)| !state.young.contains_key(name));
            young
                .chain(old.map(|(name, used)| (*used, *name)))
                .collect()
        };
        if all.len() > NAMES_MAX {
            let older = all.len() - NAMES_MAX;
            all.select_nth_unstable(older);
            all.drain(..older);
        }
        let mut bytes = MAGIC.to_vec();
        for (used, name) in all {
            bytes.extend_from_slice(&name.to_le_bytes());
            bytes.extend_from_slice(&self.time(used, now).to_le_bytes());
        }
        bytes
    }

    /// The marks are not stored.
    pub(super) fn are_unsaid(&self) {
        self.state.lock().unsaid = true;
    }
}

/// The uses of this process and of others, as one who collects has them.
pub(super) struct Merged<'a> {
    mine: &'a Uses,
    others: HashMap<u64, i64>,
    now: StoreTime,
}

impl<'a> Merged<'a> {
    pub(super) fn new(mine: &'a Uses, now: StoreTime) -> Merged<'a> {
        Merged {
            mine,
            others: HashMap::new(),
            now,
        }
    }

    /// Whether no more marks are taken.
    pub(super) fn is_full(&self) -> bool {
        self.others.len() >= MERGED_MAX
    }

    /// Adds another one's marks. What is none is passed over, and no use is later than now.
    pub(super) fn add(&mut self, marks: &[u8]) {
        let Some(marks) = marks.strip_prefix(&MAGIC) else {
            return;
        };
        let (words, _) = marks.as_chunks::<8>();
        let (pairs, _) = words.as_chunks::<2>();
        for [name, used] in pairs.iter().take(NAMES_MAX) {
            let used = i64::from_le_bytes(*used).min(self.now.micros.saturating_add(GRAIN));
            let known = self.others.entry(u64::from_le_bytes(*name));
            let known = known.or_insert(used);
            *known = used.max(*known);
        }
    }

    /// When a block was used last, which was `written` then.
    pub(super) fn time_of(&self, name: Option<&Identity>, written: i64) -> i64 {
        let Some(name) = name.map(hash_of) else {
            return written;
        };
        let mine = self.mine.of(name);
        let mine = mine.map(|used| self.mine.time(used, self.now));
        let others = self.others.get(&name).copied();
        written
            .max(mine.unwrap_or(written))
            .max(others.unwrap_or(written))
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_arena::{Key, NamespaceId};

    use super::*;

    fn name(number: u64) -> Identity {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&number.to_le_bytes());
        Identity {
            namespace: NamespaceId([1; 16]),
            key: Key(key),
        }
    }

    #[test]
    fn marks_have_what_was_used_by_the_clock_of_the_store_and_heads_are_newer() {
        let (one, other) = (Uses::new(), Uses::new());
        one.note((0..3).map(name));
        let now = StoreTime {
            micros: 1_000_000_000,
            at: clock::now(),
        };
        assert!(one.is_unsaid() && !other.is_unsaid());
        let marks = one.marks(now);
        assert!(!one.is_unsaid());
        let mut merged = Merged::new(&other, now);
        merged.add(&marks);
        let own = Merged::new(&one, now);
        let times = |merged: &Merged<'_>| [0, 1, 2, 3].map(|at| merged.time_of(Some(&name(at)), 7));
        let [first, second, third, unused] = times(&merged);
        assert!(first > second && second > third && third > 7);
        assert_eq!((times(&own), unused), ([first, second, third, 7], 7));
        // Written since, it is as new as that.
        assert_eq!(merged.time_of(Some(&name(0)), first + 5), first + 5);
        // What others say of times to come, or what is no mark, keeps nothing.
        let late = i64::MAX.to_le_bytes();
        merged.add(&[&marks[..16], &late].concat());
        assert!(
            times(&merged)
                .iter()
                .all(|time| *time <= now.micros + GRAIN)
        );
        merged.add(b"anything else");
    }

    #[test]
    fn what_was_used_long_ago_is_forgotten_and_marks_are_bounded() {
        let uses = Uses::new();
        uses.note((0..3 * NAMES_MAX as u64).map(name));
        let now = StoreTime {
            micros: 0,
            at: clock::now(),
        };
        let state = uses.state.lock();
        let known = state.young.len() + state.old.len();
        assert!(known < 3 * NAMES_MAX, "{known}");
        drop(state);
        let marks = uses.marks(now);
        assert!(marks.len() <= MAGIC.len() + 16 * NAMES_MAX);
        // The head, which was used last.
        let merged = Merged::new(&uses, now);
        assert!(merged.time_of(Some(&name(0)), i64::MIN) > i64::MIN);
    }
}
