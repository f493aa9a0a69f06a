//! How a membership stands, for people and metrics.

use std::time::Duration;

/// State of this process in the view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Standing {
    /// The process only follows, or the hosts are fixed.
    Looking,
    /// The process is not registered yet, or no longer.
    Joining,
    /// The process is registered, as far as it knows.
    Joined,
    /// A later process has the same name. This process stays unregistered until the other one
    /// leaves.
    Displaced,
}

/// State of a membership.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status {
    /// True if the source responds, so that the view is current.
    pub is_current: bool,
    /// Time since the source last responded; `None` while it responds.
    pub stale: Option<Duration>,
    /// State of this process in the view.
    pub standing: Standing,
    /// Last error, also after a recovery.
    pub error: Option<String>,
}
