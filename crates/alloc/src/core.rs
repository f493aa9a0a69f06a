//! The allocator in granules, for either width of number. [`crate::Pool`] puts bytes, rounding and
//! errors around it.

use crate::bins::NIL;
use crate::extents::{Extent, Extents, Hint};
use crate::free_set::FreeSet;
use crate::links::{ENDS, Links};
use crate::live_set::{Live, LiveSet, Place, SPARE};
use crate::word::Word;
use alloc::vec::Vec;

/// All extents of a pool: by address, the live ones by start, the free ones by size.
#[derive(Debug, Clone)]
pub(crate) struct Core<W> {
    links: Links,
    /// With the freed extent.
    live: LiveSet<W>,
    free: FreeSet<W>,
    freed: Freed,
    /// The size of the pool.
    granules: u64,
}

/// The extent that was freed last, neither merged nor filed yet. A full pool mostly allocates what
/// it has just freed, and then looks at one slot of one table; whatever else happens settles it
/// first, and what is asked of the pool is answered as if it were merged.
#[derive(Debug, Clone, Copy)]
struct Freed {
    start: u64,
    /// 0 if there is none.
    len: u64,
    link: u32,
    /// Where it is among the live extents.
    place: Place,
}

const NONE: Freed = Freed {
    start: 0,
    len: 0,
    link: ENDS,
    place: Place::NONE,
};

/// Steps from extent to extent by address.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Walk {
    link: u32,
    at: u64,
}

impl<W: Word> Core<W> {
    fn empty(granules: u64) -> Self {
        Self {
            links: Links::new(),
            live: LiveSet::new(),
            free: FreeSet::new(granules),
            freed: NONE,
            granules,
        }
    }

    /// A pool in which everything is free.
    pub(crate) fn new(granules: u64) -> Self {
        let mut core = Self::empty(granules);
        core.append_free(0, granules);
        core
    }

    /// A pool with these live extents, which are in order and do not overlap.
    pub(crate) fn rebuild(
        granules: u64,
        live: impl ExactSizeIterator<Item = Extent> + Clone,
    ) -> Self {
        let mut core = Self::empty(granules);
        let (mut at, mut free) = (0, 0);
        for extent in live.clone() {
            free += usize::from(extent.offset > at);
            at = extent.offset + extent.len;
        }
        free += usize::from(granules > at);
        core.links.reserve(live.len() + live.len() / SPARE + free);
        core.free.reserve(free);
        let mut links = Vec::with_capacity(live.len());
        at = 0;
        for Extent { offset, len } in live.clone() {
            if offset > at {
                core.append_free(at, offset - at);
            }
            links.push(core.links.insert_before(ENDS));
            at = offset + len;
        }
        if granules > at {
            core.append_free(at, granules - at);
        }
        let linked = live.zip(&links).map(|(extent, &link)| {
            let len = extent.len;
            (extent.offset, Live { len, link })
        });
        core.live.fill(links.len(), linked);
        core
    }

    /// Adds a free extent behind all others.
    fn append_free(&mut self, start: u64, len: u64) {
        let link = self.links.insert_before(ENDS);
        let id = self.free.insert(start, len, link);
        self.links.set_free(link, id);
    }

    pub(crate) const fn granules(&self) -> u64 {
        self.granules
    }

    /// Makes room for this many extents in all.
    pub(crate) fn reserve(&mut self, live: usize, free: usize) {
        self.settle();
        self.live.reserve(live);
        self.free.reserve(free);
        self.links.reserve(live.saturating_add(free));
    }

    /// Merges the freed extent with the free ones beside it and files it.
    #[inline]
    fn settle(&mut self) {
        if self.freed.len != 0 {
            self.settle_freed();
        }
    }

    #[inline(never)]
    fn settle_freed(&mut self) {
        let Freed {
            start,
            len,
            link,
            place,
        } = core::mem::replace(&mut self.freed, NONE);
        self.live.remove_at(place);
        let (prev, next) = (self.links.prev(link), self.links.next(link));
        let (left, right) = (self.links.free(prev), self.links.free(next));
        if left != NIL {
            self.links.remove(link);
            let mut len = self.free.len(left) + len;
            if right != NIL {
                len += self.free.len(right);
                self.links.remove(next);
                self.free.remove(right);
            }
            self.free.change(left, self.free.start(left), len);
        } else if right != NIL {
            self.links.remove(link);
            self.free.change(right, start, self.free.len(right) + len);
        } else {
            let id = self.free.insert(start, len, link);
            self.links.set_free(link, id);
        }
    }

    /// The common cases, which are a few instructions: a full pool has no room, or just the hole
    /// that was made for this.
    #[inline]
    pub(crate) fn allocate(&mut self, len: u64) -> Option<u64> {
        if self.freed.len == len {
            self.freed.len = 0;
            return Some(self.freed.start);
        }
        if self.freed.len == 0 && self.free.has_none(len) {
            return None;
        }
        self.allocate_filed(len)
    }

    #[inline(never)]
    fn allocate_filed(&mut self, len: u64) -> Option<u64> {
        self.settle();
        let id = self.free.best_fit(len)?;
        Some(self.take(id, len))
    }

    /// Like `allocate`, but where the hint says, if it can. The hint is in granules.
    pub(crate) fn allocate_near(&mut self, len: u64, hint: Hint) -> Option<u64> {
        self.settle();
        if let Some(live) = hint.behind.and_then(|near| self.live.get(near)) {
            let behind = self.links.free(self.links.next(live.link));
            if behind != NIL && self.free.len(behind) >= len {
                return Some(self.take(behind, len));
            }
        }
        if hint.followed_by != 0 {
            let all = len.saturating_add(hint.followed_by);
            let roomy = self.free.best_fit(all).or_else(|| self.free.large());
            if let Some(id) = roomy.filter(|&id| self.free.len(id) >= len) {
                return Some(self.take(id, len));
            }
        }
        self.allocate(len)
    }

    /// Takes the first granules of a free extent, all of them or a part. Gives their start.
    #[inline]
    fn take(&mut self, id: u32, len: u64) -> u64 {
        let (start, whole) = (self.free.start(id), self.free.len(id));
        let mut link = self.free.link(id);
        if len == whole {
            self.free.remove(id);
            self.links.set_free(link, NIL);
        } else {
            link = self.links.insert_before(link);
            self.free.change(id, start + len, whole - len);
        }
        self.live.insert(start, Live { len, link });
        start
    }

    /// Makes the pool larger; what is new is free.
    pub(crate) fn grow(&mut self, granules: u64) {
        self.settle();
        self.free.grow(granules);
        let (start, more) = (self.granules, granules - self.granules);
        let last = self.links.free(self.links.prev(ENDS));
        if last == NIL {
            self.append_free(start, more);
        } else {
            let (start, len) = (self.free.start(last), self.free.len(last));
            self.free.change(last, start, len + more);
        }
        self.granules = granules;
    }

    /// Looks at the free extents with `count` numbers, and makes live what `part` answers of each,
    /// one part behind the other until it answers none. Gives the first of the next numbers.
    pub(crate) fn carve(
        &mut self,
        from: u32,
        count: u32,
        mut part: impl FnMut(Extent) -> Option<Extent>,
    ) -> Option<u32> {
        self.settle();
        let end = self.free.numbers().min(from.saturating_add(count));
        for id in from..end {
            while let Some(part) = self.free.get(id).and_then(&mut part) {
                self.split(id, part.offset);
                self.take(id, part.len);
            }
        }
        (end < self.free.numbers()).then_some(end)
    }

    /// Leaves a free extent what lies from a position on; what lies before gets another number.
    fn split(&mut self, id: u32, at: u64) {
        let (start, len) = (self.free.start(id), self.free.len(id));
        if at > start {
            let link = self.links.insert_before(self.free.link(id));
            let before = self.free.insert(start, at - start, link);
            self.links.set_free(link, before);
            self.free.change(id, at, len - (at - start));
        }
    }

    /// One extent if one fits, else as few as possible. Nothing is taken unless at most `max`
    /// suffice. They are in granules. False if there is no room.
    #[inline]
    pub(crate) fn allocate_scattered(
        &mut self,
        len: u64,
        max: usize,
        hint: Hint,
        pieces: &mut Extents,
    ) -> bool {
        let one = if hint == Hint::default() {
            self.allocate(len)
        } else {
            self.allocate_near(len, hint)
        };
        if let Some(offset) = one {
            pieces.push(Extent { offset, len });
            return true;
        }
        max > 1 && self.free.granules() >= len && self.scatter(len, max, pieces)
    }

    /// An allocation for which no free extent is large enough.
    #[inline(never)]
    fn scatter(&mut self, len: u64, max: usize, pieces: &mut Extents) -> bool {
        let largest = self.free.largest_first(len, max);
        let [whole @ .., _, _] = largest.needed() else {
            return false;
        };
        let mut rest = len;
        for &id in whole {
            rest -= self.take_whole(id, pieces);
        }
        // One more whole and a part of another, unless they were in a bin with larger ones, one of
        // which fits now.
        let (first, last) = match self.free.best_fit(rest) {
            Some(id) => (None, id),
            None => self.best_pair(&largest.as_slice()[whole.len()..], rest),
        };
        if let Some(id) = first {
            rest -= self.take_whole(id, pieces);
        }
        // Payload order follows the addresses, except for the last piece: what remains free behind
        // it is where the next block of the same prompt can continue.
        pieces.sort();
        let offset = self.take(last, rest);
        pieces.push(Extent { offset, len: rest });
        true
    }

    fn take_whole(&mut self, id: u32, pieces: &mut Extents) -> u64 {
        let len = self.free.len(id);
        let offset = self.take(id, len);
        pieces.push(Extent { offset, len });
        len
    }

    /// Two free extents for the rest of an allocation, the second of which fits what the first
    /// leaves: with one of the largest as the first, the pair that leaves least. Each is shorter
    /// than the rest, and the first two suffice.
    fn best_pair(&mut self, largest: &[u32], rest: u64) -> (Option<u32>, u32) {
        // Of pairs that leave about as much, the one that spares the larger extents.
        let cost = |first, second| first + first / 4 + second;
        let mut best = (Some(largest[0]), largest[1]);
        let mut least = cost(self.free.len(largest[0]), self.free.len(largest[1]));
        for &first in largest {
            let len = self.free.len(first);
            if let Some(second) = self.free.best_fit(rest - len)
                && second != first
                && self.free.len(second) <= len
                && cost(len, self.free.len(second)) < least
            {
                least = cost(len, self.free.len(second));
                best = (Some(first), second);
            }
        }
        best
    }

    /// Frees the live extent that starts here; false if there is none.
    #[inline]
    pub(crate) fn free(&mut self, start: u64) -> bool {
        self.settle();
        let place = self.live.find(start);
        let Some(Live { len, link }) = self.live.at(place) else {
            return false;
        };
        self.freed = Freed {
            start,
            len,
            link,
            place,
        };
        true
    }

    /// The length of the live extent that starts here.
    #[inline]
    pub(crate) fn live_len(&self, start: u64) -> Option<u64> {
        let live = self.live.get(start)?;
        (!self.is_freed(start)).then_some(live.len)
    }

    /// Whether the extent that starts here is the freed one.
    #[inline]
    const fn is_freed(&self, start: u64) -> bool {
        self.freed.len != 0 && self.freed.start == start
    }

    #[inline]
    pub(crate) const fn live_count(&self) -> usize {
        self.live.len() - (self.freed.len != 0) as usize
    }

    #[inline]
    pub(crate) const fn free_granules(&self) -> u64 {
        self.free.granules() + self.freed.len
    }

    /// The freed extent as it will be, if there is one: merged with the free ones beside it, whose
    /// records are given too.
    fn merged(&self) -> Option<(Extent, [u32; 2])> {
        let Freed {
            start, len, link, ..
        } = self.freed;
        if len == 0 {
            return None;
        }
        let mut whole = Extent { offset: start, len };
        let beside = [self.links.prev(link), self.links.next(link)].map(|link| {
            let id = self.links.free(link);
            if id != NIL {
                whole.offset = whole.offset.min(self.free.start(id));
                whole.len += self.free.len(id);
            }
            id
        });
        Some((whole, beside))
    }

    /// All free extents, in no order.
    pub(crate) fn free_extents(&self) -> impl Iterator<Item = Extent> + '_ {
        let merged = self.merged();
        let gone = merged.map_or([NIL; 2], |(_, beside)| beside);
        let filed = self.free.iter().filter(move |(id, _)| !gone.contains(id));
        let whole = merged.map(|(whole, _)| whole);
        filed.map(|(_, extent)| extent).chain(whole)
    }

    /// The length of the largest free extent, 0 when there is none.
    pub(crate) fn largest(&self) -> u64 {
        let merged = self.merged().map_or(0, |(whole, _)| whole.len);
        merged.max(self.free.largest())
    }

    /// A walk from the first extent.
    pub(crate) fn walk(&self) -> Walk {
        Walk {
            link: self.links.next(ENDS),
            at: 0,
        }
    }

    /// The next live extent of a walk.
    pub(crate) fn next_live(&self, walk: &mut Walk) -> Option<Extent> {
        while walk.link != ENDS {
            let (len, is_live) = self.linked(*walk)?;
            let extent = Extent {
                offset: walk.at,
                len,
            };
            walk.link = self.links.next(walk.link);
            walk.at += len;
            if is_live {
                return Some(extent);
            }
        }
        None
    }

    /// The extent of one link: its length, and whether it is live.
    fn linked(&self, walk: Walk) -> Option<(u64, bool)> {
        let free = self.links.free(walk.link);
        if free != NIL {
            return Some((self.free.len(free), false));
        }
        let live = self.live.get(walk.at)?;
        Some((live.len, !self.is_freed(walk.at)))
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.links.memory_bytes() + self.live.memory_bytes() + self.free.memory_bytes()
    }

    /// Compares every structure with the others; see [`crate::Pool::check`].
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        self.free.check()?;
        let (mut at, mut live, mut free, mut was_free) = (0, 0, 0, false);
        let (mut link, mut before) = (self.links.next(ENDS), ENDS);
        while link != ENDS {
            if self.links.prev(link) != before {
                return Err("an extent does not know the one before it");
            }
            let record = self.links.free(link);
            let is_free = record != NIL;
            let Some((len, _)) = self.linked(Walk { link, at }) else {
                return Err("a position is neither live nor free");
            };
            if len == 0 {
                return Err("an extent is empty");
            }
            if is_free && (self.free.start(record), self.free.link(record)) != (at, link) {
                return Err("a free extent is elsewhere");
            }
            if !is_free && self.live.get(at).map(|live| live.link) != Some(link) {
                return Err("a live extent is elsewhere");
            }
            if is_free && was_free {
                return Err("two free extents touch");
            }
            was_free = is_free;
            live += usize::from(!is_free);
            free += usize::from(is_free);
            at += len;
            before = link;
            link = self.links.next(link);
        }
        if at != self.granules {
            return Err("the extents are not the pool");
        }
        if (live, free) != (self.live.len(), self.free.count()) {
            return Err("extents are recorded that no walk meets");
        }
        Ok(())
    }
}
