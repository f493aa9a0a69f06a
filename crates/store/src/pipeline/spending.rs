//! How many bytes may be written over an edge in an hour and in a day: disks wear out.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_arena::clock;
use parking_lot::Mutex;

/// An hour is looked at by minutes, and a day by as many parts.
const PARTS: u32 = 60;

const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// What may be written, and what was lately. Nothing of it is kept over a restart.
/// `None` where nothing is bounded: then no put takes a lock or looks at the clock.
pub(super) struct Spending(Option<Arc<Mutex<Vec<Window>>>>);

/// Bytes that may be written. Given back when it is dropped before they are
/// [written](Spent::written), or may have been.
#[derive(Default)]
#[must_use = "dropped, it is given back"]
pub(super) struct Spent(Option<Taken>);

struct Taken {
    windows: Arc<Mutex<Vec<Window>>>,
    at: Instant,
    bytes: u64,
}

/// The bytes of the last hour, or of the last day.
struct Window {
    most: u64,
    part: Duration,
    /// When each part began that has bytes, and its bytes.
    parts: VecDeque<(Instant, u64)>,
    sum: u64,
}

impl Spending {
    /// At most so many bytes in any hour and in any day; without a bound where none is given.
    pub(super) fn new(hour: Option<u64>, day: Option<u64>) -> Spending {
        let window = |(most, span): (Option<u64>, Duration)| {
            Some(Window {
                most: most?,
                part: span / PARTS,
                parts: VecDeque::new(),
                sum: 0,
            })
        };
        let windows = [(hour, HOUR), (day, DAY)];
        let windows: Vec<Window> = windows.into_iter().filter_map(window).collect();
        Spending((!windows.is_empty()).then(|| Arc::new(Mutex::new(windows))))
    }

    /// Whether there is a bound.
    pub(super) fn is_bounded(&self) -> bool {
        self.0.is_some()
    }

    /// Whether so many bytes may be written now.
    pub(super) fn allows(&self, bytes: u64) -> bool {
        let Some(windows) = &self.0 else { return true };
        let now = clock::now();
        let mut windows = windows.lock();
        windows.iter_mut().all(|window| window.left(now) >= bytes)
    }

    /// Takes so many bytes of what may be written now, if there are as many.
    pub(super) fn take(&self, bytes: u64) -> Option<Spent> {
        let Some(shared) = &self.0 else {
            return Some(Spent::default());
        };
        let mut windows = shared.lock();
        // Under the lock: the parts are in order.
        let at = clock::now();
        if windows.iter_mut().any(|window| window.left(at) < bytes) {
            return None;
        }
        windows.iter_mut().for_each(|window| window.add(at, bytes));
        let windows = Arc::clone(shared);
        Some(Spent(Some(Taken { windows, at, bytes })))
    }
}

impl Spent {
    /// It is not given back any more.
    pub(super) fn written(&mut self) {
        self.0 = None;
    }
}

impl Drop for Spent {
    fn drop(&mut self) {
        if let Some(Taken { windows, at, bytes }) = self.0.take() {
            let mut windows = windows.lock();
            windows.iter_mut().for_each(|window| window.less(at, bytes));
        }
    }
}

impl Window {
    /// One part more than the span has is counted, so that the bound holds for any span.
    fn left(&mut self, now: Instant) -> u64 {
        let span = self.part * (PARTS + 1);
        let is_over = |begun: Instant| now.saturating_duration_since(begun) >= span;
        while let Some((begun, bytes)) = self.parts.front().copied()
            && is_over(begun)
        {
            self.parts.pop_front();
            self.sum -= bytes;
        }
        self.most.saturating_sub(self.sum)
    }

    fn add(&mut self, now: Instant, bytes: u64) {
        self.sum += bytes;
        match self.parts.back_mut() {
            Some((begun, part)) if now.saturating_duration_since(*begun) < self.part => {
                *part += bytes;
            }
            _ => self.parts.push_back((now, bytes)),
        }
    }

    /// Takes out what was added then, where it counts still.
    fn less(&mut self, then: Instant, bytes: u64) {
        let mut parts = self.parts.iter_mut().rev();
        if let Some((_, part)) = parts.find(|(begun, _)| *begun <= then) {
            *part -= bytes;
            self.sum -= bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_hour_has_more_than_it_may() {
        let start = clock::now();
        let mut hour = Window {
            most: 1000,
            part: HOUR / PARTS,
            parts: VecDeque::new(),
            sum: 0,
        };
        let mut written: Vec<(u64, u64)> = Vec::new();
        for second in (0..30_000).step_by(7) {
            let now = start + Duration::from_secs(second);
            let bytes = second % 40 + 1;
            if hour.left(now) >= bytes {
                hour.add(now, bytes);
                written.push((second, bytes));
            }
            let lately = written.iter().filter(|(at, _)| at + 3600 > second);
            assert!(lately.map(|(_, bytes)| bytes).sum::<u64>() <= 1000);
        }
        let all: u64 = written.iter().map(|(_, bytes)| bytes).sum();
        assert!(all > 7 * 1000, "{all}: what is over is forgotten");
        assert!(hour.parts.len() as u32 <= PARTS + 2);
    }

    #[test]
    fn what_is_not_written_is_given_back() {
        let spending = Spending::new(Some(100), None);
        let some = spending.take(60);
        assert!(some.is_some() && spending.take(60).is_none() && spending.allows(40));
        drop(some);
        spending.take(100).unwrap().written();
        assert!(!spending.allows(1));
        assert!(Spending::new(None, None).take(u64::MAX).is_some());
        assert!(Spending::new(Some(100), Some(10)).take(11).is_none());
    }

    #[test]
    fn what_is_given_back_late_counts_as_taken_when_it_was() {
        let begun = clock::now();
        let at = |minutes: u64| begun + Duration::from_secs(60 * minutes);
        let mut hour = Window {
            most: 100,
            part: HOUR / PARTS,
            parts: VecDeque::new(),
            sum: 0,
        };
        hour.add(at(0), 40);
        hour.add(at(0), 10);
        hour.add(at(50), 50);
        hour.less(at(0), 40);
        assert_eq!((hour.left(at(50)), hour.left(at(62))), (40, 50));
        // What is over already is not given back once more.
        hour.less(at(0), 10);
        assert_eq!(hour.left(at(62)), 50);
    }
}
