//! Condition variables that a forked child may use.
//!
//! parking_lot keeps all sleeping threads of the process in one table. After a fork the child's
//! copy of the table names threads of the parent. If the C library reuses their memory for new
//! threads, an entry is in the table twice, and a search of the table does not end. This type keeps
//! no table: a thread waits on a futex until a counter changes.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;
use rustix::io::Errno;
use rustix::thread::futex::{self, Flags, Timespec};

/// Longer limits count as none.
const LIMIT_MOST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// A condition variable for state that a `parking_lot::Mutex` guards.
///
/// A wait may end without a notification, so the caller must check its condition again.
#[derive(Default)]
pub struct Condvar {
    /// Counts notifications.
    turn: AtomicU32,
    /// Threads that wait; in a forked child those of the parent too.
    waiting: AtomicU32,
}

/// The outcome of a wait with a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waited {
    timed_out: bool,
}

impl Waited {
    /// Returns true if the limit expired before a notification.
    #[must_use]
    pub fn timed_out(self) -> bool {
        self.timed_out
    }
}

impl Condvar {
    /// Creates a condition variable without waiting threads.
    #[must_use]
    pub const fn new() -> Condvar {
        Condvar {
            turn: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
        }
    }

    /// Releases the lock until a notification, and then acquires it again.
    pub fn wait<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>) {
        let _notified = self.sleep(guard, None);
    }

    /// Waits as [`wait`](Condvar::wait) does, but at most for `limit`.
    pub fn wait_for<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>, limit: Duration) -> Waited {
        let end = Instant::now() + limit.min(LIMIT_MOST);
        self.sleep(guard, Some(end))
    }

    /// Waits as [`wait`](Condvar::wait) does, but at most until `end`.
    pub fn wait_until<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>, end: Instant) -> Waited {
        self.sleep(guard, Some(end))
    }

    /// Wakes one waiting thread.
    pub fn notify_one(&self) {
        self.notify(1);
    }

    /// Wakes all waiting threads.
    pub fn notify_all(&self) {
        self.notify(i32::MAX.unsigned_abs());
    }

    fn sleep<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>, end: Option<Instant>) -> Waited {
        self.waiting.fetch_add(1, SeqCst);
        let turn = self.turn.load(SeqCst);
        let waited = MutexGuard::unlocked(guard, || self.sleep_until(turn, end));
        self.waiting.fetch_sub(1, SeqCst);
        waited
    }

    fn sleep_until(&self, turn: u32, end: Option<Instant>) -> Waited {
        while self.turn.load(SeqCst) == turn {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Waited { timed_out: true };
            }
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            match futex::wait(&self.turn, Flags::PRIVATE, turn, left.as_ref()) {
                // The loop checks the counter and the time.
                Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => {}
                Err(_) => std::thread::yield_now(),
            }
        }
        Waited { timed_out: false }
    }

    fn notify(&self, count: u32) {
        // A thread that began to wait earlier has read the counter while it held the lock.
        self.turn.fetch_add(1, SeqCst);
        if self.waiting.load(SeqCst) > 0 {
            let _woken = futex::wake(&self.turn, Flags::PRIVATE, count);
        }
    }
}

impl fmt::Debug for Condvar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Condvar").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_waiter_is_woken_and_no_notification_is_lost() {
        const EACH: u32 = 20_000;
        let (state, changed) = (Mutex::new(0), Condvar::new());
        std::thread::scope(|scope| {
            for mine in 0..2 {
                let (state, changed) = (&state, &changed);
                scope.spawn(move || {
                    let mut turn = state.lock();
                    for _ in 0..EACH {
                        while *turn % 2 != mine {
                            changed.wait(&mut turn);
                        }
                        *turn += 1;
                        changed.notify_one();
                    }
                });
            }
        });
        assert_eq!(*state.lock(), 2 * EACH);
    }

    #[test]
    fn a_limit_ends_a_wait_and_nothing_else_does() {
        let (state, changed) = (Mutex::new(()), Condvar::default());
        changed.notify_all();
        let mut guard = state.lock();
        let begun = Instant::now();
        assert!(
            changed
                .wait_for(&mut guard, Duration::from_millis(20))
                .timed_out()
        );
        assert!(begun.elapsed() >= Duration::from_millis(20));
        assert!(changed.wait_until(&mut guard, begun).timed_out());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                drop(state.lock());
                changed.notify_all();
            });
            assert!(
                !changed
                    .wait_for(&mut guard, LONG.saturating_mul(u32::MAX))
                    .timed_out()
            );
        });
    }
}
