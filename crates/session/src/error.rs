//! What can go wrong with a session.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use kvdepot_store::Outcome;
use rustix::io::Errno;

/// Why a session was not saved, found or restored.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A wrong argument, found before a byte moved.
    #[error("{field}: {value} is not allowed: {allowed}")]
    Input {
        /// What was wrong.
        field: String,
        /// What it was.
        value: String,
        /// What it may be.
        allowed: String,
    },
    /// The depot's.
    #[error(transparent)]
    Depot(#[from] kvdepot_store::Error),
    /// A part of a session was not stored. The session is not there; what was stored of it are
    /// blocks that the next save of the same tokens finds.
    #[error("{what} was not stored: {}", .outcome.reason().unwrap_or("unknown"))]
    NotStored {
        /// Which part.
        what: String,
        /// What became of it.
        outcome: Outcome,
    },
    /// A serializer has written more or fewer bytes than were predicted. The session is not there,
    /// and nothing is left of it.
    #[error(
        "the rows have {written} bytes{}, {predicted} were predicted: nothing was saved",
        if written > predicted { " or more" } else { "" }
    )]
    Predicted {
        /// Bytes that there were to be.
        predicted: u64,
        /// Bytes that came.
        written: u64,
    },
    /// A save in the background has no room in memory.
    #[error("{wanted} bytes are wanted in memory, where {used} of {most} are used")]
    NoRoom {
        /// Bytes that it wants.
        wanted: u64,
        /// Bytes that others have.
        used: u64,
        /// Bytes that all may have.
        most: u64,
    },
    /// A save in the background that was given up: nothing is left of it.
    #[error("the save was cancelled")]
    Cancelled,
    /// What went wrong in the background.
    #[error(transparent)]
    Background(Arc<Error>),
    /// No session has this name.
    #[error("there is no session {0}")]
    Unknown(String),
    /// A manifest or an archive that is none, or not whole.
    #[error("{what}: {reason}")]
    Malformed {
        /// Which.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A file.
    #[error("{path}: {source}")]
    Io {
        /// Which.
        path: String,
        /// What the system says.
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
