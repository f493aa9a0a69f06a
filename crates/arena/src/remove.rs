//! Removal: of blocks by key, of all that a namespace has, of what did not verify.

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use crate::body::{Arena, State};
use crate::bury::BATCH;
use crate::held::Guard;
use crate::index::{Entry, Reservations, STEP, Stage};
use crate::key::{Key, NamespaceId};
use crate::place::Token;

impl Arena {
    /// Removes blocks by key. Returns the number of blocks that were stored.
    ///
    /// After the call, no crash can restore any of them. The call releases its locks from time to
    /// time.
    pub fn remove(&self, namespace: NamespaceId, keys: &[Key]) -> usize {
        count(&self.remove_each(namespace, keys))
    }

    /// Removes blocks by key, as [`Arena::remove`] does. Returns true for each key whose block this
    /// call has removed; if a key is repeated, only for its first occurrence.
    ///
    /// However many keys it has, a call visits the removed blocks that are still pinned only once.
    pub fn remove_each(&self, namespace: NamespaceId, keys: &[Key]) -> Vec<bool> {
        let some = keys.chunks(BATCH);
        let removed = some.flat_map(|some| self.remove_some(namespace, some));
        let removed: Vec<bool> = removed.collect();
        // Those that have left the index since they were looked for have been found.
        let lingers = !self.state.lock().lingering.is_empty();
        if lingers {
            let keys: HashSet<&Key> = keys.iter().collect();
            let is_one = |key: &Key| keys.contains(key);
            self.remove_lingering(&mut self.state.lock(), namespace, is_one);
        }
        self.await_forgotten();
        removed
    }

    fn remove_some(&self, namespace: NamespaceId, keys: &[Key]) -> Vec<bool> {
        let (mut found, mut tokens): (Vec<usize>, Vec<Token>) = (Vec::new(), Vec::new());
        {
            let mut state = self.state.lock();
            for (at, key) in keys.iter().enumerate() {
                state.take_turns(at);
                let Some(number) = self.index.number(namespace) else {
                    continue;
                };
                let reserved = state.reserved.get(number, key);
                self.remove_copies(reserved.into_iter());
                if let Some(slot) = self.index.find(number, key) {
                    self.index.set_removed(slot);
                    found.push(at);
                    tokens.push(self.place(slot).token);
                }
            }
        }
        let mut removed = vec![false; keys.len()];
        for (at, gone) in found.into_iter().zip(self.drop_blocks(&tokens, false)) {
            removed[at] = gone;
        }
        removed
    }

    /// Removes every block of a namespace, as [`Arena::remove`] does. Returns the number of removed
    /// blocks.
    pub fn clear(&self, namespace: NamespaceId) -> usize {
        {
            let mut state = self.state.lock();
            for part in 0..Reservations::PARTS {
                let Some(number) = self.index.number(namespace) else {
                    break;
                };
                let reserved = state.reserved.slots(part, number);
                self.remove_copies(reserved.into_iter());
                state.give_way();
            }
            self.remove_lingering(&mut state, namespace, |_| true);
        }
        let (mut blocks, mut at) = (0, Some(0));
        while let Some(from) = at {
            let mut tokens: Vec<Token> = Vec::new();
            // What is put meanwhile comes after the removal, or is removed as well.
            at = self.index.page_of(namespace, from, STEP, |slot, entry| {
                if entry.stage == Stage::Live {
                    tokens.push(Token {
                        device: self.number,
                        slot,
                        sequence: entry.sequence,
                    });
                }
                true
            });
            let mut state = self.state.lock();
            for (at, token) in tokens.iter().enumerate() {
                state.take_turns(at);
                if self.named(*token).is_some() {
                    self.index.set_removed(token.slot);
                }
            }
            drop(state);
            blocks += count(&self.drop_blocks(&tokens, false));
        }
        self.await_forgotten();
        blocks
    }

    /// Sees to it that copies of removed blocks that are being written are not published. (A put
    /// under way comes after the removal.)
    fn remove_copies(&self, reserved: impl Iterator<Item = u32>) {
        for slot in reserved.filter(|slot| self.index.get(*slot).copy) {
            self.index.set_removed(slot);
        }
    }

    /// The same for copies of what is out of the index and still pinned.
    fn remove_lingering(
        &self,
        state: &mut Guard<'_, State>,
        namespace: NamespaceId,
        is_one: impl Fn(&Key) -> bool,
    ) {
        let slots: Vec<u32> = state.lingering.iter().copied().collect();
        for (at, slot) in slots.into_iter().enumerate() {
            state.take_turns(at);
            let entry = self.index.get(slot);
            let is_here = state.lingering.contains(&slot) && is_one(&entry.key);
            if is_here && Some(entry.namespace) == self.index.number(namespace) {
                self.index.set_removed(slot);
            }
        }
    }

    /// Unpublishes blocks, if the tokens still name them. Returns the number of unpublished blocks.
    pub fn drop_these(&self, tokens: &[Token]) -> usize {
        count(&self.drop_blocks(tokens, false))
    }

    /// Unpublishes corrupt blocks, if the tokens still name them. Returns the number of unpublished
    /// blocks.
    ///
    /// The next put of such a block then writes it again.
    pub fn discard(&self, tokens: &[Token]) -> usize {
        let count = self.drop_these(tokens);
        self.counters
            .corrupt_blocks
            .fetch_add(count as u64, Ordering::Relaxed);
        count
    }

    /// Returns true if a token names a published block.
    pub(crate) fn is_live(&self, token: Token) -> bool {
        let is_live = |entry: Entry| entry.stage == Stage::Live;
        self.named(token).is_some_and(is_live)
    }

    /// The slots of those tokens that name published blocks.
    pub(crate) fn live_slots(&self, tokens: &[Token]) -> Vec<u32> {
        let live = tokens.iter().filter(|token| self.is_live(**token));
        let mut slots: Vec<u32> = live.map(|token| token.slot).collect();
        slots.sort_unstable();
        slots.dedup();
        slots
    }
}

/// Returns the number of flags that are true.
fn count(flags: &[bool]) -> usize {
    flags.iter().filter(|flag| **flag).count()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::{Arc, mpsc};
    use std::time::Duration;

    use kvdepot_media::checksum::Checksum;

    use super::*;
    use crate::format::record;
    use crate::index::Uses;
    use crate::medium::Shared;
    use crate::medium::watched::{Watched, Watcher};
    use crate::options::Options;
    use crate::place::Wanted;

    const NAMESPACE: NamespaceId = NamespaceId([1; 16]);
    const KEY: Key = Key([1; 32]);

    /// Calls it with each record that is about to be written, by the first byte.
    struct Records<F>(F);

    impl<F: Fn(u8) + Send + Sync> Watcher for Records<F> {
        fn writes(&self, _: u64, bytes: &[u8]) {
            if bytes.len() == record::LEN {
                (self.0)(bytes[0]);
            }
        }
    }

    fn open(path: &std::path::Path) -> Arc<Arena> {
        let config = Options {
            capacity: Some(1 << 20),
            ..Options::default()
        };
        let wait = Duration::ZERO;
        let opened = Arena::open(("Dax", 0), path, &config, &str::to_owned, wait);
        let (mut arena, _) = opened.unwrap();
        arena.rank(&Uses::default());
        arena.keep();
        Arc::new(arena)
    }

    fn reserve(arena: &Arc<Arena>, copy: bool) -> Token {
        let wanted = Wanted {
            key: KEY,
            len: 5000,
            parts: 1,
            stamp: 0,
            copy,
            evict: true,
        };
        let mut reserved = arena.reserve(NAMESPACE, &[wanted]).unwrap();
        reserved.pop().unwrap().ok().unwrap().hand_out().token
    }

    #[test]
    fn what_is_removed_is_forgotten_also_where_others_are_still_at_it() {
        for copy in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let arena = open(&dir.path().join("arena"));
            let token = reserve(&arena, copy);
            let written = [(token, Checksum([0; 16]))];
            if !copy {
                assert_eq!(arena.commit(&written, false), [true]);
            }
            let (begins, begun) = mpsc::channel();
            let forgotten = Arc::new(AtomicBool::new(false));
            let (of, forgets) = (Arc::downgrade(&arena), Arc::clone(&forgotten));
            let each = move |state: u8| {
                if copy == (state == 1) {
                    begins.send(()).unwrap();
                }
                if state == 1 {
                    // The copy's removal is asked for while its record is written.
                    let arena = of.upgrade().unwrap();
                    while !arena.index.get(token.slot).removed {
                        std::thread::yield_now();
                    }
                    return;
                }
                // Who does not wait is back by then.
                std::thread::sleep(Duration::from_millis(20));
                forgets.store(true, Ordering::SeqCst);
            };
            let medium: Shared = Arc::clone(&arena.medium.load_full());
            let watched: Shared = Arc::new(Watched(medium, Records(each)));
            arena.medium.store(Arc::new(watched));
            std::thread::scope(|scope| {
                let (arena, forgotten) = (&arena, &forgotten);
                let removes = scope.spawn(move || {
                    begun.recv().unwrap();
                    assert_eq!(arena.remove(NAMESPACE, &[KEY]), 0);
                    forgotten.load(Ordering::SeqCst)
                });
                match copy {
                    true => assert_eq!(arena.commit(&written, false), [false]),
                    false => assert_eq!(arena.evict_these(&[token]), 1),
                }
                let was_forgotten = removes.join().unwrap();
                assert!(was_forgotten, "a crash would bring it back (copy: {copy})");
            });
        }
    }
}
