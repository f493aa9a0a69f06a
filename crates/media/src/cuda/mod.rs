//! Memory of CUDA devices, as source and as destination.
//!
//! Bytes go through the slab, which the driver has pinned: streams of kvdepot's own carry them
//! between it and the device, while lanes fill and empty other regions. No byte of the device is
//! touched by the processor, and a part counts as moved when its copies have ended. Large pages are
//! copied as they are; small ones as one, through a ring of the device, and by one call of the
//! driver's where that cannot be.

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
use driver::Driver;
pub use fence::Fence;
use lines::{Ferry, Lines};
pub use plain::Pinned;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often whoever waits for a device to rest looks.
const LOOK: Duration = Duration::from_millis(1);

/// A CUDA device, by its primary context, which frameworks use too.
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
    /// Addresses from here on are nowhere, and no device has them: what is moved there is verified,
    /// and gone. They are what scratch memory is in the host.
    pub const NOWHERE: usize = 1 << 63;

    /// The device with this number. The driver is loaded when the first one is asked for.
    ///
    /// # Errors
    ///
    /// [`crate::Error::NoDevice`] when there is no such device, [`crate::Error::Io`] when there is
    /// no driver.
    pub fn open(ordinal: i32) -> Result<Arc<Self>> {
        let mut system = SYSTEM.lock().unwrap_or_else(PoisonError::into_inner);
        system.open(ordinal)
    }

    /// The device with this number, if this process has opened it.
    #[must_use]
    pub fn opened(ordinal: i32) -> Option<Arc<Self>> {
        let system = SYSTEM.lock().unwrap_or_else(PoisonError::into_inner);
        system.opened(ordinal)
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
            let _entered = device.context.enter()?;
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
        let count = driver.count()?;
        if !(0..count).contains(&ordinal) {
            let allowed = match count {
                ..=0 => "none: this machine has no CUDA device".to_owned(),
                1 => "0, this machine's only CUDA device".to_owned(),
                _ => format!("0 to {}, this machine's CUDA devices", count - 1),
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

    /// Its number.
    #[must_use]
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// What the driver calls it.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Io`] when the driver does not say.
    pub fn name(&self) -> Result<String> {
        self.context.driver.name(self.ordinal)
    }

    /// Memory of the device, given back when it is dropped.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Io`] when it has not as much left.
    pub fn memory(self: &Arc<Self>, len: usize) -> Result<Arc<Memory>> {
        let at = {
            let _entered = self.context.enter()?;
            self.context.memory(len)?
        };
        let device = Arc::clone(self);
        Ok(Arc::new(Memory { device, at, len }))
    }

    /// Waits until no copy between this process and the device is under way any more: those that
    /// nobody waits for any longer may still touch memory of the device. What batches that are
    /// not done will ask for is not known here: they are waited for first. False when `timeout`
    /// passed first; true in a forked child, which has no device.
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

    /// Bytes of the device's memory that are kvdepot's own: rings, through which small pages go.
    #[must_use]
    pub fn ring_bytes(&self) -> u64 {
        self.lines.ring_bytes()
    }

    /// Bytes of this process that kvdepot has pinned, for all devices.
    #[must_use]
    pub fn pinned_bytes() -> u64 {
        lines::pinned_bytes()
    }

    /// This moment of a stream: behind it, the device has done all that the stream was given until
    /// now. 0 is the default one.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Io`] when the driver refuses.
    ///
    /// # Safety
    ///
    /// The number is the handle of a stream of this device (`CUstream`), or 0.
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

/// Memory that was taken from a device: [`crate::Buffer::of_device`] moves it.
#[derive(Debug)]
pub struct Memory {
    device: Arc<Device>,
    at: u64,
    len: usize,
}

impl Memory {
    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Its first address.
    pub(crate) fn at(&self) -> usize {
        self.at as usize
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: the driver gives none of no bytes.
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
