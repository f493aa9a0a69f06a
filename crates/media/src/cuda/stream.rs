//! A stream of kvdepot's own, and a thread that says what has come of what it was asked for.

use super::context::{Context, keep_context};
use super::driver::Handle;
use super::fence::Fence;
use super::pages::{Kernel, Page};
use crate::carrier::{Op, Receipt};
use crate::error::{Error, Failure, Result};
use crate::simulated::is_simulated;
use crate::tried::Tried;
use kvdepot_host::cpu;
use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Device memory of a stream, through which small pages go: as much as a region mostly has.
const RING: usize = 4 << 20;

/// Pages that are as long are copied one by one: each keeps the bus busy by itself.
const LARGE: usize = 1 << 20;

/// Pages lie one behind the other where no more than this is between them.
const GAP: usize = 512;

/// What all streams of a device use.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) context: Arc<Context>,
    kernel: Tried<Kernel, ()>,
    /// Bytes of the device that rings take.
    ring_bytes: AtomicU64,
    /// Carries that were brought, and may still touch the device.
    carries: AtomicUsize,
}

impl Shared {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Self {
            context,
            kernel: Tried::new(),
            ring_bytes: AtomicU64::new(0),
            carries: AtomicUsize::new(0),
        }
    }

    /// Carries that may still touch the device.
    pub(super) fn carries(&self) -> usize {
        self.carries.load(Ordering::Acquire)
    }

    pub(super) fn ring_bytes(&self) -> u64 {
        self.ring_bytes.load(Ordering::Relaxed)
    }

    /// `None` while the driver does not take it.
    fn kernel(&self) -> Option<&Kernel> {
        let load = || Kernel::load(&self.context).map_err(|_| ());
        self.kernel.get_or_make(load).ok()
    }
}

/// What is asked for of it happens one after the other. Whoever asks has entered the context.
#[derive(Debug)]
pub(super) struct Stream {
    shared: Arc<Shared>,
    asked: Arc<Asked>,
    /// Where its ring is.
    ring: Tried<u64, ()>,
}

/// What a stream shares with its thread.
#[derive(Debug)]
struct Asked {
    shared: Arc<Shared>,
    handle: Handle,
    work: Mutex<Work>,
    changed: Condvar,
}

// SAFETY: a stream and its events may be used by any thread; what belongs together is asked for by
// who has the stream for itself.
unsafe impl Send for Asked {}
// SAFETY: as above.
unsafe impl Sync for Asked {}

/// A carry, for as long as it may touch the device.
#[derive(Debug)]
pub(super) struct Counted(Arc<Shared>);

impl Counted {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        shared.carries.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(shared))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.carries.fetch_sub(1, Ordering::Release);
    }
}

/// Receipts that were asked for together.
#[derive(Debug)]
pub(super) struct Carried {
    /// Each, and whether all of it was.
    receipts: Vec<(Receipt, bool)>,
    counted: Counted,
}

#[derive(Debug, Default)]
struct Work {
    /// What was asked for, in order, and the event that ends each.
    carries: VecDeque<(Handle, Carried)>,
    /// The event that its thread waits for: nobody uses it again meanwhile.
    waited: Option<Handle>,
    /// Events that nobody uses. There are never more than carries under way at a time.
    spare: Vec<Handle>,
    ended: bool,
    /// Its ring, once it has ended.
    ring: Option<u64>,
}

impl Stream {
    /// Begins one, and its thread, which ends when the stream is dropped and all is reported.
    pub(super) fn begin(shared: &Arc<Shared>) -> Result<Self> {
        let asked = Arc::new(Asked {
            shared: Arc::clone(shared),
            handle: shared.context.stream()?,
            work: Mutex::default(),
            changed: Condvar::new(),
        });
        if !is_simulated() {
            let ran = Arc::clone(&asked);
            // Nobody joins it.
            let spawned = cpu::spawn("kvdepot-cuda", move || ran.run());
            spawned.map_err(|error| Error::io("start a thread for", "CUDA device", error))?;
        }
        let shared = Arc::clone(shared);
        Ok(Self {
            shared,
            asked,
            ring: Tried::new(),
        })
    }

    /// Lets it go on only behind a fence.
    pub(super) fn wait(&self, fence: &Fence) -> Result<()> {
        self.shared.context.wait(self.asked.handle, fence.event())
    }

    /// Asks for all, and for an event behind them. They go one way. `Err` has those of which
    /// nothing will happen.
    pub(super) fn carry(
        &self,
        receipts: Vec<Receipt>,
        counted: Counted,
    ) -> std::result::Result<(), Vec<Receipt>> {
        let shared = Arc::clone(&self.shared);
        let context = &shared.context;
        let spare = self.asked.work().spare.pop();
        let Ok(event) = spare.map_or_else(|| context.event(), Ok) else {
            return Err(receipts);
        };
        let mut whole = Vec::with_capacity(receipts.len());
        for group in groups(&receipts) {
            // SAFETY: a receipt's memory is readable or writable for its length until it is
            // reported, which is when the event has been reached; its position is the device's, as
            // whoever made the buffer promised.
            unsafe { self.ask(&receipts[group], &mut whole) };
        }
        if context.record(event, self.asked.handle).is_err() {
            // Nothing tells when they end but the end of all.
            context.synchronize(self.asked.handle);
            self.asked.work().spare.push(event);
            return Err(receipts);
        }
        let carried = Carried {
            receipts: receipts.into_iter().zip(whole).collect(),
            counted,
        };
        self.asked.work().carries.push_back((event, carried));
        self.asked.changed.notify_one();
        #[cfg(feature = "sim")]
        if let Some(schedule) = crate::sim::current() {
            let asked = Arc::clone(&self.asked);
            schedule.push(move |runs| asked.report_next(runs));
        }
        Ok(())
    }

    /// Asks for the copies of receipts that lie one behind the other in memory, and notes of each
    /// whether all of it was asked for. What was asked for of the others may still happen.
    ///
    /// # Safety
    ///
    /// The receipts live until the stream has done it, and their positions are the device's.
    unsafe fn ask(&self, receipts: &[Receipt], whole: &mut Vec<bool>) {
        let total: usize = receipts.iter().map(Receipt::len).sum();
        if receipts.len() > 1 && total / receipts.len() < LARGE {
            // SAFETY: the caller's promise.
            let done = unsafe {
                let done = self.ask_as_one(receipts).map(|done| done.is_ok());
                done.or_else(|| self.ask_at_once(receipts))
            };
            if let Some(done) = done {
                whole.extend(receipts.iter().map(|_| done));
                return;
            }
        }
        let context = &self.shared.context;
        for one in receipts {
            let memory = (one.memory(), one.len());
            // SAFETY: the caller's promise.
            let done = unsafe { context.copy(self.asked.handle, one.op(), one.at(), memory) };
            whole.push(done.is_ok());
        }
    }

    /// Through the ring. `None` where there is none, or no kernel.
    ///
    /// # Safety
    ///
    /// As above.
    unsafe fn ask_as_one(&self, receipts: &[Receipt]) -> Option<Result<()>> {
        let shared = Arc::clone(&self.shared);
        let (context, kernel) = (&shared.context, shared.kernel()?);
        let ring = self.ring()?;
        let first = receipts.first()?;
        let begin = first.memory().addr();
        let offset = |one: &Receipt| one.memory().addr() - begin;
        let pages: Vec<Page> = receipts
            .iter()
            .map(|one| Page {
                at: one.at(),
                // A group is no longer than the ring.
                offset: offset(one) as u32,
                len: one.len() as u32,
            })
            .collect();
        let len = receipts.last().map_or(0, |last| offset(last) + last.len());
        let copy = || {
            // SAFETY: all between the first and the last lies in one region, and is nobody else's
            // meanwhile; so is the ring, where the stream does one thing after the other.
            unsafe { context.copy(self.asked.handle, first.op(), ring, (first.memory(), len)) }
        };
        let launch = |gathers| {
            // SAFETY: the caller's promise; `groups` makes none that is longer than the ring.
            unsafe { kernel.launch(context, self.asked.handle, ring, &pages, gathers) }
        };
        Some(match first.op() {
            Op::Write => copy().and_then(|()| launch(false)),
            Op::Read => launch(true).and_then(|()| copy()),
        })
    }

    /// By one call. `None` where the driver has none for it, or does not take it: what it has taken
    /// of it is the same bytes once more.
    ///
    /// # Safety
    ///
    /// As above.
    unsafe fn ask_at_once(&self, receipts: &[Receipt]) -> Option<bool> {
        let driver = &self.shared.context.driver;
        let batch = driver.batch?;
        let mut there: Vec<u64> = receipts.iter().map(Receipt::at).collect();
        let mut here: Vec<u64> = receipts
            .iter()
            .map(|one| one.memory().addr() as u64)
            .collect();
        let mut lens: Vec<usize> = receipts.iter().map(Receipt::len).collect();
        let (to, from) = match receipts.first()?.op() {
            Op::Write => (&mut there, &mut here),
            Op::Read => (&mut here, &mut there),
        };
        // SAFETY: the caller's promise.
        let asked = unsafe { driver.copy_all(batch, (to, from, &mut lens), self.asked.handle) };
        asked.is_ok().then_some(true)
    }

    /// Returns true if the outcome of a copy is still to be reported.
    pub(super) fn is_busy(&self) -> bool {
        !self.asked.work().carries.is_empty()
    }

    /// What has ended by now, to be reported by who asks: nobody need be woken for it then. In a
    /// simulation it ends by steps.
    pub(super) fn take_ended(&self, ended: &mut Vec<Carried>) {
        if !is_simulated() {
            self.asked.take_ended(ended);
        }
    }

    /// `None` while the device has no room for one.
    fn ring(&self) -> Option<u64> {
        let take = || {
            let ring = self.shared.context.memory(RING).map_err(|_| ())?;
            self.shared
                .ring_bytes
                .fetch_add(RING as u64, Ordering::Relaxed);
            Ok(ring)
        };
        self.ring.get_or_make(take).ok().copied()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let mut work = self.asked.work();
        work.ended = true;
        work.ring = self.ring.get().copied();
        drop(work);
        self.asked.changed.notify_one();
    }
}

impl Asked {
    /// What its thread does: reports what has ended, unless who asks for more has seen it before.
    fn run(&self) {
        keep_context();
        let context = &self.shared.context;
        while let Some(event) = self.next() {
            let entered = context.enter();
            let reached = entered.and_then(|_entered| context.reach(event));
            let mut work = self.work();
            let is_next = work.carries.front().is_some_and(|(next, _)| *next == event);
            let carry = if is_next {
                work.carries.pop_front()
            } else {
                None
            };
            work.waited = None;
            work.spare.push(event);
            drop(work);
            carry
                .into_iter()
                .for_each(|(_, carry)| report(carry, reached.is_ok()));
        }
    }

    /// The event that ends what is reported next. It is waited for until `waited` is taken back.
    fn next(&self) -> Option<Handle> {
        let mut work = self.work();
        loop {
            if let Some((event, _)) = work.carries.front() {
                work.waited = Some(*event);
                return work.waited;
            }
            if work.ended {
                return None;
            }
            work = self
                .changed
                .wait(work)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// What has ended by now, to be reported by who asks.
    fn take_ended(&self, ended: &mut Vec<Carried>) {
        let mut work = self.work();
        while let Some((event, _)) = work.carries.front()
            && self.shared.context.has_reached(*event)
            && let Some((event, carry)) = work.carries.pop_front()
        {
            if work.waited != Some(event) {
                work.spare.push(event);
            }
            ended.push(carry);
        }
    }

    /// Reports one carry, as a step of a simulation.
    #[cfg(feature = "sim")]
    fn report_next(&self, has_worked: bool) {
        let next = self.work().carries.pop_front();
        if let Some((event, carry)) = next {
            let entered = self.shared.context.enter();
            let reached = entered.and_then(|_entered| self.shared.context.reach(event));
            self.work().spare.push(event);
            report(carry, has_worked && reached.is_ok());
        }
    }

    /// No code that runs under this lock can panic half way, so poison means nothing.
    fn work(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All is done and reported, and nobody has the stream any more.
impl Drop for Asked {
    fn drop(&mut self) {
        let context = &self.shared.context;
        let Ok(_entered) = context.enter() else {
            return;
        };
        context.end(self.handle);
        let work = std::mem::take(&mut *self.work());
        let spare = work.spare.into_iter();
        spare.for_each(|event| context.forget(event));
        if let Some(ring) = work.ring {
            context.give_back(ring);
            self.shared
                .ring_bytes
                .fetch_sub(RING as u64, Ordering::Relaxed);
        }
    }
}

/// Runs of receipts that lie one behind the other in memory and are no longer than the ring. What
/// is between them is not worth a copy of its own.
fn groups(receipts: &[Receipt]) -> Vec<Range<usize>> {
    let mut groups: Vec<Range<usize>> = Vec::new();
    let (mut begin, mut end) = (0, 0);
    for (number, one) in receipts.iter().enumerate() {
        let (at, len) = (one.memory().addr(), one.len());
        let goes_on = at >= end && at - end < GAP && at + len - begin <= RING;
        match groups.last_mut() {
            Some(group) if goes_on => group.end = number + 1,
            _ => {
                begin = at;
                groups.push(number..number + 1);
            }
        }
        end = at + len;
    }
    groups
}

/// Says what has become of a carry. What goes on with it may panic: others wait for this thread.
pub(super) fn report(carry: Carried, has_ended: bool) {
    let Carried { receipts, counted } = carry;
    // Whoever hears of the last of them may look whether the device rests.
    drop(counted);
    tell(receipts, has_ended);
}

fn tell(receipts: Vec<(Receipt, bool)>, has_ended: bool) {
    for (receipt, whole) in receipts {
        let len = receipt.len();
        let tell = || match whole && has_ended {
            true => receipt.carried(len),
            false => receipt.failed(Failure::Device),
        };
        drop(catch_unwind(AssertUnwindSafe(tell)));
    }
}

pub(super) fn refuse(receipts: Vec<Receipt>) {
    let receipts = receipts.into_iter().map(|receipt| (receipt, false));
    tell(receipts.collect(), false);
}
