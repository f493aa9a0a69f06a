//! What the objects that Python sees share: the depot behind them, and the list of all that is
//! open, which is closed before the interpreter ends.

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use kvdepot_store::{Depot, Error, Origin};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::{errors, keep, wait};

/// Something to close before the interpreter ends.
pub(crate) trait Closing: Send + Sync {
    /// Waits for what is under way and refuses new work.
    fn close(&self);

    /// What lives until all of it is gone, where others than the interpreter's threads may drop it,
    /// which waits for what is under way too.
    fn alive(&self) -> Weak<Origin> {
        Weak::new()
    }
}

/// Something that was open, and what of it is still alive.
type Opened = (Weak<dyn Closing>, Weak<Origin>);

static OPEN: Mutex<Vec<Opened>> = Mutex::new(Vec::new());

/// How often whoever waits for what is being dropped looks.
const LOOK: Duration = Duration::from_millis(1);

/// Adds something to close at exit.
pub(crate) fn register<T: Closing + 'static>(what: &Arc<T>) {
    let what: Arc<dyn Closing> = Arc::<T>::clone(what);
    let mut open = OPEN.lock();
    open.retain(|(what, alive)| what.strong_count() > 0 || alive.strong_count() > 0);
    open.push((Arc::downgrade(&what), what.alive()));
}

/// Closes every open depot and mover, all at once; runs at exit. Signals are told at the end: lanes
/// must not write into the memory of an interpreter that ends, and what waits for a far tier has
/// until `close_timeout`.
#[pyfunction(name = "_close_all")]
pub(crate) fn close_all(py: Python<'_>) -> PyResult<()> {
    keep::end();
    let (mut open, mut going) = (Vec::new(), Vec::new());
    for (what, alive) in std::mem::take(&mut *OPEN.lock()) {
        match what.upgrade() {
            Some(what) => open.push(what),
            None => going.push(alive),
        }
    }
    let (done, closed) = mpsc::channel();
    let mut threads = Vec::new();
    for what in open {
        let close = {
            let (what, done) = (Arc::clone(&what), done.clone());
            move || {
                what.close();
                // Before the word, so that nothing of it is left to this thread.
                drop(what);
                // It is heard: below nobody leaves before.
                let _heard = done.send(());
            }
        };
        match thread::Builder::new()
            .name("kvdepot-call".into())
            .spawn(close)
        {
            Ok(thread) => threads.push(thread),
            // No thread can be had: then here.
            Err(_) => py.detach(|| what.close()),
        }
    }
    drop(done);
    let closed = Mutex::new(closed);
    let (mut first, mut left) = (None, threads.len());
    while left > 0 {
        match py.detach(|| closed.lock().recv_timeout(wait::SLICE)) {
            Ok(()) => left -= 1,
            // One of them panicked.
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Err(raised) = py.check_signals() {
            first.get_or_insert(raised);
        }
    }
    // They have nothing left to do: whoever looks for our threads finds none.
    py.detach(|| threads.into_iter().for_each(|thread| drop(thread.join())));
    // Nobody drops in a forked child what the parent was dropping.
    let is_alive = |alive: &Weak<Origin>| alive.upgrade().is_some_and(|origin| origin.is_here());
    while going.iter().any(is_alive) {
        py.detach(|| thread::sleep(LOOK));
        if let Err(raised) = py.check_signals() {
            first.get_or_insert(raised);
        }
    }
    keep::sweep(py);
    first.map_or(Ok(()), Err)
}

/// This process, for what its children must not use.
pub(crate) fn origin(py: Python<'_>) -> PyResult<Origin> {
    Origin::here().map_err(|error| errors::raise(py, error.into()))
}

/// An open depot, and the process that opened it.
pub(crate) struct Handle {
    /// `None` only while dropping.
    depot: Option<Depot>,
    pub(crate) origin: Origin,
    closed: AtomicBool,
}

impl Handle {
    pub(crate) fn new(py: Python<'_>, depot: Depot) -> PyResult<Arc<Handle>> {
        let handle = Arc::new(Handle {
            depot: Some(depot),
            origin: origin(py)?,
            closed: AtomicBool::new(false),
        });
        register(&handle);
        Ok(handle)
    }

    /// The depot, in the process that opened it: a forked child has a copy of its locks, which
    /// may be held for ever.
    pub(crate) fn depot(&self, py: Python<'_>) -> PyResult<&Depot> {
        match &self.depot {
            Some(depot) if !self.forked() => Ok(depot),
            _ => Err(errors::raise(
                py,
                Error::Closed(
                    ": it was opened before this process was forked; open it again in this process",
                ),
            )),
        }
    }

    /// Whether calls are refused: it is closed or about to be, or another process's.
    pub(crate) fn is_closed(&self) -> bool {
        self.forked() || self.closed.load(Ordering::Acquire)
    }

    /// Whether this process is a fork of the one that opened the depot.
    pub(crate) fn forked(&self) -> bool {
        !self.origin.is_here()
    }
}

impl Closing for Handle {
    fn close(&self) {
        if let Some(depot) = &self.depot
            && !self.forked()
        {
            self.closed.store(true, Ordering::Release);
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

/// Something that is ended when it is dropped, in the process alone that has opened it: a fork has
/// a copy of its locks, which may be held for ever.
pub(crate) struct Owned<T: Send> {
    /// `None` only while dropping.
    value: Option<T>,
    handle: Arc<Handle>,
}

impl<T: Send> Owned<T> {
    pub(crate) fn new(value: T, handle: &Arc<Handle>) -> Owned<T> {
        Owned {
            value: Some(value),
            handle: Arc::clone(handle),
        }
    }

    /// It, in the process that has opened it.
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<&T> {
        self.handle.depot(py)?;
        let closed = || errors::raise(py, Error::Closed(": this object is closed too"));
        self.value.as_ref().ok_or_else(closed)
    }
}

impl<T: Send> Drop for Owned<T> {
    fn drop(&mut self) {
        let value = self.value.take();
        match self.handle.forked() {
            true => {
                let _kept = ManuallyDrop::new(value);
            }
            false => drop_detached(value),
        }
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
