//! What bytes mean: keys, namespaces, records, index, eviction, tiers, pipelines.
//!
//! [`Depot`] is the public face. Inside, an *arena* is one medium with its allocator, index and
//! record table; the *pipeline* chains arenas near to far and starts the copies; *share* lets
//! other processes of the host move bytes for the owner. Bytes move in `kvdepot-media` only.
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
mod listing;
mod metrics;
mod namespace;
mod pipeline;
mod populate;
mod share;
#[cfg(feature = "sim")]
#[doc(hidden)]
pub mod sim;
mod task;
mod tier;

pub use buffers::BlockBuffers;
pub use completions::Completions;
pub use config::Config;
pub use depot::{Depot, Namespace, Started};
pub use devices::{DeviceState, DeviceStats, DrainTo};
pub use kvdepot_arena::held::{at_once, longest_hold};
pub use kvdepot_arena::patience::interruptible;
pub use kvdepot_arena::{
    Error, Identity, Key, NamespaceId, Opening, TierStats, UNFINISHED, erase, erase_unfinished,
    format, inspect, size,
};
pub use kvdepot_host::fork::Origin;
pub use kvdepot_media::cuda::Device;
pub use kvdepot_media::{Buffer, Checksum};
pub use listing::{BlockPage, Cursor, Gone, NamespaceUsage, PAGE_MAX};
pub use metrics::Stats;
pub use namespace::NamespaceSpec;
pub use pipeline::{Drained, GetOptions, Pin, Reservation};
pub use share::{MoveJob, Mover};
pub use task::{Outcome, Task};
