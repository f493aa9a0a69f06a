//! Objects in the order of their use, in constant time.

/// No slot.
const NONE: u32 = u32::MAX;

struct Link<T> {
    older: u32,
    newer: u32,
    /// None in slots that are not in use.
    object: Option<T>,
}

/// A list of objects, from the one used longest ago to the one used last.
pub(super) struct Lru<T> {
    links: Vec<Link<T>>,
    vacant: Vec<u32>,
    oldest: u32,
    newest: u32,
}

impl<T> Default for Lru<T> {
    fn default() -> Lru<T> {
        Lru {
            links: Vec::new(),
            vacant: Vec::new(),
            oldest: NONE,
            newest: NONE,
        }
    }
}

impl<T: Copy> Lru<T> {
    /// Slots that are or were in use, numbered from zero.
    pub(super) fn slots(&self) -> usize {
        self.links.len()
    }

    /// Puts an object in as the newest and answers its slot.
    pub(super) fn insert(&mut self, object: T) -> u32 {
        let link = Link {
            older: NONE,
            newer: NONE,
            object: Some(object),
        };
        let slot = match self.vacant.pop() {
            Some(slot) => {
                self.links[slot as usize] = link;
                slot
            }
            None => {
                self.links.push(link);
                self.links.len() as u32 - 1
            }
        };
        self.append(slot);
        slot
    }

    /// What is in a slot, if anything is.
    pub(super) fn get(&self, slot: u32) -> Option<T> {
        self.links[slot as usize].object
    }

    /// Makes an object the newest; nothing in a slot that is not in use.
    pub(super) fn touch(&mut self, slot: u32) {
        if self.links[slot as usize].object.is_some() && slot != self.newest {
            self.unlink(slot);
            self.append(slot);
        }
    }

    /// Takes the oldest object out.
    pub(super) fn take_oldest(&mut self) -> Option<T> {
        let slot = self.oldest;
        if slot == NONE {
            return None;
        }
        self.unlink(slot);
        self.vacant.push(slot);
        self.links[slot as usize].object.take()
    }

    fn append(&mut self, slot: u32) {
        let link = &mut self.links[slot as usize];
        (link.older, link.newer) = (self.newest, NONE);
        match self.newest {
            NONE => self.oldest = slot,
            newest => self.links[newest as usize].newer = slot,
        }
        self.newest = slot;
    }

    fn unlink(&mut self, slot: u32) {
        let Link { older, newer, .. } = self.links[slot as usize];
        match older {
            NONE => self.oldest = newer,
            older => self.links[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.links[newer as usize].older = older,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_longest_ago_goes_first() {
        let mut lru = Lru::default();
        let slots: Vec<u32> = (0..5).map(|object| lru.insert(object)).collect();
        lru.touch(slots[0]);
        lru.touch(slots[4]);
        lru.touch(slots[2]);
        assert_eq!(lru.take_oldest(), Some(1));
        assert_eq!((lru.insert(5), lru.slots()), (slots[1], 5));
        assert_eq!(lru.get(slots[3]), Some(3));
        let rest: Vec<i32> = std::iter::from_fn(|| lru.take_oldest()).collect();
        assert_eq!(rest, [3, 0, 4, 2, 5]);
        lru.touch(slots[3]);
        assert_eq!(lru.take_oldest(), None);
    }
}
