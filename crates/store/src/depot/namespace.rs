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

/// One namespace of a depot, with the operations on its blocks.
///
/// Clones share the namespace. Keys of a call are in the order of a prompt.
///
/// # Examples
///
/// ```
/// use kvdepot_store::{BlockBuffers, Buffer, Config, Depot, Key, NamespaceSpec};
/// use serde_json::json;
///
/// let config = Config::new("Cache", &json!({"cache": {"capacity": "1MiB"}}))?;
/// let depot = Depot::open(&config)?;
/// let blocks = depot.namespace(&NamespaceSpec {
///     model: "llama-3-8b".into(),
///     dtype: "bfloat16".into(),
///     block_tokens: 16,
///     ..NamespaceSpec::default()
/// })?;
///
/// let keys: Vec<Key> = (1..=3).map(|number| Key([number; 32])).collect();
/// let stored = [0, 1].map(|_| Buffer::from_vec(vec![7; 4096]));
/// blocks.put(keys[..2].to_vec(), BlockBuffers::whole(stored))?.wait(None)?;
/// assert_eq!(blocks.contains(&keys)?, [true, true, false]);
/// // The number of blocks that an engine need not compute.
/// assert_eq!(blocks.prefix(&keys)?, 2);
/// assert_eq!(blocks.nearest(&keys)?, [Some("Cache"), Some("Cache"), None]);
/// assert_eq!(blocks.remove(&keys)?, 2);
/// # Ok::<(), kvdepot_store::Error>(())
/// ```
#[derive(Clone)]
pub struct Namespace {
    verbs: Arc<dyn Verbs>,
    id: NamespaceId,
}

impl Namespace {
    pub(super) fn new(verbs: Arc<dyn Verbs>, id: NamespaceId) -> Namespace {
        Namespace { verbs, id }
    }

    /// Returns the digest of the namespace.
    #[must_use]
    pub fn id(&self) -> NamespaceId {
        self.id
    }

    /// Returns true if another process answers the calls.
    #[must_use]
    pub fn is_served(&self) -> bool {
        self.verbs.is_served()
    }

    /// Returns true if another thread is using the index, so that [`Namespace::unpin`] would wait.
    ///
    /// In a client it is always true.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.verbs.is_busy()
    }

    /// Returns for each key whether its block is stored in some tier.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`].
    pub fn contains(&self, keys: &[Key]) -> Result<Vec<bool>, Error> {
        self.verbs.contains(self.id, keys)
    }

    /// Looks up each key without waiting for asynchronous tiers.
    ///
    /// The outcome of a key is `Done` if its block is stored in some tier, and `Miss` otherwise. It
    /// is also `Miss` if a tier does not respond within `lookup_timeout`.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`].
    pub fn lookup(&self, keys: &[Key]) -> Result<Task, Error> {
        self.verbs.lookup(self.id, keys)
    }

    /// Returns the number of consecutive keys, from the first, whose blocks are stored.
    ///
    /// An engine can skip the computation of these blocks.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`].
    pub fn prefix(&self, keys: &[Key]) -> Result<usize, Error> {
        self.verbs.prefix(self.id, keys)
    }

    /// Returns for each key the name of the first tier that has its block.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`].
    pub fn nearest(&self, keys: &[Key]) -> Result<Vec<Option<&str>>, Error> {
        let about = self.verbs.about();
        let tiers = self.verbs.nearest(self.id, keys)?;
        let name = |tier: usize| about.tiers.get(tier).map(String::as_str);
        Ok(tiers.into_iter().map(|tier| tier.and_then(name)).collect())
    }

    /// Returns for each key the payload bytes of its block in a tier that acknowledges puts.
    ///
    /// The result is `None` if only tiers before have the block: there it does not survive the
    /// process. The call counts as a use of each block that it finds.
    ///
    /// # Errors
    ///
    /// * [`Error::Closed`].
    /// * [`Error::Peer`] in a client whose server is of a release without this call.
    pub fn acknowledged(&self, keys: &[Key]) -> Result<Vec<Option<u64>>, Error> {
        self.verbs.acknowledged(self.id, keys)
    }

    /// Stores blocks; keys are in prefix order. [`Task`] describes the two milestones.
    ///
    /// # Errors
    ///
    /// * [`Error::Input`] for wrong arguments, before a byte is copied.
    /// * [`Error::Closed`].
    pub fn put(&self, keys: Vec<Key>, buffers: BlockBuffers) -> Result<Task, Error> {
        self.put_after(None, keys, buffers)
    }

    /// Stores blocks like [`Namespace::put`] that continue the prompt of the block `after`.
    ///
    /// A prompt far larger than usual evicts few blocks at first. Without `after`, the blocks of a
    /// call count as a separate prompt.
    ///
    /// # Errors
    ///
    /// Those of [`Namespace::put`].
    pub fn put_after(
        &self,
        after: Option<Key>,
        keys: Vec<Key>,
        buffers: BlockBuffers,
    ) -> Result<Task, Error> {
        self.verbs.put(self.id, after, keys, buffers)
    }

    /// Copies blocks into the caller's buffers; keys are in prefix order.
    ///
    /// # Errors
    ///
    /// * [`Error::Input`] for wrong arguments, before a byte is copied.
    /// * [`Error::Closed`].
    pub fn get(&self, keys: Vec<Key>, buffers: BlockBuffers) -> Result<Task, Error> {
        self.get_with(keys, buffers, GetOptions::default())
    }

    /// Copies blocks like [`Namespace::get`], with options.
    ///
    /// # Errors
    ///
    /// Those of [`Namespace::get`], and [`Error::Media`] if there is no memory for the staging
    /// buffer.
    pub fn get_with(
        &self,
        keys: Vec<Key>,
        buffers: BlockBuffers,
        options: GetOptions,
    ) -> Result<Task, Error> {
        self.verbs.get(self.id, keys, buffers, options)
    }

    /// Promotes the consecutive hits from the first key to the first tier, in the background.
    ///
    /// Keys are in prefix order. The result of a key is true when its block is in the first tier;
    /// the other keys are misses.
    ///
    /// Prefetched blocks that no call has read, for at most 10 seconds, together have at most half
    /// of the first tier. The outcome of further keys is `Dropped`, and they can be prefetched
    /// again.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`].
    pub fn prefetch(&self, keys: &[Key]) -> Result<Task, Error> {
        self.verbs.prefetch(self.id, keys)
    }

    /// Removes blocks from every tier.
    ///
    /// Returns the number of keys that were stored in at least one tier. A repeated key counts
    /// once.
    ///
    /// # Errors
    ///
    /// * [`Error::Closed`].
    /// * [`Error::Peer`] in a client without a server: all blocks are still stored.
    /// * [`Error::Silent`] if an asynchronous tier does not respond: it may still have the blocks.
    pub fn remove(&self, keys: &[Key]) -> Result<usize, Error> {
        self.verbs.remove(self.id, keys)
    }

    /// Returns the blocks of the namespace, in the order of the keys, with the size of each in
    /// bytes.
    ///
    /// Blocks that are stored or removed during the call may be missing or present.
    ///
    /// # Errors
    ///
    /// * [`Error::Closed`].
    /// * [`Error::Silent`] if an asynchronous tier does not respond.
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

    /// Returns a page of at most `limit` blocks, and never more than [`PAGE_MAX`].
    ///
    /// `from` is the end of the previous page, or `None` for the first page. The blocks are
    /// unordered. A block that is in two tiers, or moves between devices, may occur twice. A page
    /// may be empty and have a next one. Every block that is stored during the whole listing
    /// occurs.
    ///
    /// # Errors
    ///
    /// * [`Error::Input`] if `limit` is 0.
    /// * [`Error::Closed`].
    /// * [`Error::Silent`] if an asynchronous tier does not respond.
    pub fn blocks_page(&self, from: Option<Cursor>, limit: usize) -> Result<BlockPage, Error> {
        if limit == 0 {
            return Err(Error::input("limit", limit, "a whole number, 1 or more"));
        }
        let limit = limit.min(PAGE_MAX);
        self.verbs.block_page(self.id, from, limit)
    }

    /// Removes every block of the namespace from every tier.
    ///
    /// Returns the number of blocks that were stored in at least one tier.
    ///
    /// # Errors
    ///
    /// Those of [`Namespace::remove`].
    pub fn clear(&self) -> Result<usize, Error> {
        self.verbs.clear(self.id)
    }

    /// Declares a group: each tier keeps and evicts its blocks together while the value exists.
    ///
    /// The blocks may be stored already, or later.
    ///
    /// # Errors
    ///
    /// Those of [`Group::add`].
    pub fn group(&self, keys: &[Key], class: Class) -> Result<Group, Error> {
        Group::new(&self.verbs, self.id, keys, class)
    }

    /// Reserves space for blocks, in prefix order.
    ///
    /// Each block has a key and the lengths of its parts in bytes. The result of a key is `None` in
    /// each of these cases:
    ///
    /// * The block is stored already, or another call is writing it. After a removal, a copy
    ///   between tiers that is still in progress counts as such a call.
    /// * The block is rejected (`admission`), or finds no space.
    ///
    /// # Errors
    ///
    /// * [`Error::Input`] for wrong arguments.
    /// * [`Error::Closed`].
    pub fn reserve(&self, blocks: &[(Key, Vec<u64>)]) -> Result<Vec<Option<Reservation>>, Error> {
        self.reserve_after(None, blocks, NoRoom::Skip)
    }

    /// Reserves space like [`Namespace::reserve`], up to the first block that is rejected or finds
    /// no space.
    ///
    /// The result ends before that block. Lookups of the prompt would never reach the blocks after
    /// it.
    ///
    /// # Errors
    ///
    /// * [`Error::Input`] for wrong arguments.
    /// * [`Error::Closed`].
    pub fn reserve_prefix(
        &self,
        blocks: &[(Key, Vec<u64>)],
    ) -> Result<Vec<Option<Reservation>>, Error> {
        self.reserve_after(None, blocks, NoRoom::Stop)
    }

    /// Reserves space like [`Namespace::reserve`] for blocks that continue the prompt of the block
    /// `after`.
    ///
    /// [`Namespace::put_after`] describes `after`; `no_room` selects the result if a block finds no
    /// space.
    ///
    /// # Errors
    ///
    /// Those of [`Namespace::reserve`], and [`Error::Full`] with [`NoRoom::Fail`].
    pub fn reserve_after(
        &self,
        after: Option<Key>,
        blocks: &[(Key, Vec<u64>)],
        no_room: NoRoom,
    ) -> Result<Vec<Option<Reservation>>, Error> {
        self.verbs.reserve(self.id, after, blocks, no_room)
    }

    /// Reserves space like [`Namespace::reserve`]; a block that finds no space is an error.
    ///
    /// After an error, the call has released all of its reservations.
    ///
    /// # Errors
    ///
    /// * [`Error::Full`] if a block finds no space.
    /// * [`Error::Input`] for wrong arguments.
    /// * [`Error::Closed`].
    pub fn reserve_strict(
        &self,
        blocks: &[(Key, Vec<u64>)],
    ) -> Result<Vec<Option<Reservation>>, Error> {
        self.reserve_after(None, blocks, NoRoom::Fail)
    }

    /// Publishes reservations whose bytes are in place.
    ///
    /// `checksums` has a list per reservation, with one checksum per part. The result of a
    /// reservation is true if its block is stored.
    ///
    /// # Errors
    ///
    /// * [`Error::Input`] for wrong arguments.
    /// * [`Error::Closed`].
    pub fn commit(
        &self,
        reservations: &[Reservation],
        checksums: &[Vec<Checksum>],
    ) -> Result<Vec<bool>, Error> {
        if reservations.len() != checksums.len() {
            return Err(Error::input(
                "checksums",
                format!(
                    "{} lists for {} reservations",
                    checksums.len(),
                    reservations.len()
                ),
                "one list per reservation",
            ));
        }
        self.verbs.commit(reservations, checksums)
    }

    /// Releases reservations.
    ///
    /// Every worker that had one of their placements must have stopped.
    pub fn abort(&self, reservations: &[Reservation]) {
        self.verbs.abort(reservations);
    }

    /// Pins blocks, each in the first tier that has it. The result of a miss is `None`.
    ///
    /// If `prefix` is true, blocks after the first miss are not pinned.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`].
    pub fn pin(&self, keys: &[Key], prefix: bool) -> Result<Vec<Option<Pin>>, Error> {
        self.verbs.pin(self.id, keys, prefix)
    }

    /// Releases pins, in prefix order.
    ///
    /// If `served` is true, the caller has used the bytes: they count as hits, and blocks of lower
    /// tiers are promoted.
    pub fn unpin(&self, pins: &[Pin], served: bool) {
        self.verbs.unpin(pins, served);
    }

    /// Unpublishes pinned blocks that failed verification, each in the tier where it is pinned.
    ///
    /// Returns the number of blocks. The pins remain.
    pub fn discard(&self, pins: &[Pin]) -> usize {
        self.verbs.discard(pins)
    }
}
