//! Namespaces by small numbers.

use std::collections::HashMap;

use crate::key::NamespaceId;

/// Namespaces by small numbers, so that an entry holds four bytes for its namespace. A number that
/// nothing bears any more is another namespace's later: there are never many more of them than
/// there are blocks. Apart from what is beside their lock, which all readers take.
#[repr(align(128))]
pub(crate) struct Namespaces {
    ids: Vec<NamespaceId>,
    numbers: HashMap<NamespaceId, u32>,
    /// Numbers that no namespace has.
    free: Vec<u32>,
    /// How many there may be before those without a use are looked for.
    limit: usize,
}

/// So many namespaces cost nothing to speak of.
const NAMESPACES: usize = 4096;

impl Default for Namespaces {
    fn default() -> Namespaces {
        Namespaces {
            ids: Vec::new(),
            numbers: HashMap::new(),
            free: Vec::new(),
            limit: NAMESPACES,
        }
    }
}

impl Namespaces {
    pub(crate) fn number(&self, id: NamespaceId) -> Option<u32> {
        self.numbers.get(&id).copied()
    }

    /// The number of a namespace, one that is free where it has none yet. It stays this one's as
    /// long as it `is_used`, and until the next call of this.
    pub(crate) fn intern(&mut self, id: NamespaceId, is_used: impl Fn(u32) -> bool) -> u32 {
        if let Some(number) = self.number(id) {
            return number;
        }
        if self.free.is_empty() && self.ids.len() >= self.limit {
            self.sweep(is_used);
        }
        let number = match self.free.pop() {
            Some(number) => {
                self.ids[number as usize] = id;
                number
            }
            None => {
                self.ids.push(id);
                (self.ids.len() - 1) as u32
            }
        };
        self.numbers.insert(id, number);
        number
    }

    /// Frees the numbers that nothing bears; none is free yet.
    fn sweep(&mut self, is_used: impl Fn(u32) -> bool) {
        for (number, id) in (0..).zip(&self.ids) {
            if !is_used(number) {
                self.numbers.remove(id);
                self.free.push(number);
            }
        }
        // Half of them at least come before it is looked again.
        self.limit = NAMESPACES.max(2 * self.numbers.len());
    }

    /// Those that have a number.
    pub(crate) fn known(&self) -> impl Iterator<Item = (NamespaceId, u32)> {
        self.numbers.iter().map(|(id, number)| (*id, *number))
    }

    pub(crate) fn id(&self, number: u32) -> NamespaceId {
        self.ids
            .get(number as usize)
            .copied()
            .unwrap_or(NamespaceId([0; 16]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u64) -> NamespaceId {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&number.to_le_bytes());
        NamespaceId(id)
    }

    #[test]
    fn numbers_without_a_use_are_used_again_and_others_keep_theirs() {
        let mut namespaces = Namespaces::default();
        let kept: Vec<u32> = (0..100)
            .map(|n| namespaces.intern(id(n), |_| true))
            .collect();
        for number in 100..1_000_000 {
            let last = namespaces.intern(id(number), |number| kept.contains(&number));
            assert_eq!(namespaces.id(last), id(number));
        }
        assert!(
            namespaces.ids.len() <= NAMESPACES,
            "{}",
            namespaces.ids.len()
        );
        assert!(namespaces.known().count() <= namespaces.ids.len());
        for (number, known) in (0..).zip(kept) {
            assert_eq!(namespaces.number(id(number)), Some(known));
        }
        assert_eq!(namespaces.number(id(5000)), None);
    }
}
