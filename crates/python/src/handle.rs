//! What the objects that Python sees share: the depot behind them, and the list of all that is
//! open, which is closed before the interpreter ends.

use std::mem::ManuallyDrop;
use std::sync::{Arc, Weak};

use kvdepot_store::{Depot, Error};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::{errors, keep, wait};

/// Something to close before the interpreter ends.
pub(crate) trait Closing: Send + Sync {
    /// Waits for what is under way and refuses new work.
    fn close(&self);
}

static OPEN: Mutex<Vec<Weak<dyn Closing>>> = Mutex::new(Vec::new());

/// Adds something to close at exit.
pub(crate) fn register<T: Closing + 'static>(what: &Arc<T>) {
    let what: Arc<dyn Closing> = Arc::<T>::clone(what);
    let mut open = OPEN.lock();
    open.retain(|entry| entry.strong_count() > 0);
    open.push(Arc::downgrade(&what));
}

/// Closes every open depot and mover; runs at exit.
#[pyfunction(name = "_close_all")]
pub(crate) fn close_all(py: Python<'_>) -> PyResult<()> {
    keep::end();
    let open = std::mem::take(&mut *OPEN.lock());
    for what in open.iter().filter_map(Weak::upgrade) {
        wait::on_thread(py, move || what.close())?;
    }
    keep::sweep(py);
    Ok(())
}

/// An open depot, and the process that opened it.
pub(crate) struct Handle {
    /// `None` only while dropping.
    depot: Option<Depot>,
    pid: u32,
}

impl Handle {
    pub(crate) fn new(depot: Depot) -> Arc<Handle> {
        let handle = Arc::new(Handle {
            depot: Some(depot),
            pid: std::process::id(),
        });
        register(&handle);
        handle
    }

    /// The depot, in the process that opened it: a forked child has a copy of its locks, which
    /// may be held for ever.
    pub(crate) fn depot(&self, py: Python<'_>) -> PyResult<&Depot> {
        match &self.depot {
            Some(depot) if !self.forked() => Ok(depot),
            _ => Err(errors::raise(
                py,
                Error::Closed(": it belongs to the process this one was forked from; open it here"),
            )),
        }
    }

    /// Whether this process is a fork of the one that opened the depot.
    pub(crate) fn forked(&self) -> bool {
        std::process::id() != self.pid
    }
}

impl Closing for Handle {
    fn close(&self) {
        if let Some(depot) = &self.depot
            && !self.forked()
        {
            depot.close();
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let depot = self.depot.take();
        if self.forked() {
            // The child never touches the parent's depot; its memory goes with the process.
            let _kept = ManuallyDrop::new(depot);
            return;
        }
        drop_detached(depot);
    }
}

/// Drops what waits for its threads when it is dropped: other Python threads go on meanwhile.
pub(crate) fn drop_detached<T: Send>(value: T) {
    let mut value = Some(value);
    if Python::try_attach(|py| py.detach(|| drop(value.take()))).is_none() {
        // The interpreter is gone.
        drop(value);
    }
}
