//! The 256-bin allocator of the crate `offset-allocator`, used as an engine's store uses it.

use offset_allocator::{Allocation, Allocator};

/// Steps to a power of two between one bin and the next.
const MANTISSA_BITS: u32 = 3;

/// The unit of pools that are too large for offsets of 32 bits in bytes, as a power of two.
const LARGE_UNIT: u32 = 12;

/// Bins of free extents, eight to a power of two; a request is rounded up to the size of its bin
/// first, so that what is freed can serve the next one of its kind.
pub struct Reference {
    inner: Allocator,
    /// The unit as a power of two.
    shift: u32,
}

/// What [`Reference::allocate`] answers and [`Reference::free`] takes.
pub type Held = Allocation;

impl Reference {
    /// A pool of `size` bytes in units of one byte, or of 4 KiB where its 32 bits cannot count
    /// bytes. It has room for `live` extents that are not free, and as many that are. None where
    /// the size or the count do not fit 32 bits all the same.
    #[must_use]
    pub fn new(size: u64, live: u64) -> Option<Reference> {
        let shift = match u32::try_from(size) {
            Ok(_) => 0,
            Err(_) => LARGE_UNIT,
        };
        let units = u32::try_from(size >> shift).ok()?;
        let nodes = u32::try_from(2 * live + 16).ok()?;
        (nodes < u32::MAX - 1).then(|| Reference {
            inner: Allocator::with_max_allocs(units, nodes),
            shift,
        })
    }

    /// An extent for `len` bytes; none where no bin has one.
    pub fn allocate(&mut self, len: u64) -> Option<Held> {
        let units = u32::try_from(len.div_ceil(1 << self.shift)).ok()?;
        self.inner.allocate(up_to_its_bin(units)?)
    }

    /// Frees an extent.
    ///
    /// # Panics
    ///
    /// If it is not live any more.
    pub fn free(&mut self, held: Held) {
        self.inner.free(held);
    }
}

/// The size of the smallest bin whose extents all fit `units`.
fn up_to_its_bin(units: u32) -> Option<u32> {
    if units < 1 << MANTISSA_BITS {
        return Some(units);
    }
    let step = 1_u32 << (units.ilog2() - MANTISSA_BITS);
    Some(units.checked_add(step - 1)? & !(step - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_up_to_three_bits_behind_the_first() {
        let bins = [1, 7, 8, 15, 16, 17, 18, 19, 1024, 1025, 1152, 1153, 2047].map(up_to_its_bin);
        let sizes = [1, 7, 8, 15, 16, 18, 18, 20, 1024, 1152, 1152, 1280, 2048];
        assert_eq!(bins, sizes.map(Some));
        assert_eq!(up_to_its_bin(u32::MAX), None);
    }

    #[test]
    fn rounding_leaves_room_unused() {
        let mut pool = Reference::new(1 << 20, 64).unwrap();
        // 31 × 2^15 + 1 would fit beside 2^15 − 1 bytes, if it were not rounded up.
        assert!(pool.allocate((15 << 16) + 1).is_some());
        assert!(pool.allocate(1).is_none());
    }

    #[test]
    fn large_pools_count_in_pages() {
        let mut pool = Reference::new(1 << 40, 1 << 10).unwrap();
        let first = pool.allocate(1 << 30).unwrap();
        let second = pool.allocate(1).unwrap();
        assert_eq!(second.offset - first.offset, 1 << 18);
        pool.free(first);
        assert_eq!(pool.allocate(1 << 30).map(|held| held.offset), Some(0));
        assert!(Reference::new(1 << 60, 1).is_none());
    }
}
