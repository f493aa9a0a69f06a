//! Sessions that are written chunk by chunk: `kvdepot.sessions.Stream`, and serializers.

use std::ops::Range;
use std::sync::Arc;

use kvdepot_session::{Error, Sink, Stream as StoreStream};
use kvdepot_store::Buffer;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::checkpoint::{self, Raised, Told, raise, runs_of};
use crate::handle::{Handle, Owned};
use crate::keys::Tokens;
use crate::{buffers, errors, keep, wait};

/// A session that is written while its length is unknown.
///
/// A context manager: leaving the block without `commit` removes the parts.
#[pyclass(frozen, module = "kvdepot.sessions")]
pub(crate) struct Stream(Owned<Mutex<StoreStream>>);

impl Stream {
    pub(crate) fn new(stream: StoreStream, handle: &Arc<Handle>) -> Stream {
        Stream(Owned::new(Mutex::new(stream), handle))
    }

    fn call<T: Send>(
        &self,
        py: Python<'_>,
        run: impl FnOnce(&mut StoreStream) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let stream = self.0.get(py)?;
        wait::call(py, || run(&mut stream.lock()))?.map_err(|error| raise(py, error))
    }

    /// Something that is known at once.
    fn look<T: Send>(
        &self,
        py: Python<'_>,
        look: impl FnOnce(&StoreStream) -> T + Send,
    ) -> PyResult<T> {
        let stream = self.0.get(py)?;
        Ok(py.detach(|| look(&stream.lock())))
    }
}

#[pymethods]
impl Stream {
    /// Number of leading tokens whose rows are stored. Append rows from this token on.
    #[getter]
    fn cached_tokens(&self, py: Python<'_>) -> PyResult<usize> {
        self.look(py, StoreStream::cached_tokens)
    }

    /// All tokens so far.
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let tokens = self.look(py, |stream| stream.tokens().to_vec())?;
        PyList::new(py, tokens)
    }

    /// Tokens until the end of the present piece.
    #[getter]
    fn room(&self, py: Python<'_>) -> PyResult<usize> {
        self.look(py, StoreStream::room)
    }

    /// Bytes that are stored, or being stored.
    #[getter]
    fn bytes_written(&self, py: Python<'_>) -> PyResult<u64> {
        self.look(py, StoreStream::bytes_written)
    }

    /// Adds tokens and their rows.
    ///
    /// A chunk inside a piece may have any layout. A chunk that exceeds `room` is split, and needs
    /// equal bytes per token. The memory may be reused when the call returns.
    ///
    /// Args:
    ///     tokens: The next tokens.
    ///     rows: Memory with their rows, in one or several buffers.
    ///
    /// Raises:
    ///     InputError: An argument is unsuitable. The stream can continue.
    ///     Error: A part was not stored. The stream has ended, and its parts are removed.
    fn append(&self, py: Python<'_>, tokens: Tokens, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        let parsed = buffers::parse(rows, false)?;
        let all: Vec<Buffer> = (0..parsed.blocks.len())
            .flat_map(|at| parsed.blocks.pieces(at).to_vec())
            .collect();
        let appended = self.call(py, |stream| stream.append(&tokens, &all));
        drop((all, parsed.blocks));
        parsed.keep.release(py);
        appended
    }

    /// Stores the rest and makes the stream a session.
    ///
    /// Args:
    ///     text: Rendered text of the tokens, for `lookup_text`.
    ///     reason: Cause of the save, one of `kvdepot.sessions.REASONS`.
    ///     context_tokens: Context size of the engine, in tokens.
    ///     objects: Parts that do not grow with the tokens, by name.
    ///     note: Any text.
    ///     created: Time of the save in seconds since 1970. Default: now.
    ///
    /// Returns:
    ///     A dictionary, as `Sessions.save`.
    ///
    /// Raises:
    ///     InputError: An argument is unsuitable. The stream can continue.
    ///     Error: A part was not stored. The stream has ended, and its parts are removed.
    #[pyo3(
        signature = (**told),
        text_signature = "($self, *, text=None, reason='asked', context_tokens=0, objects=None, \
                          note='', created=None)"
    )]
    fn commit<'py>(
        &self,
        py: Python<'py>,
        told: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let told = Told::named(py, told)?;
        let saved = self.call(py, |stream| stream.commit(told.ending()));
        told.release(py);
        checkpoint::saved(py, &saved?)
    }

    /// Ends the stream without a session, and removes its parts that no session names.
    ///
    /// Raises:
    ///     Error: The depot cannot be read. Parts that remain are ordinary blocks.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, StoreStream::abort)
    }

    fn __enter__(slf: Py<Stream>) -> Py<Stream> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        keep::sweep(py);
        self.abort(py)
    }
}

/// Bytes of a run of tokens, by a number of bytes a token, or as a function says it.
pub(crate) fn size_of(size: &Py<PyAny>, run: Range<usize>, raised: &Raised) -> u64 {
    Python::attach(|py| {
        let size = size.bind(py);
        let bytes = match size.is_callable() {
            true => size
                .call1((run.start, run.end))
                .and_then(|said| said.extract::<u64>()),
            false => size
                .extract::<u64>()
                .map(|each| each.saturating_mul(run.len() as u64)),
        };
        bytes.unwrap_or_else(|error| {
            raised.set(error);
            0
        })
    })
}

/// Asks Python for the rows of runs of tokens, chunk by chunk.
pub(crate) fn write_chunks(
    chunks: &Py<PyAny>,
    runs: &[Range<usize>],
    sink: &mut Sink,
    raised: &Raised,
) -> Result<(), Error> {
    let wrong = |error: PyErr| raised.set(error);
    Python::attach(|py| {
        let asked = runs_of(py, runs).map_err(wrong)?;
        let given = chunks.bind(py).call1((asked,)).map_err(wrong)?;
        for chunk in given.try_iter().map_err(wrong)? {
            let one = PyList::new(py, [chunk.map_err(wrong)?]).map_err(wrong)?;
            let parsed = buffers::parse(one.as_any(), false).map_err(wrong)?;
            let pieces = parsed.blocks.pieces(0);
            if !pieces.iter().all(Buffer::is_memory) {
                let allowed = "host memory";
                return Err(wrong(errors::input(py, "chunks", "device memory", allowed)));
            }
            let written = py.detach(|| {
                let pieces = pieces.iter();
                pieces
                    .map(Buffer::to_vec)
                    .try_for_each(|bytes| sink.write(&bytes))
            });
            parsed.keep.release(py);
            written?;
        }
        Ok(())
    })
}
