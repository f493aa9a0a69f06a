//! Block store: keys, namespaces, tiers, pipelines, admission and eviction.
//!
//! A program validates its settings with [`Config`] and opens the tiers of a pipeline with
//! [`Depot`]. A [`Namespace`] of the depot has the operations on blocks. Puts, gets, lookups and
//! prefetches return a [`Task`]. Engines whose scheduler and workers are separate processes use
//! reservations and pins instead ([`Namespace::reserve`], [`Namespace::pin`]).
//!
//! # Examples
//!
//! ```
//! use kvdepot_store::{BlockBuffers, Buffer, Config, Depot, Key, NamespaceSpec};
//! use serde_json::json;
//!
//! let config = Config::new("Cache", &json!({"cache": {"capacity": "1MiB"}}))?;
//! let depot = Depot::open(&config)?;
//! let blocks = depot.namespace(&NamespaceSpec {
//!     model: "llama-3-8b".into(),
//!     dtype: "bfloat16".into(),
//!     block_tokens: 16,
//!     ..NamespaceSpec::default()
//! })?;
//!
//! let key = Key([1; 32]);
//! let block = Buffer::from_vec(vec![7; 4096]);
//! assert_eq!(blocks.put(vec![key], BlockBuffers::whole([block]))?.wait(None)?, [true]);
//!
//! let memory = Buffer::from_vec(vec![0; 4096]);
//! let buffers = BlockBuffers::whole([memory.clone()]);
//! assert_eq!(blocks.get(vec![key], buffers)?.wait(None)?, [true]);
//! assert_eq!(memory.to_vec(), [7; 4096]);
//! depot.close();
//! # Ok::<(), kvdepot_store::Error>(())
//! ```
//!
//! # Structure
//!
//! [`Depot`] passes each call to the index in this process ([`Core`]) or, through [`Verbs`], to
//! another process. The pipeline in [`Core`] chains tiers from first to last and starts the copies.
//! Only `kvdepot-media` copies bytes, and `kvdepot-arena` assigns their locations in a medium.
//!
//! # Guarantees
//!
//! Each guarantee has a test that fails if the guarantee is broken.
//!
//! * A read returns exactly the bytes that were put under the same key and namespace, or a miss.
//! * An acknowledged block survives the process that stored it, if a tier of the pipeline does.
//! * Lookups and reads find only committed blocks.
//! * kvdepot holds the buffers of a call until every copy thread has stopped using them.
//! * Every queue is bounded.

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
pub use metrics::{MetricsFormat, Op, Stats};
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
