//! Python binding of kvdepot: `kvdepot._native`.
//!
//! Thin: it reads arguments, lets the store or the mover work without the interpreter's lock, and
//! turns outcomes and errors into Python's. Three promises are its own. Memory that a caller
//! hands over stays alive until no lane touches it (`keep`). Every wait notices Ctrl-C within
//! 50 ms (`wait`). Lanes never need the interpreter: what they are the last to hold is queued
//! for a thread that has it.

#![expect(
    unsafe_code,
    reason = "addresses come from Python's buffer protocol and DLPack, and go back through them"
)]

mod arguments;
mod buffers;
mod command;
mod completions;
mod cuda_array;
mod depot;
mod devices;
mod dlpack;
mod errors;
mod handle;
mod keep;
mod keys;
mod log;
mod mover;
mod namespace;
mod settings;
mod spans;
mod task;
mod two_phase;
mod wait;

/// The compiled half of kvdepot.
#[pyo3::pymodule(gil_used = true)]
mod _native {
    use pyo3::prelude::*;
    use pyo3::types::PyModule;

    #[pymodule_export]
    use crate::command::main;
    #[pymodule_export]
    use crate::completions::Completions;
    #[pymodule_export]
    use crate::depot::{Depot, check, open};
    #[pymodule_export]
    use crate::handle::close_all;
    #[pymodule_export]
    use crate::mover::{MoveJob, Mover, attach};
    #[pymodule_export]
    use crate::namespace::Namespace;
    #[pymodule_export]
    use crate::spans::Spans;
    #[pymodule_export]
    use crate::task::Task;
    #[pymodule_export]
    use crate::two_phase::{Pin, Reservation};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        crate::errors::add(module)
    }
}
