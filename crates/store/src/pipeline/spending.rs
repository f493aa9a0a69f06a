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
pub(super) struct Spending(Option<Arc<Mutex<Account>>>);

/// Bytes that may be written, whenever that is. Given back when it is dropped before they are
/// [written](Spent::written), or may have been.
#[derive(Default)]
#[must_use = "dropped, it is given back"]
pub(super) struct Spent(Option<Taken>);

struct Taken {
    account: Arc<Mutex<Account>>,
    bytes: u64,
}

struct Account {
    /// Bytes that may be written and are not yet.
    held: u64,
    windows: Vec<Window>,
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
        let windows = [(hour, HOUR), (day, DAY)].into_iter();
        let windows = windows.filter_map(|(most, span)| Some(Window::new(most?, span)));
        let windows: Vec<Window> = windows.collect();
        let is_bounded = !windows.is_empty();
        Spending(is_bounded.then(|| Arc::new(Mutex::new(Account { held: 0, windows }))))
    }

    /// Whether there is a bound.
    pub(super) fn is_bounded(&self) -> bool {
        self.0.is_some()
    }

    /// Whether so many bytes may be written now.
    pub(super) fn allows(&self, bytes: u64) -> bool {
        let account = self.0.as_ref();
        account.is_none_or(|account| account.lock().left(clock::now()) >= bytes)
    }

    /// Takes so many bytes of what may be written now, if there are as many.
    pub(super) fn take(&self, bytes: u64) -> Option<Spent> {
        let Some(shared) = &self.0 else {
            return Some(Spent::default());
        };
        let mut account = shared.lock();
        if account.left(clock::now()) < bytes {
            return None;
        }
        account.held += bytes;
        let account = Arc::clone(shared);
        Some(Spent(Some(Taken { account, bytes })))
    }
}

impl Spent {
    /// It counts from now on, and is not given back any more.
    pub(super) fn written(&mut self) {
        if let Some(Taken { account, bytes }) = self.0.take() {
            account.lock().write(bytes);
        }
    }
}

impl Drop for Spent {
    fn drop(&mut self) {
        if let Some(Taken { account, bytes }) = self.0.take() {
            account.lock().held -= bytes;
        }
    }
}

impl Account {
    fn left(&mut self, now: Instant) -> u64 {
        let left = self.windows.iter_mut().map(|window| window.left(now));
        left.min().unwrap_or(u64::MAX).saturating_sub(self.held)
    }

    /// Under the lock the clock is looked at, so that the parts are in order.
    fn write(&mut self, bytes: u64) {
        let now = clock::now();
        self.held -= bytes;
        self.windows
            .iter_mut()
            .for_each(|window| window.add(now, bytes));
    }
}

impl Window {
    fn new(most: u64, span: Duration) -> Window {
        Window {
            most,
            part: span / PARTS,
            parts: VecDeque::new(),
            sum: 0,
        }
    }

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
        let mut hour = Window::new(1000, HOUR);
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
    fn what_is_held_long_still_counts_when_it_is_written() {
        let begun = clock::now();
        let at = |minutes: u64| begun + Duration::from_secs(60 * minutes);
        let windows = vec![Window::new(100, HOUR)];
        let mut account = Account { held: 0, windows };
        account.held += 60;
        assert_eq!((account.left(at(0)), account.left(at(62))), (40, 40));
        // Written now, which is later than `begun`: it leaves an hour from now.
        account.write(60);
        assert_eq!((account.held, account.left(at(59))), (0, 40));
        assert_eq!(account.left(at(63)), 100);
    }
}
