//! What carries bytes between memory of this process and anywhere else.
//!
//! A carrier is asked by a [`Receipt`]: which bytes, from or to which memory. It may do it at once,
//! or keep the receipt until a thread, a ring, a device or a connection has done it. The receipt
//! holds everything that the carrier touches, the batch's buffers and the region of the slab, so
//! none of it is let go or used again before the receipt is reported or dropped.

use crate::error::Failure;
use crate::shm::Shm;
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// An I/O backend: code that moves bytes between memory of this process and a file, a device or a
/// connection.
pub trait Carrier: Any + Send + Sync + fmt::Debug {
    /// Returns the alignment that the backend requires.
    fn alignment(&self) -> Alignment;

    /// Executes the I/O requests in `receipts`, now or later, in any order.
    ///
    /// A copy thread calls this method, so it should not wait. The backend may skip a request whose
    /// batch was cancelled ([`Receipt::is_cancelled`]). A panic drops the remaining requests, which
    /// fails them.
    fn carry(self: Arc<Self>, receipts: Vec<Receipt>);

    /// Returns a number that identifies the workers of this backend, such as a ring or a set of
    /// threads.
    ///
    /// Backends with the same number share a limit on the staging regions that they hold at a time.
    /// So other backends still find regions if these workers are stuck. Default: a separate number
    /// for each backend.
    fn hands(&self) -> usize {
        std::ptr::from_ref(self).cast::<()>().addr()
    }

    /// Returns true if requests take longer than an idle copy thread polls for work, as for disks.
    fn is_slow(&self) -> bool {
        false
    }

    /// Returns true if requests are so expensive that one request for adjacent units is better than
    /// several parallel ones.
    ///
    /// This holds, for example, for a service that bills each request.
    fn asks_seldom(&self) -> bool {
        false
    }

    /// Returns true if the backend reads memory without the processor's caches, as a device does.
    /// Copy threads then write with streaming stores, too.
    fn passes_caches(&self) -> bool {
        false
    }

    /// Returns the minimum useful size of a request in bytes, below which its fixed cost dominates.
    ///
    /// If a batch is large enough, copy threads divide it less finely to reach this size.
    fn carry_least(&self) -> u64 {
        0
    }

    /// Returns the maximum time to wait for a request, or `None` for no limit.
    ///
    /// Requests that the backend has not reported by then fail. While the backend reports nothing
    /// at all, it gets no further requests.
    ///
    /// All bytes of a backend with a limit use the staging buffer. A late request can thus only
    /// access a staging region, and the region is reused only after the report. A late write may
    /// still change the medium, so the caller must not use the destination for other data.
    fn patience(&self, _op: Op) -> Option<Duration> {
        None
    }

    /// Registers memory that many transfers will use, for as long as the returned value lives. The
    /// memory outlives that value.
    ///
    /// Returns `None` if there is nothing to register or the registration fails; transfers are then
    /// slower but correct. Backends of one type and [registrar](Carrier::registrar) share one
    /// registration.
    fn register(self: Arc<Self>, _memory: &SlabMemory) -> Option<Registration> {
        None
    }

    /// Returns a number that identifies the object that registers memory for this backend. It is
    /// unique while a registration lives.
    fn registrar(&self) -> usize {
        0
    }
}

/// A registration of memory, which ends when it is dropped.
pub type Registration = Box<dyn Any + Send>;

/// The memory of the staging buffer, mapped for as long as a registration of it lives.
#[derive(Debug)]
pub struct SlabMemory {
    at: usize,
    len: usize,
    shm: Option<Arc<Shm>>,
}

impl SlabMemory {
    /// # Safety
    ///
    /// The memory is mapped for as long as what a carrier answers for it.
    pub(crate) unsafe fn new(at: usize, len: usize, shm: Option<Arc<Shm>>) -> Self {
        Self { at, len, shm }
    }

    /// What gives it a name, if it can have one.
    pub(crate) fn shm(&self) -> Option<&Arc<Shm>> {
        self.shm.as_ref()
    }

    /// Returns the address of the first byte.
    #[must_use]
    pub fn at(&self) -> usize {
        self.at
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns false: a staging buffer always has regions.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// The alignment that an I/O backend requires. Each value is a power of two, at most 4096.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a carrier makes one")]
pub struct Alignment {
    /// Alignment of positions and lengths, in bytes.
    pub at: u64,
    /// Alignment of caller memory that the backend can use directly, in bytes.
    ///
    /// `None` if all transfers must use the staging buffer, whose regions are always suitable.
    pub memory: Option<usize>,
}

impl Alignment {
    /// No alignment requirement.
    pub const NONE: Self = Self {
        at: 1,
        memory: Some(1),
    };
}

/// The direction of an I/O request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a carrier does both")]
pub enum Op {
    /// From the medium into memory.
    Read,
    /// From memory to the medium.
    Write,
}

/// One I/O request: a range of bytes to move. It is reported once; dropping it reports a failure.
pub struct Receipt {
    op: Op,
    at: u64,
    memory: usize,
    len: usize,
    /// Bytes that are enough: of a rounded range, what the batch wants of it.
    least: usize,
    /// Its number among those of its leg.
    number: usize,
    leg: Option<Arc<dyn Leg>>,
}

/// Receipts that were handed out together. What comes after them begins when the last is gone.
pub(crate) trait Leg: Send + Sync {
    /// Notes that the range of receipt `number` was not carried.
    fn failed(&self, number: usize, failure: Failure);

    /// Whether nobody waits for it any more.
    fn is_cancelled(&self) -> bool;

    /// The call that it is of, by a number that no other has at the same time.
    fn call(&self) -> usize {
        0
    }
}

impl Receipt {
    /// A receipt for `len` bytes at position `at`, of which the first `least` are enough.
    ///
    /// # Safety
    ///
    /// `memory` is readable, and writable for [`Op::Read`], for `len` bytes for as long as `leg`
    /// lives, and nobody else's.
    pub(crate) unsafe fn new(
        op: Op,
        at: u64,
        (memory, len): (usize, usize),
        least: usize,
        number: usize,
        leg: Arc<dyn Leg>,
    ) -> Self {
        Self {
            op,
            at,
            memory,
            len,
            least,
            number,
            leg: Some(leg),
        }
    }

    /// Returns the direction.
    #[must_use]
    pub fn op(&self) -> Op {
        self.op
    }

    /// Returns the position in the medium, for example an offset in a file.
    #[must_use]
    pub fn at(&self) -> u64 {
        self.at
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// How many of them are enough.
    pub(crate) fn least(&self) -> usize {
        self.least
    }

    /// Returns false: a request always has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of the memory in this process.
    ///
    /// It is readable for [`Receipt::len`] bytes, and writable for [`Op::Read`], until the request
    /// is reported or dropped. Other processes may change it at any moment.
    #[must_use]
    pub fn memory(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.memory)
    }

    /// Returns true if the batch was cancelled, so that nothing needs these bytes.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.leg.as_ref().is_some_and(|leg| leg.is_cancelled())
    }

    /// The call that it is of, by a number that no other has at the same time.
    pub(crate) fn call(&self) -> usize {
        self.leg.as_ref().map_or(0, |leg| leg.call())
    }

    /// Copies `bytes` into the memory of a read request, at `offset` from its start.
    ///
    /// # Panics
    ///
    /// If the bytes exceed the memory, or if the request is a write.
    pub fn fill(&mut self, offset: usize, bytes: &[u8]) {
        assert!(self.op == Op::Read, "memory of a write is not written");
        self.check(offset, bytes.len());
        // SAFETY: just checked; `bytes` is a Rust reference, which is never to what is moved.
        unsafe {
            let to = self.memory().add(offset);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }

    /// Copies the memory of the request, from `offset` on, into `bytes`.
    ///
    /// # Panics
    ///
    /// If `bytes` is longer than the memory from `offset` on.
    pub fn copy_to(&self, offset: usize, bytes: &mut [u8]) {
        self.check(offset, bytes.len());
        // SAFETY: as in `fill`.
        unsafe {
            let from = self.memory().add(offset);
            std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len());
        }
    }

    fn check(&self, offset: usize, len: usize) {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(fits, "{len} bytes at {offset} of {}", self.len);
    }

    /// Reports that the first `bytes` bytes have been moved.
    ///
    /// Fewer bytes than requested are a failure, except for a read that was rounded up.
    pub fn carried(self, bytes: usize) {
        let missing = bytes < self.least;
        let (carried, asked) = (bytes as u64, self.least as u64);
        self.end(missing.then_some(Failure::Short { carried, asked }));
    }

    /// Reports that the bytes could not be moved.
    pub fn failed(self, failure: Failure) {
        self.end(Some(failure));
    }

    fn end(mut self, failure: Option<Failure>) {
        let Some(leg) = self.leg.take() else { return };
        if let Some(failure) = failure {
            leg.failed(self.number, failure);
        }
    }
}

impl Drop for Receipt {
    fn drop(&mut self) {
        if let Some(leg) = self.leg.take() {
            leg.failed(self.number, Failure::Unanswered);
        }
    }
}

impl fmt::Debug for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receipt")
            .field("op", &self.op)
            .field("at", &self.at)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
