//! Which bins hold something: one bit a bin, one bit a row of 32 bins.

use crate::bins::SUB_BINS;

/// Rows for every size that 64 bits can express.
const ROWS: usize = 60;

/// A two-level bitmap; every question is answered by at most three word operations.
#[derive(Debug, Clone)]
pub(crate) struct Bitmap {
    rows: u64,
    bins: [u32; ROWS],
}

impl Bitmap {
    pub(crate) const fn new() -> Self {
        Self {
            rows: 0,
            bins: [0; ROWS],
        }
    }

    #[inline]
    pub(crate) fn set(&mut self, bin: usize) {
        let (row, sub) = (bin / SUB_BINS, bin % SUB_BINS);
        self.bins[row] |= 1 << sub;
        self.rows |= 1 << row;
    }

    #[inline]
    pub(crate) fn clear(&mut self, bin: usize) {
        let (row, sub) = (bin / SUB_BINS, bin % SUB_BINS);
        self.bins[row] &= !(1 << sub);
        if self.bins[row] == 0 {
            self.rows &= !(1 << row);
        }
    }

    #[inline]
    pub(crate) fn is_set(&self, bin: usize) -> bool {
        self.bins[bin / SUB_BINS] & (1 << (bin % SUB_BINS)) != 0
    }

    /// The lowest bin above this one that holds something.
    #[inline]
    pub(crate) fn next_above(&self, bin: usize) -> Option<usize> {
        let (row, sub) = (bin / SUB_BINS, bin % SUB_BINS);
        // Shifted twice, because a shift by 32 is not one.
        let here = self.bins[row] & ((u32::MAX << sub) << 1);
        if here != 0 {
            return Some(row * SUB_BINS + here.trailing_zeros() as usize);
        }
        let above = self.rows & ((u64::MAX << row) << 1);
        if above == 0 {
            return None;
        }
        let row = above.trailing_zeros() as usize;
        Some(row * SUB_BINS + self.bins[row].trailing_zeros() as usize)
    }

    /// The highest bin that holds something.
    #[inline]
    pub(crate) fn highest(&self) -> Option<usize> {
        let row = self.rows.checked_ilog2()? as usize;
        Some(row * SUB_BINS + self.bins[row].ilog2() as usize)
    }

    /// The highest bin below this one that holds something.
    pub(crate) fn next_below(&self, bin: usize) -> Option<usize> {
        let (row, sub) = (bin / SUB_BINS, bin % SUB_BINS);
        let here = self.bins[row] & !(u32::MAX << sub);
        if here != 0 {
            return Some(row * SUB_BINS + here.ilog2() as usize);
        }
        let row = (self.rows & !(u64::MAX << row)).checked_ilog2()? as usize;
        Some(row * SUB_BINS + self.bins[row].ilog2() as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_agree_with_a_plain_list() {
        let set = [0, 1, 31, 32, 63, 64, 700, 1000, ROWS * SUB_BINS - 1];
        let mut bitmap = Bitmap::new();
        set.iter().for_each(|&bin| bitmap.set(bin));
        for bin in 0..ROWS * SUB_BINS {
            assert_eq!(bitmap.is_set(bin), set.contains(&bin));
            assert_eq!(
                bitmap.next_above(bin),
                set.iter().copied().find(|&s| s > bin)
            );
            assert_eq!(
                bitmap.next_below(bin),
                set.iter().copied().rev().find(|&s| s < bin)
            );
        }
        for (left, &bin) in set.iter().enumerate().rev() {
            assert_eq!(bitmap.highest(), Some(bin));
            bitmap.clear(bin);
            assert_eq!(bitmap.highest(), left.checked_sub(1).map(|i| set[i]));
        }
    }
}
