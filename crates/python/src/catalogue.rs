//! What is on disk, and what goes: `kvdepot.sessions.Catalogue`.

use kvdepot_session::policy::{Catalogue as Store, Entry, Reason};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::devices::size_of;
use crate::errors;
use crate::policy::now;

/// Checkpoints on disk, in the order in which they should be deleted when space is short.
///
/// The order is the least compute saved per byte first, with a half-life of six hours for hits.
/// Superseded continued checkpoints come before the others, and pinned ones are never selected. The
/// catalogue deletes nothing itself. In `kvdepot.sessions` its name is `Catalogue`.
#[pyclass(frozen, module = "kvdepot.sessions")]
pub(crate) struct Catalogue(Mutex<Store>);

#[pymethods]
impl Catalogue {
    #[new]
    fn new() -> Catalogue {
        Catalogue(Mutex::new(Store::new()))
    }

    /// Adds a checkpoint, or replaces the one with the same ID.
    ///
    /// Args:
    ///     id: Number of the checkpoint, chosen by the caller.
    ///     tokens: Number of tokens.
    ///     bytes: Bytes that its deletion frees, without parts that other checkpoints share.
    ///     reason: "cold", "continued", "evict" or "shutdown".
    ///     parent: ID of the longest checkpoint in the catalogue that is a prefix of this one.
    ///     hits: Number of restores.
    ///     used: Time of the last save or restore, in seconds since 1970. Default: now.
    ///
    /// Raises:
    ///     InputError: `reason` is unknown.
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

    /// Removes a checkpoint that was deleted from disk.
    ///
    /// Args:
    ///     id: Number of the checkpoint.
    ///
    /// Returns:
    ///     True if the catalogue had it.
    fn remove(&self, id: u64) -> bool {
        self.0.lock().remove(id).is_some()
    }

    /// Records that a conversation was restored from a checkpoint, which stays on disk.
    ///
    /// Args:
    ///     id: Number of the checkpoint.
    ///     at: Time in seconds since 1970. Default: now.
    ///
    /// Returns:
    ///     True if the catalogue has it.
    #[pyo3(signature = (id, *, at = None))]
    fn hit(&self, id: u64, at: Option<f64>) -> bool {
        self.0.lock().hit(id, now(at))
    }

    /// Protects a checkpoint until `unpin` was called the same number of times.
    ///
    /// Args:
    ///     id: Number of the checkpoint.
    ///
    /// Returns:
    ///     True if the catalogue has it.
    fn pin(&self, id: u64) -> bool {
        self.0.lock().pin(id)
    }

    /// Ends one pin of a checkpoint.
    ///
    /// Args:
    ///     id: Number of the checkpoint.
    ///
    /// Returns:
    ///     True if it had a pin.
    fn unpin(&self, id: u64) -> bool {
        self.0.lock().unpin(id)
    }

    /// Records other bytes on disk, such as those of a save in progress or an orphaned file.
    ///
    /// Args:
    ///     id: Number of the entry, chosen by the caller.
    ///     bytes: Bytes on disk; 0 removes the entry.
    fn set_other(&self, id: u64, bytes: u64) {
        self.0.lock().set_other(id, bytes);
    }

    /// Bytes of all checkpoints and of all other entries.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.lock().bytes()
    }

    /// Returns all checkpoints, sorted by ID.
    ///
    /// Returns:
    ///     A dictionary per checkpoint: the arguments of `insert`, and `pins`.
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

    /// Selects checkpoints to delete so that new data fits on the disk.
    ///
    /// Args:
    ///     incoming: Bytes of the new data.
    ///     disk_space: Most bytes on disk, or a text such as "64GiB".
    ///     at: Time in seconds since 1970. Default: now.
    ///
    /// Returns:
    ///     IDs in the order of deletion. None if the data cannot fit: then delete nothing, and do
    ///     not save.
    ///
    /// Raises:
    ///     InputError: `disk_space` is not a size.
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
