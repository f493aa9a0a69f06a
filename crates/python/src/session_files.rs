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

/// A session's file that is open.
#[pyclass(frozen, module = "kvdepot.sessions")]
pub(crate) struct SessionFile {
    file: Arc<StoreFile>,
}

#[pymethods]
impl SessionFile {
    /// Opens one: what it says of itself is read, and verified. Its bytes are when they come back.
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

    /// Its name: the same of every copy.
    #[getter]
    fn id(&self) -> String {
        self.file.id().to_string()
    }

    /// Its path.
    #[getter]
    fn path(&self) -> String {
        self.file.path().display().to_string()
    }

    /// Its tokens.
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, &self.file.about().tokens)
    }

    /// The rendered text that the tokens stand for; empty where that is not known.
    #[getter]
    fn text<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.file.about().text)
    }

    /// The model whose state it is.
    #[getter]
    fn model(&self) -> String {
        self.file.about().space.model.clone()
    }

    /// What was noted.
    #[getter]
    fn note(&self) -> String {
        self.file.about().note.clone()
    }

    /// Tokens that its engine had room for.
    #[getter]
    fn context_tokens(&self) -> u32 {
        self.file.about().context_tokens
    }

    /// When it was saved, in Unix seconds.
    #[getter]
    fn created(&self) -> u64 {
        self.file.about().created
    }

    /// Its pieces: first token, the one behind the last, bytes. None of a state that is not cut.
    #[getter]
    fn pieces(&self) -> Vec<(usize, usize, u64)> {
        let each = self.file.pieces().into_iter();
        each.map(|(run, bytes)| (run.start, run.end, bytes))
            .collect()
    }

    /// Its objects: name and bytes.
    #[getter]
    fn objects(&self) -> Vec<(String, u64)> {
        self.file.about().objects.clone()
    }

    /// Bytes of the file.
    #[getter]
    fn bytes(&self) -> u64 {
        self.file.bytes()
    }

    /// Brings it back into a buffer for each piece, or one Spans, and one for each object, in their
    /// order. Only rows of `cached_tokens` tokens have come, and objects only if all is `whole`.
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

    /// Hands a member (its number: pieces before objects) to `take`, bytes by bytes, each verified
    /// before: a state that is longer than memory comes back so.
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

    /// Reads all of it; what does not verify.
    fn verify(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        Ok(call(py, || self.file.verify())?.missing)
    }

    /// Copies it, verified on the way; bytes of the copy, which is the same session.
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

/// A directory of sessions of one model, each a file of its own, that processes share.
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
    /// A directory, which is made where there is none; what differs in a field is in it, and never
    /// found. `capacity` is what all its files have together, at most: with `evicts` those that
    /// were not used for the longest time go for new ones. Files are written past the page cache
    /// where `direct` and the file system say so; `durability` is "process" or "power".
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

    /// Saves a state as one file, in place of those of the same tokens. `rows` are a buffer for
    /// each run of `piece_tokens` tokens, or one Spans; none for a state that is not cut. `objects`
    /// are by name a buffer, or an iterator of bytes whose length nobody knows. With `predicted`
    /// there are that many bytes of rows and objects, or the save fails. Raises Error where
    /// something goes wrong: then nothing is left of it.
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

    /// Sessions whose tokens these begin with, the longest first, open; `most` of them.
    #[pyo3(signature = (tokens, most = 4))]
    fn lookup(&self, py: Python<'_>, tokens: Tokens, most: usize) -> PyResult<Vec<SessionFile>> {
        Ok(opened(call(py, || self.files.lookup(&tokens, most))?))
    }

    /// The same by rendered text.
    #[pyo3(signature = (text, most = 4))]
    fn lookup_text(
        &self,
        py: Python<'_>,
        text: Vec<u8>,
        most: usize,
    ) -> PyResult<Vec<SessionFile>> {
        Ok(opened(call(py, || self.files.lookup_text(&text, most))?))
    }

    /// As SessionFile.restore. A session that does not verify is not found any more, and one that
    /// does was used now.
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

    /// All sessions, the newest first, as dictionaries.
    fn list<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        list_of(py, self.files.list())
    }

    /// Looks which sessions there are: others may have saved or removed some.
    fn refresh(&self, py: Python<'_>) -> PyResult<()> {
        call(py, || self.files.refresh())
    }

    /// Removes a session; whoever has it open reads it still.
    fn remove(&self, py: Python<'_>, session: &str) -> PyResult<()> {
        let id = self.id(py, session)?;
        call(py, || self.files.remove(id))
    }

    /// Reads all of a session; what does not verify.
    fn verify(&self, py: Python<'_>, session: &str) -> PyResult<Vec<String>> {
        let id = self.id(py, session)?;
        Ok(call(py, || self.files.verify(id))?.missing)
    }

    /// Copies a session to a file, verified on the way; its bytes.
    fn export(&self, py: Python<'_>, session: &str, path: PathBuf) -> PyResult<u64> {
        let id = self.id(py, session)?;
        call(py, || self.files.export(id, &path))
    }

    /// Copies a session's file here, verified on the way; the session's name.
    #[pyo3(name = "import_file")]
    fn import_file(&self, py: Python<'_>, path: PathBuf) -> PyResult<String> {
        Ok(call(py, || self.files.import(&path))?.to_string())
    }
}
