//! Namespaces: the verbs on blocks.

use std::sync::Arc;

use kvdepot_store::{
    Cursor, GetOptions, Key, Namespace as StoreNamespace, NoRoom, PAGE_MAX, Pin as StorePin,
    Reservation as StoreReservation,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString};

use crate::handle::Handle;
use crate::keep::{self, Keep};
use crate::task::Task;
use crate::two_phase::{Pin, Reservation};
use crate::{arguments, buffers, errors, keys, wait};

/// Keys that are looked up without giving the interpreter's lock away: that takes some
/// microseconds, and getting the lock back from a busy thread takes milliseconds.
const AT_ONCE_MAX: usize = 4096;

/// Blocks that share model, data type, layout and the other fields of `Depot.namespace`.
///
/// Methods take the keys of a prompt in prompt order, first block first: a sequence of 32-byte
/// values, or one contiguous buffer of them, such as an array of shape (n, 32). One buffer is
/// faster. A block that is not stored is an outcome of its key rather than an error.
#[pyclass(frozen, module = "kvdepot")]
pub(crate) struct Namespace {
    namespace: StoreNamespace,
    handle: Arc<Handle>,
    /// Whether another process answers, which may take its time.
    served: bool,
}

impl Namespace {
    pub(crate) fn new(namespace: StoreNamespace, handle: Arc<Handle>) -> Namespace {
        let served = namespace.is_served();
        Namespace {
            namespace,
            handle,
            served,
        }
    }

    /// Asks the index something that takes microseconds for few keys: at once, or where somebody
    /// is at work there, without the interpreter's lock. `undo` gives back what was found until
    /// then.
    fn ask<T: Send>(
        &self,
        py: Python<'_>,
        keys: &[Key],
        ask: impl Fn(&[Key]) -> Result<T, kvdepot_store::Error> + Send + Sync,
        undo: impl FnOnce(T) + Send,
    ) -> PyResult<T> {
        self.handle.depot(py)?;
        let now = keys.len() <= AT_ONCE_MAX && !self.served;
        let answer = match now.then(|| kvdepot_store::at_once(|| ask(keys))) {
            Some(Ok(answer)) => answer,
            Some(Err(partly)) => wait::call(py, || {
                if let Ok(found) = partly {
                    undo(found);
                }
                ask(keys)
            })?,
            None => wait::call(py, || ask(keys))?,
        };
        answer.map_err(|error| errors::raise(py, error))
    }

    /// Does something that may touch a medium.
    fn change<T: Send>(
        &self,
        py: Python<'_>,
        change: impl FnOnce(&StoreNamespace) -> Result<T, kvdepot_store::Error> + Send,
    ) -> PyResult<T> {
        self.handle.depot(py)?;
        wait::call(py, || change(&self.namespace))?.map_err(|error| errors::raise(py, error))
    }

    fn own(&self, py: Python<'_>, field: &str, index: usize, other: &Arc<Handle>) -> PyResult<()> {
        if Arc::ptr_eq(&self.handle, other) {
            return Ok(());
        }
        Err(errors::input(
            py,
            format!("{field}[{index}]"),
            "an object of another depot",
            "objects of this depot",
        ))
    }

    /// Pins in a list in which None stands for misses.
    fn pins(
        &self,
        pins: &Bound<'_, PyAny>,
        pick: impl Fn(&Pin) -> Option<StorePin>,
    ) -> PyResult<Vec<StorePin>> {
        let py = pins.py();
        let mut checked = Vec::new();
        for (index, item) in pins.try_iter()?.enumerate() {
            let item = item?;
            if item.is_none() {
                continue;
            }
            let Ok(pin) = item.cast_into::<Pin>() else {
                return Err(errors::input(
                    py,
                    format!("pins[{index}]"),
                    "another object",
                    "Pin objects, as pin() returns them",
                ));
            };
            self.own(py, "pins", index, &pin.get().handle)?;
            checked.push(pin);
        }
        Ok(checked.iter().filter_map(|pin| pick(pin.get())).collect())
    }

    fn reservations<'py>(
        &self,
        reservations: &Bound<'py, PyAny>,
    ) -> PyResult<Vec<Bound<'py, Reservation>>> {
        let py = reservations.py();
        let mut checked = Vec::new();
        for (index, item) in reservations.try_iter()?.enumerate() {
            let Ok(reservation) = item?.cast_into::<Reservation>() else {
                return Err(errors::input(
                    py,
                    format!("reservations[{index}]"),
                    "another object",
                    "Reservation objects, as reserve() returns them (without None)",
                ));
            };
            self.own(py, "reservations", index, &reservation.get().handle)?;
            checked.push(reservation);
        }
        Ok(checked)
    }
}

#[pymethods]
impl Namespace {
    /// The 16 bytes that identify the namespace.
    #[getter]
    fn digest<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.namespace.id().0)
    }

    /// Returns the number of leading keys whose blocks are stored.
    ///
    /// The call waits for asynchronous tiers, at most `lookup_timeout`.
    ///
    /// Args:
    ///     keys: Keys in prompt order, 32 bytes each.
    ///
    /// Returns:
    ///     The number of consecutive hits from the first key on.
    fn prefix(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let keys = keys::parse(keys)?;
        self.ask(py, &keys, |keys| self.namespace.prefix(keys), drop)
    }

    /// Checks for each key if a tier has its block.
    ///
    /// The call waits for asynchronous tiers, at most `lookup_timeout`.
    ///
    /// Args:
    ///     keys: Keys, 32 bytes each.
    ///
    /// Returns:
    ///     One bool per key.
    fn contains<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let keys = keys::parse(keys)?;
        PyList::new(
            py,
            self.ask(py, &keys, |keys| self.namespace.contains(keys), drop)?,
        )
    }

    /// Returns the uppermost tier of each block.
    ///
    /// The call waits for asynchronous tiers, at most `lookup_timeout`.
    ///
    /// Args:
    ///     keys: Keys, 32 bytes each.
    ///
    /// Returns:
    ///     The name of a tier per key; None for a miss.
    #[pyo3(name = "where")]
    fn nearest<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let keys = keys::parse(keys)?;
        let tiers = self.ask(py, &keys, |keys| self.namespace.nearest(keys), drop)?;
        let names = tiers
            .iter()
            .map(|tier| tier.map(|name| PyString::intern(py, name)));
        PyList::new(py, names)
    }

    /// Stores blocks in the background.
    ///
    /// A key that is stored keeps its bytes, regardless of the buffer. Until `Task.wait_released`
    /// returns, the buffers must not change. If a source changes during the put, the stored block
    /// is a mixture.
    ///
    /// Args:
    ///     keys: Keys in prompt order, 32 bytes each.
    ///     buffers: Contiguous memory per key: objects with the buffer protocol or DLPack, arrays
    ///         on a CUDA device, or (address, length) pairs in bytes. Or one `Spans` with a row per
    ///         key.
    ///     after: Key of the block before the first one, if a prompt comes in several calls.
    ///         Without it, the blocks of a call count as a prompt of their own. The new blocks of
    ///         one prompt may evict others only up to a share of the last tier, from 1/256 to 1/8.
    ///
    /// Returns:
    ///     A task with one outcome per key: true when the block is acknowledged.
    #[pyo3(signature = (keys, buffers, after = None))]
    fn put(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        after: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Task> {
        // First: a forked child may find a lane's locks held.
        self.handle.depot(py)?;
        let keys = keys::parse(keys)?;
        let after = keys::after(after)?;
        let parsed = buffers::parse(buffers, false)?;
        keep::sweep(py);
        let blocks = parsed.blocks;
        let task = self.change(py, |namespace| namespace.put_after(after, keys, blocks));
        // Refused, the buffers are gone, and what they held waits here. After a signal the lanes
        // may have them all the same.
        let task = task.inspect_err(|_| keep::sweep(py))?;
        Ok(Task::new(task, parsed.keep, self.handle.origin))
    }

    /// Reads blocks into buffers, in the background.
    ///
    /// Each byte is verified before its key is reported as true. A key is false, and the content of
    /// its buffer unspecified, if the block is a miss, is corrupt, or has another length than the
    /// buffer.
    ///
    /// Args:
    ///     keys: Keys in prompt order, 32 bytes each.
    ///     buffers: Writable memory per key, as in `put`, of the length of the block; or one
    ///         `Spans` with a row per key.
    ///     staged: Copy through the staging buffer, for memory that is slow for small or unaligned
    ///         copies. CUDA buffers are always staged.
    ///     prefix: Stop at the first miss or wrong length. Later keys are misses, and their buffers
    ///         stay untouched. If a block is corrupt, later blocks may have been delivered.
    ///
    /// Returns:
    ///     A task with one outcome per key: true when the buffer is filled.
    #[pyo3(signature = (keys, buffers, staged = false, prefix = false))]
    fn get(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        staged: bool,
        prefix: bool,
    ) -> PyResult<Task> {
        self.handle.depot(py)?;
        let keys = keys::parse(keys)?;
        let parsed = buffers::parse(buffers, true)?;
        keep::sweep(py);
        let blocks = parsed.blocks;
        let mut options = GetOptions::default();
        (options.staged, options.prefix) = (staged, prefix);
        let task = self.change(py, |namespace| namespace.get_with(keys, blocks, options));
        // Refused, the buffers are gone, and what they held waits here. After a signal the lanes
        // may have them all the same.
        let task = task.inspect_err(|_| keep::sweep(py))?;
        Ok(Task::new(task, parsed.keep, self.handle.origin))
    }

    /// Starts a lookup that does not wait for asynchronous tiers.
    ///
    /// Without asynchronous tiers the task is done immediately; for a client, when the server has
    /// responded.
    ///
    /// Args:
    ///     keys: Keys, 32 bytes each.
    ///
    /// Returns:
    ///     A task with one outcome per key: true if a tier has the block. A tier that does not
    ///     respond within `lookup_timeout` counts as a miss.
    fn lookup(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Task> {
        let keys = keys::parse(keys)?;
        let task = self.ask(py, &keys, |keys| self.namespace.lookup(keys), drop)?;
        Ok(Task::new(task, Keep::new(Vec::new()), self.handle.origin))
    }

    /// Promotes the leading hits into the first tier, in the background.
    ///
    /// Prefetched blocks that no call has read yet together take at most half of the first tier.
    /// Keys beyond that end as "dropped" and may be prefetched again.
    ///
    /// Args:
    ///     keys: Keys in prompt order, 32 bytes each.
    ///
    /// Returns:
    ///     A task with one outcome per key: true when the block is in the first tier.
    fn prefetch(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Task> {
        let keys = keys::parse(keys)?;
        let task = self.change(py, |namespace| namespace.prefetch(&keys))?;
        Ok(Task::new(task, Keep::new(Vec::new()), self.handle.origin))
    }

    /// Removes blocks from every tier.
    ///
    /// Args:
    ///     keys: Keys, 32 bytes each.
    ///
    /// Returns:
    ///     The number of keys that were stored in at least one tier. A repeated key counts once.
    fn remove(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let keys = keys::parse(keys)?;
        self.change(py, |namespace| namespace.remove(&keys))
    }

    /// Returns all blocks of the namespace, in any tier.
    ///
    /// Blocks that are stored or removed during the call may be missing or included.
    ///
    /// Returns:
    ///     (key, bytes) per block, sorted by key.
    fn blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let blocks = self.change(py, StoreNamespace::blocks)?;
        let row = |(key, bytes): (Key, u64)| (PyBytes::new(py, &key.0), bytes);
        PyList::new(py, blocks.into_iter().map(row))
    }

    /// Returns one page of the blocks of the namespace, in no order.
    ///
    /// A block that is in two tiers may be listed twice. A page may be short or empty before the
    /// last one. Each block that stays stored from the first to the last page is listed.
    ///
    /// Args:
    ///     cursor: The cursor that the previous page returned. Default: the first page.
    ///     limit: Most blocks of a page, at least 1. Default and maximum: 16384.
    ///
    /// Returns:
    ///     The page as (key, bytes) per block, and the cursor of the next page; None after the last
    ///     one.
    #[pyo3(signature = (cursor = None, limit = PAGE_MAX as i128))]
    fn blocks_page<'py>(
        &self,
        py: Python<'py>,
        cursor: Option<&[u8]>,
        limit: i128,
    ) -> PyResult<(Bound<'py, PyList>, Option<Bound<'py, PyBytes>>)> {
        let limit = arguments::whole(py, "limit", limit, "a whole number, 1 or more")?;
        let from = cursor.map(|bytes| match bytes.try_into() {
            Ok(bytes) => Ok(Cursor::from_bytes(bytes)),
            Err(_) => {
                let value = format!("{} bytes", bytes.len());
                Err(errors::input(
                    py,
                    "cursor",
                    value,
                    "the cursor that the previous page returned",
                ))
            }
        });
        let from = from.transpose()?;
        let page = self.change(py, |namespace| namespace.blocks_page(from, limit))?;
        let row = |(key, bytes): (Key, u64)| (PyBytes::new(py, &key.0), bytes);
        let rows = PyList::new(py, page.blocks.into_iter().map(row))?;
        let next = page.next.map(|next| PyBytes::new(py, &next.to_bytes()));
        Ok((rows, next))
    }

    /// Removes all blocks of the namespace from every tier.
    ///
    /// Returns:
    ///     The number of blocks that were removed.
    fn clear(&self, py: Python<'_>) -> PyResult<usize> {
        self.change(py, StoreNamespace::clear)
    }

    /// Reserves space for blocks that a worker, or another program, will write.
    ///
    /// Args:
    ///     keys: Keys in prompt order, 32 bytes each.
    ///     lengths: Bytes per block: one number, or one per key.
    ///     parts: Parts per block, 1 to 4096, for example one per rank.
    ///     part_lengths: Bytes per part; their sum is the length of each block. Default: equal
    ///         parts.
    ///     strict: Raise `FullError` for lack of space, and reserve nothing.
    ///     prefix: End the list before the first key that is declined or has no space, because
    ///         later blocks of the prompt could not be found.
    ///     after: Key of the block before the first one, as in `put`.
    ///
    /// Returns:
    ///     One reservation per key. None if the block is stored, is being written, is rejected by
    ///     the admission policy, or has no space.
    #[pyo3(signature = (
        keys, lengths, parts = 1, part_lengths = None, strict = false, prefix = false, after = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "the options of one verb")]
    fn reserve(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        lengths: &Bound<'_, PyAny>,
        parts: i128,
        part_lengths: Option<&Bound<'_, PyAny>>,
        strict: bool,
        prefix: bool,
        after: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Option<Reservation>>> {
        let parts = arguments::whole(py, "parts", parts, "1 to 4096 parts")?;
        let keys = keys::parse(keys)?;
        let lengths = arguments::lengths(lengths, keys.len())?;
        let split = arguments::split(py, parts, part_lengths)?;
        let mut blocks = Vec::with_capacity(keys.len());
        for (index, (key, length)) in keys.into_iter().zip(&lengths).enumerate() {
            blocks.push((key, split.of(py, index, *length)?));
        }
        let after = keys::after(after)?;
        let no_room = match (strict, prefix) {
            (true, _) => NoRoom::Fail,
            (_, true) => NoRoom::Stop,
            _ => NoRoom::Skip,
        };
        let reserved = self.change(py, |namespace| {
            namespace.reserve_after(after, &blocks, no_room)
        })?;
        let wrap = |(reserved, length): (Option<StoreReservation>, &u64)| {
            reserved.map(|one| {
                let namespace = self.namespace.clone();
                Reservation::new(one, *length, namespace, Arc::clone(&self.handle))
            })
        };
        Ok(reserved.into_iter().zip(&lengths).map(wrap).collect())
    }

    /// Publishes reservations after their bytes were written.
    ///
    /// After a commit that raised, for example on Ctrl-C, commit or abort again.
    ///
    /// Args:
    ///     reservations: Reservations of this depot, without None.
    ///     checksums: A list of 16-byte checksums per reservation, one per part, as in
    ///         `MoveJob.checksums`.
    ///
    /// Returns:
    ///     One bool per reservation. False if it had ended before, or was lost with its server.
    fn commit<'py>(
        &self,
        py: Python<'py>,
        reservations: &Bound<'py, PyAny>,
        checksums: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let reservations = self.reservations(reservations)?;
        let checksums = arguments::checksums(&reservations, checksums)?;
        let mut chosen = Vec::new();
        let mut live = Vec::new();
        let mut sums = Vec::new();
        for (index, (reservation, checksums)) in reservations.iter().zip(checksums).enumerate() {
            if let Some(reservation) = reservation.get().end() {
                chosen.push(index);
                live.push(reservation);
                sums.push(checksums);
            }
        }
        let stored = self.change(py, |namespace| namespace.commit(&live, &sums));
        // A signal, say, before the owner has heard of it: they are still to be ended.
        let stored = stored.inspect_err(|_| {
            for index in &chosen {
                reservations[*index].get().end_again();
            }
        })?;
        let mut answers = vec![false; reservations.len()];
        for (index, stored) in chosen.into_iter().zip(stored) {
            answers[index] = stored;
        }
        PyList::new(py, answers)
    }

    /// Releases reservations without publishing them.
    ///
    /// Before the call, every mover that has one of their placements must have stopped writing.
    ///
    /// Args:
    ///     reservations: Reservations of this depot, without None.
    fn abort(&self, py: Python<'_>, reservations: &Bound<'_, PyAny>) -> PyResult<()> {
        let reservations = self.reservations(reservations)?;
        let live: Vec<_> = reservations
            .iter()
            .filter_map(|reservation| reservation.get().end())
            .collect();
        self.change(py, |namespace| {
            namespace.abort(&live);
            Ok(())
        })
    }

    /// Pins blocks in their uppermost tier, so that workers can read them.
    ///
    /// Args:
    ///     keys: Keys in prompt order, 32 bytes each.
    ///     prefix: Pin only the leading hits.
    ///
    /// Returns:
    ///     One pin per key; None for a miss.
    #[pyo3(signature = (keys, prefix = false))]
    fn pin(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        prefix: bool,
    ) -> PyResult<Vec<Option<Pin>>> {
        let keys = keys::parse(keys)?;
        let undo = |pins: Vec<Option<StorePin>>| {
            let pins: Vec<StorePin> = pins.into_iter().flatten().collect();
            self.namespace.unpin(&pins, false);
        };
        let pin = |keys: &[Key]| self.namespace.pin(keys, prefix);
        let pins = self.ask(py, &keys, pin, undo)?;
        let wrap = |pin: StorePin| Pin::new(pin, self.namespace.clone(), Arc::clone(&self.handle));
        Ok(pins.into_iter().map(|pin| pin.map(wrap)).collect())
    }

    /// Ends pins.
    ///
    /// Args:
    ///     pins: Pins in prompt order. None and pins that have ended are ignored.
    ///     served: The bytes were used. Then they count as hits, and blocks of lower tiers are
    ///         promoted.
    #[pyo3(signature = (pins, served = false))]
    fn unpin(&self, py: Python<'_>, pins: &Bound<'_, PyAny>, served: bool) -> PyResult<()> {
        self.handle.depot(py)?;
        let ended = self.pins(pins, Pin::end)?;
        // Where nobody is at work in the index, that takes microseconds.
        if self.served || ended.len() > AT_ONCE_MAX || self.namespace.is_busy() {
            py.detach(|| self.namespace.unpin(&ended, served));
        } else {
            self.namespace.unpin(&ended, served);
        }
        Ok(())
    }

    /// Unpublishes pinned blocks that failed verification in a worker.
    ///
    /// Only the pinned copy becomes invisible. The pins stay, because other workers may still read.
    ///
    /// Args:
    ///     pins: Pins of this depot. None and pins that have ended are ignored.
    ///
    /// Returns:
    ///     The number of blocks that were still published.
    fn discard(&self, py: Python<'_>, pins: &Bound<'_, PyAny>) -> PyResult<usize> {
        let live = self.pins(pins, Pin::live)?;
        self.change(py, |namespace| Ok(namespace.discard(&live)))
    }

    fn __repr__(&self) -> String {
        format!("<kvdepot.Namespace {}>", self.namespace.id())
    }
}
