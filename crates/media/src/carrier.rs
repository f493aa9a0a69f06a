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

/// Something that carries bytes.
pub trait Carrier: Any + Send + Sync + fmt::Debug {
    /// What it can carry at once.
    fn alignment(&self) -> Alignment;

    /// Does what each of the receipts asks for, now or later, in any order. A panic drops those it
    /// still has, which fails them.
    ///
    /// It is called by a lane, so it should not wait. When a receipt says that its batch was
    /// cancelled, it may be given up.
    fn carry(self: Arc<Self>, receipts: Vec<Receipt>);

    /// Who does its work, as a number: of all regions of the slab only a part is with carriers of
    /// one, so that others find some when it does not come to them. By default each is its own.
    fn hands(&self) -> usize {
        std::ptr::from_ref(self).cast::<()>().addr()
    }

    /// Whether it takes longer than a lane would look out for what it does, as disks do.
    fn is_slow(&self) -> bool {
        false
    }

    /// Whether each request costs so much that neighbours are better asked for by one, as with a
    /// service that is paid by requests, than side by side.
    fn asks_seldom(&self) -> bool {
        false
    }

    /// Whether it reads memory past the processors' caches, as a device does: then lanes write past
    /// them, too.
    fn passes_caches(&self) -> bool {
        false
    }

    /// How many bytes a carry should have, where there are as many: what it costs by itself. Lanes
    /// then share less finely.
    fn carry_least(&self) -> u64 {
        0
    }

    /// How long it is waited for, from when it is asked for some bytes: what it does not report by
    /// then fails, and it is asked for nothing else meanwhile when it reports nothing at all. What
    /// it may still touch is a region of the slab, which nobody else gets before it has reported:
    /// all bytes of such a carrier go through the slab. What it may still write at its own end must
    /// be nobody else's by then. `None`: as long as it takes.
    fn patience(&self, _op: Op) -> Option<Duration> {
        None
    }

    /// Makes memory known to it that much will go through, for as long as the answer lives, which
    /// is less long than the memory. `None` when there is nothing to do, or it is refused: carrying
    /// is slower then, and right. Carriers of one type share what one of them has registered.
    fn register(self: Arc<Self>, _memory: &SlabMemory) -> Option<Registration> {
        None
    }

    /// Who registers memory for it, as a number that nobody else has while a registration lives.
    fn registrar(&self) -> usize {
        0
    }
}

/// Undoes a registration when it is dropped.
pub type Registration = Box<dyn Any + Send>;

/// All memory of a slab: mapped for as long as a registration of it lives.
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

    /// The address of its first byte.
    #[must_use]
    pub fn at(&self) -> usize {
        self.at
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: slabs have regions.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// What positions and lengths a carrier takes. All are powers of two of at most 4096.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a carrier makes one")]
pub struct Alignment {
    /// Positions and lengths are multiples of this.
    pub at: u64,
    /// Memory of callers that it takes as it is has addresses that are multiples of this; `None`
    /// when all is to go through the slab, whose regions it always takes.
    pub memory: Option<usize>,
}

impl Alignment {
    /// Anything.
    pub const NONE: Self = Self {
        at: 1,
        memory: Some(1),
    };
}

/// Which way bytes are carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a carrier does both")]
pub enum Op {
    /// From the carrier's end into memory.
    Read,
    /// From memory to the carrier's end.
    Write,
}

/// One range of bytes to be carried. It is reported once; dropping it reports a failure.
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

    /// Which way.
    #[must_use]
    pub fn op(&self) -> Op {
        self.op
    }

    /// The position at the carrier's end: an offset, an address there.
    #[must_use]
    pub fn at(&self) -> u64 {
        self.at
    }

    /// How many bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// How many of them are enough.
    pub(crate) fn least(&self) -> usize {
        self.least
    }

    /// Never: no receipt asks for nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The memory in this process: readable for [`Receipt::len`] bytes, and writable for
    /// [`Op::Read`], until this is reported or dropped. Others may change it at any moment.
    #[must_use]
    pub fn memory(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.memory)
    }

    /// Whether the batch was cancelled: nobody waits for these bytes.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.leg.as_ref().is_some_and(|leg| leg.is_cancelled())
    }

    /// The call that it is of, by a number that no other has at the same time.
    pub(crate) fn call(&self) -> usize {
        self.leg.as_ref().map_or(0, |leg| leg.call())
    }

    /// Copies `bytes` into the memory of a read, `offset` bytes behind its beginning.
    ///
    /// # Panics
    ///
    /// When they do not fit, or nothing is read.
    pub fn fill(&mut self, offset: usize, bytes: &[u8]) {
        assert!(self.op == Op::Read, "memory of a write is not written");
        self.check(offset, bytes.len());
        // SAFETY: just checked; `bytes` is a Rust reference, which is never to what is moved.
        unsafe {
            let to = self.memory().add(offset);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }

    /// Copies what is in the memory, from `offset` on, into `bytes`.
    ///
    /// # Panics
    ///
    /// When there is less than that.
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

    /// Says that the first `bytes` bytes have been carried. Fewer than were asked for are a
    /// failure, but for a read that was rounded up.
    pub fn carried(self, bytes: usize) {
        let missing = bytes < self.least;
        let (carried, asked) = (bytes as u64, self.least as u64);
        self.end(missing.then_some(Failure::Short { carried, asked }));
    }

    /// Says that they could not be carried.
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
