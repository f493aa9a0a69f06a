//! What can be wrong with a state.

use std::fmt;

/// Why a state was not read, or not cut.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("llama.cpp state: {field} is {value}; allowed: {allowed}")]
#[non_exhaustive]
pub struct Error {
    /// The field, as the module's table names it, or the argument.
    pub field: &'static str,
    /// What it is.
    pub value: String,
    /// What it could be.
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
