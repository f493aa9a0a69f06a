//! What a stream of somebody else's has been given by a moment.

use super::context::Context;
use super::driver::Handle;
use crate::error::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A point in a CUDA stream, for example in the stream on which a framework computes.
///
/// Copies with a fence wait for all work that the stream had been given at that point (a CUDA event
/// dependency).
#[derive(Debug)]
pub struct Fence {
    context: Arc<Context>,
    event: Handle,
    /// Once it is known.
    reached: AtomicBool,
}

// SAFETY: an event may be used by any thread.
unsafe impl Send for Fence {}
// SAFETY: as above.
unsafe impl Sync for Fence {}

impl Fence {
    /// # Safety
    ///
    /// `stream` is one of the context's, or the null handle of the default one.
    pub(super) unsafe fn record(context: &Arc<Context>, stream: usize) -> Result<Self> {
        let _entered = context.enter()?;
        let fence = Self {
            context: Arc::clone(context),
            event: context.event()?,
            reached: AtomicBool::new(false),
        };
        let stream = std::ptr::with_exposed_provenance_mut(stream);
        context.record(fence.event, stream)?;
        Ok(fence)
    }

    pub(super) fn event(&self) -> Handle {
        self.event
    }

    /// Returns true if an earlier query found the fence passed. Calls no function of the driver.
    pub(super) fn was_reached(&self) -> bool {
        self.reached.load(Ordering::Acquire)
    }

    /// Returns true if the stream has passed the fence. The calling thread has entered the context.
    pub(super) fn is_reached(&self) -> bool {
        if self.was_reached() {
            return true;
        }
        let reached = self.context.has_reached(self.event);
        self.reached.fetch_or(reached, Ordering::AcqRel);
        reached
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            self.context.forget(self.event);
        }
    }
}
