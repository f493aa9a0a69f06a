//! What a depot may hold and answer, as a plain map with a clock.
//!
//! The twin is told what is begun and what is seen: that a writer starts, that a block appeared,
//! that it is gone. It says whether that may be: a block appears only while somebody writes it,
//! and what a reader gets is what was there at some moment of its call. Blocks are immutable, so
//! whoever writes one that is there writes nothing.

use std::collections::BTreeMap;

use crate::bytes::content;

/// A block: the number of its namespace, and of its key.
pub type Id = (u8, u16);

/// One content that somebody puts under a key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a plain value of a test")]
pub struct Version {
    /// Says which bytes, see [`content`]. No two versions share it.
    pub content: u64,
    /// The lengths of its parts.
    pub parts: Vec<u64>,
    /// Bytes that it takes in a tier's count.
    pub stored: u64,
}

impl Version {
    /// Bytes that a reader gets.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.parts.iter().sum()
    }

    /// Never: blocks have bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Those bytes.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        content(self.content, self.len() as usize)
    }

    /// Those of one part.
    #[must_use]
    pub fn part(&self, part: usize) -> Vec<u8> {
        let begin: u64 = self.parts[..part].iter().sum();
        let end = begin + self.parts[part];
        self.bytes()[begin as usize..end as usize].to_vec()
    }
}

/// Somebody who writes a block.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "a plain value of a test")]
pub struct Writer {
    /// Who.
    pub number: u64,
    /// What.
    pub version: Version,
    /// Whether it begun while nobody else was writing: then the room is its own.
    pub first: bool,
    /// Whether it was told that it has written it: it has no room of its own any more.
    pub told: bool,
}

/// A block that is there.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "a plain value of a test")]
pub struct Live {
    /// What it may be: one version, unless several wrote at once.
    pub versions: Vec<Version>,
    /// Since when.
    pub since: u64,
    /// When it was used last, at the earliest and at the latest.
    pub used: (u64, u64),
}

#[derive(Clone, Debug, Default)]
struct Block {
    writers: Vec<Writer>,
    live: Option<Live>,
    /// What was there before, and until when.
    past: Vec<(u64, Live)>,
}

/// The map.
#[derive(Clone, Debug, Default)]
pub struct Twin {
    now: u64,
    uses: u64,
    blocks: BTreeMap<Id, Block>,
}

impl Twin {
    /// The present moment.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.now
    }

    /// Time goes on.
    pub fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// Somebody begins to write a block. Where it is there, or has to be when this is over, the
    /// write changes nothing.
    pub fn begin(&mut self, id: Id, number: u64, version: Version) {
        let block = self.blocks.entry(id).or_default();
        let first = block.writers.is_empty() && block.live.is_none();
        block.writers.push(Writer {
            number,
            version,
            first,
            told: false,
        });
    }

    /// A writer was told that its block is there. It may have left by now, unseen.
    pub fn told(&mut self, id: Id, number: u64) {
        let writers = self.blocks.get_mut(&id).map(|block| &mut block.writers);
        for writer in writers.into_iter().flatten() {
            writer.told |= writer.number == number;
        }
    }

    /// A writer has ended, whatever came of it.
    pub fn end(&mut self, id: Id, number: u64) {
        if let Some(block) = self.blocks.get_mut(&id) {
            block.writers.retain(|writer| writer.number != number);
        }
    }

    /// Nobody writes anything any more: the process died, or closed.
    pub fn end_all(&mut self) {
        self.blocks
            .values_mut()
            .for_each(|block| block.writers.clear());
    }

    /// Those who write a block, in the order in which they began.
    #[must_use]
    pub fn writers(&self, id: Id) -> &[Writer] {
        self.blocks.get(&id).map_or(&[], |block| &block.writers)
    }

    /// Blocks that somebody is writing.
    pub fn written(&self) -> impl Iterator<Item = Id> {
        let written = self
            .blocks
            .iter()
            .filter(|(_, block)| block.writers.iter().any(|writer| !writer.told));
        written.map(|(id, _)| *id)
    }

    /// A block has appeared that takes so many bytes.
    ///
    /// # Errors
    /// When nobody writes such a block.
    pub fn appeared(&mut self, id: Id, stored: u64) -> Result<(), String> {
        let (now, uses) = (self.now, self.uses);
        let block = self.blocks.entry(id).or_default();
        let fits = block
            .writers
            .iter()
            .filter(|one| one.version.stored == stored);
        let versions: Vec<Version> = fits.map(|one| one.version.clone()).collect();
        if versions.is_empty() {
            let writers: Vec<&Writer> = block.writers.iter().collect();
            return Err(format!(
                "block {id:?} of {stored} bytes appeared, which nobody wrote; writers: {writers:?}"
            ));
        }
        block.live = Some(Live {
            versions,
            since: now,
            used: (0, uses),
        });
        Ok(())
    }

    /// A block is there no more.
    pub fn left(&mut self, id: Id) -> Option<Live> {
        let now = self.now;
        let block = self.blocks.get_mut(&id)?;
        let live = block.live.take()?;
        block.past.push((now, live.clone()));
        if block.past.len() > 4 {
            block.past.remove(0);
        }
        Some(live)
    }

    /// A block has appeared that nobody writes: a copy of what left last, which was on its way to
    /// another tier then.
    ///
    /// # Errors
    /// When it is no such copy.
    pub fn returned(&mut self, id: Id, stored: u64) -> Result<(), String> {
        let (now, uses) = (self.now, self.uses);
        let block = self.blocks.entry(id).or_default();
        let before = block.past.last().map(|(_, live)| live.versions.clone());
        let versions = before.unwrap_or_default();
        if versions.iter().all(|one| one.stored != stored) {
            return Err(format!(
                "block {id:?} of {stored} bytes appeared, which nobody wrote"
            ));
        }
        block.live = Some(Live {
            versions,
            since: now,
            used: (0, uses),
        });
        Ok(())
    }

    /// A block that is being written came and left again, unseen.
    pub fn passed(&mut self, id: Id) {
        let now = self.now;
        let Some(block) = self.blocks.get_mut(&id) else {
            return;
        };
        let versions = block.writers.iter().map(|one| one.version.clone());
        let live = Live {
            versions: versions.collect(),
            since: now,
            used: (0, self.uses),
        };
        block.past.push((now, live));
    }

    /// The block, where it is there.
    #[must_use]
    pub fn live(&self, id: Id) -> Option<&Live> {
        self.blocks.get(&id)?.live.as_ref()
    }

    /// What left last.
    #[must_use]
    pub fn last_left(&self, id: Id) -> Option<&Live> {
        let (_, live) = self.blocks.get(&id)?.past.last()?;
        Some(live)
    }

    /// Whether it was there at some moment from `since` on.
    #[must_use]
    pub fn was_live(&self, id: Id, since: u64) -> bool {
        let past = |block: &Block| block.past.iter().any(|(until, _)| *until >= since);
        self.live(id).is_some() || self.blocks.get(&id).is_some_and(past)
    }

    /// All blocks that are there.
    pub fn all_live(&self) -> impl Iterator<Item = (Id, &Live)> {
        let live = |(id, block): (&Id, &'_ Block)| block.live.is_some().then_some(*id);
        let ids: Vec<Id> = self.blocks.iter().filter_map(live).collect();
        ids.into_iter().filter_map(|id| Some((id, self.live(id)?)))
    }

    /// What a reader may get whose call began at `since`: all that was there since then.
    #[must_use]
    pub fn readable(&self, id: Id, since: u64) -> Vec<&Version> {
        let Some(block) = self.blocks.get(&id) else {
            return Vec::new();
        };
        let past = block.past.iter().filter(|(until, _)| *until >= since);
        let all = past.map(|(_, live)| live).chain(&block.live);
        let mut all: Vec<&Version> = all.flat_map(|live| &live.versions).collect();
        // What was written meanwhile may have come and gone between two looks.
        all.extend(block.writers.iter().map(|writer| &writer.version));
        all
    }

    /// The bytes of a block were seen: it can be no other version.
    pub fn known(&mut self, id: Id, content: u64) {
        if let Some(live) = self
            .blocks
            .get_mut(&id)
            .and_then(|block| block.live.as_mut())
            && live.versions.iter().any(|one| one.content == content)
        {
            live.versions.retain(|one| one.content == content);
        }
    }

    /// Stamps for the keys of a call, in prefix order: the first is used last.
    pub fn stamps(&mut self, keys: usize) -> Vec<u64> {
        let first = self.uses;
        self.uses += keys as u64;
        (0..keys as u64)
            .map(|index| first + keys as u64 - 1 - index)
            .collect()
    }

    /// A block was used.
    pub fn used(&mut self, id: Id, stamp: u64) {
        self.touch(id, stamp, true);
    }

    /// A block may have been used.
    pub fn maybe_used(&mut self, id: Id, stamp: u64) {
        self.touch(id, stamp, false);
    }

    fn touch(&mut self, id: Id, stamp: u64, surely: bool) {
        if let Some(live) = self
            .blocks
            .get_mut(&id)
            .and_then(|block| block.live.as_mut())
        {
            live.used.1 = live.used.1.max(stamp);
            if surely {
                live.used.0 = live.used.0.max(stamp);
            }
        }
    }

    /// Nobody knows any more which block was used when.
    pub fn forget_uses(&mut self) {
        let uses = self.uses;
        for live in self
            .blocks
            .values_mut()
            .filter_map(|block| block.live.as_mut())
        {
            live.used = (0, uses);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(content: u64, len: u64) -> Version {
        Version {
            content,
            parts: vec![len],
            stored: len,
        }
    }

    #[test]
    fn a_block_appears_only_while_somebody_writes_it() {
        let mut twin = Twin::default();
        assert!(twin.appeared((0, 1), 10).is_err());
        twin.begin((0, 1), 7, version(5, 10));
        assert!(twin.appeared((0, 1), 11).is_err());
        assert!(twin.appeared((0, 1), 10).is_ok());
        twin.end((0, 1), 7);
        // A later writer of what is there writes nothing.
        let begun = twin.tick();
        assert_eq!(twin.readable((0, 1), begun), [&version(5, 10)]);
        twin.left((0, 1));
        assert!(twin.was_live((0, 1), begun));
        twin.tick();
        assert!(!twin.was_live((0, 1), begun + 1));
        assert!(twin.readable((0, 1), begun + 1).is_empty());
    }

    #[test]
    fn parts_are_pieces_of_the_whole() {
        let version = Version {
            content: 3,
            parts: vec![100, 50],
            stored: 8256,
        };
        assert_eq!(version.part(1), version.bytes()[100..]);
    }
}
