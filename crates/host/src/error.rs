//! The errors of the host's services.

use std::io;
use std::path::{Path, PathBuf};

/// What can go wrong when the host is asked for something.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    #[error("cannot {operation}: {source}")]
    Os {
        /// What was attempted, as it completes "cannot …".
        operation: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// A system call on a named file failed.
    #[error("cannot {operation} {}: {source}", path.display())]
    Path {
        /// What was attempted, as it completes "cannot …".
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The caller passed something that is not allowed.
    #[error("{field} is {value}, allowed is {allowed}")]
    Input {
        /// The argument.
        field: &'static str,
        /// What was passed.
        value: String,
        /// What may be passed.
        allowed: String,
    },
    /// A file of the system, or a peer's message, does not have the form it should have.
    #[error("{what} is {value}, expected {expected}")]
    Malformed {
        /// The file or message.
        what: String,
        /// What it holds.
        value: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// A directory that must be private to this user is not.
    #[error("{} is not private to this user: {reason}", path.display())]
    NotPrivate {
        /// The directory.
        path: PathBuf,
        /// What is wrong with it, and what would be right.
        reason: String,
    },
    /// The process does not exist, or it has ended.
    #[error("process {pid} does not exist or has ended")]
    NoProcess {
        /// Its number.
        pid: u32,
    },
    /// The peer lives in a process-number namespace that this one cannot see, so its death could
    /// not be noticed.
    #[error(
        "the peer's process (uid {uid}) has no process number here, so that its death could not be \
         noticed: give both one process namespace (containers of a pod: shareProcessNamespace: \
         true; pods of a host: hostPID: true; docker: --pid=host)"
    )]
    ForeignPeer {
        /// The peer's user.
        uid: u32,
    },
    /// The descriptor was opened before a fork, and this is the child.
    #[error("this process is a fork of the one that opened the descriptor, and owns nothing of it")]
    Forked,
}

/// A result of the host's services.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The system's own classification, where the system was involved.
    ///
    /// A receive that ran into a socket's time limit is [`io::ErrorKind::WouldBlock`].
    #[must_use]
    pub fn io_kind(&self) -> Option<io::ErrorKind> {
        match self {
            Error::Os { source, .. } | Error::Path { source, .. } => Some(source.kind()),
            _ => None,
        }
    }

    pub(crate) fn os(operation: &'static str) -> impl FnOnce(rustix::io::Errno) -> Error {
        move |errno| Error::Os {
            operation,
            source: errno.into(),
        }
    }

    pub(crate) fn malformed(path: &Path, value: String, expected: &'static str) -> Error {
        Error::Malformed {
            what: path.display().to_string(),
            value,
            expected,
        }
    }

    /// The error of the last failed call of the C library in this thread.
    pub(crate) fn last_os(operation: &'static str) -> Error {
        Error::Os {
            operation,
            source: io::Error::last_os_error(),
        }
    }

    pub(crate) fn path<E: Into<io::Error>>(
        operation: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(E) -> Error {
        move |source| Error::Path {
            operation,
            path: path.into(),
            source: source.into(),
        }
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> io::Error {
        match error {
            Error::Os { source, .. } => source,
            other => io::Error::other(other),
        }
    }
}
