//! Sessions that are files: `kvdepot.sessions.open_files`, `open_file`.

use std::path::PathBuf;
use std::sync::Arc;

use kvdepot_session::file::{
    FileCheckpoint, FileMover, FileOptions, FilesSpec, Member, SessionFile as StoreFile,
    SessionFiles as StoreFiles, SessionWriter,
};
use kvdepot_session::{Error, Reason, Restored};
use kvdepot_store::{BlockBuffers, Buffer, Durability};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyIterator, PyList};

use crate::arguments::{self, Fields};
use crate::checkpoint::{self, REASONS, now, raise};
use crate::devices::size_of;
use crate::keep::{self, Keep};
use crate::keys::Tokens;
use crate::sessions::list_of;
use crate::{buffers, errors, wait};

/// What `durability` may be.
const DURABILITIES: &str = "process or power";

/// Runs a call without the interpreter's lock.
fn call<T: Send>(py: Python<'_>, run: impl FnOnce() -> Result<T, Error> + Send) -> PyResult<T> {
    wait::call(py, run)?.map_err(|error| raise(py, error))
}

fn options(py: Python<'_>, direct: bool, durability: &str) -> PyResult<FileOptions> {
    let mut options = FileOptions::default();
    options.direct = direct;
    options.durability = match durability {
        "process" => Durability::Process,
        "power" => Durability::Power,
        other => return Err(errors::input(py, "durability", other, DURABILITIES)),
    };
    Ok(options)
}

/// A member that is to be saved, and what keeps its memory alive.
enum Value {
    Memory(Vec<Buffer>),
    /// An iterator of bytes.
    Said(Py<PyIterator>),
}

/// A session file that is open (docs/sessions.md, one file per session).
///
/// Opening reads and verifies the description of the session. The data is verified when it is read.
///
/// Args:
///     path: Path of the file.
///     direct: Bypass the page cache if the file system supports it.
#[pyclass(frozen, module = "kvdepot.sessions")]
pub(crate) struct SessionFile {
    file: Arc<StoreFile>,
}

#[pymethods]
impl SessionFile {
    #[new]
    #[pyo3(signature = (path, *, direct = true))]
    fn new(py: Python<'_>, path: PathBuf, direct: bool) -> PyResult<SessionFile> {
        let options = options(py, direct, "process")?;
        let file = call(py, || {
            let mover = FileMover::new(options)?;
            Ok(Arc::new(StoreFile::open(&mover, &path)?))
        })?;
        Ok(SessionFile { file })
    }

    /// The session ID, in hexadecimal digits; the same for every copy of the file.
    #[getter]
    fn id(&self) -> String {
        self.file.id().to_string()
    }

    /// Path of the file.
    #[getter]
    fn path(&self) -> String {
        self.file.path().display().to_string()
    }

    /// The tokens of the session.
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, &self.file.about().tokens)
    }

    /// The rendered text of the tokens; empty if it was not saved.
    #[getter]
    fn text<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.file.about().text)
    }

    /// The model, as given when the session was saved.
    #[getter]
    fn model(&self) -> String {
        self.file.about().space.model.clone()
    }

    /// The note, as given when the session was saved.
    #[getter]
    fn note(&self) -> String {
        self.file.about().note.clone()
    }

    /// Context size of the engine that saved the session, in tokens.
    #[getter]
    fn context_tokens(&self) -> u32 {
        self.file.about().context_tokens
    }

    /// Time of the save, in seconds since 1970.
    #[getter]
    fn created(&self) -> u64 {
        self.file.about().created
    }

    /// The pieces in order, as (first token, one past the last token, bytes).
    ///
    /// Empty if the state is not split by tokens.
    #[getter]
    fn pieces(&self) -> Vec<(usize, usize, u64)> {
        let each = self.file.pieces().into_iter();
        each.map(|(run, bytes)| (run.start, run.end, bytes))
            .collect()
    }

    /// The objects as (name, bytes).
    #[getter]
    fn objects(&self) -> Vec<(String, u64)> {
        self.file.about().objects.clone()
    }

    /// Size of the file in bytes.
    #[getter]
    fn bytes(&self) -> u64 {
        self.file.bytes()
    }

    /// Reads the session into buffers and verifies it.
    ///
    /// Use only the rows of the first `cached_tokens` tokens, and objects only if the result is
    /// `whole`.
    ///
    /// Args:
    ///     rows: Writable memory per piece, in the order and of the lengths of `pieces`; or one
    ///         `Spans`.
    ///     objects: Writable memory per object, in the order and of the lengths of `objects`.
    ///
    /// Returns:
    ///     A dictionary: `cached_tokens`, the leading tokens whose rows were read, and `whole`,
    ///     true if all parts were read and verified. `cache_write_tokens` is 0.
    #[pyo3(signature = (rows = None, objects = None))]
    fn restore<'py>(
        &self,
        py: Python<'py>,
        rows: Option<&Bound<'_, PyAny>>,
        objects: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let file = Arc::clone(&self.file);
        bring_back(py, (rows, objects), |rows, objects| {
            file.restore(rows, objects)
        })
    }

    /// Reads one part in order, for a state that is larger than memory.
    ///
    /// Args:
    ///     member: Number of the part from 0, pieces before objects.
    ///     take: Called with each verified chunk as bytes, at most 4 MiB.
    fn read(&self, py: Python<'_>, member: usize, take: Py<PyAny>) -> PyResult<()> {
        let raised = Mutex::new(None);
        let read = call(py, || {
            self.file.read(member, &mut |some| {
                let given = Python::attach(|py| {
                    let some = PyBytes::new(py, some);
                    take.bind(py).call1((some,)).map(drop)
                });
                given.map_err(|error| stop(&raised, error))
            })
        });
        match raised.lock().take() {
            Some(error) => Err(error),
            None => read,
        }
    }

    /// Reads the whole session and verifies it.
    ///
    /// Returns:
    ///     A description of each part that failed; empty for a sound session.
    fn verify(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        Ok(call(py, || self.file.verify())?.missing)
    }

    /// Copies the session to another file and verifies it. The copy has the same session ID.
    ///
    /// Args:
    ///     path: Path of the new file.
    ///
    /// Returns:
    ///     Size of the copy in bytes.
    fn copy_to(&self, py: Python<'_>, path: PathBuf) -> PyResult<u64> {
        call(py, || self.file.copy_to(&path))
    }
}

/// Keeps what Python has raised; the call ends with it.
fn stop(raised: &Mutex<Option<PyErr>>, error: PyErr) -> Error {
    *raised.lock() = Some(error);
    Error::Input {
        field: "callback".into(),
        value: "an exception".into(),
        allowed: "bytes".into(),
    }
}

fn bring_back<'py>(
    py: Python<'py>,
    (rows, objects): (Option<&Bound<'_, PyAny>>, Option<&Bound<'_, PyAny>>),
    run: impl FnOnce(&BlockBuffers, &BlockBuffers) -> Result<Restored, Error> + Send,
) -> PyResult<Bound<'py, PyDict>> {
    let mut keeps: Vec<Arc<Keep>> = Vec::new();
    let mut read = |given: Option<&Bound<'_, PyAny>>| {
        let Some(given) = given else {
            return Ok(BlockBuffers::default());
        };
        let parsed = buffers::parse(given, true)?;
        keeps.push(parsed.keep);
        Ok::<_, PyErr>(parsed.blocks)
    };
    let (rows, objects) = (read(rows)?, read(objects)?);
    keep::sweep(py);
    let restored = call(py, || run(&rows, &objects));
    drop((rows, objects));
    keeps.iter().for_each(|keep| keep.release(py));
    checkpoint::restored(py, &restored?)
}

/// A directory of session files of one model, which processes may share.
///
/// The directory is created if it is missing. Sessions that differ in any field, from `model` to
/// `salt`, are in the directory and are never found.
///
/// Args:
///     path: Path of the directory.
///     model: Model ID.
///     dtype: Element type of the rows.
///     piece_tokens: Tokens per piece, 1 to 1048576.
///     capacity: Most bytes of all files in the directory together.
///     weights: Fingerprint of the weights.
///     layout: Anything else that a state depends on, such as element types, tokenizer and
///         positions.
///     world: Tensor and pipeline parallel sizes.
///     hash: Hash algorithm of keys.
///     salt: Secret or label that separates tenants.
///     evicts: Delete the least recently used files when `capacity` is reached. With False, a save
///         fails then.
///     direct: Bypass the page cache if the file system supports it.
///     durability: "process", or "power" to sync each file and then the directory before a save
///         ends.
#[pyclass(frozen, module = "kvdepot.sessions")]
pub(crate) struct SessionFiles {
    files: Arc<StoreFiles>,
}

impl SessionFiles {
    fn id(&self, py: Python<'_>, digits: &str) -> PyResult<kvdepot_session::Id> {
        self.files.find(digits).map_err(|error| raise(py, error))
    }
}

fn opened(found: Vec<StoreFile>) -> Vec<SessionFile> {
    let each = found.into_iter().map(Arc::new);
    each.map(|file| SessionFile { file }).collect()
}

/// Adds the members of a save, in their order.
fn put(
    writer: &mut SessionWriter,
    pieces: &BlockBuffers,
    objects: &[(String, Value)],
    raised: &Mutex<Option<PyErr>>,
) -> Result<(), Error> {
    let memory = objects.iter().map(|(name, value)| match value {
        Value::Memory(buffers) => buffers.first().map(|one| (name.clone(), one.clone())),
        Value::Said(_) => None,
    });
    // With its whole length known before a byte moves, where it is.
    if let Some(memory) = memory.collect::<Option<Vec<_>>>() {
        return writer.put_all(pieces, &memory);
    }
    for at in 0..pieces.len() {
        writer.put(Member::Piece, pieces.pieces(at))?;
    }
    for (name, value) in objects {
        let member = Member::Object(name.clone());
        let said = match value {
            Value::Memory(buffers) => {
                writer.put(member, buffers)?;
                continue;
            }
            Value::Said(said) => said,
        };
        writer.begin(member)?;
        loop {
            let next = Python::attach(|py| {
                let next = said.bind(py).clone().next();
                next.map(|item| item?.extract::<Vec<u8>>()).transpose()
            });
            match next {
                Ok(Some(some)) => writer.write(&some)?,
                Ok(None) => break,
                Err(error) => return Err(stop(raised, error)),
            }
        }
        writer.end()?;
    }
    Ok(())
}

#[pymethods]
impl SessionFiles {
    #[new]
    #[pyo3(signature = (
        path, *, model, dtype, piece_tokens, capacity, weights = None, layout = None, world = None,
        hash = None, salt = None, evicts = true, direct = true, durability = "process"
    ))]
    #[expect(clippy::too_many_arguments, reason = "one a field of the namespace")]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        model: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
        piece_tokens: &Bound<'_, PyAny>,
        capacity: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
        layout: Option<&Bound<'_, PyAny>>,
        world: Option<&Bound<'_, PyAny>>,
        hash: Option<&Bound<'_, PyAny>>,
        salt: Option<&Bound<'_, PyAny>>,
        evicts: bool,
        direct: bool,
        durability: &str,
    ) -> PyResult<SessionFiles> {
        arguments::piece_tokens(piece_tokens)?;
        let namespace = Fields {
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
        let spec = FilesSpec {
            namespace: namespace.read()?,
            capacity: size_of("capacity", capacity)?,
            evicts,
            options: options(py, direct, durability)?,
        };
        let files = call(py, || StoreFiles::open(&path, spec))?;
        Ok(SessionFiles {
            files: Arc::new(files),
        })
    }

    /// Saves a state as one file, which replaces a session of the same tokens.
    ///
    /// Args:
    ///     tokens: Token ids of the state, from 0 to 2^32 - 1.
    ///     rows: Memory per run of `piece_tokens` tokens, the last one shorter, or one `Spans`.
    ///         Default: a state that is not split by tokens.
    ///     objects: Parts that do not grow with the tokens, by name: memory, or an iterator of
    ///         bytes of unknown total length.
    ///     text: Rendered text of the tokens, for `lookup_text`.
    ///     reason: Cause of the save, one of `kvdepot.sessions.REASONS`.
    ///     context_tokens: Context size of the engine, in tokens.
    ///     note: Any text.
    ///     created: Time of the save in seconds since 1970. Default: now.
    ///     predicted: Total bytes of rows and objects; the save fails for another total.
    ///
    /// Returns:
    ///     A dictionary: `id`, `cached_tokens` (0), `cache_write_tokens` and `bytes_written`.
    #[pyo3(signature = (
        tokens, rows = None, *, objects = None, text = None, reason = "asked", context_tokens = 0,
        note = "", created = None, predicted = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "one a field of a checkpoint")]
    fn save<'py>(
        &self,
        py: Python<'py>,
        tokens: Tokens,
        rows: Option<&Bound<'_, PyAny>>,
        objects: Option<&Bound<'_, PyDict>>,
        text: Option<Vec<u8>>,
        reason: &str,
        context_tokens: u32,
        note: &str,
        created: Option<u64>,
        predicted: Option<u64>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let Some(reason) = Reason::of_name(reason) else {
            return Err(errors::input(py, "reason", format!("{reason:?}"), REASONS));
        };
        let mut keeps: Vec<Arc<Keep>> = Vec::new();
        let mut pieces = BlockBuffers::default();
        if let Some(rows) = rows {
            let parsed = buffers::parse(rows, false)?;
            (pieces, keeps) = (parsed.blocks, vec![parsed.keep]);
        }
        let mut values = Vec::new();
        for (name, value) in objects.into_iter().flatten() {
            let value = match value.cast::<PyIterator>() {
                Ok(said) => Value::Said(said.clone().unbind()),
                Err(_) => {
                    let one = PyList::new(py, [value])?;
                    let parsed = buffers::parse(&one.into_any(), false)?;
                    keeps.push(parsed.keep);
                    Value::Memory(parsed.blocks.pieces(0).to_vec())
                }
            };
            values.push((name.extract::<String>()?, value));
        }
        let text = text.unwrap_or_default();
        let raised = Mutex::new(None);
        let saved = call(py, || {
            let checkpoint = FileCheckpoint {
                namespace: &self.files.spec().namespace,
                tokens: &tokens,
                text: &text,
                reason,
                context_tokens,
                note,
                created: created.unwrap_or_else(now),
            };
            self.files.write(&checkpoint, predicted, |writer| {
                put(writer, &pieces, &values, &raised)
            })
        });
        drop((pieces, values));
        keeps.iter().for_each(|keep| keep.release(py));
        if let Some(error) = raised.lock().take() {
            return Err(error);
        }
        let saved = saved?;
        let tokens = (saved.cached_tokens, saved.cache_write_tokens);
        checkpoint::said(py, saved.id, tokens, saved.bytes_written)
    }

    /// Returns the sessions that are a prefix of a prompt.
    ///
    /// Args:
    ///     tokens: Tokens of the prompt.
    ///     most: Most sessions to return.
    ///
    /// Returns:
    ///     Open session files, longest first.
    #[pyo3(signature = (tokens, most = 4))]
    fn lookup(&self, py: Python<'_>, tokens: Tokens, most: usize) -> PyResult<Vec<SessionFile>> {
        Ok(opened(call(py, || self.files.lookup(&tokens, most))?))
    }

    /// Returns the sessions whose rendered text is a prefix of a text.
    ///
    /// Args:
    ///     text: Rendered text of the prompt.
    ///     most: Most sessions to return.
    ///
    /// Returns:
    ///     Open session files, longest first.
    #[pyo3(signature = (text, most = 4))]
    fn lookup_text(
        &self,
        py: Python<'_>,
        text: Vec<u8>,
        most: usize,
    ) -> PyResult<Vec<SessionFile>> {
        Ok(opened(call(py, || self.files.lookup_text(&text, most))?))
    }

    /// Reads a session into buffers, as `SessionFile.restore`.
    ///
    /// A session that fails verification is excluded from later lookups. Otherwise it counts as
    /// used now.
    ///
    /// Args:
    ///     file: A session file that a lookup returned.
    ///     rows: Writable memory per piece, or one `Spans`.
    ///     objects: Writable memory per object.
    ///
    /// Returns:
    ///     A dictionary, as `SessionFile.restore`.
    #[pyo3(signature = (file, rows = None, objects = None))]
    fn restore<'py>(
        &self,
        py: Python<'py>,
        file: &SessionFile,
        rows: Option<&Bound<'_, PyAny>>,
        objects: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let file = Arc::clone(&file.file);
        bring_back(py, (rows, objects), |rows, objects| {
            self.files.restore(&file, rows, objects)
        })
    }

    /// Returns all sessions, newest first.
    ///
    /// Returns:
    ///     A dictionary per session: `id`, `tokens` (a number), `text_bytes`, `bytes` of rows and
    ///     objects, `created`, `reason`, `note`, and `bad`, true if it failed verification.
    fn list<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        list_of(py, self.files.list())
    }

    /// Looks for sessions that other processes saved or removed.
    fn refresh(&self, py: Python<'_>) -> PyResult<()> {
        call(py, || self.files.refresh())
    }

    /// Removes a session. A process that has its file open can still read it.
    ///
    /// Args:
    ///     session: Session ID, or a unique prefix of it.
    fn remove(&self, py: Python<'_>, session: &str) -> PyResult<()> {
        let id = self.id(py, session)?;
        call(py, || self.files.remove(id))
    }

    /// Reads a whole session and verifies it.
    ///
    /// Args:
    ///     session: Session ID, or a unique prefix of it.
    ///
    /// Returns:
    ///     A description of each part that failed; empty for a sound session.
    fn verify(&self, py: Python<'_>, session: &str) -> PyResult<Vec<String>> {
        let id = self.id(py, session)?;
        Ok(call(py, || self.files.verify(id))?.missing)
    }

    /// Copies a session to a file and verifies it.
    ///
    /// Args:
    ///     session: Session ID, or a unique prefix of it.
    ///     path: Path of the new file.
    ///
    /// Returns:
    ///     Size of the copy in bytes.
    fn export(&self, py: Python<'_>, session: &str, path: PathBuf) -> PyResult<u64> {
        let id = self.id(py, session)?;
        call(py, || self.files.export(id, &path))
    }

    /// Copies a session file into the directory and verifies it.
    ///
    /// Args:
    ///     path: Path of the session file.
    ///
    /// Returns:
    ///     The session ID.
    #[pyo3(name = "import_file")]
    fn import_file(&self, py: Python<'_>, path: PathBuf) -> PyResult<String> {
        Ok(call(py, || self.files.import(&path))?.to_string())
    }
}
