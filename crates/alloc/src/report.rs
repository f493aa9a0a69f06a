//! How a pool is doing.

/// A pool at one moment, in bytes unless named otherwise. Exact.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// The size of the pool.
    pub size: u64,
    /// What extents are multiples of.
    pub granule: u64,
    /// Bytes in live extents.
    pub live_bytes: u64,
    /// Bytes in free extents; with `live_bytes` this is `size`.
    pub free_bytes: u64,
    /// The number of live extents.
    pub live_extents: u64,
    /// The number of free extents.
    pub free_extents: u64,
    /// The largest free extent.
    pub largest_free_extent: u64,
    /// Entry `i` counts the free extents of `2^i` to `2^(i+1) - 1` bytes.
    pub free_histogram: [u64; 64],
    /// Memory that the allocator itself occupies.
    pub memory_bytes: u64,
}

impl Report {
    /// How much of the free space is outside of the largest free extent: 0.0 when all of it can
    /// be allocated at once, near 1.0 when it is splintered.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        if self.free_bytes == 0 {
            return 0.0;
        }
        1.0 - self.largest_free_extent as f64 / self.free_bytes as f64
    }

    /// Live bytes over all bytes.
    #[must_use]
    pub fn utilisation(&self) -> f64 {
        self.live_bytes as f64 / self.size as f64
    }
}
