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

/// The sessions of a depot under one model, weights and layout.
#[pyclass(frozen, module = "kvdepot.sessions")]
pub(crate) struct Sessions {
    pub(crate) store: Arc<Store>,
    pub(crate) handle: Arc<Handle>,
}

/// A session that a prompt begins with.
#[pyclass(frozen, module = "kvdepot.sessions")]
pub(crate) struct Found {
    found: StoreFound,
}

#[pymethods]
impl Found {
    /// Its name.
    #[getter]
    fn id(&self) -> String {
        self.found.id.to_string()
    }

    /// Its tokens: what is rendered behind them is to be tokenized alone.
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, &self.found.tokens)
    }

    /// Bytes of the rendered text that the tokens stand for; 0 where that is not known.
    #[getter]
    fn text_bytes(&self) -> usize {
        self.found.text_bytes
    }

    /// Tokens that its engine had room for.
    #[getter]
    fn context_tokens(&self) -> u32 {
        self.found.context_tokens
    }

    /// Its pieces: first token, the one behind the last, bytes.
    #[getter]
    fn pieces(&self) -> Vec<(usize, usize, u64)> {
        let each = self.found.pieces.iter();
        each.map(|(run, bytes)| (run.start, run.end, *bytes))
            .collect()
    }

    /// Its objects: name and bytes.
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
    /// The sessions of a depot for one model: what differs in a field is never found.
    /// `piece_tokens` tokens' rows are one piece; `layout` names whatever else a state depends on,
    /// such as element types, tokenizer and positions.
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

    /// Saves a state. `rows` is called once, with the runs of tokens whose rows are not there yet
    /// as (first, behind the last), and answers with a buffer for each, or one Spans; they are read
    /// until this returns. `objects` are parts that do not grow with the tokens, by name. With
    /// `exact` all rows are asked for, and those that differ from what is there are kept beside it.
    ///
    /// Raises Error where something found no room: then there is no such session.
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

    /// Saves a state whose rows are written chunk by chunk: `chunks` is called once, with the runs
    /// of tokens whose rows are not there yet, and answers with buffers, one after another, which
    /// may be cut anywhere. `size` is the bytes of each token, or tells those of a run (first,
    /// behind the last). Two pieces are kept in memory at most. The other arguments are `save`'s.
    ///
    /// Raises Error where the chunks have more bytes than that, or fewer: then nothing was saved.
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

    /// Begins a session whose length nobody knows yet, of which these tokens are known.
    #[pyo3(signature = (tokens = None))]
    fn stream(&self, py: Python<'_>, tokens: Option<Tokens>) -> PyResult<Stream> {
        let known = tokens.map_or_else(Vec::new, |tokens| tokens.0);
        let stream = self.call(py, |store| store.stream(&known))?;
        Ok(Stream::new(stream, &self.handle))
    }

    /// Removes all pieces and objects that no session names: what saves have left that were killed
    /// or have failed. Nobody may save meanwhile. How many have gone.
    fn sweep(&self, py: Python<'_>) -> PyResult<usize> {
        self.call(py, Store::sweep)
    }

    /// Sessions whose tokens these begin with, the longest first, of which all is there; `most` of
    /// them.
    #[pyo3(signature = (tokens, most = 4))]
    fn lookup(&self, py: Python<'_>, tokens: Tokens, most: usize) -> PyResult<Vec<Found>> {
        let found = self.call(py, |store| store.lookup(&tokens, most))?;
        Ok(found.into_iter().map(|found| Found { found }).collect())
    }

    /// The same by rendered text.
    #[pyo3(signature = (text, most = 4))]
    fn lookup_text(&self, py: Python<'_>, text: Vec<u8>, most: usize) -> PyResult<Vec<Found>> {
        let found = self.call(py, |store| store.lookup_text(&text, most))?;
        Ok(found.into_iter().map(|found| Found { found }).collect())
    }

    /// How many of these tokens have their rows here, from the first on, whatever session they are
    /// of.
    fn prefix(&self, py: Python<'_>, tokens: Tokens) -> PyResult<usize> {
        self.call(py, |store| store.prefix(&tokens))
    }

    /// Brings a session back into a buffer for each of its pieces, or one Spans, and one for each
    /// of its objects, in their order. A session of which not all has come is not found any more;
    /// the next that `lookup` has found may be.
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

    /// All sessions, the newest first, as dictionaries.
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

    /// Looks which sessions there are: others may have saved or removed some.
    fn refresh(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, Store::refresh)
    }

    /// Removes a session, and what no other one here is made of.
    fn remove(&self, py: Python<'_>, session: &str) -> PyResult<()> {
        let id = self.id(py, session)?;
        self.call(py, |store| store.remove(id))
    }

    /// Removes sessions until all have `most` bytes, each block counted once: those first that save
    /// the least compute a byte. Those of `keep` stay. The names of those that went.
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

    /// Reads all of a session; what is not there or does not verify.
    fn verify(&self, py: Python<'_>, session: &str) -> PyResult<Vec<String>> {
        let id = self.id(py, session)?;
        Ok(self.call(py, |store| store.verify(id))?.missing)
    }

    /// Writes a session to one file, or with `ds4` as the file of ds4 that it was; its bytes.
    #[pyo3(signature = (session, path, *, ds4 = false))]
    fn export(&self, py: Python<'_>, session: &str, path: PathBuf, ds4: bool) -> PyResult<u64> {
        let id = self.id(py, session)?;
        self.call(py, |store| match ds4 {
            true => export_ds4(store, id, &path),
            false => export(store, id, &path),
        })
    }

    /// Saves what `export` has written, or with `ds4` a file of ds4's; the session's name.
    #[pyo3(name = "import_file", signature = (path, *, ds4 = false))]
    fn import_file(&self, py: Python<'_>, path: PathBuf, ds4: bool) -> PyResult<String> {
        let imported = self.call(py, |store| match ds4 {
            true => import_ds4(store, &path),
            false => import(store, &path),
        })?;
        Ok(imported.id.to_string())
    }

    /// Bytes of a session's rendered text.
    fn text<'py>(&self, py: Python<'py>, session: &str) -> PyResult<Bound<'py, PyBytes>> {
        let id = self.id(py, session)?;
        let manifest = self.call(py, |store| store.manifest(id))?;
        Ok(PyBytes::new(py, &manifest.text))
    }
}
