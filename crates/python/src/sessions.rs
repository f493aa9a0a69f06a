//! Sessions: `kvdepot.sessions`.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use kvdepot_session::{
    Error, Found as StoreFound, Id, Listed, Sessions as Store, Spec, export, export_ds4, import,
    import_ds4,
};
use kvdepot_store::BlockBuffers;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::arguments::{self, Fields};
use crate::checkpoint::{self, Raised, Told, raise, rows_of};
use crate::depot::Depot;
use crate::handle::Handle;
use crate::keys::Tokens;
use crate::streams::{self, Stream};
use crate::{buffers, keep, wait};

/// Saved states of conversations in a depot, for one model (docs/sessions.md).
///
/// Sessions that differ in any field are never found. In `kvdepot.sessions` this class is also
/// `open`.
///
/// Args:
///     depot: An open depot.
///     model: Model ID.
///     dtype: Element type of the rows.
///     piece_tokens: Tokens per piece, the unit that sessions share, 1 to 1048576.
///     weights: Fingerprint of the weights.
///     layout: Anything else that a state depends on, such as element types, tokenizer and
///         positions.
///     world: Tensor and pipeline parallel sizes.
///     hash: Hash algorithm of keys.
///     salt: Secret or label that separates tenants.
///
/// Raises:
///     InputError: A field is not allowed.
#[pyclass(frozen, module = "kvdepot.sessions")]
pub(crate) struct Sessions {
    pub(crate) store: Arc<Store>,
    pub(crate) handle: Arc<Handle>,
}

/// A session that is a prefix of a prompt, as `Sessions.lookup` returns it.
#[pyclass(frozen, module = "kvdepot.sessions")]
pub(crate) struct Found {
    found: StoreFound,
}

#[pymethods]
impl Found {
    /// The session ID, in hexadecimal digits.
    #[getter]
    fn id(&self) -> String {
        self.found.id.to_string()
    }

    /// The tokens of the session. Trust them, and tokenize only the text after `text_bytes`.
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, &self.found.tokens)
    }

    /// Bytes of the rendered text of the tokens; 0 if the text was not saved.
    #[getter]
    fn text_bytes(&self) -> usize {
        self.found.text_bytes
    }

    /// Context size of the engine that saved the session, in tokens.
    #[getter]
    fn context_tokens(&self) -> u32 {
        self.found.context_tokens
    }

    /// The pieces in order, as (first token, one past the last token, bytes).
    #[getter]
    fn pieces(&self) -> Vec<(usize, usize, u64)> {
        let each = self.found.pieces.iter();
        each.map(|(run, bytes)| (run.start, run.end, *bytes))
            .collect()
    }

    /// The objects as (name, bytes).
    #[getter]
    fn objects(&self) -> Vec<(String, u64)> {
        let each = self.found.objects.iter();
        each.map(|one| (one.name.clone(), one.bytes)).collect()
    }
}

/// Sessions, as dictionaries.
pub(crate) fn list_of(py: Python<'_>, rows: Vec<Listed>) -> PyResult<Bound<'_, PyList>> {
    let list = PyList::empty(py);
    for row in rows {
        let said = PyDict::new(py);
        said.set_item("id", row.id.to_string())?;
        said.set_item("tokens", row.tokens)?;
        said.set_item("text_bytes", row.text_bytes)?;
        said.set_item("bytes", row.bytes)?;
        said.set_item("created", row.created)?;
        said.set_item("reason", row.reason.name())?;
        said.set_item("note", row.note)?;
        said.set_item("bad", row.is_bad)?;
        list.append(said)?;
    }
    Ok(list)
}

impl Sessions {
    pub(crate) fn call<T: Send>(
        &self,
        py: Python<'_>,
        run: impl FnOnce(&Store) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        self.handle.depot(py)?;
        wait::call(py, || run(&self.store))?.map_err(|error| raise(py, error))
    }

    fn id(&self, py: Python<'_>, digits: &str) -> PyResult<Id> {
        self.store.find(digits).map_err(|error| raise(py, error))
    }
}

#[pymethods]
impl Sessions {
    #[new]
    #[pyo3(signature = (
        depot, *, model, dtype, piece_tokens, weights = None, layout = None, world = None,
        hash = None, salt = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "one a field of the namespace")]
    fn new(
        py: Python<'_>,
        depot: &Depot,
        model: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
        piece_tokens: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
        layout: Option<&Bound<'_, PyAny>>,
        world: Option<&Bound<'_, PyAny>>,
        hash: Option<&Bound<'_, PyAny>>,
        salt: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Sessions> {
        arguments::piece_tokens(piece_tokens)?;
        let spec = Fields {
            model,
            dtype,
            block_tokens: piece_tokens,
            weights,
            layout,
            group: None,
            world,
            hash,
            salt,
        };
        let spec = Spec::new(spec.read()?);
        let handle = Arc::clone(depot.handle());
        let opened = handle.depot(py)?.clone();
        let made = wait::call(py, || Store::open(opened, &spec))?;
        Ok(Sessions {
            store: Arc::new(made.map_err(|error| raise(py, error))?),
            handle,
        })
    }

    /// Saves a state. Only rows that are not stored yet are requested and written.
    ///
    /// Args:
    ///     tokens: Token ids of the state, from 0 to 2^32 - 1.
    ///     rows: Called once with the runs of missing tokens, each (first, one past the last).
    ///         Returns memory per run, with the rows of its tokens, or one `Spans`. The memory is
    ///         read until the save returns.
    ///     text: Rendered text of the tokens, for `lookup_text`.
    ///     reason: Cause of the save, one of `kvdepot.sessions.REASONS`.
    ///     context_tokens: Context size of the engine, in tokens.
    ///     objects: Parts that do not grow with the tokens, by name, such as logits or a recurrent
    ///         state: memory of 1 byte to 1 GiB.
    ///     note: Any text.
    ///     created: Time of the save in seconds since 1970. Default: now.
    ///     exact: Request all rows, and keep rows that differ from stored ones in addition to them.
    ///
    /// Returns:
    ///     A dictionary: `id`, `cached_tokens` that were stored already, `cache_write_tokens`, and
    ///     `bytes_written`.
    ///
    /// Raises:
    ///     InputError: An argument, or the memory that `rows` returned, is unsuitable.
    ///     Error: A part was not stored, for example for lack of space. Then there is no session.
    #[pyo3(signature = (
        tokens, rows, *, text = None, reason = "asked", context_tokens = 0, objects = None,
        note = "", created = None, exact = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "one a field of a checkpoint")]
    fn save<'py>(
        &self,
        py: Python<'py>,
        tokens: Tokens,
        rows: Py<PyAny>,
        text: Option<Vec<u8>>,
        reason: &str,
        context_tokens: u32,
        objects: Option<&Bound<'_, PyDict>>,
        note: &str,
        created: Option<u64>,
        exact: bool,
    ) -> PyResult<Bound<'py, PyDict>> {
        let texts = (text, reason, note.to_owned());
        let told = Told::new(py, texts, context_tokens, objects, created)?;
        let raised = Raised::default();
        let saved = self.call(py, |store| {
            let rows = |runs: &[Range<usize>]| rows_of(&rows, runs, told.kept(), &raised);
            store.save(told.checkpoint(&tokens, exact), Box::new(rows))
        });
        told.release(py);
        checkpoint::saved(py, &raised.or(saved)?)
    }

    /// Saves a state whose rows arrive in chunks of any size, for example from a serializer.
    ///
    /// At most two pieces are in memory.
    ///
    /// Args:
    ///     tokens: Token ids of the state, from 0 to 2^32 - 1.
    ///     size: Bytes per token, or a function (first, one past the last) that returns the bytes
    ///         of a run.
    ///     chunks: Called once with the runs of missing tokens. Returns buffers with their rows,
    ///         concatenated and split anywhere.
    ///     text: Rendered text of the tokens, for `lookup_text`.
    ///     reason: Cause of the save, one of `kvdepot.sessions.REASONS`.
    ///     context_tokens: Context size of the engine, in tokens.
    ///     objects: Parts that do not grow with the tokens, by name.
    ///     note: Any text.
    ///     created: Time of the save in seconds since 1970. Default: now.
    ///
    /// Returns:
    ///     A dictionary, as `save`.
    ///
    /// Raises:
    ///     InputError: An argument is unsuitable.
    ///     Error: The chunks have more or fewer bytes than `size`, or a part was not stored. Then
    ///         there is no session.
    #[pyo3(
        signature = (tokens, size, chunks, **told),
        text_signature = "($self, tokens, size, chunks, *, text=None, reason='asked', \
                          context_tokens=0, objects=None, note='', created=None)"
    )]
    fn save_chunks<'py>(
        &self,
        py: Python<'py>,
        tokens: Tokens,
        size: Py<PyAny>,
        chunks: Py<PyAny>,
        told: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let told = Told::named(py, told)?;
        let raised = Raised::default();
        let saved = self.call(py, |store| {
            store.save_serialized(
                told.checkpoint(&tokens, false),
                |run| streams::size_of(&size, run, &raised),
                |runs, sink| streams::write_chunks(&chunks, runs, sink, &raised),
            )
        });
        told.release(py);
        checkpoint::saved(py, &raised.or(saved)?)
    }

    /// Starts a session whose length is unknown.
    ///
    /// Args:
    ///     tokens: Tokens that are known at the beginning. Full pieces of them that are stored
    ///         already become part of the session.
    ///
    /// Returns:
    ///     The stream. End it with `commit`; otherwise its parts are removed.
    ///
    /// Raises:
    ///     Error: The depot cannot be read.
    #[pyo3(signature = (tokens = None))]
    fn stream(&self, py: Python<'_>, tokens: Option<Tokens>) -> PyResult<Stream> {
        let known = tokens.map_or_else(Vec::new, |tokens| tokens.0);
        let stream = self.call(py, |store| store.stream(&known))?;
        Ok(Stream::new(stream, &self.handle))
    }

    /// Removes all pieces and objects that no session names, such as those of killed saves.
    ///
    /// Do not save at the same time: such a save fails if a part of it is removed.
    ///
    /// Returns:
    ///     The number of blocks that were removed.
    ///
    /// Raises:
    ///     Error: A manifest or the depot cannot be read.
    fn sweep(&self, py: Python<'_>) -> PyResult<usize> {
        self.call(py, Store::sweep)
    }

    /// Returns the complete sessions that are a prefix of a prompt.
    ///
    /// Args:
    ///     tokens: Tokens of the prompt.
    ///     most: Most sessions to return.
    ///
    /// Returns:
    ///     Sessions, longest first.
    ///
    /// Raises:
    ///     Error: The depot cannot be read.
    #[pyo3(signature = (tokens, most = 4))]
    fn lookup(&self, py: Python<'_>, tokens: Tokens, most: usize) -> PyResult<Vec<Found>> {
        let found = self.call(py, |store| store.lookup(&tokens, most))?;
        Ok(found.into_iter().map(|found| Found { found }).collect())
    }

    /// Returns the complete sessions whose rendered text is a prefix of a text.
    ///
    /// Args:
    ///     text: Rendered text of the prompt.
    ///     most: Most sessions to return.
    ///
    /// Returns:
    ///     Sessions, longest first. Tokenize only the text after `text_bytes` of the chosen one.
    ///
    /// Raises:
    ///     Error: The depot cannot be read.
    #[pyo3(signature = (text, most = 4))]
    fn lookup_text(&self, py: Python<'_>, text: Vec<u8>, most: usize) -> PyResult<Vec<Found>> {
        let found = self.call(py, |store| store.lookup_text(&text, most))?;
        Ok(found.into_iter().map(|found| Found { found }).collect())
    }

    /// Returns the number of leading tokens whose rows are stored, in pieces of any session.
    ///
    /// Args:
    ///     tokens: Tokens of the prompt.
    ///
    /// Returns:
    ///     A number of tokens at the end of a piece.
    ///
    /// Raises:
    ///     Error: The depot cannot be read.
    fn prefix(&self, py: Python<'_>, tokens: Tokens) -> PyResult<usize> {
        self.call(py, |store| store.prefix(&tokens))
    }

    /// Reads a session into buffers and verifies it.
    ///
    /// A session that is incomplete or corrupt is excluded from later lookups until it is saved
    /// again or `refresh` finds it. Then try the next session that `lookup` returned.
    ///
    /// Args:
    ///     found: A session that `lookup` returned.
    ///     rows: Writable memory per piece, in the order and of the lengths of `found.pieces`; or
    ///         one `Spans`.
    ///     objects: Writable memory per object, in the order and of the lengths of `found.objects`.
    ///
    /// Returns:
    ///     A dictionary: `cached_tokens`, the leading tokens whose rows were read, and `whole`,
    ///     true if all parts were read and verified. `cache_write_tokens` is 0.
    ///
    /// Raises:
    ///     InputError: The buffers do not match the session. No byte was read.
    ///     Error: The depot cannot be read.
    #[pyo3(signature = (found, rows, objects = None))]
    fn restore<'py>(
        &self,
        py: Python<'py>,
        found: &Found,
        rows: &Bound<'_, PyAny>,
        objects: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let rows = buffers::parse(rows, true)?;
        let objects = objects.map(|objects| buffers::parse(objects, true));
        let (mut blocks, mut keeps) = (BlockBuffers::default(), vec![rows.keep]);
        if let Some(objects) = objects.transpose()? {
            blocks = objects.blocks;
            keeps.push(objects.keep);
        }
        keep::sweep(py);
        let restored = self.call(py, |store| store.restore(&found.found, rows.blocks, blocks));
        keeps.iter().for_each(|keep| keep.release(py));
        checkpoint::restored(py, &restored?)
    }

    /// Returns all sessions, newest first.
    ///
    /// Returns:
    ///     A dictionary per session: `id`, `tokens` (a number), `text_bytes`, `bytes` of its parts,
    ///     `created`, `reason`, `note`, and `bad`, true if it was incomplete or corrupt. `hits` and
    ///     `used` are the approximate number of restores and the time of the last one.
    ///
    /// Raises:
    ///     Error: The depot cannot be read.
    fn list<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let (rows, usage) = self.call(py, |store| {
            let rows = store.list();
            let ids: Vec<Id> = rows.iter().map(|row| row.id).collect();
            let usage = store.usage(&ids)?;
            Ok((rows, usage))
        })?;
        let list = list_of(py, rows)?;
        for (said, usage) in list.iter().zip(usage) {
            said.set_item("hits", usage.hits)?;
            said.set_item("used", usage.used)?;
        }
        Ok(list)
    }

    /// Looks for sessions that other processes saved or removed.
    ///
    /// Raises:
    ///     Error: The depot cannot be read.
    fn refresh(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, Store::refresh)
    }

    /// Removes a session, and the parts that no other session names.
    ///
    /// Args:
    ///     session: Session ID, or a unique prefix of it.
    ///
    /// Raises:
    ///     Error: There is no such session, or the depot cannot be read.
    fn remove(&self, py: Python<'_>, session: &str) -> PyResult<()> {
        let id = self.id(py, session)?;
        self.call(py, |store| store.remove(id))
    }

    /// Removes sessions until the rest fits a size, each shared part counted once.
    ///
    /// Sessions that a longer one of the same conversation supersedes are removed first, then those
    /// that save the least compute per byte.
    ///
    /// Args:
    ///     most: Most bytes of all sessions together, or a text such as "64GiB".
    ///     keep: IDs of sessions that stay.
    ///
    /// Returns:
    ///     IDs of the removed sessions, in the order of their removal.
    ///
    /// Raises:
    ///     Error: There is no session in `keep`, or the depot cannot be read.
    #[pyo3(signature = (most, keep = None))]
    fn trim(
        &self,
        py: Python<'_>,
        most: &Bound<'_, PyAny>,
        keep: Option<Vec<String>>,
    ) -> PyResult<Vec<String>> {
        let most = crate::devices::size_of("most", most)?;
        let keep = keep.unwrap_or_default();
        let keep = keep.iter().map(|digits| self.id(py, digits));
        let keep = keep.collect::<PyResult<Vec<Id>>>()?;
        let trimmed = self.call(py, |store| store.trim(most, &keep))?;
        let removed = trimmed.removed.iter();
        Ok(removed.map(ToString::to_string).collect())
    }

    /// Reads a whole session and verifies it.
    ///
    /// Args:
    ///     session: Session ID, or a unique prefix of it.
    ///
    /// Returns:
    ///     A description of each part that is missing or corrupt; empty for a sound session.
    ///
    /// Raises:
    ///     Error: There is no such session, or the depot cannot be read.
    fn verify(&self, py: Python<'_>, session: &str) -> PyResult<Vec<String>> {
        let id = self.id(py, session)?;
        Ok(self.call(py, |store| store.verify(id))?.missing)
    }

    /// Writes a session to one file.
    ///
    /// Args:
    ///     session: Session ID, or a unique prefix of it.
    ///     path: Path of the new file.
    ///     ds4: Write the file of ds4 that was imported, byte for byte.
    ///
    /// Returns:
    ///     Size of the file in bytes.
    ///
    /// Raises:
    ///     Error: There is no such session, a part is missing or corrupt, or the file cannot be
    ///         written.
    #[pyo3(signature = (session, path, *, ds4 = false))]
    fn export(&self, py: Python<'_>, session: &str, path: PathBuf, ds4: bool) -> PyResult<u64> {
        let id = self.id(py, session)?;
        self.call(py, |store| match ds4 {
            true => export_ds4(store, id, &path),
            false => export(store, id, &path),
        })
    }

    /// Saves a session from a file that `export` wrote.
    ///
    /// The file is verified completely before a byte is stored. Files of ds4 have no checksums, so
    /// that only their structure is checked.
    ///
    /// Args:
    ///     path: Path of the file.
    ///     ds4: Read a file of ds4.
    ///
    /// Returns:
    ///     The session ID.
    ///
    /// Raises:
    ///     Error: The file is not sound, is of another model, or a part was not stored.
    #[pyo3(name = "import_file", signature = (path, *, ds4 = false))]
    fn import_file(&self, py: Python<'_>, path: PathBuf, ds4: bool) -> PyResult<String> {
        let imported = self.call(py, |store| match ds4 {
            true => import_ds4(store, &path),
            false => import(store, &path),
        })?;
        Ok(imported.id.to_string())
    }

    /// Returns the rendered text of a session.
    ///
    /// Args:
    ///     session: Session ID, or a unique prefix of it.
    ///
    /// Returns:
    ///     The text; empty if it was not saved.
    ///
    /// Raises:
    ///     Error: There is no such session, or the depot cannot be read.
    fn text<'py>(&self, py: Python<'py>, session: &str) -> PyResult<Bound<'py, PyBytes>> {
        let id = self.id(py, session)?;
        let manifest = self.call(py, |store| store.manifest(id))?;
        Ok(PyBytes::new(py, &manifest.text))
    }
}
