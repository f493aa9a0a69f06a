//! A list of numbered items that grows without moving what it holds.

use alloc::vec::Vec;
use core::ops::{Index, IndexMut};

/// Items to a chunk: the most that one step moves, about a megabyte. A pool whose lists fit one is
/// the faster, and to begin another moves nothing.
const CHUNK: usize = 1 << 16;

/// Items in chunks, so that adding one takes no longer the more there are.
#[derive(Debug, Clone)]
pub(crate) struct Chunks<T> {
    /// The first chunk while it is the only one, else empty: what finds no item here looks for it
    /// in the chunks, and the processor can guess which it will be.
    one: Vec<T>,
    /// All chunks, once they are several.
    more: Vec<Vec<T>>,
    len: usize,
}

impl<T> Chunks<T> {
    pub(crate) const fn new() -> Self {
        Self {
            one: Vec::new(),
            more: Vec::new(),
            len: 0,
        }
    }

    #[inline]
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// The bytes that the chunks occupy.
    pub(crate) fn memory_bytes(&self) -> usize {
        let chunks = self.more.iter().chain([&self.one]);
        let items: usize = chunks.map(Vec::capacity).sum();
        items * size_of::<T>() + self.more.capacity() * size_of::<Vec<T>>()
    }

    /// All items, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.one.iter().chain(self.more.iter().flatten())
    }

    #[inline]
    pub(crate) fn push(&mut self, item: T) {
        let chunk = self.chunk(self.len);
        if chunk.is_none_or(|chunk| chunk.len() == chunk.capacity()) {
            self.grow();
        }
        if let Some(chunk) = self.chunk(self.len) {
            chunk.push(item);
            self.len += 1;
        }
    }

    /// The chunk of an item, if it has been made.
    #[inline]
    fn chunk(&mut self, index: usize) -> Option<&mut Vec<T>> {
        if self.more.is_empty() {
            (index < CHUNK).then_some(&mut self.one)
        } else {
            self.more.get_mut(index / CHUNK)
        }
    }

    #[cold]
    fn grow(&mut self) {
        // By a sixteenth: doubling would leave up to twice the memory unused.
        let some = self.len + self.len / 16 + 16;
        self.reserve(some.min((self.len / CHUNK + 1) * CHUNK));
    }

    /// Makes room for this many items in all.
    pub(crate) fn reserve(&mut self, items: usize) {
        if items > CHUNK && self.more.is_empty() {
            self.more.push(core::mem::take(&mut self.one));
        }
        let chunks = items.div_ceil(CHUNK);
        if self.more.is_empty() {
            reserve(&mut self.one, items);
        } else {
            self.more.resize_with(chunks.max(self.more.len()), Vec::new);
            for (index, chunk) in self.more[..chunks].iter_mut().enumerate() {
                reserve(chunk, (items - index * CHUNK).min(CHUNK));
            }
        }
    }
}

/// Makes room for this many items in all.
fn reserve<T>(chunk: &mut Vec<T>, items: usize) {
    chunk.reserve_exact(items.saturating_sub(chunk.len()));
}

impl<T> Index<u32> for Chunks<T> {
    type Output = T;

    #[inline]
    fn index(&self, index: u32) -> &T {
        let index = index as usize;
        match self.one.get(index) {
            Some(item) => item,
            None => &self.more[index / CHUNK][index % CHUNK],
        }
    }
}

impl<T> IndexMut<u32> for Chunks<T> {
    #[inline]
    fn index_mut(&mut self, index: u32) -> &mut T {
        let index = index as usize;
        match self.one.get_mut(index) {
            Some(item) => item,
            None => &mut self.more[index / CHUNK][index % CHUNK],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_stay_where_they_are_however_many_come() {
        let (mut chunks, mut room) = (Chunks::new(), 0);
        let mut first: Option<*const u32> = None;
        for item in 0..20 * CHUNK as u32 {
            chunks.push(item);
            let all = chunks.memory_bytes();
            assert!(all <= room + CHUNK * size_of::<u32>() + 1024, "{item}");
            room = all;
            if item as usize >= CHUNK {
                let here: *const u32 = &raw const chunks[0];
                assert_eq!(here, *first.get_or_insert(here));
            }
        }
        assert_eq!(chunks.len(), 20 * CHUNK);
        assert!(room < chunks.len() * size_of::<u32>() * 17 / 16 + 1024);
        chunks[8200] += 1;
        let changed = |item| item + u32::from(item == 8200);
        assert!(
            chunks
                .iter()
                .copied()
                .eq((0..20 * CHUNK as u32).map(changed))
        );
        assert_eq!(chunks[9000], 9000);
    }

    #[test]
    fn reserved_room_is_enough_and_all() {
        for items in [1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 3] {
            let mut chunks = Chunks::new();
            chunks.reserve(items);
            let room = chunks.memory_bytes();
            while chunks.len() < items {
                chunks.push(7);
            }
            assert_eq!(chunks.memory_bytes(), room, "{items}");
            chunks.push(8);
            assert_eq!(chunks[items as u32], 8);
        }
    }
}
