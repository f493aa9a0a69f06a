//! Lookups and pins. None of them waits for `state`, but for who ends the last pin of a block that
//! is gone.

use crate::body::Arena;
use crate::group::ordinary;
use crate::index::Stage;
use crate::key::{Key, NamespaceId};
use crate::place::{Place, Token};

impl Arena {
    /// Sets `found[i]` to true if the block of `keys[i]` is published. Other entries stay
    /// unchanged.
    pub fn contains(&self, namespace: NamespaceId, keys: &[Key], found: &mut [bool]) {
        self.index.look_up(namespace, keys, |position, block| {
            found[position] |= block.is_some();
            true
        });
    }

    /// Returns the published block of a key that is put again, which counts as a use.
    pub fn find_again(&self, namespace: NamespaceId, key: &Key, stamp: u64) -> Option<Place> {
        let mut place = None;
        self.index.look_up(namespace, [key], |_, block| {
            place = block.map(|block| {
                block.touch(stamp);
                self.place_of(block.slot, &block.entry(), namespace)
            });
            true
        });
        place
    }

    /// Stamps the published blocks that were used in another tier.
    ///
    /// Without this, a block that is always read from an upper tier would become old in this one.
    pub fn touch<'a>(
        &self,
        namespace: NamespaceId,
        used: impl Iterator<Item = (&'a Key, u64)> + Clone,
    ) {
        let mut stamps = used.clone().map(|(_, stamp)| stamp);
        let keys = used.map(|(key, _)| key);
        self.index.look_up(namespace, keys, |_, block| {
            if let (Some(stamp), Some(block)) = (stamps.next(), block) {
                block.touch(stamp);
            }
            true
        });
    }

    /// Returns the stamp of the last use of a block that is published or being written.
    pub fn stamp_of(&self, namespace: NamespaceId, key: &Key) -> Option<u64> {
        let mut stamp = None;
        self.index.look_up(namespace, [key], |_, block| {
            stamp = block.map(|block| block.entry().stamp);
            true
        });
        let being_written = || {
            let state = self.state.lock();
            let slot = state.reserved.get(self.index.number(namespace)?, key)?;
            Some(self.index.get(slot).stamp)
        };
        stamp.or_else(being_written).map(ordinary)
    }

    /// Stamps the block that `token` names, if it still exists.
    pub fn touch_token(&self, token: Token, stamp: u64) {
        if token.device == self.number {
            self.index.touch(token.slot, token.sequence, stamp);
        }
    }

    /// Returns the present stamp of a block that the caller has pinned, and true if it was removed
    /// by its key since then.
    pub fn since(&self, token: Token) -> (u64, bool) {
        let entry = self.named(token);
        entry.map_or((0, false), |entry| (ordinary(entry.stamp), entry.removed))
    }

    /// Returns the number of leading keys whose blocks are all published.
    pub fn prefix(&self, namespace: NamespaceId, keys: &[Key]) -> usize {
        let mut count = 0;
        self.index.look_up(namespace, keys, |_, block| {
            count += usize::from(block.is_some());
            block.is_some()
        });
        count
    }

    /// Pins the blocks of the keys that are not `found` yet, and stamps them as used.
    ///
    /// A pinned block is not evicted, and its extents are not reused. `stamp(i)` returns the stamp
    /// for `keys[i]`. `each(i, place)` is called for each pinned block.
    pub fn pin(
        &self,
        namespace: NamespaceId,
        keys: &[Key],
        found: &mut [bool],
        stamp: impl Fn(usize) -> u64,
        mut each: impl FnMut(usize, Place),
    ) {
        let absent: Vec<usize> = (0..keys.len()).filter(|index| !found[*index]).collect();
        let wanted = absent.iter().map(|index| &keys[*index]);
        self.index.look_up(namespace, wanted, |position, block| {
            if let Some(block) = block
                && block.pin()
            {
                let index = absent[position];
                block.touch(stamp(index));
                found[index] = true;
                each(index, self.place_of(block.slot, &block.entry(), namespace));
            }
            true
        });
    }

    /// Pins the block that `token` names. Returns its location, or `None` if it no longer exists.
    pub fn pin_token(&self, token: Token) -> Option<Place> {
        let of_here = (token.device == self.number).then_some(token)?;
        let entry = self.index.pin_slot(of_here.slot, of_here.sequence)?;
        // Its namespace has its number as long as the block is there.
        Some(self.place_of(token.slot, &entry, self.index.id(entry.namespace)))
    }

    /// Returns true if a thread is changing the index now.
    pub fn is_busy(&self) -> bool {
        self.index.is_busy()
    }

    /// Releases pins.
    pub fn unpin(&self, tokens: impl Iterator<Item = Token>) {
        let doomed = self.unpin_all(tokens);
        if !doomed.is_empty() {
            let mut state = self.state.lock();
            for (at, slot) in doomed.into_iter().enumerate() {
                state.take_turns(at);
                // Unless all was let go meanwhile.
                if self.index.get(slot).stage == Stage::Doomed {
                    self.release(&mut state, slot);
                    self.index.freed_doomed();
                }
            }
        }
    }

    /// Ends pins, and answers the slots of blocks that were doomed and are the caller's to free.
    fn unpin_all(&self, tokens: impl Iterator<Item = Token>) -> Vec<u32> {
        let mut doomed = Vec::new();
        for token in tokens {
            let here = token.device == self.number;
            match here
                .then(|| self.index.unpin(token.slot, token.sequence))
                .flatten()
            {
                None if self.last.get().is_some() => {}
                None => tracing::error!(
                    tier = self.name,
                    ?token,
                    "internal error: pin released twice; the second release is ignored"
                ),
                // Whoever buries a block that is dying frees it.
                Some(is_last_of_doomed) => {
                    if is_last_of_doomed {
                        doomed.push(token.slot);
                    }
                }
            }
        }
        doomed
    }
}
