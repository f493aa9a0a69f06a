//! Memory of CUDA devices, as source and as destination.
//!
//! Bytes go through the slab, which the driver has pinned: streams of kvdepot's own carry them
//! between it and the device, while lanes fill and empty other regions. No byte of the device is
//! touched by the processor, and a part counts as moved when its copies have ended.

mod context;
mod driver;
mod lines;
#[cfg(test)]
mod tests;

use crate::carrier::Carrier;
use crate::error::{Error, Result};
use context::Context;
use driver::Driver;
use lines::Lines;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

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

    /// Who carries bytes from and to its memory. For this crate only: who may name addresses of the
    /// device is whoever may make buffers of them.
    pub(crate) fn carrier(&self) -> Arc<dyn Carrier> {
        Arc::clone(&self.lines) as Arc<dyn Carrier>
    }
}
