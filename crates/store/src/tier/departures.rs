//! Blocks that have left a tier which others share, as far as this process knows, for whoever asks
//! what has gone.

use kvdepot_arena::{Departed, Identity, Notes};
use parking_lot::Mutex;

#[derive(Default)]
pub(super) struct Departures(Mutex<Vec<Notes>>);

impl Departures {
    /// Whether anybody listens.
    pub(super) fn are_wanted(&self) -> bool {
        !self.0.lock().is_empty()
    }

    /// Notes that a block has gone, with the bytes of its payload.
    pub(super) fn note(&self, name: &Identity, len: u64) {
        for notes in &mut *self.0.lock() {
            notes.push(*name, len);
        }
    }

    /// What has gone since this listener asked last.
    pub(super) fn since(&self, listener: u64, limit: usize) -> Departed {
        Notes::ask(&mut self.0.lock(), listener, limit)
    }

    pub(super) fn forget(&self, listener: u64) {
        self.0.lock().retain(|notes| notes.listener != listener);
    }
}
