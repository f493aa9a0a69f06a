//! The `kvdepot` command inside the wheel.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the `kvdepot` command with these arguments, the program's name first, and answers its
/// exit status.
#[pyfunction]
pub(crate) fn main(py: Python<'_>, argv: Vec<OsString>) -> i32 {
    py.detach(|| kvdepot_cli::main(argv))
}
