//! Interruptible waits for another process, with a deadline.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::clock;

/// Maximum time between two checks for an interruption, short enough for Ctrl-C.
pub const SLICE: Duration = Duration::from_millis(20);

/// Answers whether this thread's calls shall end: a signal has come, say.
type Signalled = fn() -> bool;

thread_local! {
    static SIGNALLED: Cell<Option<Signalled>> = const { Cell::new(None) };
}

/// Runs calls to a served depot that end early once `signalled` returns true.
///
/// The calls then return [`Error::Interrupted`](crate::Error::Interrupted), or the same result as
/// without a server. `signalled` is called every 20 ms on the waiting thread while a call waits for
/// its response.
pub fn interruptible<T>(signalled: fn() -> bool, run: impl FnOnce() -> T) -> T {
    struct Restore(Option<Signalled>);
    impl Drop for Restore {
        fn drop(&mut self) {
            SIGNALLED.set(self.0);
        }
    }
    let _before = Restore(SIGNALLED.replace(Some(signalled)));
    run()
}

/// The reason for which a wait ended without success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "whoever asks has an answer for each"
)]
pub enum Why {
    /// A signal interrupted the wait.
    Interrupted,
    /// The wait timed out.
    Late,
}

/// A wait with a deadline, which a signal can interrupt.
pub struct Wait {
    /// `None` when it is further away than clocks go.
    until: Option<Instant>,
}

impl Wait {
    /// Starts a wait that ends after `limit`.
    pub fn new(limit: Duration) -> Wait {
        Wait {
            until: clock::now().checked_add(limit),
        }
    }

    /// Checks that the caller should wait for another [`SLICE`].
    ///
    /// # Errors
    ///
    /// The reason for which the wait ends.
    pub fn goes_on(&self) -> Result<(), Why> {
        if is_interrupted() {
            return Err(Why::Interrupted);
        }
        match self.until {
            Some(until) if until <= clock::now() => Err(Why::Late),
            _ => Ok(()),
        }
    }
}

/// Returns true if calls of this thread should end.
pub fn is_interrupted() -> bool {
    SIGNALLED.get().is_some_and(|signalled| signalled())
}

/// A time limit that can be changed while it is in use.
pub struct Limit(AtomicU64);

impl Limit {
    /// Creates a limit with an initial value.
    pub fn new(limit: Duration) -> Limit {
        let it = Limit(AtomicU64::new(0));
        it.set(limit);
        it
    }

    /// Changes the limit.
    pub fn set(&self, limit: Duration) {
        let millis = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        self.0.store(millis, Ordering::Relaxed);
    }

    /// Returns the present limit.
    pub fn get(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_with_its_time_or_a_signal_and_only_inside() {
        let wait = Wait::new(Duration::from_secs(600));
        assert_eq!(wait.goes_on(), Ok(()));
        interruptible(
            || true,
            || {
                assert_eq!(wait.goes_on(), Err(Why::Interrupted));
                interruptible(|| false, || assert_eq!(wait.goes_on(), Ok(())));
                assert_eq!(wait.goes_on(), Err(Why::Interrupted));
            },
        );
        assert_eq!(wait.goes_on(), Ok(()));
        assert_eq!(Wait::new(Duration::ZERO).goes_on(), Err(Why::Late));
        assert_eq!(Wait::new(Duration::MAX).goes_on(), Ok(()));
    }
}
