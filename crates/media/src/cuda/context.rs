//! A device's primary context, and what is done in it.

use super::driver::{Driver, Handle};
use crate::carrier::{Op, Receipt};
use crate::error::Result;
use std::sync::Arc;

/// The primary context of a device, which frameworks use too.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) driver: Arc<Driver>,
    handle: Handle,
}

// SAFETY: a context may be used by any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// A thread that has entered a context. It leaves on the same thread.
pub(super) struct Entered<'a>(&'a Context);

impl Context {
    /// Retains the context of device number `ordinal`, for as long as the process lives.
    pub(super) fn retain(driver: Arc<Driver>, ordinal: i32) -> Result<Self> {
        let (mut device, mut handle) = (0, std::ptr::null_mut());
        // SAFETY: both are writable, and the driver is initialised.
        unsafe {
            let found = (driver.cuDeviceGet)(&raw mut device, ordinal);
            driver.check("cuDeviceGet", found)?;
            let retained = (driver.cuDevicePrimaryCtxRetain)(&raw mut handle, device);
            driver.check("cuDevicePrimaryCtxRetain", retained)?;
        }
        Ok(Self { driver, handle })
    }

    /// Makes the device the calling thread's, which may be an engine's, for as long as the answer
    /// lives.
    pub(super) fn enter(&self) -> Result<Entered<'_>> {
        // SAFETY: the context was retained and never released.
        let entered = unsafe { (self.driver.cuCtxPushCurrent_v2)(self.handle) };
        self.driver.check("cuCtxPushCurrent", entered)?;
        Ok(Entered(self))
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

    /// An event whose waiter sleeps, without timing: only its end matters.
    pub(super) fn event(&self) -> Result<Handle> {
        let mut event = std::ptr::null_mut();
        // SAFETY: `event` is writable.
        let created = unsafe { (self.driver.cuEventCreate)(&raw mut event, 3) };
        self.driver.check("cuEventCreate", created)?;
        Ok(event)
    }

    /// Asks a stream for a receipt's copy.
    ///
    /// # Safety
    ///
    /// The receipt lives until the stream has done it, and its position is memory of the device.
    pub(super) unsafe fn copy(&self, stream: Handle, receipt: &Receipt) -> Result<()> {
        let (at, memory, len) = (receipt.at(), receipt.memory().cast(), receipt.len());
        let (function, asked) = match receipt.op() {
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

    pub(super) fn record(&self, event: Handle, stream: Handle) -> Result<()> {
        // SAFETY: both are this context's.
        let recorded = unsafe { (self.driver.cuEventRecord)(event, stream) };
        self.driver.check("cuEventRecord", recorded)
    }

    /// Waits for an event that was recorded.
    pub(super) fn reach(&self, event: Handle) -> Result<()> {
        // SAFETY: it is this context's, and was recorded.
        let reached = unsafe { (self.driver.cuEventSynchronize)(event) };
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
        let mut left = std::ptr::null_mut();
        // SAFETY: `left` is writable. An error would say that somebody else has popped; the thread
        // then is where it was.
        unsafe { (self.0.driver.cuCtxPopCurrent_v2)(&raw mut left) };
    }
}
