//! Size to bin and back: the 32 bins of a power of two differ by at most 1/32 of a size, and sizes
//! below 32 granules have a bin each. Pure functions.

/// Bins to a power of two, as a power of two. 32 of them fill one word of the bitmap.
pub(crate) const SUB_BITS: u32 = 5;

/// Bins to a power of two.
pub(crate) const SUB_BINS: usize = 1 << SUB_BITS;

/// The bin in which a free extent of this many granules is filed.
#[inline]
pub(crate) const fn bin_of(granules: u64) -> usize {
    if granules < SUB_BINS as u64 {
        return granules as usize;
    }
    let exponent = granules.ilog2();
    let mantissa = (granules >> (exponent - SUB_BITS)) as usize & (SUB_BINS - 1);
    (exponent - SUB_BITS + 1) as usize * SUB_BINS + mantissa
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The smallest size of a bin, the inverse of [`bin_of`].
    fn smallest(bin: usize) -> u64 {
        let (row, sub) = ((bin / SUB_BINS) as u32, (bin % SUB_BINS) as u64);
        if row == 0 {
            sub
        } else {
            (SUB_BINS as u64 + sub) << (row - 1)
        }
    }

    #[test]
    fn bins_are_ordered_contiguous_and_narrow() {
        let last = bin_of(u64::MAX);
        assert_eq!(last, 60 * SUB_BINS - 1);
        for bin in 1..=last {
            let low = smallest(bin);
            assert_eq!(bin_of(low), bin, "smallest size of bin {bin}");
            assert_eq!(bin_of(low - 1), bin - 1, "the size below bin {bin}");
            if bin < last {
                let width = smallest(bin + 1) - low;
                assert!(width == 1 || width <= low / SUB_BINS as u64);
            }
        }
    }
}
