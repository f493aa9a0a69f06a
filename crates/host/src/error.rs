//! The errors of the host's services.

use std::io;
use std::path::{Path, PathBuf};

/// An error of a host service.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    #[error("cannot {operation}: {source}")]
    Os {
        /// The operation, as text that completes "cannot …".
        operation: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// A system call on a named file failed.
    #[error("cannot {operation} {}: {source}", path.display())]
    Path {
        /// The operation, as text that completes "cannot …".
        operation: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// An argument has a value that is not allowed.
    #[error("{field}: {value} is not allowed; allowed: {allowed}")]
    Input {
        /// Name of the argument.
        field: &'static str,
        /// The value in the call.
        value: String,
        /// Description of the allowed values.
        allowed: String,
    },
    /// A system file, or a message of a peer, does not have the expected form.
    #[error("{what} is {value}, expected {expected}")]
    Malformed {
        /// Name of the file or message.
        what: String,
        /// Its content.
        value: String,
        /// Description of the expected content.
        expected: &'static str,
    },
    /// A directory that must be private to this user can be accessed by others.
    #[error("{} is accessible to other users: {reason}", path.display())]
    NotPrivate {
        /// Path of the directory.
        path: PathBuf,
        /// Description of the problem and of the required state.
        reason: String,
    },
    /// The process does not exist, or it has ended.
    #[error("process {pid} does not exist or has ended")]
    NoProcess {
        /// Process ID.
        pid: u32,
    },
    /// The peer is in a PID namespace that this process cannot see, so its exit could not be
    /// detected.
    #[error(
        "the other process (uid {uid}) is in another PID namespace, so its exit could not be \
         detected; use Linux 6.5 or later, or share the PID namespace (containers of a pod: \
         shareProcessNamespace: true; pods of a host: hostPID: true; docker: --pid=host)"
    )]
    ForeignPeer {
        /// User ID of the peer.
        uid: u32,
    },
    /// The descriptor was opened before a fork, and this process is the child.
    #[error(
        "a forked child cannot use the descriptors of its parent process; open the depot in the \
         child"
    )]
    Forked,
}

/// The result of a host service.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Returns the system's classification of the error, if a system call caused it.
    ///
    /// A receive that exceeded the socket's time limit is [`io::ErrorKind::WouldBlock`].
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
