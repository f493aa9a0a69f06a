//! The circuit breaker of a tier that may answer late.
//!
//! Where several answers in a row have not come, nothing is asked for some time: a broken tier is a
//! miss, at once. Then one question goes through, the *trial*; if it is answered the breaker closes,
//! and if not it stays open for twice as long, up to five seconds. Nobody waits for a trial: other
//! questions are misses at once, and after five seconds another one tries.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdepot_arena::clock;
use parking_lot::Mutex;

/// Questions in a row without an answer that open the breaker.
pub(super) const FAILURES: u32 = 3;

/// Time for which the breaker is open at first, and at most: a tier that answers again is of use
/// within seconds, however long it was silent.
const OPEN_FIRST: Duration = Duration::from_millis(500);
const OPEN_MOST: Duration = Duration::from_secs(5);

/// Time for which one trial keeps others from one: a put may wait much longer for its answer.
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
    /// Nothing is asked before.
    open_until: Option<Instant>,
    open_for: Duration,
    /// The trial in progress, and when another one may begin all the same.
    trial: Option<(u64, Instant)>,
    /// Trials since the tier was opened.
    trials: u64,
}

/// A question that was let through.
pub(super) struct Question {
    breaker: Arc<Breaker>,
    /// The number of the trial that it is. Dropped, it lets another one try.
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

    /// Questions without an answer, and how often it has opened.
    pub(super) fn counts(&self) -> (u64, u64) {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (of(&self.unheard), of(&self.opened))
    }

    /// A question that is no trial.
    pub(super) fn question(self: &Arc<Breaker>) -> Question {
        Question {
            breaker: Arc::clone(self),
            trial: None,
        }
    }

    /// `None` while nothing is asked.
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
    /// Ends a trial, unless another one has begun since.
    fn end(&mut self, trial: Option<u64>) -> bool {
        let is_it = trial.is_some() && trial == self.trial.map(|(number, _)| number);
        if is_it {
            self.trial = None;
        }
        is_it
    }
}

impl Question {
    /// Notes whether a question was answered that took its time. One that waited in this process
    /// until its limit says nothing of the tier: it neither closes the breaker nor counts.
    pub(super) fn heard_late(self, answered: bool, unasked: &AtomicBool) {
        if !(answered && unasked.load(Ordering::Relaxed)) {
            return self.heard(answered);
        }
        let mut state = self.breaker.state.lock();
        if state.end(self.trial) {
            state.open_until = clock::now().checked_add(state.open_for);
        }
    }

    /// Notes whether a question was answered.
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

/// A question that is let through, of a trial if the breaker is open.
#[cfg(test)]
pub(super) fn trial_of(breaker: &Arc<Breaker>) -> Question {
    breaker.lets_through().unwrap()
}

#[cfg(test)]
impl Breaker {
    /// Its pause is over.
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
        // Of a call that began before the breaker opened.
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
