//! A pool beside ordered maps that are told where it placed everything, and compare what it says.
//! Quick enough for millions of operations on tens of thousands of extents; which of several
//! fitting free extents the pool takes is left to it.

use kvdepot_alloc::{Error, Extent, Extents, Pool, Report, Shared};
use std::collections::BTreeMap;

/// What is compared.
pub(crate) trait Allocator {
    /// Whether there is room right behind an extent whenever that is free; not if it is free in two
    /// parts only.
    const NEAR: bool;
    fn allocate(&mut self, len: u64) -> Result<Extent, Error>;
    fn allocate_near(&mut self, len: u64, near: u64) -> Result<Extent, Error>;
    fn allocate_scattered(
        &mut self,
        len: u64,
        max: usize,
        near: Option<u64>,
    ) -> Result<Extents, Error>;
    fn free(&mut self, offset: u64) -> Result<(), Error>;
    fn free_bytes(&self) -> u64;
    fn largest_free_extent(&self) -> u64;
    fn live(&self) -> Vec<Extent>;
    fn report(&self) -> Report;
    fn check(&self) -> Result<(), &'static str>;
}

macro_rules! allocator {
    ($type:ty, $near:expr, $pool:ident => $live:expr) => {
        impl Allocator for $type {
            const NEAR: bool = $near;
            fn allocate(&mut self, len: u64) -> Result<Extent, Error> {
                <$type>::allocate(self, len)
            }
            fn allocate_near(&mut self, len: u64, near: u64) -> Result<Extent, Error> {
                <$type>::allocate_near(self, len, near)
            }
            fn allocate_scattered(
                &mut self,
                len: u64,
                max: usize,
                near: Option<u64>,
            ) -> Result<Extents, Error> {
                <$type>::allocate_scattered(self, len, max, near)
            }
            fn free(&mut self, offset: u64) -> Result<(), Error> {
                <$type>::free(self, offset)
            }
            fn free_bytes(&self) -> u64 {
                <$type>::free_bytes(self)
            }
            fn largest_free_extent(&self) -> u64 {
                <$type>::largest_free_extent(self)
            }
            fn live(&self) -> Vec<Extent> {
                let $pool = self;
                $live
            }
            fn report(&self) -> Report {
                <$type>::report(self)
            }
            fn check(&self) -> Result<(), &'static str> {
                <$type>::check(self)
            }
        }
    };
}

allocator!(Pool, true, pool => pool.live_extents().collect());
allocator!(Shared, false, pool => pool.live_extents());

/// The pool, and the extents that it must have.
pub(crate) struct Twin<A> {
    pub(crate) pool: A,
    size: u64,
    granule: u64,
    /// Lengths by start.
    live: BTreeMap<u64, u64>,
    free: BTreeMap<u64, u64>,
    /// How many free extents have a length.
    lens: BTreeMap<u64, usize>,
    free_bytes: u64,
}

impl<A: Allocator> Twin<A> {
    /// Beside a pool of this shape in which everything is free.
    pub(crate) fn new(pool: A, size: u64, granule: u64) -> Self {
        let mut twin = Self {
            pool,
            size,
            granule,
            live: BTreeMap::new(),
            free: BTreeMap::new(),
            lens: BTreeMap::new(),
            free_bytes: size,
        };
        twin.add(0, size);
        twin
    }

    pub(crate) fn live(&self) -> impl Iterator<Item = Extent> + '_ {
        let extent = |(&offset, &len): (&u64, &u64)| Extent { offset, len };
        self.live.iter().map(extent)
    }

    /// The live extent at or behind an offset, or the first one.
    pub(crate) fn near(&self, offset: u64) -> Option<u64> {
        let behind = self.live.range(offset..).next();
        behind
            .or_else(|| self.live.iter().next())
            .map(|(&at, _)| at)
    }

    fn add(&mut self, start: u64, len: u64) {
        self.free.insert(start, len);
        *self.lens.entry(len).or_default() += 1;
    }

    fn remove(&mut self, start: u64) -> u64 {
        let len = self.free.remove(&start).expect("a free extent starts here");
        match self.lens.get_mut(&len) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(self.lens.remove(&len)),
        }
        len
    }

    fn largest(&self) -> u64 {
        self.lens.keys().next_back().copied().unwrap_or(0)
    }

    /// What so many of the largest free extents are together.
    fn largest_together(&self, count: usize) -> u64 {
        let lens = self.lens.iter().rev();
        lens.flat_map(|(&len, &times)| std::iter::repeat_n(len, times))
            .take(count)
            .sum()
    }

    /// The request in bytes, if the pool may serve it at all.
    fn rounded(&self, len: u64) -> Result<u64, Error> {
        if len == 0 {
            return Err(Error::ZeroSize);
        }
        if len > self.size {
            let (requested, size) = (len, self.size);
            return Err(Error::TooLarge { requested, size });
        }
        Ok(len.div_ceil(self.granule) * self.granule)
    }

    fn full(&self, requested: u64) -> Error {
        let free = self.free_bytes;
        Error::Full { requested, free }
    }

    /// Takes what the pool says it took, which must have been free.
    fn took(&mut self, extent: Extent) {
        let Extent { offset, len } = extent;
        assert!(len > 0 && offset % self.granule == 0 && len % self.granule == 0);
        let around = self.free.range(..=offset).next_back();
        let (&start, &whole) = around.unwrap_or_else(|| panic!("{extent} is not free"));
        assert!(extent.end() <= start + whole, "{extent} is not free");
        self.remove(start);
        if offset > start {
            self.add(start, offset - start);
        }
        if start + whole > extent.end() {
            self.add(extent.end(), start + whole - extent.end());
        }
        self.live.insert(offset, len);
        self.free_bytes -= len;
    }

    pub(crate) fn allocate(&mut self, len: u64) -> Result<Extent, Error> {
        let result = self.pool.allocate(len);
        self.one(len, result)
    }

    pub(crate) fn allocate_near(&mut self, len: u64, neighbour: u64) -> Result<Extent, Error> {
        let behind = self.live.get(&neighbour).map(|len| neighbour + len);
        let room = behind.and_then(|end| self.free.get(&end).copied());
        let result = self.pool.allocate_near(len, neighbour);
        if let (Ok(extent), Some(room)) = (result, room)
            && room >= extent.len
            && A::NEAR
        {
            assert_eq!(Some(extent.offset), behind, "there was room right behind");
        }
        self.one(len, result)
    }

    fn one(&mut self, len: u64, result: Result<Extent, Error>) -> Result<Extent, Error> {
        let rounded = match self.rounded(len) {
            Ok(rounded) => rounded,
            Err(error) => {
                assert_eq!(result, Err(error));
                return result;
            }
        };
        match result {
            Ok(extent) => {
                assert_eq!(extent.len, rounded);
                self.took(extent);
            }
            Err(error) => {
                assert_eq!(error, self.full(rounded));
                assert!(self.largest() < rounded, "{rounded} bytes would have fit");
            }
        }
        result
    }

    pub(crate) fn allocate_scattered(
        &mut self,
        len: u64,
        max: usize,
        near: Option<u64>,
    ) -> Result<Extents, Error> {
        let result = self.pool.allocate_scattered(len, max, near);
        let rounded = match self.rounded(len) {
            Ok(rounded) => rounded,
            Err(error) => {
                assert_eq!(result, Err(error));
                return result;
            }
        };
        match &result {
            Ok(extents) => {
                assert!((1..=max).contains(&extents.len()));
                assert_eq!(extents.bytes(), rounded);
                assert_eq!(extents.len() == 1, self.largest() >= rounded);
                extents.iter().for_each(|&extent| self.took(extent));
            }
            Err(error) => {
                assert_eq!(*error, self.full(rounded));
                assert!(self.largest() < rounded, "{rounded} bytes would have fit");
                // The largest are known to the width of a bin, a 64th.
                let together = self.largest_together(max);
                let slack = together / 32;
                assert!(together < rounded + slack, "{max} would have sufficed");
            }
        }
        result
    }

    /// Whether the extent was live.
    pub(crate) fn free(&mut self, offset: u64) -> bool {
        let result = self.pool.free(offset);
        let Some(len) = self.live.remove(&offset) else {
            assert_eq!(result, Err(Error::NotLive { offset }));
            return false;
        };
        assert_eq!(result, Ok(()));
        self.free_bytes += len;
        let (mut start, mut end) = (offset, offset + len);
        if let Some((&before, &len)) = self.free.range(..offset).next_back()
            && before + len == offset
        {
            start = before;
            self.remove(before);
        }
        if self.free.contains_key(&end) {
            end += self.remove(end);
        }
        self.add(start, end - start);
        true
    }

    /// What is cheap to compare.
    pub(crate) fn compare(&self) {
        assert_eq!(self.pool.free_bytes(), self.free_bytes);
        assert_eq!(self.pool.largest_free_extent(), self.largest());
    }

    /// Everything.
    pub(crate) fn compare_all(&self) {
        self.compare();
        self.pool.check().expect("a whole pool");
        assert!(self.pool.live().into_iter().eq(self.live()));
        let report = self.pool.report();
        assert_eq!(report.live_bytes, self.size - self.free_bytes);
        assert_eq!(report.free_bytes, self.free_bytes);
        assert_eq!(report.live_extents, self.live.len() as u64);
        assert_eq!(report.free_extents, self.free.len() as u64);
        assert_eq!(report.largest_free_extent, self.largest());
        let mut histogram = [0; 64];
        for len in self.free.values() {
            histogram[len.ilog2() as usize] += 1;
        }
        assert_eq!(report.free_histogram, histogram);
    }
}

impl Twin<Pool> {
    /// Replaces the pool by one with the same live extents.
    pub(crate) fn rebuild(&mut self) {
        let live = self.live().collect::<Vec<_>>();
        self.pool = Pool::rebuild(self.size, self.granule, live).expect("what was live");
    }
}
