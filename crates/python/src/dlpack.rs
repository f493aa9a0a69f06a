//! Memory of tensors, by DLPack: `tensor.__dlpack__()` answers a capsule that describes it.
//!
//! The capsule is consumed, as the protocol wants it: it is renamed, so that nobody else takes the
//! same tensor, and what it held is given back by its own deleter once no lane touches it.

use std::ffi::{CStr, c_void};

use std::ptr::NonNull;

use pyo3::ffi::PyCapsule_SetName;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict};

use crate::memory::Raw;

/// The device type of CUDA memory.
const CUDA: i32 = 2;

/// Device types whose memory this process can read and write: CPU, CUDA host, ROCm host.
const HOST: [i32; 3] = [1, 3, 11];

/// The type code of elements that are pointers.
const OPAQUE: u8 = 3;

/// The newest major version of the structures below.
const MAJOR: u32 = 1;

/// The flag of a read-only tensor.
const READ_ONLY: u64 = 1;

/// The flag of a copy that was made for this capsule: nobody would see what is written there.
const COPIED: u64 = 2;

const PLAIN: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";

/// What a capsule is called once it is consumed.
const PLAIN_USED: &CStr = c"used_dltensor";
const VERSIONED_USED: &CStr = c"used_dltensor_versioned";

/// The name of the capsules that a consumed tensor lives in here.
const OURS: &CStr = c"kvdepot.tensor";

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
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: Tensor,
}

/// `DLManagedTensor` of `dlpack.h`.
#[repr(C)]
struct Plain {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Plain)>,
}

/// What a capsule held, which is given back once.
enum Managed {
    Plain(NonNull<Plain>),
    Versioned(NonNull<Versioned>),
}

// SAFETY: the tensor's owner answers for its memory; a deleter may be called by any thread, and is
// called by one that has the interpreter.
unsafe impl Send for Managed {}

impl Drop for Managed {
    fn drop(&mut self) {
        // SAFETY: the capsule was consumed, so that this is the one to call the deleter, which
        // takes what it belongs to.
        unsafe {
            match self {
                Self::Plain(at) => {
                    if let Some(deleter) = at.as_ref().deleter {
                        deleter(at.as_ptr());
                    }
                }
                Self::Versioned(at) => {
                    if let Some(deleter) = at.as_ref().deleter {
                        deleter(at.as_ptr());
                    }
                }
            }
        }
    }
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
        .map_err(|_| "an object whose __dlpack__ does not return a capsule".to_owned())
}

/// Takes the tensor out of a capsule: its memory, and an object that keeps it. `Err` carries the
/// reason in words.
pub(crate) fn consume(capsule: &Bound<'_, PyCapsule>) -> Result<(Raw, Py<PyAny>), String> {
    let managed = take(capsule)?;
    // SAFETY: as said of what was taken: it is there until the deleter is called. The fields
    // before `flags` are those of every major version.
    let described = unsafe {
        match &managed {
            Managed::Versioned(at) => {
                let header = at.as_ref();
                match header.major {
                    MAJOR => describe(&header.tensor, header.flags & (READ_ONLY | COPIED) == 0),
                    major => Err(format!("DLPack version {major}.{}", header.minor)),
                }
            }
            Managed::Plain(at) => describe(&at.as_ref().tensor, true),
        }
    };
    let raw = described?;
    let kept = PyCapsule::new_with_value(capsule.py(), managed, OURS);
    let kept = kept.map_err(|error| error.to_string())?;
    Ok((raw, kept.into_any().unbind()))
}

/// Renames the capsule; what it holds is this process's to give back from then on.
fn take(capsule: &Bound<'_, PyCapsule>) -> Result<Managed, String> {
    let (managed, used) = if let Ok(found) = capsule.pointer_checked(Some(VERSIONED)) {
        (Managed::Versioned(found.cast()), VERSIONED_USED)
    } else if let Ok(found) = capsule.pointer_checked(Some(PLAIN)) {
        (Managed::Plain(found.cast()), PLAIN_USED)
    } else {
        return Err("a DLPack capsule that was already used".into());
    };
    // SAFETY: a capsule that holds something, as just seen; the name lives as long as the code.
    if unsafe { PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) } != 0 {
        // Its exporter gives it back.
        let _not_ours = std::mem::ManuallyDrop::new(managed);
        return Err(PyErr::fetch(capsule.py()).to_string());
    }
    Ok(managed)
}

fn describe(tensor: &Tensor, writable: bool) -> Result<Raw, String> {
    let device = (tensor.device_type == CUDA).then_some(tensor.device_id);
    if device.is_none() && !HOST.contains(&tensor.device_type) {
        return Err(format!(
            "a tensor on DLPack device {}:{}",
            tensor.device_type, tensor.device_id
        ));
    }
    if tensor.code == OPAQUE {
        return Err("a tensor whose elements are pointers".into());
    }
    let unsound = || "a DLPack tensor with invalid dimensions".to_owned();
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
    Ok(Raw {
        addr,
        len,
        writable,
        device,
    })
}
