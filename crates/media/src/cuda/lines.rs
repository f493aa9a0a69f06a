//! Who carries bytes from and to a device's memory: streams for each way, which take turns, so that
//! one copies while a kernel spreads or gathers the pages of the other.
//!
//! The driver has one thread at a time in most of its calls, and threads that meet there wait for
//! one another longer than a call takes. So one of each way asks for all: who comes while somebody
//! does leaves what it has brought, and goes on.

use super::Device;
use super::context::Context;
use super::fence::Fence;
use super::stream::{Carried, Counted, Shared, Stream, refuse, report};
use crate::carrier::{Alignment, Carrier, Op, Receipt, Registration, SlabMemory};
use crate::error::Result;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

/// Streams for each way. The first never waits for a fence.
const STREAMS: usize = 4;

/// Carries that one thread asks for where another would go on with it, and that are left to others
/// before whoever brings more waits for its turn.
const TENURE: usize = 16;

/// Bytes that are worth a carry.
const CARRY_LEAST: u64 = 1 << 20;

/// A device answers in milliseconds. What it computes before may take seconds, and a copy that has
/// not come by then will not.
const PATIENCE: Duration = Duration::from_secs(120);

/// The streams of a device. Their threads end when it is dropped and all is reported.
#[derive(Debug)]
pub(super) struct Lines {
    shared: Arc<Shared>,
    /// For reads and for writes.
    desks: [Desk; 2],
}

impl Lines {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Self {
            shared: Arc::new(Shared::new(context)),
            desks: Default::default(),
        }
    }

    /// Bytes of the device that its rings take.
    pub(super) fn ring_bytes(&self) -> u64 {
        self.shared.ring_bytes()
    }

    /// Whether nothing that was brought is still to happen.
    pub(super) fn are_idle(&self) -> bool {
        self.shared.carries() == 0
    }
}

/// What is to be asked for together, one way.
#[derive(Debug)]
struct Carry {
    receipts: Vec<Receipt>,
    fence: Option<Arc<Fence>>,
    counted: Counted,
}

/// Where carries of one way are brought.
#[derive(Debug, Default)]
struct Desk {
    brought: Mutex<VecDeque<Carry>>,
    /// Had by who asks for what was brought.
    way: Mutex<Way>,
    /// Who waits to have it.
    waiting: AtomicUsize,
}

impl Desk {
    fn bring(&self, carry: Carry, shared: &Arc<Shared>) {
        let left = {
            let mut brought = lock(&self.brought);
            brought.push_back(carry);
            brought.len()
        };
        // Who has the way looks once more when it has let it go: nothing is left unseen.
        while let Some(way) = self.attend(left) {
            // Whoever is told may come back with more: nothing is locked then. And nobody waits for
            // what is asked for below, which may take the driver long.
            let ended = Self::ended(way, shared);
            ended.into_iter().for_each(|carry| report(carry, true));
            let Some(way) = self.attend(left) else {
                return;
            };
            refuse(self.ask(way, shared));
            let goes_on = self.waiting.load(Ordering::SeqCst) > 0;
            if goes_on || lock(&self.brought).is_empty() {
                return;
            }
        }
    }

    /// The way, unless somebody has it who will see what was brought.
    fn attend(&self, left: usize) -> Option<MutexGuard<'_, Way>> {
        match self.way.try_lock() {
            Ok(way) => return Some(way),
            Err(TryLockError::Poisoned(way)) => return Some(way.into_inner()),
            Err(TryLockError::WouldBlock) if left <= TENURE => return None,
            Err(TryLockError::WouldBlock) => {}
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let way = lock(&self.way);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        Some(way)
    }

    /// What has ended, and is to be reported.
    fn ended(way: MutexGuard<'_, Way>, shared: &Arc<Shared>) -> Vec<Carried> {
        let mut ended = Vec::new();
        let lines = way.lines.iter().flatten().map(|line| &line.stream);
        if lines.clone().any(Stream::is_busy)
            && let Ok(_entered) = shared.context.enter()
        {
            lines.for_each(|stream| stream.take_ended(&mut ended));
        }
        drop(way);
        ended
    }

    /// Asks for what was brought, some of it where others wait to go on; what was refused.
    fn ask(&self, mut way: MutexGuard<'_, Way>, shared: &Arc<Shared>) -> Vec<Receipt> {
        let mut refused = Vec::new();
        let entered = shared.context.enter();
        for asked in 0.. {
            if asked >= TENURE && self.waiting.load(Ordering::SeqCst) > 0 {
                break;
            }
            let Some(carry) = lock(&self.brought).pop_front() else {
                break;
            };
            match &entered {
                Ok(_) => refused.extend(way.ask(carry, shared).err().into_iter().flatten()),
                Err(_) => refused.extend(carry.receipts),
            }
        }
        refused
    }
}

/// The streams of one way, begun when there was something to do, and whose turn it is.
#[derive(Debug, Default)]
struct Way {
    lines: [Option<Line>; STREAMS],
    turn: usize,
}

#[derive(Debug)]
struct Line {
    stream: Stream,
    /// What it waits for, as far as is known.
    behind: Vec<Arc<Fence>>,
}

impl Way {
    fn ask(&mut self, carry: Carry, shared: &Arc<Shared>) -> std::result::Result<(), Vec<Receipt>> {
        let Carry {
            receipts,
            fence,
            counted,
        } = carry;
        let fence = fence.filter(|fence| !fence.is_reached());
        match self.line(fence.as_ref(), shared) {
            Ok(line) => line.stream.carry(receipts, counted),
            Err(_) => Err(receipts),
        }
    }

    /// A line that waits for this fence, or for none: nothing waits for a fence that is not its own
    /// as long as there are lines.
    fn line(&mut self, fence: Option<&Arc<Fence>>, shared: &Arc<Shared>) -> Result<&mut Line> {
        for line in self.lines.iter_mut().flatten() {
            line.behind.retain(|fence| !fence.is_reached());
        }
        self.turn = (self.turn + 1) % STREAMS;
        let turns = (0..STREAMS).map(|step| (self.turn + step) % STREAMS);
        let is_free = |number: &usize| {
            let line = self.lines[*number].as_ref();
            line.is_none_or(|line| line.behind.is_empty())
        };
        let number = match fence {
            None => turns.clone().find(is_free),
            Some(fence) => {
                let waits = |line: &Line| line.behind.iter().any(|known| Arc::ptr_eq(known, fence));
                let waits = |line: &Option<Line>| line.as_ref().is_some_and(waits);
                let known = self.lines.iter().position(waits);
                known.or_else(|| turns.clone().filter(|number| *number > 0).find(is_free))
            }
        };
        let number = number.unwrap_or(1 + self.turn % (STREAMS - 1));
        let line = match &mut self.lines[number] {
            Some(line) => line,
            none => none.insert(Line {
                stream: Stream::begin(shared)?,
                behind: Vec::new(),
            }),
        };
        if let Some(fence) = fence
            && !line.behind.iter().any(|known| Arc::ptr_eq(known, fence))
        {
            line.stream.wait(fence)?;
            line.behind.push(Arc::clone(fence));
        }
        Ok(line)
    }
}

/// Nothing is half done where a panic poisons these: what was brought is there for who comes next.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
            let fence = self.fence.as_ref().map(Arc::clone);
            let desk = &self.lines.desks[usize::from(op == Op::Write)];
            let shared = &self.lines.shared;
            let carry = Carry {
                receipts,
                fence,
                counted: Counted::new(shared),
            };
            desk.bring(carry, shared);
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

    fn passes_caches(&self) -> bool {
        true
    }

    /// All memory of the device; what is behind a fence still, by itself: it takes as long as the
    /// device computes, and the rest goes on meanwhile.
    fn hands(&self) -> usize {
        let fence = self.fence.as_ref().filter(|fence| !fence.was_reached());
        let waits = fence.is_some_and(|fence| {
            let entered = self.lines.shared.context.enter();
            entered.is_ok_and(|_entered| !fence.is_reached())
        });
        Arc::as_ptr(&self.lines).addr() + usize::from(waits)
    }

    /// What is to come into a region is not waited for any longer. What is to leave one is: a page
    /// that was given up, and given to somebody else, might be written then.
    fn patience(&self, op: Op) -> Option<Duration> {
        (op == Op::Read).then_some(PATIENCE)
    }

    /// Pins it, so that the device reads and writes it without the driver's own copies. The driver
    /// may refuse, mostly because of a limit on locked memory.
    fn register(self: Arc<Self>, memory: &SlabMemory) -> Option<Registration> {
        let (context, at) = (Arc::clone(&self.lines.shared.context), memory.at());
        // SAFETY: slab memory is mapped for as long as the registration lives.
        unsafe { context.pin(at, memory.len()) }.ok()?;
        PINNED.fetch_add(memory.len() as u64, Ordering::Relaxed);
        Some(Box::new(Pinned {
            context,
            at,
            len: memory.len() as u64,
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
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // Otherwise the driver would take the addresses for pinned when they are others'.
        let _unpinned = self.context.unpin(self.at);
        PINNED.fetch_sub(self.len, Ordering::Relaxed);
    }
}
