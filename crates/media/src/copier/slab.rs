//! The staging slab: memory that staged batches go through, cut into regions.
//!
//! Bounded, made when the first batch is staged, and used again by all later ones. A lane takes a
//! region for a slice and gives it back when nothing reads it any more, so a slice that finds none
//! free waits for another one's end.

use super::CopierConfig;
use crate::cuda::Device;
use crate::error::{Error, Result};
use crate::memory::Mapping;
use kvdepot_host::fork::Origin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Regions for each lane unless configured: one more for each, so that threads which move small
/// batches themselves find one, and a device can read one while the lane fills the other.
const REGIONS_PER_LANE: usize = 2;

/// Bytes of a region unless configured: a device needs some hundred kilobytes at once to be as
/// fast as it can, for each of the units that a lane has in hand.
const REGION: u64 = 2 << 20;

/// The least bytes of a region: below, bytes are handed over more often than moved.
const REGION_MIN: u64 = 64 << 10;

/// The most regions; a bound against a wrong unit in a configuration.
const REGIONS_MAX: usize = 4096;

/// Regions begin at pages.
const REGION_ALIGN: u64 = 4096;

/// Memory cut into regions of equal length.
#[derive(Debug)]
pub(crate) struct Slab {
    mapping: Arc<Mapping>,
    /// Who has pinned it: devices that share a driver share what it pins.
    pinned: Mutex<Option<Arc<Device>>>,
    at: usize,
    region: usize,
    origin: Origin,
    free: Mutex<Vec<usize>>,
    freed: Condvar,
}

impl Slab {
    /// Takes the memory that `config` asks for, present from now on and kept from being swapped
    /// where the system allows that.
    pub(super) fn new(config: &CopierConfig) -> Result<Self> {
        let (len, regions) = shape(config);
        let origin = Origin::here();
        let origin = origin.map_err(|e| Error::io("make", "slab", std::io::Error::other(e)))?;
        let mapping = Mapping::anonymous("kvdepot-staging", len)?;
        mapping.populate_write(0, len)?;
        // More than the user may lock: then it may be swapped, as everything else.
        let _locked = mapping.lock_in_memory();
        let region = len / regions as u64 / REGION_ALIGN * REGION_ALIGN;
        Ok(Self {
            at: mapping.at(0, len)?,
            mapping,
            pinned: Mutex::new(None),
            origin,
            region: region as usize,
            free: Mutex::new((0..regions).rev().collect()),
            freed: Condvar::new(),
        })
    }

    /// Pins the slab, unless it is. The driver may refuse, mostly because of a limit on locked
    /// memory: copies are slower then, and right.
    pub(super) fn pin_for(&self, device: &Arc<Device>) {
        let mut pinned = self.pinned.lock().unwrap_or_else(PoisonError::into_inner);
        if pinned.is_none() {
            let len = self.mapping.len() as usize;
            // SAFETY: the mapping is there until the slab has undone this.
            let refused = unsafe { device.pin(self.at, len) }.is_err();
            *pinned = (!refused).then(|| Arc::clone(device));
        }
    }

    /// A free region, if there is one.
    pub(super) fn try_take(&self) -> Option<Region<'_>> {
        let number = self.free().pop()?;
        Some(Region { slab: self, number })
    }

    /// Waits for a free region.
    pub(super) fn take(&self) -> Region<'_> {
        let mut free = self.free();
        loop {
            if let Some(number) = free.pop() {
                return Region { slab: self, number };
            }
            free = self
                .freed
                .wait(free)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// No code that runs under this lock can panic half way, so poison means nothing.
    fn free(&self) -> MutexGuard<'_, Vec<usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        let pinned = self
            .pinned
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        // A forked child has neither the memory nor the driver.
        if let Some(device) = pinned.take()
            && self.origin.is_here()
        {
            // Otherwise the driver would take the addresses for pinned when they are others'.
            let _unpinned = device.unpin(self.at);
        }
    }
}

/// A region that nobody else uses.
pub(super) struct Region<'a> {
    slab: &'a Slab,
    number: usize,
}

impl Region<'_> {
    pub(super) fn as_mut_ptr(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.slab.at + self.number * self.slab.region)
    }

    pub(super) fn len(&self) -> usize {
        self.slab.region
    }
}

impl Drop for Region<'_> {
    fn drop(&mut self) {
        // The one used last is the one that the caches may still hold.
        self.slab.free().push(self.number);
        self.slab.freed.notify_one();
    }
}

impl CopierConfig {
    /// Regions that the slab is cut into.
    #[must_use]
    pub fn regions(&self) -> usize {
        let regions = self.staging_regions;
        regions.unwrap_or(REGIONS_PER_LANE * self.lanes)
    }
}

/// Bytes and regions of the slab of a copier.
fn shape(config: &CopierConfig) -> (u64, usize) {
    let regions = config.regions();
    let len = config.staging_slab;
    (
        len.unwrap_or_else(|| (regions as u64).saturating_mul(REGION)),
        regions,
    )
}

/// Refuses a slab whose regions would be too small.
pub(super) fn check(config: &CopierConfig) -> Result<()> {
    let (len, regions) = shape(config);
    if regions == 0 || regions > REGIONS_MAX {
        return Err(Error::Invalid {
            field: "staging_regions",
            value: regions as u64,
            allowed: "1 to 4096",
        });
    }
    if len / (regions as u64) < REGION_MIN {
        return Err(Error::Invalid {
            field: "staging_slab",
            value: len,
            allowed: "at least 64 KiB for each of staging_regions",
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Buffer;
    use crate::checksum::PartId;
    use crate::copier::{Copier, Failure};
    use crate::memory::fault;
    use std::sync::mpsc;

    /// Overwrites what it guards when it is let go.
    struct Guarded(Arc<Mapping>);

    impl Drop for Guarded {
        fn drop(&mut self) {
            let zeros = vec![0; self.0.len() as usize];
            self.0.write_from(0, &zeros).unwrap();
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no memory files, which a slab is made of")]
    fn a_failing_region_lets_no_buffer_go_that_another_one_writes() {
        // Odd, so that the other tests' parts are never hit.
        let (whole, odd) = (1 << 20, 333_333);
        let config = CopierConfig {
            lanes: 4,
            inline_max: 0,
            staging_slab: Some(256 << 10),
            staging_regions: Some(4),
            ..CopierConfig::default()
        };
        let copier = Copier::new(config).unwrap();
        for _ in 0..10 {
            let memory = Mapping::anonymous("guarded", 16 * whole).unwrap();
            let guard: crate::buffer::Owner = Arc::new(Guarded(Arc::clone(&memory)));
            let mut batch = copier.batch();
            batch.stage().unwrap();
            for number in 0..16 {
                let len = if number == 0 { odd } else { whole };
                let from = Buffer::from_vec(vec![7; len as usize]);
                let at = memory.at(number * whole, len).unwrap();
                // SAFETY: the mapping outlives the batch.
                let to = unsafe { Buffer::from_raw(at, len as usize, true, Arc::clone(&guard)) };
                let id = PartId::whole([1; 16], [number as u8; 32]);
                batch.part(&id, &[from], &[to], None, 0).unwrap();
            }
            drop(guard);
            let (sender, receiver) = mpsc::channel();
            let fault = fault::panic_at(odd);
            let ticket = copier.submit(batch, move |done| {
                let parts = done.parts().map(|(_, part)| part.map(drop));
                sender.send(parts.collect::<Vec<_>>()).unwrap();
            });
            assert!(ticket.wait(None));
            drop(fault);
            let parts = receiver.recv().unwrap();
            assert_eq!(parts[0], Err(Failure::LanePanicked));
            assert!(
                parts.iter().any(|part| part.is_ok()),
                "the other lanes go on"
            );
            // Whoever wrote after the buffers were let go left sevens.
            let mut after = vec![1; 16 * whole as usize];
            memory.read_into(0, &mut after).unwrap();
            assert!(after.iter().all(|byte| *byte == 0));
        }
        assert_eq!(
            copier.shared.slab().unwrap().free().len(),
            4,
            "every region is back"
        );
    }
}
