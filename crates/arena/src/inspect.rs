//! Read-only inspection of an arena, for `kvdepot ls`, `stat`, `verify` and `doctor`. It works also
//! while another process owns the arena.

mod file;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvdepot_host::holders::Holder;
use kvdepot_host::lock;
use kvdepot_media::{Access, Batch, Copier, Kind, Mapping};

use crate::error::Error;
use crate::format::layout::{CAPACITY_MIN, Layout};
use crate::format::owner::Owner;
use crate::format::record::{self, Record, Slot};
use crate::format::superblock::Superblock;
use crate::head::{dead_superblocks, read_directory, read_owner, read_superblock};
use crate::key::NamespaceId;
use crate::owner_lock::orphans_of;
use crate::recover::{is_inside, judge, survey};
use crate::verdict::{Bytes, Moved, Verdicts};
use crate::{parts, size};

pub use file::{Judged, Keys, block_files, is_block_file, judge_file};

/// When something is looked at again that a running owner may have been writing.
const PAUSES: [Duration; 3] = [
    Duration::ZERO,
    Duration::from_millis(1),
    Duration::from_millis(10),
];

/// An arena that is open for reading only.
pub struct Inspection {
    path: PathBuf,
    mapping: Arc<Mapping>,
    superblock: Superblock,
    layout: Layout,
}

/// One live block.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Listed {
    /// Slot in the record table.
    pub slot: u32,
    /// Record of the block.
    pub record: Record,
}

/// The result of a verification.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verified {
    /// Number of blocks that the arena lists. Fewer were checked if `progress` ended the
    /// verification early.
    pub blocks: u64,
    /// Number of blocks whose payload matches its checksum.
    pub sound: u64,
    /// Blocks that failed verification.
    pub bad: Vec<Listed>,
    /// Number of blocks that a running owner evicted or replaced while they were read.
    pub changed: u64,
    /// Record slots with bytes that are not a record.
    pub damaged_records: Vec<u32>,
}

impl Inspection {
    /// Maps the arena read-only and reads its superblock.
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`] if it is not an arena, [`Error::Media`] if it cannot be opened.
    pub fn open(path: &Path) -> Result<Inspection, Error> {
        let corrupt = |reason: String| Error::Corrupt {
            path: path.into(),
            reason,
        };
        let mapping = Mapping::open(path, Access::ReadOnly).map_err(|error| match error {
            kvdepot_media::Error::TooSmall { .. } => {
                corrupt("the file is empty, so it is not a kvdepot arena".into())
            }
            other => other.into(),
        })?;
        if mapping.len() < CAPACITY_MIN {
            let has = size::show(mapping.len());
            return Err(corrupt(format!(
                "the file is too small ({has}) to be a kvdepot arena"
            )));
        }
        let superblock = read_superblock(path, &mapping)?;
        let layout = Layout {
            capacity: superblock.capacity,
            records: superblock.records,
            data: superblock.data,
        };
        if layout.data >= mapping.len() {
            return Err(corrupt(
                "the file was truncated inside the record table; restore the file from a copy, or \
                 remove it"
                    .into(),
            ));
        }
        Ok(Inspection {
            path: path.into(),
            mapping,
            superblock,
            layout,
        })
    }

    /// Returns the path of the arena.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the length of the medium in bytes. It may exceed the arena's capacity, and is
    /// smaller if the medium was truncated.
    #[must_use]
    pub fn medium_bytes(&self) -> u64 {
        self.mapping.len()
    }

    /// Returns the kind of the medium.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.mapping.kind()
    }

    /// Returns the superblock in use.
    #[must_use]
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Returns the offsets of damaged superblocks. One damaged copy loses no data; the next owner
    /// rewrites it.
    ///
    /// # Errors
    ///
    /// [`Error::Media`] if the medium cannot be read.
    pub fn damaged_superblocks(&self) -> Result<Vec<u64>, Error> {
        let mut dead = Vec::new();
        for pause in PAUSES {
            std::thread::sleep(pause);
            dead = dead_superblocks(&self.mapping, &self.superblock)?;
            if dead.is_empty() {
                break;
            }
        }
        Ok(dead)
    }

    /// Returns the process that opened the arena last, and whether a process owns it now.
    #[must_use]
    pub fn owner(&self) -> (Option<Owner>, bool) {
        let held = self.mapping.fd().and_then(|fd| lock::is_locked(fd, 0));
        let held = held.unwrap_or(false);
        (read_owner(&self.mapping), held)
    }

    /// Returns the visible processes that worked for an earlier owner and may still write to the
    /// arena.
    ///
    /// A new owner stores nothing before they have exited. The call inspects all processes.
    #[must_use]
    pub fn orphans(&self) -> Vec<Holder> {
        orphans_of(&self.mapping)
    }

    /// Returns the namespaces with a description in the arena.
    ///
    /// # Errors
    ///
    /// [`Error::Media`] if the medium cannot be read.
    pub fn namespaces(&self) -> Result<Vec<(NamespaceId, String)>, Error> {
        let entries = read_directory(&self.mapping)?;
        Ok(entries
            .into_iter()
            .map(|(_, id, text)| (id, text))
            .collect())
    }

    /// Returns the live blocks by the rules of recovery, oldest first, and the damaged slots.
    ///
    /// # Errors
    ///
    /// [`Error::Media`] if the medium cannot be read.
    pub fn blocks(&self) -> Result<(Vec<Listed>, Vec<u32>), Error> {
        let survey = survey(&self.mapping, self.layout, &self.superblock.uuid)?;
        let served = judge(&survey.records);
        let mut blocks: Vec<Listed> = survey
            .records
            .into_iter()
            .zip(served)
            .filter(|(_, served)| *served)
            .map(|(found, _)| found)
            // Their records say that they are here: verifying finds that they are not.
            .chain(survey.lost)
            .map(|(slot, record)| Listed { slot, record })
            .collect();
        blocks.sort_unstable_by_key(|block| block.record.sequence);
        let mut damaged = survey.damaged;
        for pause in PAUSES {
            if !damaged.is_empty() {
                std::thread::sleep(pause);
                damaged = self.still_damaged(&damaged)?;
            }
        }
        Ok((blocks, damaged))
    }

    fn still_damaged(&self, slots: &[u32]) -> Result<Vec<u32>, Error> {
        let mut damaged = Vec::new();
        for slot in slots {
            if !self.is_sound(&self.read_slot(*slot)?) {
                damaged.push(*slot);
            }
        }
        Ok(damaged)
    }

    fn is_sound(&self, slot: &Slot) -> bool {
        match slot {
            Slot::Empty => true,
            Slot::Used(record) => is_inside(record, self.layout.data, self.layout.capacity),
            _ => false,
        }
    }

    fn read_slot(&self, slot: u32) -> Result<Slot, Error> {
        let mut bytes = [0; record::LEN];
        self.mapping
            .read_into(self.layout.record(slot), &mut bytes)?;
        let seed = record::seed(&self.superblock.uuid, slot);
        Ok(Record::decode(&bytes, seed))
    }

    /// Reads and verifies every payload.
    ///
    /// `progress` gets the bytes read so far and the total, and returns false to stop.
    ///
    /// # Errors
    ///
    /// [`Error::Media`] if the medium cannot be read.
    pub fn verify(
        &self,
        copier: &Copier,
        mut progress: impl FnMut(u64, u64) -> bool,
    ) -> Result<Verified, Error> {
        /// Payload bytes checked between two calls of `progress`.
        const STEP: u64 = 64 << 20;
        let (blocks, damaged_records) = self.blocks()?;
        let total = blocks.iter().map(|block| block.record.len).sum();
        let mut verified = Verified {
            blocks: blocks.len() as u64,
            damaged_records,
            ..Verified::default()
        };
        let mut rest = blocks.as_slice();
        let mut read = 0;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |block: &&Listed| {
                bytes += block.record.len;
                bytes <= STEP
            };
            let count = rest.iter().take_while(fits).count().max(1);
            let (now, later) = rest.split_at(count);
            rest = later;
            self.verify_some(copier, now, &mut verified)?;
            read += now.iter().map(|block| block.record.len).sum::<u64>();
            if !progress(read, total) {
                break;
            }
        }
        Ok(verified)
    }

    fn verify_some(
        &self,
        copier: &Copier,
        blocks: &[Listed],
        verified: &mut Verified,
    ) -> Result<(), Error> {
        let mut verdicts = Verdicts::new(Bytes::Verified, blocks.len());
        let mut batch = copier.batch();
        for (tag, block) in blocks.iter().enumerate() {
            if self.plan(&mut batch, &block.record, tag as u32)? {
                verdicts.planned(tag, block.record.parts.into());
            }
        }
        let moved = verdicts.of_batch(batch, copier).all();
        let sound = moved.iter().map(|moved| matches!(moved, Moved::Done(_)));
        for (block, sound) in blocks.iter().zip(sound) {
            if sound {
                verified.sound += 1;
            } else if self.still_there(block)? {
                verified.bad.push(block.clone());
            } else {
                verified.changed += 1;
            }
        }
        Ok(())
    }

    /// Plans the reading of one block's parts; false for one that cannot be read whole.
    fn plan(&self, batch: &mut Batch, block: &Record, tag: u32) -> Result<bool, Error> {
        let Record {
            identity,
            extents,
            len,
            parts: count,
            checksum,
            ..
        } = block;
        let Some(found) = parts::read(&self.mapping, identity, extents, *len, *count, *checksum)
        else {
            return Ok(false);
        };
        let mut source = Vec::new();
        for (number, part) in found.iter().enumerate() {
            let id = parts::part_id(identity, number as u32, *count);
            let range = (part.offset, part.len);
            // Beyond the end of a truncated medium.
            if parts::buffers(&self.mapping, extents, range, &mut source).is_err() {
                return Ok(false);
            }
            batch.hash_only(&id, &source, Some(part.checksum), tag)?;
        }
        Ok(true)
    }

    /// Whether a block's record is what it was: beside a running owner a bad payload may be one
    /// that was evicted meanwhile.
    fn still_there(&self, block: &Listed) -> Result<bool, Error> {
        // The payload was read before: the record must not be read ahead of it.
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        Ok(self.read_slot(block.slot)? == Slot::Used(block.record))
    }
}
