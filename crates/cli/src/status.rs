//! What the command ends with.

/// All is well.
pub(crate) const OK: i32 = 0;
/// The command did what it was asked for and found problems.
pub(crate) const PROBLEMS: i32 = 1;
/// Wrong usage, or an error.
pub(crate) const FAILED: i32 = 2;
