//! The allocator in granules, for either width of number. [`crate::Pool`] puts bytes, rounding and
//! errors around it.

use crate::extents::MAX_EXTENTS;
use crate::free_set::FreeSet;
use crate::live::Live;
use crate::word::Word;

/// Live extents by start, and the free ones.
#[derive(Debug, Clone)]
pub(crate) struct Core<W> {
    pub(crate) live: Live<W>,
    pub(crate) free: FreeSet<W>,
    /// The size of the pool.
    pub(crate) granules: u64,
}

/// What was taken for one allocation: (start, length), in payload order.
pub(crate) struct Pieces {
    items: [(u64, u64); MAX_EXTENTS],
    count: usize,
}

impl Pieces {
    const fn new() -> Self {
        Self {
            items: [(0, 0); MAX_EXTENTS],
            count: 0,
        }
    }

    fn push(&mut self, start: u64, len: u64) {
        self.items[self.count] = (start, len);
        self.count += 1;
    }

    pub(crate) fn as_slice(&self) -> &[(u64, u64)] {
        &self.items[..self.count]
    }
}

impl<W: Word> Core<W> {
    /// A pool in which nothing is free or live yet.
    pub(crate) fn empty(granules: u64) -> Self {
        Self {
            live: Live::new(),
            free: FreeSet::new(granules),
            granules,
        }
    }

    /// A pool in which everything is free.
    pub(crate) fn new(granules: u64) -> Self {
        let mut core = Self::empty(granules);
        core.free.give(0, granules);
        core
    }

    #[inline]
    pub(crate) fn allocate(&mut self, len: u64) -> Option<u64> {
        let id = self.free.best_fit(len)?;
        Some(self.take(id, len))
    }

    /// Like `allocate`, but right behind the live extent that starts at `near` if that is free.
    #[inline]
    pub(crate) fn allocate_near(&mut self, len: u64, near: u64) -> Option<u64> {
        match self.behind(near) {
            Some(id) if self.free.len(id) >= len => Some(self.take(id, len)),
            _ => self.allocate(len),
        }
    }

    /// The free extent right behind the live extent that starts at this position.
    fn behind(&self, near: u64) -> Option<u32> {
        let end = near + self.live.get(near)?;
        self.free.starting_at(end)
    }

    #[inline]
    fn take(&mut self, id: u32, len: u64) -> u64 {
        let start = self.free.take(id, len);
        self.live.insert(start, len);
        start
    }

    /// One extent if one fits; else the largest free extents whole, as few as possible, and the
    /// best fit for the rest. Nothing is taken unless at most `max` extents suffice.
    pub(crate) fn allocate_scattered(
        &mut self,
        len: u64,
        max: usize,
        near: Option<u64>,
    ) -> Option<Pieces> {
        let mut pieces = Pieces::new();
        let one = match near {
            Some(near) => self.allocate_near(len, near),
            None => self.allocate(len),
        };
        if let Some(start) = one {
            pieces.push(start, len);
            return Some(pieces);
        }
        let (whole, count) = self.choose(len, max)?;
        let whole = &whole[..count];
        let mut rest = len;
        for &id in whole {
            let piece = self.free.len(id);
            rest -= piece;
            pieces.push(self.take(id, piece), piece);
        }
        // Payload order follows the addresses, except for the last piece: what remains free behind
        // it is where the next block of the same prompt can continue.
        pieces.items[..count].sort_unstable();
        let last = self.allocate(rest)?;
        pieces.push(last, rest);
        Some(pieces)
    }

    /// The free extents that a scattered allocation takes whole: all but the last of the largest
    /// ones that together suffice. None if `max` of them do not.
    fn choose(&self, len: u64, max: usize) -> Option<([u32; MAX_EXTENTS], usize)> {
        if self.free.granules() < len || max < 2 {
            return None;
        }
        let (mut whole, mut seen, mut sum) = ([0; MAX_EXTENTS], 0, 0);
        self.free.largest_first(|id| {
            whole[seen] = id;
            seen += 1;
            sum += self.free.len(id);
            sum < len && seen < max
        });
        (sum >= len).then(|| (whole, seen - 1))
    }

    /// Frees the live extent that starts here and gives its length.
    #[inline]
    pub(crate) fn free(&mut self, start: u64) -> Option<u64> {
        let len = self.live.remove(start)?;
        self.free.give(start, len);
        Some(len)
    }

    /// The extent that starts at this position: its length, and whether it is live.
    pub(crate) fn at(&self, start: u64) -> Option<(u64, bool)> {
        match self.live.get(start) {
            Some(len) => Some((len, true)),
            None => self
                .free
                .starting_at(start)
                .map(|id| (self.free.len(id), false)),
        }
    }

    pub(crate) const fn memory_bytes(&self) -> usize {
        self.live.memory_bytes() + self.free.memory_bytes()
    }
}
