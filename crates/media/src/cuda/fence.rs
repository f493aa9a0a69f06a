//! What a stream of somebody else's has been given by a moment.

use super::context::Context;
use super::driver::Handle;
use crate::error::Result;
use kvdepot_host::fork::Origin;
use std::sync::Arc;

/// A moment of a stream, such as the one that a framework computes on: what is moved behind it
/// waits for all that the stream had been given by then, and so may other moves of the device that
/// come after it.
#[derive(Debug)]
pub struct Fence {
    context: Arc<Context>,
    event: Handle,
    origin: Option<Origin>,
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
            origin: Origin::here().ok(),
        };
        let stream = std::ptr::with_exposed_provenance_mut(stream);
        context.record(fence.event, stream)?;
        Ok(fence)
    }

    pub(super) fn event(&self) -> Handle {
        self.event
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        // A forked child has no driver.
        let is_ours = self.origin.is_some_and(Origin::is_here);
        if is_ours && let Ok(_entered) = self.context.enter() {
            self.context.forget(self.event);
        }
    }
}
