//! How a copier works.

use crate::copy_kernel::CopyKernel;
use crate::error::{Error, Result};
use std::time::Duration;

/// Configuration of a copier. Start from the default and change single fields.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CopierConfig {
    /// Number of copy threads, 1 to 256. Default: the number of processors that this process may
    /// use, at most 8. A few threads saturate the memory of most machines.
    pub lanes: usize,
    /// Maximum number of bytes that a copy thread takes in one step, at least 4096. Default: 4 MiB.
    /// Smaller batches are divided more finely, so that all copy threads get work.
    pub slice_size: u64,
    /// Minimum size in bytes of leaves that are written to their destination without the
    /// processor's caches. Default: 4 KiB.
    pub stream_min: u64,
    /// Maximum size in bytes of batches that the submitting thread moves itself. Default: 256 KiB,
    /// about 20 µs. 0 leaves all batches to the copy threads.
    ///
    /// For small batches, waking a copy thread and being woken by it takes longer than the copy.
    pub inline_max: u64,
    /// Kernel that moves the bytes. Default: `None`, the one that was measured to be the fastest on
    /// this machine.
    pub kernel: Option<CopyKernel>,
    /// Time for which an idle copy thread polls for work before it sleeps. Default: 20 µs.
    pub spin: Duration,
    /// Nice value of the copy threads, 0 to 19. Default: 0. Use a value above 0 for background
    /// work, which then yields the processors to other threads.
    pub nice: u8,
    /// Size of the staging buffer in bytes, at least 64 KiB per region. Default: 2 MiB per region.
    /// It is allocated when the first batch is staged.
    pub staging_slab: Option<u64>,
    /// Number of regions in the staging buffer, 1 to 4096: as many slices can be staged at a time.
    /// Default: two per copy thread, at least three.
    pub staging_regions: Option<usize>,
}

/// The most lanes of a copier; a bound against a wrong unit in a configuration.
const LANES_MAX: usize = 256;

/// Regions for each lane unless configured: one more for each, so that threads which move small
/// batches themselves find one, and a carrier can have one while the lane fills the other.
const REGIONS_PER_LANE: usize = 2;

/// Fewest regions unless configured: a carrier may have two, and others the third.
const REGIONS_LEAST: usize = 3;

/// Bytes of a region unless configured: a device needs some hundred kilobytes at once to be as
/// fast as it can.
const REGION: u64 = 2 << 20;

/// The least bytes of a region: below, bytes are handed over more often than moved.
const REGION_MIN: u64 = 64 << 10;

/// The most regions; a bound against a wrong unit in a configuration.
const REGIONS_MAX: usize = 4096;

impl Default for CopierConfig {
    fn default() -> Self {
        let processors = std::thread::available_parallelism().map_or(2, usize::from);
        Self {
            lanes: processors.min(8),
            slice_size: 4 << 20,
            stream_min: 4 << 10,
            inline_max: 256 << 10,
            kernel: None,
            spin: Duration::from_micros(20),
            nice: 0,
            staging_slab: None,
            staging_regions: None,
        }
    }
}

impl CopierConfig {
    pub(super) fn check(&self) -> Result<()> {
        if self.lanes == 0 || self.lanes > LANES_MAX {
            let value = self.lanes as u64;
            return Err(Error::Invalid {
                field: "lanes",
                value,
                allowed: "1 to 256",
            });
        }
        if self.slice_size < 4096 {
            let value = self.slice_size;
            return Err(Error::Invalid {
                field: "slice_size",
                value,
                allowed: "4096 or more",
            });
        }
        if self.nice > 19 {
            let value = u64::from(self.nice);
            return Err(Error::Invalid {
                field: "nice",
                value,
                allowed: "0 to 19",
            });
        }
        self.check_slab()
    }

    /// Returns the number of regions in the staging buffer.
    #[must_use]
    pub fn regions(&self) -> usize {
        let regions = self.staging_regions;
        regions.unwrap_or_else(|| (REGIONS_PER_LANE * self.lanes).max(REGIONS_LEAST))
    }

    /// Bytes and regions of the slab.
    pub(super) fn slab(&self) -> (u64, usize) {
        let regions = self.regions();
        let len = self.staging_slab;
        (
            len.unwrap_or_else(|| (regions as u64).saturating_mul(REGION)),
            regions,
        )
    }

    /// Refuses a slab whose regions would be too small.
    fn check_slab(&self) -> Result<()> {
        let (len, regions) = self.slab();
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
                allowed: "at least 64 KiB per region (staging_regions)",
            });
        }
        Ok(())
    }
}
