//! Commit and abort: how a reserved block comes to be, or not.

use std::sync::atomic::Ordering;

use kvdepot_media::checksum::Checksum;

use crate::body::{Arena, State};
use crate::bury::Dying;
use crate::format::record::{Packed, Record, State as RecordState};
use crate::held::{self, Guard, turn_len};
use crate::index::{Entry, Stage};
use crate::key::NamespaceId;
use crate::place::Token;

impl Arena {
    /// Publishes reserved blocks whose bytes are in place.
    ///
    /// Returns true for each published block. It is false for a token that was not a reservation,
    /// for a copy of a block that was removed in the meantime, and for a block that the medium
    /// failed to store. On return, published blocks are as durable as the arena's durability
    /// requires.
    ///
    /// With `pinned`, each block starts with a pin, for the thread that writes it back to the next
    /// tier.
    pub fn commit(&self, blocks: &[(Token, Checksum)], pinned: bool) -> Vec<bool> {
        let mut state = self.state.lock();
        let claimed = self.claim_in(&mut state, blocks.iter().map(|(token, _)| *token));
        self.publish_claimed(state, blocks, claimed, pinned)
    }

    /// Claims reservations for [`Arena::commit_claimed`], so that no other call can end them.
    ///
    /// Returns true for each token that was a reservation.
    pub fn claim(&self, tokens: &[Token]) -> Vec<bool> {
        self.claim_in(&mut self.state.lock(), tokens.iter().copied())
    }

    /// Turns claimed reservations back into ordinary ones.
    pub fn unclaim(&self, tokens: &[Token]) {
        let mut state = self.state.lock();
        for (at, token) in tokens.iter().enumerate() {
            state.take_turns(at);
            let entry = self.named(*token);
            if entry.is_some_and(|entry| entry.stage == Stage::Committing) {
                self.index.set_stage(token.slot, Stage::Reserved);
            }
        }
    }

    /// Publishes blocks as [`Arena::commit`] does, for tokens that the caller has claimed.
    pub fn commit_claimed(&self, blocks: &[(Token, Checksum)], pinned: bool) -> Vec<bool> {
        let claimed = vec![true; blocks.len()];
        self.publish_claimed(self.state.lock(), blocks, claimed, pinned)
    }

    /// Records, and only then visible. For a power cut: payload, fence, record, fence. The lock is
    /// not held while the medium works: what is committing is the caller's alone.
    fn publish_claimed<'a>(
        &'a self,
        mut state: Guard<'a, State>,
        blocks: &[(Token, Checksum)],
        mut claimed: Vec<bool>,
        pinned: bool,
    ) -> Vec<bool> {
        if self.is_durable() {
            let durable = self.sync_payloads(&mut state, blocks, &claimed);
            self.withdraw(&mut state, blocks, &mut claimed, &durable);
        }
        // From the first look at what is removed on: who removes it later waits for the rest.
        let commit = state.commits.begin();
        let mut written: Vec<(usize, Entry, u32)> = Vec::with_capacity(blocks.len());
        for (index, (token, checksum)) in blocks.iter().enumerate() {
            state.take_turns(index);
            if !claimed[index] {
                continue;
            }
            let mut entry = self.index.get(token.slot);
            if entry.removed {
                claimed[index] = false;
                self.give_up(&mut state, token.slot);
                continue;
            }
            entry.checksum = *checksum;
            let created = state.reserved.created(entry.namespace, &entry.key);
            written.push((index, entry, created));
        }
        if self.table.is_some() {
            let record = |(_, entry, created): &(usize, Entry, u32)| {
                let record = self.record(entry, RecordState::Live, *created);
                (entry.record, record)
            };
            let kept = state.unlocked(|| {
                let records: Vec<(u32, Record)> = written.iter().map(record).collect();
                self.write_records(&records)
            });
            if kept.contains(&false) {
                let mut durable = vec![true; blocks.len()];
                let each = written.iter().zip(kept);
                each.for_each(|((index, ..), kept)| durable[*index] = kept);
                self.withdraw(&mut state, blocks, &mut claimed, &durable);
            }
        }
        self.show(&mut state, blocks, &mut claimed, pinned);
        state.commits.end(commit);
        self.burial.notify_all();
        claimed
    }

    /// Publishes claimed blocks whose records are written, but for those whose removal was asked
    /// for meanwhile: nobody finds these, not for a moment.
    fn show(
        &self,
        state: &mut Guard<'_, State>,
        blocks: &[(Token, Checksum)],
        claimed: &mut [bool],
        pinned: bool,
    ) {
        let mut dying = Dying::default();
        let each = blocks.iter().zip(claimed).filter(|(_, claimed)| **claimed);
        for (at, ((token, checksum), claimed)) in each.enumerate() {
            if at > 0 && at.is_multiple_of(turn_len()) {
                self.bury(state, std::mem::take(&mut dying));
                state.give_way();
            }
            *claimed = self.publish(state, token.slot, *checksum, pinned);
            if !*claimed {
                self.pass_over(state, token.slot, &mut dying);
            }
        }
        self.bury(state, dying);
    }

    /// Makes the bytes of claimed blocks durable; for each block, whether they are.
    fn sync_payloads(
        &self,
        state: &mut Guard<'_, State>,
        blocks: &[(Token, Checksum)],
        claimed: &[bool],
    ) -> Vec<bool> {
        let chosen = (0..blocks.len()).filter(|index| claimed[*index]);
        // They are the caller's alone, and stay as they are without the lock.
        state.unlocked(|| {
            let extents = |index: usize| {
                let packed: Packed = self.index.get(blocks[index].0.slot).extents;
                (index, packed)
            };
            let packed: Vec<(usize, Packed)> = chosen.map(extents).collect();
            let ranges = packed
                .iter()
                .flat_map(|(index, packed)| packed.iter().map(move |range| (*index, range)));
            let (owners, ranges): (Vec<usize>, Vec<(u64, u64)>) = ranges.unzip();
            let synced = self.sync_each(&ranges);
            let mut durable = vec![true; blocks.len()];
            for (index, synced) in owners.into_iter().zip(synced) {
                durable[index] &= synced;
            }
            durable
        })
    }

    /// Gives claimed blocks up that the medium could not take. Their extents are not used again
    /// before the next opening: nobody knows what became of them.
    fn withdraw(
        &self,
        state: &mut Guard<'_, State>,
        blocks: &[(Token, Checksum)],
        claimed: &mut [bool],
        durable: &[bool],
    ) {
        let mut dead = Vec::new();
        for (((token, _), claimed), durable) in blocks.iter().zip(claimed).zip(durable) {
            if *claimed && !durable {
                *claimed = false;
                dead.push(self.reserved_record(state, token.slot, RecordState::Dead));
                let entry = self.index.get(token.slot);
                state
                    .reserved
                    .remove(entry.namespace, &entry.key, token.slot);
                self.index.set_stage(token.slot, Stage::Dying);
            }
        }
        if !dead.is_empty() {
            // A burial like any other, but for the room: the device does not go meanwhile.
            let burial = state.burials.begin();
            state.unlocked(|| self.write_records(&dead));
            self.end_burial(state, burial);
        }
    }

    /// Lets a block be found; false where its removal was asked for meanwhile.
    fn publish(&self, state: &mut State, slot: u32, checksum: Checksum, pinned: bool) -> bool {
        let Some(entry) = self.index.publish(slot, checksum, pinned) else {
            return false;
        };
        state.reserved.remove(entry.namespace, &entry.key, slot);
        state.live_bytes += entry.len;
        state.roll.came(entry.namespace, entry.len);
        let room = entry.extents.room();
        let capacity = self.layout().data_len();
        state.turnover.note(room, entry.stamp, capacity);
        let stamp = self.join_published(state, slot, &entry);
        state.order.entered(&self.index, slot, stamp);
        self.counters.stored_blocks.fetch_add(1, Ordering::Relaxed);
        self.counters
            .stored_bytes
            .fetch_add(entry.len, Ordering::Relaxed);
        true
    }

    /// Releases reservations. Returns true for each token that was still a reservation.
    ///
    /// Writers of these blocks must have stopped before.
    pub fn abort(&self, tokens: &[Token]) -> Vec<bool> {
        let mut state = self.state.lock();
        let each = tokens.iter().enumerate();
        let each = each.map(|(at, token)| {
            state.take_turns(at);
            let ends = self.is_reserved(*token);
            if ends {
                self.give_up(&mut state, token.slot);
            }
            ends
        });
        each.collect()
    }

    /// Frees a reservation. Nothing of it is on the medium: the slot still holds an empty or a
    /// dead record.
    pub(crate) fn give_up(&self, state: &mut State, slot: u32) {
        let entry = self.index.get(slot);
        state.reserved.remove(entry.namespace, &entry.key, slot);
        self.release(state, slot);
    }

    /// The number and the record of a block that is reserved.
    fn reserved_record(&self, state: &State, slot: u32, stage: RecordState) -> (u32, Record) {
        let entry = self.index.get(slot);
        let created = state.reserved.created(entry.namespace, &entry.key);
        (entry.record, self.record(&entry, stage, created))
    }

    fn is_reserved(&self, token: Token) -> bool {
        self.named(token)
            .is_some_and(|entry| entry.stage == Stage::Reserved)
    }

    fn claim_in(
        &self,
        state: &mut Guard<'_, State>,
        tokens: impl Iterator<Item = Token>,
    ) -> Vec<bool> {
        let take = |(at, token): (usize, Token)| {
            state.take_turns(at);
            token.device == self.number && self.index.claim(token.slot, token.sequence)
        };
        tokens.enumerate().map(take).collect()
    }

    /// The number of a namespace, for as long as the lock is held, or a slot bears it.
    pub(crate) fn intern(&self, state: &State, namespace: NamespaceId) -> u32 {
        self.index.intern(namespace, |number| state.bears(number))
    }

    /// Stores the description of a namespace in the arena's directory, if it has space.
    pub fn describe(&self, namespace: NamespaceId, description: &str) {
        use crate::format::{directory, layout};
        let Some(table) = &self.table else { return };
        let index = {
            let mut state = self.state.lock();
            if state.described.contains(&namespace) {
                return;
            }
            // The entry is this call's alone.
            let Some(index) = state.undescribed.pop() else {
                return;
            };
            state.described.insert(namespace);
            index as usize
        };
        held::may_wait();
        // A closed arena may have another owner.
        let _describing = table.describing.lock();
        if table.lock.lock().is_none() {
            return;
        }
        let at = layout::DIRECTORY + (index * directory::LEN) as u64;
        let entry = directory::encode(namespace, description);
        if let Err(error) = self.medium.load().write_at(at, &entry) {
            tracing::warn!(tier = self.name, %error,
                "cannot store the description of a namespace; kvdepot ls lists the namespace \
                 without it");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::index::Uses;
    use crate::key::Key;
    use crate::options::Options;
    use crate::place::Wanted;

    #[test]
    fn a_copy_that_is_removed_while_its_record_is_written_is_never_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("arena");
        let config = Options {
            capacity: Some(1 << 20),
            ..Options::default()
        };
        let open = || {
            let wait = Duration::ZERO;
            let opened = Arena::open(("Dax", 0), &path, &config, &str::to_owned, wait);
            let (mut arena, _) = opened.unwrap();
            arena.rank(&Uses::default());
            arena.keep();
            Arc::new(arena)
        };
        let arena = open();
        let empty = arena.stats().free_bytes;
        let wanted = Wanted {
            key: Key([1; 32]),
            len: 5000,
            parts: 1,
            stamp: 0,
            copy: true,
            evict: true,
        };
        let namespace = NamespaceId([1; 16]);
        let mut reserved = arena.reserve(namespace, &[wanted]).unwrap();
        let token = reserved.pop().unwrap().ok().unwrap().hand_out().token;
        let mut claimed = arena.claim(&[token]);
        let mut state = arena.state.lock();
        let record = arena.reserved_record(&state, token.slot, RecordState::Live);
        assert_eq!(state.unlocked(|| arena.write_records(&[record])), [true]);
        assert_eq!(state.unlocked(|| arena.remove(namespace, &[wanted.key])), 0);
        arena.show(
            &mut state,
            &[(token, Checksum([0; 16]))],
            &mut claimed,
            false,
        );
        drop(state);
        let stats = arena.stats();
        assert_eq!(claimed, [false]);
        assert_eq!((stats.stored_blocks, stats.reserved_blocks), (0, 0));
        assert_eq!((stats.live_bytes, stats.free_bytes), (0, empty));
        drop(arena);
        assert_eq!(open().stats().blocks, 0);
    }

    #[test]
    fn a_copy_of_a_block_that_is_removed_meanwhile_is_never_published() {
        let arena = Arc::new(Arena::volatile("Cache", 0, 1 << 20).unwrap());
        let namespace = NamespaceId([1; 16]);
        let keys = [Key([1; 32]), Key([2; 32])];
        for clear in [false, true] {
            let wanted = |copy: bool| Wanted {
                key: keys[usize::from(copy)],
                len: 5000,
                parts: 1,
                stamp: 0,
                copy,
                evict: true,
            };
            let reserved = arena
                .reserve(namespace, &[wanted(false), wanted(true)])
                .unwrap();
            let tokens: Vec<Token> = reserved
                .iter()
                .map(|place| place.as_ref().ok().unwrap().token)
                .collect();
            let removed = if clear {
                arena.clear(namespace)
            } else {
                arena.remove(namespace, &keys)
            };
            assert_eq!(removed, 0);
            let written = tokens.iter().map(|token| (*token, Checksum([0; 16])));
            let written: Vec<_> = written.collect();
            assert_eq!(
                arena.commit(&written, false),
                [true, false],
                "a put is its own"
            );
            let mut found = [false; 2];
            arena.contains(namespace, &keys, &mut found);
            assert_eq!(found, [true, false]);
            assert_eq!(arena.remove(namespace, &keys), 1);
            let stats = arena.stats();
            assert_eq!((stats.reserved_blocks, stats.free_bytes), (0, 1 << 20));
        }
    }
}
