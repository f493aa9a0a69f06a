//! Blocks that are being written, by their keys.

use hashbrown::HashTable;

use super::hash::Secret;
use crate::key::Key;

/// Identities to the slots that are reserved for them, in parts, each of which grows by itself: a
/// call of very many keys moves a few of them at a time.
pub(crate) struct Reservations {
    parts: Vec<HashTable<Reservation>>,
    secret: Secret,
    count: u64,
}

struct Reservation {
    key: Key,
    namespace: u32,
    slot: u32,
    /// When it was reserved, in Unix seconds: what its record will say.
    created: u32,
}

impl Reservations {
    /// A quarter of a million of keys are a thousand in each.
    pub(crate) const PARTS: usize = 256;

    pub(crate) fn new() -> Reservations {
        let mut parts = Vec::new();
        parts.resize_with(Reservations::PARTS, HashTable::new);
        Reservations {
            parts,
            secret: Secret::new(),
            count: 0,
        }
    }

    /// The part of a hash: of bits that tables use for neither their places nor their tags.
    fn part(hash: u64) -> usize {
        (hash >> 40) as usize % Reservations::PARTS
    }

    fn find(&self, namespace: u32, key: &Key) -> Option<&Reservation> {
        let hash = self.secret.hash(namespace, key);
        let is_it = |one: &Reservation| one.key == *key && one.namespace == namespace;
        self.parts[Reservations::part(hash)].find(hash, is_it)
    }

    pub(crate) fn get(&self, namespace: u32, key: &Key) -> Option<u32> {
        self.find(namespace, key).map(|one| one.slot)
    }

    /// When a key was reserved; 0 when it is not.
    pub(crate) fn created(&self, namespace: u32, key: &Key) -> u32 {
        self.find(namespace, key).map_or(0, |one| one.created)
    }

    /// Enters a key that has none.
    pub(crate) fn insert(&mut self, namespace: u32, key: &Key, slot: u32, created: u32) {
        let secret = self.secret;
        let one = Reservation {
            key: *key,
            namespace,
            slot,
            created,
        };
        let hash = secret.hash(namespace, key);
        self.parts[Reservations::part(hash)]
            .insert_unique(hash, one, |one| secret.hash(one.namespace, &one.key));
        self.count += 1;
    }

    /// Forgets a key if it names this slot.
    pub(crate) fn remove(&mut self, namespace: u32, key: &Key, slot: u32) {
        let hash = self.secret.hash(namespace, key);
        let is_it = |one: &Reservation| one.slot == slot;
        if let Ok(found) = self.parts[Reservations::part(hash)].find_entry(hash, is_it) {
            found.remove();
            self.count -= 1;
        }
    }

    /// The slots of one namespace in a part.
    pub(crate) fn slots(&self, part: usize, namespace: u32) -> Vec<u32> {
        let all = self.parts[part].iter();
        let of = all.filter(|one| one.namespace == namespace);
        of.map(|one| one.slot).collect()
    }

    pub(crate) fn len(&self) -> u64 {
        self.count
    }
}
