//! Whose memory a call moves: that of this process, which the lanes here reach, or that of another
//! one, whose own lanes move what they are told. The index work is the same for both.

use std::sync::Arc;

use kvdepot_arena::Place;
use kvdepot_arena::verdict::Moved;

use crate::buffers::BlockBuffers;
use crate::tier::{Apart, Outside};

/// The memory of a call.
#[expect(
    clippy::exhaustive_enums,
    reason = "whoever asks has an answer for each"
)]
pub enum Caller {
    /// This process's.
    Here(BlockBuffers),
    /// Another process's.
    There {
        /// Payload bytes of each key.
        lens: Vec<u64>,
        /// What moves its bytes.
        lanes: Arc<dyn Lanes>,
        /// Of the client, in the roster.
        seat: u64,
    },
}

/// Another process's lanes.
pub trait Lanes: Send + Sync {
    /// Asks them to move blocks. `done` is called once, with a result for each block, when nobody
    /// there touches the places any more: not before, whatever has become of the connection.
    fn move_blocks(&self, blocks: &[Errand], done: MovesDone);
}

/// A block that other lanes are to move: its index in the call, and where it lies.
pub type Errand = (usize, Place, Option<Outside>);

/// What follows when all moves of a request have stopped.
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
