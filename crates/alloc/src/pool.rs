//! The public allocator: bytes, rounding, errors.

use crate::core::{self, Core};
use crate::error::Error;
use crate::extents::{Extent, Extents, Hint, MAX_EXTENTS, MAX_SIZE};
use crate::rebuild;
use crate::report::Report;
use crate::word::Halves;
use ::core::fmt;
use alloc::vec::{self, Vec};

/// Maximum number of live extents in one pool. Live and free extents together have 32-bit numbers,
/// and there is at most one more free extent than live ones.
pub const MAX_LIVE: u64 = (u32::MAX / 2 - 16) as u64;

/// An offset allocator for one thread at a time.
///
/// The [crate] documentation lists its guarantees and bounds. [`Shared`](crate::Shared) is a pool
/// for several threads.
///
/// # Examples
///
/// ```
/// use kvdepot_alloc::Pool;
///
/// let mut pool = Pool::new(1 << 20, 4096)?;
/// let extent = pool.allocate(8192)?;
/// assert_eq!(pool.get(extent.offset), Some(extent));
/// assert_eq!(pool.free_bytes(), (1 << 20) - 8192);
///
/// // After a restart: the same pool from the extents that are still in use.
/// let live: Vec<_> = pool.live_extents().collect();
/// let pool = Pool::rebuild(1 << 20, 4096, live)?;
/// assert_eq!(pool.live_count(), 1);
/// # Ok::<(), kvdepot_alloc::Error>(())
/// ```
#[derive(Clone)]
pub struct Pool {
    inner: Inner,
    /// The granule as a power of two.
    shift: u32,
}

#[derive(Clone)]
enum Inner {
    /// Fewer than 2³² − 1 granules: half the memory.
    Narrow(Core<u32>),
    Wide(Core<Halves>),
}

/// Runs the same code on either width.
macro_rules! with {
    ($pool:expr, $core:ident => $body:expr) => {
        match $pool {
            Inner::Narrow($core) => $body,
            Inner::Wide($core) => $body,
        }
    };
}

/// The granule as a power of two, and the pool's size in granules.
const fn granules(size: u64, granule: u64) -> Result<(u64, u32), Error> {
    if !granule.is_power_of_two() {
        return Err(Error::Granule { granule });
    }
    if size == 0 || size > MAX_SIZE || !size.is_multiple_of(granule) {
        return Err(Error::Size { size, granule });
    }
    let shift = granule.trailing_zeros();
    Ok((size >> shift, shift))
}

/// Whether positions up to and including this one fit 32 bits, next to the mark for unused slots.
const fn is_narrow(granules: u64) -> bool {
    granules < u32::MAX as u64
}

impl Pool {
    /// Creates a pool of `size` bytes, all free.
    ///
    /// All extents are multiples of `granule` bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Granule`] if `granule` is not a power of two. [`Error::Size`] if `size` is not a
    /// multiple of `granule` from `granule` to [`MAX_SIZE`].
    pub fn new(size: u64, granule: u64) -> Result<Self, Error> {
        let (granules, shift) = granules(size, granule)?;
        let inner = if is_narrow(granules) {
            Inner::Narrow(Core::new(granules))
        } else {
            Inner::Wide(Core::new(granules))
        };
        Ok(Self { inner, shift })
    }

    /// Creates a pool in which exactly the extents in `live` are allocated.
    ///
    /// `size` and `granule` are in bytes. The call takes linear time if the extents are in address
    /// order; otherwise it sorts them.
    ///
    /// # Errors
    ///
    /// The errors of [`Pool::new`]. [`Error::ZeroSize`], [`Error::Misaligned`],
    /// [`Error::OutOfRange`] or [`Error::Overlap`] for extents that a pool of this size and granule
    /// cannot have. [`Error::TooMany`] for more than [`MAX_LIVE`] extents.
    pub fn rebuild(
        size: u64,
        granule: u64,
        live: impl IntoIterator<Item = Extent>,
    ) -> Result<Self, Error> {
        let (granules, shift) = granules(size, granule)?;
        let live = rebuild::sorted(live, size, granule)?;
        if live.len() as u64 > MAX_LIVE {
            return Err(Error::TooMany { limit: MAX_LIVE });
        }
        let live = live.iter().map(|extent| Extent {
            offset: extent.offset >> shift,
            len: extent.len >> shift,
        });
        let inner = if is_narrow(granules) {
            Inner::Narrow(Core::rebuild(granules, live))
        } else {
            Inner::Wide(Core::rebuild(granules, live))
        };
        Ok(Self { inner, shift })
    }

    /// Changes the size of the pool to `size` bytes. Live extents keep their positions; all other
    /// space is free.
    ///
    /// The call takes negligible time in most cases. If the pool shrinks, or if it reaches 2³² − 1
    /// granules, the pool is built again as by [`Pool::rebuild`].
    ///
    /// # Errors
    ///
    /// [`Error::Size`] for a size that [`Pool::new`] rejects. [`Error::OutOfRange`] if a live
    /// extent would end after the new end.
    pub fn grow(&mut self, size: u64) -> Result<(), Error> {
        let (granules, _) = granules(size, self.granule())?;
        let is_narrow = is_narrow(granules);
        match &mut self.inner {
            Inner::Narrow(core) if is_narrow && granules > core.granules() => core.grow(granules),
            Inner::Wide(core) if granules > core.granules() => core.grow(granules),
            _ => *self = Self::rebuild(size, self.granule(), self.live_extents())?,
        }
        Ok(())
    }

    /// Reserves memory in the pool's tables for a total of `live` live and `free` free extents.
    ///
    /// Until there are more extents, no call grows a table.
    pub fn reserve(&mut self, live: usize, free: usize) {
        with!(&mut self.inner, core => core.reserve(live, free));
    }

    /// Allocates `len` bytes, rounded up to the granule, from the smallest free extent that fits.
    ///
    /// Returns the allocated extent.
    ///
    /// # Errors
    ///
    /// [`Error::ZeroSize`] for no bytes. [`Error::TooLarge`] for more bytes than the pool has.
    /// [`Error::Full`] if no free extent fits. [`Error::TooMany`] if the pool has [`MAX_LIVE`] live
    /// extents.
    #[inline]
    pub fn allocate(&mut self, len: u64) -> Result<Extent, Error> {
        let wanted = self.granules_for(len, 1)?;
        match with!(&mut self.inner, core => core.allocate(wanted)) {
            Some(start) => Ok(self.extent(start, wanted)),
            None => Err(self.full(wanted)),
        }
    }

    /// Allocates `len` bytes at the position that `hint` prefers, if possible, and otherwise as
    /// [`Pool::allocate`].
    ///
    /// `hint` is a [`Hint`], or the offset of a live extent to follow.
    ///
    /// # Errors
    ///
    /// The errors of [`Pool::allocate`].
    pub fn allocate_near(&mut self, len: u64, hint: impl Into<Hint>) -> Result<Extent, Error> {
        let wanted = self.granules_for(len, 1)?;
        let hint = self.hint(hint.into());
        match with!(&mut self.inner, core => core.allocate_near(wanted, hint)) {
            Some(start) => Ok(self.extent(start, wanted)),
            None => Err(self.full(wanted)),
        }
    }

    /// Allocates `len` bytes, rounded up to the granule, in as few extents as possible and at most
    /// `max_extents`.
    ///
    /// The pool uses a single extent if one fits, placed as by [`Pool::allocate`] or
    /// [`Pool::allocate_near`]. Otherwise it takes the largest free extents whole. The last two
    /// extents are the pair that leaves the least free space in the second one.
    ///
    /// The call allocates all extents or none. Each extent is freed separately with [`Pool::free`].
    ///
    /// # Errors
    ///
    /// The errors of [`Pool::allocate`]. Here [`Error::Full`] means that `max_extents` free extents
    /// do not suffice, where all extents of a bin count as equally large. [`Error::ExtentLimit`] if
    /// `max_extents` is outside 1 to [`MAX_EXTENTS`].
    pub fn allocate_scattered(
        &mut self,
        len: u64,
        max_extents: usize,
        hint: impl Into<Hint>,
    ) -> Result<Extents, Error> {
        if max_extents == 0 || max_extents > MAX_EXTENTS {
            return Err(Error::ExtentLimit { max_extents });
        }
        let wanted = self.granules_for(len, max_extents)?;
        let hint = self.hint(hint.into());
        let mut pieces = Extents::new();
        let found = with!(&mut self.inner, core => {
            core.allocate_scattered(wanted, max_extents, hint, &mut pieces)
        });
        if !found {
            return Err(self.full(wanted));
        }
        pieces.shift(self.shift);
        Ok(pieces)
    }

    /// Frees the live extent that starts at `offset` and merges it with adjacent free extents.
    ///
    /// # Errors
    ///
    /// [`Error::NotLive`] if no live extent starts there; the pool is then unchanged.
    #[inline]
    pub fn free(&mut self, offset: u64) -> Result<(), Error> {
        let freed = match self.position(offset) {
            Some(start) => with!(&mut self.inner, core => core.free(start)),
            None => false,
        };
        if freed {
            Ok(())
        } else {
            Err(Error::NotLive { offset })
        }
    }

    /// Marks parts of free extents as allocated, for example because the medium failed under them.
    ///
    /// The call passes each free extent to `part`, which returns the range to allocate, in
    /// multiples of the granule. It then passes the space after that range, until `part` returns
    /// `None`.
    ///
    /// The call examines at most `count` free extents, starting at number `from` in an internal
    /// order. It returns the number to continue with, or `None` at the end. A sequence of such
    /// calls may miss extents that were freed after its first call.
    pub fn carve(
        &mut self,
        from: u32,
        count: u32,
        mut part: impl FnMut(Extent) -> Option<Extent>,
    ) -> Option<u32> {
        let shift = self.shift;
        let part = |free: Extent| {
            let part = part(Extent {
                offset: free.offset << shift,
                len: free.len << shift,
            })?;
            Some(Extent {
                offset: part.offset >> shift,
                len: part.len >> shift,
            })
        };
        with!(&mut self.inner, core => core.carve(from, count, part))
    }

    /// Returns the live extent that starts at `offset`, if there is one.
    #[must_use]
    pub fn get(&self, offset: u64) -> Option<Extent> {
        let start = self.position(offset)?;
        let len = with!(&self.inner, core => core.live_len(start))?;
        Some(self.extent(start, len))
    }

    /// Returns the size of the pool in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        with!(&self.inner, core => core.granules()) << self.shift
    }

    /// Returns the granule in bytes. The length of each extent is a multiple of it.
    #[must_use]
    pub const fn granule(&self) -> u64 {
        1 << self.shift
    }

    /// Returns the total length of all free extents in bytes.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        with!(&self.inner, core => core.free_granules()) << self.shift
    }

    /// Returns the length of the largest free extent in bytes: the most that [`Pool::allocate`] can
    /// allocate now.
    #[must_use]
    pub fn largest_free_extent(&self) -> u64 {
        with!(&self.inner, core => core.largest()) << self.shift
    }

    /// Returns the number of live extents.
    #[must_use]
    pub fn live_count(&self) -> usize {
        with!(&self.inner, core => core.live_count())
    }

    /// Returns an iterator over the live extents, in address order.
    #[must_use]
    pub fn live_extents(&self) -> LiveExtents<'_> {
        let at = with!(&self.inner, core => core.walk());
        LiveExtents { pool: self, at }
    }

    /// Returns an iterator over the free extents, in address order. The call collects and sorts
    /// them.
    #[must_use]
    pub fn free_extents(&self) -> FreeExtents {
        let mut extents: Vec<Extent> = with!(&self.inner, core => {
            let free = core.free_extents();
            free.map(|free| self.extent(free.offset, free.len)).collect()
        });
        extents.sort_unstable();
        FreeExtents(extents.into_iter())
    }

    /// Returns statistics of the pool. The call visits every free extent for the histogram.
    #[must_use]
    pub fn report(&self) -> Report {
        let (mut free_histogram, mut free_extents) = ([0; 64], 0);
        let memory_bytes = with!(&self.inner, core => {
            for free in core.free_extents() {
                free_histogram[(free.len << self.shift).ilog2() as usize] += 1;
                free_extents += 1;
            }
            core.memory_bytes() as u64
        });
        let (size, free_bytes) = (self.size(), self.free_bytes());
        Report {
            size,
            granule: self.granule(),
            live_bytes: size - free_bytes,
            free_bytes,
            live_extents: self.live_count() as u64,
            free_extents,
            largest_free_extent: self.largest_free_extent(),
            free_histogram,
            memory_bytes,
        }
    }

    /// Checks the consistency of all data structures; meant for tests and fuzzers.
    ///
    /// Each granule must be in exactly one live or free extent, no two free extents may be
    /// adjacent, each extent must be in the right list, and the counts must match. The call visits
    /// everything.
    ///
    /// # Errors
    ///
    /// A description of the inconsistency, which would be a bug in this crate.
    pub fn check(&self) -> Result<(), &'static str> {
        with!(&self.inner, core => core.check())
    }

    /// A request in granules, if a pool of this shape could ever serve it.
    #[inline]
    fn granules_for(&self, len: u64, extents: usize) -> Result<u64, Error> {
        let (granules, live) = with!(&self.inner, core => (core.granules(), core.live_count()));
        // Rounds up; no bytes wrap around to too many granules.
        let last = len.wrapping_sub(1) >> self.shift;
        if last < granules && live + extents <= MAX_LIVE as usize {
            Ok(last + 1)
        } else {
            Err(self.refusal(len))
        }
    }

    #[cold]
    fn refusal(&self, requested: u64) -> Error {
        let size = self.size();
        if requested == 0 {
            Error::ZeroSize
        } else if requested > size {
            Error::TooLarge { requested, size }
        } else {
            Error::TooMany { limit: MAX_LIVE }
        }
    }

    /// A hint in granules.
    fn hint(&self, hint: Hint) -> Hint {
        Hint {
            behind: hint.behind.and_then(|offset| self.position(offset)),
            followed_by: hint.followed_by >> self.shift,
        }
    }

    /// An offset in granules, if an extent of this pool could start there.
    #[inline]
    fn position(&self, offset: u64) -> Option<u64> {
        let possible = offset < self.size() && offset.is_multiple_of(self.granule());
        possible.then_some(offset >> self.shift)
    }

    const fn extent(&self, start: u64, len: u64) -> Extent {
        Extent {
            offset: start << self.shift,
            len: len << self.shift,
        }
    }

    #[inline]
    fn full(&self, wanted: u64) -> Error {
        Error::Full {
            requested: wanted << self.shift,
            free: self.free_bytes(),
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("size", &self.size())
            .field("granule", &self.granule())
            .field("free_bytes", &self.free_bytes())
            .field("largest_free_extent", &self.largest_free_extent())
            .field("live_count", &self.live_count())
            .finish()
    }
}

/// An iterator over the live extents of a pool, in address order; created by
/// [`Pool::live_extents`].
#[derive(Clone)]
pub struct LiveExtents<'a> {
    pool: &'a Pool,
    at: core::Walk,
}

impl Iterator for LiveExtents<'_> {
    type Item = Extent;

    fn next(&mut self) -> Option<Extent> {
        let live = with!(&self.pool.inner, core => core.next_live(&mut self.at))?;
        Some(self.pool.extent(live.offset, live.len))
    }
}

/// An iterator over the free extents of a pool, in address order; created by
/// [`Pool::free_extents`].
#[derive(Debug, Clone)]
pub struct FreeExtents(vec::IntoIter<Extent>);

impl Iterator for FreeExtents {
    type Item = Extent;

    fn next(&mut self) -> Option<Extent> {
        self.0.next()
    }
}
