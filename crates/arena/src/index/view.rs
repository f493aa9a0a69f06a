//! Lookups of many keys at once.

use super::shard::Shard;
use super::{Entry, Index, SHARDS, slot};
use crate::held::{ReadGuard, stepped};
use crate::key::{Key, NamespaceId};

/// Keys that are looked up before whoever changes the index has a turn.
const TURN: usize = 512;

/// Keys whose lines of the map are fetched before the first is searched, and whose entries are
/// before the first is compared: what is read for one of them lies far from what is read for the
/// others.
const GROUP: usize = 32;

/// A published block. It stays so as long as this is there.
pub(crate) struct Found<'a> {
    index: &'a Index,
    shard: &'a Shard,
    local: u32,
    pub(crate) slot: u32,
}

impl Found<'_> {
    pub(crate) fn entry(&self) -> Entry {
        self.shard.entry(self.local)
    }

    /// Notes a use.
    pub(crate) fn touch(&self, stamp: u64) {
        self.index
            .note_use(self.shard, self.local, self.slot, stamp);
    }

    /// False where that would be too many pins.
    #[must_use]
    pub(crate) fn pin(&self) -> bool {
        self.index.pin(self.shard, self.local)
    }
}

/// Where keys may be: their hashes, their shards, and the numbers there.
struct Group {
    hashes: [u64; GROUP],
    shards: [usize; GROUP],
    candidates: [Option<u32>; GROUP],
}

/// The shards that are looked into.
struct Shards<'a> {
    index: &'a Index,
    guards: [Option<ReadGuard<'a, Shard>>; SHARDS],
}

impl Shards<'_> {
    /// `None` where the caller does not wait and had to.
    #[inline]
    fn seek(&mut self, number: u32, keys: &[&Key]) -> Option<Group> {
        let mut group = Group {
            hashes: [0; GROUP],
            shards: [0; GROUP],
            candidates: [None; GROUP],
        };
        for (at, key) in keys.iter().enumerate() {
            let hash = self.index.secret.hash(number, key);
            let shard = self.index.shard_of(hash);
            let guard = &mut self.guards[shard];
            if guard.is_none() {
                *guard = Some(self.index.shards[shard].look()?);
            }
            (group.hashes[at], group.shards[at]) = (hash, shard);
            guard.as_ref()?.fetch(hash);
        }
        for at in 0..keys.len() {
            let shard = self.guards[group.shards[at]].as_ref()?;
            group.candidates[at] = shard.candidate(group.hashes[at]);
            if let Some(local) = group.candidates[at] {
                shard.fetch_entry(local);
            }
        }
        Some(group)
    }

    #[inline]
    fn find(&self, number: u32, key: &Key, group: &Group, at: usize) -> Option<Found<'_>> {
        let shard: &Shard = self.guards[group.shards[at]].as_ref()?;
        let candidate = group.candidates[at]?;
        let local = shard.confirm(candidate, group.hashes[at], number, key)?;
        Some(Found {
            index: self.index,
            shard,
            local,
            slot: slot(group.shards[at], local),
        })
    }
}

impl Index {
    /// Calls `each` with the position of each key, and its published block, until it answers false.
    /// Who does not wait ([`crate::at_once`]) may get no further.
    ///
    /// Each shard is locked when the first key is looked for in it. Who has several of them waits
    /// for nobody who waits for them: there is one writer at a time, which has no more than one
    /// shard, and waits for nothing then. `each` takes no locks but those of groups, whose holders
    /// wait for nothing.
    pub(crate) fn look_up<'a>(
        &self,
        namespace: NamespaceId,
        keys: impl IntoIterator<Item = &'a Key>,
        mut each: impl FnMut(usize, Option<&Found<'_>>) -> bool,
    ) {
        let mut keys = keys.into_iter().peekable();
        let mut position = 0;
        while keys.peek().is_some() {
            // Held, so that the number is the namespace's meanwhile.
            let Some(names) = self.names.look() else {
                return;
            };
            let Some(number) = names.number(namespace) else {
                return;
            };
            let mut shards = Shards {
                index: self,
                guards: [const { None }; SHARDS],
            };
            for _ in 0..TURN / GROUP {
                let Some(first) = keys.next() else { return };
                let mut some = [first; GROUP];
                let rest = some[1..].iter_mut().zip(keys.by_ref());
                let count = 1 + rest.map(|(one, key)| *one = key).count();
                let Some(group) = shards.seek(number, &some[..count]) else {
                    return;
                };
                for (at, key) in some[..count].iter().enumerate() {
                    stepped();
                    if !each(position, shards.find(number, key, &group, at).as_ref()) {
                        return;
                    }
                    position += 1;
                }
            }
        }
    }
}
