//! The caller's memory: objects with the buffer protocol or DLPack, (address, length) pairs,
//! or one [`Spans`].

use std::any::Any;
use std::sync::Arc;

use kvdepot_store::{BlockBuffers, Buffer, Device};
use pyo3::prelude::*;
use pyo3::types::{PyMemoryView, PyTuple};

use crate::keep::{Hold, Keep};
use crate::memory::Raw;
use crate::spans::{Scratch, Spans};
use crate::view::View;
use crate::{cuda_array, dlpack, errors, storage};

const ALLOWED: &str = "contiguous memory: an object with the buffer protocol or DLPack, or an \
                       (address, length) pair";

const PAIR: &str = "an (address, length) pair whose memory begins above 0 and ends below 2^64";

/// The memory of a call and what keeps it alive.
pub(crate) struct Parsed {
    pub(crate) blocks: BlockBuffers,
    pub(crate) keep: Arc<Keep>,
}

/// What every piece of a call holds.
struct Owner {
    _hold: Hold,
    _scratch: Option<Buffer>,
}

/// Reads the buffers of a call. `written` says that they are destinations.
pub(crate) fn parse(buffers: &Bound<'_, PyAny>, written: bool) -> PyResult<Parsed> {
    let py = buffers.py();
    if let Ok(spans) = buffers.cast::<Spans>() {
        let spans = spans.get();
        let mut scratch = match written {
            true => spans.scratch(py)?,
            false => None,
        };
        let pieces = spans.pieces(py, scratch.as_mut())?;
        let objects = spans.owners(py)?;
        return assemble(py, pieces, objects, scratch);
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
        pieces.push([one(index, &item?, &mut objects)?]);
    }
    assemble(py, pieces, objects, None)
}

fn assemble<P: AsRef<[Raw]>>(
    py: Python<'_>,
    pieces: Vec<P>,
    objects: Vec<Py<PyAny>>,
    scratch: Option<Scratch>,
) -> PyResult<Parsed> {
    let mut devices = Vec::new();
    for (index, block) in pieces.iter().enumerate() {
        for device in block.as_ref().iter().filter_map(|raw| raw.device) {
            if devices.iter().any(|(known, _)| *known == device) {
                continue;
            }
            let opened = Device::open(device).map_err(|error| {
                errors::input(py, format!("buffers[{index}]"), error.to_string(), ALLOWED)
            })?;
            devices.push((device, opened));
        }
    }
    let keep = Keep::new(objects);
    let owner: Arc<dyn Any + Send + Sync> = Arc::new(Owner {
        _hold: Hold(Arc::clone(&keep)),
        _scratch: scratch.map(|scratch| scratch.memory),
    });
    let mut blocks = BlockBuffers::default();
    for block in &pieces {
        let mut buffers = Vec::with_capacity(block.as_ref().len());
        for raw in block.as_ref() {
            let owner = Arc::clone(&owner);
            let device = devices.iter().find(|(known, _)| Some(*known) == raw.device);
            let device = device.map(|(_, device)| Arc::clone(device));
            // SAFETY: each range was described by a Python object that `keep` holds, with the
            // storage behind it, through the buffer protocol or DLPack, lies in the scratch
            // memory that `owner` holds, or was named by the caller as an address, who answers
            // for it by the documented contract of (address, length) pairs and Spans. The keep
            // is emptied only when no lane touches the memory any more. No Rust reference to the
            // bytes is ever made here.
            buffers.push(unsafe {
                match device {
                    None => Buffer::from_raw(raw.addr, raw.len, raw.writable, owner),
                    Some(device) => {
                        let buffer = Buffer::on_device(raw.addr, raw.len, owner, device);
                        if raw.writable {
                            buffer
                        } else {
                            buffer.read_only()
                        }
                    }
                }
            });
        }
        blocks.push(buffers);
    }
    Ok(Parsed { blocks, keep })
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
