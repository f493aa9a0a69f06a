//! Positions of a call's blocks in their prompt. Engines store a prompt in many calls, and the
//! eviction limit of a tier is for a prompt, not for a call.
//!
//! The stamps of a call follow the stamp of the block that the call continues. The pipeline
//! remembers the last calls with a block that was not stored, and those of asynchronous tiers,
//! which have no stamps: the next call of the prompt continues them.

use std::collections::HashMap;
use std::sync::Arc;

use kvdepot_arena::held::turn_len;
use kvdepot_arena::{Identity, Key, NamespaceId, Place, Stamps, Use, held};
use parking_lot::RwLock;

use super::Core;
use crate::tier::Stage;

/// Blocks that are remembered: so many of the last ones, and at most twice as many.
const REMEMBERED: usize = 4096;

/// Blocks that are in no arena.
#[derive(Default)]
pub(crate) struct Prompts(RwLock<Remembered>);

#[derive(Clone, Copy)]
struct Position {
    /// The stamp with which the block was offered or used.
    stamp: u64,
    /// Whether the block found no space, and was not offered again.
    is_full: bool,
    /// True if the block was the last one of a call that was not stored completely: the prompt has
    /// a gap there.
    is_lost: bool,
}

#[derive(Default)]
struct Remembered {
    now: HashMap<Identity, Position>,
    before: HashMap<Identity, Position>,
    /// True if a remembered block may have found no space.
    has_full: bool,
}

impl Remembered {
    fn is_full(&self, block: &Identity) -> bool {
        let mut known = [&self.now, &self.before].into_iter();
        known.any(|known| known.get(block).is_some_and(|one| one.is_full))
    }

    fn set_offered(&mut self, block: &Identity) {
        for known in [&mut self.now, &mut self.before] {
            if let Some(position) = known.get_mut(block) {
                position.is_full = false;
            }
        }
    }
}

impl Prompts {
    fn get(&self, block: &Identity) -> Option<u64> {
        let known = self.0.read();
        let known = known.now.get(block).or_else(|| known.before.get(block));
        known.map(|known| known.stamp)
    }

    fn is_lost(&self, block: &Identity) -> bool {
        let known = self.0.read();
        let known = known.now.get(block).or_else(|| known.before.get(block));
        known.is_some_and(|known| known.is_lost)
    }

    fn forget(&self, block: &Identity) {
        let mut known = self.0.write();
        known.now.remove(block);
        known.before.remove(block);
    }

    fn note(&self, block: Identity, position: Position) {
        let mut known = self.0.write();
        if known.now.len() >= REMEMBERED {
            known.before = std::mem::take(&mut known.now);
            known.has_full = known.before.values().any(|one| one.is_full);
        }
        known.has_full |= position.is_full;
        known.now.insert(block, position);
    }

    /// Returns the index of the first of these blocks that found no space before.
    fn first_full(&self, namespace: NamespaceId, keys: &[Key]) -> Option<usize> {
        if !self.0.read().has_full {
            return None;
        }
        let mut chunks = keys.chunks(turn_len()).enumerate();
        chunks.find_map(|(turn, some)| {
            let known = self.0.read();
            let is_full = |key: &Key| {
                let key = *key;
                known.is_full(&Identity { namespace, key })
            };
            let at = some.iter().position(is_full)?;
            Some(turn * turn_len() + at)
        })
    }

    /// Notes that these blocks are offered again.
    fn set_offered(&self, namespace: NamespaceId, keys: &[Key]) {
        for some in keys.chunks(turn_len()) {
            let mut known = self.0.write();
            for key in some {
                let key = *key;
                known.set_offered(&Identity { namespace, key });
            }
        }
    }
}

impl Core {
    /// The stamps of a call that offers blocks, which follow one in their prompt or begin it.
    pub(crate) fn stamps_after(
        &self,
        namespace: NamespaceId,
        after: Option<Key>,
        keys: &[Key],
    ) -> Stamps {
        let stored = self.stored_run(namespace, keys);
        let full = self.prompts.first_full(namespace, &keys[stored..]);
        let full = full.map(|at| stored + at);
        if let Some(first) = full {
            self.prompts.set_offered(namespace, &keys[first..]);
        }
        let behind = after.map(|key| Identity { namespace, key });
        let here = behind.and_then(|block| self.stamp_here(block));
        let before = here.or_else(|| self.prompts.get(&behind?));
        // Whoever offers blocks again fills the gap first: others would go for what no prefix has.
        let is_gap = here.is_none() && behind.is_some_and(|block| self.prompts.is_lost(&block));
        // Explicit saves have no eviction limit.
        let is_saved = self.saved.has(namespace);
        let stamps = match before {
            // The stamp of a block that an earlier process has stored is no position.
            Some(stamp) if stamp >= self.opened => Stamps::behind(stamp).with_stored(stored),
            _ if self.is_apart() && !is_saved => self.stamps_of_rest(namespace, keys, stored, full),
            // There is a gap before these blocks: no other block is evicted for them.
            None if after.is_some() && !is_saved => return self.uses.call(stored).deepest(),
            _ => self.uses.call(stored),
        };
        let stamps = match (is_saved, full) {
            (true, _) => stamps.saved(),
            (false, Some(_)) if !is_gap => stamps.again(),
            (false, _) => stamps,
        };
        // Asynchronous tiers have no stamps.
        if self.is_apart() {
            self.note_end(namespace, keys, stamps, is_gap);
        }
        stamps
    }

    /// The stamps of a call of which asynchronous tiers have the blocks before the first that found
    /// no space. They are used: else the blocks behind them would be younger.
    fn stamps_of_rest(
        &self,
        namespace: NamespaceId,
        keys: &[Key],
        stored: usize,
        full: Option<usize>,
    ) -> Stamps {
        let stored = full.unwrap_or(stored);
        let stamps = self.uses.call(stored);
        if full.is_some_and(|full| full > 0) {
            let used = keys[..stored].iter().enumerate();
            let used: Vec<(Key, u64)> = used.map(|(at, key)| (*key, stamps.of(at))).collect();
            let apart = self.tiers.iter().filter_map(Stage::apart);
            apart.for_each(|apart| apart.tier().note_used(namespace, &used));
        }
        stamps
    }

    /// The stamp of a block that arenas have, or that is being written there.
    fn stamp_here(&self, block: Identity) -> Option<u64> {
        let mut arenas = self.tiers.iter().filter_map(Stage::here);
        let (id, key) = (block.namespace, &block.key);
        arenas.find_map(|tier| tier.stamp_of(id, key))
    }

    /// Notes that somebody asks for a prompt, of which the first so many blocks are there: what
    /// continues them is new again.
    pub(super) fn note_found(&self, namespace: NamespaceId, keys: &[Key], there: usize) {
        if let Some(key) = there.checked_sub(1).map(|last| keys[last])
            && self.is_apart()
        {
            self.prompts.forget(&Identity { namespace, key });
        }
    }

    /// Notes that a call uses blocks of a tier: the slower ones that have them keep them as long,
    /// and a call that stores blocks behind the last of them continues the prompt.
    pub(super) fn note_used(
        &self,
        tier: usize,
        namespace: NamespaceId,
        used: impl Iterator<Item = (Key, u64)>,
    ) {
        let mut slower = self.tiers[tier + 1..].iter().filter_map(Stage::apart);
        if let Some(next) = slower.next() {
            let used: Vec<(Key, u64)> = used.collect();
            let tiers = std::iter::once(next).chain(slower);
            tiers.for_each(|apart| apart.tier().note_used(namespace, &used));
        } else if self.tiers[tier].apart().is_some()
            && let Some((key, stamp)) = used.last()
        {
            self.note_position(namespace, key, (stamp, false, false));
        }
    }

    fn note_position(
        &self,
        namespace: NamespaceId,
        key: Key,
        (stamp, is_full, is_lost): (u64, bool, bool),
    ) {
        let position = Position {
            stamp,
            is_full,
            is_lost,
        };
        self.prompts.note(Identity { namespace, key }, position);
    }

    /// Notes how a prompt goes on behind a call, and whether it goes on behind a gap.
    fn note_end(&self, namespace: NamespaceId, keys: &[Key], stamps: Stamps, is_lost: bool) {
        if let Some((key, before)) = keys.split_last() {
            let stamp = stamps.of(before.len());
            self.note_position(namespace, *key, (stamp, false, is_lost));
        }
    }

    /// Notes blocks that a tier evicted nothing for, in the order in which they were to be written
    /// to it. They are offered again when a call reads them: the first of each run is kept.
    pub(super) fn note_not_written(&self, places: &[&Place]) {
        let mut before = None;
        for place in places {
            // The blocks of a call have stamps of one use, and so have the calls of a prompt.
            let began = Use::of(place.stamp).began;
            if before.replace(began) != Some(began) {
                let Identity { namespace, key } = place.identity;
                self.note_position(namespace, key, (place.stamp, true, false));
            }
        }
    }

    /// Offers blocks to the last tier again, if it had no space for them when they were new and a
    /// tier before it still has them: a call reads them.
    pub(super) fn offer_again(self: &Arc<Core>, namespace: NamespaceId, keys: &[Key]) {
        let Some(tier) = self.edges.len().checked_sub(1) else {
            return;
        };
        let Some(first) = self.prompts.first_full(namespace, keys) else {
            return;
        };
        // A caller that does not wait for locks asks again, and offers them then.
        if held::passes() {
            return;
        }
        let keys = &keys[first..];
        self.prompts.set_offered(namespace, keys);
        self.send_again(tier, namespace, keys, self.uses.call(0).again());
    }

    /// Notes a call whose blocks were not all stored: the next call of the prompt continues it. A
    /// block that found no space, of which it takes the first index, evicts more when a call offers
    /// it again.
    pub(crate) fn note_refused(
        &self,
        namespace: NamespaceId,
        keys: &[Key],
        full: Option<usize>,
        stamps: Stamps,
    ) {
        let is_gap = keys.last().is_some_and(|key| {
            let key = *key;
            self.prompts.is_lost(&Identity { namespace, key })
        });
        self.note_end(namespace, keys, stamps, is_gap || full.is_some());
        if let Some(first) = full {
            let is_lost = first + 1 == keys.len();
            self.note_position(namespace, keys[first], (stamps.of(first), true, is_lost));
        }
    }
}
