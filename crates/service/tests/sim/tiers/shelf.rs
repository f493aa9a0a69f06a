//! A tier that stands apart, made for histories: each question is answered at once, as a step of
//! the schedule, or not at all, and what it asks for is done when it is asked, when it is answered,
//! or never, as the seed has it. What is stored stays when it is closed.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Arguments;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use kvdepot_arena::parts::{self, Part};
use kvdepot_arena::{Place, Refused, Reserved, TakesBack, Token, Wanted};
use kvdepot_host::dir::Dir;
use kvdepot_media::{Buffer, Checksum, checksum};
use kvdepot_store::sim::{Schedule, current};
use kvdepot_store::{Ends, Error, FileAt, Identity, Key, NamespaceId, Reply};
use kvdepot_testkit::Rng;
use kvdepot_testkit::sim::run::wrong;

use super::memory::{Bytes, Folder, Memory};
use super::posix::{self, OnDisk};

/// How a tier behaves: each of these so often in a hundred.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mood {
    /// Questions that are answered by a step of the schedule.
    pub late: u64,
    /// Questions that are not answered.
    pub silent: u64,
    /// Blocks that it does not take, pin or publish.
    pub refuses: u64,
    /// Ends that cannot be had.
    pub broken: u64,
}

/// Questions in a row without an answer after which a tier is left alone, and for how long.
const FAILURES: u32 = 3;
const ALONE: Duration = Duration::from_millis(500);

/// What a tier has, from its making to the end of the history.
pub struct Shelf {
    pub name: &'static str,
    pub lasts: bool,
    pub block_max: u64,
    bytes: Bytes,
    /// Where files would lie, and those that do.
    path: PathBuf,
    folder: OnceLock<Folder>,
    /// `Posix` has it all, while it is open.
    disk: Mutex<Option<Arc<OnDisk>>>,
    state: Mutex<State>,
}

/// A block that is stored.
#[derive(Clone)]
pub struct Stored {
    pub memory: Memory,
    pub len: u64,
    parts: u16,
    pub checksum: Checksum,
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

struct State {
    rng: Rng,
    mood: Mood,
    blocks: BTreeMap<(NamespaceId, Key), Stored>,
    held: BTreeMap<u64, Held>,
    next: u64,
    device: u32,
    /// Replies that never come.
    kept: Vec<Box<dyn Any + Send>>,
    asked: u64,
    unheard: u64,
    silences: u32,
    alone_until: Option<Instant>,
    /// Whether an answer came late: who waits for it may hear of it after what came later.
    was_late: bool,
    /// Removals that were asked for, and not done yet.
    removals: Vec<Weak<Removal>>,
    /// What somebody may remove now.
    removable: BTreeSet<(NamespaceId, Key)>,
}

/// Keys that somebody removes, or a whole namespace; until it is done, or never will be.
pub struct Removal {
    namespace: NamespaceId,
    keys: Option<Vec<Key>>,
}

/// What becomes of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Now,
    Late,
    Dropped,
    Kept,
}

impl Shelf {
    /// `bytes` says where they lie, and a directory for files.
    pub fn new(
        name: &'static str,
        lasts: bool,
        block_max: u64,
        (bytes, dir): (Bytes, &Path),
    ) -> Arc<Shelf> {
        let state = State {
            rng: Rng::new(0),
            mood: Mood::default(),
            blocks: BTreeMap::new(),
            held: BTreeMap::new(),
            next: 0,
            device: 0,
            kept: Vec::new(),
            asked: 0,
            unheard: 0,
            silences: 0,
            alone_until: None,
            was_late: false,
            removals: Vec::new(),
            removable: BTreeSet::new(),
        };
        Arc::new(Shelf {
            name,
            lasts,
            block_max,
            bytes,
            path: dir.join(name),
            folder: OnceLock::new(),
            disk: Mutex::default(),
            state: Mutex::new(state),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It is `Posix` that has it.
    pub fn opened_on(&self, disk: OnDisk) {
        *self.disk.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(disk));
    }

    pub fn disk(&self) -> Option<Arc<OnDisk>> {
        let disk = self.disk.lock().unwrap_or_else(PoisonError::into_inner);
        disk.clone()
    }

    /// Whether it is `Posix`, open or not.
    fn is_posix(&self) -> bool {
        self.bytes == Bytes::Posix
    }

    /// Where `Posix` has its directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// It is open under that number.
    pub fn opened(&self, number: u32) {
        if self.bytes == Bytes::Files {
            self.folder.get_or_init(|| Folder::new(self.path.clone()));
        }
        let mut state = self.state();
        (state.device, state.asked, state.unheard) = (number, 0, 0);
        (state.silences, state.alone_until, state.was_late) = (0, None, false);
        if !self.lasts {
            state.blocks.clear();
        }
    }

    /// Nobody asks any more, and nothing is held.
    pub fn closed(&self) {
        let (kept, held) = {
            let mut state = self.state();
            let held = std::mem::take(&mut state.held);
            (std::mem::take(&mut state.kept), held)
        };
        drop(kept);
        let disk = self
            .disk
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(disk) = disk {
            if disk.held() != (0, 0) {
                wrong(format!(
                    "{} is closed, and holds {:?}",
                    self.name,
                    disk.held()
                ));
            }
            disk.tier.close();
        }
        for held in held.values() {
            let what = if held.reserved { "reserved" } else { "pinned" };
            let key = held.place.identity.key;
            wrong(format!("{} is closed, and {key} is {what}", self.name));
        }
    }

    pub fn reseed(&self, rng: Rng) {
        self.state().rng = rng;
    }

    pub fn set_mood(&self, mood: Mood) {
        self.state().mood = mood;
    }

    pub fn mood(&self) -> Mood {
        self.state().mood
    }

    /// What it has, where it is sound.
    pub fn has(&self, identity: &Identity) -> bool {
        if self.is_posix() {
            let stored = posix::read(&self.path, identity);
            return stored.is_some_and(|stored| stored.is_sound(identity));
        }
        let name = (identity.namespace, identity.key);
        let stored = self.state().blocks.get(&name).cloned();
        stored.is_some_and(|stored| stored.is_sound(identity))
    }

    /// Blocks of a namespace with their bytes.
    pub fn all(&self, namespace: NamespaceId) -> Vec<(Key, u64)> {
        if let Some(disk) = self.disk() {
            return disk.all(namespace);
        }
        let state = self.state();
        let here = state.blocks.iter().filter(|((id, _), _)| *id == namespace);
        here.map(|((_, key), stored)| (*key, stored.len)).collect()
    }

    /// Turns a byte of a block over; false where it is not there.
    pub fn rot(&self, identity: &Identity, at: u64) -> bool {
        if self.is_posix() {
            return posix::rot(&self.path, identity, at);
        }
        let name = (identity.namespace, identity.key);
        let stored = self.state().blocks.get(&name).cloned();
        stored.is_some_and(|stored| {
            stored.memory.flip((at % stored.len) as usize);
            true
        })
    }

    /// Questions so far, and those that were not answered in time.
    pub fn counts(&self) -> (u64, u64) {
        let state = self.state();
        (state.asked, state.unheard)
    }

    /// Pins, and reservations.
    pub fn held(&self) -> (u64, u64) {
        if let Some(disk) = self.disk() {
            return disk.held();
        }
        let state = self.state();
        let reserved = state.held.values().filter(|held| held.reserved).count();
        let pinned = state.held.len() - reserved;
        (pinned as u64, reserved as u64)
    }

    /// Somebody may remove these from now on.
    pub fn may_remove(&self, names: impl Iterator<Item = (NamespaceId, Key)>) {
        self.state().removable.extend(names);
    }

    /// A removal is asked for.
    pub fn removes(&self, namespace: NamespaceId, keys: Option<&[Key]>) -> Arc<Removal> {
        let keys = keys.map(<[Key]>::to_vec);
        let removal = Arc::new(Removal { namespace, keys });
        self.state().removals.push(Arc::downgrade(&removal));
        removal
    }

    /// Whether somebody has asked to remove it, and it may still happen.
    pub fn may_go(&self, identity: &Identity) -> bool {
        let mut state = self.state();
        state.removals.retain(|removal| removal.strong_count() > 0);
        let mut all = state.removals.iter().filter_map(Weak::upgrade);
        all.any(|one| {
            let named = one
                .keys
                .as_ref()
                .is_none_or(|keys| keys.contains(&identity.key));
            one.namespace == identity.namespace && named
        })
    }

    fn fate(&self) -> (Fate, bool) {
        let mut state = self.state();
        state.asked += 1;
        let now = kvdepot_media::sim::now();
        let alone = state.alone_until.filter(|_| !state.was_late);
        if alone.is_some_and(|until| now < Some(until)) {
            wrong(format!("{} is asked, which is to be left alone", self.name));
        }
        let (mood, rolled) = (state.mood, state.rng.below(100));
        let fate = match rolled {
            rolled if rolled < mood.silent => match state.rng.once_in(2) {
                true => Fate::Dropped,
                false => Fate::Kept,
            },
            rolled if rolled < mood.silent + mood.late => Fate::Late,
            _ => Fate::Now,
        };
        if matches!(fate, Fate::Dropped | Fate::Kept) {
            state.unheard += 1;
        }
        if fate == Fate::Dropped {
            state.silences += 1;
            if state.silences >= FAILURES {
                state.alone_until = now.and_then(|now| now.checked_add(ALONE));
            }
        }
        state.was_late |= fate == Fate::Late;
        (fate, state.rng.once_in(2))
    }

    /// Answers a question as the mood is. `undo` ends what an answer holds that nobody gets.
    pub fn answer<T: Send + 'static>(
        self: &Arc<Shelf>,
        reply: Reply<T>,
        does: impl FnOnce(&Arc<Shelf>) -> T + Send + 'static,
        undo: impl FnOnce(&Arc<Shelf>, T) + Send + 'static,
    ) {
        let (fate, is_eager) = self.fate();
        self.say(format_args!("answers {fate:?}, eager: {is_eager}"));
        match fate {
            Fate::Now => self.deliver(reply, does(self)),
            Fate::Dropped | Fate::Kept => {
                if is_eager {
                    undo(self, does(self));
                }
                match fate {
                    Fate::Kept => self.state().kept.push(Box::new(reply)),
                    _ => drop(reply),
                }
            }
            Fate::Late => {
                let mut done = None;
                let mut does = Some(does);
                if is_eager {
                    done = does.take().map(|does| does(self));
                }
                let shelf = Arc::clone(self);
                let schedule: Arc<Schedule> = current().unwrap();
                schedule.push(move |runs| {
                    let answer = done.or_else(|| does.map(|does| does(&shelf)));
                    match (answer, runs) {
                        (Some(answer), true) => shelf.deliver(reply, answer),
                        (answer, _) => {
                            shelf.state().unheard += 1;
                            if let Some(answer) = answer {
                                undo(&shelf, answer);
                            }
                            drop(reply);
                        }
                    }
                });
            }
        }
    }

    fn deliver<T>(&self, reply: Reply<T>, answer: T) {
        let before = {
            let mut state = self.state();
            // What follows the answer may ask again, and hear nothing.
            let State {
                silences,
                alone_until,
                ..
            } = &mut *state;
            (std::mem::take(silences), alone_until.take())
        };
        if !reply.answer(answer) {
            let mut state = self.state();
            state.unheard += 1;
            (state.silences, state.alone_until) = before;
        }
    }

    /// For `SIM_LOG=1`.
    fn say(&self, what: Arguments<'_>) {
        crate::log::step(&format_args!("{} {what}", self.name), true);
    }

    /// Whether it refuses a block now.
    pub fn refuses(&self) -> bool {
        let mut state = self.state();
        let refuses = state.mood.refuses;
        state.rng.below(100) < refuses
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
}

impl Stored {
    pub fn new(memory: Memory, len: u64, parts: u16, checksum: Checksum) -> Stored {
        Stored {
            memory,
            len,
            parts,
            checksum,
        }
    }

    fn is_sound(&self, identity: &Identity) -> bool {
        let (bytes, count) = (self.memory.to_vec(), self.parts);
        let found = self.table(identity, &bytes).unwrap_or_default();
        let sound = |(number, part): (usize, &Part)| {
            let id = parts::part_id(identity, number as u32, count);
            let range = part.offset as usize..(part.offset + part.len) as usize;
            checksum::of(&id, &bytes[range]) == part.checksum
        };
        !found.is_empty() && found.iter().enumerate().all(sound)
    }

    /// The parts, where their table verifies.
    fn table(&self, identity: &Identity, bytes: &[u8]) -> Option<Vec<Part>> {
        let place = Place {
            len: self.len,
            parts: self.parts,
            checksum: self.checksum,
            ..Place::of(*identity)
        };
        if let Some(parts) = parts::single(&place) {
            return Some(parts.to_vec());
        }
        let begin = self.len - u64::from(self.parts) * parts::ENTRY;
        parts::of_table(identity, &bytes[begin as usize..], begin, self.checksum)
    }
}

/// What the verbs do, whenever that is.
impl Shelf {
    pub fn find(self: &Arc<Shelf>, namespace: NamespaceId, key: Key) -> Option<Place> {
        if let Some(disk) = self.disk() {
            return match self.refuses() {
                true => None,
                false => disk.pin(namespace, key),
            };
        }
        let stored = self.state().blocks.get(&(namespace, key)).cloned()?;
        if self.refuses() {
            return None;
        }
        let place = Place {
            len: stored.len,
            parts: stored.parts,
            checksum: stored.checksum,
            ..Place::of(Identity { namespace, key })
        };
        Some(self.hold(stored, place, false, false))
    }

    pub fn knows(&self, namespace: NamespaceId, key: Key) -> bool {
        if self.is_posix() {
            return posix::file_of(&self.path, &Identity { namespace, key }).is_some();
        }
        self.state().blocks.contains_key(&(namespace, key))
    }

    /// A name of what it has anyhow.
    pub fn nowhere(&self) -> Token {
        Token {
            device: self.state().device,
            slot: 0,
            sequence: 0,
        }
    }

    pub fn make(
        self: &Arc<Shelf>,
        identity: Identity,
        wanted: &Wanted,
    ) -> Result<Reserved, Refused> {
        if let Some(disk) = self.disk() {
            return disk.reserve(identity.namespace, wanted);
        }
        let Wanted {
            len, parts, copy, ..
        } = *wanted;
        let memory = match self.folder.get() {
            Some(folder) => folder.file(len as usize),
            None => Memory::new(len as usize, self.bytes == Bytes::Carried),
        };
        let stored = Stored {
            memory,
            len,
            parts,
            checksum: Checksum([0; 16]),
        };
        let place = Place {
            len,
            parts,
            ..Place::of(identity)
        };
        let place = self.hold(stored, place, copy, true);
        self.say(format_args!("reserves {}, a copy: {copy}", identity.key));
        Ok(Reserved::new(Arc::clone(self) as _, place))
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

    pub fn publish(&self, mut reserved: Reserved, sum: Checksum, pinned: bool) -> bool {
        if let Some(disk) = self.disk() {
            return !self.refuses() && disk.commit(reserved, sum, pinned);
        }
        let place = reserved.hand_out();
        let refuses = self.refuses();
        let mut state = self.state();
        let Some(mut held) = state.held.remove(&place.token.sequence) else {
            wrong(format!("{} publishes what is not reserved", self.name));
            return false;
        };
        if held.removed || refuses {
            return false;
        }
        self.say(format_args!("publishes {} {sum:?}", place.identity.key));
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

    pub fn unpin(&self, tokens: impl Iterator<Item = Token>) {
        for token in tokens {
            if let Some(disk) = self.disk() {
                disk.unpin(token);
                continue;
            }
            let pin = self.state().held.remove(&token.sequence);
            if pin.is_none_or(|pin| pin.reserved) {
                wrong(format!("{} unpins what is not pinned", self.name));
            }
        }
    }

    /// A block that was pinned did not verify.
    pub fn discard(&self, place: &Place) {
        if let Some(disk) = self.disk() {
            return disk.tier.discard(&[*place]);
        }
        let mut state = self.state();
        let Some(pin) = state.held.get(&place.token.sequence) else {
            return wrong(format!("{} discards what is not pinned", self.name));
        };
        let (pinned, identity) = (pin.stored.clone(), pin.place.identity);
        if pinned.is_sound(&identity) {
            wrong(format!("{} discards a block that is sound", self.name));
        }
        let name = (identity.namespace, identity.key);
        let same = state.blocks.get(&name);
        if same.is_some_and(|stored| stored.memory.is(&pinned.memory)) {
            state.blocks.remove(&name);
        }
    }

    pub fn clear(&self, namespace: NamespaceId) -> usize {
        if let Some(disk) = self.disk() {
            return disk.clear(namespace);
        }
        let mut keys: BTreeSet<Key> = self
            .all(namespace)
            .into_iter()
            .map(|(key, _)| key)
            .collect();
        let held = self.state();
        let here = held.held.values().map(|held| held.place.identity);
        keys.extend(
            here.filter(|one| one.namespace == namespace)
                .map(|one| one.key),
        );
        drop(held);
        self.remove(namespace, &keys.into_iter().collect::<Vec<_>>())
    }

    pub fn remove(&self, namespace: NamespaceId, keys: &[Key]) -> usize {
        if let Some(disk) = self.disk() {
            let removable = self.state().removable.clone();
            let all = keys
                .iter()
                .all(|key| removable.contains(&(namespace, *key)));
            if !all {
                wrong(format!("{keys:?} are removed, which nobody has asked for"));
            }
            return disk.remove(namespace, keys);
        }
        let mut state = self.state();
        let State {
            held,
            blocks,
            removable,
            ..
        } = &mut *state;
        for held in held.values_mut().filter(|held| held.copy) {
            let identity = &held.place.identity;
            held.removed |= identity.namespace == namespace && keys.contains(&identity.key);
        }
        let mut removed = 0;
        for key in keys {
            if !removable.contains(&(namespace, *key)) {
                wrong(format!("{key} is removed, which nobody has asked for"));
            }
            removed += usize::from(blocks.remove(&(namespace, *key)).is_some());
        }
        removed
    }
}

impl TakesBack for Shelf {
    fn take_back(&self, token: Token) {
        if self.state().held.remove(&token.sequence).is_none() {
            wrong(format!("{} is given back what is not reserved", self.name));
        }
    }
}

impl Shelf {
    /// What a pin or a reservation holds.
    fn holds(&self, place: &Place) -> Result<Stored, Error> {
        let state = self.state();
        let held = state.held.get(&place.token.sequence);
        let held = held.ok_or(Error::Closed(": it is not held"))?;
        Ok(held.stored.clone())
    }
}

impl Ends for Shelf {
    fn buffers(
        &self,
        place: &Place,
        offset: u64,
        len: u64,
        into: &mut Vec<Buffer>,
    ) -> Result<(), Error> {
        let mut state = self.state();
        let broken = state.mood.broken;
        if state.rng.below(100) < broken {
            return Err(Error::Closed(": its medium is broken"));
        }
        drop(state);
        if let Some(disk) = self.disk() {
            return disk.tier.ends().buffers(place, offset, len, into);
        }
        let memory = self.holds(place)?.memory.buffer();
        into.clear();
        into.push(memory.slice(offset as usize, len as usize)?);
        Ok(())
    }

    fn parts(&self, place: &Place) -> Result<Option<Vec<Part>>, Error> {
        if let Some(disk) = self.disk() {
            return disk.tier.ends().parts(place);
        }
        let stored = self.holds(place)?;
        if let Some(file) = stored.memory.block_file() {
            return file.parts(place);
        }
        Ok(stored.table(&place.identity, &stored.memory.to_vec()))
    }

    fn write_parts(&self, place: &Place, found: &[Part]) -> Result<(), Error> {
        if let Some(disk) = self.disk() {
            return disk.tier.ends().write_parts(place, found);
        }
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

    fn directory(&self) -> Option<Arc<Dir>> {
        if let Some(disk) = self.disk() {
            return disk.tier.ends().directory();
        }
        Some(Arc::clone(&self.folder.get()?.dir))
    }

    fn file(&self, place: &Place) -> Option<FileAt> {
        if let Some(disk) = self.disk() {
            return disk.tier.ends().file(place);
        }
        self.holds(place).ok()?.memory.file()
    }
}
