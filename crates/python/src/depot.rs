//! Depots: opening, closing, statistics.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_store::{Identity, Started};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};
use serde_json::{Map, Value, json};

use crate::arguments::Fields;
use crate::handle::{Closing, Handle};
use crate::namespace::Namespace;
use crate::settings::Source;
use crate::{arguments, devices, errors, log, settings, wait};

/// Opens a depot.
///
/// Three forms of `pipeline` select the depot: the names of tiers, a configuration file, or the
/// socket of a depot that another process of this host serves.
///
/// Args:
///     pipeline: Tiers, first to last, such as "Cache|Dax". Or the path of a YAML or JSON file: a
///         path object, or a text with a `/` or the ending .yaml, .yml or .json. Or "unix:" and the
///         path of a socket, such as "unix:/run/kvdepot.sock".
///     settings: Options by their names, with a dictionary per tier (docs/configuration.md). They
///         override the options of a file. For a socket, only `lanes` and `timeout` are allowed.
///
/// Returns:
///     The depot. Close it, or use it as a context manager.
///
/// Raises:
///     ConfigError: An option is unknown, or its value is not allowed.
///     LockedError: Another process still owns the arena after `lock_wait`, or another depot of
///         this process owns it.
///     CorruptError: The medium contains something other than a sound arena.
///     Error: A system call failed, or the server at the socket does not respond.
#[pyfunction]
#[pyo3(signature = (pipeline, settings = None))]
pub(crate) fn open(
    py: Python<'_>,
    pipeline: &Bound<'_, PyAny>,
    settings: Option<&Bound<'_, PyAny>>,
) -> PyResult<Depot> {
    log::start(py)?;
    // It may wait for another owner; on Ctrl-C what it has made goes again.
    let opened = match settings::source(pipeline, settings)? {
        Source::Tiers(config) => {
            let started = wait::opening(py, move || kvdepot_service::start(&config))?;
            started.map(Started::keep)
        }
        Source::Service {
            socket,
            lanes,
            timeout,
        } => wait::opening(py, move || {
            kvdepot_service::connect_within(&socket, lanes, timeout)
        })?,
    };
    let depot = opened.map_err(|error| errors::raise(py, error))?;
    let handle = Handle::new(py, depot)?;
    Ok(Depot { handle })
}

/// Checks a pipeline and its settings without opening the depot.
///
/// The arguments are those of `open`. Media that other processes have open are not checked, and a
/// socket is not contacted.
///
/// Args:
///     pipeline: Tiers, a configuration file, or a socket, as in `open`.
///     settings: Options by their names, as in `open`.
///     options_only: Check only names and values of options, for example for another machine.
///
/// Raises:
///     ConfigError: An option is unknown, or its value is not allowed, here or on this machine.
///     CorruptError: The medium contains something other than a sound arena.
#[pyfunction]
#[pyo3(signature = (pipeline, settings = None, *, options_only = false))]
pub(crate) fn check(
    py: Python<'_>,
    pipeline: &Bound<'_, PyAny>,
    settings: Option<&Bound<'_, PyAny>>,
    options_only: bool,
) -> PyResult<()> {
    match settings::source(pipeline, settings)? {
        Source::Tiers(config) if !options_only => {
            let checked = py.detach(|| kvdepot_service::check(&config));
            checked.map_err(|error| errors::raise(py, error))
        }
        Source::Tiers(_) | Source::Service { .. } => Ok(()),
    }
}

/// A pipeline of tiers that this process opened, or that another process serves.
///
/// A context manager: leaving the block closes the depot.
#[pyclass(frozen, module = "kvdepot")]
pub(crate) struct Depot {
    handle: Arc<Handle>,
}

impl Depot {
    pub(crate) fn handle(&self) -> &Arc<Handle> {
        &self.handle
    }
}

#[pymethods]
impl Depot {
    /// Returns the namespace of these fields: the set of blocks that may be exchanged.
    ///
    /// Namespaces that differ in any field share no block. Each field is a text, bytes or an
    /// integer.
    ///
    /// Args:
    ///     model: Model ID, as the engine names it.
    ///     dtype: Element type of the KV cache, as the engine names it.
    ///     block_tokens: Tokens per block, at least 1.
    ///     weights: Fingerprint of the weights and of their configuration.
    ///     layout: Layout and geometry of the bytes of a block.
    ///     group: Group of layers that the blocks belong to.
    ///     world: Tensor and pipeline parallel sizes, without the rank.
    ///     hash: Hash algorithm and seed of the keys.
    ///     salt: Secret or label that separates tenants.
    ///
    /// Returns:
    ///     The namespace. Equal fields have equal digests in every process.
    ///
    /// Raises:
    ///     InputError: A required field is empty, or a field is not a text, bytes or an integer.
    ///     Error: The description of the namespace cannot be written to a tier.
    #[pyo3(signature = (
        model, dtype, block_tokens, weights = None, layout = None, group = None, world = None,
        hash = None, salt = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "one a field of the namespace")]
    fn namespace(
        &self,
        py: Python<'_>,
        model: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
        block_tokens: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
        layout: Option<&Bound<'_, PyAny>>,
        group: Option<&Bound<'_, PyAny>>,
        world: Option<&Bound<'_, PyAny>>,
        hash: Option<&Bound<'_, PyAny>>,
        salt: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Namespace> {
        let spec = Fields {
            model,
            dtype,
            block_tokens,
            weights,
            layout,
            group,
            world,
            hash,
            salt,
        }
        .read()?;
        let depot = self.handle.depot(py)?;
        let made = wait::call(py, || depot.namespace(&spec))?;
        let namespace = made.map_err(|error| errors::raise(py, error))?;
        Ok(Namespace::new(namespace, Arc::clone(&self.handle)))
    }

    /// Returns counters since the depot was opened, and the fill of each tier.
    ///
    /// Returns:
    ///     A dictionary. `tiers` maps the name of each tier to its counters, and `devices` is the
    ///     list of `devices()`. docs/metrics.md defines the counters. A client without a server
    ///     gets those of an empty depot.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let depot = self.handle.depot(py)?;
        let stats = wait::call(py, || depot.stats())?.shown();
        settings::to_python(py, &by_tier(stats))
    }

    /// Returns the namespaces of the last tier.
    ///
    /// These are the namespaces that have had blocks in the tier since it was opened, and those
    /// with a description in its directory. For a directory (`Posix`, `Ds3fs`) the call reads the
    /// names of all files.
    ///
    /// Returns:
    ///     Per namespace (digest, description, blocks, bytes): 16 bytes, its fields as a text or
    ///     None if they are unknown, and the number and size of its blocks.
    ///
    /// Raises:
    ///     Error: The directory of the last tier cannot be read.
    fn namespaces<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let depot = self.handle.depot(py)?;
        let found = wait::call(py, || depot.namespaces())?;
        let found = found.map_err(|error| errors::raise(py, error))?;
        let row = |one: kvdepot_store::NamespaceUsage| {
            let digest = PyBytes::new(py, &one.id.0);
            (digest, one.description, one.blocks, one.bytes)
        };
        PyList::new(py, found.into_iter().map(row))
    }

    /// Returns the blocks that left all tiers since the previous call.
    ///
    /// Blocks leave by eviction, by removal, and if they are found corrupt. kvdepot records them
    /// from the first call on. For a directory (`Posix`, `Ds3fs`) it records only blocks that this
    /// process removed, evicted or found corrupt.
    ///
    /// Args:
    ///     limit: Most blocks that kvdepot keeps between two calls, per tier (per device of a tier
    ///         with several), at least 0.
    ///
    /// Returns:
    ///     The blocks as (digest of the namespace, key, bytes), and True if the list is incomplete.
    #[pyo3(signature = (limit = 65536))]
    fn removed_blocks<'py>(
        &self,
        py: Python<'py>,
        limit: i128,
    ) -> PyResult<(Bound<'py, PyList>, bool)> {
        let depot = self.handle.depot(py)?;
        let limit = arguments::whole(py, "limit", limit, "a whole number, 0 or more")?;
        let gone = wait::call(py, || depot.gone(limit))?;
        let gone = gone.map_err(|error| errors::raise(py, error))?;
        let row = |(identity, bytes): (Identity, u64)| {
            let digest = PyBytes::new(py, &identity.namespace.0);
            (digest, PyBytes::new(py, &identity.key.0), bytes)
        };
        let blocks = PyList::new(py, gone.blocks.into_iter().map(row))?;
        Ok((blocks, gone.overflowed))
    }

    /// Returns the counters in the Prometheus text format (docs/metrics.md).
    ///
    /// Returns:
    ///     One line per metric, label set and value, with HELP and TYPE lines.
    fn metrics_text(&self, py: Python<'_>) -> PyResult<String> {
        let depot = self.handle.depot(py)?;
        Ok(wait::call(py, || depot.stats())?.prometheus())
    }

    /// Returns the size of the write-back queue.
    ///
    /// Returns:
    ///     Bytes of accepted puts that still have to be written to a lower tier.
    fn pending_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        let depot = self.handle.depot(py)?;
        wait::call(py, || depot.pending_bytes())
    }

    /// Waits until the write-back queue has been written to the last tier.
    ///
    /// The call covers blocks that were committed before it.
    ///
    /// Args:
    ///     timeout: Seconds to wait. Default: no limit.
    ///
    /// Returns:
    ///     False if the wait timed out. For a served depot also False without a server, and once
    ///     after blocks of this process were dropped, or lost with a server.
    #[pyo3(signature = (timeout = None))]
    fn drain(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let limit = wait::timeout(py, timeout)?;
        let depot = self.handle.depot(py)?;
        if depot.is_served() {
            // Its answer may be no, before the time is over.
            return wait::call(py, || depot.drain(limit.unwrap_or(Duration::MAX)));
        }
        wait::until(py, limit, |slice| depot.drain(slice))
    }

    /// Returns the media of the tiers `Dax` and `Nvme`, in the order of the configuration.
    ///
    /// Returns:
    ///     A dictionary per medium: `path`, `state` ("serving", "draining" or "failed"), capacity
    ///     and use in bytes and blocks. Empty without these tiers.
    fn devices<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        devices::list(py, self.handle.depot(py)?)
    }

    /// Adds a device or file to the first `Dax` or `Nvme` tier, and serves its blocks.
    ///
    /// A file that is missing is created. Adding a device again changes nothing, except that a
    /// drained device takes writes again. The configuration file stays unchanged.
    ///
    /// Args:
    ///     path: Device or file of the tier, such as /dev/dax1.0.
    ///     capacity: Size of the whole medium in bytes, or a text such as "64GiB". Default: the
    ///         size of the existing arena or device.
    ///
    /// Returns:
    ///     The recovery of the device, as `recovery` of a depot.
    ///
    /// Raises:
    ///     InputError: The medium has another capacity, or the depot has the device under another
    ///         name.
    ///     LockedError: Another depot owns the device.
    ///     CorruptError: The medium contains something other than a sound arena.
    #[pyo3(signature = (path, capacity = None))]
    fn add_device<'py>(
        &self,
        py: Python<'py>,
        path: PathBuf,
        capacity: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let capacity = capacity
            .map(|capacity| devices::size_of("capacity", capacity))
            .transpose()?;
        devices::add(py, self.handle.depot(py)?.clone(), path, capacity)
    }

    /// Stops writes to a device and moves its blocks to the other devices.
    ///
    /// Blocks without space there are evicted. Every block can be read until it has moved.
    ///
    /// Args:
    ///     path: The device, as in `devices()`.
    ///     to: "other_devices", or "evict" to evict all blocks of the device instead.
    ///     timeout: Seconds to wait for blocks that are pinned or being written. Default: 10.
    ///
    /// Returns:
    ///     A dictionary: `moved_blocks`, `moved_bytes` and `evicted_blocks`.
    ///
    /// Raises:
    ///     TimeoutError: Blocks were pinned or being written for `timeout` seconds. The device
    ///         takes writes again.
    ///     InputError: `path` is not a device of this depot, or there is no other device.
    #[pyo3(signature = (path, to = "other_devices", timeout = Some(10.0)))]
    fn drain_device<'py>(
        &self,
        py: Python<'py>,
        path: PathBuf,
        to: &str,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        devices::drain(py, self.handle.depot(py)?.clone(), path, to, timeout)
    }

    /// Releases a drained or empty device, so that another depot can open it.
    ///
    /// Args:
    ///     path: The device, as in `devices()`.
    ///     force: Evict the blocks of the device first.
    ///     timeout: Seconds to wait, with `force`, for blocks that are pinned or being written.
    ///         Default: 10.
    ///
    /// Raises:
    ///     InputError: The device contains blocks, or is the last one of its tier.
    ///     TimeoutError: With `force`, blocks were pinned or being written for `timeout` seconds.
    #[pyo3(signature = (path, force = false, timeout = Some(10.0)))]
    fn remove_device(
        &self,
        py: Python<'_>,
        path: PathBuf,
        force: bool,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        devices::remove(py, self.handle.depot(py)?.clone(), path, force, timeout)
    }

    /// Adds space to a device while it serves.
    ///
    /// The record table keeps its size, and so does the maximum number of blocks. Puts wait for the
    /// call.
    ///
    /// Args:
    ///     path: The device, as in `devices()`.
    ///     capacity: New size of the whole medium in bytes, or a text such as "64GiB".
    ///
    /// Raises:
    ///     InputError: `capacity` is less than the present size, or more than the medium has.
    fn grow_device(
        &self,
        py: Python<'_>,
        path: PathBuf,
        capacity: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let capacity = devices::size_of("capacity", capacity)?;
        devices::grow(py, self.handle.depot(py)?.clone(), path, capacity)
    }

    /// Allocates and maps the memory of the tiers, in the background.
    ///
    /// Otherwise the first calls take the page faults. Of a file, only pages that are in memory are
    /// mapped; the disk is not read.
    ///
    /// Raises:
    ///     Error: The thread cannot be started.
    fn prefault(&self, py: Python<'_>) -> PyResult<()> {
        let depot = self.handle.depot(py)?;
        wait::call(py, || depot.populate_aside())?.map_err(|error| errors::raise(py, error))
    }

    /// Closes the depot and releases its memory and media.
    ///
    /// The call rejects new calls, waits for calls in progress, and writes back the queue, for at
    /// most `close_timeout` in all. After that time it starts no further copy, and waits only for
    /// copies that a medium has begun; the log names their calls. A second `close` waits for the
    /// first. After Ctrl-C the close continues in the background, and the end of the process waits
    /// for it.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.handle.forked() {
            return Ok(());
        }
        let handle = Arc::clone(&self.handle);
        wait::close(py, move || handle.close())
    }

    fn __enter__(slf: Py<Depot>) -> Py<Depot> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    /// True after `close`: calls raise `ClosedError`.
    ///
    /// A depot whose server ended is not closed; see `connected`.
    #[getter]
    fn closed(&self) -> bool {
        self.handle.is_closed()
    }

    /// Absolute path of the socket where other processes attach; None with `socket: off`.
    #[getter]
    fn socket(&self, py: Python<'_>) -> PyResult<Option<String>> {
        Ok(self.handle.depot(py)?.socket().map(text))
    }

    /// True if the depot can process calls.
    ///
    /// False for a served depot while its server does not respond, until the next server is found.
    #[getter]
    fn connected(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.handle.depot(py)?.is_connected())
    }

    /// Absolute path of the tier that survives the process; None if the depot has none.
    #[getter]
    fn path(&self, py: Python<'_>) -> PyResult<Option<String>> {
        Ok(self.handle.depot(py)?.path().map(text))
    }

    /// Names of the tiers, first to last.
    #[getter]
    fn tiers(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let depot = self.handle.depot(py)?;
        Ok(depot.tiers().into_iter().map(str::to_owned).collect())
    }

    /// One line for a log: the tiers with their sizes and paths.
    #[getter]
    fn description(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.handle.depot(py)?.description().to_owned())
    }

    /// Result of opening the arena.
    ///
    /// A dictionary: the number of `blocks` that are served again, of `damaged` and of `superseded`
    /// records, and `created`, which is True for a new arena.
    #[getter]
    fn recovery<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = self.handle.depot(py)?.opening();
        let dict = PyDict::new(py);
        dict.set_item("blocks", found.blocks)?;
        dict.set_item("damaged", found.damaged)?;
        dict.set_item("superseded", found.outranked)?;
        dict.set_item("created", found.created)?;
        Ok(dict)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        match self.handle.depot(py) {
            Ok(depot) => format!("<kvdepot.Depot {}>", depot.description()),
            Err(_) => "<kvdepot.Depot of another process>".into(),
        }
    }
}

fn text(path: PathBuf) -> String {
    path.to_string_lossy().into_owned()
}

/// Statistics with everything about a tier under its name.
fn by_tier(stats: Value) -> Value {
    let Value::Object(mut stats) = stats else {
        return stats;
    };
    let mut take = |name: &str| match stats.remove(name) {
        Some(Value::Array(items)) => items,
        _ => Vec::new(),
    };
    let tiers = take("tiers");
    let lists = ["hit_blocks", "hit_bytes", "put_move_ns", "get_move_ns"];
    let lists = lists.map(|name| (name, take(name)));
    let mut named = Map::new();
    for (index, tier) in tiers.into_iter().enumerate() {
        let Value::Object(mut tier) = tier else {
            continue;
        };
        let number = |name: &str| tier.get(name).and_then(Value::as_u64).unwrap_or_default();
        let used = number("capacity_bytes").saturating_sub(number("free_bytes"));
        let name = tier.remove("tier");
        tier.insert("used_bytes".into(), json!(used));
        for (name, values) in &lists {
            let value = values.get(index).cloned().unwrap_or_default();
            tier.insert((*name).into(), value);
        }
        if let Some(Value::String(name)) = name {
            named.insert(name, Value::Object(tier));
        }
    }
    for (name, alias) in [
        ("pending_bytes", "write_back_bytes"),
        ("dropped_blocks", "put_dropped_blocks"),
        ("declined_blocks", "put_declined_blocks"),
    ] {
        let value = stats.get(alias).cloned().unwrap_or_default();
        stats.insert(name.into(), value);
    }
    stats.insert("tiers".into(), Value::Object(named));
    Value::Object(stats)
}
