//! A tier that stands apart, made for histories: each question is answered at once, as a step of
//! the schedule, or not at all, and what it asks for is done when it is asked, when it is answered,
//! or never, as the seed has it. What is stored stays when it is closed.

use std::any::Any;
use std::collections::BTreeSet;
use std::fmt::Arguments;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use kvdepot_arena::parts::Part;
use kvdepot_arena::{Place, Refused, Reserved, Token, Wanted};
use kvdepot_media::{Buffer, Checksum, Mac};
use kvdepot_store::sim::{Schedule, current};
use kvdepot_store::{Directory, Ends, Error, Identity, Key, NamespaceId, Outside, Proof, Reply};
use kvdepot_testkit::Rng;
use kvdepot_testkit::sim::run::wrong;

use super::memory::Bytes;
use super::own::Own;
use super::posix::{self, OnDisk};
use super::terms::{LIMITS, Limits};

/// How a tier behaves: each of these so often in a hundred.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mood {
    /// Questions that are answered by a step of the schedule; half of those that are not lookups
    /// report progress in a step before.
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
    path: PathBuf,
    own: Arc<Own>,
    /// `Posix` has it all in the place of that, while it is open.
    disk: Mutex<Option<Arc<OnDisk>>>,
    state: Mutex<State>,
}

struct State {
    rng: Rng,
    mood: Mood,
    /// Replies that never come.
    kept: Vec<Box<dyn Any + Send>>,
    asked: u64,
    unheard: u64,
    silences: u32,
    alone_until: Option<Instant>,
    /// Whether an answer came late: who waits for it may hear of it after what came later.
    was_late: bool,
    limits: Limits,
    /// Whether it has refused anything, and the bytes of each block that was published, since it
    /// was opened.
    refused: bool,
    arrived: Vec<u64>,
    /// Nobody hears what it answers any more.
    closing: bool,
    /// Removals that were asked for, and not done yet.
    removals: Vec<Weak<Removal>>,
    /// What it was asked to publish, and has not been asked to remove since.
    publishing: Vec<(Token, Identity)>,
    /// What somebody may remove now.
    removable: BTreeSet<(NamespaceId, Key)>,
}

/// Keys that somebody removes, or a whole namespace; until it is done, or never will be.
pub struct Removal {
    namespace: NamespaceId,
    keys: Option<Vec<Key>>,
}

/// What is asked: each has its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Lookup,
    Other,
    /// Said to one that is left alone, too.
    Discard,
}

/// What becomes of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Now,
    Late,
    /// Late, with progress before.
    Slow,
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
            kept: Vec::new(),
            asked: 0,
            unheard: 0,
            silences: 0,
            alone_until: None,
            was_late: false,
            limits: LIMITS,
            refused: false,
            arrived: Vec::new(),
            closing: false,
            removals: Vec::new(),
            publishing: Vec::new(),
            removable: BTreeSet::new(),
        };
        let path = dir.join(name);
        Arc::new(Shelf {
            name,
            lasts,
            block_max,
            bytes,
            own: Own::new(name, bytes, &path),
            path,
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
        self.own.opened(number, self.lasts);
        let mut state = self.state();
        (state.asked, state.unheard) = (0, 0);
        (state.silences, state.alone_until, state.was_late) = (0, None, false);
        (state.refused, state.closing) = (false, false);
        state.arrived.clear();
        state.publishing.clear();
    }

    /// Nobody asks any more, and nothing is held.
    pub fn closed(&self) {
        let kept = std::mem::take(&mut self.state().kept);
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
        self.own.closed();
    }

    pub fn reseed(&self, rng: Rng) {
        self.state().rng = rng;
    }

    /// How long its answers are waited for.
    pub fn answers_within(&self, limits: Limits) {
        self.state().limits = limits;
    }

    /// From now on they are waited for no longer.
    pub fn closes(&self) {
        self.state().closing = true;
    }

    pub fn arrived(&self) -> Vec<u64> {
        self.state().arrived.clone()
    }

    pub fn has_refused(&self) -> bool {
        self.state().refused
    }

    pub fn set_mood(&self, mood: Mood) {
        self.state().mood = mood;
    }

    pub fn mood(&self) -> Mood {
        self.state().mood
    }

    /// What it has, where it is sound.
    pub fn has(&self, identity: &Identity) -> bool {
        let stored = match self.is_posix() {
            true => posix::read(&self.path, identity),
            false => self.own.get(identity.namespace, identity.key),
        };
        let forged = || self.is_posix() && posix::is_forged(&self.path, identity);
        stored.is_some_and(|stored| stored.is_sound(identity)) && !forged()
    }

    /// Blocks of a namespace with their bytes.
    pub fn all(&self, namespace: NamespaceId) -> Vec<(Key, u64)> {
        match self.disk() {
            Some(disk) => disk.all(namespace),
            None => self.own.all(namespace),
        }
    }

    /// Turns a byte of a block over; false where it is not there.
    pub fn rot(&self, identity: &Identity, at: u64) -> bool {
        match self.is_posix() {
            true => posix::rot(&self.path, identity, at),
            false => self.own.rot(identity, at),
        }
    }

    /// Questions so far, and those that were not answered in time.
    pub fn counts(&self) -> (u64, u64) {
        let state = self.state();
        (state.asked, state.unheard)
    }

    /// Pins, and reservations.
    pub fn held(&self) -> (u64, u64) {
        match self.disk() {
            Some(disk) => disk.held(),
            None => self.own.held(),
        }
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

    fn fate(&self, kind: Kind) -> (Fate, bool) {
        let mut state = self.state();
        state.asked += 1;
        let now = kvdepot_media::sim::now();
        let alone = state.alone_until.filter(|_| !state.was_late);
        let is_alone = alone.is_some_and(|until| now < Some(until));
        if is_alone && kind != Kind::Discard {
            wrong(format!("{} is asked, which is to be left alone", self.name));
        }
        let (mood, rolled) = (state.mood, state.rng.below(100));
        let fate = match rolled {
            rolled if rolled < mood.silent => match state.rng.once_in(2) {
                true => Fate::Dropped,
                false => Fate::Kept,
            },
            rolled if rolled < mood.silent + mood.late => {
                match kind != Kind::Lookup && state.rng.once_in(2) {
                    true => Fate::Slow,
                    false => Fate::Late,
                }
            }
            _ => Fate::Now,
        };
        if matches!(fate, Fate::Dropped | Fate::Kept) {
            state.unheard += 1;
        }
        if fate == Fate::Dropped && !is_alone {
            state.silences += 1;
            if state.silences >= FAILURES {
                state.alone_until = now.and_then(|now| now.checked_add(ALONE));
            }
        }
        state.was_late |= matches!(fate, Fate::Late | Fate::Slow);
        (fate, state.rng.once_in(2))
    }

    /// Answers a question as the mood is. `undo` ends what an answer holds that nobody gets.
    pub fn answer<T: Send + 'static>(
        self: &Arc<Shelf>,
        (reply, kind): (Reply<T>, Kind),
        does: impl FnOnce(&Arc<Shelf>) -> T + Send + 'static,
        undo: impl FnOnce(&Arc<Shelf>, T) + Send + 'static,
    ) {
        let (fate, is_eager) = self.fate(kind);
        let asked = (kvdepot_media::sim::now(), kind);
        self.say(format_args!("answers {fate:?}, eager: {is_eager}"));
        match fate {
            Fate::Now => self.deliver(reply, asked, does(self)),
            Fate::Dropped | Fate::Kept => {
                if is_eager {
                    undo(self, does(self));
                }
                match fate {
                    Fate::Kept => self.state().kept.push(Box::new(reply)),
                    _ => drop(reply),
                }
            }
            Fate::Late | Fate::Slow => {
                let mut done = None;
                let mut does = Some(does);
                if is_eager {
                    done = does.take().map(|does| does(self));
                }
                let shelf = Arc::clone(self);
                let progress = reply.progress();
                let answers = move |asked, runs| {
                    let answer = done.or_else(|| does.map(|does| does(&shelf)));
                    match (answer, runs) {
                        (Some(answer), true) => shelf.deliver(reply, asked, answer),
                        (answer, _) => {
                            shelf.state().unheard += 1;
                            if let Some(answer) = answer {
                                undo(&shelf, answer);
                            }
                            drop(reply);
                        }
                    }
                };
                let schedule: Arc<Schedule> = current().unwrap();
                schedule.push(move |runs| match fate {
                    Fate::Slow if runs => {
                        progress.made();
                        // The limit starts again if it has not passed.
                        let heard = progress.is_wanted();
                        let asked = match heard {
                            true => (kvdepot_media::sim::now(), kind),
                            false => asked,
                        };
                        let schedule: Arc<Schedule> = current().unwrap();
                        schedule.push(move |runs| answers(asked, runs));
                    }
                    _ => answers(asked, runs),
                });
            }
        }
    }

    fn deliver<T>(&self, reply: Reply<T>, asked: (Option<Instant>, Kind), answer: T) {
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
        let heard = reply.answer(answer);
        self.judge(asked, heard);
        if !heard {
            let mut state = self.state();
            state.unheard += 1;
            (state.silences, state.alone_until) = before;
        }
    }

    /// An answer is heard if and only if it comes in time.
    fn judge(&self, (asked, kind): (Option<Instant>, Kind), heard: bool) {
        let (limits, closing) = {
            let state = self.state();
            (state.limits, state.closing)
        };
        let limit = match kind {
            Kind::Lookup => limits.lookup,
            Kind::Other | Kind::Discard => limits.other,
        };
        let since = asked.map(kvdepot_arena::clock::since).unwrap_or_default();
        if heard && since > limit || !heard && since < limit && !closing {
            wrong(format!(
                "{} has answered a {kind:?} after {since:?}, with {limit:?} for it; heard: {heard}",
                self.name
            ));
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
        let refuses = state.rng.below(100) < refuses;
        state.refused |= refuses;
        refuses
    }
}

/// What the verbs do, whenever that is.
impl Shelf {
    pub fn find(&self, namespace: NamespaceId, key: Key) -> Option<Place> {
        if self.refuses() {
            return None;
        }
        match self.disk() {
            Some(disk) => disk.pin(namespace, key),
            None => self.own.pin(namespace, key),
        }
    }

    pub fn knows(&self, namespace: NamespaceId, key: Key) -> bool {
        match self.is_posix() {
            true => posix::file_of(&self.path, &Identity { namespace, key }).is_some(),
            false => self.own.get(namespace, key).is_some(),
        }
    }

    /// A name of what it has anyhow.
    pub fn nowhere(&self) -> Token {
        self.own.nowhere()
    }

    pub fn make(&self, namespace: NamespaceId, wanted: &Wanted) -> Result<Reserved, Refused> {
        let (key, copy) = (wanted.key, wanted.copy);
        self.say(format_args!("reserves {key}, a copy: {copy}"));
        match self.disk() {
            Some(disk) => disk.reserve(namespace, wanted),
            None => Ok(self.own.reserve(namespace, wanted)),
        }
    }

    /// Asked for a publication: from now on a removal ends it.
    pub fn publishes(&self, written: &[(Reserved, Checksum)]) {
        self.own.publishes(written);
        // `Posix` hears of it when it answers, which it does at once.
        let asked = written.iter().map(|(one, _)| (one.token, one.identity));
        self.state().publishing.extend(asked);
    }

    /// Whether what was asked to be published is to be still.
    fn is_awaited(&self, reserved: &Reserved) -> bool {
        let publishing = &mut self.state().publishing;
        let before = publishing.len();
        publishing.retain(|(token, _)| *token != reserved.token);
        publishing.len() < before
    }

    /// These are removed.
    fn forget(&self, namespace: NamespaceId, keys: Option<&[Key]>) {
        self.state().publishing.retain(|(_, one)| {
            one.namespace != namespace || keys.is_some_and(|keys| !keys.contains(&one.key))
        });
    }

    pub fn publish(&self, reserved: Reserved, sum: Checksum, pinned: bool) -> bool {
        let (key, len, refuses) = (reserved.identity.key, reserved.len, self.refuses());
        let is_awaited = self.is_awaited(&reserved);
        let stored = match self.disk() {
            Some(disk) => is_awaited && !refuses && disk.commit(reserved, sum, pinned),
            None => self.own.commit(reserved, sum, pinned, refuses),
        };
        self.say(format_args!("publishes {key} {sum:?}: {stored}"));
        if stored {
            self.state().arrived.push(len);
        }
        stored
    }

    pub fn unpin(&self, tokens: impl Iterator<Item = Token>) {
        let disk = self.disk();
        tokens.for_each(|token| match &disk {
            Some(disk) => disk.unpin(token),
            None => self.own.unpin(token),
        });
    }

    /// Blocks that are pinned did not verify: what is to be done, and how many it unpublishes.
    pub fn discards(&self, places: &[Place]) -> impl FnOnce(&Arc<Shelf>) -> usize + use<> {
        let (disk, places) = (self.disk(), places.to_vec());
        let own = places.iter().filter(|_| disk.is_none());
        let rotten: Vec<_> = own.filter_map(|one| self.own.rotten(one)).collect();
        move |shelf| match disk {
            Some(disk) => disk.discard(&places),
            None => shelf.own.discard(&rotten),
        }
    }

    pub fn clear(&self, namespace: NamespaceId) -> usize {
        self.forget(namespace, None);
        match self.disk() {
            Some(disk) => disk.clear(namespace),
            None => {
                let gone = self.remove(namespace, &self.own.clears(namespace));
                gone.into_iter().filter(|gone| *gone).count()
            }
        }
    }

    pub fn remove(&self, namespace: NamespaceId, keys: &[Key]) -> Vec<bool> {
        let all = {
            let removable = &self.state().removable;
            let mut keys = keys.iter();
            keys.all(|key| removable.contains(&(namespace, *key)))
        };
        if !all {
            wrong(format!("{keys:?} are removed, which nobody has asked for"));
        }
        self.forget(namespace, Some(keys));
        match self.disk() {
            Some(disk) => disk.remove(namespace, keys),
            None => self.own.remove(namespace, keys),
        }
    }

    /// Who has the bytes.
    fn medium(&self) -> Arc<dyn Ends> {
        match self.disk() {
            Some(disk) => disk.tier.ends(),
            None => Arc::clone(&self.own) as _,
        }
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
        let broken = {
            let mut state = self.state();
            let broken = state.mood.broken;
            state.rng.below(100) < broken
        };
        if broken {
            return Err(Error::Closed(": its medium is broken"));
        }
        self.medium().buffers(place, offset, len, into)
    }

    fn parts(&self, place: &Place) -> Result<Option<Vec<Part>>, Error> {
        self.medium().parts(place)
    }

    fn write_parts(&self, place: &Place, found: &[Part]) -> Result<(), Error> {
        self.medium().write_parts(place, found)
    }

    fn note_leaves(&self, place: &Place, leaves: Vec<u128>) {
        self.medium().note_leaves(place, leaves);
    }

    fn proof(&self, place: &Place) -> Option<Proof> {
        self.medium().proof(place)
    }

    fn note_macs(&self, place: &Place, macs: Vec<Mac>) {
        self.medium().note_macs(place, macs);
    }

    fn directory(&self) -> Option<Directory> {
        self.medium().directory()
    }

    fn outside(&self, place: &Place) -> Option<Outside> {
        self.medium().outside(place)
    }
}
