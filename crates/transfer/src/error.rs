//! What may go wrong: with a call, and with one request of a batch.

use std::fmt;
use std::io;

/// Why a call was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option, or an argument, that cannot be.
    #[error("{field}: {value} is not allowed: {allowed}")]
    Input {
        /// Which one.
        field: &'static str,
        /// What it was.
        value: String,
        /// What it may be.
        allowed: &'static str,
    },
    /// The system refuses something of this host.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// What the system says.
        source: io::Error,
    },
    /// A peer cannot be reached, or does not answer.
    #[error("peer {peer}: {reason}")]
    Unreachable {
        /// Its address.
        peer: String,
        /// What happened.
        reason: String,
    },
    /// A peer was reached and refuses.
    #[error("peer {peer} refuses: {reason}")]
    Refused {
        /// Its address.
        peer: String,
        /// Why.
        reason: String,
    },
    /// The engine is closed, or another process's.
    #[error("the engine is closed")]
    Closed,
}

impl Error {
    pub(crate) fn input(
        field: &'static str,
        value: impl fmt::Display,
        allowed: &'static str,
    ) -> Error {
        Error::Input {
            field,
            value: value.to_string(),
            allowed,
        }
    }

    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
        let what = what.into();
        move |source| Error::Io { what, source }
    }
}

/// Why a request was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum Fault {
    /// Its local memory is not registered, or not for that.
    Local = 2,
    /// It reaches beyond what was granted.
    Range = 3,
    /// What was granted does not allow it.
    Rights = 4,
    /// Nothing is granted under that name any more.
    Unknown = 5,
    /// What arrived did not match its checksum, again and again.
    Checksum = 6,
    /// Memory of the target could not be read or written.
    Failed = 7,
    /// The peer is gone, or does not answer, and retries are used up.
    Lost = 8,
    /// The task's time was over.
    TimedOut = 9,
    /// The task was cancelled.
    Cancelled = 10,
    /// The engine was closed.
    Closed = 11,
}

impl Fault {
    /// All of them.
    pub(crate) const ALL: [Fault; 10] = [
        Fault::Local,
        Fault::Range,
        Fault::Rights,
        Fault::Unknown,
        Fault::Checksum,
        Fault::Failed,
        Fault::Lost,
        Fault::TimedOut,
        Fault::Cancelled,
        Fault::Closed,
    ];

    /// One word, as metrics and bindings have it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Fault::Local => "local",
            Fault::Range => "range",
            Fault::Rights => "rights",
            Fault::Unknown => "unknown",
            Fault::Checksum => "checksum",
            Fault::Failed => "failed",
            Fault::Lost => "lost",
            Fault::TimedOut => "timed_out",
            Fault::Cancelled => "cancelled",
            Fault::Closed => "closed",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
