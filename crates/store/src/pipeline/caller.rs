//! Whose memory a call moves: that of this process, which the lanes here reach, or that of another
//! one, whose own lanes move what they are told. The index work is the same for both.

use std::sync::Arc;

use kvdepot_arena::Place;
use kvdepot_arena::verdict::Moved;

use crate::buffers::BlockBuffers;

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
    /// Asks them to move blocks, each with its index in the call. `done` is called
    /// once, with a result for each block, when nobody there touches the places any more: not
    /// before, whatever has become of the connection.
    fn move_blocks(&self, blocks: &[(usize, Place)], done: MovesDone);
}

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

    /// Payload bytes of key `index`.
    pub(crate) fn bytes(&self, index: usize) -> u64 {
        match self {
            Caller::Here(buffers) => buffers.bytes(index),
            Caller::There { lens, .. } => lens[index],
        }
    }
}
