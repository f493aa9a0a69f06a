//! What can be wrong about a membership before it begins.

use thiserror::Error;

use crate::homes::ViewError;

/// Why there is no membership.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting that is not allowed.
    #[error("{field}: {value:?} is not allowed: {allowed}")]
    Setting {
        /// Which one.
        field: &'static str,
        /// What it is.
        value: String,
        /// What it may be.
        allowed: &'static str,
    },
    /// Hosts that are no view.
    #[error(transparent)]
    View(#[from] ViewError),
    /// The system has no thread.
    #[error("a thread of the membership: {0}")]
    Thread(#[source] std::io::Error),
}

impl Error {
    pub(super) fn setting(field: &'static str, value: &str, allowed: &'static str) -> Error {
        Error::Setting {
            field,
            value: value.to_owned(),
            allowed,
        }
    }
}
