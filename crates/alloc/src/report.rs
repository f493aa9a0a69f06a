//! Statistics of a pool.

/// Exact statistics of a pool at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Size of the pool in bytes.
    pub size: u64,
    /// Granule of the pool in bytes; the length of each extent is a multiple of it.
    pub granule: u64,
    /// Total length of all live extents in bytes.
    pub live_bytes: u64,
    /// Total length of all free extents in bytes: `size - live_bytes`.
    pub free_bytes: u64,
    /// Number of live extents.
    pub live_extents: u64,
    /// Number of free extents.
    pub free_extents: u64,
    /// Length of the largest free extent in bytes.
    pub largest_free_extent: u64,
    /// Number of free extents by length: entry `i` counts those of `2^i` to `2^(i+1) - 1` bytes.
    pub free_histogram: [u64; 64],
    /// Memory that the allocator itself uses, in bytes.
    pub memory_bytes: u64,
}

impl Report {
    /// Returns the part of the free space that is outside the largest free extent, from 0.0 to 1.0.
    ///
    /// At 0.0 one allocation can use all free space, or there is none. Values near 1.0 mean many
    /// small free extents.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        if self.free_bytes == 0 {
            return 0.0;
        }
        1.0 - self.largest_free_extent as f64 / self.free_bytes as f64
    }

    /// Returns the live bytes divided by the size of the pool, from 0.0 to 1.0.
    #[must_use]
    pub fn utilisation(&self) -> f64 {
        self.live_bytes as f64 / self.size as f64
    }
}
