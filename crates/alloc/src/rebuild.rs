//! What recovery of an arena gives: live extents that may be anything.

use crate::error::Error;
use crate::extents::Extent;
use alloc::vec::Vec;

/// Checks the live extents, in bytes, and sorts them unless they are. Linear if they are.
pub(crate) fn sorted(
    live: impl IntoIterator<Item = Extent>,
    size: u64,
    granule: u64,
) -> Result<Vec<Extent>, Error> {
    let mut live: Vec<Extent> = live.into_iter().collect();
    for &extent in &live {
        if extent.len == 0 {
            return Err(Error::ZeroSize);
        }
        if !extent.offset.is_multiple_of(granule) || !extent.len.is_multiple_of(granule) {
            return Err(Error::Misaligned { extent, granule });
        }
        if extent
            .offset
            .checked_add(extent.len)
            .is_none_or(|end| end > size)
        {
            return Err(Error::OutOfRange { extent, size });
        }
    }
    if !live.is_sorted() {
        live.sort_unstable();
    }
    if let Some(pair) = live.windows(2).find(|pair| pair[0].end() > pair[1].offset) {
        return Err(Error::Overlap {
            first: pair[0],
            second: pair[1],
        });
    }
    Ok(live)
}
