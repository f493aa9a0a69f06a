//! What may go wrong: with a call, and with one request of a batch.

use std::fmt;
use std::io;

/// Reason of a failed call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option or argument that is not allowed.
    #[error("{}", not_allowed(field, value, allowed))]
    Input {
        /// Name of the option or argument.
        field: &'static str,
        /// Value of the option or argument.
        value: String,
        /// Allowed values.
        allowed: &'static str,
    },
    /// An operation of the operating system failed on this host.
    #[error("cannot {what}: {source}")]
    Io {
        /// The operation.
        what: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A peer cannot be reached, or does not respond.
    #[error("peer {peer}: {reason}")]
    Unreachable {
        /// Address of the peer.
        peer: String,
        /// Description of the failure.
        reason: String,
    },
    /// A peer rejected the request.
    #[error("peer {peer} rejected the request: {reason}")]
    Refused {
        /// Address of the peer.
        peer: String,
        /// Reason that the peer sent.
        reason: String,
    },
    /// The engine is closed, or belongs to the process that this one was forked from.
    #[error("the transfer engine is closed")]
    Closed,
}

/// The text of a value that is not allowed, or that is missing.
fn not_allowed(field: &str, value: &str, allowed: &str) -> String {
    match value {
        "missing" => format!("{field} is required; allowed: {allowed}"),
        _ => format!("{field}: {value} is not allowed; allowed: {allowed}"),
    }
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

/// Reason of a failed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum Fault {
    /// The local memory is not registered, or does not allow the operation.
    Local = 2,
    /// The range exceeds the grant.
    Range = 3,
    /// The grant does not allow the operation.
    Rights = 4,
    /// There is no such grant, for example because it was withdrawn.
    Unknown = 5,
    /// The checksum did not match in any try.
    Checksum = 6,
    /// The target could not read or write its memory.
    Failed = 7,
    /// The peer was lost or does not respond, and all retries failed.
    Lost = 8,
    /// The task timed out.
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

    /// Returns the name that metrics and language bindings use, for example `"timed_out"`.
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
