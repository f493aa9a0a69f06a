//! Whose memory a call moves: that of this process, which the lanes here reach, or that of another
//! one, whose own lanes move what they are told. The index work is the same for both.

use std::sync::Arc;

use kvdepot_arena::Place;
use kvdepot_arena::verdict::Moved;

use crate::buffers::BlockBuffers;
use crate::tier::{Apart, Outside};

/// Memory that a call reads or fills.
#[expect(
    clippy::exhaustive_enums,
    reason = "whoever asks has an answer for each"
)]
pub enum Caller {
    /// Memory of this process.
    Here(BlockBuffers),
    /// Memory of another process.
    There {
        /// Payload length of each key, in bytes.
        lens: Vec<u64>,
        /// Copy threads of the client.
        lanes: Arc<dyn Lanes>,
        /// Number of the client.
        seat: u64,
    },
}

/// Copy threads of another process.
pub trait Lanes: Send + Sync {
    /// Requests the copies of `blocks`.
    ///
    /// `done` is called once, with a result per block, when that process no longer uses the
    /// locations. If the connection breaks, the call of `done` also waits for that.
    fn move_blocks(&self, blocks: &[Errand], done: MovesDone);
}

/// A block for other copy threads: its index in the call, and its location.
pub type Errand = (usize, Place, Option<Outside>);

/// Callback for the end of all copies of a request.
pub type MovesDone = Box<dyn FnOnce(&[Moved]) + Send>;

impl Caller {
    /// In whose name shared budgets are used; 0 for this process.
    pub(crate) fn seat(&self) -> u64 {
        match self {
            Caller::Here(_) => 0,
            Caller::There { seat, .. } => *seat,
        }
    }

    /// Whether its lanes reach what a tier apart has.
    pub(crate) fn reaches(&self, apart: &Apart) -> bool {
        matches!(self, Caller::Here(_)) || apart.directory().is_some()
    }

    /// Payload bytes of key `index`.
    pub(crate) fn bytes(&self, index: usize) -> u64 {
        match self {
            Caller::Here(buffers) => buffers.bytes(index),
            Caller::There { lens, .. } => lens[index],
        }
    }
}
