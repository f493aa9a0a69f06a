//! All extents in address order: who lies beside whom. An extent has a link from when it becomes
//! live until it merges with another free one, so that a free finds its neighbours without a
//! search.

use crate::bins::NIL;
use crate::chunks::Chunks;

/// Before the first extent and behind the last one.
pub(crate) const ENDS: u32 = 0;

#[derive(Debug, Clone, Copy)]
struct Link {
    prev: u32,
    /// Of a link that is not in use: another such.
    next: u32,
    /// The record of a free extent, [`NIL`] for a live one.
    free: u32,
}

/// A ring through all extents and [`ENDS`].
#[derive(Debug, Clone)]
pub(crate) struct Links {
    links: Chunks<Link>,
    unused: u32,
}

impl Links {
    pub(crate) fn new() -> Self {
        let ends = Link {
            prev: ENDS,
            next: ENDS,
            free: NIL,
        };
        let mut links = Chunks::new();
        links.push(ends);
        Self { links, unused: NIL }
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.links.memory_bytes()
    }

    /// Makes room for this many extents in all.
    pub(crate) fn reserve(&mut self, extents: usize) {
        self.links.reserve(extents.saturating_add(1));
    }

    #[inline]
    pub(crate) fn next(&self, id: u32) -> u32 {
        self.links[id].next
    }

    #[inline]
    pub(crate) fn prev(&self, id: u32) -> u32 {
        self.links[id].prev
    }

    /// The record of a free extent, [`NIL`] for a live one.
    #[inline]
    pub(crate) fn free(&self, id: u32) -> u32 {
        self.links[id].free
    }

    #[inline]
    pub(crate) fn set_free(&mut self, id: u32, free: u32) {
        self.links[id].free = free;
    }

    /// Links a live extent that lies right before another one, or before the end.
    #[inline]
    pub(crate) fn insert_before(&mut self, next: u32) -> u32 {
        let prev = self.prev(next);
        let link = Link {
            prev,
            next,
            free: NIL,
        };
        let id = self.unused;
        let id = if id == NIL {
            self.push(link)
        } else {
            self.unused = self.next(id);
            self.links[id] = link;
            id
        };
        self.links[prev].next = id;
        self.links[next].prev = id;
        id
    }

    fn push(&mut self, link: Link) -> u32 {
        self.links.push(link);
        (self.links.len() - 1) as u32
    }

    /// Takes an extent out of the ring.
    #[inline]
    pub(crate) fn remove(&mut self, id: u32) {
        let Link { prev, next, .. } = self.links[id];
        self.links[prev].next = next;
        self.links[next].prev = prev;
        self.links[id].next = self.unused;
        self.unused = id;
    }
}
