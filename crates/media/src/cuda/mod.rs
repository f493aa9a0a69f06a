//! Memory of CUDA devices, as source and destination of batches.
//!
//! Bytes pass through the staging buffer, which the driver has pinned. CUDA streams of kvdepot copy
//! them between it and the device, while copy threads fill and empty other regions. The processor
//! never accesses memory of the device. A part counts as moved when its copies have ended.
//!
//! Large pages are copied directly. Small pages are combined through a ring buffer on the device,
//! or copied by one call of the driver if that is not possible.

mod context;
mod driver;
mod fence;
mod lines;
mod pages;
mod plain;
mod stream;
#[cfg(test)]
mod tests;

use crate::carrier::Carrier;
use crate::error::{Error, Result};
use context::Context;
pub(crate) use context::keep_context;
use driver::Driver;
pub use fence::Fence;
use lines::{Ferry, Lines};
pub use plain::Pinned;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often whoever waits for a device to rest looks.
const LOOK: Duration = Duration::from_millis(1);

/// A CUDA device, used through its primary context, which frameworks use too.
#[derive(Debug)]
pub struct Device {
    context: Arc<Context>,
    ordinal: i32,
    lines: Arc<Lines>,
}

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

    fn opened(&self, ordinal: i32) -> Option<Arc<Device>> {
        let mut opened = self.opened.iter();
        let device = opened.find(|device| device.ordinal == ordinal);
        device.map(Arc::clone)
    }

    fn open(&mut self, ordinal: i32) -> Result<Arc<Device>> {
        if let Some(device) = self.opened(ordinal) {
            return Ok(device);
        }
        let device = Arc::new(Device::with(self.driver()?, ordinal)?);
        self.opened.push(Arc::clone(&device));
        Ok(device)
    }
}

impl Device {
    /// First address of a range that no device has. Bytes that are moved there are verified and
    /// discarded, as with scratch memory of the host.
    pub const NOWHERE: usize = 1 << 63;

    /// Opens the device with the number `ordinal`. The first call loads the driver.
    ///
    /// # Errors
    ///
    /// [`crate::Error::NoDevice`] if there is no such device, [`crate::Error::Io`] if there is no
    /// driver.
    pub fn open(ordinal: i32) -> Result<Arc<Self>> {
        let mut system = SYSTEM.lock().unwrap_or_else(PoisonError::into_inner);
        system.open(ordinal)
    }

    /// Returns the device with the number `ordinal` if this process has opened it.
    #[must_use]
    pub fn opened(ordinal: i32) -> Option<Arc<Self>> {
        let system = SYSTEM.lock().unwrap_or_else(PoisonError::into_inner);
        system.opened(ordinal)
    }

    /// Returns the number of the device whose memory contains the address `addr`.
    ///
    /// The call does not initialize other devices, because a context takes hundreds of megabytes of
    /// device memory.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Io`] if there is no driver, or if no device has this memory.
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
            let _entered = device.context.enter()?;
            if let Some(ordinal) = driver.ordinal_of(addr)? {
                return Ok(ordinal);
            }
        }
        let problem = std::io::Error::other("no CUDA device is in use");
        Err(Error::io("call", "cuPointerGetAttribute", problem))
    }

    /// Opens a device as [`Device::open`] does, with a separate driver library.
    #[doc(hidden)]
    pub fn open_with(library: &Path, ordinal: i32) -> Result<Arc<Self>> {
        Self::with(Arc::new(Driver::load(library)?), ordinal).map(Arc::new)
    }

    fn with(driver: Arc<Driver>, ordinal: i32) -> Result<Self> {
        let count = driver.count()?;
        if !(0..count).contains(&ordinal) {
            let allowed = match count {
                ..=0 => "no device number, because this machine has no CUDA device".to_owned(),
                1 => "0, the only CUDA device of this machine".to_owned(),
                _ => format!("0 to {}, the CUDA devices of this machine", count - 1),
            };
            return Err(Error::NoDevice { ordinal, allowed });
        }
        let context = Arc::new(Context::retain(driver, ordinal)?);
        Ok(Self {
            lines: Arc::new(Lines::new(Arc::clone(&context))),
            context,
            ordinal,
        })
    }

    /// Returns the number of the device.
    #[must_use]
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// Returns the device name that the driver reports.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Io`] if the driver call fails.
    pub fn name(&self) -> Result<String> {
        self.context.driver.name(self.ordinal)
    }

    /// Allocates `len` bytes on the device, which are freed when they are dropped.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Io`] if the device has too little free memory.
    pub fn memory(self: &Arc<Self>, len: usize) -> Result<Arc<Memory>> {
        let at = {
            let _entered = self.context.enter()?;
            self.context.memory(len)?
        };
        let device = Arc::clone(self);
        Ok(Arc::new(Memory { device, at, len }))
    }

    /// Waits until no copy between this process and the device is in progress.
    ///
    /// Copies whose batch has already ended may still access memory of the device; the call covers
    /// these. It does not cover future copies of unfinished batches, so wait for those batches
    /// first.
    ///
    /// Returns false if `timeout` expires first. Returns true in a forked child, which has no
    /// device.
    #[must_use]
    pub fn rest(&self, timeout: Duration) -> bool {
        let begun = Instant::now();
        while !self.lines.are_idle() && self.context.is_here() {
            if begun.elapsed() >= timeout {
                return false;
            }
            std::thread::sleep(LOOK);
        }
        true
    }

    /// Returns the bytes of device memory that kvdepot uses for ring buffers, through which small
    /// pages are copied.
    #[must_use]
    pub fn ring_bytes(&self) -> u64 {
        self.lines.ring_bytes()
    }

    /// Returns the bytes of memory in this process that kvdepot has pinned, for all devices.
    #[must_use]
    pub fn pinned_bytes() -> u64 {
        lines::pinned_bytes()
    }

    /// Records the present point of a CUDA stream. Copies with the returned fence wait for all work
    /// that the stream has now.
    ///
    /// `stream` is the handle of the stream; 0 is the default stream.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Io`] if the driver call fails.
    ///
    /// # Safety
    ///
    /// `stream` is the handle of a stream of this device (`CUstream`), or 0.
    pub unsafe fn fence(&self, stream: usize) -> Result<Arc<Fence>> {
        // SAFETY: the caller's promise.
        unsafe { Fence::record(&self.context, stream) }.map(Arc::new)
    }

    /// Who carries bytes from and to its memory, behind a fence. For this crate only: who may name
    /// addresses of the device is whoever may make buffers of them.
    pub(crate) fn carrier(&self, fence: Option<&Arc<Fence>>) -> Arc<dyn Carrier> {
        Arc::new(Ferry {
            lines: Arc::clone(&self.lines),
            fence: fence.map(Arc::clone),
        })
    }
}

/// Memory that was allocated on a device. [`crate::Buffer::of_device`] makes it available to
/// batches.
#[derive(Debug)]
pub struct Memory {
    device: Arc<Device>,
    at: u64,
    len: usize,
}

impl Memory {
    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Its first address.
    pub(crate) fn at(&self) -> usize {
        self.at as usize
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns false: the driver never allocates zero bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Ok(_entered) = self.device.context.enter() {
            self.device.context.give_back(self.at);
        }
    }
}
