//! How a membership stands, for people and metrics.

use std::time::Duration;

/// How a process stands among the hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Standing {
    /// It only looks, or is one of a fixed list.
    Looking,
    /// It is not registered yet, or not any more.
    Joining,
    /// It is registered, as far as it knows.
    Joined,
    /// A later process has its name. It stays out until that one has gone.
    Displaced,
}

/// Whether the view is what the source says now.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status {
    /// Whether the source is being heard.
    pub is_current: bool,
    /// For how long it has not been; none while it is.
    pub stale: Option<Duration>,
    /// This process.
    pub standing: Standing,
    /// The last thing that went wrong, also when it has been well since.
    pub error: Option<String>,
}
