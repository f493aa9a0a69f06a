//! The clocks of the depot; no other module reads a clock.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Returns the seconds since 1970, as stored in records.
pub fn unix_seconds() -> u32 {
    let seconds = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    u32::try_from(seconds).unwrap_or(u32::MAX)
}

/// Returns the nanoseconds since 1970, as stored in files.
pub fn unix_nanos() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
    })
}

/// Returns the present time of a monotonic clock, to measure durations.
pub fn now() -> Instant {
    #[cfg(feature = "sim")]
    if let Some(now) = kvdepot_media::sim::now() {
        return now;
    }
    Instant::now()
}

/// Returns the time since `then`, by the same clock.
pub fn since(then: Instant) -> Duration {
    now().saturating_duration_since(then)
}
