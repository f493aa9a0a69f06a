//! What the objects of an engine share: the engine, the process that it is of, who is told of its
//! tasks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvdepot_store::{Error as StoreError, Origin};
use kvdepot_transfer::{Engine, Error};
use parking_lot::Mutex;
use pyo3::prelude::*;

use super::callbacks::Callbacks;
use crate::handle::{self, Closing};
use crate::{errors, wait};

/// An engine that was started here.
pub(super) struct Shared {
    /// `None` only while dropping.
    engine: Option<Arc<Engine>>,
    pub(super) callbacks: Callbacks,
    pub(super) origin: Origin,
    /// Set before it is closed: calls are refused from then on.
    is_closing: AtomicBool,
    /// Locked while it is being closed.
    is_closed: Mutex<bool>,
}

impl Shared {
    pub(super) fn new(py: Python<'_>, engine: Engine) -> PyResult<Arc<Shared>> {
        let shared = Arc::new(Shared {
            engine: Some(Arc::new(engine)),
            callbacks: Callbacks::default(),
            origin: handle::origin(py)?,
            is_closing: AtomicBool::new(false),
            is_closed: Mutex::new(false),
        });
        handle::register(&shared);
        Ok(shared)
    }

    /// The engine, in the process that started it: a forked child has a copy of its locks, which
    /// may be held for ever.
    pub(super) fn engine(&self, py: Python<'_>) -> PyResult<&Arc<Engine>> {
        self.check_process(py)?;
        match &self.engine {
            Some(engine) => Ok(engine),
            None => Err(refusal(py, Error::Closed)),
        }
    }

    pub(super) fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        if self.origin.is_here() {
            return Ok(());
        }
        let word = "the engine was started before this process was forked; start an engine in this \
                    process";
        Err(errors::raise(py, StoreError::Closed(word)))
    }

    /// Whether calls are refused.
    pub(super) fn is_closed(&self) -> bool {
        !self.origin.is_here() || self.is_closing.load(Ordering::Acquire)
    }

    /// Whether nothing of the engine is under way any more, and nothing will be.
    pub(super) fn is_over(&self) -> bool {
        self.origin.is_here() && self.is_closed.try_lock().is_some_and(|closed| *closed)
    }

    /// Closes it as a call of Python's does.
    pub(super) fn close_from(self: &Arc<Self>, py: Python<'_>) -> PyResult<()> {
        if !self.origin.is_here() {
            return Ok(());
        }
        // One of its own calls does not wait for itself.
        let join = !self.callbacks.is_here();
        let shared = Arc::clone(self);
        wait::close(py, move || shared.end(join))
    }

    /// Ends all that is under way; with `join` also what Python is told of it.
    fn end(&self, join: bool) {
        self.is_closing.store(true, Ordering::Release);
        if let Some(engine) = &self.engine {
            let mut closed = self.is_closed.lock();
            if !*closed {
                engine.close();
            }
            *closed = true;
        }
        // All that has ended is in its queue by now.
        self.callbacks.close(join);
    }
}

impl Closing for Shared {
    fn close(&self) {
        if self.origin.is_here() {
            self.end(true);
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let engine = self.engine.take();
        if !self.origin.is_here() {
            // The child never touches the parent's engine; its memory goes with the process.
            let _kept = std::mem::ManuallyDrop::new(engine);
            return;
        }
        handle::drop_detached(engine);
        self.callbacks.close(false);
    }
}

/// The exception for an error of an engine, whose arguments were wrong where something was.
pub(super) fn refusal(py: Python<'_>, error: Error) -> PyErr {
    match error {
        Error::Input {
            field,
            value,
            allowed,
        } => errors::input(py, field, value, allowed),
        Error::Closed => errors::raise(py, StoreError::Closed("the transfer engine is closed")),
        other => errors::other(py, other.to_string()),
    }
}
