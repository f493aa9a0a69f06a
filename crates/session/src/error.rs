//! What can go wrong with a session.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use kvdepot_store::Outcome;
use rustix::io::Errno;

/// Reason of a failed operation on sessions.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument that is not allowed. Nothing was moved or stored.
    #[error("{field}: {value} is not allowed; allowed: {allowed}")]
    Input {
        /// Name of the argument.
        field: String,
        /// Value of the argument.
        value: String,
        /// Allowed values.
        allowed: String,
    },
    /// An error of the depot.
    #[error(transparent)]
    Depot(#[from] kvdepot_store::Error),
    /// A part of a session was not stored, and the session does not exist. The parts that were
    /// stored remain as blocks, which the next save of the same tokens finds.
    #[error("{what} was not stored: {}", .outcome.reason().unwrap_or("unknown"))]
    NotStored {
        /// The part that was not stored.
        what: String,
        /// Outcome that the depot reported for the part.
        outcome: Outcome,
    },
    /// A serializer wrote more or fewer bytes than predicted. The session does not exist, and its
    /// parts were removed.
    #[error(
        "the engine wrote {written} bytes of KV rows{}, but {predicted} bytes were expected; nothing \
         was saved",
        if written > predicted { " or more" } else { "" }
    )]
    Predicted {
        /// Predicted size of the rows, in bytes.
        predicted: u64,
        /// Bytes that the serializer wrote.
        written: u64,
    },
    /// A background save did not get enough memory.
    #[error(
        "not enough memory for the save: {wanted} bytes requested, {used} of {most} bytes in use"
    )]
    NoRoom {
        /// Memory that the save requested, in bytes.
        wanted: u64,
        /// Memory that other saves use, in bytes.
        used: u64,
        /// Limit for all saves together, in bytes.
        most: u64,
    },
    /// A background save was cancelled. Its parts were removed.
    #[error("the save was cancelled")]
    Cancelled,
    /// Error of a background save.
    #[error(transparent)]
    Background(Arc<Error>),
    /// There is no session with this ID.
    #[error("there is no session {0}")]
    Unknown(String),
    /// A manifest, session or file that is damaged, incomplete or of another format.
    #[error("{what}: {reason}")]
    Malformed {
        /// The damaged object, for example the path of a file.
        what: String,
        /// Description of the damage.
        reason: String,
    },
    /// A file operation failed.
    #[error("{path}: {source}")]
    Io {
        /// Path of the file.
        path: String,
        /// Error of the operating system.
        source: std::io::Error,
    },
}

impl From<kvdepot_media::Error> for Error {
    fn from(error: kvdepot_media::Error) -> Error {
        Error::Depot(error.into())
    }
}

impl From<kvdepot_host::Error> for Error {
    fn from(error: kvdepot_host::Error) -> Error {
        Error::Depot(error.into())
    }
}

impl Error {
    /// Whether a file is not there.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Error::Io { source, .. } if source.kind() == ErrorKind::NotFound)
    }

    /// Whether this process has no descriptor or no memory left: a file is not to blame for that.
    pub(crate) fn is_of_this_process(&self) -> bool {
        let Error::Io { source, .. } = self else {
            return false;
        };
        let lacks = [Errno::MFILE, Errno::NFILE, Errno::NOMEM];
        Errno::from_io_error(source).is_some_and(|errno| lacks.contains(&errno))
    }

    pub(crate) fn input(
        field: impl Into<String>,
        value: impl ToString,
        allowed: impl Into<String>,
    ) -> Error {
        Error::Input {
            field: field.into(),
            value: value.to_string(),
            allowed: allowed.into(),
        }
    }

    pub(crate) fn malformed(what: impl Into<String>, reason: impl Into<String>) -> Error {
        Error::Malformed {
            what: what.into(),
            reason: reason.into(),
        }
    }
}

/// Room in memory for so many bytes of a file. What a file claims may be more than there is.
pub(crate) fn room(bytes: u64, path: &Path) -> Result<Vec<u8>, Error> {
    let mut room = Vec::new();
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    match room.try_reserve_exact(bytes) {
        Ok(()) => Ok(room),
        Err(_) => Err(io(path)(ErrorKind::OutOfMemory.into())),
    }
}

/// What the system says of a file.
pub(crate) fn io(path: &Path) -> impl Fn(std::io::Error) -> Error + '_ {
    move |source| Error::Io {
        path: path.display().to_string(),
        source,
    }
}
