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

/// The result of a batch after its lanes have stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ending {
    /// True if a lane called [`Guard::fail`].
    pub failed: bool,
    /// True if a panic dropped a guard, or if the completion panicked. Results that this lane had
    /// not reported before are missing.
    pub panicked: bool,
    /// True if cancellation was requested before the last lane stopped. The lanes may still have
    /// finished all their work.
    pub cancelled: bool,
}

impl Ending {
    /// Returns true if the batch had no failure, no panic and no cancellation.
    pub fn is_clean(&self) -> bool {
        *self == Ending::default()
    }
}

/// A batch that still hands out work.
///
/// It counts as a guard itself, so lanes that finish early cannot complete a batch that is still
/// being planned. Drop it after the last slice has been handed out.
///
/// # Examples
///
/// ```
/// use kvdepot_plan::Join;
///
/// let join = Join::new(vec![0u8; 4096], |_payload, ending| assert!(ending.is_clean()));
/// let waiter = join.waiter();
/// let guard = join.guard();
/// let lane = std::thread::spawn(move || {
///     assert_eq!(guard.payload().len(), 4096);
/// }); // the guard is dropped: the lane has stopped
/// drop(join);
/// assert!(waiter.wait(None));
/// # lane.join().unwrap();
/// ```
pub struct Join<T>(Guard<T>);

/// A lane's reference to the payload of a batch.
///
/// A lane holds a guard while it uses the payload. Dropping the guard, also during a panic, signals
/// that the lane has stopped.
pub struct Guard<T>(Arc<Flight<T>>);

/// A handle to wait for a batch. It does not keep the payload alive and can be dropped at any time.
#[derive(Clone)]
pub struct Waiter(Arc<Signal>);

impl<T> Join<T> {
    /// Creates a batch with `payload`: its buffers, their owners and memory for results.
    ///
    /// `complete` runs exactly once, in the thread that drops the last guard (or this `Join`, if it
    /// is the last). It may take values out of the payload. The rest of the payload is dropped
    /// directly after it, and then waiters wake.
    ///
    /// A panic in `complete` is caught, because the thread may already be unwinding. Waiters see it
    /// as [`Ending::panicked`]. A panic in the destructor of the payload is not caught, but wakes
    /// the waiters too.
    ///
    /// `complete` must not wait for its own batch.
    pub fn new(payload: T, complete: impl FnOnce(&mut T, Ending) + Send + 'static) -> Join<T> {
        let signal = Arc::new(Signal::new());
        Join(Guard(Arc::new(Flight {
            payload,
            complete: Mutex::new(Some(Box::new(complete))),
            wake: Wake(signal),
        })))
    }

    /// Creates a guard for one more lane or slice.
    pub fn guard(&self) -> Guard<T> {
        self.0.clone()
    }

    /// Creates a handle to wait for the batch. A batch can have any number of handles.
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
    /// Returns the payload, which all lanes share.
    pub fn payload(&self) -> &T {
        &self.0.payload
    }

    /// Records that the lane failed. Store details of the failure in the payload.
    ///
    /// The other lanes continue; call [`cancel`](Guard::cancel) to stop them as well.
    pub fn fail(&self) {
        self.signal().failed.store(true, Ordering::Relaxed);
    }

    /// Requests that all lanes stop early. Each lane still signals its end by dropping its guards.
    pub fn cancel(&self) {
        self.signal().cancelled.store(true, Ordering::Relaxed);
    }

    /// Returns true if the lane should stop early. Lanes poll this between slices.
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
    ///
    /// Returns false if `timeout` expires first. `None` waits without a limit. A thread that holds
    /// a guard of the batch must not wait for it.
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

    /// Returns true if [`wait`](Waiter::wait) would return immediately.
    pub fn is_done(&self) -> bool {
        self.ending().is_some()
    }

    /// Returns the result of the batch, or `None` while it is in progress.
    pub fn ending(&self) -> Option<Ending> {
        *lock(&self.0.ended)
    }

    /// Requests that all lanes stop early. The lanes keep the payload until they have stopped.
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
