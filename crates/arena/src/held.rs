//! Locks that must not be held during I/O on a medium, and lookups that do not wait for locks.
//!
//! Debug builds count, per thread, how many of these locks it holds. Code that writes to a medium
//! or syncs it calls [`may_wait`], which panics if the thread holds one. So every test checks this
//! rule.
//!
//! A caller that itself holds an important lock, such as Python's interpreter lock, uses
//! [`at_once`]. A lookup then skips locks that are taken, and the caller repeats it when it may
//! wait.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdepot_host::Condvar;
use kvdepot_host::cpu::time_of_this_thread;
use parking_lot::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};

/// Returns the number of keys of a call that are processed before waiting threads get the lock:
/// some tens of microseconds. It is smaller in simulations.
#[must_use]
pub fn turn_len() -> usize {
    kvdepot_media::items_per_turn(3, 64)
}

thread_local! {
    /// Locks that this thread holds; counted in debug builds.
    static HELD: Cell<u32> = const { Cell::new(0) };
    /// Whether a lock that it holds is being measured.
    static MEASURED: Cell<bool> = const { Cell::new(false) };
    static MODE: Cell<Mode> = const { Cell::new(Mode::Waits) };
}

/// What this thread does at a lock that is taken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Waits,
    /// It passes on.
    Passes,
    /// It has passed on, so that its answer is none.
    Passed,
}

/// A mutual exclusion lock that must not be held during I/O on a medium.
#[derive(Default)]
pub struct Mutex<T>(parking_lot::Mutex<T>);

/// A guard of [`Mutex`], which holds the lock.
pub struct Guard<'a, T> {
    guard: MutexGuard<'a, T>,
    held: Option<Held>,
}

struct Held {
    /// The thread's processor time, where holds are measured, and this is the thread's first.
    since: Option<Duration>,
    #[cfg(any(test, feature = "sim"))]
    _steps: Option<Counted>,
}

#[cfg(any(test, feature = "sim"))]
thread_local! {
    /// Locks that this thread holds under which steps are counted, steps under the first of them,
    /// and the most there were.
    static STEPS: Cell<(u32, u32, u32)> = const { Cell::new((0, 0, 0)) };
}

/// Units of work since the process began: of all threads, and of this one.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Work {
    /// Of all threads.
    pub all: u64,
    /// Of this thread.
    pub mine: u64,
}

static WORK: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static WORK_HERE: Cell<u64> = const { Cell::new(0) };
}

/// Counts a unit of work: a lock taken, a key hashed, a block examined or changed.
///
/// Only debug builds count them, so that tests can check how the work of a call grows.
#[inline]
pub fn worked() {
    if cfg!(debug_assertions) {
        WORK.fetch_add(1, Ordering::Relaxed);
        WORK_HERE.set(WORK_HERE.get() + 1);
    }
}

/// The work so far; zero in builds that do not count it.
#[doc(hidden)]
#[must_use]
pub fn work() -> Work {
    Work {
        all: WORK.load(Ordering::Relaxed),
        mine: WORK_HERE.get(),
    }
}

/// A lock under which steps are counted.
#[cfg(any(test, feature = "sim"))]
struct Counted;

#[cfg(any(test, feature = "sim"))]
impl Counted {
    fn new() -> Counted {
        let (locks, steps, most) = STEPS.get();
        STEPS.set((locks + 1, if locks == 0 { 0 } else { steps }, most));
        Counted
    }
}

#[cfg(any(test, feature = "sim"))]
impl Drop for Counted {
    fn drop(&mut self) {
        let (locks, steps, most) = STEPS.get();
        let most = if locks == 1 { most.max(steps) } else { most };
        STEPS.set((locks - 1, steps, most));
    }
}

/// A block of an index, or what a lock guards, is looked at or changed: some tenths of a
/// microsecond. Tests count them.
#[inline]
pub(crate) fn stepped() {
    worked();
    #[cfg(any(test, feature = "sim"))]
    {
        let (locks, steps, most) = STEPS.get();
        STEPS.set((locks, steps + 1, most));
    }
}

/// The most steps of this thread under a lock since the last call, but for locks that it
/// [shares](RwLock::share).
#[doc(hidden)]
#[cfg(any(test, feature = "sim"))]
pub fn most_steps() -> u32 {
    let (locks, steps, most) = STEPS.get();
    STEPS.set((locks, steps, 0));
    most
}

impl Held {
    /// With `counts`, steps under it are counted.
    #[cfg_attr(
        not(any(test, feature = "sim")),
        expect(unused_variables, reason = "nothing is counted")
    )]
    fn new(counts: bool) -> Held {
        if cfg!(debug_assertions) {
            HELD.set(HELD.get() + 1);
        }
        worked();
        // Within another one it would be measured as a part of that, and prolong it.
        let is_watched = WATCHED.load(Ordering::Relaxed) && !MEASURED.replace(true);
        Held {
            since: is_watched.then(time_of_this_thread),
            #[cfg(any(test, feature = "sim"))]
            _steps: counts.then(Counted::new),
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if cfg!(debug_assertions) {
            HELD.set(HELD.get() - 1);
        }
        if let Some(since) = self.since {
            MEASURED.set(false);
            let held = time_of_this_thread().saturating_sub(since);
            LONGEST_NS.fetch_max(held.as_nanos() as u64, Ordering::Relaxed);
        }
    }
}

/// Whether holds are measured, and the longest one.
static WATCHED: AtomicBool = AtomicBool::new(false);
static LONGEST_NS: AtomicU64 = AtomicU64::new(0);

/// The longest that a lock under which no medium is waited for was held since the last call, in the
/// processor time of the thread; for `kvdepot bench`. Holds are measured after a call with `watch`.
#[doc(hidden)]
pub fn longest_hold(watch: bool) -> Duration {
    WATCHED.store(watch, Ordering::Relaxed);
    Duration::from_nanos(LONGEST_NS.swap(0, Ordering::Relaxed))
}

impl<T> Mutex<T> {
    /// Creates a lock that is free.
    pub fn new(value: T) -> Mutex<T> {
        Mutex(parking_lot::Mutex::new(value))
    }

    /// Waits for the lock and takes it.
    pub fn lock(&self) -> Guard<'_, T> {
        Guard {
            guard: self.0.lock(),
            held: Some(Held::new(true)),
        }
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }

    /// Returns true if a thread holds the lock now.
    pub fn is_taken(&self) -> bool {
        self.0.is_locked()
    }
}

/// A reader-writer lock that must not be held during I/O on a medium.
#[derive(Default)]
pub struct RwLock<T>(parking_lot::RwLock<T>);

/// A guard that holds the lock for reading. A thread that has one must not take another one of the
/// same lock.
pub struct ReadGuard<'a, T> {
    guard: RwLockReadGuard<'a, T>,
    _held: Held,
}

/// A guard that holds the lock for writing.
pub struct WriteGuard<'a, T> {
    guard: RwLockWriteGuard<'a, T>,
    _held: Held,
}

impl<T> RwLock<T> {
    pub(crate) fn new(value: T) -> RwLock<T> {
        RwLock(parking_lot::RwLock::new(value))
    }

    /// Waits for the lock and takes it for reading.
    pub fn read(&self) -> ReadGuard<'_, T> {
        ReadGuard {
            guard: self.0.read(),
            _held: Held::new(true),
        }
    }

    /// Takes the lock for reading for all keys of a call. Only writers wait for such a guard, so it
    /// may be held for longer.
    pub fn share(&self) -> ReadGuard<'_, T> {
        ReadGuard {
            guard: self.0.read(),
            _held: Held::new(false),
        }
    }

    /// For a question: `None` where it is taken and the caller does not wait.
    pub(crate) fn look(&self) -> Option<ReadGuard<'_, T>> {
        if MODE.get() == Mode::Waits {
            return Some(self.read());
        }
        let guard = self.0.try_read();
        if guard.is_none() {
            MODE.set(Mode::Passed);
        }
        Some(ReadGuard {
            guard: guard?,
            _held: Held::new(true),
        })
    }

    /// Waits for the lock and takes it for writing.
    pub fn write(&self) -> WriteGuard<'_, T> {
        WriteGuard {
            guard: self.0.write(),
            _held: Held::new(true),
        }
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }

    /// Whether somebody holds it for a change now.
    pub(crate) fn is_being_changed(&self) -> bool {
        self.0.is_locked_exclusive()
    }
}

impl<T> Deref for ReadGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> Deref for WriteGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for WriteGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

impl<T> Guard<'_, T> {
    /// Lets go of the lock for as long as `work` takes.
    pub(crate) fn unlocked<R>(&mut self, work: impl FnOnce() -> R) -> R {
        self.held = None;
        let done = MutexGuard::unlocked(&mut self.guard, work);
        self.held = Some(Held::new(true));
        done
    }

    /// Lets those who wait for the lock have it first: who sleeps is woken with it, and who still
    /// looks for it finds it free for a moment.
    pub(crate) fn give_way(&mut self) {
        /// Some hundred nanoseconds.
        const LOOKS: usize = 16;
        self.held = None;
        MutexGuard::bump(&mut self.guard);
        let look = || (0..LOOKS).for_each(|_| std::hint::spin_loop());
        MutexGuard::unlocked(&mut self.guard, look);
        self.held = Some(Held::new(true));
    }

    /// Gives other threads the lock if key number `at` of a call begins a new turn ([`turn_len`]).
    /// Numbers start at 0.
    pub fn take_turns(&mut self, at: usize) {
        if at > 0 && at.is_multiple_of(turn_len()) {
            self.give_way();
        }
    }

    /// Releases the lock until `event` is notified.
    pub fn wait(&mut self, event: &Condvar) {
        self.held = None;
        event.wait(&mut self.guard);
        self.held = Some(Held::new(true));
    }

    /// Releases the lock until `event` is notified. Returns false if `end` is reached first.
    pub fn wait_until(&mut self, event: &Condvar, end: Instant) -> bool {
        self.held = None;
        let timed_out = event.wait_until(&mut self.guard, end).timed_out();
        self.held = Some(Held::new(true));
        !timed_out
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        stepped();
        &self.guard
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        stepped();
        &mut self.guard
    }
}

/// Checks, in debug builds, that this thread may wait for a medium now.
///
/// # Panics
///
/// In debug builds, if the thread holds a lock of this module.
#[inline]
pub fn may_wait() {
    debug_assert_eq!(HELD.get(), 0, "a medium is waited for under a lock");
}

/// Runs a lookup (`contains`, `prefix`, `nearest`, `pin` of a namespace) without waiting for a
/// thread that changes an index.
///
/// # Errors
///
/// The incomplete result, if a lock was taken. Discard it, but release the pins in it.
pub fn at_once<T>(ask: impl FnOnce() -> T) -> Result<T, T> {
    /// Also where `ask` panics: else whatever this thread looks up later might be no answer.
    struct Restore;
    impl Drop for Restore {
        fn drop(&mut self) {
            MODE.set(Mode::Waits);
        }
    }
    MODE.set(Mode::Passes);
    let _waits = Restore;
    let answer = ask();
    match MODE.get() {
        Mode::Passed => Err(answer),
        _ => Ok(answer),
    }
}

/// Returns true if a lookup must skip a wait for something other than a lock; its result is then
/// incomplete.
#[must_use]
pub fn passes() -> bool {
    if MODE.get() == Mode::Waits {
        return false;
    }
    MODE.set(Mode::Passed);
    true
}

/// Returns true if the lookup of this thread has skipped nothing so far, so that its result is
/// complete.
pub fn is_answer() -> bool {
    MODE.get() != Mode::Passed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_does_not_wait_learns_that_a_lock_was_taken() {
        let lock = RwLock::new(7);
        let read = || lock.look().map(|guard| *guard);
        assert_eq!(at_once(read), Ok(Some(7)));
        let held = lock.write();
        assert_eq!(at_once(read), Err(None));
        assert_eq!(at_once(|| (read(), is_answer())), Err((None, false)));
        assert!(is_answer(), "of the next call");
        let panics = || at_once(|| std::panic::resume_unwind(Box::new(())));
        assert!(std::panic::catch_unwind(panics).is_err() && MODE.get() == Mode::Waits);
        drop(held);
        assert_eq!(at_once(read), Ok(Some(7)));
        assert_eq!(read(), Some(7));
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "under a lock")]
    fn a_medium_that_is_waited_for_under_a_lock_is_noticed() {
        let lock = Mutex::new(());
        let mut guard = lock.lock();
        guard.unlocked(may_wait);
        may_wait();
    }
}
