//! The circuit breaker of an asynchronous tier.
//!
//! The breaker opens after [`FAILURES`] calls in a row without a response: calls are then misses
//! immediately. After a pause one call goes through, the *trial*. If the tier responds, the breaker
//! closes; otherwise the pause doubles, up to [`OPEN_MOST`]. During a trial other calls are still
//! misses. If a trial lasts for [`TRIAL_MOST`], the next call is a trial too.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdepot_arena::clock;
use parking_lot::Mutex;

/// Number of calls in a row without a response that open the breaker.
pub(super) const FAILURES: u32 = 3;

/// First and longest pause between trials: a tier that responds again serves blocks within seconds,
/// however long it did not respond.
const OPEN_FIRST: Duration = Duration::from_millis(500);
const OPEN_MOST: Duration = Duration::from_secs(5);

/// Time after which a trial in progress no longer prevents another one: a put may wait much longer
/// for a response.
const TRIAL_MOST: Duration = Duration::from_secs(5);

/// Circuit breaker of a tier.
pub(super) struct Breaker {
    name: &'static str,
    state: Mutex<Circuit>,
    unheard: AtomicU64,
    opened: AtomicU64,
}

#[derive(Default)]
struct Circuit {
    failures: u32,
    /// End of the pause; `None` if the breaker is closed.
    open_until: Option<Instant>,
    open_for: Duration,
    /// Number of the trial in progress, and the time from which another one may begin.
    trial: Option<(u64, Instant)>,
    /// Number of trials so far.
    trials: u64,
}

/// A call that the breaker has let through.
pub(super) struct Question {
    breaker: Arc<Breaker>,
    /// Number of the trial, if the call is one. A drop without a result permits another trial.
    trial: Option<u64>,
}

impl Breaker {
    pub(super) fn new(name: &'static str) -> Breaker {
        Breaker {
            name,
            state: Mutex::default(),
            unheard: AtomicU64::new(0),
            opened: AtomicU64::new(0),
        }
    }

    /// Returns the number of calls without a response, and of openings.
    pub(super) fn counts(&self) -> (u64, u64) {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (of(&self.unheard), of(&self.opened))
    }

    /// Returns a call that is no trial.
    pub(super) fn question(self: &Arc<Breaker>) -> Question {
        Question {
            breaker: Arc::clone(self),
            trial: None,
        }
    }

    /// Returns the call that may go to the tier, or `None` if the breaker is open.
    pub(super) fn lets_through(self: &Arc<Breaker>) -> Option<Question> {
        let mut question = self.question();
        let mut state = self.state.lock();
        if let Some(until) = state.open_until {
            let now = clock::now();
            let is_tried = state.trial.is_some_and(|(_, end)| now < end);
            if is_tried || now < until {
                return None;
            }
            state.trials += 1;
            state.trial = Some((state.trials, now + TRIAL_MOST));
            question.trial = Some(state.trials);
        }
        Some(question)
    }
}

impl Circuit {
    /// Ends a trial, unless another one has begun since. Returns true if the trial was in progress.
    fn end(&mut self, trial: Option<u64>) -> bool {
        let is_it = trial.is_some() && trial == self.trial.map(|(number, _)| number);
        if is_it {
            self.trial = None;
        }
        is_it
    }
}

impl Question {
    /// Records whether a call received a response after it had returned. A call that waited for a
    /// resource of this process until its limit neither closes the breaker nor counts.
    pub(super) fn heard_late(self, answered: bool, unasked: &AtomicBool) {
        if !(answered && unasked.load(Ordering::Relaxed)) {
            return self.heard(answered);
        }
        let mut state = self.breaker.state.lock();
        if state.end(self.trial) {
            state.open_until = clock::now().checked_add(state.open_for);
        }
    }

    /// Records whether a call received a response.
    pub(super) fn heard(self, answered: bool) {
        let breaker = &self.breaker;
        let mut state = breaker.state.lock();
        if answered {
            if state.open_until.is_some() {
                tracing::info!(
                    tier = breaker.name,
                    "tier responding again; circuit breaker closed"
                );
            }
            *state = Circuit {
                trials: state.trials,
                ..Circuit::default()
            };
            return;
        }
        breaker.unheard.fetch_add(1, Ordering::Relaxed);
        state.failures = state.failures.saturating_add(1);
        let was_open = state.open_until.is_some();
        let is_trial = state.end(self.trial);
        if state.failures < FAILURES || (was_open && !is_trial) {
            return;
        }
        state.open_for = match was_open {
            true => (state.open_for * 2).min(OPEN_MOST),
            false => OPEN_FIRST,
        };
        state.open_until = clock::now().checked_add(state.open_for);
        if !was_open {
            breaker.opened.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                tier = breaker.name,
                "tier not responding; circuit breaker open, lookups are misses"
            );
        }
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        if self.trial.is_some() {
            self.breaker.state.lock().end(self.trial);
        }
    }
}

/// A call that is let through; a trial if the breaker is open.
#[cfg(test)]
pub(super) fn trial_of(breaker: &Arc<Breaker>) -> Question {
    breaker.lets_through().unwrap()
}

#[cfg(test)]
impl Breaker {
    /// Ends the pause.
    pub(super) fn pass_time(&self) {
        let over = clock::now().checked_sub(Duration::from_millis(1));
        self.state.lock().open_until = over;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A breaker that is open.
    fn open() -> Arc<Breaker> {
        let breaker = Arc::new(Breaker::new("Test"));
        (0..FAILURES).for_each(|_| trial_of(&breaker).heard(false));
        assert!(breaker.lets_through().is_none());
        breaker
    }

    #[test]
    fn a_tier_that_does_not_answer_is_left_alone_until_it_does() {
        let breaker = open();
        breaker.pass_time();
        let trial = trial_of(&breaker);
        assert!(breaker.lets_through().is_none(), "one tries");
        trial.heard(false);
        assert!(breaker.lets_through().is_none());
        assert_eq!(breaker.state.lock().open_for, 2 * OPEN_FIRST);
        breaker.pass_time();
        trial_of(&breaker).heard(true);
        let both = [breaker.lets_through(), breaker.lets_through()];
        assert!(both.iter().all(Option::is_some));
        assert_eq!(breaker.counts().1, 1);
    }

    #[test]
    fn a_trial_that_is_dropped_or_lasts_keeps_no_other_from_one() {
        let breaker = open();
        // A call that began before the breaker opened.
        let before = breaker.question();
        breaker.pass_time();
        drop(trial_of(&breaker));
        let first = trial_of(&breaker);
        before.heard(false);
        assert!(breaker.lets_through().is_none(), "one tries");
        let mut state = breaker.state.lock();
        state.trial = state.trial.map(|(number, _)| (number, clock::now()));
        drop(state);
        let second = trial_of(&breaker);
        assert!(breaker.lets_through().is_none(), "one tries");
        first.heard(false);
        assert!(breaker.lets_through().is_none(), "one tries");
        assert_eq!(breaker.state.lock().open_for, OPEN_FIRST);
        second.heard(false);
        assert_eq!(breaker.state.lock().open_for, 2 * OPEN_FIRST);
        assert!(breaker.lets_through().is_none());
    }

    #[test]
    fn a_tier_is_asked_again_within_seconds_however_long_it_was_silent() {
        let breaker = open();
        for _ in 0..100 {
            breaker.pass_time();
            trial_of(&breaker).heard(false);
        }
        let pause = breaker.state.lock().open_for;
        assert_eq!(pause, OPEN_MOST);
        assert!(pause + TRIAL_MOST <= Duration::from_secs(10), "{pause:?}");
    }
}
