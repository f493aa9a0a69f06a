//! Whether what a thread makes gets threads of its own.

/// Whether a simulation takes the steps of what this thread makes: then it starts no threads.
#[cfg(feature = "sim")]
#[must_use]
pub fn is_simulated() -> bool {
    crate::sim::current().is_some()
}

/// Whether a simulation takes the steps of what this thread makes: then it starts no threads.
#[cfg(not(feature = "sim"))]
#[must_use]
pub fn is_simulated() -> bool {
    false
}
