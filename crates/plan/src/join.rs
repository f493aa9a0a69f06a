//! All lanes stop, then everything is released, then waiters wake: in this order, whatever failed.
//!
//! The payload sits behind one reference count. Each [`Guard`] is a reference, and so is the
//! [`Join`] of whoever still hands out guards; a [`Waiter`] is not. The last reference to go, by
//! return, by failure or by unwinding, runs the completion, releases the payload and wakes the
//! waiters. There is no other way to the payload's release, so no lane can outlive its buffers and
//! no waiter can free them early.

use std::fmt;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use crate::sync::{Arc, AtomicBool, Condvar, Mutex, Ordering, lock};

type Completion<T> = Box<dyn FnOnce(&mut T, Ending) + Send>;

/// How the lanes of a batch stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ending {
    /// A lane called [`Guard::fail`].
    pub failed: bool,
    /// A guard was dropped by a panic, or the completion panicked. What that lane had not yet
    /// reported is missing.
    pub panicked: bool,
    /// Cancellation was asked for before the last lane stopped. The lanes may have finished all
    /// the same.
    pub cancelled: bool,
}

impl Ending {
    /// Whether nothing failed, panicked or was cancelled.
    pub fn is_clean(&self) -> bool {
        *self == Ending::default()
    }
}

/// A batch that still hands out work. Counts as a guard itself, so that the first lanes to finish
/// cannot complete a batch that is still being planned; drop it when all slices are out.
pub struct Join<T>(Guard<T>);

/// What a lane holds while it touches the payload. Dropping it, also by unwinding, counts down.
pub struct Guard<T>(Arc<Flight<T>>);

/// The waiting side of a batch. It keeps nothing alive: dropping it is always safe.
#[derive(Clone)]
pub struct Waiter(Arc<Signal>);

impl<T> Join<T> {
    /// Takes the payload: buffers, their owners, room for results.
    ///
    /// `complete` runs exactly once, in the thread that drops the last guard (or this `Join`,
    /// when there is none left). It may take what it likes out of the payload; the rest is
    /// dropped right after it, and only then do waiters wake. A panic in it is caught, since the
    /// thread may already be unwinding, and reported as [`Ending::panicked`] to waiters.
    ///
    /// `complete` must not wait for its own batch. A panic in the payload's own destructor is
    /// not caught, but wakes the waiters too.
    pub fn new(payload: T, complete: impl FnOnce(&mut T, Ending) + Send + 'static) -> Join<T> {
        let signal = Arc::new(Signal::new());
        Join(Guard(Arc::new(Flight {
            payload,
            complete: Mutex::new(Some(Box::new(complete))),
            wake: Wake(signal),
        })))
    }

    /// A guard for one more lane or slice.
    pub fn guard(&self) -> Guard<T> {
        self.0.clone()
    }

    /// A handle to wait with; any number may exist.
    pub fn waiter(&self) -> Waiter {
        Waiter(Arc::clone(&self.0.0.wake.0))
    }
}

impl<T> Deref for Join<T> {
    type Target = Guard<T>;

    fn deref(&self) -> &Guard<T> {
        &self.0
    }
}

impl<T> Guard<T> {
    /// The payload, shared with all lanes.
    pub fn payload(&self) -> &T {
        &self.0.payload
    }

    /// Records that something failed; what, belongs into the payload. The other lanes go on: to
    /// stop them as well, [`cancel`](Guard::cancel).
    pub fn fail(&self) {
        self.signal().failed.store(true, Ordering::Relaxed);
    }

    /// Asks all lanes to stop early. They still count down one by one.
    pub fn cancel(&self) {
        self.signal().cancelled.store(true, Ordering::Relaxed);
    }

    /// Whether to stop early. Lanes poll this between slices.
    pub fn is_cancelled(&self) -> bool {
        self.signal().cancelled.load(Ordering::Relaxed)
    }

    fn signal(&self) -> &Signal {
        &self.0.wake.0
    }
}

impl<T> Clone for Guard<T> {
    fn clone(&self) -> Guard<T> {
        Guard(Arc::clone(&self.0))
    }
}

impl<T> Drop for Guard<T> {
    fn drop(&mut self) {
        // Flags are stored before the reference goes; the count's release and acquire make them
        // visible to the last one.
        if std::thread::panicking() {
            self.signal().panicked.store(true, Ordering::Relaxed);
        }
    }
}

impl Waiter {
    /// Waits until all lanes have stopped, the completion has run and the payload is released.
    /// False when `timeout` passed first; `None` waits as long as it takes.
    ///
    /// A thread that holds one of the batch's guards must not wait for it.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        // A deadline beyond the clock's range is no deadline.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let signal = &*self.0;
        let mut ended = lock(&signal.ended);
        while ended.is_none() {
            ended = match deadline {
                None => signal
                    .woken
                    .wait(ended)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return false;
                    }
                    let waited = signal.woken.wait_timeout(ended, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        true
    }

    /// Whether [`wait`](Waiter::wait) would return at once.
    pub fn is_done(&self) -> bool {
        self.ending().is_some()
    }

    /// How the batch ended; `None` while it has not.
    pub fn ending(&self) -> Option<Ending> {
        *lock(&self.0.ended)
    }

    /// Asks all lanes to stop early. The payload stays theirs until they have.
    pub fn cancel(&self) {
        self.0.cancelled.store(true, Ordering::Relaxed);
    }
}

/// The payload in flight. Its last reference drops it: first `drop` below, then the fields in
/// this order, so `wake` must stay last. Field drops go on when one of them panics.
struct Flight<T> {
    payload: T,
    /// Locked by nobody: the mutex makes a `Send` closure shareable between the lanes.
    complete: Mutex<Option<Completion<T>>>,
    wake: Wake,
}

impl<T> Drop for Flight<T> {
    fn drop(&mut self) {
        let complete = self
            .complete
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(complete) = complete else { return };
        let signal = &self.wake.0;
        let ending = signal.read();
        // The panic hook has told the user; the payload is dropped next, so nobody sees it broken.
        if catch_unwind(AssertUnwindSafe(|| complete(&mut self.payload, ending))).is_err() {
            signal.panicked.store(true, Ordering::Relaxed);
        }
    }
}

/// Wakes the waiters when it is dropped.
struct Wake(Arc<Signal>);

impl Drop for Wake {
    fn drop(&mut self) {
        *lock(&self.0.ended) = Some(self.0.read());
        self.0.woken.notify_all();
    }
}

/// What lanes and waiters share besides the payload.
struct Signal {
    failed: AtomicBool,
    panicked: AtomicBool,
    cancelled: AtomicBool,
    ended: Mutex<Option<Ending>>,
    woken: Condvar,
}

impl Signal {
    fn new() -> Signal {
        Signal {
            failed: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            cancelled: AtomicBool::new(false),
            ended: Mutex::new(None),
            woken: Condvar::new(),
        }
    }

    fn read(&self) -> Ending {
        Ending {
            failed: self.failed.load(Ordering::Relaxed),
            panicked: self.panicked.load(Ordering::Relaxed),
            cancelled: self.cancelled.load(Ordering::Relaxed),
        }
    }
}

impl<T> fmt::Debug for Join<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Join").field(&self.signal().read()).finish()
    }
}

impl<T> fmt::Debug for Guard<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Guard").field(&self.signal().read()).finish()
    }
}

impl fmt::Debug for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Waiter").field(&self.ending()).finish()
    }
}
