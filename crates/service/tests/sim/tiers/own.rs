//! What a tier made for histories keeps by itself: blocks in memory, behind a carrier, or in files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use kvdepot_arena::parts::{self, Part};
use kvdepot_arena::{Place, Reserved, TakesBack, Token, Wanted};
use kvdepot_media::{Buffer, Checksum};
use kvdepot_store::{Directory, Ends, Error, Identity, Key, NamespaceId, Outside};
use kvdepot_testkit::sim::run::wrong;

use super::memory::{Bytes, Folder, Memory};
use super::stored::Stored;

/// The blocks of a tier, from its making to the end of the history.
pub struct Own {
    name: &'static str,
    bytes: Bytes,
    /// Where files would lie, and those that do.
    path: PathBuf,
    folder: OnceLock<Folder>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    blocks: BTreeMap<(NamespaceId, Key), Stored>,
    held: BTreeMap<u64, Held>,
    next: u64,
    device: u32,
}

/// What is pinned or reserved.
struct Held {
    stored: Stored,
    place: Place,
    /// Of a copy.
    copy: bool,
    reserved: bool,
    /// Its block was removed, and is not published any more.
    removed: bool,
}

impl Own {
    pub fn new(name: &'static str, bytes: Bytes, path: &Path) -> Arc<Own> {
        Arc::new(Own {
            name,
            bytes,
            path: path.into(),
            folder: OnceLock::new(),
            state: Mutex::default(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It is open under that number, with what it had if that `lasts`.
    pub fn opened(&self, number: u32, lasts: bool) {
        if self.bytes == Bytes::Files {
            self.folder.get_or_init(|| Folder::new(self.path.clone()));
        }
        let mut state = self.state();
        state.device = number;
        if !lasts {
            state.blocks.clear();
        }
    }

    /// Nothing is held.
    pub fn closed(&self) {
        let held = std::mem::take(&mut self.state().held);
        for held in held.values() {
            let what = if held.reserved { "reserved" } else { "pinned" };
            let key = held.place.identity.key;
            wrong(format!("{} is closed, and {key} is {what}", self.name));
        }
    }

    pub fn get(&self, namespace: NamespaceId, key: Key) -> Option<Stored> {
        self.state().blocks.get(&(namespace, key)).cloned()
    }

    /// Blocks of a namespace with their bytes.
    pub fn all(&self, namespace: NamespaceId) -> Vec<(Key, u64)> {
        let state = self.state();
        let here = state.blocks.iter().filter(|((id, _), _)| *id == namespace);
        here.map(|((_, key), stored)| (*key, stored.len)).collect()
    }

    /// Turns a byte of a block over; false where it is not there.
    pub fn rot(&self, identity: &Identity, at: u64) -> bool {
        let stored = self.get(identity.namespace, identity.key);
        stored.is_some_and(|stored| {
            stored.memory.flip((at % stored.len) as usize);
            true
        })
    }

    /// Pins, and reservations.
    pub fn held(&self) -> (u64, u64) {
        let state = self.state();
        let reserved = state.held.values().filter(|held| held.reserved).count();
        let pinned = state.held.len() - reserved;
        (pinned as u64, reserved as u64)
    }

    /// A name of what it has anyhow.
    pub fn nowhere(&self) -> Token {
        Token {
            device: self.state().device,
            slot: 0,
            sequence: 0,
        }
    }

    fn hold(&self, stored: Stored, place: Place, copy: bool, reserved: bool) -> Place {
        let mut state = self.state();
        state.next += 1;
        let token = Token {
            device: state.device,
            slot: 0,
            sequence: state.next,
        };
        let place = Place { token, ..place };
        let held = Held {
            stored,
            place,
            copy,
            reserved,
            removed: false,
        };
        let name = state.next;
        state.held.insert(name, held);
        place
    }

    pub fn pin(&self, namespace: NamespaceId, key: Key) -> Option<Place> {
        let stored = self.get(namespace, key)?;
        let place = Place {
            len: stored.len,
            parts: stored.parts,
            checksum: stored.checksum,
            ..Place::of(Identity { namespace, key })
        };
        Some(self.hold(stored, place, false, false))
    }

    pub fn reserve(self: &Arc<Own>, namespace: NamespaceId, wanted: &Wanted) -> Reserved {
        let Wanted {
            key,
            len,
            parts,
            copy,
            ..
        } = *wanted;
        let memory = match self.folder.get() {
            Some(folder) => folder.file(len as usize),
            None => Memory::new(len as usize, self.bytes == Bytes::Carried),
        };
        let stored = Stored::new(memory, len, parts, Checksum([0; 16]));
        let place = Place {
            len,
            parts,
            ..Place::of(Identity { namespace, key })
        };
        let place = self.hold(stored, place, copy, true);
        Reserved::new(Arc::clone(self) as _, place)
    }

    /// Asked for a publication: from now on a removal ends it.
    pub fn publishes(&self, written: &[(Reserved, Checksum)]) {
        let mut state = self.state();
        for (reserved, _) in written {
            if let Some(held) = state.held.get_mut(&reserved.token.sequence) {
                held.copy = true;
            }
        }
    }

    /// Publishes what was reserved, unless it `refuses` to; whether it is stored.
    pub fn commit(
        &self,
        mut reserved: Reserved,
        sum: Checksum,
        pinned: bool,
        refuses: bool,
    ) -> bool {
        let place = reserved.hand_out();
        let mut state = self.state();
        let Some(mut held) = state.held.remove(&place.token.sequence) else {
            wrong(format!("{} publishes what is not reserved", self.name));
            return false;
        };
        if held.removed || refuses {
            return false;
        }
        held.stored.checksum = sum;
        held.place.checksum = sum;
        held.reserved = false;
        let Identity { namespace, key } = place.identity;
        state.blocks.insert((namespace, key), held.stored.clone());
        if pinned {
            state.held.insert(place.token.sequence, held);
        }
        true
    }

    pub fn unpin(&self, token: Token) {
        let pin = self.state().held.remove(&token.sequence);
        if pin.is_none_or(|pin| pin.reserved) {
            wrong(format!("{} unpins what is not pinned", self.name));
        }
    }

    /// A block that is pinned and did not verify.
    pub fn rotten(&self, place: &Place) -> Option<(Identity, Stored)> {
        let state = self.state();
        let Some(pin) = state.held.get(&place.token.sequence) else {
            wrong(format!("{} discards what is not pinned", self.name));
            return None;
        };
        let (pinned, identity) = (pin.stored.clone(), pin.place.identity);
        if pinned.is_sound(&identity) {
            wrong(format!("{} discards a block that is sound", self.name));
        }
        Some((identity, pinned))
    }

    /// Unpublishes these, but for what was put since; how many.
    pub fn discard(&self, rotten: &[(Identity, Stored)]) -> usize {
        let mut state = self.state();
        let gone = rotten.iter().filter(|(identity, rotten)| {
            let name = (identity.namespace, identity.key);
            let here = state.blocks.get(&name);
            let is_it = here.is_some_and(|stored| stored.memory.is(&rotten.memory));
            is_it && state.blocks.remove(&name).is_some()
        });
        gone.count()
    }

    /// What a clear of a namespace removes: what is there, or on its way.
    pub fn clears(&self, namespace: NamespaceId) -> Vec<Key> {
        let here = self.all(namespace).into_iter().map(|(key, _)| key);
        let mut keys: BTreeSet<Key> = here.collect();
        let state = self.state();
        let held = state.held.values().map(|held| held.place.identity);
        let held = held.filter(|one| one.namespace == namespace);
        keys.extend(held.map(|one| one.key));
        keys.into_iter().collect()
    }

    pub fn remove(&self, namespace: NamespaceId, keys: &[Key]) -> Vec<bool> {
        let mut state = self.state();
        let State { held, blocks, .. } = &mut *state;
        for held in held.values_mut().filter(|held| held.copy) {
            let identity = &held.place.identity;
            held.removed |= identity.namespace == namespace && keys.contains(&identity.key);
        }
        let gone = keys.iter();
        let gone = gone.map(|key| blocks.remove(&(namespace, *key)).is_some());
        gone.collect()
    }

    /// What a pin or a reservation holds.
    fn holds(&self, place: &Place) -> Result<Stored, Error> {
        let state = self.state();
        let held = state.held.get(&place.token.sequence);
        let held = held.ok_or(Error::Closed(": it is not held"))?;
        Ok(held.stored.clone())
    }
}

impl TakesBack for Own {
    fn take_back(&self, token: Token) {
        if self.state().held.remove(&token.sequence).is_none() {
            wrong(format!("{} is given back what is not reserved", self.name));
        }
    }
}

impl Ends for Own {
    fn buffers(
        &self,
        place: &Place,
        offset: u64,
        len: u64,
        into: &mut Vec<Buffer>,
    ) -> Result<(), Error> {
        let memory = self.holds(place)?.memory.buffer();
        into.clear();
        into.push(memory.slice(offset as usize, len as usize)?);
        Ok(())
    }

    fn parts(&self, place: &Place) -> Result<Option<Vec<Part>>, Error> {
        let stored = self.holds(place)?;
        if let Some(file) = stored.memory.block_file() {
            return file.parts(place);
        }
        Ok(stored.table(&place.identity, &stored.memory.to_vec()))
    }

    fn write_parts(&self, place: &Place, found: &[Part]) -> Result<(), Error> {
        let stored = self.holds(place)?;
        if let Some(file) = stored.memory.block_file() {
            return file.write_parts(place, found);
        }
        let table = parts::encode(found);
        stored
            .memory
            .write(stored.len as usize - table.len(), &table);
        Ok(())
    }

    fn directory(&self) -> Option<Directory> {
        Some(Directory {
            dir: Arc::clone(&self.folder.get()?.dir),
            direct: false,
        })
    }

    fn outside(&self, place: &Place) -> Option<Outside> {
        self.holds(place).ok()?.memory.file()
    }
}
