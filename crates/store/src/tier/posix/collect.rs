//! Collection: the oldest files go when the count comes near the capacity, by whichever of those
//! who share the directory notices first.
//!
//! A look at every file says what is oldest, and what the count should be. It is not on anybody's
//! way: one thread does it, and what it has found serves for several rounds. *Age* is the time of
//! a file's last change, which a reader moves to now when it is old: so it is the time of last use,
//! as exact as needed and as cheap as possible.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_arena::{Error, Identity, clock};
use kvdepot_host::Condvar;
use kvdepot_host::fork::Origin;
use kvdepot_media::is_simulated;
use parking_lot::Mutex;

use super::agree::agree;
use super::folder::Folder;
use super::losses::{Losses, Why};
use super::name::{LEN_MAX, file_of, identity_of, room_of};
use super::usage::{self, BEGIN, Usage};
use super::uses::Uses;

/// Where a collection ends, in thousandths of the capacity.
const END: u64 = 900;

/// How much of the capacity one look remembers of the oldest files, in thousandths.
const REMEMBERED: u64 = 250;

/// Files that go before the count is told.
const EVICTIONS: usize = 256;

/// Blocks stored since a look that are kept in the order of their times; more need a new look.
/// Of those that were used since, half as many are kept: a look finds the others.
const STORED: usize = 1 << 16;

/// How long what a look has found is believed.
const BELIEVED: Duration = Duration::from_secs(300);

/// How often a process says that it is there, and looks whether there is something to do.
const TICK: Duration = Duration::from_secs(20);

/// How much of what is used goes at least where the file system is full.
const SPACE_PART: u64 = 64;

/// How often it is said that it is.
const SAID_AGAIN: Duration = Duration::from_secs(60);

/// How long others who collect may be without success, how lately one has to have said that it is
/// there, and how often is looked.
const STALLED: Duration = Duration::from_millis(300);
const ACTIVE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(5);

/// How often what others have left is swept.
const SWEEP: Duration = Duration::from_secs(60);

/// The collector of one process.
pub(super) struct Collector {
    work: Arc<Work>,
    thread: Mutex<Option<JoinHandle<()>>>,
    origin: Origin,
}

struct Work {
    folder: Arc<Folder>,
    usage: Arc<Usage>,
    state: Mutex<State>,
    changed: Condvar,
    ended: AtomicBool,
    /// When it was said last that the file system is full.
    said: Mutex<Option<Instant>>,
    losses: Arc<Losses>,
    uses: Arc<Uses>,
    /// Blocks that this process has stored since the last look, or that were used since. The tail
    /// of a prompt is older than its head, which the look may have found.
    stored: Mutex<BinaryHeap<Reverse<Old>>>,
    /// The limit of the last put.
    limit: AtomicI64,
}

/// Result of an eviction of a file.
enum Fate {
    /// It is gone: its bytes.
    Gone(u64),
    /// It was used since it was looked at: its time now.
    Used(i128),
    /// It is another one by now, or none.
    Other,
}

#[derive(Default)]
struct State {
    wanted: bool,
    wants: Wants,
    /// A round is under way, and how many have ended: who waits for one knows.
    running: bool,
    rounds: u64,
    /// The limit at which the last round ended, if it did.
    reached: Option<i64>,
}

/// The space that a put needs.
#[derive(Clone, Copy, Default)]
pub(super) struct Wants {
    /// Bytes of the capacity.
    pub(super) needed: u64,
    /// Bytes of the file system, if that is full before the directory is.
    pub(super) lacking: u64,
    /// Time of the last use before which a file may be evicted for it.
    pub(super) limit: i64,
}

impl Wants {
    fn add(&mut self, other: Wants) {
        self.needed = self.needed.max(other.needed);
        self.lacking = self.lacking.max(other.lacking);
        self.limit = self.limit.max(other.limit);
    }

    fn nothing(self) -> bool {
        self.needed == 0 && self.lacking == 0
    }
}

/// Whose turn it is to collect.
enum Turn {
    /// This process's, until it is dropped.
    Mine(#[expect(dead_code, reason = "it is held")] usage::Collector),
    /// Somebody has it who does nothing.
    PassedBy,
    Others,
}

/// A file that may go; the least is the oldest.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Old {
    changed: i128,
    folder: u32,
    name: String,
}

/// Marks of a folder that is not there, and of one that was changed just now: no times of any.
const NO_FOLDER: i128 = -1;
const UNSURE: i128 = -2;

/// What is just now, in nanoseconds.
const RECENT: i128 = 20_000_000;

/// What a look has seen until now.
#[derive(Default)]
struct Looked {
    all: Vec<(Old, u64)>,
    sum: u64,
    /// A file is counted once, wherever it is met.
    inodes: HashSet<u64>,
}

impl Looked {
    fn count(&mut self, inode: u64, bytes: u64) -> bool {
        let is_new = self.inodes.insert(inode);
        if is_new {
            self.sum = self.sum.saturating_add(bytes);
        }
        is_new
    }
}

/// What a look has found, the oldest last.
#[derive(Default)]
struct Found {
    old: Vec<Old>,
    at: Option<Instant>,
}

impl Collector {
    pub(super) fn start(
        folder: &Arc<Folder>,
        usage: &Arc<Usage>,
        (losses, uses): (&Arc<Losses>, &Arc<Uses>),
    ) -> Result<Collector, Error> {
        let work = Arc::new(Work {
            folder: Arc::clone(folder),
            usage: Arc::clone(usage),
            state: Mutex::default(),
            changed: Condvar::new(),
            ended: AtomicBool::new(false),
            said: Mutex::default(),
            losses: Arc::clone(losses),
            uses: Arc::clone(uses),
            stored: Mutex::default(),
            limit: AtomicI64::new(i64::MAX),
        });
        let mut thread = None;
        if !is_simulated() {
            let work = Arc::clone(&work);
            let started = std::thread::Builder::new().name("kvdepot-collect".into());
            let started = started.spawn(move || work.run());
            thread = Some(started.map_err(|source| Error::Io {
                path: "cannot start a thread".into(),
                source,
            })?);
        }
        Ok(Collector {
            work,
            thread: Mutex::new(thread),
            origin: Origin::here()?,
        })
    }

    /// Has a round begin soon.
    pub(super) fn wake(&self) {
        self.work.state.lock().wanted = true;
        self.work.changed.notify_all();
    }

    /// Sets the limit of a put: rounds that nobody waits for have the last one.
    pub(super) fn set_limit(&self, limit: i64) {
        self.work.limit.store(limit, Ordering::Relaxed);
    }

    /// Notes that this process has stored a block, with the time of its file.
    pub(super) fn note_stored(&self, name: &Identity, time: i64) {
        let stored = Old {
            changed: time.into(),
            folder: self.work.folder.number_of(name),
            name: file_of(name),
        };
        self.work.keep(stored, STORED);
    }

    /// Opens the directory again, if somebody has removed it.
    pub(super) fn open_again(&self) {
        self.work.open_again();
    }

    /// Waits for the end of a round that begins now, and evicts files until there is space. Returns
    /// false if no file is left that may be evicted.
    pub(super) fn make_room(&self, wants: Wants, patience: Duration) -> bool {
        let is_left = |reached: Option<i64>| reached.is_none_or(|reached| wants.limit > reached);
        if self.thread.lock().is_none() {
            return is_left(self.work.round(&mut Found::default(), wants, false));
        }
        let deadline = clock::now() + patience;
        let mut state = self.work.state.lock();
        state.wanted = true;
        state.wants.add(wants);
        self.work.changed.notify_all();
        // One that is under way has looked already.
        let until = state.rounds + 1 + u64::from(state.running);
        while state.rounds < until && !self.work.ended.load(Ordering::Acquire) {
            let waited = self.work.changed.wait_until(&mut state, deadline);
            if waited.timed_out() {
                break;
            }
        }
        is_left(state.reached)
    }

    pub(super) fn end(&self, deadline: Instant) {
        self.work.ended.store(true, Ordering::Release);
        self.work.changed.notify_all();
        // A hung file system is left alone, as is a thread of another process.
        let thread = self.thread.lock().take();
        if let Some(thread) = thread.filter(|_| self.origin.is_here()) {
            while !thread.is_finished() && clock::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.end(clock::now() + Duration::from_secs(1));
    }
}

impl Work {
    fn run(&self) {
        let mut found = Found::default();
        let mut swept: Option<Instant> = None;
        while !self.ended.load(Ordering::Acquire) {
            let sweeps = swept.is_none_or(|at| clock::since(at) >= SWEEP);
            if sweeps {
                swept = Some(clock::now());
            }
            let wants = {
                let mut state = self.state.lock();
                (state.running, state.wanted) = (true, false);
                std::mem::take(&mut state.wants)
            };
            let reached = self.round(&mut found, wants, sweeps);
            let mut state = self.state.lock();
            (state.running, state.reached) = (false, reached);
            state.rounds += 1;
            self.changed.notify_all();
            if !state.wanted && !self.ended.load(Ordering::Acquire) {
                let _waited = self.changed.wait_for(&mut state, TICK);
            }
        }
    }

    fn open_again(&self) {
        let again = self.folder.open_again().and_then(|again| {
            if again {
                self.usage.open_again(&self.folder.dir())?;
                agree(
                    &self.folder,
                    Some(self.usage.capacity()),
                    Some(self.folder.folders()),
                )?;
            }
            Ok(again)
        });
        let path = self.folder.path.display();
        match again {
            Ok(true) => tracing::warn!(%path,
                "directory was deleted; created again, but its blocks are lost"),
            Ok(false) => {}
            Err(error) => {
                tracing::warn!(%error, %path,
                    "directory was deleted, and cannot be created again; its blocks are misses");
            }
        }
    }

    /// Returns the limit, if the round ended since no file is left that was used before it.
    fn round(&self, found: &mut Found, wants: Wants, sweeps: bool) -> Option<i64> {
        self.open_again();
        self.collect(found, wants, sweeps).unwrap_or_else(|error| {
            tracing::warn!(%error, path = %self.folder.path.display(),
                "cannot evict blocks; puts may find no space");
            None
        })
    }

    fn collect(&self, found: &mut Found, wants: Wants, sweeps: bool) -> Result<Option<i64>, Error> {
        self.folder.still_here()?;
        if sweeps {
            let swept = self.folder.sweep();
            if swept > 0 {
                tracing::info!(bytes = swept, "removed temporary files of dead processes");
                self.usage.freed(swept)?;
            }
        }
        let capacity = self.usage.capacity();
        let Wants {
            needed, lacking, ..
        } = wants;
        let limit = match wants.nothing() {
            true => self.limit.load(Ordering::Relaxed),
            false => wants.limit,
        };
        let lacks = |used: u64| needed > 0 && used + needed > capacity;
        let used = self.usage.used()?;
        if used < self.usage.part(BEGIN) && !lacks(used) && lacking == 0 {
            return Ok(None);
        }
        let end = self.usage.part(END).min(capacity.saturating_sub(needed));
        let end = match lacking {
            0 => end,
            // Enough for some, so that not each of them has to ask.
            _ => end.min(used.saturating_sub(lacking.max(used / SPACE_PART))),
        };
        if lacking > 0 {
            self.warn_of_space(used);
        }
        let alone = self.alone(end, wants)?;
        if matches!(alone, Turn::Others) {
            return Ok(None);
        }
        loop {
            let used = self.usage.used()?;
            if used <= end || self.ended.load(Ordering::Acquire) {
                return Ok(None);
            }
            let fresh = found.at.is_some_and(|at| clock::since(at) < BELIEVED);
            if found.old.is_empty() || !fresh || self.stored.lock().len() >= STORED {
                *found = self.look(self.usage.part(REMEMBERED))?;
                if found.old.is_empty() {
                    return Ok(None);
                }
                continue;
            }
            let (mut freed, mut count, mut used_since) = (0, 0, 0);
            while freed < used - end
                && count < EVICTIONS
                && let Some(old) = self.oldest(found)
            {
                if old.changed >= i128::from(limit) {
                    found.old.push(old);
                    self.usage.freed(freed)?;
                    return Ok(Some(limit));
                }
                count += 1;
                // What cannot be removed stays, and others go.
                match self.evict(&old).unwrap_or_else(|error| {
                    tracing::debug!(%error, name = old.name, "cannot delete a file");
                    Fate::Other
                }) {
                    Fate::Gone(bytes) => freed += bytes,
                    Fate::Used(changed) => {
                        used_since += 1;
                        // The head of its prompt may be found with the time of that use.
                        self.keep(Old { changed, ..old }, STORED / 2);
                    }
                    Fate::Other => {}
                }
            }
            self.usage.freed(freed)?;
            self.folder.still_here()?;
            // Of a whole look: it would find the same again.
            if freed == 0 && used_since == 0 && found.old.is_empty() {
                return Ok(None);
            }
        }
    }

    /// Takes the oldest of the files that the last look found and of those stored or used since.
    fn oldest(&self, found: &mut Found) -> Option<Old> {
        let mut stored = self.stored.lock();
        let both = stored.peek().zip(found.old.last());
        match both.is_some_and(|(Reverse(stored), found)| stored < found) {
            true => stored.pop().map(|Reverse(stored)| stored),
            false => found.old.pop(),
        }
    }

    /// Keeps a file in the order of the others, of which there are `most` at most.
    fn keep(&self, file: Old, most: usize) {
        let mut stored = self.stored.lock();
        if stored.len() < most {
            stored.push(Reverse(file));
        }
    }

    /// Waits for the turn to collect, where somebody needs it; others may do it meanwhile. One who
    /// has the turn and does nothing, because its process is stopped, is passed by: two who collect
    /// at once only do some of it twice.
    fn alone(&self, end: u64, wants: Wants) -> Result<Turn, Error> {
        let (mut least, mut since) = (u64::MAX, clock::now());
        loop {
            if let Some(collector) = self.usage.collector() {
                return Ok(Turn::Mine(collector));
            }
            let used = self.usage.used()?;
            if wants.nothing() || used <= end || self.ended.load(Ordering::Acquire) {
                return Ok(Turn::Others);
            }
            if used < least {
                (least, since) = (used, clock::now());
            } else if clock::since(since) >= STALLED {
                if self.folder.others_act(ACTIVE)? {
                    return Ok(Turn::Others);
                }
                tracing::warn!("eviction by another process stalled; this process evicts instead");
                return Ok(Turn::PassedBy);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Says, once in a while, that the file system is full.
    fn warn_of_space(&self, used: u64) {
        let mut said = self.said.lock();
        if said.is_none_or(|at| clock::since(at) >= SAID_AGAIN) {
            *said = Some(clock::now());
            tracing::warn!(
                path = %self.folder.path.display(),
                used,
                capacity = self.usage.capacity(),
                "file system full, although the tier is below its capacity; evicting blocks"
            );
        }
    }

    /// Removes a file, unless it has been used since it was looked at, or marked.
    fn evict(&self, old: &Old) -> Result<Fate, Error> {
        let Some(folder) = self.folder.folder(old.folder)? else {
            return Ok(Fate::Other);
        };
        let Some(seen) = folder.look(&old.name)? else {
            return Ok(Fate::Other);
        };
        let Some(name) = identity_of(&old.name) else {
            return Ok(Fate::Other);
        };
        if seen.changed != old.changed {
            return Ok(Fate::Used(seen.changed));
        }
        let used = self.uses.last(&name);
        if let Some(used) = used.filter(|used| i128::from(*used) > seen.changed) {
            folder.mark_used_at(&old.name, used)?;
            let Some(marked) = folder.look(&old.name)? else {
                return Ok(Fate::Other);
            };
            // A file system with coarse times may have this one already.
            if marked.changed != seen.changed {
                return Ok(Fate::Used(marked.changed));
            }
        }
        let len = self.losses.len_of(&self.folder, &name);
        if !folder.remove(&old.name)? {
            return Ok(Fate::Other);
        }
        let bytes = room_of(seen.len);
        self.losses.went(&name, Why::Evicted, bytes, len);
        Ok(Fate::Gone(bytes))
    }

    /// Looks at every file: what is oldest, as many as make `remembered` bytes, and how much there
    /// is.
    fn look(&self, remembered: u64) -> Result<Found, Error> {
        let counted = self.usage.used()?;
        self.stored.lock().clear();
        let mut looked = Looked::default();
        let mut marks = Vec::new();
        for number in 0..self.folder.folders() {
            marks.push(self.look_in(number, &mut looked)?);
        }
        // What is in no file yet is in one that is found from now on.
        let unseen = self.usage.unseen();
        let (sharers, new) = self.folder.new_files()?;
        for (inode, bytes) in new {
            looked.count(inode, bytes);
        }
        // What was published meanwhile, and is new no more.
        for (number, mark) in (0..).zip(marks) {
            let folder = self.folder.folder(number).unwrap_or_default();
            let now = folder.map_or(Ok(NO_FOLDER), |folder| folder.changed());
            if now.is_ok_and(|now| now != mark) {
                self.look_in(number, &mut looked)?;
            }
        }
        if self.ended.load(Ordering::Acquire) {
            return Ok(Found::default());
        }
        let sum = looked.sum.saturating_add(unseen);
        self.usage.found(counted, sum, sharers)?;
        let mut all = looked.all;
        all.sort_unstable_by_key(|(old, _)| old.changed);
        if let Some((oldest, _)) = all.first() {
            let since = i128::from(self.folder.now()) - oldest.changed;
            let since = u64::try_from(since).unwrap_or(0);
            self.usage.turned_over(Duration::from_nanos(since))?;
        }
        let mut bytes = 0;
        let within = |(_, room): &(Old, u64)| {
            let first = bytes < remembered;
            bytes += room;
            first
        };
        let old = all.into_iter().take_while(within).map(|(old, _)| old);
        let mut old: Vec<Old> = old.collect();
        old.reverse();
        Ok(Found {
            old,
            at: Some(clock::now()),
        })
    }

    /// Looks at the files of a folder that are not known yet; a mark that is another one when
    /// something has been published there since.
    fn look_in(&self, number: u32, looked: &mut Looked) -> Result<i128, Error> {
        if self.ended.load(Ordering::Acquire) {
            return Ok(NO_FOLDER);
        }
        // What cannot be looked at is no reason to collect nothing.
        let Ok(Some(folder)) = self.folder.folder(number) else {
            return Ok(NO_FOLDER);
        };
        let now = self.folder.still_here()?;
        let mark = folder.changed()?;
        for name in folder.names().unwrap_or_default() {
            // What else lies there is not ours.
            let seen = identity_of(&name).and_then(|_| folder.look(&name).ok()?);
            let Some(seen) = seen.filter(|seen| seen.len <= LEN_MAX) else {
                continue;
            };
            let bytes = room_of(seen.len);
            if looked.count(seen.inode, bytes) {
                let old = Old {
                    changed: seen.changed,
                    folder: number,
                    name,
                };
                looked.all.push((old, bytes));
            }
        }
        // The clock of a file system stands still for some milliseconds.
        Ok(if now - mark < RECENT { UNSURE } else { mark })
    }
}
