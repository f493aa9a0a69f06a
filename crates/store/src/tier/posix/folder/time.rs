//! The clock of a directory's file system, by which files are older than others.

use std::sync::atomic::Ordering;

use kvdepot_arena::{Error, clock};
use kvdepot_host::dir::{Seen, mark_used};

use super::Folder;

/// Nanoseconds.
const SECOND: i128 = 1_000_000_000;

/// Longest time for which a clock of nanoseconds stands still: it goes on in steps.
const STEP: i128 = 20_000_000;

/// Returns the lead of a file system's clock over the host's clock, in nanoseconds. The host's
/// clock showed `before` and `after` around the moment at which the other clock showed `now`; the
/// thread may have been stopped in between. The `known` lead stays if it agrees with these times.
fn ahead(known: i64, now: i128, (before, after): (i64, i64)) -> i64 {
    let (least, most) = (now - i128::from(after), now - i128::from(before));
    // A file system that keeps whole seconds agrees with this clock as far as it tells. By its
    // seconds alone, what is stored within one would be no older than what is stored next.
    if now % SECOND == 0 && (-SECOND..=0).contains(&most) {
        return 0;
    }
    // A clock that stands still has no other lead: uses would go back, and what was used after a
    // prompt began would be older than the prompt.
    let ahead = i128::from(known).clamp(least, most.max(least) + STEP);
    i64::try_from(ahead).unwrap_or(known)
}

impl Folder {
    /// Says that this process is there still; the time by the file system's clock.
    pub(in super::super) fn still_here(&self) -> Result<i128, Error> {
        let at = self.at.load();
        let fd = at.alive.fd()?;
        let before = clock::unix_nanos();
        mark_used(fd)?;
        let now = Seen::of(fd)?.map_or(0, |seen| seen.changed);
        let known = self.ahead.load(Ordering::Relaxed);
        let ahead = ahead(known, now, (before, clock::unix_nanos()));
        self.ahead.store(ahead, Ordering::Relaxed);
        Ok(now)
    }

    /// The time by that clock, in nanoseconds, as far as it is known.
    pub(in super::super) fn now(&self) -> i64 {
        clock::unix_nanos().saturating_add(self.ahead.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_700_000_000_123_456_789;
    const MS: i64 = 1_000_000;

    #[test]
    fn a_clock_is_as_far_ahead_as_it_was_when_this_thread_was_stopped_meanwhile() {
        let other = |ahead: i64| i128::from(NOW + ahead);
        assert_eq!(ahead(0, other(7 * MS), (NOW, NOW)), 7 * MS);
        assert_eq!(ahead(7 * MS, other(7 * MS), (NOW, NOW + 900 * MS)), 7 * MS);
        assert_eq!(ahead(7 * MS, other(7 * MS), (NOW - 900 * MS, NOW)), 7 * MS);
        // It was set back.
        assert_eq!(ahead(7 * MS, other(-60 * MS), (NOW, NOW + MS)), -40 * MS);
        // It stands still between two of its steps.
        assert_eq!(ahead(0, other(-4 * MS), (NOW, NOW + MS)), 0);
        let whole = i128::from(NOW) / SECOND * SECOND;
        assert_eq!(ahead(5, whole, (NOW, NOW + 900 * MS)), 0);
    }
}
