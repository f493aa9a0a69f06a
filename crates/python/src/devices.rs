//! The media of a depot's tier: what they are, and how they come and go.

use std::path::PathBuf;

use kvdepot_store::config::size;
use kvdepot_store::{Depot, DrainTo};
use pyo3::prelude::*;
use serde_json::json;

use crate::{errors, settings, wait};

pub(crate) fn list<'py>(py: Python<'py>, depot: &Depot) -> PyResult<Bound<'py, PyAny>> {
    let devices = wait::call(py, || depot.devices())?;
    let devices = devices.map_err(|error| errors::raise(py, error))?;
    let devices = serde_json::to_value(devices).unwrap_or_default();
    settings::to_python(py, &devices)
}

pub(crate) fn add<'py>(
    py: Python<'py>,
    depot: Depot,
    path: PathBuf,
    capacity: Option<u64>,
) -> PyResult<Bound<'py, PyAny>> {
    let found = wait::on_thread(py, move || depot.add_device(&path, capacity))?;
    let found = found.map_err(|error| errors::raise(py, error))?;
    let found = json!({
        "blocks": found.blocks, "damaged": found.damaged, "superseded": found.outranked,
        "created": found.created,
    });
    settings::to_python(py, &found)
}

pub(crate) fn drain<'py>(
    py: Python<'py>,
    depot: Depot,
    path: PathBuf,
    to: &str,
    timeout: Option<f64>,
) -> PyResult<Bound<'py, PyAny>> {
    let to = match to {
        "other_devices" => DrainTo::Others,
        "evict" => DrainTo::Nowhere,
        other => {
            let value = format!("{other:?}");
            return Err(errors::input(
                py,
                "to",
                value,
                "\"other_devices\" or \"evict\"",
            ));
        }
    };
    let patience = wait::timeout(py, timeout)?.unwrap_or(std::time::Duration::MAX);
    let drained = wait::on_thread(py, move || depot.drain_device(&path, to, patience))?;
    let drained = drained.map_err(|error| errors::raise(py, error))?;
    let drained = json!({
        "moved_blocks": drained.moved_blocks, "moved_bytes": drained.moved_bytes,
        "evicted_blocks": drained.evicted_blocks,
    });
    settings::to_python(py, &drained)
}

pub(crate) fn remove(
    py: Python<'_>,
    depot: Depot,
    path: PathBuf,
    force: bool,
    timeout: Option<f64>,
) -> PyResult<()> {
    let patience = wait::timeout(py, timeout)?.unwrap_or(std::time::Duration::MAX);
    wait::on_thread(py, move || depot.remove_device(&path, force, patience))?
        .map_err(|error| errors::raise(py, error))
}

pub(crate) fn grow(py: Python<'_>, depot: Depot, path: PathBuf, capacity: u64) -> PyResult<()> {
    wait::on_thread(py, move || depot.grow_device(&path, capacity))?
        .map_err(|error| errors::raise(py, error))
}

/// A size as the configuration takes it: a number of bytes, or a text with a unit.
pub(crate) fn size_of(field: &'static str, given: &Bound<'_, PyAny>) -> PyResult<u64> {
    let text = given.extract::<String>().ok();
    let bytes = match &text {
        Some(text) => size::size(text),
        None => given.extract::<u64>().ok(),
    };
    match bytes.filter(|bytes| *bytes > 0) {
        Some(bytes) => Ok(bytes),
        None => {
            let value = errors::shown(given);
            Err(errors::input(given.py(), field, value, size::SIZE_HELP))
        }
    }
}
