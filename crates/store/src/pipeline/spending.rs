//! How many bytes may be written over an edge in an hour and in a day: disks wear out.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use kvdepot_arena::clock;
use parking_lot::Mutex;

/// An hour is looked at by minutes, and a day by as many parts.
const PARTS: u32 = 60;

const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// What may be written, and what was lately. Nothing of it is kept over a restart.
/// `None` where nothing is bounded: then no put takes a lock or looks at the clock.
pub(super) struct Spending(Option<Mutex<Vec<Window>>>);

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
        Spending((!windows.is_empty()).then(|| Mutex::new(windows)))
    }

    /// Whether so many bytes may be written now.
    pub(super) fn allows(&self, bytes: u64) -> bool {
        let Some(windows) = &self.0 else { return true };
        let now = clock::now();
        let mut windows = windows.lock();
        windows.iter_mut().all(|window| window.left(now) >= bytes)
    }

    /// Takes so many bytes of what may be written now, if there are as many.
    pub(super) fn take(&self, bytes: u64) -> bool {
        let Some(windows) = &self.0 else { return true };
        let now = clock::now();
        let mut windows = windows.lock();
        let allowed = windows.iter_mut().all(|window| window.left(now) >= bytes);
        if allowed {
            windows.iter_mut().for_each(|window| window.add(now, bytes));
        }
        allowed
    }

    /// Gives back what was taken lately, and not written.
    pub(super) fn give_back(&self, bytes: u64) {
        let Some(windows) = &self.0 else { return };
        for window in windows.lock().iter_mut() {
            if let Some((_, last)) = window.parts.back_mut() {
                let back = bytes.min(*last);
                *last -= back;
                window.sum -= back;
            }
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
        assert!(spending.take(60) && !spending.take(60) && spending.allows(40));
        spending.give_back(60);
        assert!(spending.take(100) && !spending.allows(1));
        assert!(Spending::new(None, None).take(u64::MAX));
        assert!(!Spending::new(Some(100), Some(10)).take(11));
    }
}
