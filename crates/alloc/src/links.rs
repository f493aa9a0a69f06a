//! All extents in address order: who lies beside whom. An extent has a link from when it becomes
//! live until it merges with another free one, so that a free finds its neighbours without a
//! search.

use crate::bins::NIL;
use alloc::{vec, vec::Vec};

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
    links: Vec<Link>,
    unused: u32,
}

impl Links {
    pub(crate) fn new() -> Self {
        let ends = Link {
            prev: ENDS,
            next: ENDS,
            free: NIL,
        };
        Self {
            links: vec![ends],
            unused: NIL,
        }
    }

    pub(crate) const fn memory_bytes(&self) -> usize {
        self.links.capacity() * size_of::<Link>()
    }

    /// Makes room for this many extents in all.
    pub(crate) fn reserve(&mut self, extents: usize) {
        let more = (extents + 1).saturating_sub(self.links.len());
        self.links.reserve_exact(more);
    }

    #[inline]
    pub(crate) fn next(&self, id: u32) -> u32 {
        self.links[id as usize].next
    }

    #[inline]
    pub(crate) fn prev(&self, id: u32) -> u32 {
        self.links[id as usize].prev
    }

    /// The record of a free extent, [`NIL`] for a live one.
    #[inline]
    pub(crate) fn free(&self, id: u32) -> u32 {
        self.links[id as usize].free
    }

    #[inline]
    pub(crate) fn set_free(&mut self, id: u32, free: u32) {
        self.links[id as usize].free = free;
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
            self.links[id as usize] = link;
            id
        };
        self.links[prev as usize].next = id;
        self.links[next as usize].prev = id;
        id
    }

    fn push(&mut self, link: Link) -> u32 {
        if self.links.len() == self.links.capacity() {
            // By an eighth: doubling would leave up to twice the memory unused.
            self.links.reserve_exact(self.links.len() / 8 + 16);
        }
        self.links.push(link);
        (self.links.len() - 1) as u32
    }

    /// Takes an extent out of the ring.
    #[inline]
    pub(crate) fn remove(&mut self, id: u32) {
        let Link { prev, next, .. } = self.links[id as usize];
        self.links[prev as usize].next = next;
        self.links[next as usize].prev = prev;
        self.links[id as usize].next = self.unused;
        self.unused = id;
    }
}
