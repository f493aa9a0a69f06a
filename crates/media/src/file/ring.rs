//! A ring of the kernel (io_uring): reads and writes that are under way without a thread each.
//!
//! Whoever asks puts its requests on the ring and enters the kernel once for all of them; one
//! thread waits for completions and reports them. A request, with its file and its receipt, lies
//! in the ring's table until the kernel has completed it, so that no memory is let go which the
//! kernel may still touch. What it completes otherwise than asked (an error, fewer bytes) is done
//! anew by a thread, which knows what each of these means.

use super::job::Job;
use super::threads::Threads;
use crate::carrier::Op;
use crate::error::{Error, Result};
use crate::turns::{Turns, UnderWay};
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use kvdepot_host::cpu;
use kvdepot_host::fork::Origin;
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{fmt, io};

/// Requests that the kernel has at a time: twice what any single disk was seen to gain from. What
/// else there is waits here, in turn.
const DEPTH: u32 = 64;

/// Bytes that the kernel has of one call at a time: enough for the fastest disks, and what another
/// call asks for does not wait behind more. A call that has none may ask for any number.
const CALL_BYTES: usize = 16 << 20;

/// Most bytes of one request, far below what the system takes at once.
const REQUEST_MAX: usize = 1 << 30;

/// The completion that only wakes who waits.
const WAKE: u64 = u64::MAX;

/// How long is waited where the system has no memory for a request.
const AGAIN: Duration = Duration::from_micros(100);

/// A ring, for any number of files. It ends with the last one of these.
pub(super) struct Ring {
    inner: Arc<Inner>,
    origin: Origin,
}

struct Inner {
    ring: IoUring,
    table: Mutex<Table>,
    /// Does anew what went otherwise.
    anew: Arc<Threads>,
}

/// What the kernel has, by its number, and what waits.
#[derive(Default)]
struct Table {
    jobs: Vec<Option<Job>>,
    free: Vec<usize>,
    waiting: Turns<Job>,
    under_way: UnderWay,
    /// Whether a thread enters the kernel.
    entering: bool,
    ended: bool,
}

impl Table {
    /// What waits and may begin.
    fn next(&mut self) -> Option<Job> {
        let under_way = &self.under_way;
        let may = |call, job: &Job| under_way.may_have(call, job.1.len(), CALL_BYTES);
        self.waiting.pop_if(may)
    }
}

impl Ring {
    /// A ring with its thread, named `kvdepot-ring`; `anew` does what goes otherwise.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] where the system has none, or does not let this process have one.
    pub(super) fn new(anew: &Arc<Threads>) -> Result<Self> {
        let fail = |source| Error::Io {
            operation: "set up",
            subject: "io_uring".into(),
            source,
        };
        // A forked child has none of its memory.
        let ring = IoUring::builder().dontfork().build(DEPTH).map_err(fail)?;
        let mut known = io_uring::Probe::new();
        ring.submitter().register_probe(&mut known).map_err(fail)?;
        for code in [opcode::Read::CODE, opcode::Write::CODE, opcode::Nop::CODE] {
            if !known.is_supported(code) {
                return Err(fail(io::ErrorKind::Unsupported.into()));
            }
        }
        let origin = Origin::here();
        let origin = origin.map_err(|e| Error::io("set up", "io_uring", io::Error::other(e)))?;
        let count = DEPTH as usize;
        let inner = Arc::new(Inner {
            ring,
            table: Mutex::new(Table {
                jobs: (0..count).map(|_| None).collect(),
                free: (0..count).rev().collect(),
                ..Table::default()
            }),
            anew: Arc::clone(anew),
        });
        let reaper = Arc::clone(&inner);
        std::thread::Builder::new()
            .name("kvdepot-ring".into())
            .spawn(move || {
                // A pinned one still works; there is nobody to tell.
                drop(cpu::reset_affinity());
                reaper.run();
            })
            .map_err(|error| Error::io("start a thread for", "io_uring", error))?;
        Ok(Self { inner, origin })
    }

    /// Has jobs done; a forked child, which has no ring, fails them.
    pub(super) fn push(&self, jobs: impl Iterator<Item = Job>) {
        if !self.origin.is_here() {
            return;
        }
        let mut table = self.inner.table();
        jobs.for_each(|job| table.waiting.push(job.1.call(), job));
        self.inner.submit(table);
    }
}

impl Drop for Ring {
    /// Nothing is under way any more: each job has its file, which has this. The thread ends when
    /// it hears of it; it need not be waited for.
    fn drop(&mut self) {
        if !self.origin.is_here() {
            return;
        }
        let mut table = self.inner.table();
        table.ended = true;
        let wake = opcode::Nop::new().build().user_data(WAKE);
        // SAFETY: it names no memory.
        unsafe { self.inner.put(&mut table, &wake) };
        self.inner.enter(table);
    }
}

impl Inner {
    /// Gives the kernel what waits, as far as it may have it.
    fn submit<'a>(&'a self, mut table: MutexGuard<'a, Table>) {
        let mut given = false;
        // What follows them is others' code, which may come here.
        let mut cancelled = Vec::new();
        while let Some(number) = table.free.pop() {
            let next = loop {
                match table.next() {
                    Some(job) if job.1.is_cancelled() => cancelled.push(job),
                    next => break next,
                }
            };
            let Some(job) = next else {
                table.free.push(number);
                break;
            };
            let Some(request) = request(&job) else {
                table.free.push(number);
                self.anew.push(std::iter::once(job));
                continue;
            };
            let request = request.user_data(number as u64);
            table.under_way.begin(job.1.call(), job.1.len());
            table.jobs[number] = Some(job);
            // SAFETY: the file and the memory are the job's, which stays in the table until this
            // request has completed.
            unsafe { self.put(&mut table, &request) };
            given = true;
        }
        match given {
            true => self.enter(table),
            false => drop(table),
        }
        drop(cancelled);
    }

    /// Puts a request on the ring.
    ///
    /// # Safety
    ///
    /// What it names lives until it has completed.
    unsafe fn put(&self, _table: &mut Table, request: &squeue::Entry) {
        // SAFETY: the table's lock is held by whoever uses the submission queue, so there is one.
        let mut queue = unsafe { self.ring.submission_shared() };
        // SAFETY: the caller's promise. There is room: as many requests as the table has rows, but
        // for one that wakes, which comes when there are no others.
        let put = unsafe { queue.push(request) };
        debug_assert!(put.is_ok(), "the ring has room for all of the table");
    }

    /// Enters the kernel until it has taken all that is on the ring. One thread does at a time, and
    /// without the lock, which it would hold as long as it takes to tell a disk: what others put on
    /// the ring meanwhile goes with its next call.
    fn enter<'a>(&'a self, mut table: MutexGuard<'a, Table>) {
        if table.entering {
            return;
        }
        table.entering = true;
        loop {
            drop(table);
            let entered = self.ring.submit();
            if entered.is_err_and(|error| error.kind() != io::ErrorKind::Interrupted) {
                // It has no memory for them now, or completions that are to be heard first.
                std::thread::sleep(AGAIN);
            }
            table = self.table();
            // SAFETY: the lock is held, as in `put`.
            if unsafe { self.ring.submission_shared() }.is_empty() {
                table.entering = false;
                return;
            }
        }
    }

    /// Hears of what has completed, until the ring has ended.
    fn run(&self) {
        loop {
            let waited = self.ring.submitter().submit_and_wait(1);
            if let Err(error) = waited
                && error.kind() != io::ErrorKind::Interrupted
            {
                std::thread::sleep(AGAIN);
            }
            let mut done = Vec::new();
            // SAFETY: this thread alone uses the completion queue.
            for completion in unsafe { self.ring.completion_shared() } {
                done.push(completion);
            }
            if self.take(done) {
                return;
            }
        }
    }

    /// Makes room for what waits, and then reports; whether the ring has ended.
    fn take(&self, done: Vec<cqueue::Entry>) -> bool {
        let mut table = self.table();
        let mut jobs = Vec::with_capacity(done.len());
        for completion in done {
            let number = completion.user_data() as usize;
            let Some(job) = table.jobs.get_mut(number).and_then(Option::take) else {
                continue;
            };
            table.free.push(number);
            table.under_way.end(job.1.call(), job.1.len());
            jobs.push((job, completion.result()));
        }
        let ended = table.ended;
        self.submit(table);
        for ((file, receipt), result) in jobs {
            let asked = receipt.len();
            match usize::try_from(result) {
                Ok(moved) if moved == asked => {
                    // Before the report, so that mostly others close it.
                    drop(file);
                    // What follows is others' code, and this thread is everybody's.
                    drop(catch_unwind(AssertUnwindSafe(|| receipt.carried(moved))));
                }
                _ => self.anew.push(std::iter::once((file, receipt))),
            }
        }
        ended
    }

    /// No code that runs under this lock can panic half way, so poison means nothing.
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a job asks the kernel for; `None` where its file is not to be had.
fn request((file, receipt): &Job) -> Option<squeue::Entry> {
    let fd = types::Fd(file.fd().ok()?.as_raw_fd());
    let memory = receipt.memory();
    let len = receipt.len().min(REQUEST_MAX) as u32;
    Some(match receipt.op() {
        Op::Read => opcode::Read::new(fd, memory, len)
            .offset(receipt.at())
            .build(),
        Op::Write => opcode::Write::new(fd, memory, len)
            .offset(receipt.at())
            .build(),
    })
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").finish_non_exhaustive()
    }
}
