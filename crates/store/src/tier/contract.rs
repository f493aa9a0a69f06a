//! What a tier that is not made of arenas of this process is asked, and what it says of its bytes.

use std::sync::Arc;
use std::time::Duration;

use kvdepot_arena::parts::{self, Part};
use kvdepot_arena::{
    Arena, Class, Departed, Error, Key, Medium, NamespaceId, Place, Refused, Reserved, TierStats,
    Wanted,
};
use kvdepot_media::{Buffer, Checksum, Mac, MacKey};

use super::door::DoorKey;
use super::file::Directory;
use super::late::Reply;
use super::outside::Outside;
use crate::keyring::Keyring;

/// A namespace of a depot, and its usage of the last tier that has blocks of it and reports them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceUsage {
    /// Digest of the namespace.
    pub id: NamespaceId,
    /// Description on the medium, if it has space for one.
    pub description: Option<String>,
    /// Number of published blocks.
    pub blocks: u64,
    /// Payload in bytes; in a tier of files, the size of the files without their headers.
    pub bytes: u64,
}

impl NamespaceUsage {
    /// Creates the usage of an empty namespace.
    #[must_use]
    pub fn described(id: NamespaceId, description: Option<String>) -> NamespaceUsage {
        NamespaceUsage {
            id,
            description,
            blocks: 0,
            bytes: 0,
        }
    }
}

/// Parameters of a tier in addition to its settings.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Terms {
    /// Number of the tier in placements.
    pub number: u32,
    /// Maximum time to wait for answers, except those to lookups.
    pub timeout: Duration,
    /// Keys that authenticate blocks, if the depot has keys.
    ///
    /// A tier that ignores them trusts all processes that can write to its medium.
    pub keys: Option<Arc<Keyring>>,
    /// Maximum time to wait for answers to lookups.
    pub lookup: Duration,
    /// True if the tier is the last one of the pipeline.
    pub is_last: bool,
}

impl Terms {
    pub(crate) fn new(
        number: u32,
        (lookup, timeout): (Duration, Duration),
        keys: Option<Arc<Keyring>>,
        is_last: bool,
    ) -> Terms {
        Terms {
            number,
            timeout,
            keys,
            lookup,
            is_last,
        }
    }
}

/// Key and MACs that authenticate the parts of a block.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Proof {
    /// Key of the namespace.
    pub key: Arc<MacKey>,
    /// Expected MAC of each part; empty for a reserved block.
    pub macs: Vec<Mac>,
}

impl Proof {
    /// Creates a proof from the key of the namespace and the MACs of the parts.
    #[must_use]
    pub fn new(key: Arc<MacKey>, macs: Vec<Mac>) -> Proof {
        Proof { key, macs }
    }

    /// Whether each part of a block that is pinned has its MAC.
    pub(crate) fn is_of(&self, place: &Place) -> bool {
        self.macs.len() == usize::from(place.parts)
    }
}

/// An asynchronous tier: its operations return immediately and answer later through a [`Reply`].
///
/// The answer may come from any thread, or not at all: then a read is a miss, and a write is not
/// stored. Any thread may call an operation, and calls do not wait for each other.
///
/// The continuation of an answer runs on the answering thread and may call the tier again. The tier
/// holds none of its locks then.
pub trait Tier: Send + Sync {
    /// Returns the name of the tier in a pipeline.
    fn name(&self) -> &'static str;

    /// Returns true if committed blocks survive the process.
    fn lasts(&self) -> bool;

    /// Returns the maximum size of a block, in bytes.
    fn block_max(&self) -> u64;

    /// Returns the maximum number of blocks that one call pins or reserves at a time.
    ///
    /// Calls with more keys do so in steps. If all calls together can hold only few blocks, the
    /// tier returns an eighth of that number. New calls then find some that long-lived pins and
    /// reservations do not use.
    fn step_max(&self) -> usize {
        usize::MAX
    }

    /// Looks up which of these blocks the tier has.
    fn probe(&self, namespace: NamespaceId, keys: &[Key], reply: Reply<Vec<bool>>);

    /// Pins blocks that the tier has: each stays unchanged and readable until it is unpinned.
    ///
    /// The token of a [`Place`] identifies the pin. Its device is the number that the tier was
    /// opened with; the tier chooses the rest. The caller unpins blocks of an answer that comes too
    /// late. `used` has the stamp of each key's use, or is empty if the call is not a use of the
    /// blocks.
    fn pin(
        &self,
        namespace: NamespaceId,
        keys: &[Key],
        used: &[u64],
        reply: Reply<Vec<Option<Place>>>,
    );

    /// Records uses of blocks that an upper tier has, by keys and stamps.
    ///
    /// Blocks that this tier has too count as used at that time.
    fn note_used(&self, _namespace: NamespaceId, _used: &[(Key, u64)]) {}

    /// Releases pins.
    fn unpin(&self, places: &[Place]);

    /// Unpublishes pinned blocks that failed verification, and answers with their number.
    ///
    /// Their pins may end before the answer. After the answer, the block no longer answers a
    /// reservation of its key, and blocks that were put since stay.
    fn discard(&self, places: &[Place], reply: Reply<usize>);

    /// Reserves space for blocks, in prefix order, under names that lookups do not find.
    ///
    /// The tier chooses the blocks that it evicts for them.
    fn reserve(
        &self,
        namespace: NamespaceId,
        blocks: &[Wanted],
        reply: Reply<Vec<Result<Reserved, Refused>>>,
    );

    /// Publishes written blocks, each completely or not at all.
    ///
    /// A reservation that is dropped instead is released. If `pinned` is true, each published block
    /// is pinned under the token of its reservation.
    fn commit(&self, written: Vec<(Reserved, Checksum)>, pinned: bool, reply: Reply<Vec<bool>>);

    /// Removes blocks, and answers for each key whether the tier had its block.
    ///
    /// A copy of a block that was reserved before ([`Wanted::copy`]), or is being committed, is no
    /// longer published. Its commit answers that it is not stored.
    fn remove(&self, namespace: NamespaceId, keys: &[Key], reply: Reply<Vec<bool>>);

    /// Removes every block of a namespace and answers with their number.
    fn clear(&self, namespace: NamespaceId, reply: Reply<usize>);

    /// Lists some blocks of a namespace with their sizes in bytes.
    ///
    /// `from` is the mark at the end of the previous page; the first mark is 0.
    fn list(&self, namespace: NamespaceId, from: u64, limit: usize, reply: Reply<Page>);

    /// Records the description of a namespace.
    fn describe(&self, namespace: NamespaceId, description: &str);

    /// Lists some namespaces that have blocks here or were described.
    ///
    /// `from` is the mark at the end of the previous page; the first mark is 0. A namespace may be
    /// on several pages, each with other blocks. A tier that does not report namespaces answers
    /// with none.
    fn namespaces(&self, _from: u64, reply: Reply<NamespacePage>) {
        reply.answer(NamespacePage::default());
    }

    /// Returns name, size and location of the tier, for logs.
    fn about(&self) -> String {
        self.name().to_owned()
    }

    /// Returns the blocks that were removed since the last call of this listener, as far as this
    /// process knows.
    ///
    /// The tier records removals from the first call on, at most the last `limit`.
    fn departed(&self, _listener: u64, _limit: usize) -> Departed {
        Departed::default()
    }

    /// Stops recording removals for this listener.
    fn forget_listener(&self, _listener: u64) {}

    /// Adds blocks to group `number`: the tier keeps and evicts the blocks of a group together.
    ///
    /// The blocks may be stored already, or later. `class` is the eviction class of the whole
    /// group; `None` ends the group. A tier may order its blocks differently.
    fn group(&self, _number: u64, _namespace: NamespaceId, _keys: &[Key], _class: Option<Class>) {}

    /// Reads the credentials of the tier again, for connections that begin afterwards.
    ///
    /// # Errors
    ///
    /// The error of a credential that cannot be used. The tier keeps the credentials that it has.
    fn renew(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Returns usage and counters.
    fn stats(&self) -> TierStats;

    /// Returns access to the bytes of pinned and reserved blocks.
    fn ends(&self) -> Arc<dyn Ends>;

    /// Ends the requests in progress and releases the medium.
    ///
    /// All pins and reservations have ended before.
    fn close(&self);
}

/// Some namespaces with their usage, and the mark of the next page.
pub type NamespacePage = (Vec<NamespaceUsage>, Option<u64>);

/// Some blocks with their sizes in bytes, and the mark of the next page.
pub type Page = (Vec<(Key, u64)>, Option<u64>);

/// Access to the bytes of pinned and reserved blocks.
pub trait Ends: Send + Sync {
    /// Fills `ends` with the buffers of `len` bytes of a block's payload, from `offset` on.
    ///
    /// The vector belongs to the caller, which reuses it for many blocks.
    ///
    /// # Errors
    ///
    /// * [`Error::Media`] if the bytes are missing.
    /// * [`Error::Closed`] if the medium is closed.
    fn buffers(
        &self,
        place: &Place,
        offset: u64,
        len: u64,
        ends: &mut Vec<Buffer>,
    ) -> Result<(), Error>;

    /// Returns the parts of a pinned block from its part table, or `None` if the table fails
    /// verification.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] or [`Error::Media`] if the table cannot be read.
    fn parts(&self, place: &Place) -> Result<Option<Vec<Part>>, Error>;

    /// Writes the part table of a reserved block.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] or those of [`Ends::buffers`].
    fn write_parts(&self, place: &Place, found: &[Part]) -> Result<(), Error>;

    /// Records the leaf digests of a reserved block that has been written, for each part.
    ///
    /// Tiers that have space for them next to the payload store them. A block that copy threads of
    /// another process have written is committed without them.
    fn note_leaves(&self, _place: &Place, _leaves: Vec<u128>) {}

    /// Returns the key and MACs of a pinned or reserved block, if the tier has keys.
    fn proof(&self, _place: &Place) -> Option<Proof> {
        None
    }

    /// Records the MACs of a reserved block that has been written, for each part, if the tier has
    /// keys.
    ///
    /// Such a tier does not commit a block without MACs.
    fn note_macs(&self, _place: &Place, _macs: Vec<Mac>) {}

    /// Returns the directory with the payloads, if they are in files of one.
    ///
    /// Other processes receive it, and their copy threads open pinned and reserved blocks in it.
    /// Without it they have no access.
    fn directory(&self) -> Option<Directory> {
        None
    }

    /// Returns the data with which processes of this user read pinned blocks on other hosts.
    fn door(&self) -> Option<DoorKey> {
        None
    }

    /// Returns the arena of this process, with the number of the tier, that has some of the pinned
    /// blocks.
    ///
    /// The [`Place`] of such a block contains its location in the arena. Other processes map the
    /// arena.
    fn arena(&self) -> Option<Arc<Arena>> {
        None
    }

    /// Returns the location of a pinned or reserved block for other processes.
    ///
    /// With a directory, each block has a file. With a remote reader, some pinned blocks have
    /// another location. A process that has opened a file may still read it after its pin, and
    /// write it after its reservation. The file never becomes that of another block.
    fn outside(&self, _place: &Place) -> Option<Outside> {
        None
    }
}

impl Ends for Arc<dyn Medium> {
    fn buffers(
        &self,
        place: &Place,
        offset: u64,
        len: u64,
        ends: &mut Vec<Buffer>,
    ) -> Result<(), Error> {
        parts::buffers(self.as_ref(), &place.extents, (offset, len), ends)
    }

    fn parts(&self, place: &Place) -> Result<Option<Vec<Part>>, Error> {
        let (extents, sum) = (&place.extents, place.checksum);
        let (len, count) = (place.len, place.parts);
        Ok(parts::read(
            self.as_ref(),
            &place.identity,
            extents,
            len,
            count,
            sum,
        ))
    }

    fn write_parts(&self, place: &Place, found: &[Part]) -> Result<(), Error> {
        parts::write_table(self.as_ref(), &place.extents, place.len, found)
    }
}
