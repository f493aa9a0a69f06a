//! Blocks of a directory: found, made, published and removed, by threads that may wait for the
//! file system.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdepot_arena::format::file_header::{LEN, SUMS_MAX};
use kvdepot_arena::{
    Cause, Durability, Error, Full, Identity, NamespaceId, Refused, Reserved, Token, Wanted, clock,
};
use kvdepot_host::EachMinute;
use kvdepot_media::{Checksum, PART_LEN_MAX};

use super::collect::{Collector, Wants};
use super::described;
use super::folder::{Folder, Kept};
use super::losses::{Losses, Why};
use super::name::{identity_of, room_of};
use super::open::Open;
use super::pinned::Pinned;
use super::usage::Usage;
use crate::tier::contract::{NamespacePage, NamespaceUsage};
use crate::tier::eviction_limit::EvictionLimit;
use crate::tier::filter::Filter;
use crate::tier::late::Progress;
use crate::tier::slots::Permits;

/// Files that are looked at for one page of namespaces: far ones take some milliseconds each.
const PAGE_LOOKS: usize = 1024;

/// Most collections that it waits for: each looks at all files.
const COLLECTIONS: usize = 16;

/// What its threads use.
pub(super) struct Common {
    pub(super) name: &'static str,
    pub(super) number: u32,
    pub(super) durability: Durability,
    pub(super) folder: Arc<Folder>,
    pub(super) usage: Arc<Usage>,
    pub(super) collector: Collector,
    pub(super) filter: Arc<Filter<()>>,
    pub(super) losses: Arc<Losses>,
    pub(super) open: Arc<Open>,
    /// Longest wait of a put for space that a collection frees.
    pub(super) for_space: Duration,
    pub(super) limit: EvictionLimit,
    pub(super) stored: [AtomicU64; 2],
    /// Which blocks that are not stored are logged.
    pub(super) refusals: EachMinute,
    pub(super) failed_reads: EachMinute,
    pub(super) full: AtomicU64,
}

/// Whether a file system has no room for what was asked.
fn is_full(error: &Error) -> bool {
    let kind = match error {
        Error::Io { source, .. } => Some(source.kind()),
        Error::Host(error) => error.io_kind(),
        _ => None,
    };
    matches!(
        kind,
        Some(ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
    )
}

impl Common {
    /// Whether a file has the block's name; what it holds is seen when it is read.
    pub(super) fn has(&self, name: &Identity) -> bool {
        self.folder.has(name).unwrap_or_else(|error| {
            self.warn_of_read(&error);
            false
        })
    }

    /// Opens a block's file and pins it. It is the one at `index` of a call.
    pub(super) fn find(&self, name: &Identity, used: Option<i64>, slot: Permits) -> Option<Pinned> {
        let (_, turn) = self.filter.of(std::iter::empty());
        let found = self.open.adopt(name, used, slot);
        let place = found.unwrap_or_else(|error| {
            self.warn_of_read(&error);
            None
        });
        let pin = place.map(|place| Pinned::new(&self.open, place));
        let found = pin.as_ref().map(|_| ());
        self.filter.note_answers([(*name, found)].into_iter(), turn);
        pin
    }

    /// Makes room for a block, and its file.
    pub(super) fn make(
        &self,
        namespace: NamespaceId,
        (wanted, finds_room): (&Wanted, bool),
        slot: Option<Permits>,
    ) -> Result<Reserved, Refused> {
        let Some(mut slot) = slot else {
            return Err(self.no_slot(wanted));
        };
        let name = Identity {
            namespace,
            key: wanted.key,
        };
        let nowhere = Token {
            device: self.number,
            slot: 0,
            sequence: 0,
        };
        if wanted.len > self.block_max() {
            // Nothing goes for what can never be stored.
            let most = self.block_max();
            return Err(self.full(wanted, Cause::Large { most }));
        }
        let lasts = self.durability == Durability::Power;
        let proven = self.open.has_keys();
        if proven && (!self.open.proves(namespace) || usize::from(wanted.parts) > SUMS_MAX) {
            // There would be no MACs, or no room for them.
            return Err(Refused::Declined);
        }
        match self.folder.keeps(&name, (lasts, proven)) {
            Ok(Kept::Nothing) => {}
            Ok(Kept::Block) => return Err(Refused::Present(nowhere)),
            Ok(Kept::Strange) => return Err(Refused::Declined),
            Err(error) => return Err(self.fails(&error)),
        }
        let Some(mut making) = self.open.begin(name) else {
            return Err(Refused::Reserved(nowhere));
        };
        let bytes = room_of(LEN as u64 + wanted.len);
        let epoch = self.usage.epoch();
        let until = clock::now() + self.for_space;
        // The tiers after this one have what it evicts, if it is not the last one.
        let limit = match self.limit.is_last() {
            true => self.open.limit_of(wanted.stamp),
            false => i64::MAX,
        };
        self.collector.set_limit(limit);
        let wants = Wants {
            needed: bytes,
            lacking: 0,
            limit,
        };
        let taken = match self.may_evict_for(wanted) {
            _ if !finds_room => Ok(false),
            true => self.usage.take(bytes).and_then(|taken| match taken {
                true => Ok(true),
                false => self.take_when_collected(wants, until),
            }),
            false => self.take_spare_when_counted(wants, until),
        };
        match taken {
            Ok(true) => {}
            Ok(false) => {
                return Err(self.no_space(wanted));
            }
            Err(error) => return Err(self.refuse(&error)),
        }
        let mut made = making.create(wanted, epoch, &mut slot);
        if let Err(error) = &made
            && is_full(error)
        {
            // The file system is, before the directory has its capacity.
            let left = until.saturating_duration_since(clock::now());
            let wants = Wants {
                needed: 0,
                lacking: bytes,
                limit,
            };
            let _is_left = self.collector.make_room(wants, left);
            made = making.create(wanted, epoch, &mut slot);
        }
        self.usage.settle(bytes);
        if self.usage.is_nearly_full() {
            self.collector.wake();
        }
        made.map_err(|error| {
            self.usage.give_back(bytes, epoch);
            self.fails(&error)
        })
    }

    /// Whether each of these blocks, in prefix order, may be stored: by eviction, or in spare
    /// space, of which a prompt's prefix gets some before its suffix.
    pub(super) fn find_room(&self, blocks: &[Wanted]) -> Vec<bool> {
        // A directory that nobody has counted yet counts as full.
        let is_unknown = self.usage.seen() >= self.usage.capacity();
        let mut spare = self.usage.spare();
        let finds = |wanted: &Wanted| {
            let left = spare.checked_sub(room_of(LEN as u64 + wanted.len));
            spare = left.unwrap_or(0);
            left.is_some() || self.may_evict_for(wanted) || is_unknown
        };
        blocks.iter().map(finds).collect()
    }

    pub(super) fn no_space(&self, wanted: &Wanted) -> Refused {
        let capacity = self.usage.capacity();
        let free = capacity.saturating_sub(self.usage.seen());
        let cause = match self.may_evict_for(wanted) {
            true => Cause::Space { free, capacity },
            false => Cause::Limit,
        };
        self.full(wanted, cause)
    }

    /// Notes the sizes of the prompts that these blocks are of.
    pub(super) fn note_sizes(&self, blocks: &[Wanted]) {
        self.limit.note(self.usage.capacity(), blocks);
    }

    fn may_evict_for(&self, wanted: &Wanted) -> bool {
        self.limit.allows(self.usage.capacity(), wanted)
    }

    /// A block takes no more than a part of the capacity, so that what goes for one is bounded.
    pub(super) fn block_max(&self) -> u64 {
        (self.usage.capacity() / 8).min(PART_LEN_MAX)
    }

    /// All files that the tier may open are in use.
    pub(super) fn no_slot(&self, wanted: &Wanted) -> Refused {
        let most = self.open.slots.most() as u64;
        self.full(wanted, Cause::Files { most })
    }

    pub(super) fn full(&self, wanted: &Wanted, cause: Cause) -> Refused {
        self.full.fetch_add(1, Ordering::Relaxed);
        Refused::Full(Full {
            tier: self.name,
            requested: wanted.len,
            cause,
        })
    }

    /// Takes room that a collection makes. Others take of it too, so that it may need several.
    fn take_when_collected(&self, wants: Wants, until: Instant) -> Result<bool, Error> {
        for _ in 0..COLLECTIONS {
            let left = until.saturating_duration_since(clock::now());
            if left.is_zero() {
                break;
            }
            let is_left = self.collector.make_room(wants, left);
            let taken = self.usage.take(wants.needed)?;
            if taken || !is_left {
                return Ok(taken);
            }
        }
        Ok(false)
    }

    fn take_spare_when_counted(&self, wants: Wants, until: Instant) -> Result<bool, Error> {
        if let Some(taken) = self.usage.take_spare(wants.needed)? {
            return Ok(taken);
        }
        let left = until.saturating_duration_since(clock::now());
        let _is_left = self.collector.make_room(wants, left);
        Ok(self.usage.take_spare(wants.needed)?.unwrap_or(false))
    }

    /// What cannot be stored now can be later, where somebody has removed the directory.
    pub(super) fn fails(&self, error: &Error) -> Refused {
        self.collector.open_again();
        self.refuse(error)
    }

    pub(super) fn refuse(&self, error: &Error) -> Refused {
        self.warn(&self.refusals, error, "cannot store a block");
        Refused::Declined
    }

    fn warn_of_read(&self, error: &Error) {
        self.warn(
            &self.failed_reads,
            error,
            "cannot read a block file; the block is a miss",
        );
    }

    fn warn(&self, warned: &EachMinute, error: &Error, what: &str) {
        if let Some(unsaid) = warned.may_say() {
            let path = self.folder.path.display();
            tracing::warn!(%error, %path, unsaid, "{what}");
        }
    }

    pub(super) fn publish(&self, reserved: Reserved, checksum: Checksum, pinned: bool) -> bool {
        let (name, len) = (reserved.identity, reserved.len);
        let lasts = self.durability == Durability::Power;
        match self.open.publish(reserved, checksum, pinned, lasts) {
            Ok(true) => {
                self.filter.note(name, Some(()));
                if let Some(time) = self.open.used_at(&name) {
                    self.collector.note_stored(&name, time);
                }
                self.stored[0].fetch_add(1, Ordering::Relaxed);
                let room = room_of(LEN as u64 + len);
                self.stored[1].fetch_add(room, Ordering::Relaxed);
                true
            }
            Ok(false) => false,
            Err(error) => {
                self.warn(&self.refusals, &error, "cannot store a block");
                false
            }
        }
    }

    /// Removes a block's file: the one of that number, or whichever has its name.
    pub(super) fn remove(&self, name: &Identity, inode: Option<u64>, why: Why) -> bool {
        let len = self.losses.len_of(&self.folder, name);
        let gone = self.folder.remove(name, inode);
        let gone = gone.unwrap_or_else(|error| {
            tracing::warn!(%error, key = %name.key,
                "cannot delete the file of a block; its space stays in use");
            None
        });
        let Some(bytes) = gone else {
            // Another file than that one may have its name by now.
            if inode.is_none() {
                self.filter.note(*name, None);
            }
            return false;
        };
        self.losses.went(name, why, bytes, len);
        if let Err(error) = self.usage.freed(bytes) {
            tracing::debug!(%error, "usage is corrected at the next eviction");
        }
        true
    }

    /// What some folders have of each namespace, by the lengths of files; with the first of them
    /// what namespaces are.
    pub(super) fn shares(&self, first: u32, progress: &Progress) -> Result<NamespacePage, Error> {
        let mut found = HashMap::<NamespaceId, NamespaceUsage>::new();
        if first == 0 {
            for (id, text) in described::descriptions(&self.folder.dir(), progress)? {
                let usage = NamespaceUsage::described(id, Some(text));
                found.insert(id, usage);
            }
        }
        let (mut next, mut looks) = (first, 0);
        while next < self.folder.folders() && looks < PAGE_LOOKS {
            let folder = self.folder.folder(next)?;
            next += 1;
            let Some(folder) = folder else { continue };
            for name in folder.names()? {
                looks += 1;
                progress.made();
                let Some(id) = identity_of(&name).map(|one| one.namespace) else {
                    continue;
                };
                if let Some(seen) = folder.look(&name)? {
                    let usage = found.entry(id);
                    let usage = usage.or_insert_with(|| NamespaceUsage::described(id, None));
                    usage.blocks += 1;
                    usage.bytes += seen.len.saturating_sub(LEN as u64);
                }
            }
        }
        let is_last = next >= self.folder.folders();
        Ok((
            found.into_values().collect(),
            (!is_last).then_some(u64::from(next)),
        ))
    }

    /// The blocks of a namespace in a folder, with the lengths of their files.
    pub(super) fn names(
        &self,
        number: u32,
        namespace: NamespaceId,
    ) -> Result<Vec<Identity>, Error> {
        let Some(folder) = self.folder.folder(number)? else {
            return Ok(Vec::new());
        };
        let mut found = Vec::new();
        for name in folder.names()? {
            let identity = identity_of(&name).filter(|one| one.namespace == namespace);
            found.extend(identity);
        }
        Ok(found)
    }
}
