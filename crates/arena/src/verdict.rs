//! Outcomes of blocks, computed from the outcomes of their parts.
//!
//! This is the only place that combines parts. A block fails if any part fails. It succeeds if
//! every part was planned and moved. A part that was read from a tier must also match its checksum.

use std::sync::mpsc;

use kvdepot_media::{Batch, Checksum, Copier, Done, Failure, Mac, Outcome};

/// The outcome of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "whoever asks has an answer for each"
)]
pub enum Moved {
    /// The block is in place. The value is the checksum of its last part; for a load it is the
    /// expected one.
    Done(Checksum),
    /// The bytes do not match the expected checksum.
    Corrupt,
    /// The block was not moved, or its outcome is unknown.
    Failed,
    /// The transfer was abandoned while copy threads may still access its destination, which must
    /// not be reused.
    Abandoned,
}

/// The origin of a batch's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "whoever asks has an answer for each"
)]
pub enum Bytes {
    /// Bytes from a tier, whose checksums are known.
    Verified,
    /// Bytes from a caller, which are accepted as they are.
    New,
}

/// The outcomes of the blocks in one batch, by the tags of their parts.
pub struct Verdicts {
    bytes: Bytes,
    blocks: Vec<Block>,
    failure: Option<Failure>,
    /// Digests of leaves with the tags of their parts, in the order of the batch.
    leaves: Vec<(u32, u128)>,
    /// MACs of parts, likewise.
    macs: Vec<(u32, Mac)>,
}

#[derive(Clone, Copy, Default)]
struct Block {
    /// Parts of it that were planned, once all were.
    planned: usize,
    /// Those that are in place.
    moved: usize,
    checksum: Checksum,
    against: Option<Against>,
}

/// What was found against a block; the later one says more.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Against {
    Failed,
    Corrupt,
}

impl Verdicts {
    /// Creates the outcomes of `blocks` blocks, without any planned parts.
    pub fn new(bytes: Bytes, blocks: usize) -> Verdicts {
        Verdicts {
            bytes,
            blocks: vec![Block::default(); blocks],
            failure: None,
            leaves: Vec::new(),
            macs: Vec::new(),
        }
    }

    /// Records that all parts of block `tag` are in the batch, and that there are `parts` of them.
    pub fn planned(&mut self, tag: usize, parts: usize) {
        self.blocks[tag].planned = parts;
    }

    /// Records that block `tag` is corrupt, regardless of the outcomes of its parts.
    pub fn corrupt(&mut self, tag: usize) {
        self.blocks[tag].find(Against::Corrupt);
    }

    /// Records the outcome of every part in a finished batch.
    pub fn count(&mut self, done: &Done<'_>) {
        for (index, (tag, part)) in done.parts().enumerate() {
            self.part(tag, part);
            let mac = part.ok().and_then(|part| part.mac);
            self.macs.extend(mac.map(|mac| (tag, mac)));
            self.leaves
                .extend(done.leaves(index).map(|leaf| (tag, leaf)));
        }
    }

    fn part(&mut self, tag: u32, part: Result<Outcome, Failure>) {
        let Some(block) = self.blocks.get_mut(tag as usize) else {
            return;
        };
        match (part, self.bytes) {
            (
                Ok(Outcome {
                    matches: Some(false),
                    ..
                }),
                _,
            ) => block.find(Against::Corrupt),
            // Nobody has compared it.
            (Ok(Outcome { matches: None, .. }), Bytes::Verified) => block.find(Against::Failed),
            (Ok(part), _) => {
                block.moved += 1;
                block.checksum = part.checksum;
            }
            (Err(failure), _) => {
                block.find(Against::Failed);
                self.failure.get_or_insert(failure);
            }
        }
    }

    /// Returns the outcome of block `tag`. Before [`Verdicts::count`] no outcome is known.
    pub fn of(&self, tag: usize) -> Moved {
        let block = &self.blocks[tag];
        match block.against {
            Some(Against::Corrupt) => Moved::Corrupt,
            Some(Against::Failed) => Moved::Failed,
            None if block.planned > 0 && block.moved == block.planned => {
                Moved::Done(block.checksum)
            }
            None => Moved::Failed,
        }
    }

    /// Returns the digests of the leaves of block `tag`, in the order of its parts.
    ///
    /// The batch must keep them, and its blocks must have been planned in the order of their tags.
    pub fn leaves(&self, tag: usize) -> Vec<u128> {
        of_tag(&self.leaves, tag)
    }

    /// Returns the MACs of the authenticated parts of block `tag`, in the order of its parts.
    ///
    /// The blocks of the batch must have been planned in the order of their tags.
    pub fn macs(&self, tag: usize) -> Vec<Mac> {
        of_tag(&self.macs, tag)
    }

    /// Returns the outcome of each block.
    pub fn all(&self) -> Vec<Moved> {
        (0..self.blocks.len()).map(|tag| self.of(tag)).collect()
    }

    /// Submits the batch of these blocks to `copier`, waits for it and records the outcomes.
    pub fn of_batch(mut self, batch: Batch, copier: &Copier) -> Verdicts {
        let (bytes, blocks) = (self.bytes, self.blocks.len());
        let (sender, receiver) = mpsc::sync_channel(1);
        let ticket = copier.submit(batch, move |done: &mut Done<'_>| {
            self.count(done);
            // The receiver waits below.
            let _sent = sender.send(self);
        });
        let _done = ticket.wait(None);
        // Where nobody has looked, nothing was moved.
        let moved = receiver.recv();
        moved.unwrap_or_else(|_| Verdicts::new(bytes, blocks))
    }

    /// Returns the failure of the first part that was not moved, if there is one.
    pub fn failure(&self) -> Option<Failure> {
        self.failure
    }
}

/// What is there of one block, of what is in the order of tags.
fn of_tag<T: Copy>(all: &[(u32, T)], tag: usize) -> Vec<T> {
    let before = |of: usize| all.partition_point(|(tag, _)| (*tag as usize) < of);
    let found = &all[before(tag)..before(tag + 1)];
    found.iter().map(|(_, one)| *one).collect()
}

impl Block {
    fn find(&mut self, against: Against) {
        self.against = self.against.max(Some(against));
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_media::checksum::{self, PartId};
    use kvdepot_media::{Buffer, Copier, CopierConfig};

    use super::*;

    const LEN: usize = 100;

    fn id(part: u32) -> PartId {
        PartId {
            namespace: [0; 16],
            key: [0; 32],
            part,
            parts: 4,
        }
    }

    /// A block of these parts, sound or not, of which all or only the first ones are planned.
    fn judge(sound: &[bool], whole: bool) -> Moved {
        let mut config = CopierConfig::default();
        config.lanes = 1;
        let copier = Copier::new(config).unwrap();
        let mut batch = copier.batch();
        let mut verdicts = Verdicts::new(Bytes::Verified, 1);
        for (part, sound) in sound.iter().enumerate() {
            let id = id(part as u32);
            let mut sum = checksum::of(&id, &[7; LEN]);
            sum.0[3] ^= u8::from(!sound);
            let from = [Buffer::from_vec(vec![7; LEN])];
            batch.hash_only(&id, &from, Some(sum), 0).unwrap();
        }
        if whole {
            verdicts.planned(0, sound.len());
        }
        let (sender, receiver) = mpsc::channel();
        let ticket = copier.submit(batch, move |done: &mut Done<'_>| {
            verdicts.count(done);
            sender.send(verdicts.of(0)).unwrap();
        });
        assert!(ticket.wait(None));
        receiver.recv().unwrap()
    }

    #[test]
    fn any_part_decides_against_its_block() {
        for parts in 1..=4usize {
            for pattern in 0..1u32 << parts {
                let sound: Vec<bool> = (0..parts).map(|part| pattern >> part & 1 == 1).collect();
                let all = sound.iter().all(|sound| *sound);
                assert_eq!(judge(&sound, true) == Moved::Corrupt, !all, "{sound:?}");
                assert_eq!(matches!(judge(&sound, true), Moved::Done(_)), all);
            }
        }
    }

    #[test]
    fn a_block_that_was_planned_in_part_has_not_moved() {
        assert_eq!(judge(&[true, true], false), Moved::Failed);
        assert_eq!(judge(&[true, false], false), Moved::Corrupt);
        assert_eq!(judge(&[], true), Moved::Failed);
    }

    #[test]
    fn what_nobody_has_compared_or_moved_is_not_verified() {
        let part = |matches| {
            let mut verdicts = Verdicts::new(Bytes::Verified, 1);
            verdicts.planned(0, 1);
            verdicts.part(0, matches);
            verdicts.of(0)
        };
        assert_eq!(part(Err(Failure::Cancelled)), Moved::Failed);
        let mut verdicts = Verdicts::new(Bytes::New, 2);
        verdicts.planned(0, 2);
        verdicts.part(0, Err(Failure::Device));
        assert_eq!(verdicts.all(), [Moved::Failed; 2]);
        assert_eq!(verdicts.failure(), Some(Failure::Device));
    }
}
