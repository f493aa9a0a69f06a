//! What can be wrong with a ds4 file.

use std::{fmt, io};

/// Reason of a failed read or write of a ds4 file.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The reader or the writer failed.
    Io(io::Error),
    /// A field has a value that is not allowed.
    Format {
        /// Name of the field, as in the tables of [the module](super).
        field: &'static str,
        /// Value of the field.
        value: String,
        /// Allowed values.
        allowed: String,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io(source) => write!(to, "ds4 file: {source}"),
            Error::Format {
                field,
                value,
                allowed,
            } => write!(
                to,
                "ds4 file: {field}: {value} is not allowed; allowed: {allowed}"
            ),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Io(source) => Some(source),
            Error::Format { .. } => None,
        }
    }
}

impl From<io::Error> for Error {
    fn from(source: io::Error) -> Error {
        Error::Io(source)
    }
}

/// Refuses a field.
pub(super) fn refuse<T>(
    field: &'static str,
    value: impl fmt::Display,
    allowed: impl fmt::Display,
) -> Result<T, Error> {
    Err(Error::Format {
        field,
        value: value.to_string(),
        allowed: allowed.to_string(),
    })
}
