//! Switches of a simulation: scheduling without threads, and short turns.

#[cfg(feature = "sim")]
use std::sync::atomic::{AtomicBool, Ordering};

/// True if turns are short in this process.
#[cfg(feature = "sim")]
static SHORT: AtomicBool = AtomicBool::new(false);

/// Returns true if a simulation schedules the work of objects that this thread creates. They then
/// start no threads.
#[cfg(feature = "sim")]
#[must_use]
pub fn is_simulated() -> bool {
    crate::sim::current().is_some()
}

/// Returns true if a simulation schedules the work of objects that this thread creates. They then
/// start no threads.
#[cfg(not(feature = "sim"))]
#[must_use]
pub fn is_simulated() -> bool {
    false
}

/// Returns the number of items in a turn: `long`, or `short` after [`shorten_turns`].
#[cfg(feature = "sim")]
#[must_use]
pub fn items_per_turn(short: usize, long: usize) -> usize {
    match SHORT.load(Ordering::Relaxed) {
        true => short,
        false => long,
    }
}

/// Returns the number of items in a turn, which is `long`: only a simulation shortens turns.
#[cfg(not(feature = "sim"))]
#[must_use]
pub const fn items_per_turn(_short: usize, long: usize) -> usize {
    long
}

/// Shortens all later turns in this process, so that small histories have many of them.
#[cfg(feature = "sim")]
pub fn shorten_turns() {
    SHORT.store(true, Ordering::Relaxed);
}
