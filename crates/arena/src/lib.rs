//! Arenas: one contiguous medium with format, records, index, allocator, eviction, recovery and
//! owner.
//!
//! An [`Arena`] chooses the position of each block in its medium and keeps an index of its blocks.
//! It does not move payloads: a caller reserves extents, fills them and then commits.

#![forbid(unsafe_code)]

mod bind;
mod body;
mod bury;
mod chosen;
pub mod clock;
mod device;
mod error;
mod evict;
mod eviction_limit;
pub mod format;
pub mod gate;
mod group;
mod grow;
mod head;
pub mod held;
mod index;
mod inode;
pub mod inspect;
mod key;
mod last_tier;
mod leave;
mod listing;
mod lost;
mod make;
mod medium;
mod mend;
mod open;
mod options;
mod orphans;
mod own;
mod owner_lock;
pub mod parts;
pub mod patience;
mod place;
#[cfg(test)]
mod power;
mod prompt_sizes;
mod publish;
mod recover;
mod refused;
mod remove;
mod reserve;
mod reserved;
mod roll;
mod serve;
pub mod size;
mod space;
mod stats;
mod turnover;
mod under_way;
pub mod verdict;

pub use body::Arena;
pub use error::Error;
pub use group::{Class, Group};
pub use head::{dead_superblocks, read_directory, read_owner, read_superblock};
pub use index::{Stamps, Use, Uses};
pub use inode::Inode;
pub use key::{Identity, Key, NamespaceId};
pub use leave::{Device, Room};
pub use listing::Legacy;
pub use make::{
    Promised, UNFINISHED, check_erasable, default_capacity, default_path, erase, erase_unfinished,
};
pub use medium::{Medium, Written, adopt};
pub use open::Acquired;
pub use options::{Access, Durability, Format, Options};
pub use own::Parting;
pub use owner_lock::orphans_of;
pub use place::{Place, Token, Wanted};
pub use prompt_sizes::PromptSizes;
pub use recover::{Opening, Survey, is_inside, judge, survey};
pub use refused::{Cause, Full, Refused};
pub use reserved::{Reserved, TakesBack};
pub use roll::{Departed, Notes};
pub use space::Space;
pub use stats::TierStats;
pub use turnover::EvictionLimit;
