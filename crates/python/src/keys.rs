//! Keys as Python gives them: one contiguous buffer, or a sequence of 32-byte values.

use std::ptr;

use kvdepot_store::Key;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use crate::errors;

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
    if let Ok(buffer) = PyUntypedBuffer::get(keys) {
        return match bytes_of(&buffer) {
            Some(bytes) => many(py, &bytes),
            None => Err(errors::input(
                py,
                "keys",
                "a buffer with gaps",
                "contiguous memory",
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
    match PyUntypedBuffer::get(item).map(|buffer| bytes_of(&buffer)) {
        Ok(Some(bytes)) => key(&bytes),
        _ => Err(wrong(errors::shown(item))),
    }
}

/// A copy of a contiguous buffer's bytes.
pub(crate) fn bytes_of(buffer: &PyUntypedBuffer) -> Option<Vec<u8>> {
    let len = buffer.len_bytes();
    if len == 0 {
        return Some(Vec::new());
    }
    if !buffer.is_c_contiguous() {
        return None;
    }
    let mut bytes = Vec::with_capacity(len);
    // SAFETY: the exporter keeps `len` readable bytes at `buf_ptr` while the buffer is held, and
    // they are contiguous as just checked; `bytes` has room for them. They are copied raw: another
    // thread may change them meanwhile, and any byte is a valid u8.
    unsafe {
        ptr::copy_nonoverlapping(buffer.buf_ptr().cast::<u8>(), bytes.as_mut_ptr(), len);
        bytes.set_len(len);
    }
    Some(bytes)
}
