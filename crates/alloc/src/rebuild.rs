//! A pool from its live extents, as recovery of an arena needs it.

use crate::core::Core;
use crate::error::Error;
use crate::extents::Extent;
use crate::word::Word;
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

/// Builds the pool from extents that [`sorted`] accepted.
pub(crate) fn build<W: Word>(live: &[Extent], granules: u64, shift: u32) -> Core<W> {
    let mut core = Core::empty(granules);
    core.live.reserve(live.len());
    let (mut gaps, mut at) = (Vec::new(), 0);
    for extent in live {
        let (start, len) = (extent.offset >> shift, extent.len >> shift);
        core.live.insert(start, len);
        if start > at {
            gaps.push((start - at, at));
        }
        at = start + len;
    }
    if granules > at {
        gaps.push((granules - at, at));
    }
    gaps.sort_unstable();
    core.free.fill(&gaps);
    core
}
