//! What a depot answers, wherever its index is: in this process ([`super::local`]), or in another
//! one, whose client implements the same.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kvdepot_arena::{Class, Error, Key, NamespaceId, Opening};
use kvdepot_media::Checksum;

use crate::buffers::BlockBuffers;
use crate::devices::{DeviceStats, DrainTo};
use crate::listing::{BlockPage, Cursor, Gone};
use crate::metrics::Stats;
use crate::pipeline::{Drained, GetOptions, NoRoom, Pin, Reservation};
use crate::task::Task;
use crate::tier::NamespaceUsage;

/// Description of a depot.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct About {
    /// Number that identifies the depot and this opening of it.
    pub session: u64,
    /// Names of the tiers, first to last.
    pub tiers: Vec<String>,
    /// Path of the first medium that survives the process.
    pub path: Option<PathBuf>,
    /// One line for a log.
    pub description: String,
    /// Result of opening the arenas.
    pub opening: Opening,
    /// Configured time-out for calls of clients.
    #[serde(default)]
    pub timeout: Option<Duration>,
    /// Time-out of lookups in asynchronous tiers; `None` without such tiers.
    #[serde(default)]
    pub lookup_timeout: Option<Duration>,
    /// True if the release of the server has groups.
    #[serde(default)]
    pub groups: bool,
    /// Position of the first tier that acknowledges puts.
    ///
    /// `None` for a server of a release without [`Verbs::acknowledged`].
    #[serde(default)]
    pub ack: Option<usize>,
}

/// Blocks that are kept and evicted together until the value is dropped.
pub trait Together: Send + Sync {
    /// Adds blocks.
    ///
    /// # Errors
    ///
    /// Those of [`Group::add`](super::Group::add).
    fn add(&self, keys: &[Key]) -> Result<(), Error>;

    /// Sets the eviction class of the blocks.
    ///
    /// # Errors
    ///
    /// Those of [`Group::add`](super::Group::add).
    fn set_class(&self, class: Class) -> Result<(), Error>;
}

/// Operations of a depot.
///
/// [`Depot`](super::Depot) and [`Namespace`](super::Namespace) describe them.
pub trait Verbs: Send + Sync {
    /// Returns the description of the depot.
    fn about(&self) -> &About;

    /// Returns true if another process has the index.
    fn is_served(&self) -> bool;

    /// Returns true if calls are answered, like
    /// [`Depot::is_connected`](super::Depot::is_connected).
    fn is_connected(&self) -> bool;

    /// Returns true if another thread is using the index.
    fn is_busy(&self) -> bool;

    /// Returns the socket on which other processes attach, if there is one.
    fn socket(&self) -> Option<PathBuf>;

    /// Returns the address of the HTTP server, like [`Depot::http`](super::Depot::http).
    fn http(&self) -> Option<String> {
        None
    }

    /// Records the description of a namespace and the salt that selects its key.
    ///
    /// # Errors
    ///
    /// Those of [`Depot::namespace`](super::Depot::namespace).
    fn describe(&self, id: NamespaceId, description: &str, salt: Option<&str>)
    -> Result<(), Error>;

    /// Prefaults the tiers on a separate thread.
    ///
    /// # Errors
    ///
    /// Those of [`Depot::populate_aside`](super::Depot::populate_aside).
    fn populate_aside(&self) -> Result<(), Error>;

    /// Reads credentials again, like [`Depot::renew`](super::Depot::renew).
    ///
    /// # Errors
    ///
    /// Those of [`Depot::renew`](super::Depot::renew).
    fn renew(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Returns counters and usage.
    fn stats(&self) -> Stats;

    /// Returns the namespaces of the depot with their usage.
    ///
    /// # Errors
    ///
    /// Those of [`Depot::namespaces`](super::Depot::namespaces).
    fn namespaces(&self) -> Result<Vec<NamespaceUsage>, Error>;

    /// Returns the blocks that were removed since the last call.
    ///
    /// # Errors
    ///
    /// Those of [`Depot::gone`](super::Depot::gone).
    fn gone(&self, limit: usize) -> Result<Gone, Error>;

    /// Waits until queued blocks are written back, like [`Depot::drain`](super::Depot::drain).
    fn drain(&self, timeout: Duration) -> bool;

    /// Makes the arenas of the depot permanent.
    fn keep(&self);

    /// Closes the depot.
    fn close(&self);

    /// Returns the media of the depot.
    ///
    /// # Errors
    ///
    /// Those of [`Depot::devices`](super::Depot::devices).
    fn devices(&self) -> Result<Vec<DeviceStats>, Error>;

    /// Adds a device.
    ///
    /// # Errors
    ///
    /// Those of [`Depot::add_device`](super::Depot::add_device).
    fn add_device(&self, path: &Path, capacity: Option<u64>) -> Result<Opening, Error>;

    /// Empties a device.
    ///
    /// # Errors
    ///
    /// Those of [`Depot::drain_device`](super::Depot::drain_device).
    fn drain_device(&self, path: &Path, to: DrainTo, patience: Duration) -> Result<Drained, Error>;

    /// Removes a device.
    ///
    /// # Errors
    ///
    /// Those of [`Depot::remove_device`](super::Depot::remove_device).
    fn remove_device(&self, path: &Path, force: bool, patience: Duration) -> Result<(), Error>;

    /// Grows a device to `capacity` bytes.
    ///
    /// # Errors
    ///
    /// Those of [`Depot::grow_device`](super::Depot::grow_device).
    fn grow_device(&self, path: &Path, capacity: u64) -> Result<(), Error>;

    /// Returns for each key whether its block is stored in some tier.
    ///
    /// # Errors
    ///
    /// Those of [`Namespace::contains`](super::Namespace::contains).
    fn contains(&self, id: NamespaceId, keys: &[Key]) -> Result<Vec<bool>, Error>;

    /// Looks up each key without waiting for asynchronous tiers.
    ///
    /// # Errors
    ///
    /// Those of [`Namespace::lookup`](super::Namespace::lookup).
    fn lookup(&self, id: NamespaceId, keys: &[Key]) -> Result<Task, Error>;

    /// Returns the number of consecutive keys, from the first, whose blocks are stored.
    ///
    /// # Errors
    ///
    /// Those of [`Namespace::prefix`](super::Namespace::prefix).
    fn prefix(&self, id: NamespaceId, keys: &[Key]) -> Result<usize, Error>;

    /// Returns the position of the first tier that has each block.
    ///
    /// # Errors
    ///
    /// Those of [`Namespace::nearest`](super::Namespace::nearest).
    fn nearest(&self, id: NamespaceId, keys: &[Key]) -> Result<Vec<Option<usize>>, Error>;

    /// Returns the payload bytes of each block in a tier that acknowledges puts.
    ///
    /// # Errors
    ///
    /// Those of [`Namespace::acknowledged`](super::Namespace::acknowledged).
    fn acknowledged(&self, id: NamespaceId, keys: &[Key]) -> Result<Vec<Option<u64>>, Error>;

    /// Stores blocks; `after` is the previous block of their prompt.
    ///
    /// # Errors
    ///
    /// Those of [`Namespace::put`](super::Namespace::put).
    fn put(
        &self,
        id: NamespaceId,
        after: Option<Key>,
        keys: Vec<Key>,
        buffers: BlockBuffers,
    ) -> Result<Task, Error>;

    /// Copies blocks into the caller's buffers.
    ///
    /// # Errors
    ///
    /// Those of [`Namespace::get_with`](super::Namespace::get_with).
    fn get(
        &self,
        id: NamespaceId,
        keys: Vec<Key>,
        buffers: BlockBuffers,
        options: GetOptions,
    ) -> Result<Task, Error>;

    /// Promotes the consecutive hits from the first key to the first tier.
    ///
    /// # Errors
    ///
    /// Those of [`Namespace::prefetch`](super::Namespace::prefetch).
    fn prefetch(&self, id: NamespaceId, keys: &[Key]) -> Result<Task, Error>;

    /// Removes blocks from every tier and returns the number of keys that were stored.
    ///
    /// # Errors
    ///
    /// Those of [`Namespace::remove`](super::Namespace::remove).
    fn remove(&self, id: NamespaceId, keys: &[Key]) -> Result<usize, Error>;

    /// Removes every block of a namespace and returns their number.
    ///
    /// # Errors
    ///
    /// Those of [`Namespace::clear`](super::Namespace::clear).
    fn clear(&self, id: NamespaceId) -> Result<usize, Error>;

    /// Returns a page of at most `limit` blocks, from 1 to [`PAGE_MAX`](crate::PAGE_MAX).
    ///
    /// # Errors
    ///
    /// Those of [`Namespace::blocks_page`](super::Namespace::blocks_page).
    fn block_page(
        &self,
        id: NamespaceId,
        from: Option<Cursor>,
        limit: usize,
    ) -> Result<BlockPage, Error>;

    /// Declares a group of blocks.
    ///
    /// # Errors
    ///
    /// Those of [`Namespace::group`](super::Namespace::group).
    fn group(
        &self,
        id: NamespaceId,
        keys: &[Key],
        class: Class,
    ) -> Result<Box<dyn Together>, Error>;

    /// Reserves space for blocks with parts of these lengths in bytes.
    ///
    /// # Errors
    ///
    /// Those of [`Namespace::reserve_after`](super::Namespace::reserve_after).
    fn reserve(
        &self,
        id: NamespaceId,
        after: Option<Key>,
        blocks: &[(Key, Vec<u64>)],
        no_room: NoRoom,
    ) -> Result<Vec<Option<Reservation>>, Error>;

    /// Publishes reservations; `checksums` has one list per reservation.
    ///
    /// # Errors
    ///
    /// Those of [`Namespace::commit`](super::Namespace::commit).
    fn commit(
        &self,
        reservations: &[Reservation],
        checksums: &[Vec<Checksum>],
    ) -> Result<Vec<bool>, Error>;

    /// Releases reservations.
    fn abort(&self, reservations: &[Reservation]);

    /// Pins blocks, each in the first tier that has it.
    ///
    /// # Errors
    ///
    /// Those of [`Namespace::pin`](super::Namespace::pin).
    fn pin(&self, id: NamespaceId, keys: &[Key], prefix: bool) -> Result<Vec<Option<Pin>>, Error>;

    /// Releases pins; `served` is true if the caller has used the bytes.
    fn unpin(&self, pins: &[Pin], served: bool);

    /// Unpublishes pinned blocks that failed verification and returns their number.
    fn discard(&self, pins: &[Pin]) -> usize;

    /// Does the next step of the background thread.
    ///
    /// Returns false if there is no step, or if another process has the index.
    #[cfg(feature = "sim")]
    #[doc(hidden)]
    fn step_background(&self) -> bool {
        false
    }

    /// Does the next step of the thread that evicts in advance; returns like
    /// [`Verbs::step_background`].
    #[cfg(feature = "sim")]
    #[doc(hidden)]
    fn step_evictor(&self) -> bool {
        false
    }
}
