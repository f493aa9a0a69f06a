//! Why a block gets no room.

use crate::error::Error;
use crate::place::Token;

/// The reason for which a key got no reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "whoever asks has an answer for each"
)]
pub enum Refused {
    /// The block is already published.
    Present(Token),
    /// Another call is writing the block.
    Reserved(Token),
    /// There is no space for the block.
    Full(Full),
    /// The admission policy rejected the block, for example because it was evicted unread before
    /// and would evict other blocks now.
    Declined,
}

/// A lack of space for a block, with the tier and the cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full {
    /// Name of the tier.
    pub tier: &'static str,
    /// Requested size in bytes.
    pub requested: u64,
    /// Cause of the lack of space.
    pub cause: Cause,
}

/// The cause of a lack of space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "whoever asks has an answer for each"
)]
pub enum Cause {
    /// No block is left that can be evicted, or the block is larger than the arena.
    Space {
        /// Free space in bytes.
        free: u64,
        /// Capacity in bytes.
        capacity: u64,
    },
    /// The eviction limit of the prompt protects all blocks that could be evicted.
    Limit,
    /// The block exceeds the maximum block size of the tier.
    Large {
        /// Maximum block size in bytes.
        most: u64,
    },
    /// Each record of the table has a block that cannot be evicted.
    Records {
        /// Number of records.
        records: u64,
    },
    /// The write-back queue to the next tier is full.
    Queue {
        /// Maximum size of the queue in bytes.
        depth: u64,
    },
    /// Workers of the previous owner may still write to the arena.
    Orphans {
        /// Process ID of one of them, if known.
        pid: Option<u32>,
    },
    /// All files that the tier may have open are in use.
    Files {
        /// Maximum number of open files.
        most: u64,
    },
    /// All devices are draining or have failed.
    Leaving,
    /// Another process cannot write to this tier.
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
                format!("the block is larger than the whole medium of {capacity} bytes")
            }
            Cause::Space { free, capacity } => {
                format!(
                    "{free} of {capacity} bytes are free, and all blocks of the tier are pinned or \
                     reserved"
                )
            }
            Cause::Limit => {
                "the new blocks of one prompt may evict only up to the usual size of prompts, at \
                 most an eighth of the tier; reserve these blocks again to evict more"
                    .into()
            }
            Cause::Large { most } => format!("a block in this tier may have at most {most} bytes"),
            Cause::Records { records } => format!(
                "all {records} records of the arena belong to pinned or reserved blocks; create a \
                 new arena with more records (option records)"
            ),
            Cause::Queue { depth } => {
                format!("the write-back queue is full (write_back_depth = {depth} bytes)")
            }
            Cause::Files { most } => format!(
                "all {most} open files of the tier are in use; raise the limit of open files \
                 (ulimit -n)"
            ),
            Cause::Apart => {
                "other processes cannot write to this tier; use a first tier such as Cache or Dax"
                    .into()
            }
            Cause::Leaving => "all devices of the tier are draining or have failed".into(),
            Cause::Orphans { pid: None } => {
                "workers of the arena's previous owner are still running; end the workers first"
                    .into()
            }
            Cause::Orphans { pid: Some(pid) } => {
                format!(
                    "process {pid} of the arena's previous owner is still running; end the process \
                     first"
                )
            }
        };
        Error::Full {
            tier,
            requested,
            reason,
        }
    }
}
