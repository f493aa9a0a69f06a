//! Whether what a thread makes gets threads of its own.

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
