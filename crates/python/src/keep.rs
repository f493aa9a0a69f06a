//! Keeps the Python objects behind a call's memory alive until no lane touches it.
//!
//! The lanes hold a [`Keep`] through the buffers, and so does the task that Python sees. When the
//! task is known to be over, it empties the keep at once. When a task is dropped early, a lane is
//! the last holder; a lane does not have the interpreter, so it queues the objects and asks the
//! interpreter's main thread to let them go.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use pyo3::prelude::*;

/// Objects that must live as long as their memory may be touched.
pub(crate) struct Keep(Mutex<Vec<Py<PyAny>>>);

/// Objects that wait for a thread with the interpreter.
static LEFT_BEHIND: Mutex<Vec<Py<PyAny>>> = Mutex::new(Vec::new());

/// Set when the interpreter is about to end: nobody may call into it any more.
static ENDING: AtomicBool = AtomicBool::new(false);

impl Keep {
    pub(crate) fn new(objects: Vec<Py<PyAny>>) -> Keep {
        Keep(Mutex::new(objects))
    }

    /// Lets the objects go. Only once no lane touches their memory any more.
    pub(crate) fn release(&self, _py: Python<'_>) {
        let objects = std::mem::take(&mut *self.0.lock());
        // Outside the lock: the last reference to an object may run any Python code.
        drop(objects);
    }
}

impl Drop for Keep {
    fn drop(&mut self) {
        let objects = std::mem::take(self.0.get_mut());
        if objects.is_empty() {
            return;
        }
        LEFT_BEHIND.lock().extend(objects);
        if !ENDING.load(Ordering::SeqCst) {
            // SAFETY: may be called from any thread, attached or not, while the interpreter
            // lives; `ENDING` is set before it begins to end. A full queue is harmless: the next
            // call of `sweep` takes the objects too.
            unsafe { pyo3::ffi::Py_AddPendingCall(Some(sweep_pending), std::ptr::null_mut()) };
        }
    }
}

extern "C" fn sweep_pending(_argument: *mut c_void) -> c_int {
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
