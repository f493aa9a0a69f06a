//! How a copier works.

use crate::error::{Error, Result};
use std::time::Duration;

/// How a copier works. Start from the default and change what matters.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CopierConfig {
    /// Threads that move bytes, 1 to 256. Default: the processors this process may use, at most 8;
    /// a few saturate the memory of most machines.
    pub lanes: usize,
    /// The most bytes that a lane takes at once, at least 4096. Default 4 MiB. Smaller batches are
    /// cut finer, so that all lanes have something to do.
    pub slice_size: u64,
    /// Leaves of at least this many bytes bypass the caches on their way to the destination.
    /// Default 4 KiB.
    pub stream_min: u64,
    /// Batches of at most this many bytes are moved by the thread that submits them: waking a lane,
    /// and being woken by it, takes longer. Default 256 KiB, some 20 µs; 0 leaves all to the lanes.
    pub inline_max: u64,
    /// How long an idle lane looks for work before it sleeps. Default 20 µs.
    pub spin: Duration,
    /// The lanes' nice value, 0 to 19: above 0 for work that nobody waits for, which then leaves
    /// the processors to everybody else. Default 0.
    pub nice: u8,
    /// Bytes of the slab that staged batches go through, at least 64 KiB for each region; taken
    /// when the first one is made. Default 2 MiB for each region.
    pub staging_slab: Option<u64>,
    /// Regions of that slab, 1 to 4096: so many slices are staged at a time. Default two for each
    /// lane, at least three.
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

    /// Regions that the slab is cut into.
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
                allowed: "at least 64 KiB for each of staging_regions",
            });
        }
        Ok(())
    }
}
