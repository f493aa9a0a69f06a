//! Lookups and pins. None of them waits for `state`, but for who ends the last pin of a block that
//! is gone.

use crate::body::Arena;
use crate::group::ordinary;
use crate::index::Stage;
use crate::key::{Key, NamespaceId};
use crate::place::{Place, Token};

impl Arena {
    /// Sets `found[i]` where the block of `keys[i]` is published, and leaves it elsewhere.
    pub fn contains(&self, namespace: NamespaceId, keys: &[Key], found: &mut [bool]) {
        self.index.look_up(namespace, keys, |position, block| {
            found[position] |= block.is_some();
            true
        });
    }

    /// The published block of a key that is put again: a use.
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

    /// Stamps blocks that were used in another tier, where they are published here too: one that
    /// is always served from near must not grow old behind it.
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

    /// Stamp of the last use of a block, published or being written.
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

    /// Stamps the block that a token names, if it is still there.
    pub fn touch_token(&self, token: Token, stamp: u64) {
        if token.device == self.number {
            self.index.touch(token.slot, token.sequence, stamp);
        }
    }

    /// What became of a block that the caller has pinned: its stamp, and whether it was removed
    /// by its key since then.
    pub fn since(&self, token: Token) -> (u64, bool) {
        let entry = self.named(token);
        entry.map_or((0, false), |entry| (ordinary(entry.stamp), entry.removed))
    }

    /// How many of the first keys are published, without a gap.
    pub fn prefix(&self, namespace: NamespaceId, keys: &[Key]) -> usize {
        let mut count = 0;
        self.index.look_up(namespace, keys, |_, block| {
            count += usize::from(block.is_some());
            block.is_some()
        });
        count
    }

    /// Pins the blocks of the keys that are not `found` yet, and stamps them as used. A pinned
    /// block is neither evicted nor are its extents reused.
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

    /// Pins a block that is known by its token.
    pub fn pin_token(&self, token: Token) -> Option<Place> {
        let of_here = (token.device == self.number).then_some(token)?;
        let entry = self.index.pin_slot(of_here.slot, of_here.sequence)?;
        // Its namespace has its number as long as the block is there.
        Some(self.place_of(token.slot, &entry, self.index.id(entry.namespace)))
    }

    /// Whether somebody changes the index now.
    pub fn is_busy(&self) -> bool {
        self.index.is_busy()
    }

    /// Ends pins.
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
                None => tracing::error!(tier = self.name, ?token, "a pin was ended twice"),
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
