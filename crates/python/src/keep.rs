//! Keeps the Python objects behind a call's memory alive until no lane touches it.
//!
//! The buffers of a call share a [`Hold`], and the task that Python sees has the same [`Keep`].
//! When the task is known to be over, it empties the keep at once. Whoever lets the last buffer go
//! empties it too, so a task that nobody asks, or that was dropped, keeps nothing. That is mostly
//! a lane, which does not have the interpreter: it queues the objects and asks the interpreter's
//! main thread to let them go.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

/// Objects that must live as long as their memory may be touched.
pub(crate) struct Keep(Mutex<Vec<Py<PyAny>>>);

/// Objects that wait for a thread with the interpreter. Locked before a keep, where both are.
static LEFT_BEHIND: Mutex<Vec<Py<PyAny>>> = Mutex::new(Vec::new());

/// Whether the main thread has been asked to look after them: its queue is short.
static ASKED: AtomicBool = AtomicBool::new(false);

/// Set when the interpreter is about to end: nobody may call into it any more.
static ENDING: AtomicBool = AtomicBool::new(false);

impl Keep {
    pub(crate) fn new(objects: Vec<Py<PyAny>>) -> Arc<Keep> {
        Arc::new(Keep(Mutex::new(objects)))
    }

    /// Lets the objects go. Only once no lane touches their memory any more.
    pub(crate) fn release(&self, py: Python<'_>) {
        let objects = std::mem::take(&mut *self.0.lock());
        // Outside the lock: the last reference to an object may run any Python code.
        drop(objects);
        // Or a lane has just come before.
        sweep(py);
    }

    /// Shows the objects to the garbage collector. Only once no lane touches their memory any
    /// more: the collector lets go of the memory of what nobody but garbage refers to.
    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        // Nobody runs Python code under the lock, and a lane holds it for some instructions. What
        // is not shown is not collected this time.
        match self.0.try_lock() {
            Some(objects) => objects.iter().try_for_each(|object| visit.call(object)),
            None => Ok(()),
        }
    }
}

/// What every buffer of a call holds.
pub(crate) struct Hold(pub(crate) Arc<Keep>);

impl Drop for Hold {
    fn drop(&mut self) {
        // First the list: whoever finds the keep empty waits here for what was in it.
        let mut left = LEFT_BEHIND.lock();
        let mut objects = self.0.0.lock();
        if objects.is_empty() {
            return;
        }
        left.append(&mut objects);
        drop((objects, left));
        if !ENDING.load(Ordering::SeqCst) && !ASKED.swap(true, Ordering::SeqCst) {
            // SAFETY: may be called from any thread, attached or not, while the interpreter
            // lives; `ENDING` is set before it begins to end.
            let added =
                unsafe { pyo3::ffi::Py_AddPendingCall(Some(sweep_pending), std::ptr::null_mut()) };
            if added != 0 {
                // The queue is full. The next call of `sweep` takes the objects too.
                ASKED.store(false, Ordering::SeqCst);
            }
        }
    }
}

extern "C" fn sweep_pending(_argument: *mut c_void) -> c_int {
    ASKED.store(false, Ordering::SeqCst);
    // Runs in the main thread, which is attached: this only tells PyO3 so.
    Python::attach(sweep);
    0
}

/// Lets go of what lanes could not.
pub(crate) fn sweep(_py: Python<'_>) {
    let objects = std::mem::take(&mut *LEFT_BEHIND.lock());
    drop(objects);
}

/// From now on nobody calls into the interpreter.
pub(crate) fn end() {
    ENDING.store(true, Ordering::SeqCst);
}
