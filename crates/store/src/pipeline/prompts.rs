//! Positions of a call's blocks in their prompt. Engines store a prompt in many calls, and the
//! eviction limit of a tier is for a prompt, not for a call.
//!
//! The stamps of a call follow the stamp of the block that the call continues. The pipeline
//! remembers the last calls with a block that found no space or was declined, and those of tiers
//! without stamps: the next call of the prompt continues them.

use std::collections::HashMap;

use kvdepot_arena::{Identity, Key, NamespaceId, Stamps};
use parking_lot::RwLock;

use super::Core;
use crate::tier::Stage;

/// Blocks that are remembered: so many of the last ones, and at most twice as many.
const REMEMBERED: usize = 4096;

/// Blocks that are in no arena, with the stamps of what follows them.
#[derive(Default)]
pub(crate) struct Prompts(RwLock<Remembered>);

#[derive(Default)]
struct Remembered {
    now: HashMap<Identity, Stamps>,
    before: HashMap<Identity, Stamps>,
}

impl Prompts {
    fn get(&self, block: &Identity) -> Option<Stamps> {
        let known = self.0.read();
        let known = known.now.get(block).or_else(|| known.before.get(block));
        known.copied()
    }

    fn forget(&self, block: &Identity) {
        let mut known = self.0.write();
        known.now.remove(block);
        known.before.remove(block);
    }

    fn note(&self, block: Identity, next: Stamps) {
        let mut known = self.0.write();
        if known.now.len() >= REMEMBERED {
            known.before = std::mem::take(&mut known.now);
        }
        known.now.insert(block, next);
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
        let there = self.stored_run(namespace, keys);
        let behind = after.and_then(|key| self.stamps_behind(Identity { namespace, key }));
        let mut stamps = behind.unwrap_or_else(|| self.uses.call(there));
        if let Some(key) = keys.get(there) {
            let key = *key;
            let is_again = self.prompts.get(&Identity { namespace, key }).is_some();
            if is_again {
                stamps = stamps.again();
            }
        }
        // Explicit saves have no eviction limit.
        if self.saved.has(namespace) {
            stamps = stamps.saved();
        }
        // A tier apart has no stamps.
        if self.is_apart() {
            self.note_end(namespace, keys, stamps);
        }
        stamps
    }

    fn stamps_behind(&self, block: Identity) -> Option<Stamps> {
        let mut arenas = self.tiers.iter().filter_map(Stage::here);
        let (id, key) = (block.namespace, &block.key);
        match arenas.find_map(|tier| tier.stamp_of(id, key)) {
            // What an earlier process has stored tells only that it was there.
            Some(stamp) => (stamp >= self.opened).then(|| Stamps::behind(stamp)),
            None => self.prompts.get(&block),
        }
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
            let block = Identity { namespace, key };
            self.prompts.note(block, Stamps::behind(stamp));
        }
    }

    /// Notes how a prompt goes on behind a call.
    fn note_end(&self, namespace: NamespaceId, keys: &[Key], stamps: Stamps) {
        if let Some((key, before)) = keys.split_last() {
            let key = *key;
            let next = Stamps::behind(stamps.of(before.len()));
            self.prompts.note(Identity { namespace, key }, next);
        }
    }

    /// Notes a call whose blocks were not all stored: the next call of the prompt continues it. Of
    /// the blocks that found no space, and of those that the admission policy declined, it takes
    /// the first index. A block that found no space evicts more when a call offers it again.
    pub(crate) fn note_refused(
        &self,
        namespace: NamespaceId,
        keys: &[Key],
        (full, declined): (Option<usize>, Option<usize>),
        stamps: Stamps,
    ) {
        if let Some(first) = full {
            let next = Stamps::behind(stamps.of(first));
            let key = keys[first];
            self.prompts.note(Identity { namespace, key }, next);
        }
        if full.or(declined).is_some() {
            self.note_end(namespace, keys, stamps);
        }
    }
}
