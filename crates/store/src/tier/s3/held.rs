//! Blocks that are pinned or written now.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvdepot_arena::format::file_header::LEN;
use kvdepot_arena::held::Mutex;
use kvdepot_arena::parts::{self, Part};
use kvdepot_arena::{Error, Identity, Key, NamespaceId, Place, Reserved, TakesBack, Token, Wanted};
use kvdepot_media::{Buffer, Carrier, Checksum, Mac};

use super::object::Object;
use super::staging::Staged;
use super::usage::Promise;
use crate::keyring::Keyring;
use crate::tier::{Ends, Proof};

/// Most blocks that are pinned at a time: some hundred bytes each.
const HELD_MAX: usize = 1 << 20;

/// Keys of a call that are looked at at a time: others have their turn between them.
const KEYS_TURN: usize = 256;

pub(super) struct Held {
    number: u32,
    /// What blocks are authenticated with.
    keys: Option<Arc<Keyring>>,
    next: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By sequence.
    blocks: HashMap<u64, Block>,
    /// Blocks that this process writes, by the sequences of their reservations; 0 where there is
    /// none yet.
    writing: HashMap<Identity, u64>,
    /// Blocks that are written.
    new: u64,
    closed: bool,
}

struct Block {
    place: Place,
    holds: u32,
    what: What,
}

enum What {
    Pinned(Arc<Object>),
    New(New),
}

/// What a reservation has.
#[derive(Default)]
struct New {
    /// `None` once it is on its way.
    memory: Option<(Staged, Promise)>,
    leaves: Vec<u128>,
    macs: Vec<Mac>,
    /// A copy while it is written, or what is to be published; and whether its block was removed
    /// since.
    copy: bool,
    removed: bool,
}

/// A block that this process has begun to write.
pub(super) struct Making {
    held: Arc<Held>,
    name: Identity,
    made: bool,
}

/// A block was removed while it was on its way.
pub(super) struct Removed;

/// A pin of which nobody has been told yet; dropped, it is ended.
pub(super) struct Pinned {
    held: Arc<Held>,
    place: Place,
    told: bool,
}

impl Pinned {
    /// Whoever is told of it ends the pin.
    pub(super) fn hand_out(mut self) -> Place {
        self.told = true;
        self.place
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if !self.told {
            self.held.unpin(&[self.place]);
        }
    }
}

/// What is to be published.
pub(super) struct Written {
    pub(super) place: Place,
    pub(super) memory: Staged,
    pub(super) promise: Promise,
    pub(super) leaves: Vec<u128>,
    pub(super) macs: Vec<Mac>,
}

impl Held {
    pub(super) fn new(number: u32, keys: Option<Arc<Keyring>>) -> Arc<Held> {
        Arc::new(Held {
            number,
            keys,
            next: AtomicU64::new(0),
            state: Mutex::default(),
        })
    }

    /// Whether blocks have to be authenticated.
    pub(super) fn has_keys(&self) -> bool {
        self.keys.is_some()
    }

    /// Whether those of a namespace can be, or need not.
    pub(super) fn proves(&self, namespace: NamespaceId) -> bool {
        let keys = self.keys.as_ref();
        keys.is_none_or(|keys| keys.of(namespace).is_some())
    }

    /// The token of no block.
    pub(super) fn nowhere(&self) -> Token {
        Token {
            device: self.number,
            slot: 0,
            sequence: 0,
        }
    }

    fn add(&self, mut place: Place, what: What) -> Option<Place> {
        let sequence = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        place.token = Token {
            sequence,
            ..self.nowhere()
        };
        let block = Block {
            place,
            holds: 1,
            what,
        };
        let mut state = self.state.lock();
        if state.closed || state.blocks.len() >= HELD_MAX {
            return None;
        }
        if matches!(block.what, What::New(_)) {
            state.writing.insert(place.identity, sequence);
            state.new += 1;
        }
        state.blocks.insert(sequence, block);
        Some(place)
    }

    /// Pins an object.
    pub(super) fn pin(self: &Arc<Held>, name: Identity, object: Object) -> Option<Pinned> {
        let note = object.found.note;
        let place = Place {
            len: note.len,
            parts: note.parts,
            checksum: note.checksum,
            ..Place::of(name)
        };
        let place = self.add(place, What::Pinned(Arc::new(object)))?;
        Some(self.pinned(place))
    }

    fn pinned(self: &Arc<Held>, place: Place) -> Pinned {
        Pinned {
            held: Arc::clone(self),
            place,
            told: false,
        }
    }

    pub(super) fn unpin(&self, places: &[Place]) {
        for some in places.chunks(KEYS_TURN) {
            // Dropped when the lock is free.
            let mut ended = Vec::new();
            let mut state = self.state.lock();
            for place in some {
                let sequence = place.token.sequence;
                let Some(block) = state.blocks.get_mut(&sequence) else {
                    continue;
                };
                block.holds -= 1;
                if block.holds == 0 {
                    ended.extend(state.remove(sequence));
                }
            }
            drop(state);
        }
    }

    /// Begins to write a block, unless this process does already.
    pub(super) fn begin(self: &Arc<Held>, name: Identity) -> Option<Making> {
        match self.state.lock().writing.entry(name) {
            Entry::Occupied(_) => return None,
            Entry::Vacant(writing) => writing.insert(0),
        };
        Some(Making {
            held: Arc::clone(self),
            name,
            made: false,
        })
    }

    /// From now on a removal ends these, however long they take.
    pub(super) fn publishes(&self, written: &[(Reserved, Checksum)]) {
        for some in written.chunks(KEYS_TURN) {
            let mut state = self.state.lock();
            for (reserved, _) in some {
                if let Some(new) = state.new_of(reserved) {
                    new.copy = true;
                }
            }
        }
    }

    /// Copies of these that are being written are not published, nor is what waits for that.
    pub(super) fn forget_copies(&self, namespace: NamespaceId, keys: Option<&[Key]>) {
        for some in keys.unwrap_or_default().chunks(KEYS_TURN) {
            let mut state = self.state.lock();
            for key in some {
                let key = *key;
                state.forget_copy(&Identity { namespace, key });
            }
        }
        if keys.is_none() {
            let mut state = self.state.lock();
            let names = state.writing.keys();
            let names = names.filter(|name| name.namespace == namespace).copied();
            for name in names.collect::<Vec<_>>() {
                state.forget_copy(&name);
            }
        }
    }

    /// Whether its block was removed since.
    pub(super) fn is_removed(&self, place: &Place) -> bool {
        let mut state = self.state.lock();
        state.new_of(place).is_none_or(|new| new.removed)
    }

    /// What a reservation has, which is still one until [`Held::published`].
    pub(super) fn take(&self, mut reserved: Reserved) -> Option<Written> {
        let place = reserved.hand_out();
        let mut state = self.state.lock();
        let new = state.new_of(&place)?;
        let (memory, promise) = new.memory.take()?;
        let leaves = std::mem::take(&mut new.leaves);
        let macs = std::mem::take(&mut new.macs);
        Some(Written {
            place,
            memory,
            promise,
            leaves,
            macs,
        })
    }

    /// Ends a reservation: what was stored is pinned, where there is its object. An error where it
    /// was removed meanwhile.
    pub(super) fn published(
        self: &Arc<Held>,
        place: &Place,
        object: Option<Object>,
    ) -> Result<Option<Pinned>, Removed> {
        let mut state = self.state.lock();
        state.writing.remove(&place.identity);
        let removed = state.new_of(place).is_none_or(|new| new.removed);
        let block = state.blocks.get_mut(&place.token.sequence);
        if let Some((object, block)) = object.filter(|_| !removed).zip(block) {
            block.place.checksum = object.found.note.checksum;
            block.what = What::Pinned(Arc::new(object));
            state.new -= 1;
            return Ok(Some(self.pinned(*place)));
        }
        let ended = state.remove(place.token.sequence);
        drop(state);
        drop(ended);
        if removed { Err(Removed) } else { Ok(None) }
    }

    /// What is pinned.
    pub(super) fn object_of(&self, place: &Place) -> Result<Arc<Object>, Error> {
        let state = self.state.lock();
        match state.blocks.get(&place.token.sequence) {
            Some(Block {
                what: What::Pinned(object),
                ..
            }) => Ok(Arc::clone(object)),
            _ => Err(Error::Closed("the object was released before it was read")),
        }
    }

    /// How many are pinned, and how many written.
    pub(super) fn counts(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.blocks.len() as u64 - state.new, state.new)
    }

    pub(super) fn close(&self) {
        let left = {
            let mut state = self.state.lock();
            (state.closed, state.new) = (true, 0);
            state.writing.clear();
            std::mem::take(&mut state.blocks)
        };
        drop(left);
    }
}

impl State {
    /// Takes a block out, with its part of the count.
    fn remove(&mut self, sequence: u64) -> Option<Block> {
        let block = self.blocks.remove(&sequence);
        let is_new = matches!(&block, Some(block) if matches!(block.what, What::New(_)));
        self.new -= u64::from(is_new);
        block
    }

    fn forget_copy(&mut self, name: &Identity) {
        let block = self.writing.get(name);
        let block = block.and_then(|sequence| self.blocks.get_mut(sequence));
        if let Some(What::New(new)) = block.map(|block| &mut block.what) {
            new.removed |= new.copy;
        }
    }

    fn new_of(&mut self, place: &Place) -> Option<&mut New> {
        match &mut self.blocks.get_mut(&place.token.sequence)?.what {
            What::New(new) => Some(new),
            What::Pinned(_) => None,
        }
    }
}

impl Making {
    /// Keeps what was taken for a block.
    pub(super) fn reserve(
        mut self,
        (memory, promise): (Staged, Promise),
        wanted: &Wanted,
    ) -> Option<Reserved> {
        let &Wanted {
            len,
            parts,
            stamp,
            copy,
            ..
        } = wanted;
        let place = Place {
            len,
            parts,
            stamp,
            ..Place::of(self.name)
        };
        let new = New {
            memory: Some((memory, promise)),
            copy,
            ..New::default()
        };
        let place = self.held.add(place, What::New(new))?;
        self.made = true;
        Some(Reserved::new(Arc::clone(&self.held) as _, place))
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        if !self.made {
            self.held.state.lock().writing.remove(&self.name);
        }
    }
}

impl TakesBack for Held {
    fn take_back(&self, token: Token) {
        let block = {
            let mut state = self.state.lock();
            let block = state.remove(token.sequence);
            if let Some(block) = &block {
                state.writing.remove(&block.place.identity);
            }
            block
        };
        drop(block);
    }
}

impl Ends for Held {
    fn buffers(
        &self,
        place: &Place,
        offset: u64,
        len: u64,
        ends: &mut Vec<Buffer>,
    ) -> Result<(), Error> {
        let mut state = self.state.lock();
        let block = state.blocks.get_mut(&place.token.sequence);
        let buffer = match block.map(|block| &block.what) {
            Some(What::Pinned(object)) => {
                let carrier = Arc::clone(object) as Arc<dyn Carrier>;
                Buffer::carried(carrier, offset as usize, len as usize, false)
            }
            Some(What::New(New {
                memory: Some((memory, _)),
                ..
            })) => memory.part(LEN as u64 + offset, len)?,
            _ => {
                return Err(Error::Closed(
                    "the object was released before it was copied",
                ));
            }
        };
        ends.clear();
        ends.push(buffer);
        Ok(())
    }

    fn parts(&self, place: &Place) -> Result<Option<Vec<Part>>, Error> {
        if let Some(parts) = parts::single(place) {
            return Ok(Some(parts.to_vec()));
        }
        let object = self.object_of(place)?;
        let begin = place.len.checked_sub(object.table.len() as u64);
        let (identity, sum) = (&place.identity, place.checksum);
        Ok(begin.and_then(|begin| parts::of_table(identity, &object.table, begin, sum)))
    }

    fn write_parts(&self, place: &Place, found: &[Part]) -> Result<(), Error> {
        let table = parts::encode(found);
        let begin = place.len.saturating_sub(table.len() as u64);
        let mut state = self.state.lock();
        match state.new_of(place).and_then(|new| new.memory.as_ref()) {
            Some((memory, _)) => memory.write(LEN as u64 + begin, &table),
            None => Err(Error::Closed(
                "the object was released before it was written",
            )),
        }
    }

    fn proof(&self, place: &Place) -> Option<Proof> {
        let key = self.keys.as_ref()?.of(place.identity.namespace)?;
        let macs = self
            .object_of(place)
            .map(|object| object.found.macs.to_vec());
        Some(Proof::new(key, macs.unwrap_or_default()))
    }

    fn note_macs(&self, place: &Place, macs: Vec<Mac>) {
        if let Some(new) = self.state.lock().new_of(place) {
            new.macs = macs;
        }
    }

    fn note_leaves(&self, place: &Place, leaves: Vec<u128>) {
        if let Some(new) = self.state.lock().new_of(place) {
            new.leaves = leaves;
        }
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_arena::held;

    use super::*;

    #[test]
    fn a_call_over_s3_lets_others_have_their_turn_between_its_blocks() {
        let blocks = Held::new(1, None);
        let name = |number: usize| {
            let mut key = [0; 32];
            key[..8].copy_from_slice(&(number as u64).to_le_bytes());
            Identity {
                namespace: NamespaceId([1; 16]),
                key: Key(key),
            }
        };
        let places = (0..8 * KEYS_TURN).map(|number| {
            let place = blocks.add(Place::of(name(number)), What::New(New::default()));
            place.unwrap()
        });
        let places: Vec<Place> = places.collect();
        let keys: Vec<Key> = places.iter().map(|place| place.identity.key).collect();
        assert_eq!(blocks.counts(), (0, places.len() as u64));
        let most = |call: &dyn Fn()| {
            held::most_steps();
            call();
            held::most_steps() as usize
        };
        let steps = [
            most(&|| blocks.forget_copies(NamespaceId([1; 16]), Some(&keys))),
            most(&|| blocks.unpin(&places)),
        ];
        assert!(
            steps.iter().all(|steps| *steps <= 4 * KEYS_TURN),
            "{steps:?} under one lock"
        );
        assert_eq!(blocks.counts(), (0, 0));
    }
}
