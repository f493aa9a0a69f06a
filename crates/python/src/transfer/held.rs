//! Memory: of this process, for batches and for peers, and of peers.

use std::sync::Arc;

use kvdepot_transfer as transfer;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use pyo3::{PyTraverseError, PyVisit};

use super::shared::Shared;
use crate::handle::drop_detached;
use crate::keep::{self, Keep};
use crate::{errors, wait};

/// Something of an engine's that lasts until it is let go, or this is dropped.
struct Held<T: Send> {
    /// Before the engine, which it is of.
    what: Mutex<Option<T>>,
    shared: Arc<Shared>,
}

impl<T: Send + 'static> Held<T> {
    fn new(what: T, shared: &Arc<Shared>) -> Held<T> {
        Held {
            what: Mutex::new(Some(what)),
            shared: Arc::clone(shared),
        }
    }

    /// Lets it go, and waits for that. A forked child has nothing to let go.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if !self.shared.origin.is_here() {
            return Ok(());
        }
        let what = self.what.lock().take();
        match what {
            Some(what) => wait::close(py, move || drop(what)),
            None => Ok(()),
        }
    }
}

impl<T: Send> Drop for Held<T> {
    fn drop(&mut self) {
        let what = self.what.get_mut().take();
        if self.shared.origin.is_here() {
            drop_detached(what);
        } else {
            // Its locks may be held for ever; its memory goes with the process.
            let _kept = std::mem::ManuallyDrop::new(what);
        }
    }
}

/// Memory of this process that batches may use, until it is closed or this object is dropped.
///
/// A batch in progress keeps the memory until the batch ends. A context manager: leaving the block
/// closes it.
#[pyclass(frozen, module = "kvdepot.transfer")]
pub(super) struct Registered {
    held: Held<transfer::Registered>,
    keep: Arc<Keep>,
}

impl Registered {
    pub(super) fn new(
        registered: transfer::Registered,
        keep: Arc<Keep>,
        shared: &Arc<Shared>,
    ) -> Registered {
        let held = Held::new(registered, shared);
        Registered { held, keep }
    }
}

#[pymethods]
impl Registered {
    /// Ends the registration for later batches.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.held.close(py)?;
        keep::sweep(py);
        Ok(())
    }

    fn __enter__(slf: Py<Registered>) -> Py<Registered> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        traverse(&self.held.shared, &self.keep, &visit)
    }
}

/// Shows what owns memory to the garbage collector. Before the engine is closed others may touch it
/// at any time.
fn traverse(shared: &Shared, keep: &Keep, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
    match shared.is_over() {
        true => keep.traverse(visit),
        false => Ok(()),
    }
}

/// Memory of this process that peers may use under a name.
///
/// The grant ends when it is closed or expires, or when this object is dropped. A context manager:
/// leaving the block closes it.
#[pyclass(frozen, module = "kvdepot.transfer")]
pub(super) struct Published {
    held: Held<transfer::Published>,
    keep: Arc<Keep>,
    name: Vec<u8>,
}

impl Published {
    pub(super) fn new(
        published: transfer::Published,
        keep: Arc<Keep>,
        shared: &Arc<Shared>,
    ) -> Published {
        let name = published.name().to_vec();
        let held = Held::new(published, shared);
        Published { held, keep, name }
    }
}

#[pymethods]
impl Published {
    /// The name under which peers open the memory.
    #[getter]
    fn name<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.name)
    }

    /// Withdraws the memory and waits until peers have stopped using it.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.held.close(py)?;
        keep::sweep(py);
        Ok(())
    }

    fn __enter__(slf: Py<Published>) -> Py<Published> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        traverse(&self.held.shared, &self.keep, &visit)
    }
}

/// Memory of a peer, as `TransferEngine.open` returned it.
///
/// The peer is notified when this object is closed, or when it and the batches that use it are
/// dropped. A context manager: leaving the block closes it.
#[pyclass(frozen, module = "kvdepot.transfer")]
pub(super) struct Remote {
    held: Held<transfer::Remote>,
    address: String,
    bytes: u64,
    rights: &'static str,
    lasts: Option<f64>,
}

impl Remote {
    pub(super) fn new(remote: transfer::Remote, shared: &Arc<Shared>) -> Remote {
        Remote {
            address: remote.peer().to_string(),
            bytes: remote.len(),
            rights: match (remote.rights().read, remote.rights().write) {
                (true, false) => "read",
                (false, true) => "write",
                (true, true) => "both",
                (false, false) => "none",
            },
            lasts: remote.lasts().map(|lasts| lasts.as_secs_f64()),
            held: Held::new(remote, shared),
        }
    }

    /// What batches of an engine use.
    pub(super) fn of(
        &self,
        py: Python<'_>,
        shared: &Arc<Shared>,
        field: &dyn Fn() -> String,
    ) -> PyResult<transfer::Remote> {
        let refuse = |value: &str, allowed: &str| errors::input(py, field(), value, allowed);
        // First: another engine may be another process's.
        if !Arc::ptr_eq(&self.held.shared, shared) {
            let value = "a Remote of another engine";
            return Err(refuse(
                value,
                "a Remote that `open` of this engine returned",
            ));
        }
        let remote = self.held.what.lock();
        remote
            .clone()
            .ok_or_else(|| refuse("a closed Remote", "an open Remote"))
    }
}

#[pymethods]
impl Remote {
    /// Size of the memory in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.bytes
    }

    /// Allowed access: "read", "write" or "both".
    #[getter]
    fn rights(&self) -> &str {
        self.rights
    }

    /// Remaining seconds of the grant when it was opened; None if it does not expire.
    #[getter]
    fn lasts(&self) -> Option<f64> {
        self.lasts
    }

    /// Address and port of the peer.
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    /// Closes the memory for later batches. Batches in progress continue.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.held.close(py)
    }

    fn __enter__(slf: Py<Remote>) -> Py<Remote> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self) -> String {
        let (bytes, address) = (self.bytes, &self.address);
        format!("<kvdepot.transfer.Remote of {bytes} bytes at {address}>")
    }
}
