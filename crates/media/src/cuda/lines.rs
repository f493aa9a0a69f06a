//! How bytes reach a device's memory and come back: a stream for each way, and a thread that waits
//! for what it was asked for.

use super::context::Context;
use super::driver::Handle;
use crate::carrier::{Alignment, Carrier, Op, Receipt, Registration, SlabMemory};
use crate::error::{Error, Failure, Result};
use kvdepot_host::fork::Origin;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// What carries to and from a device. Its threads end when it is dropped and all is reported.
#[derive(Debug)]
pub(super) struct Lines {
    context: Arc<Context>,
    /// One for reads, one for writes, when there was one to do.
    lines: Mutex<[Option<Arc<Line>>; 2]>,
}

/// One way, in order.
#[derive(Debug)]
struct Line {
    context: Arc<Context>,
    stream: Handle,
    work: Mutex<Work>,
    changed: Condvar,
}

// SAFETY: a stream and its events may be used by any thread; each call is made under `work`'s lock,
// but for waiting for an event, which only this line's thread does.
unsafe impl Send for Line {}
// SAFETY: as above.
unsafe impl Sync for Line {}

#[derive(Debug, Default)]
struct Work {
    /// Events that end what was asked for, in order.
    asked: VecDeque<(Handle, Vec<Receipt>)>,
    /// Events that nobody uses. There are never more than calls under way at a time.
    spare: Vec<Handle>,
    ended: bool,
}

impl Lines {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Self {
            context,
            lines: Mutex::default(),
        }
    }

    fn line(&self, op: Op) -> Result<Arc<Line>> {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let line = &mut lines[usize::from(op == Op::Write)];
        if let Some(line) = line {
            return Ok(Arc::clone(line));
        }
        let new = Line::begin(&self.context)?;
        Ok(Arc::clone(line.insert(new)))
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        let lines = self.lines.get_mut().unwrap_or_else(PoisonError::into_inner);
        for line in lines.iter().flatten() {
            line.work().ended = true;
            line.changed.notify_one();
        }
    }
}

impl Carrier for Lines {
    /// Memory of callers is pageable: the driver would copy it a second time, and wait with it.
    fn alignment(&self) -> Alignment {
        Alignment {
            at: 1,
            memory: None,
        }
    }

    fn carry(self: Arc<Self>, receipts: Vec<Receipt>) {
        let (reads, writes) = receipts.into_iter().partition(|one| one.op() == Op::Read);
        for (op, receipts) in [(Op::Read, reads), (Op::Write, writes)] {
            let receipts: Vec<Receipt> = receipts;
            if receipts.is_empty() {
                continue;
            }
            match self.line(op) {
                Ok(line) => line.carry(receipts),
                Err(_) => refuse(receipts),
            }
        }
    }

    /// Pins it, so that the device reads and writes it without the driver's own copies. The driver
    /// may refuse, mostly because of a limit on locked memory.
    fn register(self: Arc<Self>, memory: &SlabMemory) -> Option<Registration> {
        let origin = Origin::here().ok()?;
        let (context, at) = (Arc::clone(&self.context), memory.at());
        // SAFETY: slab memory is mapped for as long as the registration lives.
        unsafe { context.pin(at, memory.len()) }.ok()?;
        let pinned = Pinned {
            context,
            at,
            origin,
        };
        Some(Box::new(pinned))
    }
}

/// Memory that is pinned.
struct Pinned {
    context: Arc<Context>,
    at: usize,
    origin: Origin,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // Otherwise the driver would take the addresses for pinned when they are others'. A forked
        // child has neither the memory nor the driver.
        if self.origin.is_here() {
            let _unpinned = self.context.unpin(self.at);
        }
    }
}

impl Line {
    fn begin(context: &Arc<Context>) -> Result<Arc<Self>> {
        let stream = {
            let _entered = context.enter()?;
            context.stream()?
        };
        let line = Arc::new(Self {
            context: Arc::clone(context),
            stream,
            work: Mutex::default(),
            changed: Condvar::new(),
        });
        let ran = Arc::clone(&line);
        let thread = std::thread::Builder::new().name("kvdepot-cuda".to_owned());
        let spawned = thread.spawn(move || ran.run());
        // It ends by itself: nobody joins it.
        spawned.map_err(|error| Error::io("start a thread", "CUDA device", error))?;
        Ok(line)
    }

    /// Asks for all, and for an event behind them.
    fn carry(&self, receipts: Vec<Receipt>) {
        let Ok(_entered) = self.context.enter() else {
            return refuse(receipts);
        };
        let mut work = self.work();
        let spare = work.spare.pop();
        let Ok(event) = spare.map_or_else(|| self.context.event(), Ok) else {
            drop(work);
            return refuse(receipts);
        };
        // SAFETY: a receipt's memory is readable or writable for its length until it is reported,
        // which is when the event has been reached; its position is the device's, as whoever made
        // the buffer promised.
        let asked = |one: &Receipt| unsafe { self.context.copy(self.stream, one) }.is_ok();
        let (mut asked, mut refused): (Vec<_>, Vec<_>) = receipts.into_iter().partition(asked);
        if !asked.is_empty() && self.context.record(event, self.stream).is_err() {
            // Nothing tells when they end but the end of all.
            self.context.synchronize(self.stream);
            refused.append(&mut asked);
        }
        match asked.is_empty() {
            true => work.spare.push(event),
            false => work.asked.push_back((event, asked)),
        }
        drop(work);
        self.changed.notify_one();
        refuse(refused);
    }

    /// What the line's thread does: reports what has ended.
    fn run(&self) {
        while let Some((event, receipts)) = self.next() {
            let reached = self
                .context
                .enter()
                .and_then(|_entered| self.context.reach(event));
            self.work().spare.push(event);
            match reached {
                Ok(()) => receipts.into_iter().for_each(|receipt| {
                    let len = receipt.len();
                    receipt.carried(len);
                }),
                Err(_) => refuse(receipts),
            }
        }
    }

    fn next(&self) -> Option<(Handle, Vec<Receipt>)> {
        let mut work = self.work();
        loop {
            if let Some(asked) = work.asked.pop_front() {
                return Some(asked);
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

    /// No code that runs under this lock can panic half way, so poison means nothing.
    fn work(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn refuse(receipts: Vec<Receipt>) {
    receipts
        .into_iter()
        .for_each(|receipt| receipt.failed(Failure::Device));
}
