//! Commit and abort: how a reserved block comes to be, or not.

use std::sync::atomic::Ordering;

use kvdepot_media::checksum::Checksum;

use super::bury::Dying;
use super::{Arena, State, Token};
use crate::NamespaceId;
use crate::format::record::{Packed, Record, State as RecordState};
use crate::held::{self, Guard};
use crate::index::Stage;

/// Bits of a sequence that count within one generation.
pub(super) const COUNTER_BITS: u32 = 40;

impl Arena {
    /// Publishes reserved blocks whose bytes are in place; true where the token was a
    /// reservation, but for copies of blocks that were removed meanwhile. On return the blocks are
    /// durable as far as the arena's durability says. With `pinned` each is born with a pin, for
    /// the mover that takes it to the next tier.
    pub(crate) fn commit(&self, blocks: &[(Token, Checksum)], pinned: bool) -> Vec<bool> {
        let mut state = self.state.lock();
        let claimed = state.claim(blocks.iter().map(|(token, _)| *token));
        self.publish_claimed(state, blocks, claimed, pinned)
    }

    /// Takes reservations for [`Arena::commit_claimed`], so that nobody can end them meanwhile;
    /// true where the token was a reservation.
    pub(crate) fn claim(&self, tokens: &[Token]) -> Vec<bool> {
        self.state.lock().claim(tokens.iter().copied())
    }

    /// Makes claimed reservations plain ones again.
    pub(crate) fn unclaim(&self, tokens: &[Token]) {
        let mut state = self.state.lock();
        for token in tokens {
            let entry = state.check(*token);
            if entry.is_some_and(|entry| entry.stage == Stage::Committing) {
                state.entries.get_mut(token.slot).stage = Stage::Reserved;
            }
        }
    }

    /// As [`Arena::commit`], for tokens that the caller has claimed.
    pub(crate) fn commit_claimed(&self, blocks: &[(Token, Checksum)], pinned: bool) -> Vec<bool> {
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
        let is_removed = |state: &State, slot| state.entries.get(slot).removed;
        for ((token, _), claimed) in blocks.iter().zip(&mut claimed) {
            if *claimed && is_removed(&state, token.slot) {
                *claimed = false;
                self.give_up(&mut state, token.slot);
            }
        }
        let mut at = Vec::with_capacity(blocks.len());
        let mut records: Vec<(u32, Record)> = Vec::with_capacity(blocks.len());
        for (index, (token, checksum)) in blocks.iter().enumerate() {
            if claimed[index] {
                state.entries.get_mut(token.slot).checksum = *checksum;
                at.push(index);
                records.push((token.slot, state.record(token.slot, RecordState::Live)));
            }
        }
        if self.table.is_some() {
            let kept = state.unlocked(|| self.write_records(&records));
            let mut durable = vec![true; blocks.len()];
            at.iter()
                .zip(kept)
                .for_each(|(index, kept)| durable[*index] = kept);
            self.withdraw(&mut state, blocks, &mut claimed, &durable);
        }
        let mut removed = Vec::new();
        for ((token, _), _) in blocks.iter().zip(&claimed).filter(|(_, claimed)| **claimed) {
            self.publish(&mut state, token.slot, pinned);
            // While its record was being written.
            if is_removed(&state, token.slot) {
                removed.push(token.slot);
            }
        }
        let mut dying = Dying::default();
        for slot in removed {
            self.unpublish(&mut state, slot, &mut dying);
        }
        self.bury(&mut state, dying);
        claimed
    }

    /// Makes the bytes of claimed blocks durable; for each block, whether they are.
    fn sync_payloads(
        &self,
        state: &mut Guard<'_, State>,
        blocks: &[(Token, Checksum)],
        claimed: &[bool],
    ) -> Vec<bool> {
        let chosen = (0..blocks.len()).filter(|index| claimed[*index]);
        let extents = |index: usize| {
            let packed: Packed = state.entries.get(blocks[index].0.slot).extents;
            (index, packed)
        };
        let packed: Vec<(usize, Packed)> = chosen.map(extents).collect();
        let ranges = packed
            .iter()
            .flat_map(|(index, packed)| packed.iter().map(move |range| (*index, range)));
        let (owners, ranges): (Vec<usize>, Vec<(u64, u64)>) = ranges.unzip();
        let synced = state.unlocked(|| self.sync_each(&ranges));
        let mut durable = vec![true; blocks.len()];
        for (index, synced) in owners.into_iter().zip(synced) {
            durable[index] &= synced;
        }
        durable
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
                let entry = *state.entries.get(token.slot);
                state
                    .reserved
                    .remove(entry.namespace, &entry.key, token.slot);
                state.entries.get_mut(token.slot).stage = Stage::Dying;
                dead.push((token.slot, state.record(token.slot, RecordState::Dead)));
            }
        }
        if !dead.is_empty() {
            // A burial like any other, but for the room: the device does not go meanwhile.
            state.burials += 1;
            state.unlocked(|| self.write_records(&dead));
            state.burials -= 1;
            state.buried += 1;
            self.burial.notify_all();
        }
    }

    fn publish(&self, state: &mut State, slot: u32, pinned: bool) {
        let entry = *state.entries.get(slot);
        state.reserved.remove(entry.namespace, &entry.key, slot);
        state.entries.get_mut(slot).stage = Stage::Live;
        state.live.insert(entry.namespace, &entry.key, slot);
        state.live_bytes += entry.len;
        state.roll.came(entry.namespace, entry.len);
        state.entries.link(slot);
        if pinned {
            state.add_pin(slot);
        }
        self.counters.stored_blocks.fetch_add(1, Ordering::Relaxed);
        self.counters
            .stored_bytes
            .fetch_add(entry.len, Ordering::Relaxed);
    }

    /// Gives reservations back; how many bytes of payload they were for. Whoever wrote into them
    /// must have stopped.
    pub(crate) fn abort(&self, tokens: &[Token]) -> u64 {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let mut freed = 0;
        for token in tokens {
            if !state.is_reserved(*token) {
                continue;
            }
            freed += state.entries.get(token.slot).len;
            self.give_up(state, token.slot);
        }
        freed
    }

    /// Frees a reservation. Nothing of it is on the medium: the slot still holds an empty or a
    /// dead record.
    pub(super) fn give_up(&self, state: &mut State, slot: u32) {
        let entry = *state.entries.get(slot);
        state.reserved.remove(entry.namespace, &entry.key, slot);
        self.release(state, slot);
    }

    /// Keeps every block of a namespace in one piece, for engines whose own copy engine moves
    /// it.
    pub(crate) fn keep_contiguous(&self, namespace: NamespaceId) {
        let mut state = self.state.lock();
        let number = state.intern(namespace);
        state.contiguous.insert(number);
    }

    /// Lets blocks of a namespace be scattered again, where it has none. False where it has.
    pub(crate) fn forget_contiguous(&self, namespace: NamespaceId) -> bool {
        let mut state = self.state.lock();
        let Some(number) = state.namespaces.number(namespace) else {
            return true;
        };
        let is_idle = !state.entries.bears(number);
        if is_idle {
            state.contiguous.remove(&number);
        }
        is_idle
    }

    /// Notes what a namespace means in the arena's directory, if it has room.
    pub(crate) fn describe(&self, namespace: NamespaceId, description: &str) {
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
        // A closed arena may have another owner.
        let lock = table.lock.lock();
        if lock.is_none() {
            return;
        }
        held::may_wait();
        let at = layout::DIRECTORY + (index * directory::LEN) as u64;
        if let Err(error) = self
            .mapping
            .load()
            .write_from(at, &directory::encode(namespace, description))
        {
            tracing::warn!(tier = self.name, %error, "a namespace could not be described");
        }
    }
}

impl State {
    /// The number of a namespace, for as long as the lock is held, or a slot bears it.
    pub(super) fn intern(&mut self, namespace: NamespaceId) -> u32 {
        let (entries, contiguous) = (&self.entries, &self.contiguous);
        let is_used = |number| entries.bears(number) || contiguous.contains(&number);
        self.namespaces.intern(namespace, is_used)
    }

    fn is_reserved(&self, token: Token) -> bool {
        self.check(token)
            .is_some_and(|entry| entry.stage == Stage::Reserved)
    }

    fn claim(&mut self, tokens: impl Iterator<Item = Token>) -> Vec<bool> {
        let mut take = |token: Token| {
            let reserved = self.is_reserved(token);
            if reserved {
                self.entries.get_mut(token.slot).stage = Stage::Committing;
            }
            reserved
        };
        tokens.map(&mut take).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::Key;
    use crate::arena::Wanted;

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
