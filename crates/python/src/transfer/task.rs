//! Tasks: batches under way, and what became of each request.

use std::sync::Arc;
use std::time::Duration;

use kvdepot_store::{Completions, Error};
use kvdepot_transfer::{Fault, Status, Task as Batch};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

use super::callbacks::{Call, Queue};
use super::shared::Shared;
use crate::{errors, keep, wait};

/// What waits for a task to be over. The engine has it, and the task.
#[derive(Default)]
pub(super) struct Ended(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    is_over: bool,
    queues: Vec<(Completions, u64)>,
    calls: Vec<(Arc<Queue>, Call)>,
}

impl Ended {
    /// The task is over: tells whoever waits. Waits for nothing.
    pub(super) fn settle(&self) {
        let mut waiting = self.0.lock();
        waiting.is_over = true;
        let queues = std::mem::take(&mut waiting.queues);
        let calls = std::mem::take(&mut waiting.calls);
        drop(waiting);
        for (queue, number) in queues {
            queue.enter(number);
        }
        for (queue, call) in calls {
            queue.push(call);
        }
    }

    fn is_over(&self) -> bool {
        self.0.lock().is_over
    }
}

/// A batch of requests in progress.
///
/// Dropping the task does not cancel it. Registered memory stays alive while the engine uses it.
#[pyclass(frozen, module = "kvdepot.transfer")]
pub(crate) struct Task {
    pub(super) batch: Batch,
    pub(super) shared: Arc<Shared>,
    ended: Arc<Ended>,
}

/// The number of a status, as `statuses` has it.
fn number(status: Status) -> u8 {
    match status {
        Status::Pending => 0,
        Status::Done => 1,
        Status::Failed(fault) => fault as u8,
    }
}

fn reason(py: Python<'_>, fault: Fault) -> Bound<'_, PyString> {
    PyString::intern(py, fault.name())
}

impl Task {
    pub(super) fn new(batch: Batch, shared: Arc<Shared>, ended: Arc<Ended>) -> Task {
        Task {
            batch,
            shared,
            ended,
        }
    }

    /// Enters `number` into `completions` once it is over.
    pub(crate) fn watch(&self, completions: &Completions, number: u64) {
        let mut waiting = self.ended.0.lock();
        if !waiting.is_over {
            waiting.queues.push((completions.clone(), number));
            return;
        }
        drop(waiting);
        completions.enter(number);
    }

    /// Whether all requests of a task that is over are done.
    pub(crate) fn answer(&self) -> bool {
        self.batch.is_done()
    }

    /// Waits as long as `limit`, whatever signals come.
    pub(super) fn reach(&self, py: Python<'_>, limit: Option<Duration>) -> PyResult<bool> {
        let over = wait::until(py, limit, |slice| self.batch.wait(Some(slice)))?;
        if over {
            // Memory that was unregistered meanwhile.
            keep::sweep(py);
        }
        Ok(over)
    }

    /// Calls `callback` with the task when it is over, in a thread for that; with `now` at once
    /// where it is.
    pub(super) fn call(
        slf: &Bound<'_, Task>,
        callback: &Bound<'_, PyAny>,
        now: bool,
    ) -> PyResult<()> {
        let task = slf.get();
        if !callback.is_callable() {
            let shown = errors::shown(callback);
            return Err(errors::input(slf.py(), "callback", shown, "a callable"));
        }
        let queue = task.shared.callbacks.queue()?;
        let call = Call {
            task: slf.clone().into_any().unbind(),
            callback: callback.clone().unbind(),
        };
        let mut waiting = task.ended.0.lock();
        if !waiting.is_over {
            waiting.calls.push((queue, call));
            return Ok(());
        }
        drop(waiting);
        match now {
            true => call.run(slf.py()),
            false => slf.py().detach(|| queue.push(call)),
        }
        Ok(())
    }
}

#[pymethods]
impl Task {
    /// Waits until the engine has stopped using the memory of the batch.
    ///
    /// The call also works after `close`.
    ///
    /// Args:
    ///     timeout: Seconds to wait. Default: no limit.
    ///
    /// Returns:
    ///     True if all requests are done; `errors` has the others.
    ///
    /// Raises:
    ///     TimeoutError: The wait timed out. The task continues until its own time-out.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let limit = wait::timeout(py, timeout)?;
        self.shared.check_process(py)?;
        if !self.reach(py, limit)? {
            let (what, seconds) = ("the task", limit.map_or(0.0, |limit| limit.as_secs_f64()));
            return Err(errors::raise(py, Error::Timeout { what, seconds }));
        }
        Ok(self.answer())
    }

    /// Waits in a coroutine of asyncio until the batch has ended: `done = await task`.
    ///
    /// Cancelling the coroutine does not cancel the task.
    ///
    /// Returns:
    ///     True if all requests are done, as `wait`.
    fn __await__<'py>(slf: &Bound<'py, Task>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        slf.get().shared.check_process(py)?;
        let wait = py.import("kvdepot._awaiting")?.getattr("wait")?;
        wait.call1((slf,))?.call_method0("__await__")
    }

    /// True when the engine has stopped using the memory of the batch.
    #[getter]
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        self.shared.check_process(py)?;
        Ok(self.ended.is_over())
    }

    /// Returns the result of `wait` without waiting.
    ///
    /// Returns:
    ///     True if all requests are done, False if one failed, None while the batch is in progress.
    fn poll(&self, py: Python<'_>) -> PyResult<Option<bool>> {
        Ok(self.done(py)?.then(|| self.answer()))
    }

    /// Returns the status of one request, also while others are in progress.
    ///
    /// Args:
    ///     index: Position of the request in the batch, from 0.
    ///
    /// Returns:
    ///     "pending", "done", or the reason of the failure (docs/transfer.md).
    ///
    /// Raises:
    ///     InputError: The batch has no such request.
    fn status<'py>(&self, py: Python<'py>, index: i128) -> PyResult<Bound<'py, PyString>> {
        let count = self.batch.len();
        let at = usize::try_from(index).ok().filter(|at| *at < count);
        let Some(at) = at else {
            let allowed = format!("the index of one of the {count} requests, 0 or more");
            return Err(errors::input(py, "index", index, allowed));
        };
        Ok(match self.batch.status(at) {
            Status::Pending => PyString::intern(py, "pending"),
            Status::Done => PyString::intern(py, "done"),
            Status::Failed(fault) => reason(py, fault),
        })
    }

    /// One byte per request: 0 pending, 1 done; others as in `kvdepot.transfer.STATUSES`.
    #[getter]
    fn statuses<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        PyBytes::new_with(py, self.batch.len(), |bytes| {
            for (byte, status) in bytes.iter_mut().zip(self.batch.statuses()) {
                *byte = number(status);
            }
            Ok(())
        })
    }

    /// The reason of each failed request, by its position in the batch.
    #[getter]
    fn errors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let errors = PyDict::new(py);
        for (index, status) in self.batch.statuses().enumerate() {
            if let Status::Failed(fault) = status {
                errors.set_item(index, reason(py, fault))?;
            }
        }
        Ok(errors)
    }

    /// Calls a function with the task when the batch has ended.
    ///
    /// The call comes from a thread of the engine; if the batch has ended already, directly from
    /// this method. An exception goes to `sys.unraisablehook`.
    ///
    /// Args:
    ///     callback: Function of one argument, the task.
    ///
    /// Raises:
    ///     InputError: `callback` cannot be called.
    fn add_done_callback(slf: &Bound<'_, Task>, callback: &Bound<'_, PyAny>) -> PyResult<()> {
        slf.get().shared.check_process(slf.py())?;
        Task::call(slf, callback, true)
    }

    fn __len__(&self) -> usize {
        self.batch.len()
    }

    fn __repr__(&self) -> String {
        let word = match self.batch.statuses().all(|one| one != Status::Pending) {
            true => "over",
            false => "in progress",
        };
        format!(
            "<kvdepot.transfer.Task of {} requests, {word}>",
            self.batch.len()
        )
    }
}
