//! What the policy refuses.

use std::fmt;

/// Reason of a rejected call. A rejected call changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// A setting is outside its allowed range.
    Setting {
        /// Name of the setting.
        field: &'static str,
        /// Value of the setting.
        value: u64,
        /// Allowed values, in words.
        allowed: &'static str,
    },
    /// The end of a save was reported that was not granted, or that had ended already.
    UnknownSave {
        /// Reported number of the save.
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
            } => write!(out, "{field}: {value} is not allowed; allowed: {allowed}"),
            Error::UnknownSave { id } => write!(out, "save {id} is not in progress"),
        }
    }
}

impl std::error::Error for Error {}
