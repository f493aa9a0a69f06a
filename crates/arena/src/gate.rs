//! An operation gate, to close an object: operations hold a pass, and closing waits for all of
//! them.
//!
//! If two threads close the same object, the second one waits for the first.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use kvdepot_host::Condvar;
use kvdepot_host::fork;
use parking_lot::Mutex;

use crate::clock;
use crate::error::Error;

/// Text of [`Error::Closed`] in a forked child.
pub const FORKED: &str =
    ": it was opened before this process was forked; open it again in this process";

/// A counter of operations in progress. It rejects new operations once it is closed, or in a forked
/// child.
pub struct Gate {
    state: Mutex<State>,
    hurries: AtomicBool,
    empty: Condvar,
    ended: Condvar,
    epoch: u64,
}

#[derive(Default)]
struct State {
    inside: usize,
    /// Operations in progress that have a name.
    named: Vec<Named>,
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

/// Operations in progress of one name.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Named {
    /// The name.
    pub op: &'static str,
    /// Number of these operations.
    pub calls: usize,
    /// Number of keys of all of them.
    pub keys: usize,
}

/// A guard of one operation in progress.
pub struct Pass {
    gate: Arc<Gate>,
    /// Position of its name, and its number of keys.
    named: Option<(usize, usize)>,
}

impl Gate {
    /// Creates an open gate.
    ///
    /// # Errors
    ///
    /// [`Error::Host`] if the fork handlers cannot be installed.
    pub fn new() -> Result<Arc<Gate>, Error> {
        fork::install()?;
        Ok(Arc::new(Gate {
            state: Mutex::new(State::default()),
            hurries: AtomicBool::new(false),
            empty: Condvar::new(),
            ended: Condvar::new(),
            epoch: fork::epoch(),
        }))
    }

    /// Begins an operation, which ends when the pass is dropped.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`] if the gate is closed, and in a forked child.
    pub fn enter(self: &Arc<Gate>) -> Result<Pass, Error> {
        self.admit(None)
    }

    /// As [`Gate::enter`], with a name and a number of keys, which a close reports if it waits.
    ///
    /// # Errors
    ///
    /// As [`Gate::enter`].
    pub fn enter_as(self: &Arc<Gate>, op: &'static str, keys: usize) -> Result<Pass, Error> {
        self.admit(Some((op, keys)))
    }

    fn admit(self: &Arc<Gate>, named: Option<(&'static str, usize)>) -> Result<Pass, Error> {
        if self.forked() {
            return Err(Error::Closed(FORKED));
        }
        let mut state = self.state.lock();
        if state.closed {
            return Err(Error::Closed(""));
        }
        state.inside += 1;
        let named = named.map(|(op, keys)| {
            let found = state.named.iter().position(|one| one.op == op);
            let at = found.unwrap_or_else(|| {
                let (calls, keys) = (0, 0);
                state.named.push(Named { op, calls, keys });
                state.named.len() - 1
            });
            state.named[at].calls += 1;
            state.named[at].keys += keys;
            (at, keys)
        });
        Ok(Pass {
            gate: Arc::clone(self),
            named,
        })
    }

    /// Returns true if this process is a fork of the one that created the gate.
    pub fn forked(&self) -> bool {
        fork::epoch() != self.epoch
    }

    /// Rejects new operations and, for the first caller, returns a guard with which it completes
    /// the closing.
    ///
    /// All other callers wait until the first one has finished, and get `None`.
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

    /// Asks operations in progress to end early: the time to wait for them is over.
    pub fn hurry(&self) {
        self.hurries.store(true, Ordering::Release);
    }

    /// Returns true if operations in progress should end early.
    pub fn hurries(&self) -> bool {
        self.hurries.load(Ordering::Acquire)
    }

    /// Returns the operations in progress that have a name.
    pub fn named(&self) -> Vec<Named> {
        let state = self.state.lock();
        let named = state.named.iter().filter(|one| one.calls > 0);
        named.copied().collect()
    }

    /// Waits until no operation is in progress. Returns false if `timeout` expires first.
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

/// A guard of the thread that closes a gate; it drops the guard when the closing is complete.
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
        let mut state = self.gate.state.lock();
        if let Some((at, keys)) = self.named {
            state.named[at].calls -= 1;
            state.named[at].keys -= keys;
        }
        state.inside -= 1;
        if state.inside == 0 {
            self.gate.empty.notify_all();
        }
    }
}
