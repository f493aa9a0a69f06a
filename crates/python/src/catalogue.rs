//! What is on disk, and what goes: `kvdepot.sessions.Catalogue`.

use kvdepot_session::policy::{Catalogue as Store, Entry, Reason};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::devices::size_of;
use crate::errors;
use crate::policy::now;

/// The checkpoints on disk, by numbers of the caller's, and which of them go where it is short:
/// what saves the least compute a byte, with decay; superseded continued ones first, pinned ones
/// never. It removes nothing by itself.
#[pyclass(frozen, module = "kvdepot.sessions")]
pub(crate) struct Catalogue(Mutex<Store>);

#[pymethods]
impl Catalogue {
    #[new]
    fn new() -> Catalogue {
        Catalogue(Mutex::new(Store::new()))
    }

    /// A checkpoint is on disk; one of the same number is replaced. `parent` is the longest one
    /// there whose tokens this one begins with, `bytes` are those that its removal gives back, and
    /// `used` is when it was last saved or restored, in seconds since 1970.
    #[pyo3(signature = (
        id, *, tokens, bytes, reason = "continued", parent = None, hits = 0, used = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "one a field of an entry")]
    fn insert(
        &self,
        py: Python<'_>,
        id: u64,
        tokens: u64,
        bytes: u64,
        reason: &str,
        parent: Option<u64>,
        hits: u64,
        used: Option<f64>,
    ) -> PyResult<()> {
        let known = Reason::ALL.into_iter().find(|one| one.name() == reason);
        let Some(reason) = known else {
            let value = format!("{reason:?}");
            let allowed = "cold, continued, evict or shutdown";
            return Err(errors::input(py, "reason", value, allowed));
        };
        self.0.lock().insert(Entry {
            id,
            parent,
            reason,
            tokens,
            bytes,
            hits,
            used: now(used),
            pins: 0,
        });
        Ok(())
    }

    /// A checkpoint was removed from disk: whether it was there.
    fn remove(&self, id: u64) -> bool {
        self.0.lock().remove(id).is_some()
    }

    /// A conversation was restored from it, and it stays: whether it is there.
    #[pyo3(signature = (id, *, at = None))]
    fn hit(&self, id: u64, at: Option<f64>) -> bool {
        self.0.lock().hit(id, now(at))
    }

    /// It stays until it is unpinned as often: whether it is there.
    fn pin(&self, id: u64) -> bool {
        self.0.lock().pin(id)
    }

    /// Takes one pin back: whether there was one.
    fn unpin(&self, id: u64) -> bool {
        self.0.lock().unpin(id)
    }

    /// Something else takes so many bytes on disk, by a number of the caller's: a save under way,
    /// an orphan. With 0 bytes it is gone.
    fn set_other(&self, id: u64, bytes: u64) {
        self.0.lock().set_other(id, bytes);
    }

    /// Bytes of everything on disk.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.lock().bytes()
    }

    /// All checkpoints, by their numbers, as dictionaries.
    fn entries<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let entries: Vec<Entry> = self.0.lock().entries().copied().collect();
        let list = PyList::empty(py);
        for entry in entries {
            let said = PyDict::new(py);
            said.set_item("id", entry.id)?;
            said.set_item("parent", entry.parent)?;
            said.set_item("reason", entry.reason.name())?;
            said.set_item("tokens", entry.tokens)?;
            said.set_item("bytes", entry.bytes)?;
            said.set_item("hits", entry.hits)?;
            said.set_item("used", entry.used.as_secs_f64())?;
            said.set_item("pins", entry.pins)?;
            list.append(said)?;
        }
        Ok(list)
    }

    /// What to remove so that everything on disk and `incoming` bytes fit into `disk_space`, the
    /// first to go first; None where that cannot be: then nothing should go, nor come.
    #[pyo3(signature = (incoming, disk_space, *, at = None))]
    fn make_room(
        &self,
        incoming: u64,
        disk_space: &Bound<'_, PyAny>,
        at: Option<f64>,
    ) -> PyResult<Option<Vec<u64>>> {
        let space = size_of("disk_space", disk_space)?;
        Ok(self.0.lock().make_room(incoming, space, now(at)))
    }
}
