//! The live extents, by start.

use crate::table::Table;
use crate::word::Word;

/// Length by start, in granules. The slot of the extent that was freed last is kept, with a length
/// of zero, until the next change: a full pool frees and allocates the same start in turn, and
/// then touches one slot once.
#[derive(Debug, Clone)]
pub(crate) struct Live<W> {
    table: Table<W>,
    vacant: Option<usize>,
}

impl<W: Word> Live<W> {
    pub(crate) const fn new() -> Self {
        Self {
            table: Table::new(),
            vacant: None,
        }
    }

    #[inline]
    pub(crate) const fn len(&self) -> usize {
        self.table.len() - self.vacant.is_some() as usize
    }

    pub(crate) const fn memory_bytes(&self) -> usize {
        self.table.memory_bytes()
    }

    /// Makes room for this many extents in all.
    pub(crate) fn reserve(&mut self, extents: usize) {
        self.settle();
        self.table.reserve(extents);
    }

    /// Gives the vacant slot back. Slots move by this, and by nothing while there is a vacant one.
    #[inline]
    fn settle(&mut self) {
        if let Some(slot) = self.vacant.take() {
            self.table.remove_at(slot);
        }
    }

    #[inline]
    pub(crate) fn get(&self, start: u64) -> Option<u64> {
        self.table.get(start).filter(|&len| len != 0)
    }

    #[inline]
    pub(crate) fn insert(&mut self, start: u64, len: u64) {
        if let Some(slot) = self.vacant
            && self.table.key_at(slot) == start
        {
            self.table.set_at(slot, len);
            self.vacant = None;
            return;
        }
        self.settle();
        self.table.insert(start, len);
    }

    /// Takes out the extent that starts here and gives its length.
    #[inline]
    pub(crate) fn remove(&mut self, start: u64) -> Option<u64> {
        self.settle();
        let slot = self.table.slot_of(start)?;
        let len = self.table.value_at(slot);
        self.table.set_at(slot, 0);
        self.vacant = Some(slot);
        Some(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::word::mix;
    use alloc::collections::BTreeMap;

    #[test]
    fn a_vacant_slot_never_shows() {
        let (mut live, mut map, mut state) = (Live::<u32>::new(), BTreeMap::new(), 1);
        for step in 1..40_000_u64 {
            state = mix(state + step);
            let key = (state >> 20) % 900;
            if state.is_multiple_of(2) {
                live.insert(key, step);
                map.insert(key, step);
            } else {
                assert_eq!(live.remove(key), map.remove(&key));
                assert_eq!(live.get(key), None);
                assert_eq!(live.remove(key), None);
                // The very next insertion, half of the time, is of the vacant key.
                if state.is_multiple_of(3) {
                    live.insert(key, step);
                    map.insert(key, step);
                }
            }
            assert_eq!(live.len(), map.len());
        }
        live.reserve(5000);
        for key in 0..900 {
            assert_eq!(live.get(key), map.get(&key).copied());
        }
    }
}
