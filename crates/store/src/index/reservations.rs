//! Blocks that are being written, by their keys.

use hashbrown::HashTable;

use super::hash::Secret;
use crate::Key;

/// Identities to the slots that are reserved for them.
pub(crate) struct Reservations {
    table: HashTable<Reservation>,
    secret: Secret,
}

struct Reservation {
    key: Key,
    namespace: u32,
    slot: u32,
    /// When it was reserved, in Unix seconds: what its record will say.
    created: u32,
}

impl Reservations {
    pub(crate) fn new() -> Reservations {
        Reservations {
            table: HashTable::new(),
            secret: Secret::new(),
        }
    }

    fn find(&self, namespace: u32, key: &Key) -> Option<&Reservation> {
        let hash = self.secret.hash(namespace, key);
        let is_it = |one: &Reservation| one.key == *key && one.namespace == namespace;
        self.table.find(hash, is_it)
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
        self.table
            .insert_unique(hash, one, |one| secret.hash(one.namespace, &one.key));
    }

    /// Forgets a key if it names this slot.
    pub(crate) fn remove(&mut self, namespace: u32, key: &Key, slot: u32) {
        let hash = self.secret.hash(namespace, key);
        let is_it = |one: &Reservation| one.slot == slot;
        if let Ok(found) = self.table.find_entry(hash, is_it) {
            found.remove();
        }
    }

    /// The slots of one namespace.
    pub(crate) fn slots(&self, namespace: u32) -> Vec<u32> {
        let of = self.table.iter().filter(|one| one.namespace == namespace);
        of.map(|one| one.slot).collect()
    }

    pub(crate) fn len(&self) -> u64 {
        self.table.len() as u64
    }
}
