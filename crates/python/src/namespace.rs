//! Namespaces: the verbs on blocks.

use std::sync::Arc;

use kvdepot_store::{
    Checksum, Key, Namespace as StoreNamespace, NamespaceSpec, Pin as StorePin,
    Reservation as StoreReservation,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyList, PyString};

use crate::handle::Handle;
use crate::keep;
use crate::task::Task;
use crate::two_phase::{Pin, Reservation};
use crate::{buffers, errors, keys};

/// Keys that are looked up without giving the interpreter's lock away: that takes some
/// microseconds, and getting the lock back from a busy thread takes milliseconds.
const AT_ONCE_MAX: usize = 4096;

/// The arguments of `Depot.namespace`.
pub(crate) struct Fields<'a, 'py> {
    pub(crate) model: &'a Bound<'py, PyAny>,
    pub(crate) dtype: &'a Bound<'py, PyAny>,
    pub(crate) block_tokens: &'a Bound<'py, PyAny>,
    pub(crate) weights: Option<&'a Bound<'py, PyAny>>,
    pub(crate) layout: Option<&'a Bound<'py, PyAny>>,
    pub(crate) group: Option<&'a Bound<'py, PyAny>>,
    pub(crate) world: Option<&'a Bound<'py, PyAny>>,
    pub(crate) hash: Option<&'a Bound<'py, PyAny>>,
    pub(crate) salt: Option<&'a Bound<'py, PyAny>>,
}

impl Fields<'_, '_> {
    pub(crate) fn read(&self) -> PyResult<NamespaceSpec> {
        Ok(NamespaceSpec {
            model: word("model", self.model)?,
            dtype: word("dtype", self.dtype)?,
            block_tokens: number("block_tokens", self.block_tokens)?,
            weights: optional("weights", self.weights)?,
            layout: optional("layout", self.layout)?,
            group: optional("group", self.group)?,
            world: optional("world", self.world)?,
            hash: optional("hash", self.hash)?,
            salt: optional("salt", self.salt)?,
        })
    }
}

fn optional(field: &str, value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<String>> {
    value.map(|value| word(field, value)).transpose()
}

/// A text; numbers and bytes are written as one.
fn word(field: &str, value: &Bound<'_, PyAny>) -> PyResult<String> {
    if let Ok(text) = value.cast::<PyString>() {
        return Ok(text.to_cow()?.into_owned());
    }
    if let Ok(bytes) = value.cast::<PyBytes>() {
        let hex: String = bytes.as_bytes().iter().map(|b| format!("{b:02x}")).collect();
        // No text begins like this by accident.
        return Ok(format!("\0bytes:{hex}"));
    }
    if value.is_exact_instance_of::<PyInt>() {
        return Ok(value.str()?.to_cow()?.into_owned());
    }
    let shown = errors::shown(value);
    Err(errors::input(
        value.py(),
        field,
        shown,
        "a text, bytes or an integer",
    ))
}

/// A whole number of at least zero.
fn number(field: &str, value: &Bound<'_, PyAny>) -> PyResult<u64> {
    value.extract::<u64>().map_err(|_| {
        let shown = errors::shown(value);
        errors::input(value.py(), field, shown, "a whole number from 0")
    })
}

/// One namespace of a depot.
#[pyclass(frozen, module = "kvdepot")]
pub(crate) struct Namespace {
    namespace: StoreNamespace,
    handle: Arc<Handle>,
}

impl Namespace {
    pub(crate) fn new(namespace: StoreNamespace, handle: Arc<Handle>) -> Namespace {
        Namespace { namespace, handle }
    }

    /// Asks the index something that takes microseconds for few keys.
    fn ask<T: Send>(
        &self,
        py: Python<'_>,
        keys: &[Key],
        ask: impl FnOnce(&[Key]) -> Result<T, kvdepot_store::Error> + Send,
    ) -> PyResult<T> {
        self.handle.depot(py)?;
        let answer = if keys.len() <= AT_ONCE_MAX {
            ask(keys)
        } else {
            py.detach(|| ask(keys))
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
        py.detach(|| change(&self.namespace))
            .map_err(|error| errors::raise(py, error))
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
        self.ask(py, &keys, |keys| self.namespace.prefix(keys))
    }

    /// Whether each key's block is stored in some tier.
    fn contains<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let keys = keys::parse(keys)?;
        PyList::new(py, self.ask(py, &keys, |keys| self.namespace.contains(keys))?)
    }

    /// The nearest tier that has each key's block; None for a miss.
    #[pyo3(name = "where")]
    fn nearest<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let keys = keys::parse(keys)?;
        let tiers = self.ask(py, &keys, |keys| self.namespace.nearest(keys))?;
        let names = tiers.iter().map(|tier| tier.map(|name| PyString::intern(py, name)));
        PyList::new(py, names)
    }

    /// Stores blocks, given in prefix order. `buffers` has contiguous memory for each key, or is
    /// one Spans. Answers at once; see Task for the two milestones.
    fn put(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
    ) -> PyResult<Task> {
        let keys = keys::parse(keys)?;
        let parsed = buffers::parse(buffers, false)?;
        keep::sweep(py);
        let blocks = parsed.blocks;
        let task = self.change(py, |namespace| namespace.put(keys, blocks))?;
        Ok(Task::new(task, parsed.keep))
    }

    /// Fills buffers with blocks, given in prefix order. A buffer of another length than its
    /// block, or whose key is a miss, ends as false with unspecified content.
    fn get(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
    ) -> PyResult<Task> {
        let keys = keys::parse(keys)?;
        let parsed = buffers::parse(buffers, true)?;
        keep::sweep(py);
        let blocks = parsed.blocks;
        let task = self.change(py, |namespace| namespace.get(keys, blocks))?;
        Ok(Task::new(task, parsed.keep))
    }

    /// Removes blocks from every tier; how many were in one.
    fn remove(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let keys = keys::parse(keys)?;
        self.change(py, |namespace| namespace.remove(&keys))
    }

    /// Removes every block of the namespace; how many the tiers held together.
    fn clear(&self, py: Python<'_>) -> PyResult<usize> {
        self.change(py, StoreNamespace::clear)
    }

    /// Reserves room for blocks, given in prefix order. `lengths` is one number or one a key.
    /// With `parts` above 1 each block has that many, of `part_lengths` bytes, or of equal ones.
    /// None for a key that is stored, is being written, or finds no room; with `strict` no room
    /// raises FullError and reserves nothing.
    #[pyo3(signature = (keys, lengths, parts = 1, part_lengths = None, strict = false))]
    #[expect(clippy::too_many_arguments, reason = "the surface that engines asked for")]
    fn reserve(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        lengths: &Bound<'_, PyAny>,
        parts: u64,
        part_lengths: Option<&Bound<'_, PyAny>>,
        strict: bool,
    ) -> PyResult<Vec<Option<Reservation>>> {
        let keys = keys::parse(keys)?;
        let lengths = read_lengths(lengths, keys.len())?;
        let split = read_split(py, parts, part_lengths)?;
        let mut blocks = Vec::with_capacity(keys.len());
        for (index, (key, length)) in keys.into_iter().zip(&lengths).enumerate() {
            blocks.push((key, split.of(py, index, *length)?));
        }
        let reserved = self.change(py, |namespace| match strict {
            true => namespace.reserve_strict(&blocks),
            false => namespace.reserve(&blocks),
        })?;
        let wrap = |(reserved, length): (Option<StoreReservation>, &u64)| {
            reserved.map(|one| Reservation::new(one, *length, Arc::clone(&self.handle)))
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
        let checksums = read_checksums(&reservations, checksums)?;
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
        let stored = self.change(py, |namespace| namespace.commit(&live, &sums))?;
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
        let pins = self.ask(py, &keys, |keys| self.namespace.pin(keys, prefix))?;
        let wrap = |pin: StorePin| Pin::new(pin, self.namespace.clone(), Arc::clone(&self.handle));
        Ok(pins.into_iter().map(|pin| pin.map(wrap)).collect())
    }

    /// Ends pins, given in prefix order; None and ended ones are passed over. `served` says that
    /// their bytes were used: it counts as hits, and far blocks are promoted.
    #[pyo3(signature = (pins, served = false))]
    fn unpin(&self, py: Python<'_>, pins: &Bound<'_, PyAny>, served: bool) -> PyResult<()> {
        self.handle.depot(py)?;
        let ended = self.pins(pins, Pin::end)?;
        self.namespace.unpin(&ended, served);
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

fn read_lengths(lengths: &Bound<'_, PyAny>, count: usize) -> PyResult<Vec<u64>> {
    if lengths.is_instance_of::<PyInt>() {
        return Ok(vec![number("lengths", lengths)?; count]);
    }
    let mut each = Vec::with_capacity(count);
    let items = lengths.try_iter().map_err(|_| {
        let shown = errors::shown(lengths);
        errors::input(lengths.py(), "lengths", shown, "a number, or one a key")
    })?;
    for (index, item) in items.enumerate() {
        each.push(number(&format!("lengths[{index}]"), &item?)?);
    }
    if each.len() != count {
        let value = format!("{} numbers for {count} keys", each.len());
        return Err(errors::input(lengths.py(), "lengths", value, "one a key"));
    }
    Ok(each)
}

/// How blocks are split into parts.
enum Split {
    /// Into so many of equal length.
    Equal(u64),
    /// Into these.
    Lengths(Vec<u64>),
}

fn read_split(
    py: Python<'_>,
    parts: u64,
    lengths: Option<&Bound<'_, PyAny>>,
) -> PyResult<Split> {
    let Some(given) = lengths else {
        // The bound of the store, checked there too; here it bounds memory.
        if parts == 0 || parts > 4096 {
            return Err(errors::input(py, "parts", parts, "1 to 4096"));
        }
        return Ok(Split::Equal(parts));
    };
    let mut lengths = Vec::new();
    for (index, item) in given.try_iter()?.enumerate() {
        lengths.push(number(&format!("part_lengths[{index}]"), &item?)?);
    }
    if lengths.len() as u64 != parts {
        let value = format!("{} numbers for {parts} parts", lengths.len());
        return Err(errors::input(py, "part_lengths", value, "one a part"));
    }
    Ok(Split::Lengths(lengths))
}

impl Split {
    fn of(&self, py: Python<'_>, index: usize, length: u64) -> PyResult<Vec<u64>> {
        match self {
            Split::Equal(parts) if length.is_multiple_of(*parts) => {
                Ok(vec![length / parts; *parts as usize])
            }
            Split::Equal(parts) => Err(errors::input(
                py,
                format!("lengths[{index}]"),
                length,
                format!("a multiple of parts = {parts}, or part_lengths"),
            )),
            Split::Lengths(lengths) => {
                let sum = lengths.iter().try_fold(0u64, |sum, len| sum.checked_add(*len));
                if sum == Some(length) {
                    return Ok(lengths.clone());
                }
                Err(errors::input(
                    py,
                    format!("lengths[{index}]"),
                    length,
                    "the sum of part_lengths",
                ))
            }
        }
    }
}

fn read_checksums(
    reservations: &[Bound<'_, Reservation>],
    checksums: &Bound<'_, PyAny>,
) -> PyResult<Vec<Vec<Checksum>>> {
    let py = checksums.py();
    let mut all = Vec::with_capacity(reservations.len());
    for (index, item) in checksums.try_iter()?.enumerate() {
        let mut parts = Vec::new();
        for (part, sum) in item?.try_iter()?.enumerate() {
            let sum = sum?;
            let bytes = sum.extract::<[u8; 16]>().map_err(|_| {
                let field = format!("checksums[{index}][{part}]");
                errors::input(py, field, errors::shown(&sum), "16 bytes")
            })?;
            parts.push(Checksum(bytes));
        }
        let wanted = reservations.get(index).map(|one| one.get().part_count());
        if wanted.is_some_and(|wanted| wanted != parts.len()) {
            return Err(errors::input(
                py,
                format!("checksums[{index}]"),
                format!("{} checksums", parts.len()),
                format!("one a part, {}", wanted.unwrap_or_default()),
            ));
        }
        all.push(parts);
    }
    if all.len() != reservations.len() {
        let value = format!("{} for {} reservations", all.len(), reservations.len());
        return Err(errors::input(
            py,
            "checksums",
            value,
            "one list a reservation",
        ));
    }
    Ok(all)
}
