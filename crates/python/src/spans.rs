//! Spans: blocks scattered over several memory ranges, described once for all blocks of a call.

use std::alloc::{Layout, alloc_zeroed};

use kvdepot_store::Buffer;
use parking_lot::Mutex;
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use crate::buffers::Raw;
use crate::{errors, storage};

/// One block for each row of `rows`. A row holds ids; of each of `ranges`, given as
/// (address, stride, length), a block takes `length` bytes at `address + id * stride` for every
/// id of its row, range after range. The memory must stay valid until the task that uses it no
/// longer touches it; `owner` is kept alive until then, with the storage of each tensor that it is
/// or, as a list, tuple or dictionary, has.
///
/// In a load or a get a negative id stands for bytes that are verified but not delivered.
#[pyclass(frozen, module = "kvdepot")]
pub(crate) struct Spans {
    ranges: Vec<Range>,
    ids: Vec<i64>,
    /// `ends[i]` is one past the last id of row `i`.
    ends: Vec<usize>,
    /// What keeps the memory; `None` once it was garbage.
    owners: Mutex<Option<Vec<Py<PyAny>>>>,
}

#[derive(Clone, Copy)]
struct Range {
    addr: u64,
    stride: i64,
    len: u64,
}

#[pymethods]
impl Spans {
    #[new]
    #[pyo3(signature = (ranges, rows, owner = None))]
    fn new(
        py: Python<'_>,
        ranges: &Bound<'_, PyAny>,
        rows: &Bound<'_, PyAny>,
        owner: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Spans> {
        // First: what the addresses below are of must not be let go meanwhile.
        let mut owners = Vec::new();
        if let Some(owner) = owner {
            storage::keep_all(&owner, &mut owners);
            owners.push(owner.unbind());
        }
        let mut known = Vec::new();
        for (index, range) in ranges.try_iter()?.enumerate() {
            let (addr, stride, len): (u64, i64, u64) = range?.extract()?;
            if addr == 0 || len == 0 || addr.checked_add(len).is_none() {
                return Err(errors::input(
                    py,
                    format!("ranges[{index}]"),
                    format!("({addr}, {stride}, {len})"),
                    "(address, stride, length) with an address and a length above zero",
                ));
            }
            known.push(Range { addr, stride, len });
        }
        let (ids, ends) = read_rows(rows)?;
        Ok(Spans {
            ranges: known,
            ids,
            ends,
            owners: Mutex::new(Some(owners)),
        })
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        // Nobody runs Python code under the lock, which could be what asks for this.
        let owners = self.owners.try_lock();
        let owners = owners.iter().filter_map(|owners| owners.as_ref()).flatten();
        owners.into_iter().try_for_each(|owner| visit.call(owner))
    }

    fn __clear__(&self) {
        let owners = self.owners.lock().take();
        drop(owners);
    }

    fn __len__(&self) -> usize {
        self.ends.len()
    }

    /// Bytes of all blocks together.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.each().saturating_mul(self.ids.len() as u64)
    }
}

/// Ids and row ends: from a two-dimensional array of 64- or 32-bit integers, or rows of ints.
fn read_rows(rows: &Bound<'_, PyAny>) -> PyResult<(Vec<i64>, Vec<usize>)> {
    let py = rows.py();
    let wide = PyBuffer::<i64>::get(rows).and_then(|array| Ok((array.to_vec(py)?, shape(&array))));
    let table = wide.or_else(|_| {
        PyBuffer::<i32>::get(rows).and_then(|array| {
            let ids = array.to_vec(py)?.into_iter().map(i64::from).collect();
            Ok((ids, shape(&array)))
        })
    });
    if let Ok((ids, Some((count, each)))) = table {
        return Ok((ids, (1..=count).map(|row| row * each).collect()));
    }
    let wrong = |field: String, value: &Bound<'_, PyAny>| {
        errors::input(
            py,
            field,
            errors::shown(value),
            "rows of integers, one row a block",
        )
    };
    let mut ids = Vec::new();
    let mut ends = Vec::new();
    let items = rows.try_iter().map_err(|_| wrong("rows".into(), rows))?;
    for (index, row) in items.enumerate() {
        let row = row?;
        let each = row.try_iter();
        let each = each.and_then(|items| items.map(|id| id?.extract::<i64>()).collect());
        let each: Vec<i64> = each.map_err(|_| wrong(format!("rows[{index}]"), &row))?;
        ids.extend(each);
        ends.push(ids.len());
    }
    Ok((ids, ends))
}

fn shape<T: pyo3::buffer::Element>(array: &PyBuffer<T>) -> Option<(usize, usize)> {
    match array.shape() {
        [rows, each] => Some((*rows, *each)),
        _ => None,
    }
}

impl Spans {
    /// What keeps the memory alive.
    pub(crate) fn owners(&self, py: Python<'_>) -> PyResult<Vec<Py<PyAny>>> {
        match &*self.owners.lock() {
            Some(owners) => Ok(owners.iter().map(|owner| owner.clone_ref(py)).collect()),
            // A finalizer has them still.
            None => Err(errors::input(
                py,
                "buffers",
                "Spans that were garbage",
                "Spans whose owner is there",
            )),
        }
    }

    /// The pieces of every block, neighbours joined. `scratch` says where bytes of negative ids
    /// go; without it they are refused.
    pub(crate) fn pieces(
        &self,
        py: Python<'_>,
        scratch: Option<&mut Scratch>,
    ) -> PyResult<Vec<Vec<Raw>>> {
        let mut blocks = Vec::with_capacity(self.ends.len());
        let mut scratch = scratch;
        let mut first = 0;
        for (row, end) in self.ends.iter().enumerate() {
            let mut pieces: Vec<Raw> = Vec::new();
            for range in &self.ranges {
                for id in &self.ids[first..*end] {
                    let piece = match (*id, scratch.as_deref_mut()) {
                        // Its memory was counted by the same ids and ranges.
                        (..0, Some(scratch)) => scratch.take(range.len as usize),
                        (..0, None) => {
                            return Err(errors::input(
                                py,
                                format!("rows[{row}]"),
                                id,
                                "ids from 0 (negative ones only where bytes are delivered)",
                            ));
                        }
                        (id, _) => range.piece(py, row, id)?,
                    };
                    push_joined(&mut pieces, piece);
                }
            }
            first = *end;
            blocks.push(pieces);
        }
        Ok(blocks)
    }

    /// Memory for the bytes that negative ids stand for; `None` where there are none.
    pub(crate) fn scratch(&self, py: Python<'_>) -> PyResult<Option<Scratch>> {
        let count = self.ids.iter().filter(|id| **id < 0).count();
        if count == 0 {
            return Ok(None);
        }
        let bytes = self.each().saturating_mul(count as u64);
        let memory = usize::try_from(bytes).ok().and_then(zeroed);
        match memory {
            Some(memory) => Ok(Some(Scratch {
                memory: Buffer::from_vec(memory),
                used: 0,
            })),
            None => Err(errors::input(
                py,
                "rows",
                format!("negative ids that stand for {bytes} bytes"),
                "as many as memory can be had for",
            )),
        }
    }

    /// Bytes of one id.
    fn each(&self) -> u64 {
        let lens = self.ranges.iter().map(|range| range.len);
        lens.fold(0, u64::saturating_add)
    }
}

impl Range {
    fn piece(&self, py: Python<'_>, row: usize, id: i64) -> PyResult<Raw> {
        let at = i128::from(self.addr) + i128::from(id) * i128::from(self.stride);
        let end = at + i128::from(self.len);
        match (usize::try_from(at), usize::try_from(end)) {
            (Ok(addr), Ok(_)) if addr > 0 => Ok(Raw {
                addr,
                len: self.len as usize,
                writable: true,
                device: None,
            }),
            _ => Err(errors::input(
                py,
                format!("rows[{row}]"),
                id,
                "ids whose memory has an address",
            )),
        }
    }
}

fn push_joined(pieces: &mut Vec<Raw>, piece: Raw) {
    match pieces.last_mut() {
        Some(last) if last.addr + last.len == piece.addr => last.len += piece.len,
        _ => pieces.push(piece),
    }
}

/// Memory for bytes that nobody wants.
pub(crate) struct Scratch {
    pub(crate) memory: Buffer,
    used: usize,
}

/// Zeros that take no memory before they are written; `None` where so many cannot be had.
fn zeroed(len: usize) -> Option<Vec<u8>> {
    let layout = Layout::array::<u8>(len)
        .ok()
        .filter(|layout| layout.size() > 0)?;
    // SAFETY: the layout has a size above zero.
    let start = unsafe { alloc_zeroed(layout) };
    // SAFETY: where it is not null, the global allocator gave `len` bytes, all zero, by the layout
    // of a vector of that capacity.
    (!start.is_null()).then(|| unsafe { Vec::from_raw_parts(start, len, len) })
}

impl Scratch {
    fn take(&mut self, len: usize) -> Raw {
        let addr = self.memory.addr() + self.used;
        self.used += len;
        Raw {
            addr,
            len,
            writable: true,
            device: None,
        }
    }
}
