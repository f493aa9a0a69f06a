//! The clock of a directory's file system, by which files are older than others.

use std::sync::atomic::Ordering;

use kvdepot_arena::{Error, clock};
use kvdepot_host::dir::{Seen, mark_used};

use super::Folder;

/// Nanoseconds.
const SECOND: i128 = 1_000_000_000;

impl Folder {
    /// Says that this process is there still; the time by the file system's clock.
    pub(in super::super) fn still_here(&self) -> Result<i128, Error> {
        let at = self.at.load();
        let fd = at.alive.fd()?;
        mark_used(fd)?;
        let now = Seen::of(fd)?.map_or(0, |seen| seen.changed);
        let ahead = (now - i128::from(clock::unix_nanos())) as i64;
        // A file system that keeps whole seconds agrees with this clock as far as it tells. By its
        // seconds alone, what is stored within one would be no older than what is stored next.
        let agrees = now % SECOND == 0 && (-SECOND..=0).contains(&ahead.into());
        let ahead = if agrees { 0 } else { ahead };
        self.ahead.store(ahead, Ordering::Relaxed);
        Ok(now)
    }

    /// The time by that clock, in nanoseconds, as far as it is known.
    pub(in super::super) fn now(&self) -> i64 {
        clock::unix_nanos().saturating_add(self.ahead.load(Ordering::Relaxed))
    }
}
