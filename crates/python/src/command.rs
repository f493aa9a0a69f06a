//! The `kvdepot` command inside the wheel.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the `kvdepot` command with these arguments, the program's name first, and answers its
/// exit status.
#[pyfunction]
pub(crate) fn main(py: Python<'_>, argv: &Bound<'_, PyAny>) -> PyResult<i32> {
    let argv = argv.try_iter()?.map(|word| word?.extract());
    let argv: Vec<OsString> = argv.collect::<PyResult<_>>()?;
    Ok(py.detach(|| kvdepot_cli::main(argv)))
}
