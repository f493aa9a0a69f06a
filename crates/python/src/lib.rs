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
mod aside;
mod buffers;
mod catalogue;
mod checkpoint;
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
mod llama;
mod log;
mod memory;
mod mover;
mod namespace;
mod pages;
mod policy;
mod saver;
mod session_files;
mod sessions;
mod settings;
mod spans;
mod storage;
mod streams;
mod task;
mod transfer;
mod two_phase;
mod view;
mod wait;

use pyo3::exceptions::PyImportError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyModule;

/// The number of the interpreter that a process begins with.
const MAIN_INTERPRETER: i64 = 0;

/// Compiled part of kvdepot.
///
/// Time-outs are in seconds; None waits without a limit. Sizes are in bytes: a number, or a text
/// with a unit such as "64GiB". Calls raise `ClosedError` after `close`, and in a forked child.
/// Calls that wait release the interpreter lock and react to Ctrl-C within 50 ms.
///
/// Examples run after `import kvdepot`. The example of a method continues that of its class.
#[pymodule(gil_used = true)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // First of all: what the module makes is the interpreter's that makes it.
    refuse_subinterpreters()?;
    kvdepot_transfer::install();
    module.add_class::<completions::Completions>()?;
    module.add_class::<depot::Depot>()?;
    module.add_class::<mover::MoveJob>()?;
    module.add_class::<mover::Mover>()?;
    module.add_class::<namespace::Namespace>()?;
    module.add_class::<spans::Spans>()?;
    module.add_class::<task::Task>()?;
    module.add_class::<two_phase::Pin>()?;
    module.add_class::<two_phase::Reservation>()?;
    module.add_function(wrap_pyfunction!(command::main, module)?)?;
    module.add_function(wrap_pyfunction!(depot::check, module)?)?;
    module.add_function(wrap_pyfunction!(depot::open, module)?)?;
    module.add_function(wrap_pyfunction!(handle::close_all, module)?)?;
    module.add_function(wrap_pyfunction!(keys::of_tokens, module)?)?;
    module.add_function(wrap_pyfunction!(mover::attach, module)?)?;
    module.add_function(wrap_pyfunction!(settings::bytes, module)?)?;
    module.add_function(wrap_pyfunction!(settings::cache_directory, module)?)?;
    module.add_function(wrap_pyfunction!(settings::options_of_file, module)?)?;
    module.add_function(wrap_pyfunction!(settings::seconds, module)?)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("LlamaLayout", module.py().get_type::<llama::LlamaLayout>())?;
    module.add("Sessions", module.py().get_type::<sessions::Sessions>())?;
    module.add("SessionPolicy", module.py().get_type::<policy::Policy>())?;
    module.add(
        "SessionFile",
        module.py().get_type::<session_files::SessionFile>(),
    )?;
    module.add(
        "SessionFiles",
        module.py().get_type::<session_files::SessionFiles>(),
    )?;
    module.add("SessionFound", module.py().get_type::<sessions::Found>())?;
    module.add("SessionSaver", module.py().get_type::<saver::Saver>())?;
    module.add("SessionSnapshot", module.py().get_type::<saver::Snapshot>())?;
    module.add("SessionStream", module.py().get_type::<streams::Stream>())?;
    module.add(
        "SessionCatalogue",
        module.py().get_type::<catalogue::Catalogue>(),
    )?;
    transfer::add(module)?;
    errors::add(module)
}

/// Lanes give objects back to the interpreter that they know, the main one, and depots are closed
/// when it ends.
fn refuse_subinterpreters() -> PyResult<()> {
    // SAFETY: this thread is attached to an interpreter, whose state the first call gives.
    let number = unsafe { ffi::PyInterpreterState_GetID(ffi::PyInterpreterState_Get()) };
    match number {
        MAIN_INTERPRETER => Ok(()),
        _ => Err(PyImportError::new_err(
            "kvdepot works in a process's main interpreter only, not in a subinterpreter",
        )),
    }
}
