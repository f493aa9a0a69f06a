//! The naive twin of a pool: it follows the pool's choices and says which were wrong.

use kvdepot_alloc::Extent;

/// A pool as one would write it first: sorted lists, searched from end to end. In bytes.
#[derive(Debug, Clone)]
pub(crate) struct Model {
    pub(crate) granule: u64,
    pub(crate) free: Vec<Extent>,
    pub(crate) live: Vec<Extent>,
    /// What was freed last, until something else happens.
    freed: Option<Extent>,
}

impl Model {
    pub(crate) fn new(size: u64, granule: u64) -> Self {
        Self {
            granule,
            free: vec![Extent {
                offset: 0,
                len: size,
            }],
            live: Vec::new(),
            freed: None,
        }
    }

    pub(crate) fn round(&self, len: u64) -> u64 {
        len.div_ceil(self.granule) * self.granule
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.free.iter().map(|extent| extent.len).sum()
    }

    pub(crate) fn largest(&self) -> u64 {
        self.free.iter().map(|extent| extent.len).max().unwrap_or(0)
    }

    /// The lengths of the largest free extents, largest first.
    fn largest_first(&self) -> Vec<u64> {
        let mut lens: Vec<u64> = self.free.iter().map(|extent| extent.len).collect();
        lens.sort_unstable_by(|a, b| b.cmp(a));
        lens
    }

    /// Follows an allocation of one extent, and says what is wrong with it.
    pub(crate) fn allocated(&mut self, len: u64, given: Extent) -> Result<(), String> {
        if given.len != self.round(len) {
            return Err(format!("{given} for {len} bytes"));
        }
        let holds = |free: &Extent| free.offset <= given.offset && given.end() <= free.end();
        let Some(index) = self.free.iter().position(holds) else {
            return Err(format!("{given} is not free"));
        };
        let from = self.free[index];
        // In the middle of a free extent only where one of just this size was freed before.
        if from.offset != given.offset && self.freed != Some(given) {
            return Err(format!("{given} is not at the start of {from}"));
        }
        self.free.remove(index);
        let before = (from.offset, given.offset - from.offset);
        let behind = (given.end(), from.end() - given.end());
        for (offset, len) in [behind, before] {
            if len != 0 {
                self.free.insert(index, Extent { offset, len });
            }
        }
        let at = self.live.partition_point(|live| live.offset < given.offset);
        self.live.insert(at, given);
        self.freed = None;
        Ok(())
    }

    /// What an allocation by size alone may take: nothing larger than the best fit, unless a bin
    /// holds more extents than a search looks at.
    pub(crate) fn is_best_fit(&self, len: u64, given: Extent) -> bool {
        let fits = self.free.iter().map(|free| free.len);
        let best = fits.filter(|&free| free >= self.round(len)).min();
        let taken = self.free.iter().find(|free| free.offset == given.offset);
        self.freed == Some(given) || self.free.len() > 16 || taken.map(|free| free.len) == best
    }

    /// What an allocation may take that others will follow: where they fit too, or the largest.
    pub(crate) fn has_room(&self, len: u64, followed_by: u64, given: Extent) -> bool {
        let all = self.round(len) + followed_by / self.granule * self.granule;
        let largest = self.largest();
        let taken = self.free.iter().find(|free| free.offset == given.offset);
        taken.is_some_and(|free| free.len >= all.min(largest - largest / 32))
    }

    /// Whether an allocation of these pieces was called for: few and large ones, if none fits.
    pub(crate) fn may_scatter(&self, len: u64, max: usize, pieces: &[Extent]) -> bool {
        let lens = self.largest_first();
        // Extents of one bin differ by less than 1/64 and come in any order.
        let fewer = lens.iter().take(pieces.len() - 1).sum::<u64>();
        self.largest() < self.round(len)
            && pieces.len() <= max
            && fewer - fewer / 32 < self.round(len)
            && pieces.iter().map(|piece| piece.len).sum::<u64>() == self.round(len)
    }

    /// Whether there may be no room for this in so many pieces.
    pub(crate) fn may_be_full(&self, len: u64, max: usize) -> bool {
        let lens = self.largest_first();
        let most = lens.iter().take(max).sum::<u64>();
        let certain = if max == 1 { most } else { most - most / 32 };
        certain < self.round(len)
    }

    /// The free extent right behind the live one that starts here, if it is long enough.
    pub(crate) fn behind(&self, neighbour: u64, len: u64) -> Option<u64> {
        let live = self.live.iter().find(|live| live.offset == neighbour)?;
        let free = self.free.iter().find(|free| free.offset == live.end())?;
        (free.len >= self.round(len)).then_some(free.offset)
    }

    pub(crate) fn free(&mut self, offset: u64) -> bool {
        self.freed = None;
        let Some(index) = self.live.iter().position(|live| live.offset == offset) else {
            return false;
        };
        let freed = self.live.remove(index);
        let at = self.free.partition_point(|free| free.offset < offset);
        self.free.insert(at, freed);
        let mut merged: Vec<Extent> = Vec::new();
        for &free in &self.free {
            match merged.last_mut() {
                Some(last) if last.end() == free.offset => last.len += free.len,
                _ => merged.push(free),
            }
        }
        self.free = merged;
        self.freed = Some(freed);
        true
    }
}
