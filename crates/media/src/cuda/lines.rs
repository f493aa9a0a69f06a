//! Who carries bytes from and to a device's memory: streams for each way, which take turns, so that
//! one copies while a kernel spreads or gathers the pages of the other.

use super::Device;
use super::context::Context;
use super::fence::Fence;
use super::stream::{Shared, Stream, refuse};
use crate::carrier::{Alignment, Carrier, Op, Receipt, Registration, SlabMemory};
use crate::error::Result;
use kvdepot_host::fork::Origin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Streams for each way: lanes that hand over at once wait for one another at the same one.
const STREAMS: usize = 4;

/// Bytes that are worth a carry.
const CARRY_LEAST: u64 = 1 << 20;

/// A device answers in milliseconds. What it computes before may take seconds, and a copy that has
/// not come by then will not.
const PATIENCE: Duration = Duration::from_secs(120);

/// The streams of a device. Their threads end when it is dropped and all is reported.
#[derive(Debug)]
pub(super) struct Lines {
    shared: Arc<Shared>,
    /// For reads and for writes, when there was one to do, and whose turn it is.
    ways: Mutex<[Way; 2]>,
}

#[derive(Debug, Default)]
struct Way {
    streams: [Option<Arc<Stream>>; STREAMS],
    turn: usize,
}

impl Lines {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Self {
            shared: Arc::new(Shared::new(context)),
            ways: Mutex::default(),
        }
    }

    /// Bytes of the device that its rings take.
    pub(super) fn ring_bytes(&self) -> u64 {
        let ways = self.ways.lock().unwrap_or_else(PoisonError::into_inner);
        let streams = ways.iter().flat_map(|way| way.streams.iter().flatten());
        streams.map(|stream| stream.ring_bytes()).sum()
    }

    fn stream(&self, op: Op) -> Result<Arc<Stream>> {
        let mut ways = self.ways.lock().unwrap_or_else(PoisonError::into_inner);
        let way = &mut ways[usize::from(op == Op::Write)];
        way.turn = (way.turn + 1) % STREAMS;
        let stream = &mut way.streams[way.turn];
        if let Some(stream) = stream {
            return Ok(Arc::clone(stream));
        }
        let new = Stream::begin(&self.shared)?;
        Ok(Arc::clone(stream.insert(new)))
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        let ways = self.ways.get_mut().unwrap_or_else(PoisonError::into_inner);
        let streams = ways.iter().flat_map(|way| way.streams.iter().flatten());
        streams.for_each(|stream| stream.end());
    }
}

/// The carrier of some of a device's memory: all of it behind one fence, or behind none.
#[derive(Debug)]
pub(super) struct Ferry {
    pub(super) lines: Arc<Lines>,
    pub(super) fence: Option<Arc<Fence>>,
}

impl Carrier for Ferry {
    /// Memory of callers is pageable: the driver would copy it a second time, and wait with it.
    fn alignment(&self) -> Alignment {
        Alignment {
            at: 1,
            memory: None,
        }
    }

    fn carry(self: Arc<Self>, receipts: Vec<Receipt>) {
        let (gone, receipts): (Vec<_>, Vec<_>) = receipts
            .into_iter()
            .partition(|one| one.at() >= Device::NOWHERE as u64);
        let (reads, writes): (Vec<_>, Vec<_>) =
            receipts.into_iter().partition(|one| one.op() == Op::Read);
        for (op, receipts) in [(Op::Read, reads), (Op::Write, writes)] {
            if receipts.is_empty() {
                continue;
            }
            match self.lines.stream(op) {
                Ok(stream) => stream.carry(receipts, self.fence.as_deref()),
                Err(_) => refuse(receipts),
            }
        }
        for receipt in gone {
            let len = match receipt.op() {
                Op::Write => receipt.len(),
                Op::Read => 0,
            };
            receipt.carried(len);
        }
    }

    /// A carry costs calls of the driver's, which has one thread at a time in most of them.
    fn carry_least(&self) -> u64 {
        CARRY_LEAST
    }

    /// All memory of the device, behind whatever fence.
    fn hands(&self) -> usize {
        Arc::as_ptr(&self.lines).addr()
    }

    /// What is to come into a region is not waited for any longer. What is to leave one is: a page
    /// that was given up, and given to somebody else, might be written then.
    fn patience(&self, op: Op) -> Option<Duration> {
        (op == Op::Read).then_some(PATIENCE)
    }

    /// Pins it, so that the device reads and writes it without the driver's own copies. The driver
    /// may refuse, mostly because of a limit on locked memory.
    fn register(self: Arc<Self>, memory: &SlabMemory) -> Option<Registration> {
        let origin = Origin::here().ok()?;
        let (context, at) = (Arc::clone(&self.lines.shared.context), memory.at());
        // SAFETY: slab memory is mapped for as long as the registration lives.
        unsafe { context.pin(at, memory.len()) }.ok()?;
        PINNED.fetch_add(memory.len() as u64, Ordering::Relaxed);
        Some(Box::new(Pinned {
            context,
            at,
            len: memory.len() as u64,
            origin,
        }))
    }
}

/// Bytes that are pinned.
static PINNED: AtomicU64 = AtomicU64::new(0);

pub(super) fn pinned_bytes() -> u64 {
    PINNED.load(Ordering::Relaxed)
}

/// Memory that is pinned.
struct Pinned {
    context: Arc<Context>,
    at: usize,
    len: u64,
    origin: Origin,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // Otherwise the driver would take the addresses for pinned when they are others'. A forked
        // child has neither the memory nor the driver.
        if self.origin.is_here() {
            let _unpinned = self.context.unpin(self.at);
            PINNED.fetch_sub(self.len, Ordering::Relaxed);
        }
    }
}
