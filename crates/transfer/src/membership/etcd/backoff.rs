//! How long to wait after something failed: longer each time, and not as long as others do.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// After the first failure: nobody notices that, and an etcd that restarts is not hammered.
const FIRST: Duration = Duration::from_millis(100);

/// Doubles from a tenth of a second up to a limit.
#[derive(Debug)]
pub(super) struct Backoff {
    next: Duration,
    most: Duration,
}

impl Backoff {
    pub(super) fn new(most: Duration) -> Backoff {
        Backoff { next: FIRST, most }
    }

    pub(super) fn reset(&mut self) {
        self.next = FIRST;
    }

    /// How long to wait now: half of it for sure, and a random part of the rest.
    pub(super) fn wait(&mut self) -> Duration {
        let now = self.next.min(self.most);
        self.next = (now * 2).min(self.most);
        jittered(now)
    }
}

/// From half of a time up to all of it, anywhere: a thousand hosts that lost one etcd together do
/// not come back together.
pub(super) fn jittered(time: Duration) -> Duration {
    let part = drawn() as f64 / 2.0_f64.powi(64);
    time.mul_f64(0.5 + part / 2.0)
}

/// Any number.
pub(super) fn drawn() -> u64 {
    // Each has keys of its own, which is as much randomness as is needed here.
    RandomState::new().hash_one(0_u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_their_limit_and_differ() {
        let mut backoff = Backoff::new(Duration::from_secs(1));
        for millis in [100, 200, 400, 800, 1000, 1000] {
            let most = Duration::from_millis(millis);
            let wait = backoff.wait();
            assert!(most / 2 <= wait && wait <= most, "{wait:?} of {most:?}");
        }
        backoff.reset();
        assert!(backoff.wait() <= FIRST);
        assert_ne!(jittered(FIRST), jittered(FIRST));
    }
}
