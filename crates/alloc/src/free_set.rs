//! The free extents: filed by size for allocation, and by both ends for merging.

use crate::bins::bin_of;
use crate::bitmap::Bitmap;
use crate::table::Table;
use crate::tree::{NIL, Nodes};
use crate::word::Word;
use alloc::{vec, vec::Vec};

/// All free extents of a pool, in granules. No two of them touch, which is why one table serves
/// starts and ends: a position is at most one of the two, of at most one extent.
///
/// The extent that was freed last, if it touched no other, is *fresh*: it takes part in everything
/// but is filed only when the next one comes. A full pool mostly allocates what it has just freed.
#[derive(Debug, Clone)]
pub(crate) struct FreeSet<W> {
    bitmap: Bitmap,
    roots: Vec<u32>,
    nodes: Nodes<W>,
    edges: Table<W>,
    granules: u64,
    /// Empty if there is none.
    fresh: Fresh,
}

#[derive(Debug, Clone, Copy)]
struct Fresh {
    start: u64,
    len: u64,
}

const NOT_FRESH: Fresh = Fresh { start: 0, len: 0 };

/// Stands for the fresh extent where others have the number of their node. Fewer nodes than this
/// exist, because the pool bounds its live extents.
const FRESH: u32 = NIL - 1;

impl<W: Word> FreeSet<W> {
    /// An empty set for a pool of this many granules.
    pub(crate) fn new(pool_granules: u64) -> Self {
        Self {
            bitmap: Bitmap::new(),
            roots: vec![NIL; bin_of(pool_granules) + 1],
            nodes: Nodes::new(),
            edges: Table::new(),
            granules: 0,
            fresh: NOT_FRESH,
        }
    }

    #[inline]
    pub(crate) const fn granules(&self) -> u64 {
        self.granules
    }

    pub(crate) const fn count(&self) -> usize {
        self.edges.len() / 2 + (self.fresh.len != 0) as usize
    }

    pub(crate) const fn memory_bytes(&self) -> usize {
        self.roots.capacity() * size_of::<u32>()
            + self.nodes.memory_bytes()
            + self.edges.memory_bytes()
    }

    pub(crate) fn reserve(&mut self, extents: usize) {
        self.nodes.reserve(extents);
        self.edges.reserve(extents.saturating_mul(2));
    }

    /// All free extents as (start, length), in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let fresh = (self.fresh.len != 0).then_some((self.fresh.start, self.fresh.len));
        self.nodes.iter().chain(fresh)
    }

    #[inline]
    pub(crate) fn len(&self, id: u32) -> u64 {
        if id == FRESH {
            self.fresh.len
        } else {
            self.nodes.len(id)
        }
    }

    #[inline]
    fn end(&self, id: u32) -> u64 {
        self.nodes.start(id) + self.nodes.len(id)
    }

    /// The free extent that starts at this position.
    #[inline]
    pub(crate) fn starting_at(&self, start: u64) -> Option<u32> {
        if self.fresh.len != 0 && self.fresh.start == start {
            return Some(FRESH);
        }
        self.filed_at(start)
    }

    /// The filed extent that starts at this position.
    #[inline]
    fn filed_at(&self, start: u64) -> Option<u32> {
        let id = self.edges.get(start)? as u32;
        (self.nodes.start(id) == start).then_some(id)
    }

    /// The filed extent that ends at this position.
    #[inline]
    fn filed_before(&self, end: u64) -> Option<u32> {
        let id = self.edges.get(end)? as u32;
        (self.nodes.start(id) != end).then_some(id)
    }

    /// The smallest free extent of at least this length, the lowest of equals.
    #[inline]
    pub(crate) fn best_fit(&self, len: u64) -> Option<u32> {
        let filed = self.best_filed(len);
        if self.fresh.len < len {
            return filed;
        }
        match filed {
            Some(id) if self.nodes.key(id) < (self.fresh.len, self.fresh.start) => Some(id),
            _ => Some(FRESH),
        }
    }

    #[inline]
    fn best_filed(&self, len: u64) -> Option<u32> {
        let own = bin_of(len);
        // The request's own bin holds smaller extents too, so it may not serve; all above do.
        let id = self.nodes.at_least(*self.roots.get(own)?, len);
        if id != NIL {
            return Some(id);
        }
        let above = self.bitmap.next_above(own)?;
        Some(self.nodes.at_least(self.roots[above], 0))
    }

    /// The length of the largest free extent, 0 when there is none.
    #[inline]
    pub(crate) fn largest(&self) -> u64 {
        let filed = self.bitmap.highest();
        let filed = filed.map_or(0, |bin| self.nodes.len(self.nodes.last(self.roots[bin])));
        filed.max(self.fresh.len)
    }

    /// Visits free extents from the largest down, the highest of equals first, until the visitor
    /// says false.
    pub(crate) fn largest_first(&self, mut visit: impl FnMut(u32) -> bool) {
        let mut fresh = (self.fresh.len != 0).then_some((self.fresh.len, self.fresh.start));
        let mut in_order = |id| {
            fresh
                .take_if(|fresh| *fresh > self.nodes.key(id))
                .is_none_or(|_| visit(FRESH))
                && visit(id)
        };
        let mut next = self.bitmap.highest();
        while let Some(bin) = next {
            if !self.nodes.descend(self.roots[bin], &mut in_order) {
                return;
            }
            next = self.bitmap.next_below(bin);
        }
        if fresh.is_some() {
            visit(FRESH);
        }
    }

    #[inline]
    fn file(&mut self, id: u32) {
        let bin = bin_of(self.nodes.len(id));
        self.nodes.insert(&mut self.roots[bin], id);
        self.bitmap.set(bin);
    }

    #[inline]
    fn unfile(&mut self, id: u32) {
        let bin = bin_of(self.nodes.len(id));
        self.nodes.remove(&mut self.roots[bin], id);
        if self.roots[bin] == NIL {
            self.bitmap.clear(bin);
        }
    }

    /// Takes the first granules of a free extent, all of them or a part. Gives their start.
    #[inline]
    pub(crate) fn take(&mut self, id: u32, len: u64) -> u64 {
        self.granules -= len;
        if id == FRESH {
            let start = self.fresh.start;
            self.fresh = Fresh {
                start: start + len,
                len: self.fresh.len - len,
            };
            return start;
        }
        let (start, whole) = (self.nodes.start(id), self.nodes.len(id));
        self.unfile(id);
        self.edges.remove(start);
        if len == whole {
            self.edges.remove(start + whole);
            self.nodes.discard(id);
        } else {
            self.nodes.update(id, start + len, whole - len);
            self.edges.insert(start + len, u64::from(id));
            self.file(id);
        }
        start
    }

    /// Adds a free extent and merges it with the ones that it touches.
    #[inline]
    pub(crate) fn give(&mut self, mut start: u64, len: u64) {
        self.granules += len;
        let mut end = start + len;
        let fresh = self.fresh;
        if fresh.len != 0 {
            if fresh.start + fresh.len == start {
                start = fresh.start;
                self.fresh = NOT_FRESH;
            } else if fresh.start == end {
                end += fresh.len;
                self.fresh = NOT_FRESH;
            }
        }
        match (self.filed_before(start), self.filed_at(end)) {
            (None, None) => {
                let before = core::mem::replace(
                    &mut self.fresh,
                    Fresh {
                        start,
                        len: end - start,
                    },
                );
                if before.len != 0 {
                    self.add(before);
                }
            }
            (Some(left), None) => {
                self.edges.remove(start);
                self.edges.insert(end, u64::from(left));
                self.grow(left, self.nodes.start(left), end);
            }
            (None, Some(right)) => {
                self.edges.remove(end);
                self.edges.insert(start, u64::from(right));
                self.grow(right, start, self.end(right));
            }
            (Some(left), Some(right)) => {
                let right_end = self.end(right);
                self.edges.remove(start);
                self.edges.remove(end);
                self.edges.insert(right_end, u64::from(left));
                self.unfile(right);
                self.nodes.discard(right);
                self.grow(left, self.nodes.start(left), right_end);
            }
        }
    }

    /// Files an extent that is fresh no longer.
    fn add(&mut self, Fresh { start, len }: Fresh) {
        let id = self.nodes.create(start, len);
        self.edges.insert(start, u64::from(id));
        self.edges.insert(start + len, u64::from(id));
        self.file(id);
    }

    #[inline]
    fn grow(&mut self, id: u32, start: u64, end: u64) {
        self.unfile(id);
        self.nodes.update(id, start, end - start);
        self.file(id);
    }

    /// Fills an empty set from extents as (length, start) in that order; none of them touch.
    pub(crate) fn fill(&mut self, extents: &[(u64, u64)]) {
        self.reserve(extents.len());
        let mut spine = Vec::new();
        for bin in extents.chunk_by(|a, b| bin_of(a.0) == bin_of(b.0)) {
            let index = bin_of(bin[0].0);
            let mut ids = bin.iter();
            let edges = &mut self.edges;
            self.roots[index] = self.nodes.build(
                bin.iter().map(|&(len, start)| (start, len)),
                &mut spine,
                |id| {
                    if let Some(&(len, start)) = ids.next() {
                        edges.insert(start, u64::from(id));
                        edges.insert(start + len, u64::from(id));
                    }
                },
            );
            self.bitmap.set(index);
            self.granules += bin.iter().map(|extent| extent.0).sum::<u64>();
        }
    }

    /// Compares the set with itself; see [`crate::Pool::check`].
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        let (mut nodes, mut granules) = (0, 0);
        for (bin, &root) in self.roots.iter().enumerate() {
            if self.bitmap.is_set(bin) != (root != NIL) {
                return Err("the bitmap disagrees with a bin");
            }
            if !self.nodes.is_heap(root) {
                return Err("a bin's tree is out of balance");
            }
            let mut above = (u64::MAX, u64::MAX);
            let sound = self.nodes.descend(root, &mut |id| {
                let (start, len) = (self.nodes.start(id), self.nodes.len(id));
                let ordered = (len, start) < above;
                above = (len, start);
                nodes += 1;
                granules += len;
                ordered
                    && bin_of(len) == bin
                    && self.filed_at(start) == Some(id)
                    && self.filed_before(start + len) == Some(id)
            });
            if !sound {
                return Err("a free extent is misfiled");
            }
        }
        if nodes != self.nodes.iter().count() || nodes * 2 != self.edges.len() {
            return Err("free extents and their edges differ in number");
        }
        if granules + self.fresh.len != self.granules {
            return Err("free granules are miscounted");
        }
        Ok(())
    }
}
