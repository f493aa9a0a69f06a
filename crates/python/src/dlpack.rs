//! Memory of tensors, by DLPack: `tensor.__dlpack__()` answers a capsule that describes it.
//!
//! The capsule is kept, never consumed: its own destructor gives the tensor back.

use std::ffi::{CStr, c_void};

use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict};

/// Where a tensor's bytes are.
pub(crate) struct Memory {
    pub(crate) addr: usize,
    pub(crate) len: usize,
    pub(crate) writable: bool,
    /// The number of the CUDA device that it is on; none for memory of this process.
    pub(crate) device: Option<i32>,
}

/// The device type of CUDA memory.
const CUDA: i32 = 2;

/// Device types whose memory this process can read and write: CPU, CUDA host, ROCm host.
const HOST: [i32; 3] = [1, 3, 11];

/// The newest major version of the structures below.
const MAJOR: u32 = 1;

/// The flag of a read-only tensor.
const READ_ONLY: u64 = 1;

const PLAIN: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";

/// `DLTensor` of `dlpack.h`.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLManagedTensorVersioned` of `dlpack.h`.
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: *const c_void,
    flags: u64,
    tensor: Tensor,
}

/// Asks an object for its capsule. `Err` carries the reason in words.
pub(crate) fn capsule<'py>(object: &Bound<'py, PyAny>) -> Result<Bound<'py, PyCapsule>, String> {
    let export = object
        .getattr("__dlpack__")
        .map_err(|_| format!("{} object", crate::errors::kind(object)))?;
    let versioned = PyDict::new(object.py());
    let asked = versioned.set_item("max_version", (MAJOR, 0));
    let answer = asked.and_then(|()| export.call((), Some(&versioned)));
    // Exporters from before version 1 do not know the argument.
    let answer = answer.or_else(|_| export.call0());
    answer
        .map_err(|error| error.to_string())?
        .cast_into::<PyCapsule>()
        .map_err(|_| "an answer of __dlpack__ that is no capsule".to_owned())
}

/// The memory that a capsule describes. `Err` carries the reason in words.
pub(crate) fn memory(capsule: &Bound<'_, PyCapsule>) -> Result<Memory, String> {
    if let Ok(found) = capsule.pointer_checked(Some(VERSIONED)) {
        // SAFETY: by its name the capsule holds a `DLManagedTensorVersioned`, which its exporter
        // keeps until the capsule is destroyed. The fields before `flags` are those of every
        // major version.
        let header = unsafe { found.cast::<Versioned>().as_ref() };
        if header.major != MAJOR {
            return Err(format!("DLPack version {}.{}", header.major, header.minor));
        }
        return describe(&header.tensor, header.flags & READ_ONLY == 0);
    }
    match capsule.pointer_checked(Some(PLAIN)) {
        // SAFETY: by its name the capsule holds a `DLManagedTensor`, whose first field is the
        // tensor, kept until the capsule is destroyed.
        Ok(found) => describe(unsafe { found.cast::<Tensor>().as_ref() }, true),
        Err(_) => Err("a DLPack capsule that was used before".into()),
    }
}

fn describe(tensor: &Tensor, writable: bool) -> Result<Memory, String> {
    let device = (tensor.device_type == CUDA).then_some(tensor.device_id);
    if device.is_none() && !HOST.contains(&tensor.device_type) {
        return Err(format!(
            "a tensor on DLPack device {}:{}",
            tensor.device_type, tensor.device_id
        ));
    }
    let unsound = || "a DLPack tensor without sound dimensions".to_owned();
    let ndim = usize::try_from(tensor.ndim).map_err(|_| unsound())?;
    let dimensions = |at: *const i64| match ndim {
        0 => &[][..],
        // SAFETY: the exporter keeps `ndim` numbers there as long as the capsule.
        _ => unsafe { std::slice::from_raw_parts(at, ndim) },
    };
    if ndim > 0 && tensor.shape.is_null() {
        return Err(unsound());
    }
    let shape = dimensions(tensor.shape);
    let mut elements: i64 = 1;
    for (index, size) in shape.iter().enumerate().rev() {
        // Dimensions of one element may have any stride.
        if !tensor.strides.is_null() && *size > 1 {
            let stride = dimensions(tensor.strides)[index];
            if stride != elements && !shape.contains(&0) {
                return Err("a tensor with gaps".into());
            }
        }
        elements = elements.checked_mul(*size).ok_or_else(unsound)?;
    }
    let bits = u128::from(tensor.bits) * u128::from(tensor.lanes);
    let bytes = (u128::try_from(elements).map_err(|_| unsound())? * bits).div_ceil(8);
    let len = usize::try_from(bytes).map_err(|_| unsound())?;
    let offset = usize::try_from(tensor.byte_offset).map_err(|_| unsound())?;
    let addr = (tensor.data as usize)
        .checked_add(offset)
        .ok_or_else(unsound)?;
    if (addr == 0 && len > 0) || addr.checked_add(len).is_none() {
        return Err(unsound());
    }
    Ok(Memory {
        addr,
        len,
        writable,
        device,
    })
}
