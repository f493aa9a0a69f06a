//! A batch under way: what each of its requests has come to, and how it is waited for.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdepot_media::Owner;
use kvdepot_plan::{Guard, Join, Waiter};
use parking_lot::Mutex;

use crate::error::Fault;

/// Status of a request that nothing is known of yet, and of one that is done. A [`Fault`] is any
/// other.
const PENDING: u8 = 0;
const DONE: u8 = 1;

/// Priority of a batch over other batches of the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "lanes have a queue for each")]
pub enum Priority {
    /// Highest priority, for example for blocks that a model waits for.
    Urgent = 0,
    /// Default priority.
    #[default]
    Normal = 1,
    /// Lowest priority, for transfers without a waiting caller.
    Background = 2,
}

/// How many priorities there are.
pub(crate) const PRIORITIES: usize = 3;

/// State of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "there is no fourth")]
pub enum Status {
    /// The request has not ended.
    Pending,
    /// All bytes were moved.
    Done,
    /// The request failed. Some of its bytes may have been moved.
    Failed(Fault),
}

impl Status {
    fn of(byte: u8) -> Status {
        match byte {
            PENDING => Status::Pending,
            DONE => Status::Done,
            fault => {
                let named = Fault::ALL.into_iter().find(|one| *one as u8 == fault);
                Status::Failed(named.unwrap_or(Fault::Failed))
            }
        }
    }
}

/// Requests of a batch that continue each other, and are moved as one.
#[derive(Debug, Default)]
struct Run {
    first: AtomicU32,
    count: AtomicU32,
    left: AtomicU64,
    fault: AtomicU8,
}

/// What is known of a batch while it is under way, and after.
#[derive(Debug)]
pub(crate) struct Progress {
    statuses: Vec<AtomicU8>,
    runs: Vec<Run>,
    /// Why it was ended before it was over: a [`Fault`], or nought.
    cause: AtomicU8,
    began: Instant,
    /// Nanoseconds from then until its first slice was given to the kernel; nought before.
    sent: AtomicU64,
    pub(crate) deadline: Instant,
    pub(crate) priority: Priority,
}

impl Progress {
    pub(crate) fn new(requests: usize, deadline: Instant, priority: Priority) -> Progress {
        let began = Instant::now();
        let mut statuses = Vec::new();
        statuses.resize_with(requests, || AtomicU8::new(PENDING));
        let mut runs = Vec::new();
        runs.resize_with(requests, Run::default);
        Progress {
            statuses,
            runs,
            cause: AtomicU8::new(0),
            began,
            sent: AtomicU64::new(0),
            deadline,
            priority,
        }
    }

    /// Notes that requests are moved as one, under the number of the first.
    pub(crate) fn run(&self, first: u32, count: u32, bytes: u64) {
        let run = &self.runs[first as usize];
        run.first.store(first, Ordering::Relaxed);
        run.count.store(count, Ordering::Relaxed);
        run.left.store(bytes, Ordering::Release);
    }

    /// Notes that bytes of a run are over, one way or the other.
    pub(crate) fn moved(&self, run: u32, bytes: u64, fault: Option<Fault>) {
        let run = &self.runs[run as usize];
        if let Some(fault) = fault {
            // Whoever comes first says why.
            let _earlier =
                run.fault
                    .compare_exchange(0, fault as u8, Ordering::AcqRel, Ordering::Acquire);
        }
        if run.left.fetch_sub(bytes, Ordering::AcqRel) == bytes {
            let status = match run.fault.load(Ordering::Acquire) {
                0 => DONE,
                fault => fault,
            };
            let first = run.first.load(Ordering::Relaxed) as usize;
            let count = run.count.load(Ordering::Relaxed) as usize;
            for one in &self.statuses[first..first + count] {
                one.store(status, Ordering::Release);
            }
        }
    }

    /// Notes that a request is not even begun.
    pub(crate) fn refuse(&self, request: usize, fault: Fault) {
        self.statuses[request].store(fault as u8, Ordering::Release);
    }

    /// Notes that a slice of it is about to be given to the kernel.
    pub(crate) fn note_sent(&self) {
        if self.sent.load(Ordering::Relaxed) == 0 {
            let after = self.began.elapsed().as_nanos() as u64;
            let (relaxed, sent) = (Ordering::Relaxed, after.max(1));
            let _earlier = self.sent.compare_exchange(0, sent, relaxed, relaxed);
        }
    }

    /// Ends it for a reason, of which the first counts.
    pub(crate) fn end(&self, fault: Fault) {
        let order = Ordering::AcqRel;
        let _earlier = self
            .cause
            .compare_exchange(0, fault as u8, order, Ordering::Acquire);
    }

    /// Why it was ended, where it was.
    pub(crate) fn cause(&self) -> Option<Fault> {
        match Status::of(self.cause.load(Ordering::Acquire)) {
            Status::Failed(fault) => Some(fault),
            _ => None,
        }
    }

    pub(crate) fn status(&self, request: usize) -> Status {
        Status::of(self.statuses[request].load(Ordering::Acquire))
    }
}

/// What a batch holds until its last byte has stopped moving.
#[derive(Debug)]
pub(crate) struct Load {
    pub(crate) progress: Arc<Progress>,
    /// Memory that it uses, by where its owner lies: each buffer may have one of its own.
    owners: Mutex<HashMap<usize, Owner>>,
}

impl Load {
    /// Keeps memory until the batch is over.
    pub(crate) fn hold(&self, owner: &Owner) {
        let at = Arc::as_ptr(owner).addr();
        let mut owners = self.owners.lock();
        owners.entry(at).or_insert_with(|| Arc::clone(owner));
    }
}

/// What a slice of a batch has while it is under way.
pub(crate) type Hold = Guard<Load>;

/// What is called when a batch is over.
pub(crate) type Then = Box<dyn FnOnce(&Progress) + Send>;

/// A batch that is being planned.
pub(crate) fn begin(progress: Progress, then: Option<Then>) -> (Join<Load>, Task) {
    let progress = Arc::new(progress);
    let load = Load {
        progress: Arc::clone(&progress),
        owners: Mutex::default(),
    };
    let join = Join::new(load, |load, _| {
        load.owners.get_mut().clear();
        if let Some(then) = then {
            then(&load.progress);
        }
    });
    let waiter = join.waiter();
    (join, Task { progress, waiter })
}

/// Submitted batch. Dropping the handle does not affect the batch.
///
/// # Examples
/// ```
/// # use std::sync::Arc;
/// # use kvdepot_media::Buffer;
/// # use kvdepot_transfer::{Config, Engine, Op, Options, Request, Rights};
/// use kvdepot_transfer::{Fault, Status};
///
/// # let target = Arc::new(Engine::start(Config::default())?);
/// # let memory = Buffer::from_vec(vec![7; 4096]);
/// # let _published = target.publish(b"pages", &[memory], Rights::READ, None)?;
/// # let engine = Engine::start(Config { listen: None, ..Config::default() })?;
/// # let pages = Buffer::from_vec(vec![0; 4096]);
/// # let _registered = engine.register(&[pages.clone()])?;
/// # let remote = engine.open(target.address().expect("it listens"), b"pages")?;
/// # let local = pages.addr() as u64;
/// # let read = |offset| Request { op: Op::Read, local, remote: &remote, offset, len: 1024 };
/// // The second request exceeds the 4096 bytes of the grant.
/// let task = engine.submit([read(0), read(4000)].into_iter(), Options::default())?;
/// assert!(task.wait(None));
/// assert_eq!(task.status(0), Status::Done);
/// assert_eq!(task.fault(), Some((1, Fault::Range)));
/// # Ok::<_, kvdepot_transfer::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Task {
    pub(crate) progress: Arc<Progress>,
    waiter: Waiter,
}

impl Task {
    /// Waits until the engine no longer uses the memory of the batch, and returns false if
    /// `timeout` passes first.
    ///
    /// `None` waits until the batch ends. That is limited by the batch's own time-out
    /// ([`Options::timeout`](crate::Options::timeout)).
    #[must_use]
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        self.waiter.wait(timeout)
    }

    /// Returns true if the engine no longer uses the memory of the batch.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.waiter.is_done()
    }

    /// Returns the time from the submission until the first slice was passed to the kernel; `None`
    /// before that.
    #[must_use]
    pub fn first_sent(&self) -> Option<Duration> {
        let after = self.progress.sent.load(Ordering::Relaxed);
        (after > 0).then(|| Duration::from_nanos(after))
    }

    /// Returns the number of requests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.progress.statuses.len()
    }

    /// Returns true if there are no requests.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the state of the request with the index `request`, also while others are in
    /// progress.
    ///
    /// # Panics
    /// If there are fewer requests.
    #[must_use]
    pub fn status(&self, request: usize) -> Status {
        self.progress.status(request)
    }

    /// Returns the states of all requests, in their order.
    pub fn statuses(&self) -> impl ExactSizeIterator<Item = Status> + '_ {
        (0..self.len()).map(|request| self.progress.status(request))
    }

    /// Returns the index of the first failed request, and the reason. `None` means that no request
    /// has failed so far.
    #[must_use]
    pub fn fault(&self) -> Option<(usize, Fault)> {
        self.statuses()
            .enumerate()
            .find_map(|(request, status)| match status {
                Status::Failed(fault) => Some((request, fault)),
                _ => None,
            })
    }

    /// Returns true if all requests are done.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.statuses().all(|status| status == Status::Done)
    }
}
