//! The caller's memory: objects with the buffer protocol or DLPack, (address, length) pairs,
//! or one [`Spans`].

use std::any::Any;
use std::sync::Arc;

use kvdepot_store::{BlockBuffers, Buffer, Device, Fence, MediaError};
use pyo3::prelude::*;
use pyo3::types::{PyMemoryView, PyTuple};

use crate::errors::Refused;
use crate::keep::{Hold, Keep};
use crate::memory::Raw;
use crate::spans::{Described, Scratch, Spans};
use crate::view::View;
use crate::{cuda_array, dlpack, errors, storage};

const ALLOWED: &str = "contiguous memory: an object with the buffer protocol or DLPack, or an \
                       (address, length) pair";

const PAIR: &str = "an (address, length) pair whose memory starts above 0 and ends below 2^64";

/// The memory of a call and what keeps it alive.
pub(crate) struct Parsed {
    pub(crate) blocks: BlockBuffers,
    pub(crate) keep: Arc<Keep>,
}

/// The same before a buffer was made of each piece, which needs no interpreter.
pub(crate) struct Given {
    pub(crate) keep: Arc<Keep>,
    made: Made,
}

enum Made {
    Blocks(BlockBuffers),
    Spans(Unmade),
}

/// What buffers of spans are made of.
struct Unmade {
    described: Arc<Described>,
    scratch: Option<Scratch>,
    hold: Hold,
    device: OnDevice,
}

/// The device that memory is of, and the moment of its stream that is waited for.
type OnDevice = Option<(Arc<Device>, Option<Arc<Fence>>)>;

/// What every piece of a call holds.
struct Owner {
    _hold: Hold,
    _scratch: Option<Buffer>,
}

impl Given {
    /// A buffer of each piece.
    pub(crate) fn blocks(self) -> Result<BlockBuffers, Refused> {
        match self.made {
            Made::Blocks(blocks) => Ok(blocks),
            Made::Spans(unmade) => unmade.make(),
        }
    }
}

impl Unmade {
    fn make(self) -> Result<BlockBuffers, Refused> {
        let mut scratch = self.scratch;
        let pieces = self.described.pieces(scratch.as_mut())?;
        let owner: Arc<dyn Any + Send + Sync> = Arc::new(Owner {
            _hold: self.hold,
            _scratch: scratch.and_then(Scratch::into_memory),
        });
        let mut blocks = BlockBuffers::default();
        for block in &pieces {
            let each = block.iter().map(|raw| buffer(raw, &owner, &self.device));
            blocks.push(each.collect::<Vec<_>>());
        }
        Ok(blocks)
    }
}

/// The memory of a piece, which `owner` keeps.
fn buffer(raw: &Raw, owner: &Arc<dyn Any + Send + Sync>, device: &OnDevice) -> Buffer {
    let owner = Arc::clone(owner);
    // SAFETY: each range was described by a Python object that the owner's keep holds, with the
    // storage behind it, through the buffer protocol or DLPack, lies in the scratch memory that the
    // owner holds, or was named by the caller as an address, who answers for it by the documented
    // contract of (address, length) pairs and Spans. The keep is emptied only when no lane touches
    // the memory any more. No Rust reference to the bytes is ever made here.
    unsafe {
        let Some((device, fence)) = device else {
            return Buffer::from_raw(raw.addr, raw.len, raw.writable, owner);
        };
        let mut buffer = Buffer::on_device(raw.addr, raw.len, owner, Arc::clone(device));
        if let Some(fence) = fence {
            buffer = buffer.behind(fence);
        }
        match raw.writable {
            true => buffer,
            false => buffer.read_only(),
        }
    }
}

/// Reads the buffers of a call. `written` says that they are destinations.
pub(crate) fn parse(buffers: &Bound<'_, PyAny>, written: bool) -> PyResult<Parsed> {
    let given = read(buffers, written)?;
    let keep = Arc::clone(&given.keep);
    let blocks = given.blocks();
    let blocks = blocks.map_err(|refused| refused.raise(buffers.py()))?;
    Ok(Parsed { blocks, keep })
}

/// The same, with what needs no interpreter left for later. A stream that is named is waited for as
/// it is now.
pub(crate) fn read(buffers: &Bound<'_, PyAny>, written: bool) -> PyResult<Given> {
    let py = buffers.py();
    if let Ok(spans) = buffers.cast::<Spans>() {
        let spans = spans.get();
        let described = spans.described();
        let scratch = match written {
            true => described.scratch(py)?,
            false => None,
        };
        let device = match described.device {
            Some(device) => Some(open(py, device, "ranges[0]", described.stream)?),
            None => None,
        };
        let keep = Keep::new(spans.owners(py)?);
        let made = Made::Spans(Unmade {
            described: Arc::clone(described),
            scratch,
            hold: Hold(Arc::clone(&keep)),
            device,
        });
        return Ok(Given { keep, made });
    }
    let Ok(items) = buffers.try_iter() else {
        return Err(errors::input(
            py,
            "buffers",
            errors::shown(buffers),
            "a sequence of buffers, or Spans",
        ));
    };
    let mut pieces = Vec::new();
    let mut objects = Vec::new();
    for (index, item) in items.enumerate() {
        pieces.push(one(index, &item?, &mut objects)?);
    }
    let mut devices: Vec<(i32, OnDevice)> = Vec::new();
    for (index, raw) in pieces.iter().enumerate() {
        let Some(device) = raw.device else { continue };
        if devices.iter().all(|(known, _)| *known != device) {
            let opened = open(py, device, &format!("buffers[{index}]"), None)?;
            devices.push((device, Some(opened)));
        }
    }
    let keep = Keep::new(objects);
    let owner: Arc<dyn Any + Send + Sync> = Arc::new(Owner {
        _hold: Hold(Arc::clone(&keep)),
        _scratch: None,
    });
    let blocks = pieces.iter().map(|raw| {
        let device = devices.iter().find(|(known, _)| Some(*known) == raw.device);
        buffer(raw, &owner, device.map_or(&None, |(_, device)| device))
    });
    let made = Made::Blocks(BlockBuffers::whole(blocks));
    Ok(Given { keep, made })
}

/// A device, and this moment of one of its streams.
fn open(
    py: Python<'_>,
    device: i32,
    field: &str,
    stream: Option<usize>,
) -> PyResult<(Arc<Device>, Option<Arc<Fence>>)> {
    let opened = Device::open(device).map_err(|error| match error {
        MediaError::NoDevice { ordinal, allowed } => errors::input(py, "device", ordinal, allowed),
        other => errors::input(
            py,
            field,
            format!("memory of CUDA device {device} ({other})"),
            "host memory, or memory of a CUDA device whose driver is available",
        ),
    })?;
    // SAFETY: the caller answers for it, by the contract of Spans.
    let fence = stream.map(|stream| unsafe { opened.fence(stream) });
    let fence = fence.transpose().map_err(|error| {
        errors::input(
            py,
            "stream",
            error.to_string(),
            "the handle of a stream of the device",
        )
    })?;
    Ok((opened, fence))
}

fn one(index: usize, item: &Bound<'_, PyAny>, objects: &mut Vec<Py<PyAny>>) -> PyResult<Raw> {
    let py = item.py();
    let wrong = |value: String| errors::input(py, format!("buffers[{index}]"), value, ALLOWED);
    if let Ok(pair) = item.cast::<PyTuple>() {
        let read = pair.extract::<(usize, usize)>().ok();
        let Some((addr, len)) =
            read.filter(|(addr, len)| *addr > 0 && addr.checked_add(*len).is_some())
        else {
            let field = format!("buffers[{index}]");
            return Err(errors::input(py, field, errors::shown(item), PAIR));
        };
        return Ok(Raw {
            addr,
            len,
            writable: true,
            device: None,
        });
    }
    // A memory view holds the exporter's memory in place, and unlike a bare Py_buffer it can be
    // let go by dropping a reference.
    if let Ok(view) = PyMemoryView::from(item) {
        let buffer = View::of(&view).map_err(|error| wrong(error.value(py).to_string()))?;
        let Some(buffer) = buffer else {
            return Err(wrong("a buffer with gaps".into()));
        };
        let raw = Raw {
            addr: buffer.addr(),
            len: buffer.len(),
            writable: buffer.is_writable(),
            device: None,
        };
        objects.push(view.into_any().unbind());
        return Ok(raw);
    }
    if let Some(raw) = cuda_array::memory(item).map_err(wrong)? {
        storage::keep(item, raw.addr, raw.len, objects).map_err(wrong)?;
        objects.push(item.clone().unbind());
        return Ok(raw);
    }
    let capsule = dlpack::capsule(item).map_err(wrong)?;
    let (raw, tensor) = dlpack::consume(&capsule).map_err(wrong)?;
    objects.push(tensor);
    storage::keep(item, raw.addr, raw.len, objects).map_err(wrong)?;
    Ok(raw)
}
