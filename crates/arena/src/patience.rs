//! How long a call waits for another process, and what ends that wait earlier.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::clock;

/// Longest wait without a look at what may end it: whoever presses Ctrl-C sees no delay.
pub const SLICE: Duration = Duration::from_millis(20);

/// Answers whether this thread's calls shall end: a signal has come, say.
type Signalled = fn() -> bool;

thread_local! {
    static SIGNALLED: Cell<Option<Signalled>> = const { Cell::new(None) };
}

/// Runs calls of a served depot that end early once `signalled` answers true, with
/// [`Error::Interrupted`](crate::Error::Interrupted) or as if nobody served there. It is asked
/// every 20 ms while a call waits for its answer, on the thread that waits.
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

/// Why a wait ends without what was waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "whoever asks has an answer for each"
)]
pub enum Why {
    /// A signal came.
    Interrupted,
    /// The time is over.
    Late,
}

/// One wait.
pub struct Wait {
    /// `None` when it is further away than clocks go.
    until: Option<Instant>,
}

impl Wait {
    /// One that ends after `limit`.
    pub fn new(limit: Duration) -> Wait {
        Wait {
            until: clock::now().checked_add(limit),
        }
    }

    /// Whether to wait another [`SLICE`].
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

/// Whether this thread's calls shall end.
pub fn is_interrupted() -> bool {
    SIGNALLED.get().is_some_and(|signalled| signalled())
}

/// A time limit that may become another.
pub struct Limit(AtomicU64);

impl Limit {
    /// One to begin with.
    pub fn new(limit: Duration) -> Limit {
        let it = Limit(AtomicU64::new(0));
        it.set(limit);
        it
    }

    /// Makes it another.
    pub fn set(&self, limit: Duration) {
        let millis = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        self.0.store(millis, Ordering::Relaxed);
    }

    /// What it is now.
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
