//! What a depot holds: its namespaces, the blocks of one, and the blocks that left.

use std::collections::{HashMap, HashSet};

use kvdepot_arena::{Error, Identity, Key, NamespaceId};

use crate::pipeline::{Core, heard};
use crate::tier::{Arenas, NamespaceUsage, Stage};

/// Maximum number of blocks or namespaces in a page.
///
/// On a socket such a page has 0.7 MB. Locks are held for smaller steps.
pub const PAGE_MAX: usize = 16_384;

/// Slots that are looked at in one go, under an arena's lock: some tens of microseconds.
const GLANCE: u32 = 4096;

/// Position in a listing of blocks.
///
/// A cursor is valid while the depot is open. If its tier no longer exists, the listing ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Cursor {
    tier: u32,
    /// The number of the tier's medium, and the first of its slots that was not looked at.
    medium: u32,
    slot: u32,
    /// How often blocks had moved between the tier's media when it was begun.
    moves: u64,
}

impl Cursor {
    /// Returns the cursor as bytes, for [`Cursor::from_bytes`].
    #[must_use]
    pub fn to_bytes(self) -> [u8; 20] {
        let mut bytes = [0; 20];
        bytes[..4].copy_from_slice(&self.tier.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.medium.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.slot.to_le_bytes());
        bytes[12..].copy_from_slice(&self.moves.to_le_bytes());
        bytes
    }

    /// Creates a cursor from the result of [`Cursor::to_bytes`].
    ///
    /// Other bytes are harmless: they stand for another position in the listing, or for its end.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; 20]) -> Cursor {
        let word = |at: usize| {
            let word = bytes[at..].first_chunk::<4>();
            u32::from_le_bytes(word.copied().unwrap_or_default())
        };
        Cursor {
            tier: word(0),
            medium: word(4),
            slot: word(8),
            moves: u64::from(word(12)) | u64::from(word(16)) << 32,
        }
    }
}

/// One page of a listing of blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockPage {
    /// Keys with the size of each block in bytes, unordered.
    pub blocks: Vec<(Key, u64)>,
    /// Start of the next page; `None` after the last page.
    pub next: Option<Cursor>,
}

/// Blocks that were removed from every tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gone {
    /// Identities with the size of each block in bytes; for each device in the order of removal.
    pub blocks: Vec<(Identity, u64)>,
    /// True if more blocks were removed than recorded.
    ///
    /// A caller that tracks the content of the depot must list the blocks again.
    pub overflowed: bool,
}

impl Core {
    /// The namespaces that have or had blocks in the last tier of arenas since it was opened, those
    /// that its directory describes, and what tiers that may answer late tell.
    pub(crate) fn namespaces(&self) -> Result<Vec<NamespaceUsage>, Error> {
        let _pass = self.gate.enter()?;
        let mut found = HashMap::new();
        for device in self
            .arenas()
            .last()
            .iter()
            .flat_map(|(_, last)| last.arenas())
        {
            for (id, (blocks, bytes)) in device.shares() {
                let mut usage = NamespaceUsage::described(id, None);
                (usage.blocks, usage.bytes) = (blocks, bytes);
                note(&mut found, usage);
            }
            for (id, text) in device.descriptions()? {
                note(&mut found, NamespaceUsage::described(id, Some(text)));
            }
        }
        for tier in &self.tiers {
            let Some(apart) = tier.apart() else { continue };
            let (mut behind, mut mark) = (HashMap::new(), Some(0));
            while let Some(from) = mark {
                let (page, next) = heard(tier, apart.namespaces(from).wait())?;
                page.into_iter().for_each(|usage| note(&mut behind, usage));
                mark = next;
            }
            for (id, usage) in behind {
                // What is there too is counted once: further away.
                if let Some(nearer) = found.get_mut(&id).filter(|_| usage.blocks > 0) {
                    (nearer.blocks, nearer.bytes) = (0, 0);
                }
                note(&mut found, usage);
            }
        }
        let mut found: Vec<NamespaceUsage> = found.into_values().collect();
        found.sort_unstable_by_key(|usage| usage.id);
        Ok(found)
    }

    /// Returns at most `limit` namespaces whose digests follow `after`, in the order of the
    /// digests.
    ///
    /// # Errors
    ///
    /// * [`Error::Closed`].
    /// * [`Error::Silent`] if an asynchronous tier does not respond.
    /// * [`Error::Media`] if the directory of an arena cannot be read.
    pub fn namespace_page(
        &self,
        after: Option<NamespaceId>,
        limit: usize,
    ) -> Result<Vec<NamespaceUsage>, Error> {
        let mut all = self.namespaces()?;
        let begin = all.partition_point(|one| after.is_some_and(|after| one.id <= after));
        all.drain(..begin);
        all.truncate(limit);
        Ok(all)
    }

    /// Returns the blocks that were removed from the depot since the last call of `listener`.
    ///
    /// kvdepot records removals from the first call on, at most the last `limit` of each device.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`].
    pub fn gone(&self, listener: u64, limit: usize) -> Result<Gone, Error> {
        let _pass = self.gate.enter()?;
        let mut gone = Gone::default();
        for (_, tier) in self.arenas() {
            let departed = tier.departed(listener, limit);
            gone.blocks.extend(departed.blocks);
            gone.overflowed |= departed.overflowed;
        }
        for tier in self.tiers.iter().filter_map(Stage::apart) {
            let departed = tier.tier().departed(listener, limit);
            gone.blocks.extend(departed.blocks);
            gone.overflowed |= departed.overflowed;
        }
        // What left one tier may be in another, or has come back; and it may have left both.
        let mut seen = HashSet::new();
        gone.blocks.retain(|(identity, _)| seen.insert(*identity));
        let mut left: HashMap<NamespaceId, Vec<Key>> = HashMap::new();
        for (identity, _) in &gone.blocks {
            left.entry(identity.namespace)
                .or_default()
                .push(identity.key);
        }
        // A put that ends while the slower tiers are asked has come back to a faster one.
        let again = self.tiers.iter().filter(|tier| tier.here().is_some());
        let tiers = self.tiers.iter().chain(again);
        let mut there = HashSet::new();
        for (namespace, keys) in left {
            let found = found_in(tiers.clone(), namespace, &keys);
            let found = keys.into_iter().zip(found).filter(|(_, found)| *found);
            there.extend(found.map(|(key, _)| Identity { namespace, key }));
        }
        gone.blocks
            .retain(|(identity, _)| !there.contains(identity));
        Ok(gone)
    }

    /// Stops recording removals for `listener`.
    pub fn forget_listener(&self, listener: u64) {
        for (_, tier) in self.arenas() {
            tier.forget_listener(listener);
        }
        for tier in self.tiers.iter().filter_map(Stage::apart) {
            tier.tier().forget_listener(listener);
        }
    }

    /// How many of a namespace's blocks in some tier are in one behind it too.
    pub(crate) fn doubles(&self, id: NamespaceId) -> usize {
        let mut doubles = 0;
        for (at, tier) in self.tiers[..self.tiers.len() - 1].iter().enumerate() {
            let count = |page: &[(Key, u64)]| {
                let keys: Vec<Key> = page.iter().map(|(key, _)| *key).collect();
                let found = found_in(self.tiers[at + 1..].iter(), id, &keys);
                found.into_iter().filter(|found| *found).count()
            };
            let media = tier.here().map(Arenas::arenas);
            for medium in media.into_iter().flatten() {
                let mut slot = Some(0);
                while let Some(from) = slot {
                    let mut page = Vec::new();
                    slot = medium.glance(id, from, GLANCE, usize::MAX, &mut page);
                    doubles += count(&page);
                }
            }
            let mut mark = tier.apart().map(|apart| (apart, 0));
            while let Some((apart, from)) = mark {
                let (page, next) = apart
                    .list(id, from, GLANCE as usize)
                    .wait()
                    .unwrap_or_default();
                mark = next.map(|next| (apart, next));
                doubles += count(&page);
            }
        }
        doubles
    }

    /// Returns a page of at most `limit` blocks of namespace `id`.
    ///
    /// `from` is the end of the previous page, or `None` for the first page. Upper tiers come
    /// first, so that the listing contains a block that is being written back to a lower tier.
    ///
    /// # Errors
    ///
    /// * [`Error::Closed`].
    /// * [`Error::Silent`] if an asynchronous tier does not respond.
    pub fn block_page(
        &self,
        id: NamespaceId,
        from: Option<Cursor>,
        limit: usize,
    ) -> Result<BlockPage, Error> {
        let _pass = self.gate.enter()?;
        let mut page = BlockPage::default();
        let mut at = from.unwrap_or_default();
        while let Some(tier) = self.tiers.get(at.tier as usize) {
            let tier = match tier {
                Stage::Here(arenas) => arenas,
                Stage::Apart(apart) => {
                    let (blocks, next) = heard(
                        tier,
                        apart.list(id, at.moves, limit - page.blocks.len()).wait(),
                    )?;
                    page.blocks.extend(blocks);
                    at = match next {
                        Some(mark) => Cursor { moves: mark, ..at },
                        None => self.cursor_of(at.tier + 1),
                    };
                    if page.blocks.len() >= limit || next.is_some() {
                        page.next = Some(at).filter(|at| (at.tier as usize) < self.tiers.len());
                        return Ok(page);
                    }
                    continue;
                }
            };
            let moves = tier.moves();
            if at.moves != moves {
                // What was not seen yet may be where the listing has been.
                (at.medium, at.slot, at.moves) = (0, 0, moves);
            }
            let mut media = tier.arenas();
            media.sort_unstable_by_key(|medium| medium.number());
            for medium in media {
                if medium.number() < at.medium {
                    continue;
                }
                if medium.number() > at.medium {
                    (at.medium, at.slot) = (medium.number(), 0);
                }
                while let Some(next) = medium.glance(id, at.slot, GLANCE, limit, &mut page.blocks) {
                    at.slot = next;
                    if page.blocks.len() >= limit {
                        page.next = Some(at);
                        return Ok(page);
                    }
                }
                at.medium += 1;
                at.slot = 0;
            }
            if tier.moves() != moves {
                page.next = Some(at);
                return Ok(page);
            }
            at = self.cursor_of(at.tier + 1);
        }
        Ok(page)
    }

    /// Where the listing of a tier begins.
    fn cursor_of(&self, tier: u32) -> Cursor {
        let here = self.tiers.get(tier as usize).and_then(Stage::here);
        Cursor {
            tier,
            moves: here.map_or(0, Arenas::moves),
            ..Cursor::default()
        }
    }
}

/// Adds what a namespace has to what is known of it.
fn note(found: &mut HashMap<NamespaceId, NamespaceUsage>, usage: NamespaceUsage) {
    let none = || NamespaceUsage::described(usage.id, None);
    let known = found.entry(usage.id).or_insert_with(none);
    known.description = known.description.take().or(usage.description);
    known.blocks += usage.blocks;
    known.bytes += usage.bytes;
}

/// Returns, for each key, true if one of these tiers has the block.
fn found_in<'a>(
    tiers: impl Iterator<Item = &'a Stage>,
    id: NamespaceId,
    keys: &[Key],
) -> Vec<bool> {
    let mut found = vec![false; keys.len()];
    for tier in tiers {
        match tier {
            Stage::Here(arenas) => arenas.contains(id, keys, &mut found),
            Stage::Apart(apart) => {
                let left = (0..keys.len()).filter(|at| !found[*at]);
                for some in left.collect::<Vec<usize>>().chunks(apart.step_max()) {
                    let asked: Vec<Key> = some.iter().map(|at| keys[*at]).collect();
                    let there = apart.probe(id, &asked).wait().unwrap_or_default();
                    for (at, there) in some.iter().zip(there) {
                        found[*at] = there;
                    }
                }
            }
        }
    }
    found
}
