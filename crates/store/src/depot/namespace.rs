//! Namespaces: the verbs on blocks.

use kvdepot_arena::{Error, Key, NamespaceId};
use kvdepot_media::Checksum;

use super::At;
use crate::buffers::BlockBuffers;
use crate::listing::{BlockPage, Cursor, PAGE_MAX};
use crate::pipeline::{GetOptions, NoRoom, Pin, Reservation};
use crate::task::Task;

/// One namespace of a depot.
#[derive(Clone)]
pub struct Namespace {
    at: At,
    id: NamespaceId,
}

impl Namespace {
    pub(super) fn new(at: At, id: NamespaceId) -> Namespace {
        Namespace { at, id }
    }

    /// Its digest.
    #[must_use]
    pub fn id(&self) -> NamespaceId {
        self.id
    }

    /// Whether another process answers its calls.
    #[must_use]
    pub fn is_served(&self) -> bool {
        matches!(self.at, At::There(_))
    }

    /// Whether somebody is at work in the index now, so that ending pins would wait.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        match &self.at {
            At::Here(inner) => inner.core.is_busy(),
            At::There(_) => true,
        }
    }

    /// Whether each key's block is stored in some tier.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn contains(&self, keys: &[Key]) -> Result<Vec<bool>, Error> {
        match &self.at {
            At::Here(inner) => inner.core.contains(self.id, keys),
            At::There(client) => client.contains(self.id, keys),
        }
    }

    /// How many of the first keys are stored without a gap: what an engine can skip.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn prefix(&self, keys: &[Key]) -> Result<usize, Error> {
        match &self.at {
            At::Here(inner) => inner.core.prefix(self.id, keys),
            At::There(client) => client.prefix(self.id, keys),
        }
    }

    /// The nearest tier that has each key's block.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn nearest(&self, keys: &[Key]) -> Result<Vec<Option<&str>>, Error> {
        let (about, tiers) = match &self.at {
            At::Here(inner) => (&inner.about, inner.core.nearest(self.id, keys)?),
            At::There(client) => (client.about(), client.nearest(self.id, keys)?),
        };
        let name = |tier: usize| about.tiers.get(tier).map(String::as_str);
        Ok(tiers.into_iter().map(|tier| tier.and_then(name)).collect())
    }

    /// Stores blocks; keys in prefix order. See [`Task`] for the two milestones.
    ///
    /// # Errors
    /// [`Error::Input`] before a byte moves, [`Error::Closed`].
    pub fn put(&self, keys: Vec<Key>, buffers: BlockBuffers) -> Result<Task, Error> {
        match &self.at {
            At::Here(inner) => inner.core.put(self.id, keys, buffers),
            At::There(client) => client.put(self.id, keys, buffers),
        }
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
        match &self.at {
            At::Here(inner) => inner.core.get(self.id, keys, buffers, options),
            At::There(client) => client.get(self.id, keys, buffers, options),
        }
    }

    /// Brings the consecutive hits from the first key into the near tier, in the background;
    /// keys in prefix order. True for a key once its block is there; the rest are misses.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn prefetch(&self, keys: &[Key]) -> Result<Task, Error> {
        match &self.at {
            At::Here(inner) => inner.core.prefetch(self.id, keys, None),
            At::There(client) => client.prefetch(self.id, keys),
        }
    }

    /// Removes blocks from every tier; how many were in one.
    ///
    /// # Errors
    /// [`Error::Closed`]; [`Error::Peer`] in a client without an owner: nothing was removed.
    pub fn remove(&self, keys: &[Key]) -> Result<usize, Error> {
        match &self.at {
            At::Here(inner) => inner.core.remove(self.id, keys),
            At::There(client) => client.remove(self.id, keys),
        }
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
        match &self.at {
            At::Here(inner) => inner.core.block_page(self.id, from, limit),
            At::There(client) => client.block_page(self.id, from, limit),
        }
    }

    /// Removes every block of the namespace from every tier; how many were in one.
    ///
    /// # Errors
    /// As [`Namespace::remove`].
    pub fn clear(&self) -> Result<usize, Error> {
        match &self.at {
            At::Here(inner) => inner.core.clear(self.id),
            At::There(client) => client.clear(self.id),
        }
    }

    /// Keeps every block of the namespace that is stored from now on in one extent, for engines
    /// whose own copy engine moves it: one address range a block.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn keep_contiguous(&self) -> Result<(), Error> {
        match &self.at {
            At::Here(inner) => inner.core.keep_contiguous(self.id),
            At::There(client) => client.keep_contiguous(self.id),
        }
    }

    /// Reserves room for blocks with parts of these lengths, in prefix order; `None` for a key
    /// that needs no writing (stored already, or being written), is declined (`admission`) or finds
    /// no room. Right after a block was removed, a copy of it that was on its way between tiers
    /// counts as being written until it is given up.
    ///
    /// # Errors
    /// [`Error::Input`], [`Error::Closed`].
    pub fn reserve(&self, blocks: &[(Key, Vec<u64>)]) -> Result<Vec<Option<Reservation>>, Error> {
        self.reserve_as(blocks, NoRoom::Skip)
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
        self.reserve_as(blocks, NoRoom::Stop)
    }

    /// As [`Namespace::reserve`], with a full tier as an error. Nothing stays reserved then.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Input`], [`Error::Closed`].
    pub fn reserve_strict(
        &self,
        blocks: &[(Key, Vec<u64>)],
    ) -> Result<Vec<Option<Reservation>>, Error> {
        self.reserve_as(blocks, NoRoom::Fail)
    }

    fn reserve_as(
        &self,
        blocks: &[(Key, Vec<u64>)],
        no_room: NoRoom,
    ) -> Result<Vec<Option<Reservation>>, Error> {
        match &self.at {
            At::Here(inner) => inner.core.reserve(inner.holder(), self.id, blocks, no_room),
            At::There(client) => client.reserve(self.id, blocks, no_room),
        }
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
        match &self.at {
            At::Here(inner) => {
                let session = inner.about.session;
                if let Some(other) = reservations
                    .iter()
                    .find(|mine| mine.holder.session != session)
                {
                    return Err(Error::input(
                        "reservations",
                        format!("one of session {:x}", other.holder.session),
                        format!("reservations of this depot ({session:x})"),
                    ));
                }
                inner.core.commit(reservations, checksums)
            }
            At::There(client) => client.commit(reservations, checksums),
        }
    }

    /// Gives reservations back. Every mover that had one of their placements must have stopped.
    pub fn abort(&self, reservations: &[Reservation]) {
        if self.owns(
            reservations
                .iter()
                .map(|reservation| reservation.holder.session),
        ) {
            match &self.at {
                At::Here(inner) => inner.core.abort(reservations),
                At::There(client) => client.abort(reservations),
            }
        }
    }

    /// Whether reservations or pins were made here. Those of another depot, or of the one that
    /// this process had open before, name other blocks. (A client tells by itself those of an
    /// owner that is gone.)
    fn owns(&self, mut sessions: impl Iterator<Item = u64>) -> bool {
        let At::Here(inner) = &self.at else {
            return true;
        };
        let other = sessions.find(|session| *session != inner.about.session);
        if let Some(session) = other {
            tracing::error!(
                session,
                "reservations or pins of another depot were handed in"
            );
        }
        other.is_none()
    }

    /// Pins blocks where they are nearest; `None` for a miss. With `prefix` nothing behind the
    /// first miss is pinned.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn pin(&self, keys: &[Key], prefix: bool) -> Result<Vec<Option<Pin>>, Error> {
        match &self.at {
            At::Here(inner) => inner.core.pin(inner.holder(), self.id, keys, prefix),
            At::There(client) => client.pin(self.id, keys, prefix),
        }
    }

    /// Ends pins, given in prefix order. `served` says that their bytes were used: it counts as
    /// hits, and far blocks are promoted.
    pub fn unpin(&self, pins: &[Pin], served: bool) {
        if self.owns(pins.iter().map(|pin| pin.holder.session)) {
            match &self.at {
                At::Here(inner) => inner.core.unpin(pins, served),
                At::There(client) => client.unpin(pins, served),
            }
        }
    }

    /// Unpublishes pinned blocks that did not verify, where they are pinned. The pins remain.
    pub fn discard(&self, pins: &[Pin]) -> usize {
        if !self.owns(pins.iter().map(|pin| pin.holder.session)) {
            return 0;
        }
        match &self.at {
            At::Here(inner) => inner.core.discard(pins),
            At::There(client) => client.discard(pins),
        }
    }
}
