//! The naive twin of a pool.

use kvdepot_alloc::Extent;

/// A pool as one would write it first: sorted lists, searched from end to end. In bytes.
#[derive(Debug, Clone)]
pub(crate) struct Model {
    pub(crate) granule: u64,
    pub(crate) free: Vec<Extent>,
    pub(crate) live: Vec<Extent>,
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

    fn take(&mut self, index: usize, len: u64) -> Extent {
        let taken = Extent {
            offset: self.free[index].offset,
            len,
        };
        if self.free[index].len == len {
            self.free.remove(index);
        } else {
            self.free[index].offset += len;
            self.free[index].len -= len;
        }
        let at = self.live.partition_point(|live| live.offset < taken.offset);
        self.live.insert(at, taken);
        taken
    }

    /// The smallest free extent that fits, the lowest of equals.
    pub(crate) fn allocate(&mut self, len: u64) -> Option<Extent> {
        let len = self.round(len);
        let fits = self
            .free
            .iter()
            .enumerate()
            .filter(|(_, free)| free.len >= len);
        let best = fits.min_by_key(|(_, free)| (free.len, free.offset))?.0;
        Some(self.take(best, len))
    }

    pub(crate) fn allocate_near(&mut self, len: u64, neighbour: u64) -> Option<Extent> {
        let rounded = self.round(len);
        let end = self
            .live
            .iter()
            .find(|live| live.offset == neighbour)
            .map(Extent::end);
        let behind = self.free.iter().position(|free| Some(free.offset) == end);
        match behind {
            Some(index) if self.free[index].len >= rounded => Some(self.take(index, rounded)),
            _ => self.allocate(len),
        }
    }

    /// The largest whole, largest first, then the best fit; whole ones reported by address.
    pub(crate) fn allocate_scattered(
        &mut self,
        len: u64,
        max: usize,
        near: Option<u64>,
    ) -> Option<Vec<Extent>> {
        let before = self.clone();
        let one = match near {
            Some(near) => self.allocate_near(len, near),
            None => self.allocate(len),
        };
        if let Some(one) = one {
            return Some(vec![one]);
        }
        let (mut rest, mut pieces) = (self.round(len), Vec::new());
        while pieces.len() < max && !self.free.is_empty() {
            if let Some(last) = self.allocate(rest) {
                pieces.sort_unstable();
                pieces.push(last);
                return Some(pieces);
            }
            let index = (0..self.free.len())
                .max_by_key(|&index| (self.free[index].len, self.free[index].offset))?;
            rest -= self.free[index].len;
            pieces.push(self.take(index, self.free[index].len));
        }
        *self = before;
        None
    }

    pub(crate) fn free(&mut self, offset: u64) -> bool {
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
        true
    }
}
