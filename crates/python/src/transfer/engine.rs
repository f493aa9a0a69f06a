//! Engines: started, told what memory there is, asked for batches.

use std::sync::Arc;
use std::time::Duration;

use kvdepot_store::Buffer;
use kvdepot_transfer::{self as transfer, Options, Priority, Rights};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString, PyTuple};

use super::held::{Published, Registered, Remote};
use super::options::{self, Listen};
use super::requests::Requests;
use super::shared::{Shared, refusal};
use super::task::{Ended, Task};
use crate::buffers::{self, Parsed};
use crate::keep::{self, Keep};
use crate::{errors, log, wait};

/// One process's part in moving bytes between processes and hosts. A context manager: leaving it
/// closes it.
///
/// `listen` is where peers connect to, "127.0.0.1:0" unless given; None: nobody can. The options
/// are those of docs/transfer.md.
///
/// Raises ConfigError for wrong options, and Error where it cannot listen.
#[pyclass(frozen, module = "kvdepot.transfer")]
pub(super) struct Engine {
    shared: Arc<Shared>,
}

impl Engine {
    fn check(&self, py: Python<'_>) -> PyResult<&Arc<transfer::Engine>> {
        let engine = self.shared.engine(py)?;
        match self.shared.is_closed() {
            true => Err(refusal(py, transfer::Error::Closed)),
            false => Ok(engine),
        }
    }

    /// Does something with memory that was given.
    fn with_memory<T: Send>(
        &self,
        memory: &Bound<'_, PyAny>,
        use_it: impl FnOnce(&Arc<transfer::Engine>, &[Buffer]) -> Result<T, transfer::Error> + Send,
    ) -> PyResult<(T, Arc<Keep>)> {
        let py = memory.py();
        let engine = self.check(py)?;
        let Parsed { blocks, keep } = buffers::parse(memory, false)?;
        let made = py.detach(|| {
            let pieces = (0..blocks.len()).flat_map(|index| blocks.pieces(index));
            let pieces: Vec<Buffer> = pieces.cloned().collect();
            use_it(engine, &pieces)
        });
        match made {
            Ok(made) => Ok((made, keep)),
            Err(error) => {
                // Nobody else has it.
                keep.release(py);
                Err(refusal(py, error))
            }
        }
    }

    fn launch<'py>(
        &self,
        py: Python<'py>,
        (rows, columns): (Option<&Bound<'py, PyAny>>, Option<&Bound<'py, PyDict>>),
        timeout: f64,
        priority: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, Task>> {
        let engine = self.check(py)?;
        keep::sweep(py);
        let timeout = wait::timeout(py, Some(timeout))?.unwrap_or(Duration::MAX);
        let priority = priority.map_or(Ok(Priority::Normal), read_priority)?;
        let requests = Requests::read(py, &self.shared, rows, columns)?;
        let ended = Arc::new(Ended::default());
        let its = Arc::clone(&ended);
        let options = Options { timeout, priority };
        let batch = py.detach(|| {
            let batch = engine.submit_then(requests.all(), options, move || its.settle());
            // Whoever lets the last of a Remote go tells its peer.
            drop(requests);
            batch
        });
        let batch = batch.map_err(|error| refusal(py, error))?;
        Bound::new(py, Task::new(batch, Arc::clone(&self.shared), ended))
    }
}

fn read_priority(given: &Bound<'_, PyAny>) -> PyResult<Priority> {
    let text = given.cast::<PyString>().ok();
    match text.and_then(|text| text.to_str().ok()) {
        Some("urgent") => Ok(Priority::Urgent),
        Some("normal") => Ok(Priority::Normal),
        Some("background") => Ok(Priority::Background),
        _ => {
            let (shown, allowed) = (errors::shown(given), "urgent, normal, background");
            Err(errors::input(given.py(), "priority", shown, allowed))
        }
    }
}

fn read_rights(given: &Bound<'_, PyAny>) -> PyResult<Rights> {
    let text = given.cast::<PyString>().ok();
    match text.and_then(|text| text.to_str().ok()) {
        Some("read") => Ok(Rights::READ),
        Some("write") => Ok(Rights::WRITE),
        Some("both") => Ok(Rights::BOTH),
        _ => {
            let (shown, allowed) = (errors::shown(given), "read, write, both");
            Err(errors::input(given.py(), "rights", shown, allowed))
        }
    }
}

fn read_name(given: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    if let Ok(bytes) = given.cast::<PyBytes>() {
        return Ok(bytes.as_bytes().to_vec());
    }
    let text = given.cast::<PyString>().ok();
    match text.and_then(|text| text.to_str().ok()) {
        Some(text) => Ok(text.as_bytes().to_vec()),
        None => {
            let (shown, allowed) = (errors::shown(given), "a text or bytes, 1 to 1024 bytes");
            Err(errors::input(given.py(), "name", shown, allowed))
        }
    }
}

/// How long a grant lasts.
fn read_lasts(py: Python<'_>, seconds: Option<f64>) -> PyResult<Option<Duration>> {
    match seconds {
        Some(seconds) if seconds.is_nan() || seconds <= 0.0 => {
            let allowed = "seconds above 0, or None: until it is withdrawn";
            Err(errors::input(py, "lasts", seconds, allowed))
        }
        seconds => wait::timeout(py, seconds),
    }
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (listen = Listen::Default, **options))]
    fn new(
        py: Python<'_>,
        listen: Listen<'_>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Engine> {
        log::start(py)?;
        let config = options::config(py, &listen, options)?;
        let engine = py.detach(|| transfer::Engine::start(config));
        let engine = engine.map_err(|error| options::not_started(py, error))?;
        let shared = Shared::new(py, engine)?;
        Ok(Engine { shared })
    }

    /// Where peers connect to; None where nobody can.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let address = self.shared.engine(py)?.address();
        Ok(address.map(|address| address.to_string()))
    }

    /// Lets batches use memory of this process. `buffers` is as in put; each range is registered
    /// once at a time. The objects are kept as long as it is.
    fn register(&self, buffers: &Bound<'_, PyAny>) -> PyResult<Registered> {
        let (made, keep) = self.with_memory(buffers, |engine, all| engine.register(all))?;
        Ok(Registered::new(made, keep, &self.shared))
    }

    /// Lets peers use memory of this process under a name, one buffer after the other as one range,
    /// for `lasts` seconds or until it is closed. `rights` is what they may do: "read", "write" or
    /// "both".
    #[pyo3(signature = (name, buffers, rights = None, lasts = None))]
    fn publish(
        &self,
        py: Python<'_>,
        name: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        rights: Option<&Bound<'_, PyAny>>,
        lasts: Option<f64>,
    ) -> PyResult<Published> {
        let name = read_name(name)?;
        let rights = rights.map_or(Ok(Rights::READ), read_rights)?;
        let lasts = read_lasts(py, lasts)?;
        let (made, keep) = self.with_memory(buffers, move |engine, all| {
            engine.publish(&name, all, rights, lasts)
        })?;
        Ok(Published::new(made, keep, &self.shared))
    }

    /// As `publish`, under a name that nobody can guess: who is told it has the right.
    #[pyo3(signature = (buffers, rights = None, lasts = None))]
    fn grant(
        &self,
        py: Python<'_>,
        buffers: &Bound<'_, PyAny>,
        rights: Option<&Bound<'_, PyAny>>,
        lasts: Option<f64>,
    ) -> PyResult<Published> {
        let rights = rights.map_or(Ok(Rights::READ), read_rights)?;
        let lasts = read_lasts(py, lasts)?;
        let (made, keep) =
            self.with_memory(buffers, move |engine, all| engine.grant(all, rights, lasts))?;
        Ok(Published::new(made, keep, &self.shared))
    }

    /// Opens what the engine at `address` has published under a name.
    ///
    /// Raises Error where nobody answers there, or nothing is published under it.
    fn open(
        &self,
        py: Python<'_>,
        address: &Bound<'_, PyAny>,
        name: &Bound<'_, PyAny>,
    ) -> PyResult<Remote> {
        let engine = Arc::clone(self.check(py)?);
        let shown = errors::shown(address);
        let allowed = "the address of an engine, such as \"10.0.0.1:7000\"";
        let refuse = || errors::input(py, "address", &shown, allowed);
        let text: String = address.extract().map_err(|_| refuse())?;
        let name = read_name(name)?;
        let opened = wait::on_thread(py, move || {
            transfer::resolve(&text).map(|peer| engine.open(peer, &name))
        })?;
        let opened = opened.ok_or_else(refuse)?;
        let remote = opened.map_err(|error| refusal(py, error))?;
        Ok(Remote::new(remote, &self.shared))
    }

    /// Moves bytes; answers at once. `requests` is a sequence of (op, local, remote, offset,
    /// length): "read" or "write", an address in registered memory or an object that begins there,
    /// a Remote, where in it, bytes. Or each of them is a column: one value for all requests, or an
    /// array with one for each, `submit(op="read", local=…, remote=…, offset=…, length=…)`.
    ///
    /// What is not done after `timeout` seconds has failed. `priority` is "urgent", "normal" or
    /// "background". `callback(task)` is called when it is over, in a thread of the engine's.
    #[pyo3(signature = (
        requests = None, *, timeout = 30.0, priority = None, callback = None, **columns
    ))]
    fn submit<'py>(
        &self,
        py: Python<'py>,
        requests: Option<&Bound<'py, PyAny>>,
        timeout: f64,
        priority: Option<&Bound<'py, PyAny>>,
        callback: Option<&Bound<'py, PyAny>>,
        columns: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, Task>> {
        if let Some(callback) = callback.filter(|callback| !callback.is_callable()) {
            let shown = errors::shown(callback);
            return Err(errors::input(py, "callback", shown, "a callable"));
        }
        let task = self.launch(py, (requests, columns), timeout, priority)?;
        if let Some(callback) = callback {
            Task::call(&task, callback, false)?;
        }
        Ok(task)
    }

    /// Moves bytes, and waits until it is over; the arguments are those of `submit`. On Ctrl-C it
    /// is cancelled.
    #[pyo3(signature = (requests = None, *, timeout = 30.0, priority = None, **columns))]
    fn run<'py>(
        &self,
        py: Python<'py>,
        requests: Option<&Bound<'py, PyAny>>,
        timeout: f64,
        priority: Option<&Bound<'py, PyAny>>,
        columns: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, Task>> {
        let task = self.launch(py, (requests, columns), timeout, priority)?;
        match task.get().reach(py, None) {
            Ok(_) => Ok(task),
            Err(raised) => {
                self.cancel(py, &task)?;
                Err(raised)
            }
        }
    }

    /// Ends a task before it is over, and waits for that: nothing touches its memory then. What was
    /// done stays done.
    fn cancel(&self, py: Python<'_>, task: &Bound<'_, Task>) -> PyResult<()> {
        let engine = self.shared.engine(py)?;
        let task = task.get();
        if !Arc::ptr_eq(&task.shared, &self.shared) {
            let (value, allowed) = ("a Task of another engine", "one that this engine has begun");
            return Err(errors::input(py, "task", value, allowed));
        }
        py.detach(|| engine.cancel(&task.batch));
        keep::sweep(py);
        Ok(())
    }

    /// What it has done so far.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let engine = self.shared.engine(py)?;
        let stats = py.detach(|| engine.stats());
        let shown = PyDict::new(py);
        for (name, value) in [
            ("requests", stats.requests),
            ("bytes", stats.bytes),
            ("frames", stats.frames),
            ("posts", stats.posts),
            ("work_requests", stats.work_requests),
            ("peers", stats.peers),
            ("connections", stats.connections),
            ("refused_greetings", stats.refused_greetings),
            ("refused_grants", stats.refused_grants),
            ("malformed_frames", stats.malformed_frames),
        ] {
            shown.set_item(name, value)?;
        }
        Ok(shown)
    }

    /// Whether it was closed, and calls are refused.
    #[getter]
    fn closed(&self) -> bool {
        self.shared.is_closed()
    }

    /// Ends all that is under way, of this engine and of others with it, and waits until callbacks
    /// have been told. Closing again waits for the first.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.close_from(py)?;
        keep::sweep(py);
        Ok(())
    }

    fn __enter__(slf: Py<Engine>) -> Py<Engine> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self) -> String {
        match self.shared.is_closed() {
            true => "<kvdepot.transfer.Engine, closed>".to_owned(),
            false => "<kvdepot.transfer.Engine>".to_owned(),
        }
    }
}
