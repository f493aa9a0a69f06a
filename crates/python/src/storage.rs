//! What really owns a tensor's bytes. A tensor can be given other memory (`t.data = x`,
//! `t.set_()`), and lets the one it had go; its storage keeps it.
//!
//! Not covered: what takes the memory away from the storage itself, which are `resize_`,
//! `share_memory_` and the storage's own methods.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

/// The storage of a tensor of PyTorch; `None` for anything else.
pub(crate) fn of<'py>(object: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    let name = intern!(object.py(), "untyped_storage");
    // Tensors without a storage of their own, such as sparse ones, raise.
    let method = object.getattr_opt(name).ok()??;
    method.call0().ok()
}

/// Keeps the storages of `owner`, of a list's or tuple's tensors or of a dictionary's values.
pub(crate) fn keep_all(owner: &Bound<'_, PyAny>, kept: &mut Vec<Py<PyAny>>) {
    if let Some(storage) = of(owner) {
        kept.push(storage.unbind());
    } else if let Ok(list) = owner.cast::<PyList>() {
        kept.extend(list.iter().filter_map(|one| of(&one)).map(Bound::unbind));
    } else if let Ok(tuple) = owner.cast::<PyTuple>() {
        kept.extend(tuple.iter().filter_map(|one| of(&one)).map(Bound::unbind));
    } else if let Ok(dict) = owner.cast::<PyDict>() {
        let values = dict.values();
        kept.extend(values.iter().filter_map(|one| of(&one)).map(Bound::unbind));
    }
}

/// Keeps what owns the bytes that `object` has just been asked for. `Err` carries the reason in
/// words: the object was given another storage while it was read.
pub(crate) fn keep(
    object: &Bound<'_, PyAny>,
    addr: usize,
    len: usize,
    kept: &mut Vec<Py<PyAny>>,
) -> Result<(), String> {
    let Some(storage) = of(object) else {
        return Ok(());
    };
    if len > 0 && matches!(holds(&storage, addr, len), Ok(false)) {
        return Err("a tensor that was given other memory meanwhile".into());
    }
    kept.push(storage.unbind());
    Ok(())
}

/// Whether a storage has so many bytes at an address.
fn holds(storage: &Bound<'_, PyAny>, addr: usize, len: usize) -> PyResult<bool> {
    let py = storage.py();
    let begin: usize = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
    let bytes: usize = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
    let end = addr.saturating_add(len);
    Ok(begin <= addr && end <= begin.saturating_add(bytes))
}
