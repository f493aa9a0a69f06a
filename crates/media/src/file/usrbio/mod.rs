//! Files of a 3FS, read and written past its mount: by rings that its daemon shares with this
//! process (USRBIO), whose library is found at run time.
//!
//! Bytes move between a file and memory that 3FS knows, without a copy on the way: all of them go
//! through the slab, which is told to 3FS once. Where that is refused they are copied once more,
//! through memory of the library's own. What asks the daemon beside the rings (a file is registered
//! once, by its first request unless before) is done by threads, because the mount may hang.

mod api;
mod memory;
mod stream;
#[cfg(test)]
mod tests;

use super::job::{Enlisted, Job, Performs};
use super::threads::Threads;
use crate::carrier::{Op, Receipt, Registration, SlabMemory};
use crate::error::{Error, Failure, Result};
use crate::memory::Descriptor;
use crate::once;
use api::{Api, Ended};
use kvdepot_host::cpu;
use kvdepot_host::fork::Origin;
use memory::{Memory, SLOT};
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::time::Duration;
use stream::{Request, Way, Whom};

/// Threads for what asks the daemon beside the rings.
const THREADS: usize = 8;

/// The most rings of a direction, and the most requests; bounds against a wrong unit.
const STREAMS_MAX: usize = 64;
const REQUESTS_MAX: usize = 1 << 16;

/// The most entries of a ring, whatever may be under way: as many as 3FS's own examples have, and
/// more than any slab has regions.
const ENTRIES_MAX: usize = 1024;

/// Whether slabs that are made now may be asked for a name.
static IS_USED: AtomicBool = AtomicBool::new(false);

/// Whether this process uses a 3FS.
pub(crate) fn is_used() -> bool {
    IS_USED.load(Ordering::Relaxed)
}

/// Configuration of the USRBIO rings of a 3FS.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "callers make one")]
pub struct UsrbioConfig {
    /// 3FS's client library: a path, or a name that the system's loader searches for.
    pub library: PathBuf,
    /// A path below the mount of the 3FS.
    pub path: PathBuf,
    /// Number of rings per direction (reads and writes), 1 to 64.
    pub streams: usize,
    /// Maximum number of requests in flight, 1 to 65536. It is the total number of entries of all
    /// rings; each ring has 1 to 1024.
    pub running: usize,
    /// Maximum number of queued requests per direction, in addition to `running`. Further requests
    /// fail.
    pub waiting: usize,
    /// Maximum time to wait for a request ([`Carrier::patience`](crate::Carrier::patience)).
    pub patience: Duration,
}

/// What reads and writes the files of a 3FS.
#[derive(Debug)]
pub(super) struct Usrbio {
    memory: Memory,
    ways: [Arc<Way>; 2],
    threads: Arc<Threads<Errand>>,
    patience: Duration,
    /// Receipts whose bytes were copied once more.
    bounced: AtomicU64,
    origin: Origin,
}

/// Something for the threads.
pub(super) type Errand = Box<dyn FnOnce() + Send>;

impl Usrbio {
    /// Loads the library and makes the rings. Waits no longer than `config.patience`.
    pub(super) fn open(config: &UsrbioConfig) -> Result<Arc<Self>> {
        let checks = [
            ("stream_number", config.streams, STREAMS_MAX, "1 to 64"),
            (
                "running_queue_depth",
                config.running,
                REQUESTS_MAX,
                "1 to 65536",
            ),
        ];
        for (field, value, most, allowed) in checks {
            if value == 0 || value > most {
                let value = value as u64;
                return Err(Error::Invalid {
                    field,
                    value,
                    allowed,
                });
            }
        }
        let api = Arc::new(Api::load(&config.library)?);
        let fail = |problem| Error::io("open 3FS for", config.path.display().to_string(), problem);
        let (sender, opened) = mpsc::sync_channel(1);
        let (of, patience) = (config.clone(), config.patience);
        let open = move || drop(sender.send(Self::make(api, &of)));
        cpu::spawn("kvdepot-3fs-open", open).map_err(fail)?;
        let opened = opened.recv_timeout(patience);
        let usrbio = opened.map_err(|_| fail(io::ErrorKind::TimedOut.into()))??;
        IS_USED.store(true, Ordering::Relaxed);
        Ok(usrbio)
    }

    fn make(api: Arc<Api>, config: &UsrbioConfig) -> Result<Arc<Self>> {
        let origin = Origin::here();
        let origin = origin.map_err(|e| Error::io("use", "3FS", io::Error::other(e)))?;
        let mount = api.mount_point(&config.path)?;
        let memory = Memory::new(api, mount, origin);
        let entries = (config.running / 2 / config.streams).clamp(1, ENTRIES_MAX);
        let way = |op| {
            let bounds = (config.waiting, config.patience);
            Way::new(&memory, op, (config.streams, entries), bounds, origin)
        };
        Ok(Arc::new(Self {
            ways: [way(Op::Read)?, way(Op::Write)?],
            memory,
            threads: Threads::new(THREADS)?,
            patience: config.patience,
            bounced: AtomicU64::new(0),
            origin,
        }))
    }

    pub(super) fn patience(&self) -> Duration {
        self.patience
    }

    pub(super) fn bounced(&self) -> u64 {
        self.bounced.load(Ordering::Relaxed)
    }

    /// Has jobs done; a forked child, which has no rings, fails them.
    pub(super) fn push(self: &Arc<Self>, jobs: impl Iterator<Item = Job>) {
        if !self.origin.is_here() {
            return;
        }
        let mut requests: [Vec<Request>; 2] = Default::default();
        let mut errands: Vec<Errand> = Vec::new();
        for (file, receipt) in jobs {
            let (at, len) = (receipt.memory().addr(), receipt.len());
            let iov = self.memory.iov_at_once(at, len);
            match (file.enlisted().0.get(), iov) {
                (Some(Ok(())), Some(iov)) => {
                    let way = usize::from(receipt.op() == Op::Write);
                    requests[way].push(Request::new(file, receipt, iov));
                }
                _ => {
                    let usrbio = Arc::clone(self);
                    errands.push(Box::new(move || usrbio.begin((file, receipt))));
                }
            }
        }
        for (way, requests) in self.ways.iter().zip(requests) {
            if !requests.is_empty() {
                way.push(requests);
            }
        }
        if !errands.is_empty() {
            self.threads.push(errands.into_iter());
        }
    }

    /// Does what a first request of a file, or of a slab, has to wait for.
    fn begin(&self, (file, receipt): Job) {
        if receipt.is_cancelled() {
            return;
        }
        if let Err(errno) = self.enlist(&*file) {
            drop(file);
            return receipt.failed(Failure::Os { errno });
        }
        match self.memory.iov(receipt.memory().addr(), receipt.len()) {
            Some(iov) => self
                .way(receipt.op())
                .push([Request::new(file, receipt, iov)]),
            None => self.bounce((file, receipt)),
        }
    }

    /// Has 3FS know a file, in this thread; or why it does not.
    pub(super) fn enlist(&self, file: &dyn Performs) -> Ended<()> {
        if !self.origin.is_here() {
            return Err(libc::EBADF);
        }
        let fd = || file.fd().map_err(|_| libc::EBADF);
        let register = || self.memory.api.register(fd()?.as_raw_fd());
        *file.enlisted().0.get_or_init(register)
    }

    fn way(&self, op: Op) -> &Arc<Way> {
        &self.ways[usize::from(op == Op::Write)]
    }

    /// Has a job done through a slot, piece by piece, and waits for each.
    fn bounce(&self, (file, receipt): Job) {
        self.bounced.fetch_add(1, Ordering::Relaxed);
        let mut done = 0;
        while done < receipt.len() {
            let len = (receipt.len() - done).min(SLOT);
            let moved = self.piece((&file, &receipt), done, len);
            match moved {
                Ok(moved) => done += moved,
                Err(errno) => {
                    drop(file);
                    return receipt.failed(Failure::Os { errno });
                }
            }
            if moved < Ok(len) {
                break;
            }
        }
        drop(file);
        receipt.carried(done);
    }

    fn piece(
        &self,
        (file, receipt): (&Arc<dyn Performs>, &Receipt),
        done: usize,
        len: usize,
    ) -> Ended<usize> {
        let slot = self.memory.slot(THREADS)?;
        let (op, theirs) = (receipt.op(), receipt.memory().wrapping_add(done));
        if op == Op::Write {
            // SAFETY: the receipt's memory is readable for its length, of which this is a part; a
            // slot is as long as the longest piece, and this one's alone.
            unsafe { once::copy(theirs, slot.memory(), len) };
        }
        let (sender, ended) = mpsc::sync_channel(1);
        let request = Request {
            file: Arc::clone(file),
            at: receipt.at() + done as u64,
            iov: slot.iov(),
            memory: slot.memory().expose_provenance(),
            len,
            done: 0,
            whom: Whom::Thread(sender, slot),
        };
        self.way(op).push([request]);
        // A slot that does not come back stays with its request.
        let ended = ended.recv_timeout(self.patience);
        let (moved, slot) = ended.map_err(|_| libc::ETIMEDOUT)?;
        let moved = moved?;
        if op == Op::Read {
            // SAFETY: as above, and writable; nothing is under way in the slot.
            unsafe { once::copy(slot.memory(), theirs, moved) };
        }
        Ok(moved)
    }

    /// Notes a slab.
    pub(super) fn register(self: &Arc<Self>, memory: &SlabMemory) -> Option<Registration> {
        if !self.origin.is_here() || !self.memory.note(memory) {
            return None;
        }
        Some(Box::new(Registered {
            usrbio: Arc::downgrade(self),
            at: memory.at(),
            origin: self.origin,
        }))
    }

    /// Closes a file, by a thread where 3FS must hear of it.
    pub(super) fn close(self: &Arc<Self>, fd: Descriptor, enlisted: &Enlisted) {
        if !self.origin.is_here() || !matches!(enlisted.0.get(), Some(Ok(()))) {
            return;
        }
        let usrbio = Arc::clone(self);
        self.errand(Box::new(move || {
            if let Ok(fd) = fd.get() {
                usrbio.memory.api.deregister(fd.as_raw_fd());
            }
        }));
    }

    fn errand(&self, errand: Errand) {
        self.threads.push(std::iter::once(errand));
    }
}

impl Drop for Usrbio {
    /// Nothing is under way any more: each request has its file, which has this.
    fn drop(&mut self) {
        if self.origin.is_here() {
            self.ways.iter().for_each(|way| way.end());
        }
    }
}

impl Request {
    fn new(file: Arc<dyn Performs>, receipt: Receipt, iov: Arc<memory::Iov>) -> Self {
        Self {
            file,
            at: receipt.at(),
            iov,
            memory: receipt.memory().expose_provenance(),
            len: receipt.len(),
            done: 0,
            whom: Whom::Receipt(receipt),
        }
    }
}

/// A slab that 3FS knows, or will when something goes through it.
struct Registered {
    usrbio: Weak<Usrbio>,
    at: usize,
    origin: Origin,
}

impl Drop for Registered {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            return;
        }
        if let Some(usrbio) = self.usrbio.upgrade() {
            let known = usrbio.memory.forget(self.at);
            let last = Arc::clone(&usrbio);
            usrbio.errand(Box::new(move || drop((known, last))));
        }
    }
}
