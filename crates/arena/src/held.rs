//! Locks that nobody holds while a medium is waited for, and calls that would rather not wait.
//!
//! Debug builds count, for each thread, how many of these locks it holds; whatever writes to a
//! medium or syncs it says so ([`may_wait`]), and panics where one is held. So every test is a
//! test of that.
//!
//! A caller that holds something precious itself, Python's interpreter lock, asks [`at_once`]: what
//! finds a lock taken leaves it, and the caller asks again once it may wait.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdepot_host::Condvar;
use kvdepot_host::cpu::time_of_this_thread;
use parking_lot::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};

/// Keys of a call that are handled before others who wait for the lock have it: some tens of
/// microseconds. The simulator's calls are short ones.
pub const TURN: usize = if cfg!(feature = "sim") { 3 } else { 64 };

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

/// A lock under which no medium is waited for.
#[derive(Default)]
pub struct Mutex<T>(parking_lot::Mutex<T>);

/// Holds it.
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

/// A unit of work: a lock taken, a key hashed, a block looked at or changed. Debug builds count
/// them, so that tests can say how the work of a call grows.
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
    /// A free one.
    pub fn new(value: T) -> Mutex<T> {
        Mutex(parking_lot::Mutex::new(value))
    }

    /// Waits for it.
    pub fn lock(&self) -> Guard<'_, T> {
        Guard {
            guard: self.0.lock(),
            held: Some(Held::new(true)),
        }
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }

    /// Whether somebody holds it now.
    pub fn is_taken(&self) -> bool {
        self.0.is_locked()
    }
}

/// As [`Mutex`], of which several may hold it for reading.
#[derive(Default)]
pub struct RwLock<T>(parking_lot::RwLock<T>);

/// Holds it for reading. Whoever has one asks for no other one of the same lock.
pub struct ReadGuard<'a, T> {
    guard: RwLockReadGuard<'a, T>,
    _held: Held,
}

/// Holds it for a change.
pub struct WriteGuard<'a, T> {
    guard: RwLockWriteGuard<'a, T>,
    _held: Held,
}

impl<T> RwLock<T> {
    pub(crate) fn new(value: T) -> RwLock<T> {
        RwLock(parking_lot::RwLock::new(value))
    }

    /// Waits for it, for reading.
    pub fn read(&self) -> ReadGuard<'_, T> {
        ReadGuard {
            guard: self.0.read(),
            _held: Held::new(true),
        }
    }

    /// As [`RwLock::read`], for all keys of a call: nobody but those who change it waits for that.
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

    /// Waits for it, for a change.
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

    /// Lets other threads have the lock before each key of a call that begins another turn; `at`
    /// counts from the first.
    pub fn take_turns(&mut self, at: usize) {
        if at > 0 && at.is_multiple_of(TURN) {
            self.give_way();
        }
    }

    /// Lets it go until `event`.
    pub fn wait(&mut self, event: &Condvar) {
        self.held = None;
        event.wait(&mut self.guard);
        self.held = Some(Held::new(true));
    }

    /// False when it was `end` before the event.
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

/// What follows may wait for a medium.
#[inline]
pub fn may_wait() {
    debug_assert_eq!(HELD.get(), 0, "a medium is waited for under a lock");
}

/// Looks something up (`contains`, `prefix`, `nearest`, `pin` of a namespace) without waiting
/// for whoever is at work in an index. Where somebody is, the answer is `Err`, with what was found
/// so far: good for nothing, but that pins in it must be ended.
///
/// # Errors
/// The answer, where it is none.
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

/// For a question that would have to wait for something else than a lock: whether it passes on, so
/// that its answer is none.
#[must_use]
pub fn passes() -> bool {
    if MODE.get() == Mode::Waits {
        return false;
    }
    MODE.set(Mode::Passed);
    true
}

/// Whether what this thread has found so far is an answer: it has passed no lock that was taken.
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
