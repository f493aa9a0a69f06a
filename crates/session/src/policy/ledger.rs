//! How many bytes may be written in any hour and in any day: disks wear out.
//!
//! Bytes are held from the grant of a save to its end, and count from its end on: what they are
//! written by lies between, so that no window of the length has more.

use std::collections::VecDeque;
use std::time::Duration;

/// A window is looked at in so many parts: an hour by minutes. More would give bytes back sooner,
/// by less than a minute.
const PARTS: u32 = 60;

const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// What may be written, and what was lately.
#[derive(Clone, Debug)]
pub(super) struct Ledger {
    /// Bytes that were granted and neither written nor given back.
    held: u64,
    windows: Vec<Window>,
}

/// The bytes of the last hour, or of the last day.
#[derive(Clone, Debug)]
struct Window {
    most: u64,
    part: Duration,
    /// When each part began that has bytes, and its bytes, in order of time.
    parts: VecDeque<(Duration, u64)>,
    sum: u64,
}

impl Ledger {
    /// At most so many bytes in any hour and in any day; without a bound where none is given.
    pub(super) fn new(hour: Option<u64>, day: Option<u64>) -> Ledger {
        let windows = [(hour, HOUR), (day, DAY)].into_iter();
        let windows = windows.filter_map(|(most, span)| Some(Window::new(most?, span)));
        Ledger {
            held: 0,
            windows: windows.collect(),
        }
    }

    /// Bytes that may be granted where nothing was written: those of the smallest budget.
    pub(super) fn most(&self) -> u64 {
        let most = self.windows.iter().map(|window| window.most);
        most.min().unwrap_or(u64::MAX)
    }

    /// Bytes that may be granted.
    pub(super) fn left(&mut self, now: Duration) -> u64 {
        let left = self.windows.iter_mut().map(|window| window.left(now));
        left.min().unwrap_or(u64::MAX).saturating_sub(self.held)
    }

    /// Takes so many bytes, if there are as many.
    pub(super) fn hold(&mut self, bytes: u64, now: Duration) -> bool {
        let has_room = self.left(now) >= bytes;
        if has_room {
            self.held += bytes;
        }
        has_room
    }

    /// Ends a hold: what was written counts from now on, the rest is given back.
    pub(super) fn settle(&mut self, held: u64, written: u64, now: Duration) {
        self.held = self.held.saturating_sub(held);
        self.record(written, now);
    }

    /// Counts bytes that were written at some time, in any order.
    pub(super) fn record(&mut self, bytes: u64, at: Duration) {
        let add = |window: &mut Window| window.add(at, bytes);
        self.windows.iter_mut().for_each(add);
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

    fn left(&mut self, now: Duration) -> u64 {
        self.forget(now);
        self.set_back(now);
        self.most.saturating_sub(self.sum)
    }

    /// One part more than the span has is counted, so that the bound holds for any span.
    fn forget(&mut self, now: Duration) {
        let span = self.part * (PARTS + 1);
        let is_over = |begun: Duration| now.saturating_sub(begun) >= span;
        while let Some((begun, bytes)) = self.parts.front().copied()
            && is_over(begun)
        {
            self.parts.pop_front();
            self.sum -= bytes;
        }
    }

    /// Where the clock was set back, what seems to come later was written just now at the latest.
    fn set_back(&mut self, now: Duration) {
        let mut later = 0;
        while let Some((begun, bytes)) = self.parts.back().copied()
            && begun > now
        {
            self.parts.pop_back();
            self.sum -= bytes;
            later += bytes;
        }
        self.add(now, later);
    }

    fn add(&mut self, at: Duration, bytes: u64) {
        // Whoever writes 2^64 bytes has no room left in any case.
        let bytes = bytes.min(u64::MAX - self.sum);
        if bytes == 0 {
            return;
        }
        self.sum += bytes;
        let place = self.parts.partition_point(|(begun, _)| *begun <= at);
        let part = place
            .checked_sub(1)
            .and_then(|last| self.parts.get_mut(last));
        match part {
            Some((begun, sum)) if at.saturating_sub(*begun) < self.part => *sum += bytes,
            _ => self.parts.insert(place, (at, bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(1_800_000_000 + seconds)
    }

    #[test]
    fn no_hour_has_more_than_it_may() {
        let mut ledger = Ledger::new(Some(1000), None);
        let mut written: Vec<(u64, u64)> = Vec::new();
        for second in (0..30_000).step_by(7) {
            let bytes = second % 40 + 1;
            if ledger.hold(bytes, at(second)) {
                ledger.settle(bytes, bytes, at(second));
                written.push((second, bytes));
            }
            let lately = written.iter().filter(|(at, _)| at + 3600 > second);
            assert!(lately.map(|(_, bytes)| bytes).sum::<u64>() <= 1000);
        }
        let all: u64 = written.iter().map(|(_, bytes)| bytes).sum();
        assert!(all > 7 * 1000, "{all}: what is over is forgotten");
        assert!(ledger.windows[0].parts.len() as u32 <= PARTS + 2);
    }

    #[test]
    fn what_is_not_written_is_given_back() {
        let mut ledger = Ledger::new(Some(100), None);
        assert!(ledger.hold(60, at(0)) && !ledger.hold(60, at(0)));
        ledger.settle(60, 10, at(5));
        assert_eq!(ledger.left(at(5)), 90);
    }

    #[test]
    fn the_day_bounds_what_the_hour_would_allow() {
        let mut ledger = Ledger::new(Some(100), Some(150));
        ledger.record(100, at(0));
        assert_eq!((ledger.left(at(10)), ledger.left(at(7200))), (0, 50));
        assert_eq!(ledger.left(at(26 * 3600)), 100);
    }

    #[test]
    fn a_save_that_takes_long_counts_from_its_end_on() {
        let mut ledger = Ledger::new(Some(100), None);
        assert!(ledger.hold(60, at(0)));
        assert_eq!(ledger.left(at(4000)), 40, "it may still be written");
        ledger.settle(60, 60, at(4000));
        assert_eq!((ledger.left(at(7000)), ledger.left(at(7700))), (40, 100));
    }

    #[test]
    fn what_was_written_before_a_restart_is_counted_in_any_order() {
        let mut ledger = Ledger::new(Some(100), None);
        for second in [3000, 100, 2000, 110, 1000] {
            ledger.record(10, at(second));
        }
        assert_eq!(ledger.left(at(3100)), 50);
        assert_eq!(ledger.left(at(3780)), 70, "the two oldest are over");
    }

    #[test]
    fn a_clock_that_is_set_back_forgets_nothing_and_stops_nothing_for_ever() {
        let mut ledger = Ledger::new(Some(100), None);
        ledger.record(100, at(1_000_000));
        assert_eq!(ledger.left(at(0)), 0);
        assert_eq!((ledger.left(at(3599)), ledger.left(at(3661))), (0, 100));
    }

    #[test]
    fn without_a_bound_all_is_granted() {
        let mut ledger = Ledger::new(None, None);
        assert!(ledger.hold(u64::MAX / 2, at(0)) && ledger.hold(u64::MAX / 4, at(0)));
        let mut none = Ledger::new(Some(0), None);
        assert!(!none.hold(1, at(0)));
    }
}
