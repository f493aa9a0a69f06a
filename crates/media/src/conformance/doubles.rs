//! Doubles of libraries, asked to fail or to count.

use crate::buffer::Buffer;
use crate::cuda::{Device, Fence};
use crate::library::Library;
use std::ffi::CString;
use std::path::Path;
use std::sync::Arc;

/// Calls a function of a double (`crates/testkit`), which takes at most one number and answers at
/// most one.
///
/// # Panics
///
/// When there is no such double, or no such function.
pub fn double(library: &Path, function: &str, argument: i64) -> i64 {
    let function = CString::new(function).unwrap();
    let at = Library::load(library).and_then(|library| library.function(&function));
    // SAFETY: the doubles' functions fit this type on x86-64 and AArch64.
    unsafe {
        let function: unsafe extern "C" fn(i64) -> i64 = std::mem::transmute(at.unwrap());
        function(argument)
    }
}

/// The bit that tells device addresses of the double of CUDA's driver from host ones.
const DEVICE_BIT: usize = 1 << 56;

/// Memory of a device of the double of CUDA's driver: it is this host memory really.
#[must_use]
pub fn on_double(device: &Arc<Device>, host: &Buffer) -> Buffer {
    let (at, owner) = (host.addr() | DEVICE_BIT, Arc::new(host.clone()));
    // SAFETY: the double's device memory is the host's, which the owner keeps.
    unsafe { Buffer::on_device(at, host.len(), owner, Arc::clone(device)) }
}

/// This moment of a stream of the double's: of the default one for 0, or of one that
/// `double_busy_stream` has made.
#[must_use]
pub fn fence_of_double(device: &Device, stream: i64) -> Arc<Fence> {
    // SAFETY: it is one of the double's streams.
    unsafe { device.fence(stream as usize) }.unwrap()
}
