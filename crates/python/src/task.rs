//! Tasks: what a put or get answers at once.

use std::sync::Arc;
use std::time::Duration;

use kvdepot_store::{Completions, Error, Origin, Task as StoreTask};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString};
use pyo3::{PyTraverseError, PyVisit};

use crate::keep::Keep;
use crate::{errors, wait};

/// A call in progress: a put, get, lookup or prefetch.
///
/// Dropping the task does not cancel it. kvdepot keeps the buffers alive while a copy thread uses
/// them.
#[pyclass(frozen, module = "kvdepot")]
pub(crate) struct Task {
    task: StoreTask,
    keep: Arc<Keep>,
    origin: Origin,
}

impl Task {
    pub(crate) fn new(task: StoreTask, keep: Arc<Keep>, origin: Origin) -> Task {
        Task { task, keep, origin }
    }

    /// Enters `number` into `completions` once the task has all its outcomes.
    pub(crate) fn watch(&self, completions: &Completions, number: u64) {
        completions.watch(&self.task, number);
    }

    /// One bool a key of a task that has ended; its buffers are let go.
    pub(crate) fn ended<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.keep.release(py);
        let outcomes = self.task.outcomes();
        PyList::new(
            py,
            outcomes.iter().map(|outcome| outcome.reason().is_none()),
        )
    }

    fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        if self.origin.is_here() {
            return Ok(());
        }
        let word = ": the task was started before this process was forked";
        Err(errors::raise(py, Error::Closed(word)))
    }

    /// Waits for a milestone at which the buffers are no longer touched.
    fn reach(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        what: &'static str,
        reached: impl Fn(Duration) -> bool + Sync,
    ) -> PyResult<()> {
        let limit = wait::timeout(py, timeout)?;
        self.check_process(py)?;
        if !wait::until(py, limit, reached)? {
            let seconds = limit.map_or(0.0, |limit| limit.as_secs_f64());
            return Err(errors::raise(py, Error::Timeout { what, seconds }));
        }
        self.keep.release(py);
        Ok(())
    }
}

#[pymethods]
impl Task {
    /// Waits until every key has its outcome.
    ///
    /// An outcome is true when a put's block is acknowledged, a get's buffer is filled, a lookup
    /// has found the block, or a prefetched block is in the first tier. The call also works after
    /// `close`.
    ///
    /// Args:
    ///     timeout: Seconds to wait. Default: no limit.
    ///
    /// Returns:
    ///     One bool per key; `errors` has the reason for each False.
    ///
    /// Raises:
    ///     TimeoutError: The wait timed out. The task continues.
    #[pyo3(signature = (timeout = None))]
    fn wait<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Bound<'py, PyList>> {
        let reached = |slice| self.task.wait(Some(slice)).is_ok();
        self.reach(py, timeout, "the task", reached)?;
        self.ended(py)
    }

    /// Waits in a coroutine of asyncio until every key has its outcome: `outcomes = await task`.
    ///
    /// Cancelling the coroutine does not cancel the task.
    ///
    /// Returns:
    ///     One bool per key, as `wait`.
    fn __await__<'py>(slf: &Bound<'py, Task>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        slf.get().check_process(py)?;
        let wait = py.import("kvdepot._awaiting")?.getattr("wait")?;
        wait.call1((slf,))?.call_method0("__await__")
    }

    /// Waits until kvdepot has stopped using the buffers, so that the caller may reuse them.
    ///
    /// Args:
    ///     timeout: Seconds to wait. Default: no limit.
    ///
    /// Raises:
    ///     TimeoutError: The wait timed out. The task continues.
    #[pyo3(signature = (timeout = None))]
    fn wait_released(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let reached = |slice| self.task.wait_released(Some(slice)).is_ok();
        self.reach(py, timeout, "the release of the buffers", reached)
    }

    /// True when every key has its outcome.
    #[getter]
    fn done(&self, py: Python<'_>) -> bool {
        let done = self.task.is_done();
        if done {
            self.keep.release(py);
        }
        done
    }

    /// The reason for each key, in the order of the keys.
    ///
    /// None means success. The reasons are "pending" (unknown yet), "miss", "corrupt", "length",
    /// "full", "dropped", "declined" and "closed" (docs/errors.md).
    #[getter]
    fn errors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let outcomes = self.task.outcomes();
        let reasons = outcomes.iter().map(|outcome| {
            let reason = outcome.reason();
            reason.map(|reason| PyString::intern(py, reason))
        });
        PyList::new(py, reasons)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        // Before, the lanes have them too, and let them go by themselves. In a forked child nobody
        // does, and the task's lock may be held.
        match self.origin.is_here() && self.task.is_done() {
            true => self.keep.traverse(&visit),
            false => Ok(()),
        }
    }

    fn __len__(&self) -> usize {
        self.task.outcomes().len()
    }

    fn __repr__(&self) -> String {
        let done = if self.task.is_done() {
            "done"
        } else {
            "in progress"
        };
        format!("<kvdepot.Task of {} keys, {done}>", self.__len__())
    }
}
