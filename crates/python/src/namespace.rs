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

/// One namespace of a depot.
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
            "one of another depot",
            "those of this depot",
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
                    "something else",
                    "what pin() answered",
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
                    "something else",
                    "what reserve() answered, without the Nones",
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

    /// How many of the first keys are stored without a gap.
    fn prefix(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let keys = keys::parse(keys)?;
        self.ask(py, &keys, |keys| self.namespace.prefix(keys), drop)
    }

    /// Whether each key's block is stored in some tier.
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

    /// The nearest tier that has each key's block; None for a miss.
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

    /// Stores blocks, given in prefix order. `buffers` has contiguous memory for each key, or is
    /// one Spans. Answers at once; see Task for the two milestones.
    ///
    /// `after` is the key of the block before the first one, where a prompt comes in several
    /// calls: without it a call's blocks count as a prompt of their own, and a prompt larger than
    /// an eighth of a tier pushes out what others use.
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

    /// Fills buffers with blocks, given in prefix order. A buffer of another length than its
    /// block, or whose key is a miss, ends as false with unspecified content.
    ///
    /// With `prefix` only the consecutive hits from the first key are moved: the others end as
    /// misses, and their buffers are not touched. With `staged` the bytes go through the staging
    /// slab, for memory that is slow to copy into by small pieces or at odd addresses.
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

    /// Asks whether each key's block is stored, without waiting for tiers that answer late: the
    /// task is true for a key that is.
    fn lookup(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Task> {
        let keys = keys::parse(keys)?;
        let task = self.ask(py, &keys, |keys| self.namespace.lookup(keys), drop)?;
        Ok(Task::new(task, Keep::new(Vec::new()), self.handle.origin))
    }

    /// Brings the consecutive hits from the first key into the near tier, in the background.
    /// Answers at once; the task is true for a key once its block is there.
    fn prefetch(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Task> {
        let keys = keys::parse(keys)?;
        let task = self.change(py, |namespace| namespace.prefetch(&keys))?;
        Ok(Task::new(task, Keep::new(Vec::new()), self.handle.origin))
    }

    /// Removes blocks from every tier; how many were in one.
    fn remove(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let keys = keys::parse(keys)?;
        self.change(py, |namespace| namespace.remove(&keys))
    }

    /// Its blocks in any tier as (key, bytes), in the order of the keys.
    fn blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let blocks = self.change(py, StoreNamespace::blocks)?;
        let row = |(key, bytes): (Key, u64)| (PyBytes::new(py, &key.0), bytes);
        PyList::new(py, blocks.into_iter().map(row))
    }

    /// Some of its blocks as (key, bytes), at most `limit`, in no order, and where the next page
    /// begins: bytes for `cursor`, None behind the last one. A block in two tiers comes twice; a
    /// page may be short, or empty, before the last. Every block that is there all the while comes.
    #[pyo3(signature = (cursor = None, limit = PAGE_MAX as i128))]
    fn blocks_page<'py>(
        &self,
        py: Python<'py>,
        cursor: Option<&[u8]>,
        limit: i128,
    ) -> PyResult<(Bound<'py, PyList>, Option<Bound<'py, PyBytes>>)> {
        let limit = arguments::whole(py, "limit", limit, "a number from 1")?;
        let from = cursor.map(|bytes| match bytes.try_into() {
            Ok(bytes) => Ok(Cursor::from_bytes(bytes)),
            Err(_) => {
                let value = format!("{} bytes", bytes.len());
                Err(errors::input(
                    py,
                    "cursor",
                    value,
                    "what the page before answered",
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

    /// Removes every block of the namespace; how many there were.
    fn clear(&self, py: Python<'_>) -> PyResult<usize> {
        self.change(py, StoreNamespace::clear)
    }

    /// Reserves room for blocks, given in prefix order. `lengths` is one number or one a key.
    /// With `parts` above 1 each block has that many, of `part_lengths` bytes, or of equal ones.
    /// None for a key that is stored, is being written, is declined (`admission`), or finds no
    /// room; with `strict` no room raises FullError and reserves nothing; with `prefix` the answer
    /// ends before the first key that is declined or finds no room. `after` as for put.
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
        let parts = arguments::whole(py, "parts", parts, "1 to 4096")?;
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

    /// Publishes reservations whose bytes are in place. `checksums` has for each a list of 16
    /// bytes a part. False for one that was ended before or is lost.
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

    /// Gives reservations back. Every mover that had one of their placements must have stopped.
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

    /// Pins blocks, given in prefix order, where they are nearest; None for a miss. With
    /// `prefix` nothing behind the first miss is pinned.
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

    /// Ends pins, given in prefix order; None and ended ones are passed over. `served` says that
    /// their bytes were used: it counts as hits, and far blocks are promoted.
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

    /// Unpublishes pinned blocks that did not verify, where they are pinned. The pins remain.
    /// Answers how many were still published.
    fn discard(&self, py: Python<'_>, pins: &Bound<'_, PyAny>) -> PyResult<usize> {
        let live = self.pins(pins, Pin::live)?;
        self.change(py, |namespace| Ok(namespace.discard(&live)))
    }

    fn __repr__(&self) -> String {
        format!("<kvdepot.Namespace {}>", self.namespace.id())
    }
}
