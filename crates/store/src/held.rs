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
use std::time::Instant;

use parking_lot::{Condvar, MutexGuard};

thread_local! {
    /// Locks that this thread holds; counted in debug builds.
    static HELD: Cell<u32> = const { Cell::new(0) };
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
pub(crate) struct Mutex<T>(parking_lot::Mutex<T>);

/// Holds it.
pub(crate) struct Guard<'a, T> {
    guard: MutexGuard<'a, T>,
    _held: Held,
}

struct Held;

impl Held {
    fn new() -> Held {
        if cfg!(debug_assertions) {
            HELD.set(HELD.get() + 1);
        }
        Held
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if cfg!(debug_assertions) {
            HELD.set(HELD.get() - 1);
        }
    }
}

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Mutex<T> {
        Mutex(parking_lot::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> Guard<'_, T> {
        Guard {
            guard: self.0.lock(),
            _held: Held::new(),
        }
    }

    /// As [`Mutex::lock`], for a question: `None` where it is taken and the caller does not wait.
    pub(crate) fn look(&self) -> Option<Guard<'_, T>> {
        if MODE.get() == Mode::Waits {
            return Some(self.lock());
        }
        let guard = self.0.try_lock();
        if guard.is_none() {
            MODE.set(Mode::Passed);
        }
        Some(Guard {
            guard: guard?,
            _held: Held::new(),
        })
    }

    /// Whether somebody holds it now.
    pub(crate) fn is_taken(&self) -> bool {
        self.0.is_locked()
    }
}

impl<T> Guard<'_, T> {
    /// Lets go of the lock for as long as `work` takes.
    pub(crate) fn unlocked<R>(&mut self, work: impl FnOnce() -> R) -> R {
        let count = u32::from(cfg!(debug_assertions));
        HELD.set(HELD.get() - count);
        let done = MutexGuard::unlocked(&mut self.guard, work);
        HELD.set(HELD.get() + count);
        done
    }

    pub(crate) fn wait(&mut self, event: &Condvar) {
        event.wait(&mut self.guard);
    }

    /// False when it was `end` before the event.
    pub(crate) fn wait_until(&mut self, event: &Condvar, end: Instant) -> bool {
        !event.wait_until(&mut self.guard, end).timed_out()
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

/// What follows may wait for a medium.
#[inline]
pub(crate) fn may_wait() {
    debug_assert_eq!(HELD.get(), 0, "a medium is waited for under a lock");
}

/// Looks something up ([`crate::Namespace::contains`], `prefix`, `nearest`, `pin`) without waiting
/// for whoever is at work in an index. Where somebody is, the answer is `Err`, with what was found
/// so far: good for nothing, but that pins in it must be ended.
///
/// # Errors
/// The answer, where it is none.
pub fn at_once<T>(ask: impl FnOnce() -> T) -> Result<T, T> {
    MODE.set(Mode::Passes);
    let answer = ask();
    match MODE.replace(Mode::Waits) {
        Mode::Passed => Err(answer),
        _ => Ok(answer),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_does_not_wait_learns_that_a_lock_was_taken() {
        let lock = Mutex::new(7);
        let read = || lock.look().map(|guard| *guard);
        assert_eq!(at_once(read), Ok(Some(7)));
        let held = lock.lock();
        assert_eq!(at_once(read), Err(None));
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
