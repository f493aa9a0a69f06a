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

/// What a depot says of itself.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct About {
    /// Told apart from all others, and from itself when it is opened again.
    pub session: u64,
    /// The tiers' names, near to far.
    pub tiers: Vec<String>,
    /// Where the lasting tier is.
    pub path: Option<PathBuf>,
    /// One line for a log.
    pub description: String,
    /// What opening found.
    pub opening: Opening,
    /// What its configuration says of a client's calls.
    #[serde(default)]
    pub timeout: Option<Duration>,
    /// How long a lookup waits for tiers that may answer late, where there are such.
    #[serde(default)]
    pub lookup_timeout: Option<Duration>,
    /// Whether it knows groups.
    #[serde(default)]
    pub groups: bool,
    /// Position of the nearest tier that acknowledges; `None` of a release that knows no
    /// [`Verbs::acknowledged`].
    #[serde(default)]
    pub ack: Option<usize>,
}

/// Blocks that are kept and evicted as one until this is dropped.
pub trait Together: Send + Sync {
    /// Adds blocks.
    ///
    /// # Errors
    /// As [`Group::add`](super::Group::add).
    fn add(&self, keys: &[Key]) -> Result<(), Error>;

    /// Gives them another class.
    ///
    /// # Errors
    /// As [`Group::add`](super::Group::add).
    fn set_class(&self, class: Class) -> Result<(), Error>;
}

/// The verbs, as [`Depot`](super::Depot) and [`Namespace`](super::Namespace) describe them.
#[expect(
    missing_docs,
    reason = "each is the method of that name of a depot or namespace"
)]
pub trait Verbs: Send + Sync {
    fn about(&self) -> &About;
    /// Whether another process has the index.
    fn is_served(&self) -> bool;
    fn is_connected(&self) -> bool;
    fn is_busy(&self) -> bool;
    fn socket(&self) -> Option<PathBuf>;
    fn describe(&self, id: NamespaceId, description: &str, salt: Option<&str>)
    -> Result<(), Error>;
    fn populate_aside(&self) -> Result<(), Error>;
    fn stats(&self) -> Stats;
    fn namespaces(&self) -> Result<Vec<NamespaceUsage>, Error>;
    fn gone(&self, limit: usize) -> Result<Gone, Error>;
    fn drain(&self, timeout: Duration) -> bool;
    /// What has been made for it stays, whatever happens.
    fn keep(&self);
    fn close(&self);

    fn devices(&self) -> Result<Vec<DeviceStats>, Error>;
    fn add_device(&self, path: &Path, capacity: Option<u64>) -> Result<Opening, Error>;
    fn drain_device(&self, path: &Path, to: DrainTo, patience: Duration) -> Result<Drained, Error>;
    fn remove_device(&self, path: &Path, force: bool, patience: Duration) -> Result<(), Error>;
    fn grow_device(&self, path: &Path, capacity: u64) -> Result<(), Error>;

    fn contains(&self, id: NamespaceId, keys: &[Key]) -> Result<Vec<bool>, Error>;
    fn lookup(&self, id: NamespaceId, keys: &[Key]) -> Result<Task, Error>;
    fn prefix(&self, id: NamespaceId, keys: &[Key]) -> Result<usize, Error>;
    /// The position of the nearest tier that has each.
    fn nearest(&self, id: NamespaceId, keys: &[Key]) -> Result<Vec<Option<usize>>, Error>;
    /// The payload bytes of each that is in a tier that acknowledges.
    fn acknowledged(&self, id: NamespaceId, keys: &[Key]) -> Result<Vec<Option<u64>>, Error>;
    fn put(
        &self,
        id: NamespaceId,
        after: Option<Key>,
        keys: Vec<Key>,
        buffers: BlockBuffers,
    ) -> Result<Task, Error>;
    fn get(
        &self,
        id: NamespaceId,
        keys: Vec<Key>,
        buffers: BlockBuffers,
        options: GetOptions,
    ) -> Result<Task, Error>;
    fn prefetch(&self, id: NamespaceId, keys: &[Key]) -> Result<Task, Error>;
    fn remove(&self, id: NamespaceId, keys: &[Key]) -> Result<usize, Error>;
    fn clear(&self, id: NamespaceId) -> Result<usize, Error>;
    /// `limit` is from 1 to [`PAGE_MAX`](crate::PAGE_MAX).
    fn block_page(
        &self,
        id: NamespaceId,
        from: Option<Cursor>,
        limit: usize,
    ) -> Result<BlockPage, Error>;
    fn group(
        &self,
        id: NamespaceId,
        keys: &[Key],
        class: Class,
    ) -> Result<Box<dyn Together>, Error>;

    fn reserve(
        &self,
        id: NamespaceId,
        after: Option<Key>,
        blocks: &[(Key, Vec<u64>)],
        no_room: NoRoom,
    ) -> Result<Vec<Option<Reservation>>, Error>;
    /// There are as many lists of checksums as reservations.
    fn commit(
        &self,
        reservations: &[Reservation],
        checksums: &[Vec<Checksum>],
    ) -> Result<Vec<bool>, Error>;
    fn abort(&self, reservations: &[Reservation]);
    fn pin(&self, id: NamespaceId, keys: &[Key], prefix: bool) -> Result<Vec<Option<Pin>>, Error>;
    fn unpin(&self, pins: &[Pin], served: bool);
    fn discard(&self, pins: &[Pin]) -> usize;

    /// Does what the background thread would do next; false when there is nothing, or when another
    /// process owns it.
    #[cfg(feature = "sim")]
    #[doc(hidden)]
    fn step_background(&self) -> bool {
        false
    }

    /// The same of the thread that evicts ahead of need.
    #[cfg(feature = "sim")]
    #[doc(hidden)]
    fn step_evictor(&self) -> bool {
        false
    }
}
