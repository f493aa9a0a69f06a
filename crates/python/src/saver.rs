//! Saves in the background: `kvdepot.sessions.Saver` and `Snapshot`.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_session::Error;
use kvdepot_session::background::{
    Fit, Limits, OnEnd, Saver as StoreSaver, Slice, Snapshot as StoreSnapshot, Ticket,
};
use kvdepot_store::Error as DepotError;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::checkpoint::{self, Kept, Raised, Told, raise, rows_of};
use crate::devices::size_of;
use crate::handle::{Closing, Handle, Owned, register};
use crate::keys::Tokens;
use crate::policy::{Policy, now};
use crate::sessions::Sessions;
use crate::{errors, wait};

/// What has a thread, and is ended before the interpreter is.
struct Writer(StoreSaver);

impl Closing for Writer {
    fn close(&self) {
        self.0.cancel();
    }
}

/// Saves sessions on a thread of its own while the engine goes on. `memory` bounds the bytes that
/// all snapshots have, `pace` the bytes a second that are written. As a context manager it finishes
/// what was copied, or cancels all where an exception has ended the block.
#[pyclass(frozen, module = "kvdepot.sessions")]
pub(crate) struct Saver {
    writer: Owned<Arc<Writer>>,
    handle: Arc<Handle>,
}

/// A snapshot that is being taken: its rows are copied in slices, between the engine's steps.
/// Dropped before all was, its save is cancelled.
#[pyclass(frozen, module = "kvdepot.sessions")]
pub(crate) struct Snapshot {
    snapshot: Owned<Mutex<StoreSnapshot>>,
    ticket: Owned<Ticket>,
    kept: Kept,
}

fn late(py: Python<'_>, what: &'static str, limit: Option<Duration>) -> PyErr {
    let seconds = limit.map_or(0.0, |limit| limit.as_secs_f64());
    errors::raise(py, DepotError::Timeout { what, seconds })
}

/// What a policy has granted, until it is told the end: also where the save is refused before it
/// has begun.
struct Grant {
    policy: Arc<Mutex<kvdepot_session::policy::Policy>>,
    save: u64,
    is_told: bool,
}

impl Grant {
    fn tell(&mut self, is_saved: bool, bytes: u64) {
        self.is_told = true;
        let (mut policy, at) = (self.policy.lock(), now(None));
        let told = match is_saved {
            true => policy.saved(self.save, bytes, at),
            false => policy.failed(self.save, bytes, at),
        };
        if let Err(error) = told {
            tracing::warn!(%error, "a policy was told of a save that it does not know");
        }
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        if !self.is_told {
            self.tell(false, 0);
        }
    }
}

/// A policy that granted the save, and is told its end.
fn told_at_end(
    py: Python<'_>,
    policy: Option<&Bound<'_, Policy>>,
    save: Option<u64>,
) -> PyResult<Option<OnEnd>> {
    match (policy, save) {
        (None, None) => Ok(None),
        (Some(policy), Some(save)) => {
            let mut grant = Grant {
                policy: policy.get().shared(),
                save,
                is_told: false,
            };
            Ok(Some(Box::new(move |saved, bytes| {
                grant.tell(saved.is_ok(), bytes);
            })))
        }
        (policy, _) => {
            let (field, given) = match policy {
                Some(_) => ("save", "None"),
                None => ("policy", "None"),
            };
            Err(errors::input(
                py,
                field,
                given,
                "both policy and save, or neither",
            ))
        }
    }
}

impl Saver {
    /// Waits in slices, so that Ctrl-C ends the wait.
    fn waits(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        reached: impl Fn(&StoreSaver, Duration) -> bool + Sync,
    ) -> PyResult<()> {
        let limit = wait::timeout(py, timeout)?;
        let writer = self.writer.get(py)?;
        match wait::until(py, limit, |slice| reached(&writer.0, slice))? {
            true => Ok(()),
            false => Err(late(py, "saves in the background", limit)),
        }
    }
}

#[pymethods]
impl Saver {
    #[new]
    #[pyo3(signature = (sessions, *, memory, pace = None))]
    fn new(
        py: Python<'_>,
        sessions: &Sessions,
        memory: &Bound<'_, PyAny>,
        pace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Saver> {
        sessions.handle.depot(py)?;
        let limits = Limits {
            memory: size_of("memory", memory)?,
            pace: pace.map(|pace| size_of("pace", pace)).transpose()?,
        };
        let made = StoreSaver::new(&sessions.store, limits).map_err(|error| raise(py, error))?;
        let writer = Arc::new(Writer(made));
        register(&writer);
        Ok(Saver {
            writer: Owned::new(writer, &sessions.handle),
            handle: Arc::clone(&sessions.handle),
        })
    }

    /// Bytes that snapshots have in memory now.
    #[getter]
    fn memory_used(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.writer.get(py)?.0.memory_used())
    }

    /// Begins a save. `rows` is called once, as `Sessions.save` does; what it answers with stays as
    /// it is until nothing is `left`; `objects` are copied now. The snapshot takes room piece by
    /// piece, as others are written, or with `whole` all of it at once; for what it takes now it
    /// waits for `within` seconds. `policy` is told the end of `save`, which it has granted. The
    /// other arguments are those of `Sessions.save`.
    ///
    /// Raises Error where there is no room in time.
    #[pyo3(
        signature = (
            tokens, rows, *, whole = false, within = 0.0, policy = None, save = None, **told
        ),
        text_signature = "($self, tokens, rows, *, whole=False, within=0.0, policy=None, \
                          save=None, text=None, reason='asked', context_tokens=0, objects=None, \
                          note='', created=None)"
    )]
    #[expect(clippy::too_many_arguments, reason = "one a way to take the snapshot")]
    fn begin<'py>(
        &self,
        py: Python<'py>,
        tokens: Tokens,
        rows: Py<PyAny>,
        whole: bool,
        within: f64,
        policy: Option<&Bound<'py, Policy>>,
        save: Option<u64>,
        told: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Snapshot> {
        let on_end = told_at_end(py, policy, save)?;
        let within = wait::timeout(py, Some(within))?.unwrap_or(Duration::MAX);
        let fit = match whole {
            true => Fit::Whole(within),
            false => Fit::Piecewise(within),
        };
        let told = Told::named(py, told)?;
        let (raised, kept) = (Raised::default(), Kept::default());
        let writer = self.writer.get(py)?;
        let begun = wait::call(py, || {
            let rows = |runs: &[Range<usize>]| rows_of(&rows, runs, &kept, &raised);
            let checkpoint = told.checkpoint(&tokens, false);
            writer.0.begin(checkpoint, fit, Box::new(rows), on_end)
        })?;
        told.release(py);
        let begun = raised.or(begun.map_err(|error| raise(py, error)))?;
        let snapshot = Snapshot {
            ticket: Owned::new(begun.ticket(), &self.handle),
            snapshot: Owned::new(Mutex::new(begun), &self.handle),
            kept,
        };
        snapshot.let_go(py)?;
        Ok(snapshot)
    }

    /// Waits, without a pace, until all saves have ended whose snapshot is taken.
    ///
    /// Raises TimeoutError after `timeout` seconds; they go on.
    #[pyo3(signature = (timeout = None))]
    fn flush(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        self.waits(py, timeout, |saver, slice| saver.flush(Some(slice)).is_ok())
    }

    /// Ends: saves whose snapshot is taken are finished, without a pace, and others are cancelled.
    ///
    /// Raises TimeoutError after `timeout` seconds; it goes on, and may be called again.
    #[pyo3(signature = (timeout = None))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        self.waits(py, timeout, |saver, slice| saver.close(Some(slice)).is_ok())
    }

    /// Ends now: what has not ended is cancelled, and nothing is left of it.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        let writer = self.writer.get(py)?;
        py.detach(|| writer.0.cancel());
        Ok(())
    }

    fn __enter__(slf: Py<Saver>) -> Py<Saver> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        match kind.is_none() {
            true => self.close(py, None),
            false => self.cancel(py),
        }
    }
}

impl Snapshot {
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        run: impl FnOnce(&mut StoreSnapshot) -> T + Send,
    ) -> PyResult<T> {
        let snapshot = self.snapshot.get(py)?;
        Ok(py.detach(|| run(&mut snapshot.lock())))
    }

    /// Lets the engine's memory go once all of it was copied.
    fn let_go(&self, py: Python<'_>) -> PyResult<()> {
        if self.call(py, |snapshot| snapshot.left())? == 0 {
            for keep in self.kept.lock().drain(..) {
                keep.release(py);
            }
        }
        Ok(())
    }
}

#[pymethods]
impl Snapshot {
    /// Bytes that are left to be copied. At 0 the engine's memory is its own again.
    #[getter]
    fn left(&self, py: Python<'_>) -> PyResult<u64> {
        self.call(py, |snapshot| snapshot.left())
    }

    /// Copies a slice, of so many bytes or for so many seconds, and never waits: a dictionary with
    /// `copied`, `left`, and `full` where it has ended for lack of room.
    ///
    /// Raises Error where the save has failed meanwhile.
    #[pyo3(signature = (*, bytes = None, seconds = None))]
    fn step<'py>(
        &self,
        py: Python<'py>,
        bytes: Option<u64>,
        seconds: Option<f64>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let slice = match (bytes, seconds) {
            (Some(bytes), None) => Slice::Bytes(bytes),
            (None, Some(seconds)) => {
                Slice::Time(wait::timeout(py, Some(seconds))?.unwrap_or(Duration::MAX))
            }
            _ => {
                let allowed = "one of bytes and seconds";
                return Err(errors::input(py, "bytes", "both, or neither", allowed));
            }
        };
        let step = self.call(py, |snapshot| snapshot.step(slice))?;
        let step = step.map_err(|error| raise(py, error))?;
        self.let_go(py)?;
        let said = PyDict::new(py);
        said.set_item("copied", step.copied)?;
        said.set_item("left", step.left)?;
        said.set_item("full", step.is_full)?;
        Ok(said)
    }

    /// Copies all that is left, and waits for room where there is none.
    ///
    /// Raises TimeoutError after `timeout` seconds; it goes on then.
    #[pyo3(signature = (timeout = None))]
    fn finish(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let limit = wait::timeout(py, timeout)?;
        let snapshot = self.snapshot.get(py)?;
        let failed = Mutex::new(None);
        let done = wait::until(py, limit, |slice| {
            match snapshot.lock().finish(Some(slice)) {
                Ok(()) => true,
                Err(Error::Depot(DepotError::Timeout { .. })) => false,
                Err(error) => {
                    *failed.lock() = Some(error);
                    true
                }
            }
        })?;
        if let Some(error) = failed.into_inner() {
            return Err(raise(py, error));
        }
        self.let_go(py)?;
        match done {
            true => Ok(()),
            false => Err(late(py, "room for a snapshot", limit)),
        }
    }

    /// How far the save has come: `bytes` that were not there, `copied`, `written`, and `over`.
    fn progress<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let progress = self.ticket.get(py)?.progress();
        let said = PyDict::new(py);
        said.set_item("bytes", progress.bytes)?;
        said.set_item("copied", progress.copied)?;
        said.set_item("written", progress.written)?;
        said.set_item("over", progress.is_over)?;
        Ok(said)
    }

    /// Waits for the end of the save; what `Sessions.save` answers.
    ///
    /// Raises Error where it has failed, TimeoutError after `timeout` seconds; it goes on then.
    #[pyo3(signature = (timeout = None))]
    fn wait<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Bound<'py, PyDict>> {
        let limit = wait::timeout(py, timeout)?;
        let ticket = self.ticket.get(py)?;
        let is_over = |slice| {
            let _waited = ticket.wait(Some(slice));
            ticket.progress().is_over
        };
        if !wait::until(py, limit, is_over)? {
            return Err(late(py, "a save in the background", limit));
        }
        let saved = ticket.wait(Some(Duration::ZERO));
        checkpoint::saved(py, &saved.map_err(|error| raise(py, error))?)
    }
}
