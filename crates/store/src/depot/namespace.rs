//! Namespaces: the verbs on blocks.

use std::sync::Arc;

use kvdepot_arena::{Class, Error, Key, NamespaceId};
use kvdepot_media::Checksum;

use super::group::Group;
use super::verbs::Verbs;
use crate::buffers::BlockBuffers;
use crate::listing::{BlockPage, Cursor, PAGE_MAX};
use crate::pipeline::{GetOptions, NoRoom, Pin, Reservation};
use crate::task::Task;

/// One namespace of a depot.
#[derive(Clone)]
pub struct Namespace {
    verbs: Arc<dyn Verbs>,
    id: NamespaceId,
}

impl Namespace {
    pub(super) fn new(verbs: Arc<dyn Verbs>, id: NamespaceId) -> Namespace {
        Namespace { verbs, id }
    }

    /// Its digest.
    #[must_use]
    pub fn id(&self) -> NamespaceId {
        self.id
    }

    /// Whether another process answers its calls.
    #[must_use]
    pub fn is_served(&self) -> bool {
        self.verbs.is_served()
    }

    /// Whether somebody is at work in the index now, so that ending pins would wait.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.verbs.is_busy()
    }

    /// Whether each key's block is stored in some tier.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn contains(&self, keys: &[Key]) -> Result<Vec<bool>, Error> {
        self.verbs.contains(self.id, keys)
    }

    /// Asks whether each key's block is stored in some tier, and does not wait for those that
    /// answer late: `Done` for what is stored, `Miss` for the rest, also where a tier does not
    /// answer within `lookup_timeout`.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn lookup(&self, keys: &[Key]) -> Result<Task, Error> {
        self.verbs.lookup(self.id, keys)
    }

    /// How many of the first keys are stored without a gap: what an engine can skip.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn prefix(&self, keys: &[Key]) -> Result<usize, Error> {
        self.verbs.prefix(self.id, keys)
    }

    /// The nearest tier that has each key's block.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn nearest(&self, keys: &[Key]) -> Result<Vec<Option<&str>>, Error> {
        let about = self.verbs.about();
        let tiers = self.verbs.nearest(self.id, keys)?;
        let name = |tier: usize| about.tiers.get(tier).map(String::as_str);
        Ok(tiers.into_iter().map(|tier| tier.and_then(name)).collect())
    }

    /// Payload bytes of each key's block in a tier that acknowledges puts; `None` where no such
    /// tier has it, whatever the tiers before have: there it does not outlive the process. A block
    /// that is found was used now.
    ///
    /// # Errors
    /// [`Error::Closed`]; [`Error::Peer`] in a client whose owner is of a release that knows no
    /// such question.
    pub fn acknowledged(&self, keys: &[Key]) -> Result<Vec<Option<u64>>, Error> {
        self.verbs.acknowledged(self.id, keys)
    }

    /// Stores blocks; keys in prefix order. See [`Task`] for the two milestones.
    ///
    /// # Errors
    /// [`Error::Input`] before a byte moves, [`Error::Closed`].
    pub fn put(&self, keys: Vec<Key>, buffers: BlockBuffers) -> Result<Task, Error> {
        self.put_after(None, keys, buffers)
    }

    /// As [`Namespace::put`], for blocks that continue the prompt of the block `after`. A prompt
    /// far larger than prompts usually are evicts little at first; without `after` a call's blocks
    /// count as a prompt of their own.
    ///
    /// # Errors
    /// As [`Namespace::put`].
    pub fn put_after(
        &self,
        after: Option<Key>,
        keys: Vec<Key>,
        buffers: BlockBuffers,
    ) -> Result<Task, Error> {
        self.verbs.put(self.id, after, keys, buffers)
    }

    /// Brings blocks back into the caller's buffers; keys in prefix order.
    ///
    /// # Errors
    /// [`Error::Input`] before a byte moves, [`Error::Closed`].
    pub fn get(&self, keys: Vec<Key>, buffers: BlockBuffers) -> Result<Task, Error> {
        self.get_with(keys, buffers, GetOptions::default())
    }

    /// As [`Namespace::get`], with options.
    ///
    /// # Errors
    /// As there, and [`Error::Media`] when there is no memory for the staging slab.
    pub fn get_with(
        &self,
        keys: Vec<Key>,
        buffers: BlockBuffers,
        options: GetOptions,
    ) -> Result<Task, Error> {
        self.verbs.get(self.id, keys, buffers, options)
    }

    /// Brings the consecutive hits from the first key into the near tier, in the background;
    /// keys in prefix order. True for a key once its block is there; the rest are misses.
    ///
    /// Prefetched blocks that no call has read, for at most 10 seconds, together have at most half
    /// of the first tier. The keys beyond end as dropped and may be prefetched again.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn prefetch(&self, keys: &[Key]) -> Result<Task, Error> {
        self.verbs.prefetch(self.id, keys)
    }

    /// Removes blocks from every tier; how many were in one.
    ///
    /// # Errors
    /// [`Error::Closed`]; [`Error::Peer`] in a client without an owner: nothing was removed.
    pub fn remove(&self, keys: &[Key]) -> Result<usize, Error> {
        self.verbs.remove(self.id, keys)
    }

    /// Its blocks, by key, with their bytes; in the order of the keys. Those that come or go while
    /// they are listed are among them or not.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn blocks(&self) -> Result<Vec<(Key, u64)>, Error> {
        let mut blocks = Vec::new();
        let mut from = None;
        loop {
            let page = self.blocks_page(from, PAGE_MAX)?;
            blocks.extend(page.blocks);
            from = page.next;
            if from.is_none() {
                break;
            }
        }
        blocks.sort_unstable();
        blocks.dedup_by_key(|(key, _)| *key);
        Ok(blocks)
    }

    /// Some of its blocks: at most `limit`, and never more than [`PAGE_MAX`], from where the page
    /// before ended; from the first one without `from`. They come in no order, and one that is in
    /// two tiers, or goes from one device to another meanwhile, may come twice. A page may be
    /// empty and still name a next one; every block that is there all the while comes.
    ///
    /// # Errors
    /// [`Error::Input`] for a `limit` of 0, [`Error::Closed`].
    pub fn blocks_page(&self, from: Option<Cursor>, limit: usize) -> Result<BlockPage, Error> {
        if limit == 0 {
            return Err(Error::input("limit", limit, "a number from 1"));
        }
        let limit = limit.min(PAGE_MAX);
        self.verbs.block_page(self.id, from, limit)
    }

    /// Removes every block of the namespace from every tier; how many were in one.
    ///
    /// # Errors
    /// As [`Namespace::remove`].
    pub fn clear(&self) -> Result<usize, Error> {
        self.verbs.clear(self.id)
    }

    /// Has these blocks kept and evicted as one for as long as the group is there: those that are
    /// stored, and those that will be.
    ///
    /// # Errors
    /// As [`Group::add`].
    pub fn group(&self, keys: &[Key], class: Class) -> Result<Group, Error> {
        Group::new(&self.verbs, self.id, keys, class)
    }

    /// Reserves room for blocks with parts of these lengths, in prefix order; `None` for a key
    /// that needs no writing (stored already, or being written), is declined (`admission`) or finds
    /// no room. Right after a block was removed, a copy of it that was on its way between tiers
    /// counts as being written until it is given up.
    ///
    /// # Errors
    /// [`Error::Input`], [`Error::Closed`].
    pub fn reserve(&self, blocks: &[(Key, Vec<u64>)]) -> Result<Vec<Option<Reservation>>, Error> {
        self.reserve_after(None, blocks, NoRoom::Skip)
    }

    /// As [`Namespace::reserve`], up to the first block that is declined or finds no room: the
    /// answer ends before it, and nothing behind it is reserved. Of a prompt nothing there would
    /// ever be found.
    ///
    /// # Errors
    /// [`Error::Input`], [`Error::Closed`].
    pub fn reserve_prefix(
        &self,
        blocks: &[(Key, Vec<u64>)],
    ) -> Result<Vec<Option<Reservation>>, Error> {
        self.reserve_after(None, blocks, NoRoom::Stop)
    }

    /// As [`Namespace::reserve`], for blocks that continue the prompt of the block `after`, as in
    /// [`Namespace::put_after`].
    ///
    /// # Errors
    /// As [`Namespace::reserve`], and [`Error::Full`] with [`NoRoom::Fail`].
    pub fn reserve_after(
        &self,
        after: Option<Key>,
        blocks: &[(Key, Vec<u64>)],
        no_room: NoRoom,
    ) -> Result<Vec<Option<Reservation>>, Error> {
        self.verbs.reserve(self.id, after, blocks, no_room)
    }

    /// As [`Namespace::reserve`], with a full tier as an error. Nothing stays reserved then.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Input`], [`Error::Closed`].
    pub fn reserve_strict(
        &self,
        blocks: &[(Key, Vec<u64>)],
    ) -> Result<Vec<Option<Reservation>>, Error> {
        self.reserve_after(None, blocks, NoRoom::Fail)
    }

    /// Publishes reservations whose bytes are in place; `checksums` has one a part of each.
    ///
    /// # Errors
    /// [`Error::Input`], [`Error::Closed`].
    pub fn commit(
        &self,
        reservations: &[Reservation],
        checksums: &[Vec<Checksum>],
    ) -> Result<Vec<bool>, Error> {
        if reservations.len() != checksums.len() {
            return Err(Error::input(
                "checksums",
                format!(
                    "{} for {} reservations",
                    checksums.len(),
                    reservations.len()
                ),
                "one list a reservation",
            ));
        }
        self.verbs.commit(reservations, checksums)
    }

    /// Gives reservations back. Every mover that had one of their placements must have stopped.
    pub fn abort(&self, reservations: &[Reservation]) {
        self.verbs.abort(reservations);
    }

    /// Pins blocks where they are nearest; `None` for a miss. With `prefix` nothing behind the
    /// first miss is pinned.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn pin(&self, keys: &[Key], prefix: bool) -> Result<Vec<Option<Pin>>, Error> {
        self.verbs.pin(self.id, keys, prefix)
    }

    /// Ends pins, given in prefix order. `served` says that their bytes were used: it counts as
    /// hits, and far blocks are promoted.
    pub fn unpin(&self, pins: &[Pin], served: bool) {
        self.verbs.unpin(pins, served);
    }

    /// Unpublishes pinned blocks that did not verify, where they are pinned. The pins remain.
    pub fn discard(&self, pins: &[Pin]) -> usize {
        self.verbs.discard(pins)
    }
}
