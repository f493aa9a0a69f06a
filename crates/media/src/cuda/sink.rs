//! The way from a lane's desks to a device.

use super::{Device, Entered, Stream};
use crate::error::Result;
use crate::memory::mover::WAYS;
use crate::memory::staged::Stage;

/// Where a piece of a stream's copies begins: the alignment that devices copy fastest from.
const ALIGN: usize = 256;

/// Desks whose bytes a stream carries to a device. A desk has one or two halves: the lane fills
/// one while the device reads the other, and waits for the device before it fills one again.
pub(crate) struct Sink<'a> {
    device: &'a Device,
    stream: Option<Stream>,
    desks: [Desk; WAYS],
    /// Bytes of a half.
    len: usize,
    halves: Vec<*mut u8>,
    error: Result<()>,
    /// The last to go: everything above needs the device.
    _entered: Option<Entered<'a>>,
}

#[derive(Clone, Copy, Default)]
struct Desk {
    half: usize,
    used: usize,
    /// Where in the half begins what has not been handed to the stream.
    begin: usize,
    /// Halves that the stream has been given, as bits.
    busy: u8,
}

impl<'a> Sink<'a> {
    /// Desks in one or two regions of `len` bytes each.
    ///
    /// # Safety
    ///
    /// The regions are writable and nobody else's for as long as this lives.
    pub(crate) unsafe fn new(device: &'a Device, regions: &[*mut u8], len: usize) -> Self {
        let begun = device.enter().and_then(|entered| {
            let stream = device.stream(WAYS * regions.len())?;
            Ok((entered, stream))
        });
        let (entered, stream, error) = match begun {
            Ok((entered, stream)) => (Some(entered), Some(stream), Ok(())),
            Err(error) => (None, None, Err(error)),
        };
        Self {
            device,
            stream,
            desks: [Desk::default(); WAYS],
            len: len / WAYS / 1024 * 1024,
            halves: regions.to_vec(),
            error,
            _entered: entered,
        }
    }

    /// Waits until the device has everything.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.wait();
        std::mem::replace(&mut self.error, Ok(()))
    }

    /// Waits for the stream; its end is the end of every use of the regions.
    fn wait(&mut self) {
        let Some(stream) = self.stream.take() else {
            return;
        };
        // SAFETY: a stream of this device.
        let ended = unsafe { (self.device.driver.cuStreamSynchronize)(stream.handle) };
        self.note("cuStreamSynchronize", ended);
        self.device.streams().push(stream);
    }

    /// Keeps the first error.
    fn note(&mut self, function: &'static str, code: i32) {
        let checked = self.device.driver.check(function, code);
        if self.error.is_ok() {
            self.error = checked;
        }
    }

    fn half(&self, way: usize) -> *mut u8 {
        self.halves[self.desks[way].half].wrapping_add(way * self.len)
    }

    /// Hands what has come to a desk since the last time to the stream.
    ///
    /// # Safety
    ///
    /// `dst` is where it goes on the device, and writable.
    unsafe fn send(&mut self, way: usize, dst: u64) {
        let Desk { used, begin, .. } = self.desks[way];
        let (from, handle) = (self.half(way).wrapping_add(begin), self.handle());
        // After an error nothing more is sent: the bytes could not be told from those that arrived.
        if self.error.is_ok()
            && let Some(handle) = handle
        {
            let copy = self.device.driver.cuMemcpyHtoDAsync_v2;
            // SAFETY: the half holds the bytes until the stream is waited for; the rest is the
            // caller's promise.
            let sent = unsafe { copy(dst, from.cast(), used - begin, handle) };
            self.note("cuMemcpyHtoDAsync", sent);
        }
    }

    fn handle(&self) -> Option<super::Handle> {
        self.stream.as_ref().map(|stream| stream.handle)
    }

    /// Goes on with the other half, once the device has read it.
    fn turn(&mut self, way: usize) {
        let halves = self.halves.len();
        let desk = self.desks[way];
        self.record(way * halves + desk.half);
        let next = (desk.half + 1) % halves;
        let busy = desk.busy | 1 << desk.half;
        if busy & 1 << next != 0 {
            self.await_event(way * halves + next);
        }
        self.desks[way] = Desk {
            half: next,
            used: 0,
            begin: 0,
            busy: busy & !(1 << next),
        };
    }

    fn record(&mut self, event: usize) {
        if let Some(stream) = &self.stream {
            let (event, handle) = (stream.events[event], stream.handle);
            // SAFETY: both are this device's.
            let recorded = unsafe { (self.device.driver.cuEventRecord)(event, handle) };
            self.note("cuEventRecord", recorded);
        }
    }

    fn await_event(&mut self, event: usize) {
        if let Some(stream) = &self.stream {
            let event = stream.events[event];
            // SAFETY: it is this device's, and was recorded.
            let reached = unsafe { (self.device.driver.cuEventSynchronize)(event) };
            self.note("cuEventSynchronize", reached);
        }
    }
}

impl Stage for Sink<'_> {
    fn is_between(&self) -> bool {
        true
    }

    fn desk(&self, way: usize) -> *mut u8 {
        self.half(way).wrapping_add(self.desks[way].used)
    }

    fn room(&self, way: usize) -> u64 {
        (self.len - self.desks[way].used) as u64
    }

    unsafe fn arrived(
        &mut self,
        way: usize,
        dst: u64,
        bytes: u64,
        ends: bool,
        _streams: bool,
        _next: *const u8,
    ) {
        let desk = &mut self.desks[way];
        // What was not sent belongs to one place, which began where the first of it goes.
        let dst = dst - (desk.used - desk.begin) as u64;
        desk.used += bytes as usize;
        let full = desk.used == self.len;
        if !ends && !full {
            return;
        }
        // SAFETY: the caller's promise.
        unsafe { self.send(way, dst) };
        let desk = &mut self.desks[way];
        desk.used = desk.used.next_multiple_of(ALIGN).min(self.len);
        desk.begin = desk.used;
        if desk.used == self.len {
            self.turn(way);
        }
    }
}

impl Drop for Sink<'_> {
    fn drop(&mut self) {
        // Also when the lane panics: the regions are given back after this.
        self.wait();
    }
}
