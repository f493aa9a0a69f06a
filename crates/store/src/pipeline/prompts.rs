//! Positions of a call's blocks in their prompt. Engines store a prompt in many calls, and the
//! eviction limit of a tier is for a prompt, not for a call.
//!
//! A block's stamp says it: those of the next call follow the stamp of the block that it
//! continues. A block that found no room, or whose tier has no stamps, is remembered for a while:
//! what continues it knows where it stands, and it is known when it is offered again.

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
            // Explicit saves have no eviction limit.
            if is_again || self.saved.has(namespace) {
                stamps = stamps.again();
            }
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

    /// Notes how a prompt goes on behind a call.
    fn note_end(&self, namespace: NamespaceId, keys: &[Key], stamps: Stamps) {
        if let Some((key, before)) = keys.split_last() {
            let key = *key;
            let next = Stamps::behind(stamps.of(before.len()));
            self.prompts.note(Identity { namespace, key }, next);
        }
    }

    /// Notes the blocks of a call that found no room, from the first one on.
    pub(crate) fn note_full(
        &self,
        namespace: NamespaceId,
        keys: &[Key],
        first: usize,
        stamps: Stamps,
    ) {
        let next = Stamps::behind(stamps.of(first));
        let key = keys[first];
        self.prompts.note(Identity { namespace, key }, next);
        self.note_end(namespace, keys, stamps);
    }
}
