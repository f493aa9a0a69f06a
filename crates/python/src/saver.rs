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

/// Saves sessions on its own thread while the engine continues.
///
/// A context manager: leaving the block finishes the saves whose rows are copied. If an exception
/// ends the block, all saves are cancelled. In `kvdepot.sessions` its name is `Saver`.
///
/// Args:
///     sessions: The sessions of a depot.
///     memory: Most bytes that all snapshots together have in memory, or a text such as "256MiB".
///         At least a piece, and the objects of a save.
///     pace: Bytes per second to write, or a text. Default: no limit.
///
/// Raises:
///     InputError: A size is too small.
#[pyclass(frozen, module = "kvdepot.sessions")]
pub(crate) struct Saver {
    writer: Owned<Arc<Writer>>,
    handle: Arc<Handle>,
}

/// Rows of one save, which the engine copies in slices between its steps.
///
/// Dropping the snapshot before all rows are copied cancels its save.
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
            tracing::warn!(%error,
                "internal error: the checkpoint policy received a report about an unknown save; the \
                 save is not affected");
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
                "both policy and save, or neither of them",
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
            false => Err(late(py, "the wait for background saves", limit)),
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

    /// Starts a save.
    ///
    /// The memory that `rows` returned must not change until `left` of the snapshot is 0. Objects
    /// are copied immediately.
    ///
    /// Args:
    ///     tokens: Token ids of the state, from 0 to 2^32 - 1.
    ///     rows: Called once with the runs of missing tokens, as in `Sessions.save`.
    ///     whole: Reserve memory for the whole snapshot at once. With False it is reserved piece by
    ///         piece, as others are written.
    ///     within: Seconds to wait for the memory that is reserved now.
    ///     policy: The policy that granted the save; it is notified of the end.
    ///     save: The `save` number of the policy's answer.
    ///     text: Rendered text of the tokens, for `lookup_text`.
    ///     reason: Cause of the save, one of `kvdepot.sessions.REASONS`.
    ///     context_tokens: Context size of the engine, in tokens.
    ///     objects: Parts that do not grow with the tokens, by name.
    ///     note: Any text.
    ///     created: Time of the save in seconds since 1970. Default: now.
    ///
    /// Returns:
    ///     The snapshot. Call `step` or `finish` to copy its rows.
    ///
    /// Raises:
    ///     InputError: An argument is unsuitable.
    ///     Error: There is not enough memory within `within` seconds.
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

    /// Waits, without pace, for the end of all saves whose rows are copied.
    ///
    /// Args:
    ///     timeout: Seconds to wait. Default: no limit.
    ///
    /// Raises:
    ///     TimeoutError: The wait timed out. The saves continue.
    #[pyo3(signature = (timeout = None))]
    fn flush(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        self.waits(py, timeout, |saver, slice| saver.flush(Some(slice)).is_ok())
    }

    /// Finishes, without pace, the saves whose rows are copied, and cancels the others.
    ///
    /// Args:
    ///     timeout: Seconds to wait. Default: no limit.
    ///
    /// Raises:
    ///     TimeoutError: The wait timed out. The saves continue, and the call may be repeated.
    #[pyo3(signature = (timeout = None))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        self.waits(py, timeout, |saver, slice| saver.close(Some(slice)).is_ok())
    }

    /// Cancels all saves that have not ended, and removes their parts.
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
    /// Bytes that remain to be copied. At 0 the engine may reuse its memory.
    #[getter]
    fn left(&self, py: Python<'_>) -> PyResult<u64> {
        self.call(py, |snapshot| snapshot.left())
    }

    /// Copies a slice without waiting.
    ///
    /// Args:
    ///     bytes: Bytes to copy. Exactly one of `bytes` and `seconds` is required.
    ///     seconds: Time to copy for.
    ///
    /// Returns:
    ///     A dictionary: `copied` and `left` in bytes, and `full`, true if the slice ended because
    ///     memory was short.
    ///
    /// Raises:
    ///     InputError: Both or neither of the arguments were given.
    ///     Error: The save has failed.
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
                let allowed = "exactly one of bytes and seconds";
                return Err(errors::input(
                    py,
                    "bytes",
                    "this combination with seconds",
                    allowed,
                ));
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

    /// Copies all remaining rows, and waits for memory if it is short.
    ///
    /// Args:
    ///     timeout: Seconds to wait. Default: no limit.
    ///
    /// Raises:
    ///     TimeoutError: The wait timed out. The save continues.
    ///     Error: The save has failed.
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
            false => Err(late(py, "the wait for snapshot memory", limit)),
        }
    }

    /// Returns the progress of the save.
    ///
    /// Returns:
    ///     A dictionary: `bytes` that were missing, `copied` and `written` of them, and `over`,
    ///     true if the save has ended.
    fn progress<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let progress = self.ticket.get(py)?.progress();
        let said = PyDict::new(py);
        said.set_item("bytes", progress.bytes)?;
        said.set_item("copied", progress.copied)?;
        said.set_item("written", progress.written)?;
        said.set_item("over", progress.is_over)?;
        Ok(said)
    }

    /// Waits for the end of the save.
    ///
    /// Args:
    ///     timeout: Seconds to wait. Default: no limit.
    ///
    /// Returns:
    ///     A dictionary, as `Sessions.save`.
    ///
    /// Raises:
    ///     TimeoutError: The wait timed out. The save continues.
    ///     Error: The save has failed, or was cancelled.
    #[pyo3(signature = (timeout = None))]
    fn wait<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Bound<'py, PyDict>> {
        let limit = wait::timeout(py, timeout)?;
        let ticket = self.ticket.get(py)?;
        let is_over = |slice| {
            let _waited = ticket.wait(Some(slice));
            ticket.progress().is_over
        };
        if !wait::until(py, limit, is_over)? {
            return Err(late(py, "a background save", limit));
        }
        let saved = ticket.wait(Some(Duration::ZERO));
        checkpoint::saved(py, &saved.map_err(|error| raise(py, error))?)
    }
}
