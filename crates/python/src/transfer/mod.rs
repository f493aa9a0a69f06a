//! The transfer engine: `kvdepot.transfer`.
//!
//! What is told to an engine is read (`options`, `requests`), what it answers is shown (`task`,
//! `held`). No thread of an engine waits for the interpreter: what Python is to be told of a task
//! goes through a queue (`callbacks`).

mod callbacks;
mod engine;
mod held;
mod options;
mod requests;
mod shared;
mod task;

use pyo3::prelude::*;
use pyo3::types::PyModule;

pub(crate) use task::Task;

/// Puts the classes into the module, by names of which `kvdepot.transfer` has the short ones.
pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("Published", py.get_type::<held::Published>())?;
    module.add("Registered", py.get_type::<held::Registered>())?;
    module.add("TransferEngine", py.get_type::<engine::Engine>())?;
    module.add("TransferRemote", py.get_type::<held::Remote>())?;
    module.add("TransferTask", py.get_type::<Task>())
}
