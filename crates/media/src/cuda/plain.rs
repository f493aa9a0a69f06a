//! Copies between pinned memory and a device by plain calls: what a strong straightforward program
//! would do, to measure against.

use super::context::Context;
use super::driver::Handle;
use super::{Device, Memory};
use crate::carrier::Op;
use crate::error::{Error, Result};
use kvdepot_plan::Span;
use std::sync::Arc;
use std::time::Instant;

/// Pinned memory of this process with CUDA streams, to measure a baseline.
#[derive(Debug)]
pub struct Pinned {
    device: Arc<Device>,
    /// Where it is, and how long.
    memory: *mut u8,
    len: usize,
    streams: Vec<Handle>,
    events: Vec<Handle>,
}

// SAFETY: the memory is this value's alone, and streams and events may be used by any thread.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Allocates `len` bytes of pinned memory and creates `streams` streams.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Io`] if there is too little memory or a driver call fails.
    pub fn new(device: &Arc<Device>, len: usize, streams: usize) -> Result<Self> {
        let context = &device.context;
        let _entered = context.enter()?;
        let memory = context.host_memory(len)?;
        let mut pinned = Self {
            device: Arc::clone(device),
            memory,
            len,
            streams: Vec::new(),
            events: Vec::new(),
        };
        for _ in 0..streams {
            pinned.streams.push(context.stream()?);
            pinned.events.push(context.event()?);
        }
        Ok(pinned)
    }

    /// Copies `pieces` between this memory and `there`, one driver call per piece, on `streams`
    /// streams in turn.
    ///
    /// Returns the duration in seconds. The source of a piece is an offset in this memory for a
    /// write, and in the device's memory for a read.
    ///
    /// # Errors
    ///
    /// [`crate::Error::OutOfBounds`] for a piece that exceeds either memory, and the errors of the
    /// driver.
    pub fn copy(&self, op: Op, there: &Memory, pieces: &[Span], streams: usize) -> Result<f64> {
        let context: &Context = &self.device.context;
        let _entered = context.enter()?;
        let streams = streams.clamp(1, self.streams.len().max(1));
        let begun = Instant::now();
        for (number, piece) in pieces.iter().enumerate() {
            let (here, far) = match op {
                Op::Write => (piece.src, piece.dst),
                Op::Read => (piece.dst, piece.src),
            };
            for (offset, end) in [(far, there.len()), (here, self.len)] {
                let (len, end) = (piece.len, end as u64);
                if offset.checked_add(len).is_none_or(|last| last > end) {
                    return Err(Error::OutOfBounds { offset, len, end });
                }
            }
            let memory = self.memory.wrapping_add(here as usize);
            let far = there.at() as u64 + far;
            let stream = self.streams[number % streams];
            // SAFETY: both ranges were just checked, and live until the events below are reached.
            unsafe { context.copy(stream, op, far, (memory, piece.len as usize)) }?;
        }
        for (stream, event) in self.streams.iter().zip(&self.events).take(streams) {
            context.record(*event, *stream)?;
        }
        for event in self.events.iter().take(streams) {
            context.reach(*event)?;
        }
        Ok(begun.elapsed().as_secs_f64())
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Ok(_entered) = self.device.context.enter() {
            let context = &self.device.context;
            self.events.iter().for_each(|event| context.forget(*event));
            self.streams.iter().for_each(|stream| context.end(*stream));
            context.give_host_back(self.memory);
        }
    }
}
