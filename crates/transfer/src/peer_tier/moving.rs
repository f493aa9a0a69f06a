//! Keeps removals and what is being published at another host apart: a removal waits for the blocks
//! that it names, and for nothing else; and what is being removed is not published.

use std::collections::HashSet;

use kvdepot_arena::{Identity, Key, NamespaceId};
use kvdepot_host::Condvar;
use parking_lot::Mutex;

/// Blocks of a share that are being published elsewhere, and removals under way.
#[derive(Default)]
pub(super) struct Moving {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    moving: HashSet<Identity>,
    removals: Vec<(u64, Removal)>,
    next: u64,
}

/// What a removal is about.
pub(super) enum Removal {
    Keys(NamespaceId, HashSet<Key>),
    All(NamespaceId),
}

impl Removal {
    fn is_of(&self, name: &Identity) -> bool {
        match self {
            Removal::Keys(namespace, keys) => {
                *namespace == name.namespace && keys.contains(&name.key)
            }
            Removal::All(namespace) => *namespace == name.namespace,
        }
    }
}

/// Blocks that are being published elsewhere, as long as this lives.
pub(super) struct Going<'a> {
    of: &'a Moving,
    names: Vec<Identity>,
}

impl Drop for Going<'_> {
    fn drop(&mut self) {
        let mut state = self.of.state.lock();
        for name in &self.names {
            state.moving.remove(name);
        }
        self.of.changed.notify_all();
    }
}

impl Moving {
    /// Begins to publish these elsewhere, but for those that are being removed.
    pub(super) fn begin(&self, names: impl Iterator<Item = Identity>) -> Going<'_> {
        let mut state = self.state.lock();
        let is_free = |name: &Identity| !state.removals.iter().any(|(_, one)| one.is_of(name));
        let names: Vec<Identity> = names.filter(is_free).collect();
        state.moving.extend(&names);
        Going { of: self, names }
    }

    /// Removes something, once none of it is being published elsewhere.
    pub(super) fn remove<T>(&self, what: Removal, remove: impl FnOnce() -> T) -> T {
        let number = {
            let mut state = self.state.lock();
            // What begins from here on is without these.
            let number = state.next;
            state.next += 1;
            state.removals.push((number, what));
            while state.is_met(number) {
                self.changed.wait(&mut state);
            }
            number
        };
        let removed = remove();
        let mut state = self.state.lock();
        state.removals.retain(|(other, _)| *other != number);
        removed
    }
}

impl State {
    fn is_met(&self, number: u64) -> bool {
        let what = self.removals.iter().find(|(other, _)| *other == number);
        what.is_some_and(|(_, what)| self.moving.iter().any(|name| what.is_of(name)))
    }
}

impl Going<'_> {
    /// Whether a block is one of them.
    pub(super) fn has(&self, name: &Identity) -> bool {
        self.names.contains(name)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;

    fn name(number: u8) -> Identity {
        Identity {
            namespace: NamespaceId([1; 16]),
            key: Key([number; 32]),
        }
    }

    fn of(number: u8) -> Removal {
        Removal::Keys(NamespaceId([1; 16]), HashSet::from([Key([number; 32])]))
    }

    #[test]
    fn a_removal_waits_for_its_own_blocks_alone_and_keeps_them_from_going() {
        let moving = Moving::default();
        let going = moving.begin([name(1)].into_iter());
        assert!(moving.remove(of(2), || true));
        let is_removed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| moving.remove(of(1), || is_removed.store(true, Ordering::SeqCst)));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!is_removed.load(Ordering::SeqCst));
            assert!(!moving.begin([name(1)].into_iter()).has(&name(1)));
            drop(going);
        });
        assert!(is_removed.into_inner());
        let all = Removal::All(NamespaceId([1; 16]));
        moving.remove(all, || {
            assert!(!moving.begin([name(3)].into_iter()).has(&name(3)))
        });
        assert!(moving.begin([name(3)].into_iter()).has(&name(3)));
    }
}
