//! Tiers: where blocks live, near to far.
//!
//! A tier whose media are arenas of this process ([`Arenas`]) answers at once, and is called
//! directly. Any other is a [`Tier`] that is [`Apart`]: it may take its time, and only the calls
//! that ask it wait. Where its bytes lie is its own business: it names the ends that lanes move.

mod alarm;
mod apart;
mod arenas;
mod breaker;
mod contract;
mod departures;
mod description;
mod door;
mod eviction_limit;
mod file;
mod filter;
mod kinds;
mod late;
mod outside;
mod posix;
#[cfg(feature = "s3")]
mod s3;
mod slots;
mod stage;

use kvdepot_arena::{Identity, Key, NamespaceId};

pub(crate) use alarm::Alarm;
pub(crate) use apart::{Answer, Apart};
pub(crate) use arenas::{Arenas, DAX, NVME, Sort};
pub use contract::{Ends, NamespacePage, NamespaceUsage, Page, Proof, Terms, Tier};
pub use door::{Borrowed, Door, DoorKey, know_door, open_door};
pub use file::{BlockFile, Directory};
pub use kinds::{Kinds, Opener, TierKind};
pub use late::{Parts, Pending, Progress, Reply, ask};
pub use outside::Outside;
pub(crate) use slots::Permits;
pub(crate) use stage::Stage;

/// The names of blocks.
fn identities(namespace: NamespaceId, keys: &[Key]) -> Vec<Identity> {
    let identity = |key: &Key| Identity {
        namespace,
        key: *key,
    };
    keys.iter().map(identity).collect()
}

/// The most tiers of a pipeline: statistics have a place for each.
pub(crate) const TIERS_MAX: usize = 8;
