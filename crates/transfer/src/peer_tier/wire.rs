//! Carries bytes between the memory that lanes name and what other hosts have lent: straight from
//! there, straight to there, many ranges by one batch of the engine.
//!
//! What is lent has addresses here that nothing else has, one range for each block.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvdepot_media::{Alignment, Buffer, Carrier, Failure, Op, Owner, Receipt};
use parking_lot::Mutex;

use super::desk::Desk;
use super::loan::Loan;
use crate::batch::Request;
use crate::config::Options;
use crate::engine::Engine;
use crate::flight;
use crate::memory::Region;
use crate::remote::Remote;
use crate::task::{Priority, Status};

/// Blocks lie apart, so that no two of them are taken for one range.
const GAP: u64 = 4096;

/// Bytes that are copied at a time where this host is a home itself.
const CHUNK: usize = 256 << 10;

/// Where a copy of a block is.
pub(super) enum Line {
    /// This host's own.
    Here(Vec<Buffer>),
    There(Remote),
    /// Another host's, as soon as it has said so.
    Borrowed(Arc<Loan>, usize),
}

impl Line {
    /// Where it is at another host, if it is.
    fn remote(&self) -> Option<&Remote> {
        match self {
            Line::Here(_) => None,
            Line::There(remote) => Some(remote),
            Line::Borrowed(loan, at) => loan.remote(*at),
        }
    }
}

/// A block with all its copies, and whether each has failed.
pub(super) struct Lines {
    copies: Vec<(Line, AtomicBool)>,
    len: u64,
}

impl Lines {
    pub(super) fn new(copies: Vec<Line>, len: u64) -> Lines {
        let copies = copies
            .into_iter()
            .map(|line| (line, AtomicBool::new(false)));
        Lines {
            copies: copies.collect(),
            len,
        }
    }

    /// Whether all that was written of a copy has come there.
    pub(super) fn is_whole(&self, copy: usize) -> bool {
        !self.copies[copy].1.load(Ordering::Acquire)
    }

    fn fail(&self, copy: usize) {
        self.copies[copy].1.store(true, Ordering::Release);
    }

    /// What it waits for before a byte can be moved.
    fn awaits(&self) -> Option<&Arc<Loan>> {
        let mut copies = self.copies.iter();
        copies.find_map(|(line, _)| match line {
            Line::Borrowed(loan, _) if !loan.is_known() => Some(loan),
            _ => None,
        })
    }

    fn has_failed(&self) -> bool {
        (0..self.copies.len()).all(|copy| !self.is_whole(copy))
    }
}

/// The carrier of one host's lent memory.
pub(super) struct Wire {
    engine: Weak<Engine>,
    timeout: Duration,
    lines: Mutex<BTreeMap<u64, Arc<Lines>>>,
    next: AtomicU64,
    /// Says what has come of batches: what follows may wait, and the engine's threads must not.
    desk: Arc<Desk>,
}

/// One range of a batch.
struct Item {
    receipt: Receipt,
    lines: Arc<Lines>,
    offset: u64,
}

impl Wire {
    pub(super) fn new(engine: &Arc<Engine>, timeout: Duration, desk: &Arc<Desk>) -> Arc<Wire> {
        Arc::new(Wire {
            engine: Arc::downgrade(engine),
            timeout,
            lines: Mutex::default(),
            next: AtomicU64::new(GAP),
            desk: Arc::clone(desk),
        })
    }

    /// Gives a block addresses; where it begins.
    pub(super) fn add(&self, lines: Lines) -> (u64, Arc<Lines>) {
        let room = lines.len.next_multiple_of(GAP) + GAP;
        let base = self.next.fetch_add(room, Ordering::Relaxed);
        let lines = Arc::new(lines);
        self.lines.lock().insert(base, Arc::clone(&lines));
        (base, lines)
    }

    pub(super) fn remove(&self, base: u64) {
        let gone = self.lines.lock().remove(&base);
        drop(gone);
    }

    fn find(&self, receipt: &Receipt) -> Option<(Arc<Lines>, u64)> {
        let all = self.lines.lock();
        let (base, lines) = all.range(..=receipt.at()).next_back()?;
        let offset = receipt.at() - base;
        let end = offset.checked_add(receipt.len() as u64)?;
        (end <= lines.len).then(|| (Arc::clone(lines), offset))
    }

    fn submit(&self, items: Vec<Item>) {
        let Some(engine) = self.engine.upgrade() else {
            return;
        };
        let batch = Arc::new(Mutex::new(items));
        // Until all is submitted: what is said of the batch is said behind that.
        let items = batch.lock();
        let mut whose = Vec::with_capacity(items.len());
        let mut requests = Vec::with_capacity(items.len());
        let mut priority = Priority::Background;
        for (number, item) in items.iter().enumerate() {
            let op = match item.receipt.op() {
                Op::Read => flight::Op::Read,
                Op::Write => flight::Op::Write,
            };
            if op == flight::Op::Read {
                priority = Priority::Normal;
            }
            for (copy, (line, _)) in item.lines.copies.iter().enumerate() {
                match line {
                    Line::Here(buffers) => {
                        if !copy_here(&item.receipt, buffers, item.offset) {
                            item.lines.fail(copy);
                        }
                    }
                    Line::There(_) | Line::Borrowed(..) => {
                        let Some(remote) = line.remote() else {
                            item.lines.fail(copy);
                            continue;
                        };
                        whose.push((number, copy));
                        requests.push(Request {
                            op,
                            local: item.receipt.memory().addr() as u64,
                            remote,
                            offset: item.offset,
                            len: item.receipt.len() as u64,
                        });
                    }
                }
            }
        }
        let options = Options {
            timeout: self.timeout,
            priority,
        };
        // SAFETY: all requests name memory of receipts, whole, and read only into those of reads;
        // the owner keeps the receipts, which keep that memory theirs, until the batch is over.
        let region = unsafe { Region::any(Arc::clone(&batch) as Owner) };
        let (desk, done) = (Arc::clone(&self.desk), Arc::clone(&batch));
        let then = move |progress: &crate::task::Progress| {
            let statuses = whose.iter().enumerate();
            let statuses = statuses.map(|(request, whose)| (*whose, progress.status(request)));
            let statuses: Vec<((usize, usize), Status)> = statuses.collect();
            desk.run(move || finish(&done, &statuses));
        };
        // Where it is refused, all receipts are dropped, which says so.
        let _task = engine.submit_of(requests.into_iter(), options, region, Box::new(then));
    }
}

/// Says what has come of a batch, which is over: nothing of it is touched any more.
fn finish(batch: &Mutex<Vec<Item>>, statuses: &[((usize, usize), Status)]) {
    let items = std::mem::take(&mut *batch.lock());
    let mut read_failed = vec![false; items.len()];
    for ((number, copy), status) in statuses {
        if *status != Status::Done {
            read_failed[*number] = true;
            if items[*number].receipt.op() == Op::Write {
                items[*number].lines.fail(*copy);
            }
        }
    }
    for (number, item) in items.into_iter().enumerate() {
        let failed = match item.receipt.op() {
            Op::Read => read_failed[number] || item.lines.has_failed(),
            Op::Write => item.lines.has_failed(),
        };
        let len = item.receipt.len();
        match failed {
            true => item.receipt.failed(Failure::Unanswered),
            false => item.receipt.carried(len),
        }
    }
}

/// Copies what is written into a copy of this host's own.
fn copy_here(receipt: &Receipt, buffers: &[Buffer], offset: u64) -> bool {
    if receipt.op() == Op::Read {
        return false;
    }
    let mut chunk = vec![0; receipt.len().min(CHUNK)];
    let (mut skip, mut done) = (offset as usize, 0);
    for buffer in buffers {
        let mut at = skip.min(buffer.len());
        skip -= at;
        while at < buffer.len() && done < receipt.len() {
            let count = CHUNK.min(buffer.len() - at).min(receipt.len() - done);
            receipt.copy_to(done, &mut chunk[..count]);
            if buffer.write_at(at, &chunk[..count]).is_err() {
                return false;
            }
            (at, done) = (at + count, done + count);
        }
    }
    done == receipt.len()
}

impl Carrier for Wire {
    fn alignment(&self) -> Alignment {
        Alignment::NONE
    }

    fn carry(self: Arc<Self>, receipts: Vec<Receipt>) {
        let mut items = Vec::with_capacity(receipts.len());
        for receipt in receipts {
            if receipt.is_cancelled() {
                receipt.failed(Failure::Cancelled);
            } else if let Some((lines, offset)) = self.find(&receipt) {
                items.push(Item {
                    receipt,
                    lines,
                    offset,
                });
            } else {
                receipt.failed(Failure::Unanswered);
            }
        }
        // Those that wait for the same go together.
        while let Some(loan) = items.iter().find_map(|item| item.lines.awaits().cloned()) {
            let waits = |item: &mut Item| {
                let awaited = item.lines.awaits();
                awaited.is_some_and(|other| Arc::ptr_eq(other, &loan))
            };
            let waiting: Vec<Item> = items.extract_if(.., waits).collect();
            let wire = Arc::clone(&self);
            loan.when_known(Box::new(move || wire.submit(waiting)));
        }
        if !items.is_empty() {
            self.submit(items);
        }
    }

    fn is_slow(&self) -> bool {
        true
    }
}

impl std::fmt::Debug for Wire {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wire").finish_non_exhaustive()
    }
}
