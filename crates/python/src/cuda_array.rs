//! Arrays on a CUDA device, by `__cuda_array_interface__`: a dictionary that describes them.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::memory::Raw;

/// The memory of an array; `None` for an object without the interface. `Err` carries the reason in
/// words.
pub(crate) fn memory(object: &Bound<'_, PyAny>) -> Result<Option<Raw>, String> {
    let Ok(found) = object.getattr("__cuda_array_interface__") else {
        return Ok(None);
    };
    let array = found
        .cast_into::<PyDict>()
        .map_err(|_| "a __cuda_array_interface__ that is not a dictionary".to_owned())?;
    let field = |name: &str| -> Result<Bound<'_, PyAny>, String> {
        let value = array.get_item(name).map_err(|error| error.to_string())?;
        value.ok_or_else(|| format!("a __cuda_array_interface__ without {name}"))
    };
    let wrong = |error: PyErr| format!("a __cuda_array_interface__ with {error}");
    let (addr, read_only): (usize, bool) = field("data")?.extract().map_err(wrong)?;
    let shape: Vec<usize> = field("shape")?.extract().map_err(wrong)?;
    let kind: String = field("typestr")?.extract().map_err(wrong)?;
    // `<f4`: byte order, kind, bytes of an element.
    let item: Option<usize> = kind.get(2..).and_then(|bytes| bytes.parse().ok());
    if kind.get(1..2) == Some("O") {
        return Err("an array of objects".into());
    }
    let item = item.ok_or_else(|| format!("a __cuda_array_interface__ with typestr {kind:?}"))?;
    let mut bytes = item;
    let strides = array.get_item("strides").map_err(wrong)?;
    let strides: Option<Vec<isize>> = match strides.filter(|strides| !strides.is_none()) {
        Some(strides) => Some(strides.extract().map_err(wrong)?),
        None => None,
    };
    for (index, size) in shape.iter().enumerate().rev() {
        let stride = strides.as_ref().and_then(|strides| strides.get(index));
        if *size > 1 && stride.is_some_and(|stride| *stride != bytes.cast_signed()) {
            return Err("an array with gaps".into());
        }
        let larger = bytes.checked_mul(*size);
        bytes = larger.ok_or("an array with invalid dimensions")?;
    }
    if (addr == 0 && bytes > 0) || addr.checked_add(bytes).is_none() {
        return Err("an array with invalid dimensions".into());
    }
    Ok(Some(Raw {
        addr,
        len: bytes,
        writable: !read_only,
        device: Some(device_of(addr)?),
    }))
}

fn device_of(addr: usize) -> Result<i32, String> {
    let found = kvdepot_store::Device::ordinal_of(addr);
    found.map_err(|error| format!("an array whose memory is not on a CUDA device ({error})"))
}
