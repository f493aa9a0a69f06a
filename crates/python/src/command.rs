//! The `kvdepot` command inside the wheel.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the command `kvdepot`.
///
/// Args:
///     argv: The program's name, then its arguments.
///
/// Returns:
///     The exit status: 0 on success, 1 if the command found problems, 2 on errors
///     (docs/errors.md).
#[pyfunction]
pub(crate) fn main(py: Python<'_>, argv: &Bound<'_, PyAny>) -> PyResult<i32> {
    let argv = argv.try_iter()?.map(|word| word?.extract());
    let argv: Vec<OsString> = argv.collect::<PyResult<_>>()?;
    Ok(py.detach(|| kvdepot_cli::main(argv)))
}
