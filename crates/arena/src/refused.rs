//! Why a block gets no room.

use crate::error::Error;
use crate::place::Token;

/// Why a key got no reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "whoever asks has an answer for each"
)]
pub enum Refused {
    /// It is published already.
    Present(Token),
    /// Another call is writing it.
    Reserved(Token),
    /// There is no room for it.
    Full(Full),
    /// It left unread, and others would have to go for it.
    Declined,
}

/// Why, and in which tier, there is no room for a block of `requested` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full {
    /// The tier's name.
    pub tier: &'static str,
    /// Bytes asked for.
    pub requested: u64,
    /// What stands in the way.
    pub cause: Cause,
}

/// What stands in the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "whoever asks has an answer for each"
)]
pub enum Cause {
    /// Nothing that could be evicted is left, or the block is larger than the arena.
    Space {
        /// Bytes that are free.
        free: u64,
        /// Bytes that there are.
        capacity: u64,
    },
    /// The eviction limit of its prompt keeps the blocks that could be evicted.
    Limit,
    /// The block is larger than any that is taken there.
    Large {
        /// Bytes of the largest that is.
        most: u64,
    },
    /// Each record of the table has a block that nothing may evict.
    Records {
        /// How many there are.
        records: u64,
    },
    /// More bytes than this would wait for the far tier.
    Queue {
        /// The bytes.
        depth: u64,
    },
    /// Processes that worked for the previous owner may still write here: one of them, as far as
    /// it is known.
    Orphans {
        /// Its process.
        pid: Option<u32>,
    },
    /// All files that the tier may have open are in use.
    Files {
        /// Most files that the tier may have open.
        most: u64,
    },
    /// Nothing is written to devices that are about to go, or have failed.
    Leaving,
    /// Other processes cannot write there.
    Apart,
}

impl From<Full> for Error {
    fn from(full: Full) -> Error {
        let Full {
            tier,
            requested,
            cause,
        } = full;
        let reason = match cause {
            Cause::Space { capacity, .. } if requested > capacity => {
                format!("the block is larger than all of its medium, {capacity} bytes")
            }
            Cause::Space { free, capacity } => {
                format!("{free} are free of {capacity}, the rest is pinned or reserved")
            }
            Cause::Limit => {
                "the new blocks of a prompt evict others until they take as much of the \
                             tier as prompts usually do, an eighth at most; a call that reserves \
                             them again may evict more"
                    .into()
            }
            Cause::Large { most } => format!("it takes blocks of at most {most} bytes"),
            Cause::Records { records } => format!(
                "each of its {records} records has a block that is pinned or reserved; a new arena \
                 has more with dax.records"
            ),
            Cause::Queue { depth } => {
                format!("the write-back queue is full (write_back_depth = {depth})")
            }
            Cause::Files { most } => format!(
                "all {most} files that it may have open are in use; raise the process's limit of \
                 open files (ulimit -n)"
            ),
            Cause::Apart => "other processes write to tiers of arenas only".into(),
            Cause::Leaving => "its devices are drained or have failed".into(),
            Cause::Orphans { pid: None } => {
                "processes of its previous owner may still write".into()
            }
            Cause::Orphans { pid: Some(pid) } => {
                format!("process {pid} of its previous owner may still write")
            }
        };
        Error::Full {
            tier,
            requested,
            reason,
        }
    }
}
