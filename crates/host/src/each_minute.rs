//! A line of the log for what may happen any number of times.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How long after a line there is no other one.
const EACH: Duration = Duration::from_secs(60);

/// A rate limit for log lines of one kind: the first event is logged, and then at most one per
/// minute.
#[derive(Debug, Default)]
pub struct EachMinute(Mutex<Last>);

#[derive(Debug, Default)]
struct Last {
    at: Option<Instant>,
    /// Events since then.
    unsaid: u64,
}

impl EachMinute {
    /// Returns the number of events since the last log line if this event should be logged, and
    /// `None` otherwise.
    #[must_use]
    pub fn may_say(&self) -> Option<u64> {
        self.may_say_at(Instant::now())
    }

    fn may_say_at(&self, now: Instant) -> Option<u64> {
        let mut last = self.0.lock();
        if last
            .at
            .is_some_and(|at| now.saturating_duration_since(at) < EACH)
        {
            last.unsaid += 1;
            return None;
        }
        last.at = Some(now);
        Some(std::mem::take(&mut last.unsaid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_minute_counts_the_others() {
        let (each, begun) = (EachMinute::default(), Instant::now());
        let at = |seconds| each.may_say_at(begun + Duration::from_secs(seconds));
        let said = [0, 1, 59, 60, 61, 200].map(at);
        assert_eq!(said, [Some(0), None, None, Some(2), None, Some(1)]);
    }
}
