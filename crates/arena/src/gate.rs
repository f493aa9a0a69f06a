//! The way in, and the way to close it: operations hold a pass, closing waits for all of them, and
//! whoever closes what another thread is closing waits for that one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvdepot_host::Condvar;
use kvdepot_host::fork;
use parking_lot::Mutex;

use crate::clock;
use crate::error::Error;

/// What [`Error::Closed`] says in a forked child.
pub const FORKED: &str = ": it belongs to the process this one was forked from; open it here";

/// Counts operations under way and refuses new ones once closed, or in a forked child.
pub struct Gate {
    state: Mutex<State>,
    empty: Condvar,
    ended: Condvar,
    epoch: u64,
}

#[derive(Default)]
struct State {
    inside: usize,
    closed: bool,
    /// Whether whoever closes has come to the end.
    ended: bool,
}

/// How many are being closed in this process.
static CLOSING: AtomicUsize = AtomicUsize::new(0);

/// Whether something is being closed in this process, so that what it holds is soon free.
pub(crate) fn is_any_closing() -> bool {
    CLOSING.load(Ordering::SeqCst) > 0
}

/// One operation under way.
pub struct Pass(Arc<Gate>);

impl Gate {
    /// An open one.
    ///
    /// # Errors
    /// [`Error::Host`] when forks cannot be watched.
    pub fn new() -> Result<Arc<Gate>, Error> {
        fork::install()?;
        Ok(Arc::new(Gate {
            state: Mutex::new(State::default()),
            empty: Condvar::new(),
            ended: Condvar::new(),
            epoch: fork::epoch(),
        }))
    }

    /// Begins an operation.
    ///
    /// # Errors
    /// [`Error::Closed`] once closed, and in a forked child.
    pub fn enter(self: &Arc<Gate>) -> Result<Pass, Error> {
        if self.forked() {
            return Err(Error::Closed(FORKED));
        }
        let mut state = self.state.lock();
        if state.closed {
            return Err(Error::Closed(""));
        }
        state.inside += 1;
        Ok(Pass(Arc::clone(self)))
    }

    /// Whether this process is a fork of the one that made the gate.
    pub fn forked(&self) -> bool {
        fork::epoch() != self.epoch
    }

    /// Refuses new operations, and leaves the rest to the first who asks. Any other waits until
    /// that one has come to the end, and has nothing left to do.
    pub fn close(&self) -> Option<Closing<'_>> {
        let mut state = self.state.lock();
        if !std::mem::replace(&mut state.closed, true) {
            CLOSING.fetch_add(1, Ordering::SeqCst);
            return Some(Closing(self));
        }
        while !state.ended {
            self.ended.wait(&mut state);
        }
        None
    }

    /// Waits until nobody is inside.
    pub fn wait_empty(&self, timeout: Duration) -> bool {
        let deadline = clock::now().checked_add(timeout);
        let mut state = self.state.lock();
        while state.inside > 0 {
            match deadline {
                None => self.empty.wait(&mut state),
                Some(deadline) if self.empty.wait_until(&mut state, deadline).timed_out() => {
                    return state.inside == 0;
                }
                Some(_) => {}
            }
        }
        true
    }
}

/// The one who closes. Dropped at the end.
#[must_use]
pub struct Closing<'a>(&'a Gate);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        CLOSING.fetch_sub(1, Ordering::SeqCst);
        self.0.state.lock().ended = true;
        self.0.ended.notify_all();
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.inside -= 1;
        if state.inside == 0 {
            self.0.empty.notify_all();
        }
    }
}
