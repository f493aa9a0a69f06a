//! The free extents by size: which bin a size belongs to, and which bins hold something.
//!
//! Sizes below 128 granules have a bin each; beyond, the 64 bins of a power of two hold sizes that
//! differ by less than 1/64, so that one word says which bins of a power of two are in use. (The
//! two levels are those of TLSF, which has up to 32 bins to a power of two; the reference design
//! of offset allocators has 8.)

use alloc::{vec, vec::Vec};

/// Bins to a row, as a power of two. A row is a power of two of sizes, but for the first one,
/// which holds all sizes below its number of bins.
const ROW_BITS: u32 = 6;

/// Bins to a row: one bit each in a word.
const ROW_BINS: usize = 1 << ROW_BITS;

/// Rows for all sizes that 64 bits can express.
const ROWS: usize = 65 - ROW_BITS as usize;

/// No free extent.
pub(crate) const NIL: u32 = u32::MAX;

/// The bin in which a free extent of this many granules is filed. Larger sizes never have lower
/// bins.
#[inline]
pub(crate) const fn bin_of(granules: u64) -> usize {
    // The exponent of sizes below the second row is taken as that row's, whose first bin follows
    // the last of the first row.
    let exponent = (granules | (ROW_BINS as u64 / 2)).ilog2() - (ROW_BITS - 1);
    if exponent == 0 {
        return granules as usize;
    }
    (exponent as usize - 1) * ROW_BINS + (granules >> (exponent - 1)) as usize
}

/// Whether all extents of a bin have the same size.
#[inline]
pub(crate) const fn is_exact(bin: usize) -> bool {
    bin < 2 * ROW_BINS
}

/// The first free extent of each bin, under a bitmap of two levels.
#[derive(Debug, Clone)]
pub(crate) struct Bins {
    /// Rows that hold something.
    rows: u64,
    /// By row, bins that hold something.
    bins: [u64; ROWS],
    heads: Vec<u32>,
}

/// The set bits from this one up.
#[inline]
const fn from(bit: usize) -> u64 {
    u64::MAX << bit
}

impl Bins {
    /// Empty bins for extents of up to this many granules.
    pub(crate) fn new(granules: u64) -> Self {
        Self {
            rows: 0,
            bins: [0; ROWS],
            heads: vec![NIL; bin_of(granules) + 1],
        }
    }

    /// As many bins as a pool of so many granules needs; there were no more.
    pub(crate) fn grow(&mut self, granules: u64) {
        self.heads.resize(bin_of(granules) + 1, NIL);
    }

    pub(crate) const fn memory_bytes(&self) -> usize {
        self.heads.capacity() * size_of::<u32>()
    }

    /// The first free extent of a bin.
    #[inline]
    pub(crate) fn head(&self, bin: usize) -> u32 {
        self.heads[bin]
    }

    /// Puts another extent first; gives the one that was.
    #[inline]
    pub(crate) fn push(&mut self, bin: usize, id: u32) -> u32 {
        self.bins[bin / ROW_BINS] |= 1 << (bin % ROW_BINS);
        self.rows |= 1 << (bin / ROW_BINS);
        core::mem::replace(&mut self.heads[bin], id)
    }

    /// Puts the second extent first, [`NIL`] if there was only one.
    #[inline]
    pub(crate) fn pop(&mut self, bin: usize, second: u32) {
        self.heads[bin] = second;
        let row = &mut self.bins[bin / ROW_BINS];
        *row &= !(u64::from(second == NIL) << (bin % ROW_BINS));
        self.rows &= !(u64::from(*row == 0) << (bin / ROW_BINS));
    }

    /// The lowest bin from this one up that holds something.
    #[inline]
    pub(crate) fn first_from(&self, bin: usize) -> Option<usize> {
        let row = bin / ROW_BINS;
        let here = self.bins[row] & from(bin % ROW_BINS);
        if here != 0 {
            return Some(row * ROW_BINS + here.trailing_zeros() as usize);
        }
        // Rows are fewer than bits, so the shift is one.
        let above = self.rows & from(row + 1);
        if above == 0 {
            return None;
        }
        let row = above.trailing_zeros() as usize;
        Some(row * ROW_BINS + self.bins[row].trailing_zeros() as usize)
    }

    /// The highest bin that holds something.
    #[inline]
    pub(crate) fn highest(&self) -> Option<usize> {
        let row = self.rows.checked_ilog2()? as usize;
        Some(row * ROW_BINS + self.bins[row].checked_ilog2()? as usize)
    }

    /// The highest bin below this one that holds something.
    #[inline]
    pub(crate) fn next_below(&self, bin: usize) -> Option<usize> {
        let row = bin / ROW_BINS;
        if let Some(bit) = (self.bins[row] & !from(bin % ROW_BINS)).checked_ilog2() {
            return Some(row * ROW_BINS + bit as usize);
        }
        let row = (self.rows & !from(row)).checked_ilog2()? as usize;
        Some(row * ROW_BINS + self.bins[row].checked_ilog2()? as usize)
    }

    /// The bins that hold something, by their heads alone; for checks.
    pub(crate) fn heads(&self) -> impl Iterator<Item = (usize, u32)> + '_ {
        let heads = self.heads.iter().copied().enumerate();
        heads.filter(|&(_, head)| head != NIL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The smallest size of a bin, the inverse of [`bin_of`].
    fn smallest(bin: usize) -> u64 {
        let (row, sub) = (bin / ROW_BINS, (bin % ROW_BINS) as u64);
        match row.checked_sub(1) {
            Some(exponent) => (ROW_BINS as u64 + sub) << exponent,
            None => sub,
        }
    }

    #[test]
    fn bins_are_ordered_contiguous_and_narrow() {
        let last = bin_of(u64::MAX);
        assert_eq!(last, ROWS * ROW_BINS - 1);
        for bin in 1..=last {
            let low = smallest(bin);
            assert_eq!(bin_of(low), bin, "smallest size of bin {bin}");
            assert_eq!(bin_of(low - 1), bin - 1, "the size below bin {bin}");
            if bin < last {
                let width = smallest(bin + 1) - low;
                assert_eq!(width == 1, is_exact(bin));
                assert!(width <= low / ROW_BINS as u64 || width == 1);
            }
        }
    }

    #[test]
    fn neighbours_agree_with_a_plain_list() {
        let last = bin_of(u64::MAX);
        let set = [0, 1, 31, 63, 64, 127, 128, 700, 2111, 2112, last];
        let mut bins = Bins::new(u64::MAX);
        for bin in set {
            assert_eq!(bins.push(bin, 7), NIL);
            assert_eq!(bins.push(bin, bin as u32), 7);
        }
        assert!(bins.heads().eq(set.iter().map(|&bin| (bin, bin as u32))));
        for bin in 0..=last {
            let held = set.contains(&bin);
            assert_eq!(bins.head(bin), if held { bin as u32 } else { NIL });
            let above = set.iter().copied().find(|&other| other >= bin);
            assert_eq!(bins.first_from(bin), above);
            let below = set.iter().copied().rev().find(|&other| other < bin);
            assert_eq!(bins.next_below(bin), below);
        }
        for (left, &bin) in set.iter().enumerate().rev() {
            bins.pop(bin, 7);
            assert_eq!(bins.highest(), Some(bin));
            bins.pop(bin, NIL);
            assert_eq!(bins.highest(), left.checked_sub(1).map(|i| set[i]));
        }
        assert_eq!(bins.first_from(0), None);
    }
}
