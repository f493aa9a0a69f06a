//! llama.cpp's sequence states, cut by tokens: `kvdepot.llama_cpp`.

use std::ops::Range;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

use kvdepot_session::llama::{Error, Layout};
use pyo3::prelude::*;

use crate::errors;
use crate::view::View;

const ALLOWED: &str = "contiguous memory: an object with the buffer protocol";

/// Positions of the rows of each token in a sequence state of llama.cpp.
#[pyclass(frozen, module = "kvdepot.llama_cpp")]
pub(crate) struct LlamaLayout(Layout);

fn raise(py: Python<'_>, error: Error) -> PyErr {
    errors::input(py, error.field, error.value, error.allowed)
}

/// The memory of an argument, which stays where it is until it is dropped.
fn memory(field: &'static str, object: &Bound<'_, PyAny>, written: bool) -> PyResult<View> {
    let py = object.py();
    let wrong = |value: String| errors::input(py, field, value, ALLOWED);
    let view = View::of(object).map_err(|error| wrong(error.value(py).to_string()))?;
    match view {
        None => Err(wrong("a buffer with gaps".into())),
        Some(view) if written && !view.is_writable() => Err(wrong("read-only memory".into())),
        Some(view) => Ok(view),
    }
}

impl LlamaLayout {
    /// Copies rows between a state and a piece without the interpreter's lock.
    fn copy(
        &self,
        py: Python<'_>,
        state: &View,
        piece: &View,
        tokens: Range<usize>,
        into_state: bool,
    ) -> PyResult<()> {
        let checked = self.0.check(state.len(), &tokens, piece.len());
        checked.map_err(|error| raise(py, error))?;
        let runs = self.0.runs(tokens).map_err(|error| raise(py, error))?;
        let (state, piece) = (state.addr(), piece.addr());
        py.detach(|| {
            for run in runs {
                let (state, piece) = (state + run.state, piece + run.piece);
                let (from, to) = match into_state {
                    true => (piece, state),
                    false => (state, piece),
                };
                let from = with_exposed_provenance::<u8>(from);
                let to = with_exposed_provenance_mut::<u8>(to);
                // SAFETY: `Layout::check` has held both lengths against the layout, whose runs
                // lie inside of both; the views keep the memory in place, and `memory` has seen
                // that what is written is writable. No Rust reference to the bytes is made, and
                // they may overlap.
                unsafe { std::ptr::copy(from, to, run.len) };
            }
        });
        Ok(())
    }
}

#[pymethods]
impl LlamaLayout {
    /// Reads the layout of a whole state.
    ///
    /// Args:
    ///     state: Contiguous bytes, as `llama_state_seq_get_data` wrote them.
    ///
    /// Returns:
    ///     The layout.
    ///
    /// Raises:
    ///     InputError: The state is incomplete, or cannot be split by tokens: positions other than
    ///         0, 1, 2 and so on, several streams, or M-RoPE.
    #[staticmethod]
    fn read(state: &Bound<'_, PyAny>) -> PyResult<LlamaLayout> {
        let py = state.py();
        let view = memory("state", state, false)?;
        if view.len() == 0 {
            return Err(errors::input(py, "state", "empty", "a state"));
        }
        let from = with_exposed_provenance::<u8>(view.addr());
        // SAFETY: the view keeps so many readable bytes in place, and no Python code runs
        // meanwhile, since this thread has the interpreter; nobody else is told of the memory.
        let state = unsafe { std::slice::from_raw_parts(from, view.len()) };
        let layout = Layout::read(state).map_err(|error| raise(py, error))?;
        Ok(LlamaLayout(layout))
    }

    /// Returns the layout of a state of the same context with another number of tokens.
    ///
    /// Args:
    ///     tokens: Number of tokens, at least 1.
    ///     rest_bytes: Size of the part at the end that does not grow with the tokens, in bytes.
    ///
    /// Returns:
    ///     The new layout.
    ///
    /// Raises:
    ///     InputError: `tokens` is 0, or exceeds the number of positions of a state.
    #[pyo3(signature = (tokens, rest_bytes = 0))]
    fn resized(&self, py: Python<'_>, tokens: usize, rest_bytes: usize) -> PyResult<LlamaLayout> {
        let layout = self.0.resized(tokens, rest_bytes);
        let layout = layout.map_err(|error| raise(py, error))?;
        Ok(LlamaLayout(layout.of_sequence(0)))
    }

    /// Copies the rows of a run of tokens from a state to a piece, without the interpreter lock.
    ///
    /// Args:
    ///     state: Contiguous memory of `state_bytes` bytes.
    ///     first: First token of the run.
    ///     end: One past the last token of the run.
    ///     piece: Writable contiguous memory of `(end - first) * token_bytes` bytes.
    ///
    /// Raises:
    ///     InputError: Memory has another length or is read-only, or the state has no such tokens.
    fn gather(
        &self,
        state: &Bound<'_, PyAny>,
        first: usize,
        end: usize,
        piece: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (from, to) = (
            memory("state", state, false)?,
            memory("piece", piece, true)?,
        );
        self.copy(state.py(), &from, &to, first..end, false)
    }

    /// Copies the rows of a run of tokens from a piece to a state, without the interpreter lock.
    ///
    /// Args:
    ///     piece: Contiguous memory of `(end - first) * token_bytes` bytes.
    ///     first: First token of the run.
    ///     end: One past the last token of the run.
    ///     state: Writable contiguous memory of `state_bytes` bytes.
    ///
    /// Raises:
    ///     InputError: Memory has another length or is read-only, or the state has no such tokens.
    fn scatter(
        &self,
        piece: &Bound<'_, PyAny>,
        first: usize,
        end: usize,
        state: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (from, to) = (
            memory("piece", piece, false)?,
            memory("state", state, true)?,
        );
        self.copy(state.py(), &to, &from, first..end, true)
    }

    /// Writes the parts of a state that are neither rows nor the part at its end.
    ///
    /// Args:
    ///     state: Writable contiguous memory of `state_bytes` bytes.
    ///
    /// Raises:
    ///     InputError: The memory has another length or is read-only.
    fn write_head(&self, state: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = state.py();
        let view = memory("state", state, true)?;
        if view.len() != self.0.state_bytes() {
            let value = format!("{} bytes", view.len());
            let allowed = self.0.state_bytes().to_string();
            return Err(errors::input(py, "state", value, allowed));
        }
        let to = with_exposed_provenance_mut::<u8>(view.addr());
        // SAFETY: the view keeps so many bytes in place, and `memory` has seen that they are
        // writable; no Python code runs meanwhile, since this thread has the interpreter. A state
        // is never empty.
        let state = unsafe { std::slice::from_raw_parts_mut(to, view.len()) };
        self.0.write_head(state).map_err(|error| raise(py, error))
    }

    /// Number of tokens of the state.
    #[getter]
    fn tokens(&self) -> usize {
        self.0.tokens()
    }

    /// Size of the rows of one token in bytes.
    #[getter]
    fn token_bytes(&self) -> usize {
        self.0.shape().token_bytes()
    }

    /// Size of the state in bytes.
    #[getter]
    fn state_bytes(&self) -> usize {
        self.0.state_bytes()
    }

    /// Size of the part at the end of the state, in bytes.
    ///
    /// This part does not grow with the tokens: for example, a window or a recurrent state.
    #[getter]
    fn rest_bytes(&self) -> usize {
        self.0.rest().len()
    }

    /// The tables of rows in the order of the state, as (start, unit, units).
    ///
    /// `start` is the offset of the table, and `unit` the adjacent bytes of one token. A token has
    /// `units` of them, each after those of all tokens: 1, except for transposed values.
    #[getter]
    fn tables(&self) -> Vec<(usize, usize, usize)> {
        let tables = self.0.tables();
        tables
            .map(|(start, table)| (start, table.unit, table.units))
            .collect()
    }

    /// Text that all states of one context share: element types, rows and their order.
    #[getter]
    fn shape(&self) -> String {
        self.0.shape().to_string()
    }
}
