//! The public allocator: bytes, rounding, errors.

use crate::core::{self, Core};
use crate::error::Error;
use crate::extents::{Extent, Extents, Hint, MAX_EXTENTS, MAX_SIZE};
use crate::rebuild;
use crate::report::Report;
use crate::word::Halves;
use ::core::fmt;
use alloc::vec::{self, Vec};

/// The most live extents in one pool: they and the free ones, at most one more, are numbered in 32
/// bits.
pub const MAX_LIVE: u64 = (u32::MAX / 2 - 16) as u64;

/// An offset allocator for one thread at a time; see the [crate] for what it promises.
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
    /// A pool of `size` bytes, all free. Extents will be multiples of `granule` bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Granule`] unless `granule` is a power of two; [`Error::Size`] unless `size` is a
    /// multiple of it from `granule` to [`MAX_SIZE`].
    pub fn new(size: u64, granule: u64) -> Result<Self, Error> {
        let (granules, shift) = granules(size, granule)?;
        let inner = if is_narrow(granules) {
            Inner::Narrow(Core::new(granules))
        } else {
            Inner::Wide(Core::new(granules))
        };
        Ok(Self { inner, shift })
    }

    /// A pool in which exactly the given extents are live, in linear time if they come in address
    /// order and sorting them otherwise.
    ///
    /// # Errors
    ///
    /// As [`Pool::new`]; [`Error::ZeroSize`], [`Error::Misaligned`], [`Error::OutOfRange`] or
    /// [`Error::Overlap`] for extents that no pool of this shape hands out; [`Error::TooMany`].
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

    /// Makes the pool larger. What is live stays where it is, and the rest is free. That takes no
    /// time to speak of, but where the pool becomes one of 2³² − 1 granules or more, or smaller: it
    /// is built anew then, as by [`Pool::rebuild`].
    ///
    /// # Errors
    ///
    /// [`Error::Size`] for a size that [`Pool::new`] refuses; [`Error::OutOfRange`] for one that
    /// live extents do not fit into.
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

    /// Makes room in the pool's own tables for `live` live and `free` free extents in all, so that
    /// no call rehashes until there are more.
    pub fn reserve(&mut self, live: usize, free: usize) {
        with!(&mut self.inner, core => core.reserve(live, free));
    }

    /// Allocates `len` bytes, rounded up to the granule, from the smallest free extent that fits.
    ///
    /// # Errors
    ///
    /// [`Error::ZeroSize`], [`Error::TooLarge`] (more than the pool), [`Error::Full`] (no free
    /// extent fits), [`Error::TooMany`] (live extents).
    #[inline]
    pub fn allocate(&mut self, len: u64) -> Result<Extent, Error> {
        let wanted = self.granules_for(len, 1)?;
        match with!(&mut self.inner, core => core.allocate(wanted)) {
            Some(start) => Ok(self.extent(start, wanted)),
            None => Err(self.full(wanted)),
        }
    }

    /// Like [`Pool::allocate`], but where the hint says, if it can; an offset is a hint, see
    /// [`Hint`].
    ///
    /// # Errors
    ///
    /// As [`Pool::allocate`].
    pub fn allocate_near(&mut self, len: u64, hint: impl Into<Hint>) -> Result<Extent, Error> {
        let wanted = self.granules_for(len, 1)?;
        let hint = self.hint(hint.into());
        match with!(&mut self.inner, core => core.allocate_near(wanted, hint)) {
            Some(start) => Ok(self.extent(start, wanted)),
            None => Err(self.full(wanted)),
        }
    }

    /// Allocates `len` bytes, rounded up to the granule, in one extent whenever one fits (placed
    /// as by [`Pool::allocate`] or [`Pool::allocate_near`]) and else in as few as possible, at most
    /// `max_extents`: the largest free extents whole, but for the last two pieces, the pair that
    /// leaves least of the second. All of them are allocated or none. Each is freed on its own.
    ///
    /// # Errors
    ///
    /// As [`Pool::allocate`], where [`Error::Full`] says that `max_extents` free extents do not
    /// suffice (of those that share a bin, any count as the largest); [`Error::ExtentLimit`]
    /// unless `max_extents` is 1 to [`MAX_EXTENTS`].
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

    /// Frees the live extent that starts at `offset` and merges it with its free neighbours.
    ///
    /// # Errors
    ///
    /// [`Error::NotLive`] if no live extent starts there; then nothing changes.
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

    /// Makes parts of free extents live, as if they had been allocated: what is under them failed,
    /// say. `part` is asked for each, and again for what lies behind the part that it answers,
    /// until it answers none; parts are multiples of the granule.
    ///
    /// Looks at no more than `count` extents, from the `from`th on in an order of the pool's own,
    /// and gives what to go on with, if there is more. Extents that became free since the first of
    /// such calls may be missed.
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

    /// The live extent that starts at `offset`, if there is one.
    #[must_use]
    pub fn get(&self, offset: u64) -> Option<Extent> {
        let start = self.position(offset)?;
        let len = with!(&self.inner, core => core.live_len(start))?;
        Some(self.extent(start, len))
    }

    /// The size of the pool in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        with!(&self.inner, core => core.granules()) << self.shift
    }

    /// What extents are multiples of, in bytes.
    #[must_use]
    pub const fn granule(&self) -> u64 {
        1 << self.shift
    }

    /// Bytes in free extents.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        with!(&self.inner, core => core.free_granules()) << self.shift
    }

    /// Bytes in the largest free extent: the most that [`Pool::allocate`] can serve now.
    #[must_use]
    pub fn largest_free_extent(&self) -> u64 {
        with!(&self.inner, core => core.largest()) << self.shift
    }

    /// The number of live extents.
    #[must_use]
    pub fn live_count(&self) -> usize {
        with!(&self.inner, core => core.live_count())
    }

    /// The live extents in address order.
    #[must_use]
    pub fn live_extents(&self) -> LiveExtents<'_> {
        let at = with!(&self.inner, core => core.walk());
        LiveExtents { pool: self, at }
    }

    /// The free extents in address order, which they are sorted into.
    #[must_use]
    pub fn free_extents(&self) -> FreeExtents {
        let mut extents: Vec<Extent> = with!(&self.inner, core => {
            let free = core.free_extents();
            free.map(|free| self.extent(free.offset, free.len)).collect()
        });
        extents.sort_unstable();
        FreeExtents(extents.into_iter())
    }

    /// How the pool is doing; the histogram visits every free extent.
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

    /// Examines every structure of the pool: each granule is live or free, no free extents touch,
    /// each is filed where it is looked for, and the counts are right. Visits everything; meant
    /// for tests and fuzzers.
    ///
    /// # Errors
    ///
    /// Says what is broken, which would be a bug of this crate.
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

/// The live extents of a pool in address order; from [`Pool::live_extents`].
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

/// The free extents of a pool in address order; from [`Pool::free_extents`].
#[derive(Debug, Clone)]
pub struct FreeExtents(vec::IntoIter<Extent>);

impl Iterator for FreeExtents {
    type Item = Extent;

    fn next(&mut self) -> Option<Extent> {
        self.0.next()
    }
}
