//! How long a file may take that may hang, as one of another host does: whoever waits for its bytes
//! waits no longer.
//!
//! What a file system has begun cannot be taken back, and it may read or write the memory that it
//! was given at any later time. So such a file gets memory of its own, which lives until the file
//! system has let go of it, and the caller's is copied from it or to it.

use super::aligned::Aligned;
use super::{Alignment, File};
use crate::buffer::Buffer;
use crate::carrier::{Carrier, Leg, Op, Receipt};
use crate::error::{Error, Failure, Result};
use crate::simulated::is_simulated;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// The limit of any number of files, which one thread watches. It ends with the last of them.
#[derive(Debug)]
pub struct Limit {
    watch: Arc<Watch>,
}

#[derive(Debug, Default)]
struct Watch {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    limit: Duration,
    /// In the order in which they were asked for.
    asked: VecDeque<(Instant, Weak<Loan>)>,
    ended: bool,
}

impl Limit {
    /// Starts the thread, named `kvdepot-limit`. A simulation has none, and no file that hangs.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when it cannot be started.
    pub fn new(limit: Duration) -> Result<Arc<Self>> {
        let watch = Arc::new(Watch::default());
        watch.state().limit = limit;
        let watching = Arc::clone(&watch);
        if !is_simulated() {
            std::thread::Builder::new()
                .name("kvdepot-limit".into())
                .spawn(move || watching.run())
                .map_err(|error| Error::io("start a thread", "file", error))?;
        }
        Ok(Arc::new(Self { watch }))
    }

    /// Another limit, for what is under way too.
    pub fn set(&self, limit: Duration) {
        self.watch.state().limit = limit;
        self.watch.changed.notify_all();
    }
}

impl Drop for Limit {
    /// The thread ends when it hears of it; it need not be waited for.
    fn drop(&mut self) {
        self.watch.state().ended = true;
        self.watch.changed.notify_all();
    }
}

impl Watch {
    fn run(&self) {
        let mut state = self.state();
        while !state.ended {
            let Some((asked, _)) = state.asked.front() else {
                let waited = self.changed.wait(state);
                state = waited.unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = state.limit.saturating_sub(asked.elapsed());
            if !left.is_zero() {
                let waited = self.changed.wait_timeout(state, left);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            let over = state.asked.pop_front();
            drop(state);
            if let Some(loan) = over.and_then(|(_, loan)| loan.upgrade()) {
                loan.end(Some(Failure::Os {
                    errno: libc::ETIMEDOUT,
                }));
            }
            state = self.state();
        }
    }

    /// No code that runs under this lock can panic half way, so poison means nothing.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A file whose bytes take no longer than a limit.
#[derive(Debug)]
pub struct Limited {
    file: Arc<File>,
    limit: Arc<Limit>,
}

impl Limited {
    /// A file, and its limit.
    #[must_use]
    pub fn new(file: Arc<File>, limit: Arc<Limit>) -> Arc<Self> {
        Arc::new(Self { file, limit })
    }

    /// `len` bytes of the file from `offset` on, which keep it open.
    #[must_use]
    pub fn buffer(self: &Arc<Self>, offset: usize, len: usize) -> Buffer {
        let carrier = Arc::clone(self) as Arc<dyn Carrier>;
        Buffer::carried(carrier, offset, len, self.file.writable)
    }
}

impl Carrier for Limited {
    fn alignment(&self) -> Alignment {
        // All is copied, so that any memory will do.
        let memory = Some(1);
        let at = self.file.alignment().at;
        Alignment { at, memory }
    }

    fn hands(&self) -> usize {
        self.file.hands()
    }

    fn carry(self: Arc<Self>, receipts: Vec<Receipt>) {
        let now = Instant::now();
        let (mut inner, mut loans) = (Vec::new(), Vec::new());
        for receipt in receipts {
            let (op, at) = (receipt.op(), receipt.at());
            let (len, least) = (receipt.len(), receipt.least());
            let mut memory = Aligned::new(len);
            if op == Op::Write {
                receipt.copy_to(0, &mut memory[..len]);
            }
            let place = memory.as_mut_ptr().expose_provenance();
            let loan = Arc::new(Loan {
                memory,
                state: Mutex::new((Some(receipt), None)),
            });
            loans.push((now, Arc::downgrade(&loan)));
            // SAFETY: the memory is the loan's, which nobody reads or writes before it ends.
            inner.push(unsafe { Receipt::new(op, at, (place, len), least, 0, loan) });
        }
        {
            let mut state = self.limit.watch.state();
            // With others before them, the thread looks by itself.
            if state.asked.is_empty() {
                self.limit.watch.changed.notify_all();
            }
            state.asked.extend(loans);
        }
        // By threads: some file systems keep who asks by a ring waiting in the call itself.
        let job = |receipt| (Arc::clone(&self.file) as _, receipt);
        self.file.hands.push(false, inner.into_iter().map(job));
    }
}

/// Memory that a file system has, and who waits for it.
#[derive(Debug)]
struct Loan {
    memory: Aligned,
    state: Mutex<(Option<Receipt>, Option<Failure>)>,
}

impl Loan {
    fn state(&self) -> MutexGuard<'_, (Option<Receipt>, Option<Failure>)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports to whoever waits still.
    fn end(&self, failure: Option<Failure>) {
        let receipt = self.state().0.take();
        let Some(mut receipt) = receipt else { return };
        if let Some(failure) = failure {
            return receipt.failed(failure);
        }
        let len = receipt.len();
        if receipt.op() == Op::Read {
            receipt.fill(0, &self.memory[..len]);
        }
        receipt.carried(len);
    }
}

impl Leg for Loan {
    fn failed(&self, _: usize, failure: Failure) {
        self.state().1 = Some(failure);
    }

    fn is_cancelled(&self) -> bool {
        self.state().0.as_ref().is_none_or(Receipt::is_cancelled)
    }
}

impl Drop for Loan {
    /// The file system has let go of it.
    fn drop(&mut self) {
        let failure = self.state().1.take();
        self.end(failure);
    }
}
