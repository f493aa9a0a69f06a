//! Collection: the oldest files go when the count comes near the capacity, by whichever of those
//! who share the directory notices first.
//!
//! A look at every file says what is oldest, and what the count should be. It is not on anybody's
//! way: one thread does it, and what it has found serves for several rounds. *Age* is the time of
//! a file's last change, which a reader moves to now when it is old: so it is the time of last use,
//! as exact as needed and as cheap as possible.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_arena::{Error, clock};
use kvdepot_host::fork::Origin;
use kvdepot_media::is_simulated;
use parking_lot::{Condvar, Mutex};

use super::folder::{Folder, LEN_MAX, identity_of, room_of};
use super::usage::{BEGIN, Usage};

/// Where a collection ends, in thousandths of the capacity.
const END: u64 = 900;

/// How much of the capacity one look remembers of the oldest files, in thousandths.
const REMEMBERED: u64 = 250;

/// Files that go before the count is told.
const EVICTIONS: usize = 256;

/// How long what a look has found is believed.
const BELIEVED: Duration = Duration::from_secs(300);

/// How often a process says that it is there, and looks whether there is something to do.
const TICK: Duration = Duration::from_secs(20);

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
    evicted: AtomicU64,
    evicted_bytes: AtomicU64,
}

#[derive(Default)]
struct State {
    wanted: bool,
    /// What somebody wants to write, and finds no room for.
    needed: u64,
    /// A round is under way, and how many have ended: who waits for one knows.
    running: bool,
    rounds: u64,
}

/// A file that may go.
struct Old {
    changed: i128,
    folder: u32,
    name: String,
}

/// What a look has found, the oldest last.
#[derive(Default)]
struct Found {
    old: Vec<Old>,
    at: Option<Instant>,
}

impl Collector {
    pub(super) fn start(folder: &Arc<Folder>, usage: &Arc<Usage>) -> Result<Collector, Error> {
        let work = Arc::new(Work {
            folder: Arc::clone(folder),
            usage: Arc::clone(usage),
            state: Mutex::default(),
            changed: Condvar::new(),
            ended: AtomicBool::new(false),
            evicted: AtomicU64::new(0),
            evicted_bytes: AtomicU64::new(0),
        });
        let mut thread = None;
        if !is_simulated() {
            let work = Arc::clone(&work);
            let started = std::thread::Builder::new().name("kvdepot-collect".into());
            let started = started.spawn(move || work.run());
            thread = Some(started.map_err(|source| Error::Io {
                path: "thread".into(),
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

    /// Waits for the end of a round that begins now, and makes room for so many bytes.
    pub(super) fn make_room(&self, needed: u64, patience: Duration) {
        if self.thread.lock().is_none() {
            return self.work.round(&mut Found::default(), needed, false);
        }
        let deadline = clock::now() + patience;
        let mut state = self.work.state.lock();
        state.wanted = true;
        state.needed = state.needed.max(needed);
        self.work.changed.notify_all();
        // One that is under way has looked already.
        let until = state.rounds + 1 + u64::from(state.running);
        while state.rounds < until && !self.work.ended.load(Ordering::Acquire) {
            let waited = self.work.changed.wait_until(&mut state, deadline);
            if waited.timed_out() {
                return;
            }
        }
    }

    /// Blocks and bytes that this process has evicted.
    pub(super) fn evicted(&self) -> (u64, u64) {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (read(&self.work.evicted), read(&self.work.evicted_bytes))
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
            let sweeps = swept.is_none_or(|at| at.elapsed() >= SWEEP);
            if sweeps {
                swept = Some(clock::now());
            }
            let needed = {
                let mut state = self.state.lock();
                (state.running, state.wanted) = (true, false);
                std::mem::take(&mut state.needed)
            };
            self.round(&mut found, needed, sweeps);
            let mut state = self.state.lock();
            state.running = false;
            state.rounds += 1;
            self.changed.notify_all();
            if !state.wanted && !self.ended.load(Ordering::Acquire) {
                let _waited = self.changed.wait_for(&mut state, TICK);
            }
        }
    }

    fn round(&self, found: &mut Found, needed: u64, sweeps: bool) {
        if let Err(error) = self.collect(found, needed, sweeps) {
            tracing::warn!(%error, path = %self.folder.path.display(), "cannot collect");
        }
    }

    fn collect(&self, found: &mut Found, needed: u64, sweeps: bool) -> Result<(), Error> {
        self.folder.still_here()?;
        if sweeps {
            let swept = self.folder.sweep();
            if swept > 0 {
                tracing::info!(
                    bytes = swept,
                    "swept what processes have left that are gone"
                );
                self.usage.freed(swept)?;
            }
        }
        let capacity = self.usage.capacity();
        let lacks = |used: u64| needed > 0 && used + needed > capacity;
        let end = self.usage.part(END).min(capacity.saturating_sub(needed));
        let used = self.usage.used()?;
        if used < self.usage.part(BEGIN) && !lacks(used) {
            return Ok(());
        }
        let Some(_alone) = self.usage.collector() else {
            return Ok(());
        };
        loop {
            let used = self.usage.used()?;
            if used <= end || self.ended.load(Ordering::Acquire) {
                return Ok(());
            }
            let fresh = found.at.is_some_and(|at| at.elapsed() < BELIEVED);
            if found.old.is_empty() || !fresh {
                *found = self.look(self.usage.part(REMEMBERED))?;
                if found.old.is_empty() {
                    return Ok(());
                }
                continue;
            }
            let (mut freed, mut count) = (0, 0);
            while freed < used - end
                && count < EVICTIONS
                && let Some(old) = found.old.pop()
            {
                count += 1;
                // What cannot be removed stays, and others go.
                freed += self.evict(&old).unwrap_or_else(|error| {
                    tracing::debug!(%error, name = old.name, "a file cannot be removed");
                    0
                });
            }
            self.usage.freed(freed)?;
            self.folder.still_here()?;
        }
    }

    /// Removes a file, unless it has been used since it was looked at; its bytes.
    fn evict(&self, old: &Old) -> Result<u64, Error> {
        let Some(folder) = self.folder.folder(old.folder)? else {
            return Ok(0);
        };
        let Some(seen) = folder.look(&old.name)? else {
            return Ok(0);
        };
        if seen.changed != old.changed || !folder.remove(&old.name)? {
            return Ok(0);
        }
        let bytes = room_of(seen.len);
        self.evicted.fetch_add(1, Ordering::Relaxed);
        self.evicted_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(bytes)
    }

    /// Looks at every file: what is oldest, as many as make `remembered` bytes, and how much there
    /// is.
    fn look(&self, remembered: u64) -> Result<Found, Error> {
        let counted = self.usage.used()?;
        let (sharers, mut sum) = self.folder.new_bytes()?;
        let mut all = Vec::new();
        for number in 0..self.folder.folders() {
            if self.ended.load(Ordering::Acquire) {
                return Ok(Found::default());
            }
            // What cannot be looked at is no reason to collect nothing.
            let Ok(Some(folder)) = self.folder.folder(number) else {
                continue;
            };
            self.folder.still_here()?;
            for name in folder.names().unwrap_or_default() {
                // What else lies there is not ours.
                let seen = identity_of(&name).and_then(|_| folder.look(&name).ok()?);
                let Some(seen) = seen.filter(|seen| seen.len <= LEN_MAX) else {
                    continue;
                };
                let bytes = room_of(seen.len);
                sum = sum.saturating_add(bytes);
                let old = Old {
                    changed: seen.changed,
                    folder: number,
                    name,
                };
                all.push((old, bytes));
            }
        }
        self.usage.found(counted, sum, sharers)?;
        all.sort_unstable_by_key(|(old, _)| old.changed);
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
}
