//! What bytes mean: keys, namespaces, records, index, eviction, tiers, pipelines.
//!
//! [`Depot`] is the public face: it hands each call to what answers it, the [`Core`] of this
//! process or, by [`Verbs`], another one's. The *pipeline* chains tiers near to far and starts the
//! copies. Bytes move in `kvdepot-media` only, and where in a medium they lie `kvdepot-arena` says.
//!
//! Invariants (each has a test that fails when it is broken): a read delivers exactly the bytes
//! that were put under that identity, or a miss; an acknowledged block outlives its process;
//! nothing uncommitted is ever visible; buffers are held until every lane has stopped; every
//! queue is bounded.

#![forbid(unsafe_code)]

mod buffers;
mod chances;
mod completions;
pub mod config;
mod depot;
mod devices;
mod ghosts;
mod journal;
mod keyring;
mod listing;
mod metrics;
mod namespace;
mod opening;
pub mod option;
mod pipeline;
pub mod placement;
pub mod populate;
mod shares;
#[cfg(feature = "sim")]
#[doc(hidden)]
pub mod sim;
mod task;
mod tier;

pub use buffers::BlockBuffers;
pub use completions::Completions;
pub use config::Config;
pub use depot::{About, Depot, Group, Namespace, Serves, Started, Together, Verbs};
pub use devices::{DeviceState, DeviceStats, DrainTo};
pub use journal::Journal;
pub use keyring::Keyring;
pub use kvdepot_arena::held::{Work, at_once, longest_hold, work};
pub use kvdepot_arena::patience::interruptible;
pub use kvdepot_arena::{
    Class, Durability, Error, Identity, Key, NamespaceId, Opening, TierStats, UNFINISHED,
    check_erasable, erase, erase_unfinished, format, inspect, size,
};
pub use kvdepot_host::fork::Origin;
pub use kvdepot_media::cuda::{Device, Fence};
pub use kvdepot_media::{Buffer, Checksum, Error as MediaError};
pub use listing::{BlockPage, Cursor, Gone, PAGE_MAX};
pub use metrics::{Op, Stats};
pub use namespace::{NamespaceSpec, SAVED};
pub use pipeline::{
    Caller, Core, Drained, Errand, GetOptions, Grouped, Lanes, MovesDone, NoRoom, Pin, Reservation,
    plan,
};
pub use task::{Mirror, Outcome, Task};
pub use tier::{
    BlockFile, Borrowed, Directory, Door, DoorKey, Ends, Kinds, NamespacePage, NamespaceUsage,
    Opener, Outside, Page, Parts, Pending, Progress, Proof, Reply, Terms, Tier, TierKind, ask,
    know_door, open_door,
};
