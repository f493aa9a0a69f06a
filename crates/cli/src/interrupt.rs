//! Ctrl-C as a flag that long commands look at, so that they end cleanly.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::{SigId, flag, low_level};

use crate::error::Error;

/// Catches Ctrl-C, termination and the end of the terminal as long as it lives. A second signal
/// ends the process at once.
pub(crate) struct Interrupt {
    flag: Arc<AtomicBool>,
    handlers: Vec<SigId>,
}

impl Interrupt {
    pub(crate) fn catch() -> Result<Interrupt, Error> {
        Interrupt::catch_except(&[])
    }

    /// As [`Interrupt::catch`], but for these signals.
    pub(crate) fn catch_except(others: &[i32]) -> Result<Interrupt, Error> {
        let flag = Arc::new(AtomicBool::new(false));
        let mut handlers = Vec::new();
        for signal in caught()?.into_iter().filter(|one| !others.contains(one)) {
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

    /// Runs what may wait for another process, and has a signal end that wait.
    pub(crate) fn during<T>(&self, run: impl FnOnce() -> T) -> T {
        thread_local! {
            static FLAG: RefCell<Arc<AtomicBool>> = RefCell::default();
        }
        FLAG.set(Arc::clone(&self.flag));
        let came = || FLAG.with_borrow(|flag| flag.load(Ordering::Relaxed));
        kvdepot_store::interruptible(came, run)
    }

    /// An error once a signal came.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.came() {
            return Err(Error::Interrupted);
        }
        Ok(())
    }
}

/// Returns the signals that end a command. A signal that was ignored when the process started stays
/// ignored: `nohup` ignores SIGHUP, and a shell script ignores SIGINT in its background jobs.
fn caught() -> Result<Vec<i32>, Error> {
    let mut signals = Vec::new();
    for signal in [SIGINT, SIGHUP] {
        if !is_ignored(signal)? {
            signals.push(signal);
        }
    }
    signals.push(SIGTERM);
    Ok(signals)
}

fn is_ignored(signal: i32) -> Result<bool, Error> {
    let path = "/proc/self/status";
    let status = std::fs::read_to_string(path).map_err(Error::io(path))?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    Ok(mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1))
}

/// A signal that asks a command to do something while it goes on.
pub(crate) struct Request {
    flag: Arc<AtomicBool>,
    handler: SigId,
}

impl Request {
    /// Catches `signal` as long as it lives.
    pub(crate) fn catch(signal: i32) -> Result<Request, Error> {
        let flag = Arc::new(AtomicBool::new(false));
        let handler = flag::register(signal, Arc::clone(&flag))?;
        Ok(Request { flag, handler })
    }

    /// Returns true if the signal came after the previous call.
    pub(crate) fn came(&self) -> bool {
        self.flag.swap(false, Ordering::Relaxed)
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        low_level::unregister(self.handler);
    }
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        for handler in self.handlers.drain(..) {
            low_level::unregister(handler);
        }
    }
}
