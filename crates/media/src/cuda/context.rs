//! A device's primary context, and what is done in it.

use super::driver::{Driver, Handle, SUCCESS};
use crate::carrier::Op;
use crate::error::{Error, Result};
use kvdepot_host::fork::Origin;
use std::cell::Cell;
use std::ffi::c_int;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The primary context of a device, which frameworks use too.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) driver: Arc<Driver>,
    handle: Handle,
    origin: Origin,
}

// SAFETY: a context may be used by any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// The calling thread's use of a context, from [`Context::enter`] until it is dropped, on the same
/// thread.
///
/// For that time the thread may call functions that the driver forbids to other threads while a
/// framework captures a graph (`cuThreadExchangeStreamCaptureMode`): no work of kvdepot is in the
/// graph.
pub(super) struct Entered<'a> {
    context: &'a Context,
    /// The capture mode of the thread before. `None` if the thread keeps the context.
    before: Option<c_int>,
}

/// Relation of a thread to contexts.
#[derive(Clone, Copy)]
enum Thread {
    /// A thread of a framework: each entry ends with the context that the thread had before.
    Foreign,
    /// A thread of kvdepot, and the context that it keeps from its first entry on.
    Own(Handle),
}

thread_local! {
    static THREAD: Cell<Thread> = const { Cell::new(Thread::Foreign) };
}

/// Lets the calling thread, which kvdepot has started, keep the first context that it enters.
///
/// Each entry costs four calls of the driver, which serves one thread at a time in most of them.
pub(crate) fn keep_context() {
    THREAD.set(Thread::Own(std::ptr::null_mut()));
}

/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` to `CUDA_ERROR_CAPTURED_EVENT` and its like: what the
/// driver answers to calls beside a capture.
const CAPTURE: Range<c_int> = 900..909;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: c_int = 2;

impl Context {
    /// Retains the context of device number `ordinal`, for as long as the process lives.
    pub(super) fn retain(driver: Arc<Driver>, ordinal: i32) -> Result<Self> {
        let origin = Origin::here();
        let origin = origin.map_err(|e| Error::io("open", "CUDA device", io::Error::other(e)))?;
        let (mut device, mut handle) = (0, std::ptr::null_mut());
        // SAFETY: both are writable, and the driver is initialised.
        unsafe {
            let found = (driver.cuDeviceGet)(&raw mut device, ordinal);
            driver.check("cuDeviceGet", found)?;
            let retained = (driver.cuDevicePrimaryCtxRetain)(&raw mut handle, device);
            driver.check("cuDevicePrimaryCtxRetain", retained)?;
        }
        Ok(Self {
            driver,
            handle,
            origin,
        })
    }

    /// Makes the context current in the calling thread, which may be an engine's, until the
    /// returned value is dropped. A thread of kvdepot [keeps](keep_context) its first one.
    ///
    /// # Errors
    ///
    /// The driver's error, and an error in a forked child: the driver cannot be used there.
    pub(super) fn enter(&self) -> Result<Entered<'_>> {
        if !self.is_here() {
            let forked = io::Error::other("the CUDA driver cannot be used in a forked child");
            return Err(Error::io("call", "cuCtxPushCurrent", forked));
        }
        let keeps = match THREAD.get() {
            // A caller's function that runs on this thread may have set another one.
            Thread::Own(kept) if kept == self.handle && self.is_current() => {
                return Ok(Entered {
                    context: self,
                    before: None,
                });
            }
            Thread::Own(kept) => kept.is_null(),
            Thread::Foreign => false,
        };
        // SAFETY: the context was retained and never released.
        let entered = unsafe { (self.driver.cuCtxPushCurrent_v2)(self.handle) };
        self.driver.check("cuCtxPushCurrent", entered)?;
        let mut mode = RELAXED;
        // SAFETY: the mode is one, and is written.
        unsafe { (self.driver.cuThreadExchangeStreamCaptureMode)(&raw mut mode) };
        if keeps {
            THREAD.set(Thread::Own(self.handle));
        }
        Ok(Entered {
            context: self,
            before: (!keeps).then_some(mode),
        })
    }

    /// Returns true if the context is current in the calling thread.
    fn is_current(&self) -> bool {
        let mut current = std::ptr::null_mut();
        // SAFETY: `current` is writable.
        let known = unsafe { (self.driver.cuCtxGetCurrent)(&raw mut current) };
        known == SUCCESS && current == self.handle
    }

    /// Whether this process has it, and not one that it was forked from.
    pub(super) fn is_here(&self) -> bool {
        self.origin.is_here()
    }

    /// Pins memory of this process.
    ///
    /// # Safety
    ///
    /// The range is mapped until [`Context::unpin`].
    pub(super) unsafe fn pin(&self, at: usize, len: usize) -> Result<()> {
        let _entered = self.enter()?;
        let at = std::ptr::with_exposed_provenance_mut(at);
        // Portable: for the contexts of all devices.
        // SAFETY: the caller's promise.
        let pinned = unsafe { (self.driver.cuMemHostRegister_v2)(at, len, 1) };
        self.driver.check("cuMemHostRegister", pinned)
    }

    pub(super) fn unpin(&self, at: usize) -> Result<()> {
        let _entered = self.enter()?;
        let at = std::ptr::with_exposed_provenance_mut(at);
        // SAFETY: the driver looks the address up in its own table.
        let unpinned = unsafe { (self.driver.cuMemHostUnregister)(at) };
        self.driver.check("cuMemHostUnregister", unpinned)
    }

    /// A stream that waits for nothing that the framework has queued. The calling thread has
    /// entered, here and below.
    pub(super) fn stream(&self) -> Result<Handle> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` is writable.
        let created = unsafe { (self.driver.cuStreamCreate)(&raw mut handle, 1) };
        self.driver.check("cuStreamCreate", created)?;
        Ok(handle)
    }

    /// Lets a stream go, which has done all that it was asked for.
    pub(super) fn end(&self, stream: Handle) {
        // SAFETY: it is this context's, and nobody names it any more.
        let _gone = unsafe { (self.driver.cuStreamDestroy_v2)(stream) };
    }

    /// An event whose waiter sleeps, without timing: only its end matters.
    pub(super) fn event(&self) -> Result<Handle> {
        let mut event = std::ptr::null_mut();
        // SAFETY: `event` is writable.
        let created = unsafe { (self.driver.cuEventCreate)(&raw mut event, 3) };
        self.driver.check("cuEventCreate", created)?;
        Ok(event)
    }

    /// Asks a stream for a copy of `len` bytes between `memory` of this process and `at` of the
    /// device.
    ///
    /// # Safety
    ///
    /// Both may be read, or written, until the stream has done it.
    pub(super) unsafe fn copy(
        &self,
        stream: Handle,
        op: Op,
        at: u64,
        (memory, len): (*mut u8, usize),
    ) -> Result<()> {
        let memory = memory.cast();
        let (function, asked) = match op {
            Op::Read => {
                let copy = self.driver.cuMemcpyDtoHAsync_v2;
                // SAFETY: the caller's promise.
                ("cuMemcpyDtoHAsync", unsafe {
                    copy(memory, at, len, stream)
                })
            }
            Op::Write => {
                let copy = self.driver.cuMemcpyHtoDAsync_v2;
                // SAFETY: the caller's promise.
                let asked = unsafe { copy(at, memory.cast_const(), len, stream) };
                ("cuMemcpyHtoDAsync", asked)
            }
        };
        self.driver.check(function, asked)
    }

    /// Memory of the device, until it is given back.
    pub(super) fn memory(&self, len: usize) -> Result<u64> {
        let mut at = 0;
        // SAFETY: `at` is writable.
        let taken = unsafe { (self.driver.cuMemAlloc_v2)(&raw mut at, len) };
        self.driver.check("cuMemAlloc", taken)?;
        Ok(at)
    }

    /// Memory of this process that the driver has pinned, until it is given back.
    pub(super) fn host_memory(&self, len: usize) -> Result<*mut u8> {
        let mut at = std::ptr::null_mut();
        // SAFETY: `at` is writable.
        let taken = unsafe { (self.driver.cuMemAllocHost_v2)(&raw mut at, len) };
        self.driver.check("cuMemAllocHost", taken)?;
        Ok(at.cast())
    }

    /// Gives memory of this process back.
    pub(super) fn give_host_back(&self, at: *mut u8) {
        // SAFETY: it is from above, and nobody uses it any more.
        let _gone = unsafe { (self.driver.cuMemFreeHost)(at.cast()) };
    }

    /// Gives memory of the device back.
    pub(super) fn give_back(&self, at: u64) {
        // SAFETY: the driver looks the address up in its own table.
        let _gone = unsafe { (self.driver.cuMemFree_v2)(at) };
    }

    pub(super) fn record(&self, event: Handle, stream: Handle) -> Result<()> {
        // SAFETY: both are this context's.
        let recorded = unsafe { (self.driver.cuEventRecord)(event, stream) };
        self.driver.check("cuEventRecord", recorded)
    }

    /// Lets a stream go on only behind an event that was recorded.
    pub(super) fn wait(&self, stream: Handle, event: Handle) -> Result<()> {
        // SAFETY: both are this context's, and the event was recorded.
        let waits = unsafe { (self.driver.cuStreamWaitEvent)(stream, event, 0) };
        self.driver.check("cuStreamWaitEvent", waits)
    }

    /// Lets an event go. What waits for it still does.
    pub(super) fn forget(&self, event: Handle) {
        // SAFETY: it is this context's, and nobody names it any more.
        let _gone = unsafe { (self.driver.cuEventDestroy_v2)(event) };
    }

    /// Whether an event that was recorded is known to have been reached.
    pub(super) fn has_reached(&self, event: Handle) -> bool {
        // SAFETY: it is this context's, and was recorded.
        let known = unsafe { (self.driver.cuEventQuery)(event) };
        known == SUCCESS
    }

    /// Waits for an event that was recorded.
    pub(super) fn reach(&self, event: Handle) -> Result<()> {
        // SAFETY: it is this context's, and was recorded.
        let mut reached = unsafe { (self.driver.cuEventSynchronize)(event) };
        while CAPTURE.contains(&reached) {
            // Somebody captures a graph: this call was refused, and the copies go on.
            std::thread::sleep(Duration::from_millis(1));
            // SAFETY: as above.
            reached = unsafe { (self.driver.cuEventSynchronize)(event) };
        }
        self.driver.check("cuEventSynchronize", reached)
    }

    /// Waits for all that a stream was asked for. An error says that it has given up.
    pub(super) fn synchronize(&self, stream: Handle) {
        // SAFETY: it is this context's.
        let _ended = unsafe { (self.driver.cuStreamSynchronize)(stream) };
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let Some(mut mode) = self.before else {
            return;
        };
        let driver = &self.context.driver;
        let mut left = std::ptr::null_mut();
        // SAFETY: the mode is what the driver gave.
        unsafe { (driver.cuThreadExchangeStreamCaptureMode)(&raw mut mode) };
        // SAFETY: `left` is writable. An error would say that somebody else has popped; the thread
        // then is where it was.
        unsafe { (driver.cuCtxPopCurrent_v2)(&raw mut left) };
    }
}
