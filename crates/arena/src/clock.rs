//! The one place that reads clocks.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Seconds since 1970, as records keep them.
pub fn unix_seconds() -> u32 {
    let seconds = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    u32::try_from(seconds).unwrap_or(u32::MAX)
}

/// Nanoseconds since 1970, as files keep them.
pub fn unix_nanos() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
    })
}

/// Now, for durations.
pub fn now() -> Instant {
    #[cfg(feature = "sim")]
    if let Some(now) = kvdepot_media::sim::now() {
        return now;
    }
    Instant::now()
}

/// How long ago that was, by the same clock.
pub fn since(then: Instant) -> Duration {
    now().saturating_duration_since(then)
}
