//! What is said of a store in trouble: a line when it begins, one when it is over, and between them
//! one for each cause and minute at most. All of it is counted elsewhere.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvdepot_arena::clock;
use parking_lot::Mutex;

use super::bucket::Fault;

/// How long after a line there is no other one of its cause.
const EACH: Duration = Duration::from_secs(60);

/// Which lines of one process have been said, of a few causes each.
#[derive(Default)]
pub(super) struct Voice {
    said: Mutex<HashMap<(&'static str, Fault), Said>>,
    /// Requests are refused since the last one that was not.
    is_refused: AtomicBool,
    /// And somebody was told.
    is_told: AtomicBool,
}

struct Said {
    at: Instant,
    /// What was not said since then.
    more: u64,
}

impl Voice {
    /// Whether a line of this kind is to be said now, and how many were not since the last one.
    pub(super) fn may_say(&self, kind: &'static str, fault: Fault) -> Option<u64> {
        self.may_say_at(clock::now(), kind, fault)
    }

    fn may_say_at(&self, now: Instant, kind: &'static str, fault: Fault) -> Option<u64> {
        let mut all = self.said.lock();
        let Some(said) = all.get_mut(&(kind, fault)) else {
            all.insert((kind, fault), Said { at: now, more: 0 });
            return Some(0);
        };
        if now.saturating_duration_since(said.at) < EACH {
            said.more += 1;
            return None;
        }
        said.at = now;
        Some(std::mem::take(&mut said.more))
    }

    /// The store refuses a request.
    pub(super) fn refused(&self, error: &object_store::Error) {
        self.is_refused.store(true, Ordering::Relaxed);
        if let Some(unsaid) = self.may_say("refused", Fault::Refused) {
            self.is_told.store(true, Ordering::Relaxed);
            tracing::warn!(%error, unsaid,
                "the object store rejected a request; the tier finds and stores no blocks until \
                 requests succeed");
        }
    }

    /// It has done what it was asked for.
    pub(super) fn answered(&self) {
        let over = self.is_refused.load(Ordering::Relaxed)
            && self.is_refused.swap(false, Ordering::Relaxed);
        // A store that refuses some requests of many would say so at each turn.
        if over && self.is_told.swap(false, Ordering::Relaxed) {
            tracing::warn!("object store accepts requests again");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_has_one_line_a_minute_which_counts_the_others() {
        let voice = Voice::default();
        let begin = clock::now();
        let say = |seconds, kind, fault| {
            voice.may_say_at(begin + Duration::from_secs(seconds), kind, fault)
        };
        assert_eq!(say(0, "stored", Fault::Busy), Some(0));
        assert_eq!(say(1, "stored", Fault::Busy), None);
        assert_eq!(say(1, "stored", Fault::Late), Some(0), "another cause");
        assert_eq!(say(1, "counted", Fault::Busy), Some(0), "another kind");
        assert_eq!(say(59, "stored", Fault::Busy), None);
        assert_eq!(say(60, "stored", Fault::Busy), Some(2));
        assert_eq!(say(61, "stored", Fault::Busy), None);
    }
}
