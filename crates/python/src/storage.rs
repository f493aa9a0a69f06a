//! What really owns a tensor's bytes. A tensor can be given other memory (`t.data = x`,
//! `t.set_()`), and lets the one it had go; its storage keeps it.
//!
//! Not covered: what takes the memory away from the storage itself, which are `resize_`,
//! `share_memory_` and the storage's own methods.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyMemoryView, PyTuple};

use crate::memory::{Home, Place};
use crate::view::View;

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
        return Err("a tensor whose memory was replaced during the call".into());
    }
    kept.push(storage.unbind());
    Ok(())
}

/// Whether a storage has so many bytes at an address.
fn holds(storage: &Bound<'_, PyAny>, addr: usize, len: usize) -> PyResult<bool> {
    let (begin, end) = bounds(storage)?;
    Ok(begin <= addr && addr.saturating_add(len) <= end)
}

fn bounds(storage: &Bound<'_, PyAny>) -> PyResult<(usize, usize)> {
    let py = storage.py();
    let begin: usize = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
    let bytes: usize = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
    Ok((begin, begin.saturating_add(bytes)))
}

/// Where a storage is.
pub(crate) fn place(storage: &Bound<'_, PyAny>) -> PyResult<Place> {
    let py = storage.py();
    let device = storage.getattr(intern!(py, "device"))?;
    let kind: String = device.getattr(intern!(py, "type"))?.extract()?;
    let (begin, end) = bounds(storage)?;
    let home = match kind.as_str() {
        "cpu" => Some(Home::Processor),
        "cuda" => Some(Home::Device(
            device.getattr(intern!(py, "index"))?.extract()?,
        )),
        _ => None,
    };
    Ok(Place { begin, end, home })
}

/// All memory that `owner`, or what a list, tuple or dictionary has, owns; `None` where some of it
/// is not known.
pub(crate) fn places(owner: &Bound<'_, PyAny>) -> Option<Vec<Place>> {
    if let Ok(list) = owner.cast::<PyList>() {
        list.iter().map(|one| owned(&one)).collect()
    } else if let Ok(tuple) = owner.cast::<PyTuple>() {
        tuple.iter().map(|one| owned(&one)).collect()
    } else if let Ok(dict) = owner.cast::<PyDict>() {
        dict.values().iter().map(|one| owned(&one)).collect()
    } else {
        owned(owner).map(|place| vec![place])
    }
}

/// Views of views that are followed: hardly any object has more, and some name themselves.
const VIEWS_MAX: usize = 64;

/// The memory of a tensor's storage, or of the object that an array or a memory view is a view of.
fn owned(object: &Bound<'_, PyAny>) -> Option<Place> {
    let py = object.py();
    let mut object = object.clone();
    let mut found = None;
    for _ in 0..VIEWS_MAX {
        if let Some(storage) = of(&object) {
            return place(&storage).ok().or(found);
        }
        let Ok(view) = View::strided(&object) else {
            break;
        };
        found = Some(view.extent());
        let behind = match object.is_instance_of::<PyMemoryView>() {
            true => object.getattr(intern!(py, "obj")),
            false => object.getattr(intern!(py, "base")),
        };
        match behind {
            Ok(behind) if !behind.is_none() => object = behind,
            _ => break,
        }
    }
    found
}
