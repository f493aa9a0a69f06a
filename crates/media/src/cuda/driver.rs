//! CUDA's driver, found at run time: nothing of it is needed to build or to load this crate.

use crate::error::{Error, Result};
use crate::library::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::io;
use std::path::Path;

/// `CUcontext`, `CUstream`, `CUevent`.
pub(super) type Handle = *mut c_void;
type Code = c_int;

pub(super) const SUCCESS: Code = 0;

/// `CUDA_ERROR_INVALID_CONTEXT`: the calling thread has none.
const NO_CONTEXT: Code = 201;

/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
const ORDINAL: c_int = 9;

/// Names another library than the system's, for tests.
const LIBRARY: &str = "KVDEPOT_CUDA_LIBRARY";

/// The functions that are used of `libcuda.so.1`, named as there.
#[derive(Debug)]
#[expect(non_snake_case, reason = "the driver's own names")]
pub(super) struct Driver {
    pub(super) cuInit: unsafe extern "C" fn(c_uint) -> Code,
    pub(super) cuDeviceGet: unsafe extern "C" fn(*mut c_int, c_int) -> Code,
    cuDeviceGetCount: unsafe extern "C" fn(*mut c_int) -> Code,
    cuDeviceGetName: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> Code,
    cuDevicePrimaryCtxGetState: unsafe extern "C" fn(c_int, *mut c_uint, *mut c_int) -> Code,
    pub(super) cuDevicePrimaryCtxRetain: unsafe extern "C" fn(*mut Handle, c_int) -> Code,
    pub(super) cuCtxGetCurrent: unsafe extern "C" fn(*mut Handle) -> Code,
    pub(super) cuCtxPushCurrent_v2: unsafe extern "C" fn(Handle) -> Code,
    pub(super) cuCtxPopCurrent_v2: unsafe extern "C" fn(*mut Handle) -> Code,
    pub(super) cuMemHostRegister_v2: unsafe extern "C" fn(*mut c_void, usize, c_uint) -> Code,
    pub(super) cuMemHostUnregister: unsafe extern "C" fn(*mut c_void) -> Code,
    pub(super) cuStreamCreate: unsafe extern "C" fn(*mut Handle, c_uint) -> Code,
    pub(super) cuStreamDestroy_v2: unsafe extern "C" fn(Handle) -> Code,
    pub(super) cuStreamSynchronize: unsafe extern "C" fn(Handle) -> Code,
    pub(super) cuMemcpyHtoDAsync_v2:
        unsafe extern "C" fn(u64, *const c_void, usize, Handle) -> Code,
    pub(super) cuMemcpyDtoHAsync_v2: unsafe extern "C" fn(*mut c_void, u64, usize, Handle) -> Code,
    cuPointerGetAttribute: unsafe extern "C" fn(*mut c_void, c_int, u64) -> Code,
    pub(super) cuEventCreate: unsafe extern "C" fn(*mut Handle, c_uint) -> Code,
    pub(super) cuEventRecord: unsafe extern "C" fn(Handle, Handle) -> Code,
    pub(super) cuEventQuery: unsafe extern "C" fn(Handle) -> Code,
    pub(super) cuEventSynchronize: unsafe extern "C" fn(Handle) -> Code,
    pub(super) cuEventDestroy_v2: unsafe extern "C" fn(Handle) -> Code,
    pub(super) cuThreadExchangeStreamCaptureMode: unsafe extern "C" fn(*mut c_int) -> Code,
    pub(super) cuStreamWaitEvent: unsafe extern "C" fn(Handle, Handle, c_uint) -> Code,
    pub(super) cuMemAlloc_v2: unsafe extern "C" fn(*mut u64, usize) -> Code,
    pub(super) cuMemFree_v2: unsafe extern "C" fn(u64) -> Code,
    pub(super) cuMemAllocHost_v2: unsafe extern "C" fn(*mut *mut c_void, usize) -> Code,
    pub(super) cuMemFreeHost: unsafe extern "C" fn(*mut c_void) -> Code,
    pub(super) cuModuleLoadData: unsafe extern "C" fn(*mut Handle, *const c_void) -> Code,
    pub(super) cuModuleGetFunction:
        unsafe extern "C" fn(*mut Handle, Handle, *const c_char) -> Code,
    pub(super) cuLaunchKernel: Launch,
    cuGetErrorName: unsafe extern "C" fn(Code, *mut *const c_char) -> Code,
    /// Since CUDA 12.8.
    pub(super) batch: Option<Batch>,
}

/// `cuLaunchKernel`: a function, its grid, its blocks, shared memory, a stream, and parameters.
type Launch = unsafe extern "C" fn(
    Handle,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    Handle,
    *mut *mut c_void,
    *mut *mut c_void,
) -> Code;

/// `CUmemcpyAttributes`: how the source may be read, and hints for managed memory.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct CopyAttributes {
    access: c_int,
    places: [c_int; 4],
    flags: c_uint,
}

/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: when the stream has come to it.
const IN_ORDER: c_int = 1;

/// `cuMemcpyBatchAsync`: destinations, sources, lengths, their count, attributes, from which copy
/// on each of them holds, and their count. The first had a place for the copy that failed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Batch {
    First(
        unsafe extern "C" fn(
            *mut u64,
            *mut u64,
            *mut usize,
            usize,
            *mut CopyAttributes,
            *mut usize,
            usize,
            *mut usize,
            Handle,
        ) -> Code,
    ),
    Second(
        unsafe extern "C" fn(
            *const u64,
            *const u64,
            *const usize,
            usize,
            *mut CopyAttributes,
            *mut usize,
            usize,
            Handle,
        ) -> Code,
    ),
}

impl Driver {
    /// Loads the system's driver, or the one that the environment names.
    pub(super) fn system() -> Result<Self> {
        let named = std::env::var_os(LIBRARY);
        Self::load(
            named
                .as_deref()
                .map_or_else(|| Path::new("libcuda.so.1"), Path::new),
        )
    }

    pub(super) fn load(path: &Path) -> Result<Self> {
        let library = Library::load(path)?;
        macro_rules! function {
            ($name:ident) => {{
                let name = concat!(stringify!($name), "\0").as_bytes();
                let at = library.function(CStr::from_bytes_with_nul(name).unwrap_or_default())?;
                // SAFETY: cuda.h declares the function of that name as the field's type does, and a
                // pointer to it is as wide as any.
                unsafe { std::mem::transmute_copy(&at) }
            }};
        }
        // SAFETY: as below, of the two that cuda.h has declared under these names.
        let batch = unsafe {
            let first = library.function(c"cuMemcpyBatchAsync").ok();
            let second = library.function(c"cuMemcpyBatchAsync_v2").ok();
            second
                .map(|at| Batch::Second(std::mem::transmute_copy(&at)))
                .or_else(|| first.map(|at| Batch::First(std::mem::transmute_copy(&at))))
        };
        let driver = Self {
            cuInit: function!(cuInit),
            cuDeviceGet: function!(cuDeviceGet),
            cuDeviceGetCount: function!(cuDeviceGetCount),
            cuDeviceGetName: function!(cuDeviceGetName),
            cuDevicePrimaryCtxGetState: function!(cuDevicePrimaryCtxGetState),
            cuDevicePrimaryCtxRetain: function!(cuDevicePrimaryCtxRetain),
            cuCtxGetCurrent: function!(cuCtxGetCurrent),
            cuCtxPushCurrent_v2: function!(cuCtxPushCurrent_v2),
            cuCtxPopCurrent_v2: function!(cuCtxPopCurrent_v2),
            cuMemHostRegister_v2: function!(cuMemHostRegister_v2),
            cuMemHostUnregister: function!(cuMemHostUnregister),
            cuStreamCreate: function!(cuStreamCreate),
            cuStreamDestroy_v2: function!(cuStreamDestroy_v2),
            cuStreamSynchronize: function!(cuStreamSynchronize),
            cuMemcpyHtoDAsync_v2: function!(cuMemcpyHtoDAsync_v2),
            cuMemcpyDtoHAsync_v2: function!(cuMemcpyDtoHAsync_v2),
            cuPointerGetAttribute: function!(cuPointerGetAttribute),
            cuEventCreate: function!(cuEventCreate),
            cuEventRecord: function!(cuEventRecord),
            cuEventQuery: function!(cuEventQuery),
            cuEventSynchronize: function!(cuEventSynchronize),
            cuEventDestroy_v2: function!(cuEventDestroy_v2),
            cuThreadExchangeStreamCaptureMode: function!(cuThreadExchangeStreamCaptureMode),
            cuStreamWaitEvent: function!(cuStreamWaitEvent),
            cuMemAlloc_v2: function!(cuMemAlloc_v2),
            cuMemFree_v2: function!(cuMemFree_v2),
            cuMemAllocHost_v2: function!(cuMemAllocHost_v2),
            cuMemFreeHost: function!(cuMemFreeHost),
            cuModuleLoadData: function!(cuModuleLoadData),
            cuModuleGetFunction: function!(cuModuleGetFunction),
            cuLaunchKernel: function!(cuLaunchKernel),
            cuGetErrorName: function!(cuGetErrorName),
            batch,
        };
        // SAFETY: the flags must be zero.
        driver.check("cuInit", unsafe { (driver.cuInit)(0) })?;
        Ok(driver)
    }

    /// The number of the device whose memory is at an address, as the calling thread's context
    /// knows it; `None` where the thread has none and would need one.
    pub(super) fn ordinal_of(&self, addr: usize) -> Result<Option<i32>> {
        let mut ordinal: c_int = 0;
        let at = (&raw mut ordinal).cast();
        // SAFETY: the attribute is an `int`, for which there is room.
        let known = unsafe { (self.cuPointerGetAttribute)(at, ORDINAL, addr as u64) };
        if known == NO_CONTEXT {
            return Ok(None);
        }
        self.check("cuPointerGetAttribute", known)?;
        Ok(Some(ordinal))
    }

    /// What the device with this number is called.
    pub(super) fn name(&self, ordinal: i32) -> Result<String> {
        let (mut device, mut name) = (0, [0_u8; 256]);
        // SAFETY: both are writable, and the name for as many bytes as is said.
        unsafe {
            let found = (self.cuDeviceGet)(&raw mut device, ordinal);
            self.check("cuDeviceGet", found)?;
            let len = name.len() as c_int;
            let named = (self.cuDeviceGetName)(name.as_mut_ptr().cast(), len, device);
            self.check("cuDeviceGetName", named)?;
        }
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        Ok(name.to_string_lossy().into_owned())
    }

    /// How many devices there are.
    pub(super) fn count(&self) -> Result<i32> {
        let mut count: c_int = 0;
        // SAFETY: `count` is writable.
        let counted = unsafe { (self.cuDeviceGetCount)(&raw mut count) };
        self.check("cuDeviceGetCount", counted).map(|()| count)
    }

    /// The devices that somebody in this process uses: their primary contexts are there.
    pub(super) fn in_use(&self) -> Result<Vec<i32>> {
        let count = self.count()?;
        let is_used = |ordinal: &i32| {
            let (mut device, mut flags, mut active) = (0, 0, 0);
            // SAFETY: all three are writable.
            let known = unsafe {
                (self.cuDeviceGet)(&raw mut device, *ordinal) == SUCCESS
                    && (self.cuDevicePrimaryCtxGetState)(device, &raw mut flags, &raw mut active)
                        == SUCCESS
            };
            known && active != 0
        };
        Ok((0..count).filter(is_used).collect())
    }

    /// Asks a stream for copies by one call.
    ///
    /// # Safety
    ///
    /// Each range may be read or written until the stream has done it.
    pub(super) unsafe fn copy_all(
        &self,
        batch: Batch,
        (to, from, lens): (&mut [u64], &mut [u64], &mut [usize]),
        stream: Handle,
    ) -> Result<()> {
        let count = lens.len().min(to.len()).min(from.len());
        let mut attributes = CopyAttributes {
            access: IN_ORDER,
            ..CopyAttributes::default()
        };
        let (attributes, mut first) = (&raw mut attributes, 0_usize);
        let (to, from, lens) = (to.as_mut_ptr(), from.as_mut_ptr(), lens.as_mut_ptr());
        let first = &raw mut first;
        // SAFETY: there are so many of each; the ranges are as the caller promises.
        let asked = unsafe {
            match batch {
                Batch::First(call) => {
                    let mut failed = 0_usize;
                    let failed = &raw mut failed;
                    call(to, from, lens, count, attributes, first, 1, failed, stream)
                }
                Batch::Second(call) => call(to, from, lens, count, attributes, first, 1, stream),
            }
        };
        self.check("cuMemcpyBatchAsync", asked)
    }

    /// Turns a function's answer into an error.
    pub(super) fn check(&self, function: &'static str, code: Code) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: `name` is writable.
        let known = unsafe { (self.cuGetErrorName)(code, &raw mut name) } == SUCCESS;
        let name = match known && !name.is_null() {
            // SAFETY: the driver gave a string that lives as long as it.
            true => unsafe { CStr::from_ptr(name) }
                .to_string_lossy()
                .into_owned(),
            false => format!("CUDA error {code}"),
        };
        Err(Error::io("call", function, io::Error::other(name)))
    }
}
