//! Memory of CUDA devices as the destination of staged batches.
//!
//! A lane fills a region of the staging slab, which the driver has pinned, and a stream of
//! kvdepot's own carries it to the device while the lane fills the next. No byte of the device is
//! touched by the processor, and a part counts as moved when its copies have ended.

mod driver;
mod sink;
#[cfg(test)]
mod tests;

pub(crate) use sink::Sink;

use crate::error::{Error, Result};
use driver::{Driver, Handle};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// A CUDA device, by its primary context, which frameworks use too.
#[derive(Debug)]
pub struct Device {
    driver: Arc<Driver>,
    ordinal: i32,
    context: Handle,
    /// Streams that no task uses. There are never more than tasks at a time.
    streams: Mutex<Vec<Stream>>,
}

/// A stream, and events that order the use of desks on it.
#[derive(Debug)]
struct Stream {
    handle: Handle,
    events: Vec<Handle>,
}

// SAFETY: contexts, streams and events may be used by any thread, one at a time for a stream,
// which is what taking it out of the list ensures.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// The system's driver and the devices that were opened, for as long as the process lives.
static SYSTEM: Mutex<System> = Mutex::new(System {
    driver: None,
    opened: Vec::new(),
});

struct System {
    driver: Option<Arc<Driver>>,
    opened: Vec<Arc<Device>>,
}

impl System {
    fn driver(&mut self) -> Result<Arc<Driver>> {
        if let Some(driver) = &self.driver {
            return Ok(Arc::clone(driver));
        }
        let driver = Arc::new(Driver::system()?);
        self.driver = Some(Arc::clone(&driver));
        Ok(driver)
    }

    fn open(&mut self, ordinal: i32) -> Result<Arc<Device>> {
        if let Some(device) = self.opened.iter().find(|device| device.ordinal == ordinal) {
            return Ok(Arc::clone(device));
        }
        let device = Arc::new(Device::with(self.driver()?, ordinal)?);
        self.opened.push(Arc::clone(&device));
        Ok(device)
    }
}

impl Device {
    /// The device with this number. The driver is loaded when the first one is asked for.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Io`] when there is no driver, or no such device.
    pub fn open(ordinal: i32) -> Result<Arc<Self>> {
        let mut system = SYSTEM.lock().unwrap_or_else(PoisonError::into_inner);
        system.open(ordinal)
    }

    /// The number of the device whose memory is at an address. No other device is touched: a
    /// context takes hundreds of megabytes of its device.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Io`] when there is no driver, or the memory is no device's.
    pub fn ordinal_of(addr: usize) -> Result<i32> {
        let mut system = SYSTEM.lock().unwrap_or_else(PoisonError::into_inner);
        let driver = system.driver()?;
        // Addresses are the process's: a driver that asks for a context nevertheless takes that of
        // any device which is in use already, and memory of a device is there only if one is.
        if let Some(ordinal) = driver.ordinal_of(addr)? {
            return Ok(ordinal);
        }
        for used in driver.in_use()? {
            let device = system.open(used)?;
            let _entered = device.enter()?;
            if let Some(ordinal) = driver.ordinal_of(addr)? {
                return Ok(ordinal);
            }
        }
        let problem = std::io::Error::other("no device is in use");
        Err(Error::io(
            "cuPointerGetAttribute",
            "the CUDA driver",
            problem,
        ))
    }

    /// As [`Device::open`], with a driver of its own.
    #[doc(hidden)]
    pub fn open_with(library: &Path, ordinal: i32) -> Result<Arc<Self>> {
        Self::with(Arc::new(Driver::load(library)?), ordinal).map(Arc::new)
    }

    fn with(driver: Arc<Driver>, ordinal: i32) -> Result<Self> {
        let (mut device, mut context) = (0, std::ptr::null_mut());
        // SAFETY: both are writable, and the driver is initialised.
        unsafe {
            driver.check(
                "cuDeviceGet",
                (driver.cuDeviceGet)(&raw mut device, ordinal),
            )?;
            let retained = (driver.cuDevicePrimaryCtxRetain)(&raw mut context, device);
            driver.check("cuDevicePrimaryCtxRetain", retained)?;
        }
        Ok(Self {
            driver,
            ordinal,
            context,
            streams: Mutex::new(Vec::new()),
        })
    }

    /// Its number.
    #[must_use]
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// Makes the device the calling thread's, which may be an engine's, for as long as the answer
    /// lives.
    fn enter(&self) -> Result<Entered<'_>> {
        // SAFETY: the context was retained and never released.
        let entered = unsafe { (self.driver.cuCtxPushCurrent_v2)(self.context) };
        self.driver.check("cuCtxPushCurrent", entered)?;
        Ok(Entered(self))
    }

    /// Pins memory of this process, so that the device reads it without the driver's own copies.
    ///
    /// # Safety
    ///
    /// The range is mapped until [`Device::unpin`].
    pub(crate) unsafe fn pin(&self, at: usize, len: usize) -> Result<()> {
        let _entered = self.enter()?;
        let at = std::ptr::with_exposed_provenance_mut(at);
        // Portable: for the contexts of all devices.
        // SAFETY: the caller's promise.
        let pinned = unsafe { (self.driver.cuMemHostRegister_v2)(at, len, 1) };
        self.driver.check("cuMemHostRegister", pinned)
    }

    pub(crate) fn unpin(&self, at: usize) -> Result<()> {
        let _entered = self.enter()?;
        let at = std::ptr::with_exposed_provenance_mut(at);
        // SAFETY: the driver looks the address up in its own table.
        let unpinned = unsafe { (self.driver.cuMemHostUnregister)(at) };
        self.driver.check("cuMemHostUnregister", unpinned)
    }

    /// A stream with at least so many events. The calling thread has entered.
    fn stream(&self, events: usize) -> Result<Stream> {
        let spare = self.streams().pop();
        let mut stream = match spare {
            Some(stream) => stream,
            None => {
                let mut handle = std::ptr::null_mut();
                // Non-blocking: it waits for nothing that the framework has queued.
                // SAFETY: `handle` is writable.
                let created = unsafe { (self.driver.cuStreamCreate)(&raw mut handle, 1) };
                self.driver.check("cuStreamCreate", created)?;
                let events = Vec::new();
                Stream { handle, events }
            }
        };
        while stream.events.len() < events {
            let mut event = std::ptr::null_mut();
            // Without timing: only its end matters.
            // SAFETY: `event` is writable.
            let created = unsafe { (self.driver.cuEventCreate)(&raw mut event, 2) };
            self.driver.check("cuEventCreate", created)?;
            stream.events.push(event);
        }
        Ok(stream)
    }

    fn streams(&self) -> std::sync::MutexGuard<'_, Vec<Stream>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread that has entered a device. It leaves on the same thread.
struct Entered<'a>(&'a Device);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut left = std::ptr::null_mut();
        // SAFETY: `left` is writable. An error would say that somebody else has popped; the thread
        // then is where it was.
        unsafe { (self.0.driver.cuCtxPopCurrent_v2)(&raw mut left) };
    }
}
