//! What can be wrong with a state.

use std::fmt;

/// Reason of a rejected state or argument.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("llama.cpp state: {field} is {value}; allowed: {allowed}")]
#[non_exhaustive]
pub struct Error {
    /// Name of the field, as in the table of [the module](super), or of the argument.
    pub field: &'static str,
    /// Value of the field.
    pub value: String,
    /// Allowed values.
    pub allowed: String,
}

/// Refuses a field.
pub(super) fn refuse<T>(
    field: &'static str,
    value: impl fmt::Display,
    allowed: impl fmt::Display,
) -> Result<T, Error> {
    Err(Error {
        field,
        value: value.to_string(),
        allowed: allowed.to_string(),
    })
}
