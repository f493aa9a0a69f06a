//! What is known of a place that others share without asking it: what this process has written or
//! found there lately, and what it has missed.
//!
//! Others write and remove there too, so nothing is known for long: a block that was found is
//! believed in for some seconds (one that is gone by then is a miss to its reader), one that was
//! missed for a moment, as somebody may write it now.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kvdepot_arena::{Identity, NamespaceId, clock};
use parking_lot::Mutex;

const FOUND: Duration = Duration::from_secs(5);
const MISSED: Duration = Duration::from_millis(250);

/// Most names of a generation, some 100 bytes each.
const NAMES_MAX: usize = 1 << 15;

/// Names that a call reads or notes at a time: others have their turn between them.
const NAMES_TURN: usize = 256;

/// With `V` of each that was found.
pub(super) struct Filter<V>(Mutex<State<V>>);

struct State<V> {
    found: Generations<V>,
    missed: Generations<()>,
    /// Counts what was written and removed.
    turn: u64,
}

impl<V> Default for Filter<V> {
    fn default() -> Filter<V> {
        Filter(Mutex::new(State {
            found: Generations::default(),
            missed: Generations::default(),
            turn: 0,
        }))
    }
}

/// Returns the names of which nothing is known, and a function that makes one answer per name of
/// the answers to these: a name without an answer is a miss.
#[expect(clippy::option_option, reason = "known, and found")]
pub(super) fn unknown<V>(
    names: Vec<Identity>,
    known: Vec<Option<Option<V>>>,
) -> (
    Vec<Identity>,
    impl FnOnce(Vec<Option<bool>>) -> Vec<bool> + Clone + Send + 'static,
) {
    let known: Vec<Option<bool>> = known
        .into_iter()
        .map(|known| known.map(|found| found.is_some()))
        .collect();
    let asked = names.into_iter().zip(&known);
    let asked = asked.filter(|(_, known)| known.is_none());
    let asked = asked.map(|(name, _)| name).collect();
    let all = move |found: Vec<Option<bool>>| {
        let mut looked = found.into_iter().map(|found| found == Some(true));
        let each = known.into_iter();
        each.map(|known| known.or_else(|| looked.next()).unwrap_or(false))
            .collect()
    };
    (asked, all)
}

impl<V: Clone> Filter<V> {
    /// What is known of these: what was found of each, or that nothing was. Who asks the place for
    /// the others says with the answers which question this was.
    #[expect(clippy::option_option, reason = "known, and found")]
    pub(super) fn of(
        &self,
        mut names: impl Iterator<Item = Identity>,
    ) -> (Vec<Option<Option<V>>>, u64) {
        let mut all = Vec::with_capacity(names.size_hint().0);
        let mut first = None;
        loop {
            let some: Vec<Identity> = names.by_ref().take(NAMES_TURN).collect();
            let is_last = some.len() < NAMES_TURN;
            let now = clock::now();
            let mut state = self.0.lock();
            state.found.age(now, FOUND);
            state.missed.age(now, MISSED);
            // What is written between two turns is newer than the whole question.
            let turn = *first.get_or_insert(state.turn);
            let known = |name| {
                if let Some((_, found)) = state.found.get(&name) {
                    return Some(Some(found.clone()));
                }
                state.missed.get(&name).map(|_| None)
            };
            all.extend(some.into_iter().map(known));
            if is_last {
                return (all, turn);
            }
        }
    }

    /// Notes what was written or removed.
    pub(super) fn note(&self, name: Identity, found: Option<V>) {
        let turn = {
            let mut state = self.0.lock();
            state.turn += 1;
            state.turn
        };
        self.note_answers([(name, found)].into_iter(), turn);
    }

    /// Forgets what was found of a name: it is not what is there now.
    #[cfg(feature = "s3")]
    pub(super) fn forget(&self, name: &Identity) {
        self.0.lock().found.remove(name);
    }

    /// Forgets what was found of a namespace, which is cleared: collectors say nothing of what they
    /// remove.
    pub(super) fn clear(&self, namespace: NamespaceId) {
        let mut state = self.0.lock();
        state.turn += 1;
        let Generations { young, old, .. } = &mut state.found;
        for names in [young, old] {
            names.retain(|name, _| name.namespace != namespace);
        }
    }

    /// Notes what a look at the place has shown that began with question `turn`: what was written
    /// since is there all the same, and what was removed since is not.
    pub(super) fn note_answers(
        &self,
        mut names: impl Iterator<Item = (Identity, Option<V>)>,
        turn: u64,
    ) {
        loop {
            let some: Vec<_> = names.by_ref().take(NAMES_TURN).collect();
            if some.is_empty() {
                return;
            }
            let now = clock::now();
            let mut state = self.0.lock();
            state.found.age(now, FOUND);
            state.missed.age(now, MISSED);
            let State { found, missed, .. } = &mut *state;
            for (name, answer) in some {
                match answer {
                    Some(value) => found.learn(missed, name, value, turn),
                    None => missed.learn(found, name, (), turn),
                }
            }
        }
    }
}

/// Names, each known for at most one time and a half.
struct Generations<V> {
    young: Names<V>,
    old: Names<V>,
    begun: Option<Instant>,
}

/// With the turns in which they were noted. Clients choose keys: each table has a random secret, so
/// that nobody chooses collisions.
type Names<V> = HashMap<Identity, (u64, V)>;

impl<V> Default for Generations<V> {
    fn default() -> Generations<V> {
        Generations {
            young: Names::default(),
            old: Names::default(),
            begun: None,
        }
    }
}

impl<V> Generations<V> {
    /// Notes a name, and forgets what the `other` ones say of it, unless they know it better.
    fn learn<W>(&mut self, other: &mut Generations<W>, name: Identity, value: V, turn: u64) {
        if other.turn(&name).is_none_or(|noted| noted <= turn) {
            other.remove(&name);
            let turn = turn.max(self.turn(&name).unwrap_or(0));
            self.young.insert(name, (turn, value));
        }
    }

    fn age(&mut self, now: Instant, time: Duration) {
        let begun = *self.begun.get_or_insert(now);
        let age = now.saturating_duration_since(begun);
        if age >= time {
            self.old.clear();
            self.young.clear();
            self.begun = Some(now);
        } else if age >= time / 2 || self.young.len() >= NAMES_MAX {
            self.old = std::mem::take(&mut self.young);
            self.begun = Some(now);
        }
    }

    fn get(&self, name: &Identity) -> Option<&(u64, V)> {
        self.young.get(name).or_else(|| self.old.get(name))
    }

    fn turn(&self, name: &Identity) -> Option<u64> {
        self.get(name).map(|(turn, _)| *turn)
    }

    fn remove(&mut self, name: &Identity) {
        self.young.remove(name);
        self.old.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_arena::Key;

    use super::*;

    const HERE: Option<()> = Some(());

    fn name(byte: u8) -> Identity {
        Identity {
            namespace: NamespaceId([1; 16]),
            key: Key([byte; 32]),
        }
    }

    /// A client that chooses keys would choose such that collide.
    #[test]
    fn no_two_tables_hash_a_name_alike() {
        let hash = || {
            use std::hash::BuildHasher;
            Names::<()>::default().hasher().hash_one(name(1))
        };
        assert_ne!(hash(), hash());
    }

    #[test]
    fn a_call_lets_others_have_their_turn_between_its_names() {
        let filter = Filter::<()>::default();
        let names = || {
            (0..3 * NAMES_TURN as u64).map(|number| {
                assert!(filter.0.try_lock().is_some(), "it is held for all names");
                let mut key = [0; 32];
                key[..8].copy_from_slice(&number.to_le_bytes());
                let key = Key(key);
                Identity { key, ..name(1) }
            })
        };
        filter.note_answers(names().map(|name| (name, HERE)), 0);
        let (known, _) = filter.of(names());
        assert_eq!(known.len(), 3 * NAMES_TURN);
    }

    #[test]
    fn the_last_look_counts_and_what_was_missed_is_soon_forgotten() {
        // On a busy machine all of it may be forgotten meanwhile: then once more.
        let in_time = |_| {
            let begun = clock::now();
            let filter = Filter::<()>::default();
            filter.note_answers([(name(1), HERE), (name(2), None)].into_iter(), 0);
            let known = || filter.of((1..4).map(name)).0;
            let before = known();
            let (_, asked) = filter.of(std::iter::empty());
            filter.note(name(2), HERE);
            filter.note(name(3), None);
            let answers = [(name(1), None), (name(2), None), (name(3), HERE)];
            filter.note_answers(answers.into_iter(), asked);
            let after = known();
            if begun.elapsed() >= MISSED / 2 {
                return false;
            }
            assert_eq!(before, [Some(HERE), Some(None), None]);
            assert_eq!(
                after,
                [Some(None), Some(HERE), Some(None)],
                "one was written since, and one removed"
            );
            // Answers that are later still, of looks that began before.
            let (_, now) = filter.of(std::iter::empty());
            filter.note(name(2), HERE);
            filter.note_answers([(name(2), HERE)].into_iter(), now - 1);
            filter.note_answers([(name(2), None)].into_iter(), now);
            assert_eq!(known()[1], Some(HERE), "it was written after both");
            std::thread::sleep(MISSED);
            assert_eq!(known()[0], None);
            true
        };
        assert!((0..100).any(in_time));
    }
}
