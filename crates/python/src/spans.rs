//! Spans: blocks scattered over several memory ranges, described once for all blocks of a call.

use std::alloc::{Layout, alloc_zeroed};
use std::sync::Arc;

use kvdepot_store::{Buffer, Device};
use parking_lot::Mutex;
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use pyo3::{PyTraverseError, PyVisit};

use crate::errors::{self, Refused};
use crate::memory::{Home, Place, Raw};
use crate::pages::Pages;
use crate::{arguments, storage, wait};

/// Blocks that are scattered over several memory ranges, for example one page per layer.
///
/// A block is a row of page ids. It consists of its pages in the first range, then its pages in the
/// second range, and so on. In a `get` or `load`, the bytes of a negative id are verified and not
/// delivered.
///
/// kvdepot keeps tensors and `owner` alive while a copy thread uses their memory. Memory that only
/// addresses name must stay mapped for that time.
///
/// Args:
///     ranges: Tensors or arrays whose first dimension counts pages, each page contiguous. Or
///         tuples (address, stride, length) in bytes: page `id` is the `length` bytes at `address +
///         id * stride`.
///     rows: Page ids, one row per block: sequences of integers, or an array of shape (blocks, ids)
///         of 32- or 64-bit integers.
///     owner: Object that owns the memory of the addresses: a tensor or array, or a list, tuple or
///         dictionary of tensors. Pages outside of known memory are rejected.
///     device: Number of the CUDA device of the addresses. Tensors have their own. Default: host
///         memory.
///     stream: Handle of a stream of that device, such as
///         `torch.cuda.current_stream().cuda_stream`. Copies wait for the work that the stream
///         received before the call; the caller continues. Default: copies do not wait for
///         computations.
///
/// Raises:
///     InputError: A range or row is unsuitable, an id is outside of a range, or ranges are on
///         different devices.
#[pyclass(frozen, module = "kvdepot")]
pub(crate) struct Spans {
    described: Arc<Described>,
    /// What ids must keep to.
    limits: Arc<Limits>,
    /// What keeps the memory; `None` once it was garbage.
    owners: Mutex<Option<Vec<Py<PyAny>>>>,
}

/// What ids must keep to: the bounds of each range, and the memory of their owner.
struct Limits {
    bounds: Vec<Bounds>,
    places: Option<Vec<Place>>,
}

/// All that is not an object of Python's.
pub(crate) struct Described {
    ranges: Arc<[Range]>,
    ids: Vec<i64>,
    /// `ends[i]` is one past the last id of row `i`.
    ends: Vec<usize>,
    /// The device that the ranges are of, and the stream that is waited for.
    pub(crate) device: Option<i32>,
    pub(crate) stream: Option<usize>,
}

#[derive(Clone, Copy)]
struct Range {
    addr: u64,
    stride: i64,
    len: u64,
    writable: bool,
    home: Home,
}

/// What the ids of a range must keep to.
enum Bounds {
    /// As many pages as a tensor has.
    Pages(usize, Place),
    /// What the owner of addresses has.
    Owned,
}

#[pymethods]
impl Spans {
    #[new]
    #[pyo3(signature = (ranges, rows, owner = None, device = None, stream = None))]
    fn new(
        py: Python<'_>,
        ranges: &Bound<'_, PyAny>,
        rows: &Bound<'_, PyAny>,
        owner: Option<Bound<'_, PyAny>>,
        device: Option<i128>,
        stream: Option<i128>,
    ) -> PyResult<Spans> {
        let allowed = "the number of a CUDA device, such as torch's device.index";
        let device = device.map(|device| arguments::whole(py, "device", device, allowed));
        let (device, stream) = (device.transpose()?, read_stream(py, stream)?);
        let named = device.map_or(Home::Processor, Home::Device);
        // First: what the addresses below are of must not be let go meanwhile.
        let mut owners = Vec::new();
        let mut places = None;
        if let Some(owner) = owner {
            storage::keep_all(&owner, &mut owners);
            places = storage::places(&owner).filter(|places| !places.is_empty());
            owners.push(owner.unbind());
        }
        let mut known = Vec::new();
        let Ok(items) = ranges.try_iter() else {
            let shown = errors::shown(ranges);
            return Err(errors::input(py, "ranges", shown, "a sequence of ranges"));
        };
        for (index, range) in items.enumerate() {
            known.push(read_range(index, &range?, named, &mut owners)?);
        }
        let device = home_of_all(py, &known, device, stream)?;
        let (ranges, bounds): (Vec<Range>, Vec<Bounds>) = known.into_iter().unzip();
        let limits = Arc::new(Limits { bounds, places });
        Spans::of(py, ranges.into(), limits, (device, stream), rows, owners)
    }

    /// Returns the same ranges with other rows and another stream.
    ///
    /// The ranges are not checked again, so that the call is cheaper than a new object.
    ///
    /// Args:
    ///     rows: Page ids, one row per block, as in `Spans`.
    ///     stream: Handle of a stream of the device. Default: none.
    ///
    /// Returns:
    ///     The new object. It keeps the same tensors and owner.
    ///
    /// Raises:
    ///     InputError: A row is unsuitable, or an id is outside of a range.
    #[pyo3(signature = (rows, stream = None))]
    fn with_rows(
        &self,
        py: Python<'_>,
        rows: &Bound<'_, PyAny>,
        stream: Option<i128>,
    ) -> PyResult<Spans> {
        let stream = read_stream(py, stream)?;
        let (ranges, limits) = (Arc::clone(&self.described.ranges), Arc::clone(&self.limits));
        let device = self.described.device;
        check_stream(py, stream, device)?;
        Spans::of(py, ranges, limits, (device, stream), rows, self.owners(py)?)
    }

    /// Waits until kvdepot has no copies in progress between this process and the device.
    ///
    /// Call it before device memory is unmapped: after an abandoned store, the device may still be
    /// read. First wait for jobs and tasks, because their later copies are unknown here.
    ///
    /// Args:
    ///     timeout: Seconds to wait. Default: no limit.
    ///
    /// Returns:
    ///     False if the wait timed out. Host memory returns True immediately.
    #[pyo3(signature = (timeout = None))]
    fn synchronize(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let timeout = wait::timeout(py, timeout)?;
        let Some(device) = self.described.device.and_then(Device::opened) else {
            return Ok(true);
        };
        wait::until(py, timeout, |limit| device.rest(limit))
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
        self.described.ends.len()
    }

    /// Total size of all blocks in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.described.nbytes()
    }
}

const RANGE: &str = "(address, stride, length) in bytes, with an address and a length above zero, \
                     or a tensor with contiguous pages";

/// A range as it was given; what keeps the memory of a tensor is added to `owners`.
fn read_range(
    index: usize,
    range: &Bound<'_, PyAny>,
    named: Home,
    owners: &mut Vec<Py<PyAny>>,
) -> PyResult<(Range, Bounds)> {
    let wrong = |value: String| errors::input(range.py(), format!("ranges[{index}]"), value, RANGE);
    if !range.is_instance_of::<PyTuple>() {
        let pages = Pages::of(range, owners).map_err(wrong)?;
        let bounds = Bounds::Pages(pages.count, pages.place);
        let range = Range {
            addr: pages.addr as u64,
            stride: pages.stride as i64,
            len: pages.len as u64,
            writable: pages.writable,
            home: pages.home,
        };
        return Ok((range, bounds));
    }
    let Ok((addr, stride, len)) = range.extract::<(u64, i64, u64)>() else {
        return Err(wrong(errors::shown(range)));
    };
    if addr == 0 || len == 0 || addr.checked_add(len).is_none() {
        return Err(wrong(errors::shown(range)));
    }
    let writable = true;
    let range = Range {
        addr,
        stride,
        len,
        writable,
        home: named,
    };
    Ok((range, Bounds::Owned))
}

/// The device that all ranges are of; none where they are in host memory.
fn home_of_all(
    py: Python<'_>,
    ranges: &[(Range, Bounds)],
    device: Option<i32>,
    stream: Option<usize>,
) -> PyResult<Option<i32>> {
    let first = ranges.first().and_then(|(first, _)| first.home.device());
    let home = device.or(first);
    let of = |device: Option<i32>| match device {
        Some(device) => format!("memory of device {device}"),
        None => "host memory".to_owned(),
    };
    for (index, (range, _)) in ranges.iter().enumerate() {
        let own = range.home.device();
        if own != home {
            return Err(errors::input(
                py,
                format!("ranges[{index}]"),
                of(own),
                format!("{}, as for `device` or the first range", of(home)),
            ));
        }
    }
    check_stream(py, stream, home).map(|()| home)
}

fn read_stream(py: Python<'_>, stream: Option<i128>) -> PyResult<Option<usize>> {
    let allowed =
        "the handle of a stream, such as torch's cuda_stream, or 0 for the default stream";
    let stream = stream.map(|stream| arguments::whole(py, "stream", stream, allowed));
    stream.transpose()
}

fn check_stream(py: Python<'_>, stream: Option<usize>, device: Option<i32>) -> PyResult<()> {
    match (stream, device) {
        (Some(stream), None) => {
            let allowed = "None for ranges in host memory (a stream belongs to a device)";
            Err(errors::input(py, "stream", stream, allowed))
        }
        _ => Ok(()),
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
            "rows of integers, one row per block",
        )
    };
    let mut ids = Vec::new();
    let mut ends = Vec::new();
    let items = rows.try_iter().map_err(|_| wrong("rows".into(), rows))?;
    for (index, row) in items.enumerate() {
        let row = row?;
        let wrong = |_| wrong(format!("rows[{index}]"), &row);
        for id in row.try_iter().map_err(wrong)? {
            ids.push(id?.extract::<i64>().map_err(wrong)?);
        }
        ends.push(ids.len());
    }
    Ok((ids, ends))
}

/// Rows, and ids of each; `None` where they are to be read one by one.
fn shape<T: pyo3::buffer::Element>(array: &PyBuffer<T>) -> Option<(usize, usize)> {
    let order = array.format().to_bytes().first();
    match array.shape() {
        // PyO3 would take numbers of the other byte order for the processor's.
        [rows, each] if !matches!(order, Some(b'>' | b'!')) => Some((*rows, *each)),
        _ => None,
    }
}

impl Spans {
    fn of(
        py: Python<'_>,
        ranges: Arc<[Range]>,
        limits: Arc<Limits>,
        (device, stream): (Option<i32>, Option<usize>),
        rows: &Bound<'_, PyAny>,
        owners: Vec<Py<PyAny>>,
    ) -> PyResult<Spans> {
        let (ids, ends) = read_rows(rows)?;
        let described = Described {
            ranges,
            ids,
            ends,
            device,
            stream,
        };
        if let Some(ids) = described.least_and_greatest() {
            for (index, bounds) in limits.bounds.iter().enumerate() {
                let range = described.ranges[index];
                described.check(py, index, range, bounds, limits.places.as_deref(), ids)?;
            }
        }
        Ok(Spans {
            described: Arc::new(described),
            limits,
            owners: Mutex::new(Some(owners)),
        })
    }

    pub(crate) fn described(&self) -> &Arc<Described> {
        &self.described
    }

    /// What keeps the memory alive.
    pub(crate) fn owners(&self, py: Python<'_>) -> PyResult<Vec<Py<PyAny>>> {
        match &*self.owners.lock() {
            Some(owners) => Ok(owners.iter().map(|owner| owner.clone_ref(py)).collect()),
            // A finalizer has them still.
            None => Err(errors::input(
                py,
                "buffers",
                "Spans that are being garbage collected",
                "Spans whose owner still exists",
            )),
        }
    }
}

impl Described {
    fn nbytes(&self) -> u64 {
        self.each().saturating_mul(self.ids.len() as u64)
    }

    /// Of the ids that stand for memory.
    fn least_and_greatest(&self) -> Option<(i64, i64)> {
        let named = self.ids.iter().copied().filter(|id| *id >= 0);
        named.fold(None, |found, id| {
            let (low, high) = found.unwrap_or((id, id));
            Some((low.min(id), high.max(id)))
        })
    }

    /// Refuses ids of which `range` has no page, and pages outside of what owns them.
    fn check(
        &self,
        py: Python<'_>,
        index: usize,
        range: Range,
        bounds: &Bounds,
        places: Option<&[Place]>,
        (low, high): (i64, i64),
    ) -> PyResult<()> {
        let refuse = |wrong: &dyn Fn(i64) -> bool, allowed: String| {
            let at = self.ids.iter().position(|id| *id >= 0 && wrong(*id));
            let at = at.unwrap_or_default();
            let row = self.ends.partition_point(|end| *end <= at);
            Err(errors::input(
                py,
                format!("rows[{row}]"),
                self.ids[at],
                allowed,
            ))
        };
        let places = match bounds {
            Bounds::Pages(count, place) => {
                let beyond = |id: i64| id as u64 >= *count as u64;
                if beyond(high) {
                    return refuse(
                        &beyond,
                        format!("ids below {count}, the number of pages of ranges[{index}]"),
                    );
                }
                std::slice::from_ref(place)
            }
            Bounds::Owned => {
                if high > 0 && range.stride.unsigned_abs() < range.len {
                    return Err(errors::input(
                        py,
                        format!("ranges[{index}]"),
                        format!(
                            "a stride of {} for pages of {} bytes",
                            range.stride, range.len
                        ),
                        "a stride in bytes that is at least the length",
                    ));
                }
                let Some(places) = places else { return Ok(()) };
                places
            }
        };
        let inside = |place: &Place, id| place.holds(range.home, range.at(id), range.len as usize);
        // What lies between the two is inside too.
        if places
            .iter()
            .any(|place| inside(place, low) && inside(place, high))
        {
            return Ok(());
        }
        let outside = |id| !places.iter().any(|place| inside(place, id));
        if self.ids.iter().any(|id| *id >= 0 && outside(*id)) {
            let allowed =
                format!("ids whose page of ranges[{index}] is in the memory of its owner");
            return refuse(&outside, allowed);
        }
        Ok(())
    }

    /// The pieces of every block, neighbours joined. `scratch` says where bytes of negative ids
    /// go; without it they are refused.
    pub(crate) fn pieces(&self, scratch: Option<&mut Scratch>) -> Result<Vec<Vec<Raw>>, Refused> {
        let mut blocks = Vec::with_capacity(self.ends.len());
        let mut scratch = scratch;
        let mut first = 0;
        for (row, end) in self.ends.iter().enumerate() {
            let mut pieces: Vec<Raw> = Vec::new();
            for range in self.ranges.iter() {
                for id in &self.ids[first..*end] {
                    let piece = match (*id, scratch.as_deref_mut()) {
                        // Its memory was counted by the same ids and ranges.
                        (..0, Some(scratch)) => scratch.take(range.len as usize),
                        (..0, None) => {
                            return Err(Refused {
                                field: format!("rows[{row}]"),
                                value: id.to_string(),
                                allowed: "ids of 0 or more (negative ids only in destinations)",
                            });
                        }
                        (id, _) => range.piece(row, id)?,
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
        if let Some(device) = self.device {
            return Ok(Some(Scratch::Nowhere { device, used: 0 }));
        }
        let memory = usize::try_from(bytes).ok().and_then(zeroed);
        match memory {
            Some(memory) => Ok(Some(Scratch::Memory {
                memory: Buffer::from_vec(memory),
                used: 0,
            })),
            None => Err(errors::input(
                py,
                "rows",
                format!("negative ids for {bytes} bytes"),
                "at most as many as fit into memory",
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
    fn at(&self, id: i64) -> i128 {
        i128::from(self.addr) + i128::from(id) * i128::from(self.stride)
    }

    fn piece(&self, row: usize, id: i64) -> Result<Raw, Refused> {
        let at = self.at(id);
        let end = at + i128::from(self.len);
        match (usize::try_from(at), usize::try_from(end)) {
            (Ok(addr), Ok(_)) if addr > 0 => Ok(Raw {
                addr,
                len: self.len as usize,
                writable: self.writable,
                device: self.home.device(),
            }),
            _ => Err(Refused {
                field: format!("rows[{row}]"),
                value: id.to_string(),
                allowed: "ids whose page has a valid address",
            }),
        }
    }
}

fn push_joined(pieces: &mut Vec<Raw>, piece: Raw) {
    match pieces.last_mut() {
        Some(last) if last.addr + last.len == piece.addr && last.writable == piece.writable => {
            last.len += piece.len;
        }
        _ => pieces.push(piece),
    }
}

/// Where bytes go that nobody wants.
pub(crate) enum Scratch {
    Memory {
        memory: Buffer,
        used: usize,
    },
    /// Positions that a device does not have.
    Nowhere {
        device: i32,
        used: usize,
    },
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
        let (begin, used, device) = match self {
            Scratch::Memory { memory, used } => (memory.addr(), used, None),
            Scratch::Nowhere { device, used } => (Device::NOWHERE, used, Some(*device)),
        };
        let addr = begin + *used;
        *used += len;
        Raw {
            addr,
            len,
            writable: true,
            device,
        }
    }

    /// What keeps it.
    pub(crate) fn into_memory(self) -> Option<Buffer> {
        match self {
            Scratch::Memory { memory, .. } => Some(memory),
            Scratch::Nowhere { .. } => None,
        }
    }
}
