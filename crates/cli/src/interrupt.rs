//! Ctrl-C as a flag that long commands look at, so that they end cleanly.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::{SigId, flag, low_level};

use crate::error::Error;

/// Catches Ctrl-C and termination as long as it lives. A second signal ends the process at once.
pub(crate) struct Interrupt {
    flag: Arc<AtomicBool>,
    handlers: Vec<SigId>,
}

impl Interrupt {
    pub(crate) fn catch() -> Result<Interrupt, Error> {
        let flag = Arc::new(AtomicBool::new(false));
        let mut handlers = Vec::new();
        for signal in [SIGINT, SIGTERM] {
            // Before the one that sets the flag: the first signal must not end us.
            handlers.push(flag::register_conditional_shutdown(
                signal,
                128 + signal,
                Arc::clone(&flag),
            )?);
            handlers.push(flag::register(signal, Arc::clone(&flag))?);
        }
        Ok(Interrupt { flag, handlers })
    }

    /// Whether a signal came.
    pub(crate) fn came(&self) -> bool {
        self.flag.load(Ordering::Relaxed)
    }

    /// An error once a signal came.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.came() {
            return Err(Error::Interrupted);
        }
        Ok(())
    }
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        for handler in self.handlers.drain(..) {
            low_level::unregister(handler);
        }
    }
}
