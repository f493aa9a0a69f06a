//! The free extents by size.

use crate::bins::{Bins, NIL, bin_of, is_exact};
use crate::chunks::Chunks;
use crate::extents::{Extent, MAX_EXTENTS};
use crate::word::Word;

/// How many extents of one bin a search compares: those of a bin differ by less than 1/64.
const LOOK: usize = 16;

/// A free extent, in granules.
#[derive(Debug, Clone, Copy)]
struct Record<W> {
    start: W,
    /// 0 if the record is not in use; its `next` leads to another such.
    len: W,
    /// The next of its bin.
    next: u32,
    /// [`NIL`] for the first of its bin.
    prev: u32,
    /// Its place among all extents.
    link: u32,
}

/// All free extents of a pool, each a member of its bin's list.
#[derive(Debug, Clone)]
pub(crate) struct FreeSet<W> {
    bins: Bins,
    records: Chunks<Record<W>>,
    unused: u32,
    count: usize,
    granules: u64,
    /// Every free extent is shorter than this. Not always the least such number, but a search that
    /// found nothing lowers it, so that the same search costs nothing until it may succeed.
    below: u64,
}

/// The largest free extents, by number.
pub(crate) struct Largest {
    ids: [u32; MAX_EXTENTS + BEYOND],
    count: usize,
    needed: usize,
}

/// How many more extents than are needed are listed.
const BEYOND: usize = 1;

impl Largest {
    /// The fewest that have the length together; none if too many would be needed.
    #[inline]
    pub(crate) fn needed(&self) -> &[u32] {
        &self.ids[..self.needed]
    }

    /// These and the next ones.
    #[inline]
    pub(crate) fn as_slice(&self) -> &[u32] {
        &self.ids[..self.count]
    }
}

impl<W: Word> FreeSet<W> {
    /// An empty set for a pool of this many granules.
    pub(crate) fn new(pool_granules: u64) -> Self {
        Self {
            bins: Bins::new(pool_granules),
            records: Chunks::new(),
            unused: NIL,
            count: 0,
            granules: 0,
            below: 0,
        }
    }

    #[inline]
    pub(crate) const fn granules(&self) -> u64 {
        self.granules
    }

    pub(crate) const fn count(&self) -> usize {
        self.count
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.bins.memory_bytes() + self.records.memory_bytes()
    }

    /// Makes room for this many extents in all.
    pub(crate) fn reserve(&mut self, extents: usize) {
        self.records.reserve(extents);
    }

    /// Makes it the set of a larger pool.
    pub(crate) fn grow(&mut self, pool_granules: u64) {
        self.bins.grow(pool_granules);
    }

    /// Every number of a free extent is below this.
    pub(crate) const fn numbers(&self) -> u32 {
        self.records.len() as u32
    }

    /// The free extent with a number, if there is one.
    pub(crate) fn get(&self, id: u32) -> Option<Extent> {
        let (offset, len) = (self.start(id), self.len(id));
        (len != 0).then_some(Extent { offset, len })
    }

    #[inline]
    pub(crate) fn start(&self, id: u32) -> u64 {
        self.records[id].start.get()
    }

    #[inline]
    pub(crate) fn len(&self, id: u32) -> u64 {
        self.records[id].len.get()
    }

    #[inline]
    pub(crate) fn link(&self, id: u32) -> u32 {
        self.records[id].link
    }

    /// All free extents with their numbers, in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, Extent)> + '_ {
        let extent = |record: &Record<W>| Extent {
            offset: record.start.get(),
            len: record.len.get(),
        };
        let all = (0..).zip(self.records.iter().map(extent));
        all.filter(|(_, extent)| extent.len != 0)
    }

    /// Whether it is known, without a search, that no free extent has this length.
    #[inline]
    pub(crate) const fn has_none(&self, len: u64) -> bool {
        len >= self.below
    }

    /// A free extent of at least this length, the smallest but for the width of a bin.
    #[inline]
    pub(crate) fn best_fit(&mut self, len: u64) -> Option<u32> {
        if self.has_none(len) {
            return None;
        }
        let found = self.search(len);
        if found.is_none() {
            self.below = len;
        }
        found
    }

    #[inline]
    fn search(&self, len: u64) -> Option<u32> {
        let own = bin_of(len);
        let mut bin = self.bins.first_from(own)?;
        if is_exact(bin) {
            return Some(self.bins.head(bin));
        }
        // The request's own bin holds smaller extents too, so it may not serve; all above do.
        if bin == own {
            let found = self.smallest(own, len, LOOK);
            if found.is_some() {
                return found;
            }
            match self.bins.first_from(own + 1) {
                Some(above) => bin = above,
                None => return self.smallest(own, len, usize::MAX),
            }
        }
        self.smallest(bin, len, LOOK)
    }

    /// The smallest extent of at least this length among the first few of a bin.
    #[inline]
    fn smallest(&self, bin: usize, len: u64, look: usize) -> Option<u32> {
        let (mut best, mut best_len) = (NIL, u64::MAX);
        let mut id = self.bins.head(bin);
        for _ in 0..look {
            if id == NIL {
                break;
            }
            let record = &self.records[id];
            let own = record.len.get();
            if own >= len && own < best_len {
                (best, best_len) = (id, own);
            }
            id = record.next;
        }
        (best != NIL).then_some(best)
    }

    /// The length of the largest free extent, 0 when there is none.
    pub(crate) fn largest(&self) -> u64 {
        let mut largest = 0;
        let mut id = self.bins.highest().map_or(NIL, |bin| self.bins.head(bin));
        while id != NIL {
            largest = largest.max(self.len(id));
            id = self.records[id].next;
        }
        largest
    }

    /// The largest free extent, but for the width of a bin.
    pub(crate) fn large(&self) -> Option<u32> {
        self.bins.highest().map(|bin| self.bins.head(bin))
    }

    /// The free extents from the largest down, but for the width of a bin, of which at most `max`
    /// have this length together.
    #[inline]
    pub(crate) fn largest_first(&self, len: u64, max: usize) -> Largest {
        let mut found = Largest {
            ids: [NIL; MAX_EXTENTS + BEYOND],
            count: 0,
            needed: 0,
        };
        let mut sum = 0;
        let mut next = self.bins.highest().map(|bin| (bin, self.bins.head(bin)));
        while let Some((_, id)) = next {
            found.ids[found.count] = id;
            found.count += 1;
            sum += self.len(id);
            if sum >= len {
                found.needed = found.count;
                break;
            }
            if found.count == max {
                break;
            }
            next = self.smaller(next);
        }
        if found.needed != 0
            && let Some((_, id)) = self.smaller(next)
        {
            found.ids[found.count] = id;
            found.count += 1;
        }
        found
    }

    /// Steps from a bin and an extent of it to the next smaller one.
    #[inline]
    fn smaller(&self, at: Option<(usize, u32)>) -> Option<(usize, u32)> {
        let (bin, id) = at?;
        let next = self.records[id].next;
        if next != NIL {
            return Some((bin, next));
        }
        let bin = self.bins.next_below(bin)?;
        Some((bin, self.bins.head(bin)))
    }

    #[inline]
    fn file(&mut self, id: u32, len: u64) {
        let next = self.bins.push(bin_of(len), id);
        if next != NIL {
            self.records[next].prev = id;
        }
        let record = &mut self.records[id];
        (record.next, record.prev) = (next, NIL);
        self.below = self.below.max(len + 1);
    }

    #[inline]
    fn unfile(&mut self, id: u32, len: u64) {
        let Record { next, prev, .. } = self.records[id];
        if prev == NIL {
            self.bins.pop(bin_of(len), next);
        } else {
            self.records[prev].next = next;
        }
        if next != NIL {
            self.records[next].prev = prev;
        }
    }

    /// Adds a free extent that touches no other.
    #[inline]
    pub(crate) fn insert(&mut self, start: u64, len: u64, link: u32) -> u32 {
        let record = Record {
            start: W::pack(start),
            len: W::pack(len),
            next: NIL,
            prev: NIL,
            link,
        };
        let mut id = self.unused;
        if id == NIL {
            id = self.records.len() as u32;
            self.records.push(record);
        } else {
            self.unused = self.records[id].next;
            self.records[id] = record;
        }
        self.granules += len;
        self.count += 1;
        self.file(id, len);
        id
    }

    /// Takes a free extent out.
    #[inline]
    pub(crate) fn remove(&mut self, id: u32) {
        let len = self.len(id);
        self.unfile(id, len);
        let record = &mut self.records[id];
        (record.len, record.next) = (W::pack(0), self.unused);
        self.unused = id;
        self.granules -= len;
        self.count -= 1;
    }

    /// Gives a free extent another start and length.
    #[inline]
    pub(crate) fn change(&mut self, id: u32, start: u64, len: u64) {
        let record = &mut self.records[id];
        let before = record.len.get();
        (record.start, record.len) = (W::pack(start), W::pack(len));
        self.granules = self.granules - before + len;
        if bin_of(before) == bin_of(len) {
            self.below = self.below.max(len + 1);
        } else {
            self.unfile(id, before);
            self.file(id, len);
        }
    }

    /// Compares the set with itself; see [`crate::Pool::check`].
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        let (mut count, mut granules) = (0, 0);
        for (bin, head) in self.bins.heads() {
            if self.bins.first_from(bin) != Some(bin) {
                return Err("the bitmap disagrees with a bin");
            }
            let (mut id, mut before) = (head, NIL);
            while id != NIL {
                let record = &self.records[id];
                let len = record.len.get();
                if bin_of(len) != bin || len >= self.below || record.prev != before {
                    return Err("a free extent is misfiled");
                }
                count += 1;
                granules += len;
                before = id;
                id = record.next;
            }
        }
        if count != self.iter().count() || count != self.count {
            return Err("free extents are in no bin");
        }
        if granules != self.granules {
            return Err("free granules are miscounted");
        }
        Ok(())
    }
}
