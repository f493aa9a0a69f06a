//! Completions: many tasks behind one descriptor, for engines that submit and poll.

use std::collections::HashMap;

use kvdepot_store::{Completions as Queue, Error, Origin};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyList};
use pyo3::{PyTraverseError, PyVisit};

use crate::task::Task;
use crate::{errors, handle, transfer};

/// The ends of many tasks on one file descriptor, for event loops.
///
/// The descriptor is readable while `drain` has results.
#[pyclass(frozen, module = "kvdepot")]
pub(crate) struct Completions {
    queue: Queue,
    added: Mutex<Added>,
    origin: Origin,
}

#[derive(Default)]
struct Added {
    /// By their number in the queue.
    entries: HashMap<u64, (Py<PyAny>, Answer)>,
    next: u64,
    closed: bool,
}

enum Answer {
    Of(Ending),
    Ready(Py<PyAny>),
}

/// Something that ends, of a depot or of a transfer engine.
#[derive(FromPyObject)]
enum Ending {
    Task(Py<Task>),
    Batch(Py<transfer::Task>),
}

impl Ending {
    /// Enters `number` into `queue` at its end.
    fn watch(&self, queue: &Queue, number: u64) {
        match self {
            Ending::Task(task) => task.get().watch(queue, number),
            Ending::Batch(task) => task.get().watch(queue, number),
        }
    }

    fn clone_ref(&self, py: Python<'_>) -> Ending {
        match self {
            Ending::Task(task) => Ending::Task(task.clone_ref(py)),
            Ending::Batch(task) => Ending::Batch(task.clone_ref(py)),
        }
    }

    /// What its `wait` answers.
    fn answer<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(match self {
            Ending::Task(task) => task.get().ended(py)?.into_any(),
            Ending::Batch(task) => PyBool::new(py, task.get().answer()).to_owned().into_any(),
        })
    }
}

impl Completions {
    fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        if self.origin.is_here() {
            return Ok(());
        }
        let word = ": the completions were created before this process was forked";
        Err(errors::raise(py, Error::Closed(word)))
    }

    fn insert(&self, py: Python<'_>, tag: Py<PyAny>, answer: Answer) -> PyResult<u64> {
        self.check_process(py)?;
        let mut added = self.added.lock();
        if added.closed {
            return Err(closed(py));
        }
        let number = added.next;
        added.next += 1;
        added.entries.insert(number, (tag, answer));
        Ok(number)
    }
}

fn closed(py: Python<'_>) -> PyErr {
    errors::raise(py, Error::Closed("the completions are closed"))
}

#[pymethods]
impl Completions {
    #[new]
    fn new(py: Python<'_>) -> PyResult<Completions> {
        let queue = Queue::new().map_err(|error| errors::raise(py, error))?;
        Ok(Completions {
            queue,
            added: Mutex::default(),
            origin: handle::origin(py)?,
        })
    }

    /// Returns the descriptor to poll. Only `close` may close it.
    ///
    /// Returns:
    ///     A file descriptor; readable while `drain` has results.
    ///
    /// Raises:
    ///     ClosedError: The object was closed.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.check_process(py)?;
        self.queue.fd().ok_or_else(|| closed(py))
    }

    /// Reports the end of a task.
    ///
    /// Args:
    ///     task: A task of a depot or of a transfer engine.
    ///     tag: Any object; `drain` returns it when the task has all its outcomes.
    ///
    /// Raises:
    ///     ClosedError: The object was closed.
    fn add(&self, py: Python<'_>, task: Ending, tag: Py<PyAny>) -> PyResult<()> {
        let number = self.insert(py, tag, Answer::Of(task.clone_ref(py)))?;
        task.watch(&self.queue, number);
        Ok(())
    }

    /// Adds a result that needs no task to the next `drain`.
    ///
    /// Args:
    ///     tag: Any object.
    ///     answer: Any object; returned with `tag`.
    ///
    /// Raises:
    ///     ClosedError: The object was closed.
    fn post(&self, py: Python<'_>, tag: Py<PyAny>, answer: Py<PyAny>) -> PyResult<()> {
        let number = self.insert(py, tag, Answer::Ready(answer))?;
        self.queue.enter(number);
        Ok(())
    }

    /// Returns the tasks that ended since the previous call, in the order of their ends.
    ///
    /// Args:
    ///     clear: Reset the descriptor. With False it stays readable, for a caller that resets it
    ///         itself before the call.
    ///
    /// Returns:
    ///     (tag, result) per task. The result is that of the task's `wait`.
    #[pyo3(signature = (clear = true))]
    fn drain<'py>(&self, py: Python<'py>, clear: bool) -> PyResult<Bound<'py, PyList>> {
        self.check_process(py)?;
        let numbers = self.queue.drain(clear);
        let ended: Vec<_> = {
            let mut added = self.added.lock();
            let take = |number| added.entries.remove(number);
            numbers.iter().filter_map(take).collect()
        };
        let mut answers = Vec::with_capacity(ended.len());
        for (tag, answer) in ended {
            let answer = match answer {
                Answer::Of(task) => task.answer(py)?,
                Answer::Ready(answer) => answer.into_bound(py),
            };
            answers.push((tag, answer));
        }
        PyList::new(py, answers)
    }

    /// Closes the descriptor and drops pending results. The tasks continue.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.check_process(py)?;
        self.queue.close();
        let mut added = self.added.lock();
        added.closed = true;
        let forgotten = std::mem::take(&mut added.entries);
        // Outside the lock: the last reference to a tag may run any Python code.
        drop(added);
        drop(forgotten);
        Ok(())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        // Nobody runs Python code under the lock, which could be what asks for this.
        let Some(added) = self.added.try_lock() else {
            return Ok(());
        };
        added.entries.values().try_for_each(|(tag, answer)| {
            visit.call(tag)?;
            match answer {
                Answer::Of(Ending::Task(task)) => visit.call(task),
                Answer::Of(Ending::Batch(task)) => visit.call(task),
                Answer::Ready(answer) => visit.call(answer),
            }
        })
    }

    fn __clear__(&self) {
        let forgotten = std::mem::take(&mut self.added.lock().entries);
        drop(forgotten);
    }
}
