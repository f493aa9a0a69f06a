//! What a depot holds: its namespaces, the blocks of one, and the blocks that left.

use std::collections::{HashMap, HashSet};

use crate::pipeline::Core;
use crate::{Error, Identity, Key, NamespaceId};

/// A namespace of a depot, and what it has in the last tier.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NamespaceUsage {
    /// Its digest.
    pub id: NamespaceId,
    /// What the medium's directory says of it; the directory may be full.
    pub description: Option<String>,
    /// Blocks published.
    pub blocks: u64,
    /// Bytes of their payloads.
    pub bytes: u64,
}

/// Blocks that are in no tier any more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Gone {
    /// The blocks with their bytes, each device's in the order in which they went.
    pub blocks: Vec<(Identity, u64)>,
    /// Whether more went than were noted: who keeps count must list anew.
    pub overflowed: bool,
}

impl Core {
    /// The namespaces that have or had blocks in the last tier since it was opened, and those that
    /// its directory describes.
    pub(crate) fn namespaces(&self) -> Result<Vec<NamespaceUsage>, Error> {
        let _pass = self.gate.enter()?;
        let Some(last) = self.tiers.last() else {
            return Ok(Vec::new());
        };
        let mut shares = HashMap::<NamespaceId, (u64, u64)>::new();
        let mut texts = HashMap::new();
        for device in last.arenas() {
            for (id, (blocks, bytes)) in device.shares() {
                let share = shares.entry(id).or_default();
                *share = (share.0 + blocks, share.1 + bytes);
            }
            texts.extend(device.descriptions()?);
        }
        let mut ids: Vec<NamespaceId> = shares.keys().chain(texts.keys()).copied().collect();
        ids.sort_unstable();
        ids.dedup();
        let of = |id| {
            let (blocks, bytes) = shares.get(&id).copied().unwrap_or_default();
            NamespaceUsage {
                id,
                description: texts.remove(&id),
                blocks,
                bytes,
            }
        };
        Ok(ids.into_iter().map(of).collect())
    }

    /// The blocks that have left the depot since this listener's last call. They are noted from
    /// its first call on, at most the last `limit` of each device.
    pub(crate) fn gone(&self, listener: u64, limit: usize) -> Result<Gone, Error> {
        let _pass = self.gate.enter()?;
        let tiers = &self.tiers;
        let mut gone = Gone::default();
        for device in tiers.iter().flat_map(|tier| tier.arenas()) {
            let departed = device.departed(listener, limit);
            gone.blocks.extend(departed.blocks);
            gone.overflowed |= departed.overflowed;
        }
        // What left one tier may be in another, or has come back; and it may have left both.
        let mut seen = HashSet::new();
        gone.blocks.retain(|(identity, _)| {
            let mut found = [!seen.insert(*identity)];
            for tier in tiers {
                tier.contains(identity.namespace, &[identity.key], &mut found);
            }
            !found[0]
        });
        Ok(gone)
    }

    /// Nobody asks any more what left, in this listener's name.
    pub(crate) fn forget_listener(&self, listener: u64) {
        for device in self.tiers.iter().flat_map(|tier| tier.arenas()) {
            device.forget_listener(listener);
        }
    }

    /// The blocks of a namespace, by key, with their bytes; in the order of the keys.
    pub(crate) fn blocks(&self, id: NamespaceId) -> Result<Vec<(Key, u64)>, Error> {
        let _pass = self.gate.enter()?;
        let mut blocks = Vec::new();
        for device in self.tiers.iter().flat_map(|tier| tier.arenas()) {
            blocks.extend(device.blocks(id));
        }
        blocks.sort_unstable();
        blocks.dedup_by_key(|(key, _)| *key);
        Ok(blocks)
    }
}
