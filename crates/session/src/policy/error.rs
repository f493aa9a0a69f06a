//! What the policy refuses.

use std::fmt;

/// Why a call was refused. A refused call changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// A setting is outside of its allowed values.
    Setting {
        /// Its name.
        field: &'static str,
        /// The value that was given.
        value: u64,
        /// What is allowed, in words.
        allowed: &'static str,
    },
    /// The end of a save was told that was never granted, or had ended.
    UnknownSave {
        /// The id that was given.
        id: u64,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Setting {
                field,
                value,
                allowed,
            } => write!(out, "{field}: {value} is not allowed: {allowed}"),
            Error::UnknownSave { id } => write!(out, "save {id} is not under way"),
        }
    }
}

impl std::error::Error for Error {}
