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

/// Opens a depot: a pipeline such as "Cache|Dax" with its settings, or a configuration file (a
/// path, or a text with a separator or ending in .yaml, .yml or .json), whose options `settings`
/// overrides. Or the depot that another process of this host serves: "unix:/run/kvdepot.sock",
/// where `lanes` and `timeout` are the only settings.
///
/// Raises ConfigError for wrong options, LockedError when another process owns the arena,
/// CorruptError when the medium holds something else, and Error when nobody serves there.
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

/// Checks a pipeline and its settings without opening anything: what `open` begins with. What
/// another process owns is not looked into, and nobody is asked at a socket. With `options_only`
/// nothing is looked at but the settings themselves, which may be another machine's.
///
/// Raises ConfigError and CorruptError as `open` does for what the settings say and what is there.
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

/// A pipeline of tiers, opened by this process or served by another. A context manager: leaving it
/// closes it here.
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
    /// A namespace: everything that must match for bytes to be reusable.
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

    /// Counters and fill. `tiers` has a dictionary a tier; `pending_bytes` wait for the far tier.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let depot = self.handle.depot(py)?;
        let stats = wait::call(py, || depot.stats())?.shown();
        settings::to_python(py, &by_tier(stats))
    }

    /// The namespaces with blocks in the last tier or a place in its directory: digest, the
    /// directory's description or None, blocks, bytes.
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

    /// The blocks that left every tier since the last call, by eviction, removal or rot, as
    /// (digest of the namespace, key, bytes), and whether more left than were noted. They are
    /// noted from the first call on, at most the last `limit` of each tier.
    #[pyo3(signature = (limit = 65536))]
    fn gone<'py>(&self, py: Python<'py>, limit: i128) -> PyResult<(Bound<'py, PyList>, bool)> {
        let depot = self.handle.depot(py)?;
        let limit = arguments::whole(py, "limit", limit, "a number from 0")?;
        let gone = wait::call(py, || depot.gone(limit))?;
        let gone = gone.map_err(|error| errors::raise(py, error))?;
        let row = |(identity, bytes): (Identity, u64)| {
            let digest = PyBytes::new(py, &identity.namespace.0);
            (digest, PyBytes::new(py, &identity.key.0), bytes)
        };
        let blocks = PyList::new(py, gone.blocks.into_iter().map(row))?;
        Ok((blocks, gone.overflowed))
    }

    /// The counters in the Prometheus text format.
    fn metrics_text(&self, py: Python<'_>) -> PyResult<String> {
        let depot = self.handle.depot(py)?;
        Ok(wait::call(py, || depot.stats())?.prometheus())
    }

    /// Bytes put that the far tier has not got yet.
    fn pending_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        let depot = self.handle.depot(py)?;
        wait::call(py, || depot.pending_bytes())
    }

    /// Waits until the far tier has everything that was committed before; false when `timeout`
    /// seconds passed first. Of a depot that another process serves false also when nobody does,
    /// and once after blocks of this process were dropped or lost with an owner.
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

    /// The media of the `Dax` tier, a dictionary each: path, state ("serving", "draining",
    /// "failed"), capacity, use.
    fn devices<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        devices::list(py, self.handle.depot(py)?)
    }

    /// Adds a device or file to the `Dax` tier, making a file that is missing, and serves at once
    /// what it holds. Adding one again changes nothing, but for one that was drained: it takes
    /// writes again.
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

    /// Takes no more writes to a device and moves its blocks to the others, where they have room,
    /// or evicts them (`to="nowhere"`). Raises TimeoutError, and lets the device take writes again,
    /// when blocks are pinned or being written for `timeout` seconds.
    #[pyo3(signature = (path, to = "others", timeout = Some(10.0)))]
    fn drain_device<'py>(
        &self,
        py: Python<'py>,
        path: PathBuf,
        to: &str,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        devices::drain(py, self.handle.depot(py)?.clone(), path, to, timeout)
    }

    /// Lets a drained or empty device go: another depot can open it then. With `force` whatever
    /// it holds is evicted first.
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

    /// Gives a device more room while it serves. Its record table stays as it is.
    fn grow_device(
        &self,
        py: Python<'_>,
        path: PathBuf,
        capacity: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let capacity = devices::size_of("capacity", capacity)?;
        devices::grow(py, self.handle.depot(py)?.clone(), path, capacity)
    }

    /// Makes the tiers present in this process, in the background: memory is allocated now and not
    /// by the first calls. Of a file only what is in memory already is mapped, and nothing is read
    /// from its disk.
    fn populate(&self, py: Python<'_>) -> PyResult<()> {
        let depot = self.handle.depot(py)?;
        wait::call(py, || depot.populate_aside())?.map_err(|error| errors::raise(py, error))
    }

    /// Refuses new calls, waits for those under way, drains what waits for the far tier as long
    /// as `close_timeout` allows, and lets the next owner in. Closing again waits for the first. On
    /// Ctrl-C it goes on in the background, and the end of the process waits for it.
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

    /// Whether it was closed here, and calls are refused. An owner elsewhere that is gone does not
    /// close it: see `connected`.
    #[getter]
    fn closed(&self) -> bool {
        self.handle.is_closed()
    }

    /// Where other processes attach; None with `socket: off`.
    #[getter]
    fn socket(&self, py: Python<'_>) -> PyResult<Option<String>> {
        Ok(self.handle.depot(py)?.socket().map(text))
    }

    /// Whether calls have somebody who answers: false when the process that serves the depot is
    /// gone, or does not answer, and until the next one is found.
    #[getter]
    fn connected(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.handle.depot(py)?.is_connected())
    }

    /// Where the lasting tier is; None when there is none.
    #[getter]
    fn path(&self, py: Python<'_>) -> PyResult<Option<String>> {
        Ok(self.handle.depot(py)?.path().map(text))
    }

    /// The tiers' names, near to far.
    #[getter]
    fn tiers(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let depot = self.handle.depot(py)?;
        Ok(depot.tiers().into_iter().map(str::to_owned).collect())
    }

    /// One line for a log: the tiers, their sizes and places.
    #[getter]
    fn description(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.handle.depot(py)?.description().to_owned())
    }

    /// What opening found: `blocks` served again, `damaged` and `outranked` records, and whether
    /// the arena was `created`.
    #[getter]
    fn opening<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = self.handle.depot(py)?.opening();
        let dict = PyDict::new(py);
        dict.set_item("blocks", found.blocks)?;
        dict.set_item("damaged", found.damaged)?;
        dict.set_item("outranked", found.outranked)?;
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
