//! What is known of puts on their way to where they last.

use std::sync::atomic::{AtomicBool, Ordering};

/// What became of this process's blocks on their way to an owner's lasting tier.
#[derive(Default)]
pub(crate) struct Stores {
    /// Puts were dropped, or committed blocks lost with their owner.
    lost: AtomicBool,
    /// Blocks were committed that may not have got there yet.
    pending: AtomicBool,
}

impl Stores {
    /// Blocks were committed.
    pub(crate) fn commit(&self) {
        self.pending.store(true, Ordering::Relaxed);
    }

    /// A put has ended without being stored.
    pub(crate) fn drop_put(&self) {
        self.lost.store(true, Ordering::Relaxed);
    }

    /// The owner is another one: what the last one had not written is lost.
    pub(crate) fn lose_owner(&self) {
        if self.pending.swap(false, Ordering::Relaxed) {
            self.drop_put();
        }
    }

    /// Everything that was committed is there; whether nothing was lost since this was last asked.
    pub(crate) fn drained(&self) -> bool {
        self.pending.store(false, Ordering::Relaxed);
        !self.lost.swap(false, Ordering::Relaxed)
    }
}
