//! llama.cpp's sequence states, cut by tokens: `kvdepot.llama_cpp`.

use std::ops::Range;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

use kvdepot_session::llama::{Error, Layout};
use pyo3::prelude::*;

use crate::errors;
use crate::view::View;

const ALLOWED: &str = "contiguous memory: an object with the buffer protocol";

/// Where the rows of each token lie in a sequence state of llama.cpp, of so many tokens.
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
    /// That of a whole state, as llama_state_seq_get_data has written it.
    ///
    /// Raises InputError for what is torn, and for what cannot be cut: positions other than 0, 1,
    /// 2 and so on, several streams, M-RoPE.
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

    /// That of a state of another number of tokens of the same context, with a rest of so many
    /// bytes.
    #[pyo3(signature = (tokens, rest_bytes = 0))]
    fn resized(&self, py: Python<'_>, tokens: usize, rest_bytes: usize) -> PyResult<LlamaLayout> {
        let layout = self.0.resized(tokens, rest_bytes);
        let layout = layout.map_err(|error| raise(py, error))?;
        Ok(LlamaLayout(layout.of_sequence(0)))
    }

    /// Takes the rows of tokens from `first` to behind the last, `end`, out of a state into
    /// `piece`, `token_bytes` for each. Other threads run meanwhile.
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

    /// Puts the rows of tokens from `first` to behind the last, `end`, into a state.
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

    /// Writes all of a state that is neither rows nor rest.
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

    /// Its tokens.
    #[getter]
    fn tokens(&self) -> usize {
        self.0.tokens()
    }

    /// Bytes of a token's rows.
    #[getter]
    fn token_bytes(&self) -> usize {
        self.0.shape().token_bytes()
    }

    /// Bytes of the state.
    #[getter]
    fn state_bytes(&self) -> usize {
        self.0.state_bytes()
    }

    /// Bytes at the state's end that do not grow by appending: a window, a recurrent state.
    #[getter]
    fn rest_bytes(&self) -> usize {
        self.0.rest().len()
    }

    /// What states of one context have in common: element types, rows, their order.
    #[getter]
    fn shape(&self) -> String {
        self.0.shape().to_string()
    }
}
