//! One contiguous medium: format, records, index, allocator, eviction, recovery, owner.
//!
//! An [`Arena`] says where in its medium a block goes and which blocks there are. It moves no
//! payload: whoever reserved an extent fills it, then commits.

#![forbid(unsafe_code)]

mod arena;
mod bury;
pub mod clock;
mod create;
mod erase;
mod error;
mod evict;
mod fill;
pub mod format;
pub mod gate;
mod grow;
pub mod held;
mod index;
pub mod inspect;
mod key;
mod leave;
mod lost;
mod new;
mod open;
mod options;
mod orphans;
mod owner_lock;
pub mod parts;
pub mod patience;
mod publish;
mod recover;
mod reserve;
mod reserved;
mod roll;
mod serve;
pub mod size;
mod space;
mod take;
pub mod verdict;

pub use arena::{Arena, Place, TierStats, Token, Wanted};
pub use create::{Promised, UNFINISHED, default_capacity, erase_unfinished};
pub use erase::erase;
pub use error::Error;
pub use index::{Stamps, Uses};
pub use key::{Identity, Key, NamespaceId};
pub use leave::{Device, Inode, Parting, Room};
pub use open::{Acquired, dead_superblocks, default_path, read_directory, read_superblock};
pub use options::{Durability, Format, Options};
pub use owner_lock::{orphans_of, read_owner};
pub use recover::{Opening, Survey, is_inside, judge, survey};
pub use reserve::{Cause, Full, Refused};
pub use reserved::Reserved;
pub use roll::{Departed, Legacy};
pub use space::Space;
