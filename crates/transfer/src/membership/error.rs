//! What can be wrong about a membership before it begins.

use thiserror::Error;

use crate::homes::ViewError;

/// Reason why a membership cannot be created or changed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting is not allowed.
    #[error("{field}: {value:?} is not allowed; allowed: {allowed}")]
    Setting {
        /// Name of the setting.
        field: &'static str,
        /// Value of the setting.
        value: String,
        /// Allowed values.
        allowed: &'static str,
    },
    /// The hosts do not form a view.
    #[error(transparent)]
    View(#[from] ViewError),
    /// A thread cannot be started.
    #[error("cannot start a membership thread: {0}")]
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
