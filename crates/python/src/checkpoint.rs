//! What every way to save is told of a checkpoint, and answers.

use std::ops::Range;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use kvdepot_session::{Checkpoint, Ending, Error, Id, Reason, Restored, Saved};
use kvdepot_store::{BlockBuffers, Buffer};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::keep::Keep;
use crate::{buffers, errors};

/// What `reason` may be.
pub(crate) const REASONS: &str = "cold, continued, evict, shutdown or asked";

/// Memory that is asked for in the middle of a save, and what keeps it alive until that has ended.
pub(crate) type Kept = Mutex<Vec<Arc<Keep>>>;

/// A checkpoint, beside its tokens and rows.
pub(crate) struct Told {
    text: Vec<u8>,
    reason: Reason,
    context_tokens: u32,
    objects: Vec<(String, Buffer)>,
    note: String,
    created: u64,
    kept: Kept,
}

impl Told {
    pub(crate) fn new(
        py: Python<'_>,
        (text, reason, note): (Option<Vec<u8>>, &str, String),
        context_tokens: u32,
        objects: Option<&Bound<'_, PyDict>>,
        created: Option<u64>,
    ) -> PyResult<Told> {
        let Some(reason) = Reason::of_name(reason) else {
            return Err(errors::input(py, "reason", format!("{reason:?}"), REASONS));
        };
        let kept = Kept::default();
        let objects = match objects {
            None => Vec::new(),
            Some(objects) => {
                let parsed = buffers::parse(&objects.values().into_any(), false)?;
                kept.lock().push(parsed.keep);
                let names = objects.keys().extract::<Vec<String>>()?;
                let one = |at: usize| -> Vec<Buffer> { parsed.blocks.pieces(at).to_vec() };
                let buffers = (0..names.len()).flat_map(one);
                names.into_iter().zip(buffers).collect()
            }
        };
        Ok(Told {
            text: text.unwrap_or_default(),
            reason,
            context_tokens,
            objects,
            note,
            created: created.unwrap_or_else(now),
            kept,
        })
    }

    /// From arguments by their names: those of `save`, but for `exact`.
    pub(crate) fn named(py: Python<'_>, given: Option<&Bound<'_, PyDict>>) -> PyResult<Told> {
        let empty = PyDict::new(py);
        let given = given.unwrap_or(&empty);
        let known = [
            "text",
            "reason",
            "context_tokens",
            "objects",
            "note",
            "created",
        ];
        for name in given.keys() {
            let name = name.extract::<String>()?;
            if !known.contains(&&*name) {
                return Err(errors::input(
                    py,
                    name,
                    "an unknown argument",
                    known.join(", "),
                ));
            }
        }
        let one = |name: &str| -> PyResult<Option<Bound<'_, PyAny>>> {
            Ok(given.get_item(name)?.filter(|value| !value.is_none()))
        };
        let objects = match one("objects")? {
            Some(objects) => Some(objects.cast_into::<PyDict>()?),
            None => None,
        };
        let text = |name| {
            one(name)?
                .map(|value| value.extract::<String>())
                .transpose()
        };
        let count = |name| one(name)?.map(|value| value.extract::<u64>()).transpose();
        let context = count("context_tokens")?.unwrap_or(0);
        let Ok(context_tokens) = u32::try_from(context) else {
            return Err(errors::input(
                py,
                "context_tokens",
                context,
                "at most 4294967295",
            ));
        };
        let said = one("text")?
            .map(|value| value.extract::<Vec<u8>>())
            .transpose()?;
        let reason = text("reason")?.unwrap_or_else(|| "asked".to_owned());
        let note = text("note")?.unwrap_or_default();
        let texts = (said, &*reason, note);
        Told::new(
            py,
            texts,
            context_tokens,
            objects.as_ref(),
            count("created")?,
        )
    }

    pub(crate) fn checkpoint<'a>(&'a self, tokens: &'a [u32], exact: bool) -> Checkpoint<'a> {
        Checkpoint {
            tokens,
            text: &self.text,
            reason: self.reason,
            context_tokens: self.context_tokens,
            objects: self.objects.clone(),
            note: self.note.clone(),
            created: self.created,
            exact,
        }
    }

    pub(crate) fn ending(&self) -> Ending<'_> {
        Ending {
            text: &self.text,
            reason: self.reason,
            context_tokens: self.context_tokens,
            objects: self.objects.clone(),
            note: self.note.clone(),
            created: self.created,
        }
    }

    /// Memory that something else keeps.
    pub(crate) fn kept(&self) -> &Kept {
        &self.kept
    }

    /// Lets all memory go, once nobody reads it.
    pub(crate) fn release(&self, py: Python<'_>) {
        for keep in self.kept.lock().drain(..) {
            keep.release(py);
        }
    }
}

/// What Python raises in the middle of a save.
#[derive(Default)]
pub(crate) struct Raised(Mutex<Option<PyErr>>);

impl Raised {
    /// Ends the save with it.
    pub(crate) fn set(&self, error: PyErr) -> Error {
        *self.0.lock() = Some(error);
        Error::Input {
            field: "rows".into(),
            value: "an exception".into(),
            allowed: "buffers".into(),
        }
    }

    /// What was raised, or else the outcome.
    pub(crate) fn or<T>(&self, outcome: PyResult<T>) -> PyResult<T> {
        match self.0.lock().take() {
            Some(error) => Err(error),
            None => outcome,
        }
    }
}

/// Runs of tokens as Python has them: the first, and the one behind the last.
pub(crate) fn runs_of<'py>(py: Python<'py>, runs: &[Range<usize>]) -> PyResult<Bound<'py, PyList>> {
    PyList::new(py, runs.iter().map(|run| (run.start, run.end)))
}

/// Asks Python for the rows of runs of tokens.
pub(crate) fn rows_of(
    rows: &Py<PyAny>,
    runs: &[Range<usize>],
    kept: &Kept,
    raised: &Raised,
) -> Result<BlockBuffers, Error> {
    Python::attach(|py| {
        let given = runs_of(py, runs).and_then(|asked| rows.bind(py).call1((asked,)));
        match given.and_then(|given| buffers::parse(&given, false)) {
            Ok(parsed) => {
                kept.lock().push(parsed.keep);
                Ok(parsed.blocks)
            }
            Err(error) => Err(raised.set(error)),
        }
    })
}

/// What was saved, as Python sees it.
pub(crate) fn saved<'py>(py: Python<'py>, saved: &Saved) -> PyResult<Bound<'py, PyDict>> {
    let tokens = (saved.cached_tokens, saved.cache_write_tokens);
    said(py, saved.id, tokens, saved.bytes_written)
}

/// The same of a session's name, tokens that were there and that were written, and bytes.
pub(crate) fn said(
    py: Python<'_>,
    id: Id,
    (cached_tokens, cache_write_tokens): (usize, usize),
    bytes_written: u64,
) -> PyResult<Bound<'_, PyDict>> {
    let said = PyDict::new(py);
    said.set_item("id", id.to_string())?;
    said.set_item("cached_tokens", cached_tokens)?;
    said.set_item("cache_write_tokens", cache_write_tokens)?;
    said.set_item("bytes_written", bytes_written)?;
    Ok(said)
}

/// What has come back, as Python sees it.
pub(crate) fn restored<'py>(py: Python<'py>, come: &Restored) -> PyResult<Bound<'py, PyDict>> {
    let said = PyDict::new(py);
    said.set_item("cached_tokens", come.cached_tokens)?;
    said.set_item("cache_write_tokens", 0)?;
    said.set_item("whole", come.whole)?;
    Ok(said)
}

/// Unix seconds.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

pub(crate) fn raise(py: Python<'_>, error: Error) -> PyErr {
    match error {
        Error::Depot(error) => errors::raise(py, error),
        Error::Input {
            field,
            value,
            allowed,
        } => errors::input(py, field, value, allowed),
        other => errors::other(py, other.to_string()),
    }
}
