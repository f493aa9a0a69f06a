//! Lookups and pins.

use super::{Arena, Place, State, Token};
use crate::index::Stage;
use crate::{Key, NamespaceId};

impl Arena {
    /// Sets `found[i]` where the block of `keys[i]` is published, and leaves it elsewhere.
    pub(crate) fn contains(&self, namespace: NamespaceId, keys: &[Key], found: &mut [bool]) {
        let Some(state) = self.state.look() else {
            return;
        };
        let Some(number) = state.namespaces.number(namespace) else {
            return;
        };
        for (key, found) in keys.iter().zip(found) {
            *found |= state.live.get(number, key).is_some();
        }
    }

    /// The published block of a key that is put again: a use.
    pub(crate) fn find_again(
        &self,
        namespace: NamespaceId,
        key: &Key,
        stamp: u64,
    ) -> Option<Place> {
        let mut state = self.state.lock();
        let slot = state.find(namespace, key)?;
        state.entries.touch(slot, stamp);
        Some(state.place(slot))
    }

    /// Stamps blocks that were used in another tier, where they are published here too: one that
    /// is always served from near must not grow old behind it.
    pub(crate) fn touch<'a>(
        &self,
        namespace: NamespaceId,
        used: impl Iterator<Item = (&'a Key, u64)>,
    ) {
        let mut state = self.state.lock();
        let Some(number) = state.namespaces.number(namespace) else {
            return;
        };
        for (key, stamp) in used {
            if let Some(slot) = state.live.get(number, key) {
                state.entries.touch(slot, stamp);
            }
        }
    }

    /// Stamps the block that a token names, if it is still there.
    pub(crate) fn touch_token(&self, token: Token, stamp: u64) {
        let mut state = self.state.lock();
        if state.check(token).is_some() {
            state.entries.touch(token.slot, stamp);
        }
    }

    /// What became of a block that the caller has pinned: its stamp, and whether it was removed
    /// by its key since then.
    pub(crate) fn since(&self, token: Token) -> (u64, bool) {
        let state = self.state.lock();
        let entry = state.check(token);
        entry.map_or((0, false), |entry| (entry.stamp, entry.removed))
    }

    /// How many of the first keys are published, without a gap.
    pub(crate) fn prefix(&self, namespace: NamespaceId, keys: &[Key]) -> usize {
        let Some(state) = self.state.look() else {
            return 0;
        };
        let Some(number) = state.namespaces.number(namespace) else {
            return 0;
        };
        keys.iter()
            .take_while(|key| state.live.get(number, key).is_some())
            .count()
    }

    /// Pins the blocks of the keys that are not `found` yet, in one critical section, and stamps
    /// them as used. A pinned block is neither evicted nor are its extents reused.
    pub(crate) fn pin(
        &self,
        namespace: NamespaceId,
        keys: &[Key],
        found: &mut [bool],
        stamp: impl Fn(usize) -> u64,
        mut each: impl FnMut(usize, Place),
    ) {
        let Some(mut state) = self.state.look() else {
            return;
        };
        let Some(number) = state.namespaces.number(namespace) else {
            return;
        };
        let look_up = |(index, key): (usize, &Key)| {
            let slot = (!found[index]).then(|| state.live.get(number, key))?;
            Some((index, slot?))
        };
        let here: Vec<(usize, u32)> = keys.iter().enumerate().filter_map(look_up).collect();
        state.entries.fetch(here.iter().map(|(_, slot)| *slot));
        for (index, slot) in here {
            state.entries.touch(slot, stamp(index));
            state.add_pin(slot);
            found[index] = true;
            each(index, state.place(slot));
        }
    }

    /// Pins a block that is known by its token.
    pub(crate) fn pin_token(&self, token: Token) -> Option<Place> {
        let mut state = self.state.lock();
        let live = state.check(token)?.stage == Stage::Live;
        live.then(|| {
            state.add_pin(token.slot);
            state.place(token.slot)
        })
    }

    /// Whether somebody holds the index now.
    pub(crate) fn is_busy(&self) -> bool {
        self.state.is_taken()
    }

    /// Ends pins.
    pub(crate) fn unpin(&self, tokens: impl Iterator<Item = Token>) {
        self.unpin_in(&mut self.state.lock(), tokens);
    }

    pub(super) fn unpin_in(&self, state: &mut State, tokens: impl Iterator<Item = Token>) {
        for token in tokens {
            if state.check(token).is_none_or(|entry| entry.pins == 0) {
                tracing::error!(tier = self.name, ?token, "a pin was ended twice");
                continue;
            }
            let entry = state.entries.get_mut(token.slot);
            entry.pins -= 1;
            if entry.pins > 0 {
                continue;
            }
            state.pinned -= 1;
            match state.entries.get(token.slot).stage {
                Stage::Live => state.entries.link(token.slot),
                Stage::Doomed => self.release(state, token.slot),
                // Whoever buries it frees it.
                _ => {}
            }
        }
    }
}

impl State {
    pub(super) fn add_pin(&mut self, slot: u32) {
        let entry = self.entries.get_mut(slot);
        entry.pins += 1;
        if entry.pins == 1 {
            self.pinned += 1;
            self.entries.unlink(slot);
        }
    }
}
