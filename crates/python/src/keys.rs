//! Keys as Python gives them: one contiguous buffer, or a sequence of 32-byte values.

use kvdepot_store::Key;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use crate::errors;
use crate::view::View;

const ALLOWED: &str = "32-byte values, or one contiguous buffer of them";

/// Reads the keys of a call.
pub(crate) fn parse(keys: &Bound<'_, PyAny>) -> PyResult<Vec<Key>> {
    let py = keys.py();
    if let Ok(bytes) = keys.cast::<PyBytes>() {
        return many(py, bytes.as_bytes());
    }
    if let Ok(list) = keys.cast::<PyList>() {
        return each(list.iter());
    }
    if let Ok(tuple) = keys.cast::<PyTuple>() {
        return each(tuple.iter());
    }
    if let Ok(view) = View::in_rows(keys) {
        return match view {
            Some(view) => many(py, &view.to_vec()),
            None => Err(errors::input(
                py,
                "keys",
                "a buffer with gaps",
                "contiguous memory, one key after another",
            )),
        };
    }
    let Ok(items) = keys.try_iter() else {
        return Err(errors::input(py, "keys", errors::shown(keys), ALLOWED));
    };
    let items: Vec<_> = items.collect::<PyResult<_>>()?;
    each(items.into_iter())
}

fn many(py: Python<'_>, bytes: &[u8]) -> PyResult<Vec<Key>> {
    Key::many(bytes).map_err(|error| errors::raise(py, error))
}

fn each<'py>(items: impl ExactSizeIterator<Item = Bound<'py, PyAny>>) -> PyResult<Vec<Key>> {
    let mut keys = Vec::with_capacity(items.len());
    for (index, item) in items.enumerate() {
        keys.push(one(index, &item)?);
    }
    Ok(keys)
}

fn one(index: usize, item: &Bound<'_, PyAny>) -> PyResult<Key> {
    let wrong = |value: String| {
        errors::input(
            item.py(),
            format!("keys[{index}]"),
            value,
            "a key of 32 bytes",
        )
    };
    let key = |bytes: &[u8]| match bytes.try_into() {
        Ok(key) => Ok(Key(key)),
        Err(_) => Err(wrong(format!("a value of {} bytes", bytes.len()))),
    };
    if let Ok(bytes) = item.cast::<PyBytes>() {
        return key(bytes.as_bytes());
    }
    match View::in_rows(item) {
        Ok(Some(view)) => key(&view.to_vec()),
        _ => Err(wrong(errors::shown(item))),
    }
}
