//! Keys to slots: a hash map with the whole key beside the slot, so that a lookup touches one
//! cache line of the map and none of the entry.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;

use crate::{Key, NamespaceId};

#[derive(Clone, Copy)]
struct Bucket {
    key: [u8; 32],
    namespace: u32,
    slot: u32,
}

/// Identities of one kind (live, or reserved) to their slots.
pub(crate) struct KeyMap {
    table: HashTable<Bucket>,
    secret: Secret,
}

/// Words that nobody else knows, one for each of a key: who chooses keys cannot choose collisions.
type Secret = [u64; 4];

impl KeyMap {
    pub(crate) fn with_capacity(capacity: usize) -> KeyMap {
        let random = RandomState::new();
        KeyMap {
            table: HashTable::with_capacity(capacity),
            secret: std::array::from_fn(|word| random.hash_one(word)),
        }
    }

    fn hash(secret: &Secret, namespace: u32, key: &[u8; 32]) -> u64 {
        let (words, _) = key.as_chunks::<8>();
        let fold = |a: u64, b: u64| {
            let product = u128::from(a) * u128::from(b);
            product as u64 ^ (product >> 64) as u64
        };
        let word = |i: usize| u64::from_le_bytes(words[i]) ^ secret[i];
        fold(word(0), word(1)) ^ fold(word(2) ^ u64::from(namespace), word(3))
    }

    #[inline]
    pub(crate) fn get(&self, namespace: u32, key: &Key) -> Option<u32> {
        let hash = Self::hash(&self.secret, namespace, &key.0);
        self.table
            .find(hash, |bucket| {
                bucket.key == key.0 && bucket.namespace == namespace
            })
            .map(|bucket| bucket.slot)
    }

    /// Enters a slot and returns the one it replaces.
    pub(crate) fn insert(&mut self, namespace: u32, key: &Key, slot: u32) -> Option<u32> {
        let secret = self.secret;
        let hash = Self::hash(&secret, namespace, &key.0);
        let found = self.table.find_mut(hash, |bucket| {
            bucket.key == key.0 && bucket.namespace == namespace
        });
        if let Some(bucket) = found {
            return Some(std::mem::replace(&mut bucket.slot, slot));
        }
        let bucket = Bucket {
            key: key.0,
            namespace,
            slot,
        };
        self.table.insert_unique(hash, bucket, |bucket| {
            Self::hash(&secret, bucket.namespace, &bucket.key)
        });
        None
    }

    /// Forgets the identity if it names this slot.
    pub(crate) fn remove(&mut self, namespace: u32, key: &Key, slot: u32) -> bool {
        let hash = Self::hash(&self.secret, namespace, &key.0);
        match self.table.find_entry(hash, |bucket| {
            bucket.key == key.0 && bucket.namespace == namespace && bucket.slot == slot
        }) {
            Ok(entry) => {
                entry.remove();
                true
            }
            Err(_) => false,
        }
    }

    /// The slots of one namespace.
    pub(crate) fn slots(&self, namespace: u32) -> Vec<u32> {
        let of = self
            .table
            .iter()
            .filter(|bucket| bucket.namespace == namespace);
        of.map(|bucket| bucket.slot).collect()
    }

    /// The slots of all.
    pub(crate) fn all(&self) -> impl Iterator<Item = u32> {
        self.table.iter().map(|bucket| bucket.slot)
    }

    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }
}

/// Namespaces by small numbers, so that an entry holds four bytes for its namespace. A number that
/// nothing bears any more is another namespace's later: there are never many more of them than
/// there are blocks.
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
