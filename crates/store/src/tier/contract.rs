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

/// A namespace of a depot, and what it has in the last tier that has some of it and can tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceUsage {
    /// Its digest.
    pub id: NamespaceId,
    /// What the medium says of it, where that has room for it.
    pub description: Option<String>,
    /// Blocks published.
    pub blocks: u64,
    /// Bytes of their payloads; of a tier of files, of the files behind their headers.
    pub bytes: u64,
}

impl NamespaceUsage {
    /// One that has nothing.
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

/// What a tier is told beside its settings.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Terms {
    /// The number that its placements bear.
    pub number: u32,
    /// How long its answers are waited for, but those to lookups.
    pub timeout: Duration,
    /// What blocks are authenticated with, where others may write its medium and the depot has
    /// keys. Who takes no notice trusts its medium.
    pub keys: Option<Arc<Keyring>>,
    /// How long its answers to lookups are waited for.
    pub lookup: Duration,
    /// Whether no tier stands behind it.
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

/// What the parts of a block are authenticated with.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Proof {
    /// The key of its namespace.
    pub key: Arc<MacKey>,
    /// The MAC that each part has to have; none of a block that is reserved.
    pub macs: Vec<Mac>,
}

impl Proof {
    /// By this key, with the MACs of its parts.
    #[must_use]
    pub fn new(key: Arc<MacKey>, macs: Vec<Mac>) -> Proof {
        Proof { key, macs }
    }

    /// Whether each part of a block that is pinned has its MAC.
    pub(crate) fn is_of(&self, place: &Place) -> bool {
        self.macs.len() == usize::from(place.parts)
    }
}

/// One place that blocks live in, which may answer late. Its verbs return at once; what takes time
/// is answered by the [`Reply`], from any thread, or not at all: that is a miss, or a block that is
/// not stored. A verb may be called by any thread, and no call waits for another. What follows an
/// answer runs in the thread that gives it, and may ask the tier again: no lock of the tier is held
/// then.
pub trait Tier: Send + Sync {
    /// Its name in a pipeline.
    fn name(&self) -> &'static str;

    /// Whether what is committed here outlives the process.
    fn lasts(&self) -> bool;

    /// Bytes of the largest block that it takes.
    fn block_max(&self) -> u64;

    /// Number of blocks that one call pins or reserves at a time, at most: calls of more keys ask
    /// in steps. A tier that can hold few blocks for all calls together says an eighth of those: so
    /// calls find some beside pins and reservations that last as long as their callers like.
    fn step_max(&self) -> usize {
        usize::MAX
    }

    /// Which of these it has.
    fn probe(&self, namespace: NamespaceId, keys: &[Key], reply: Reply<Vec<bool>>);

    /// Pins those that it has: each stays what it is, and readable, until it is unpinned. A
    /// [`Place`]'s token names the pin; its device is the number that the tier was opened with,
    /// and the rest of it is the tier's own. An answer that is too late is unpinned by who asked.
    /// `used` has the stamp of each key's use, or is empty if the blocks are not used.
    fn pin(
        &self,
        namespace: NamespaceId,
        keys: &[Key],
        used: &[u64],
        reply: Reply<Vec<Option<Place>>>,
    );

    /// Notes the use of blocks that a nearer tier has, by keys and stamps: if this tier has them,
    /// they are as recently used here.
    fn note_used(&self, _namespace: NamespaceId, _used: &[(Key, u64)]) {}

    /// Ends pins.
    fn unpin(&self, places: &[Place]);

    /// Unpublishes blocks that are pinned and did not verify; how many there were. Their pins may
    /// end before the answer. Once it has come a reservation of such a key is not answered by the
    /// block, and nothing that was put since goes for it.
    fn discard(&self, places: &[Place], reply: Reply<usize>);

    /// Makes room for blocks, in prefix order, under names that nobody sees. What it evicts for
    /// them is its own choice.
    fn reserve(
        &self,
        namespace: NamespaceId,
        blocks: &[Wanted],
        reply: Reply<Vec<Result<Reserved, Refused>>>,
    );

    /// Publishes what is written: whole, or not at all. A reservation that is dropped instead is
    /// given back. With `pinned` each that is published is pinned under its token.
    fn commit(&self, written: Vec<(Reserved, Checksum)>, pinned: bool, reply: Reply<Vec<bool>>);

    /// Removes blocks; how many there were. What was reserved for a copy of them before
    /// ([`Wanted::copy`]), or is being committed, is not published any more: its commit answers
    /// that it is not stored.
    fn remove(&self, namespace: NamespaceId, keys: &[Key], reply: Reply<usize>);

    /// Removes every block of a namespace; how many there were.
    fn clear(&self, namespace: NamespaceId, reply: Reply<usize>);

    /// Some blocks of a namespace with their bytes, from the mark where the page before ended, and
    /// where the next one begins. The first mark is 0.
    fn list(&self, namespace: NamespaceId, from: u64, limit: usize, reply: Reply<Page>);

    /// Notes what a namespace is, for people.
    fn describe(&self, namespace: NamespaceId, description: &str);

    /// Some namespaces that have blocks here, or were described, from the mark where the page
    /// before ended; the first mark is 0. One may be on several pages, each with other blocks of
    /// it. A tier that does not tell has none.
    fn namespaces(&self, _from: u64, reply: Reply<NamespacePage>) {
        reply.answer(NamespacePage::default());
    }

    /// Its name, size and place, for people.
    fn about(&self) -> String {
        self.name().to_owned()
    }

    /// Blocks that have left since this listener asked last, as far as this process knows; noted
    /// from its first call on, at most the last `limit`.
    fn departed(&self, _listener: u64, _limit: usize) -> Departed {
        Departed::default()
    }

    /// Notes nothing for this listener any more.
    fn forget_listener(&self, _listener: u64) {}

    /// These blocks, which are there or may come, are kept and evicted as one from now on with
    /// those that were named so before, and leave by that class; with `None` it is no group any
    /// more. A tier may rank its blocks otherwise.
    fn group(&self, _number: u64, _namespace: NamespaceId, _keys: &[Key], _class: Option<Class>) {}

    /// Its fill and what it has counted.
    fn stats(&self) -> TierStats;

    /// The ends of what is pinned or reserved.
    fn ends(&self) -> Arc<dyn Ends>;

    /// Ends what is under way, and lets its medium go. Nothing is pinned or reserved any more.
    fn close(&self);
}

/// Some namespaces with what they have, and the mark where the next page begins.
pub type NamespacePage = (Vec<NamespaceUsage>, Option<u64>);

/// Some blocks with their bytes, and the mark where the next page begins.
pub type Page = (Vec<(Key, u64)>, Option<u64>);

/// Where the bytes of pinned and reserved blocks lie.
pub trait Ends: Send + Sync {
    /// Fills `ends` with those of `len` bytes of a block's payload, from `offset` on. They are the
    /// caller's, which asks for many blocks one after the other.
    ///
    /// # Errors
    /// [`Error::Media`] for what is not there, [`Error::Closed`] when its medium is gone.
    fn buffers(
        &self,
        place: &Place,
        offset: u64,
        len: u64,
        ends: &mut Vec<Buffer>,
    ) -> Result<(), Error>;

    /// The parts of a pinned block, as its part table has them; `None` where that does not verify.
    fn parts(&self, place: &Place) -> Result<Option<Vec<Part>>, Error>;

    /// Writes the part table of a block that is reserved.
    ///
    /// # Errors
    /// As [`Ends::buffers`].
    fn write_parts(&self, place: &Place, found: &[Part]) -> Result<(), Error>;

    /// Notes the digests of the leaves of a block that is reserved and written now, part for part,
    /// for a tier that has room for them beside the payload. A block that lanes of another process
    /// have written is committed without.
    fn note_leaves(&self, _place: &Place, _leaves: Vec<u128>) {}

    /// What a block that is pinned or reserved is authenticated with, where its tier has keys.
    fn proof(&self, _place: &Place) -> Option<Proof> {
        None
    }

    /// Notes the MACs of a block that is reserved and written now, part for part, as far as its
    /// tier has keys. One without is not committed there.
    fn note_macs(&self, _place: &Place, _macs: Vec<Mac>) {}

    /// The directory that has the payloads, where they lie in files of one: it is handed to other
    /// processes, whose lanes open there what is pinned or reserved. Without it they reach nothing.
    fn directory(&self) -> Option<Directory> {
        None
    }

    /// What processes of this user need to read, by themselves, what is pinned and lies on other
    /// hosts.
    fn door(&self) -> Option<DoorKey> {
        None
    }

    /// An arena of this process, with the tier's number, that has some of the blocks that are
    /// pinned: those whose [`Place`] says where in it. Other processes map it.
    fn arena(&self) -> Option<Arc<Arena>> {
        None
    }

    /// Where other processes find what is pinned or reserved: each block has a file where there is
    /// a directory, and some that are pinned something else where there is a door. Who has opened a
    /// file may be reading when its pin has ended, and writing when its reservation has: it becomes
    /// no other block's.
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
