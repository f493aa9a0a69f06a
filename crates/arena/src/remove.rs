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
    /// Removes blocks by key, some at a time; how many were there.
    pub fn remove(&self, namespace: NamespaceId, keys: &[Key]) -> usize {
        let some = keys.chunks(BATCH);
        let count = some.map(|some| self.remove_some(namespace, some)).sum();
        // Those that have left the index since they were looked for have been found.
        let lingers = !self.state.lock().lingering.is_empty();
        if lingers {
            let keys: HashSet<&Key> = keys.iter().collect();
            let is_one = |key: &Key| keys.contains(key);
            self.remove_lingering(&mut self.state.lock(), namespace, is_one);
        }
        count
    }

    fn remove_some(&self, namespace: NamespaceId, keys: &[Key]) -> usize {
        let mut tokens: Vec<Token> = Vec::new();
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
                    tokens.push(self.place(slot).token);
                }
            }
        }
        self.drop_blocks(&tokens, false)
    }

    /// Removes every block of a namespace, some at a time; how many there were.
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
        let (mut count, mut at) = (0, Some(0));
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
            count += self.drop_blocks(&tokens, false);
        }
        count
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

    /// Unpublishes blocks that did not verify, if they are still what the tokens name, so that
    /// the next put writes them again instead of being told that they are there.
    pub fn discard(&self, tokens: &[Token]) -> usize {
        let count = self.drop_blocks(tokens, false);
        self.counters
            .corrupt_blocks
            .fetch_add(count as u64, Ordering::Relaxed);
        count
    }

    /// The slots of those tokens that name published blocks.
    pub(crate) fn live_slots(&self, tokens: &[Token]) -> Vec<u32> {
        let is_live = |entry: Entry| entry.stage == Stage::Live;
        let live = |token: &&Token| self.named(**token).is_some_and(is_live);
        let mut slots: Vec<u32> = tokens.iter().filter(live).map(|token| token.slot).collect();
        slots.sort_unstable();
        slots.dedup();
        slots
    }
}
