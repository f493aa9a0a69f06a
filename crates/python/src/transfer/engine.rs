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

/// Moves bytes between the memory of this process and of other processes and hosts.
///
/// A context manager: leaving the block closes the engine. In `kvdepot.transfer` its name is
/// `Engine`; docs/transfer.md has the guarantees.
///
/// Args:
///     listen: Address and port for peers. Default: "127.0.0.1:0", a free port of the loopback
///         interface. None: peers cannot connect.
///     token: Shared secret of all engines, a text or bytes. Default: none.
///     tls_certificate: PEM file with the certificate of this engine and the intermediate ones. Set
///         all three files or none.
///     tls_key: PEM file with its key.
///     tls_ca: PEM file with the authorities that sign the certificates of peers.
///     tls_name: DNS name or address that certificates of targets must have. Default: the address
///         used to connect.
///     allow_unauthenticated: Listen beyond loopback without a token and TLS.
///     streams: Connections per peer, and threads for copies on one host, 1 to 64.
///     slice_size: Most bytes of a slice, 4KiB to 32MiB.
///     tail_merge: A shorter rest joins the slice before it, in bytes, 0 to `slice_size`.
///     watermark: Slices that are ready before the first is sent, at least 1.
///     window: Slices per connection without a response, 1 to 1024.
///     local: Use shared memory for peers on this host.
///     rdma: Names of the RDMA devices. Default: all that are found; with TLS none.
///     checksum: Protect each slice with an XXH3-128.
///     retries: Tries after a transfer error.
///     timeout: Most time to connect, to open a name and for calls, 1ms to 1h: seconds, or a text.
///     connections_max: Most connections from peers, 1 to 1048576.
///
/// Raises:
///     ConfigError: An option is unknown, or its value is not allowed.
///     Error: The engine cannot listen at `listen`.
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
            let (shown, allowed) = (
                errors::shown(given),
                "a string or bytes, 1 to 1024 bytes long",
            );
            Err(errors::input(given.py(), "name", shown, allowed))
        }
    }
}

/// How long a grant lasts.
fn read_lasts(py: Python<'_>, seconds: Option<f64>) -> PyResult<Option<Duration>> {
    match seconds {
        Some(seconds) if seconds.is_nan() || seconds <= 0.0 => {
            let allowed = "seconds above 0, or None to publish it until it is withdrawn";
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

    /// Address and port where peers connect; None without a listener.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let address = self.shared.engine(py)?.address();
        Ok(address.map(|address| address.to_string()))
    }

    /// Registers memory of this process, so that batches may use it.
    ///
    /// Args:
    ///     buffers: Contiguous memory, as in `Namespace.put`. A range cannot be registered twice at
    ///         the same time.
    ///
    /// Returns:
    ///     The registration. It keeps the objects alive, and ends when it is closed or dropped.
    ///
    /// Raises:
    ///     InputError: A buffer is unsuitable, or is registered already. Then no buffer is
    ///         registered.
    fn register(&self, buffers: &Bound<'_, PyAny>) -> PyResult<Registered> {
        let (made, keep) = self.with_memory(buffers, |engine, all| engine.register(all))?;
        Ok(Registered::new(made, keep, &self.shared))
    }

    /// Lets peers use memory of this process under a name.
    ///
    /// Args:
    ///     name: Name of 1 to 1024 bytes, as a text or bytes.
    ///     buffers: Contiguous memory, as in `Namespace.put`. Peers see one range, in the order of
    ///         the buffers.
    ///     rights: Access of peers: "read", "write" or "both". Default: "read".
    ///     lasts: Seconds until the grant expires. Default: until it is closed.
    ///
    /// Returns:
    ///     The grant. It keeps the objects alive, and ends when it is closed or dropped.
    ///
    /// Raises:
    ///     InputError: The name is in use, or a buffer or argument is unsuitable.
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

    /// Lets peers use memory of this process under a random name.
    ///
    /// The name is the right: a process that receives it can use the memory.
    ///
    /// Args:
    ///     buffers: Contiguous memory, as in `publish`.
    ///     rights: Access of peers: "read", "write" or "both". Default: "read".
    ///     lasts: Seconds until the grant expires. Default: until it is closed.
    ///
    /// Returns:
    ///     The grant; its `name` is for a peer's `open`.
    ///
    /// Raises:
    ///     InputError: A buffer or argument is unsuitable.
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

    /// Opens memory that another engine has published.
    ///
    /// Args:
    ///     address: Address and port of that engine, such as "10.0.0.2:7000".
    ///     name: The published name.
    ///
    /// Returns:
    ///     The remote memory, for requests of this engine.
    ///
    /// Raises:
    ///     Error: The engine does not respond or rejects this one, or the name is not published
    ///         there.
    ///     InputError: An argument is unsuitable.
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

    /// Starts a batch of reads and writes in the background.
    ///
    /// Requests of a batch run in any order. A request that fails does not affect the others. For
    /// thousands of requests pass columns, each an array or one value for all: `submit(op="read",
    /// local=…, remote=…, offset=…, length=…)`.
    ///
    /// Args:
    ///     requests: Tuples (op, local, remote, offset, length), instead of columns. In a tuple,
    ///         `local` may also be an object that begins in registered memory.
    ///     timeout: Seconds after which unfinished requests fail.
    ///     priority: "urgent", "normal" or "background". Default: "normal".
    ///     callback: Called with the task at its end, in a thread of the engine.
    ///     op: "read" copies from the remote, "write" copies to it.
    ///     local: Address in registered memory.
    ///     remote: Memory that `open` returned.
    ///     offset: Position in the remote memory, in bytes.
    ///     length: Bytes to copy.
    ///
    /// Returns:
    ///     The task, with one status per request.
    ///
    /// Raises:
    ///     InputError: A request is malformed. Then no request is started.
    ///     ClosedError: The engine was closed.
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

    /// Moves a batch and waits for its end.
    ///
    /// The arguments are those of `submit`. Ctrl-C cancels the batch.
    ///
    /// Args:
    ///     requests: Tuples (op, local, remote, offset, length), instead of columns. In a tuple,
    ///         `local` may also be an object that begins in registered memory.
    ///     timeout: Seconds after which unfinished requests fail.
    ///     priority: "urgent", "normal" or "background". Default: "normal".
    ///     op: "read" copies from the remote, "write" copies to it.
    ///     local: Address in registered memory.
    ///     remote: Memory that `open` returned.
    ///     offset: Position in the remote memory, in bytes.
    ///     length: Bytes to copy.
    ///
    /// Returns:
    ///     The task, which has ended.
    ///
    /// Raises:
    ///     InputError: A request is malformed. Then no request is started.
    ///     ClosedError: The engine was closed.
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

    /// Ends a task early and waits until its memory is no longer used.
    ///
    /// Requests that are done stay done.
    ///
    /// Args:
    ///     task: A task of this engine.
    ///
    /// Raises:
    ///     InputError: The task is of another engine.
    fn cancel(&self, py: Python<'_>, task: &Bound<'_, Task>) -> PyResult<()> {
        let engine = self.shared.engine(py)?;
        let task = task.get();
        if !Arc::ptr_eq(&task.shared, &self.shared) {
            let (value, allowed) = (
                "a Task of another engine",
                "a Task that this engine started",
            );
            return Err(errors::input(py, "task", value, allowed));
        }
        py.detach(|| engine.cancel(&task.batch));
        keep::sweep(py);
        Ok(())
    }

    /// Returns counters since the engine was created.
    ///
    /// Returns:
    ///     A dictionary of counts, such as `requests`, `bytes`, `connections` from peers, and
    ///     `refused_greetings` (failed handshakes).
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

    /// True after `close`: calls raise `ClosedError`.
    #[getter]
    fn closed(&self) -> bool {
        self.shared.is_closed()
    }

    /// Ends all tasks and waits for their callbacks.
    ///
    /// Tasks of other engines with this one end too. A second `close` waits for the first.
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
