//! The rings of one direction, and a thread for each that waits for what it was asked for.
//!
//! Whoever asks prepares and submits, under the one lock of the direction; a thread sleeps while
//! its ring has nothing under way. What finds no room waits here, in order and bounded. A request
//! stays in its ring's table, with its memory and its file, until it has completed, however late:
//! so nothing is let go that 3FS may still touch. Of a ring that has completed nothing for as long
//! as is waited, nothing more is asked before it has, but for a probe: what it has may be lost for
//! ever, and it may answer all the same. The probe is a request as any other, one at a time and as
//! often as answers are waited for, as long as half of the ring's entries are free. Where all rings
//! are silent, requests fail at once.

use super::api::{Api, Cqe, Ended, Ior};
use super::memory::{Iov, Memory, Slot, answer, mount};
use crate::carrier::{Op, Receipt};
use crate::error::{Error, Failure, Result};
use crate::file::job::Performs;
use kvdepot_host::cpu;
use kvdepot_host::fork::Origin;
use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{fmt, io};

/// The longest wait for a ring: its end is a time of day, which may be set anew meanwhile.
const STEP: Duration = Duration::from_millis(200);

/// How long is waited where a ring has no room though it should.
const AGAIN: Duration = Duration::from_millis(1);

/// Most bytes of one request.
const REQUEST_MAX: usize = 1 << 30;

/// A range of a file, and memory that 3FS knows.
pub(super) struct Request {
    pub(super) file: Arc<dyn Performs>,
    pub(super) at: u64,
    pub(super) iov: Arc<Iov>,
    pub(super) memory: usize,
    pub(super) len: usize,
    pub(super) done: usize,
    pub(super) whom: Whom,
}

/// Who hears of it.
pub(super) enum Whom {
    /// Whoever holds the receipt, which the memory is of.
    Receipt(Receipt),
    /// A thread that waits for it, with the slot that the memory is; how many bytes, or the error.
    Thread(SyncSender<(Ended<usize>, Slot)>, Slot),
}

/// All rings of a direction.
pub(super) struct Way {
    api: Arc<Api>,
    op: Op,
    rings: Vec<Ring>,
    waiting_max: usize,
    patience: Duration,
    state: Mutex<State>,
    /// One for each ring's thread.
    changed: Vec<Condvar>,
}

/// The library's part of a ring.
struct Ring {
    api: Arc<Api>,
    raw: Box<UnsafeCell<Ior>>,
    origin: Origin,
}

// SAFETY: it is prepared and submitted under the lock of its way, and waited for by one thread, as
// the library allows beside each other.
unsafe impl Send for Ring {}
// SAFETY: as above.
unsafe impl Sync for Ring {}

struct State {
    waiting: VecDeque<(Instant, Request)>,
    tables: Vec<Table>,
    /// The ring that is looked at first.
    next: usize,
    /// So many of the first rings have a thread, and the others nothing.
    started: usize,
    ended: bool,
}

/// What a ring has, by its number.
struct Table {
    requests: Vec<Option<Request>>,
    free: Vec<usize>,
    /// When it has completed one, or got the first.
    heard: Instant,
    /// When it was asked last while it was silent.
    probed: Option<Instant>,
    /// The library found no room in it.
    full: bool,
}

/// What is over, and its error.
type Over = Vec<(Request, Ended<()>)>;

impl Way {
    /// So many rings, each of `entries`.
    pub(super) fn new(
        memory: &Memory,
        op: Op,
        (rings, entries): (usize, usize),
        (waiting_max, patience): (usize, Duration),
        origin: Origin,
    ) -> Result<Arc<Self>> {
        let ring = |_| Ring::new(memory, op, entries, origin);
        let rings: Vec<Ring> = (0..rings).map(ring).collect::<Result<_>>()?;
        let table = |_: &Ring| Table {
            requests: (0..entries).map(|_| None).collect(),
            free: (0..entries).rev().collect(),
            heard: Instant::now(),
            probed: None,
            full: false,
        };
        let tables = rings.iter().map(table).collect();
        let changed = rings.iter().map(|_| Condvar::new()).collect();
        Ok(Arc::new(Self {
            api: Arc::clone(&memory.api),
            op,
            rings,
            waiting_max,
            patience,
            state: Mutex::new(State {
                waiting: VecDeque::new(),
                tables,
                next: 0,
                started: 0,
                ended: false,
            }),
            changed,
        }))
    }

    /// Asks for what it can, and lets the rest wait.
    pub(super) fn push(self: &Arc<Self>, requests: impl IntoIterator<Item = Request>) {
        let mut state = self.state();
        let started = self.start(&mut state);
        // Of one that has nothing under way nothing else would say that it has room again.
        let idle = state
            .tables
            .iter_mut()
            .filter(|table| table.under_way() == 0);
        idle.for_each(|table| table.full = false);
        let now = Instant::now();
        let new = requests.into_iter().map(|request| (now, request));
        state.waiting.extend(new);
        let mut over = Over::new();
        self.submit(&mut state, &mut over);
        let (most, refused) = match (started, self.is_silent(&state)) {
            (0, _) => (0, libc::EAGAIN),
            (_, true) => (0, libc::ETIMEDOUT),
            (_, false) => (self.waiting_max, libc::EBUSY),
        };
        while state.waiting.len() > most {
            let last = state.waiting.pop_back();
            over.extend(last.map(|(_, request)| (request, Err(refused))));
        }
        // Somebody looks for room again; who has something under way does so anyway.
        let waits = !state.waiting.is_empty();
        drop(state);
        if waits {
            self.wake(|_| true);
        }
        report(over);
    }

    /// Lets the threads end. Nothing is under way.
    pub(super) fn end(&self) {
        self.state().ended = true;
        self.wake(|_| true);
    }

    /// Wakes the threads of some rings.
    fn wake(&self, which: impl Fn(usize) -> bool) {
        let some = self.changed.iter().enumerate();
        some.filter(|(number, _)| which(*number))
            .for_each(|(_, changed)| changed.notify_one());
    }

    /// Starts the threads, by the first who asks; how many there are.
    fn start(self: &Arc<Self>, state: &mut State) -> usize {
        while state.started < self.rings.len() {
            let (way, number) = (Arc::clone(self), state.started);
            let name = format!("kvdepot-3fs-{number}");
            if cpu::spawn(&name, move || way.run(number)).is_err() {
                // The next who asks tries again.
                break;
            }
            state.started += 1;
        }
        state.started
    }

    fn is_stalled(&self, table: &Table) -> bool {
        table.under_way() > 0 && table.heard.elapsed() >= self.patience
    }

    /// Whether a ring was probed so lately, and has not answered.
    fn is_probed(&self, table: &Table, lately: Duration) -> bool {
        self.is_stalled(table) && table.probed.is_some_and(|probed| probed.elapsed() < lately)
    }

    /// Whether a stalled ring may be asked whether it answers: what is asked stays with it if not.
    fn may_probe(&self, state: &State, table: &Table) -> bool {
        let mut tables = state.tables.iter();
        table.under_way() * 2 <= table.requests.len()
            && !tables.any(|table| self.is_probed(table, self.patience))
    }

    /// Whether no ring answers, nor may just now.
    fn is_silent(&self, state: &State) -> bool {
        let mut tables = state.tables.iter().take(state.started);
        tables.all(|table| self.is_stalled(table) && !self.is_probed(table, STEP))
    }

    /// Gives the rings what waits, as far as they have room.
    fn submit(&self, state: &mut State, over: &mut Over) {
        let mut given = vec![false; self.rings.len()];
        while let Some(number) = self.room(state) {
            let Some((since, request)) = state.waiting.pop_front() else {
                break;
            };
            if request.is_cancelled() {
                over.push((request, Err(libc::ECANCELED)));
                continue;
            }
            let table = &mut state.tables[number];
            let probes = self.is_stalled(table);
            let Some(entry) = table.free.pop() else { break };
            match self.prepare(number, entry, &request) {
                Ok(()) => {
                    if table.free.len() + 1 == table.requests.len() {
                        table.heard = Instant::now();
                    }
                    if probes {
                        table.probed = Some(Instant::now());
                    }
                    table.requests[entry] = Some(request);
                    given[number] = true;
                    state.next = (number + 1) % self.rings.len();
                }
                Err(errno) => {
                    table.free.push(entry);
                    table.full = errno == libc::EAGAIN;
                    match errno {
                        libc::EAGAIN => state.waiting.push_front((since, request)),
                        _ => over.push((request, Err(errno))),
                    }
                }
            }
        }
        // Of those that slept another's thread may have asked just now.
        self.wake(|number| given[number]);
        for (ring, _) in self.rings.iter().zip(&given).filter(|(_, given)| **given) {
            // It only wakes the daemon, which looks by itself too.
            // SAFETY: the ring is there, and this way's lock is held.
            unsafe { (self.api.submit_ios)(ring.raw.get()) };
        }
    }

    /// A ring with room.
    fn room(&self, state: &State) -> Option<usize> {
        let count = state.started;
        let mut rings = (0..count).map(|at| (state.next + at) % count);
        rings.find(|number| {
            let table = &state.tables[*number];
            let has_room = !table.free.is_empty() && !table.full;
            has_room && (!self.is_stalled(table) || self.may_probe(state, table))
        })
    }

    fn prepare(&self, ring: usize, entry: usize, request: &Request) -> Ended<()> {
        let fd = request.file.fd().map_err(|_| libc::EBADF)?.as_raw_fd();
        let memory: *mut c_void =
            std::ptr::with_exposed_provenance_mut(request.memory + request.done);
        let at = request.at as usize + request.done;
        let len = (request.len - request.done).min(REQUEST_MAX) as u64;
        let (ring, iov) = (self.rings[ring].raw.get(), request.iov.raw());
        // Zero would be none.
        let number = std::ptr::without_provenance(entry + 1);
        let reads = self.op == Op::Read;
        // SAFETY: the ring is there, and this way's lock is held; the memory, which the library
        // looks for in `iov`, and the file are the request's, which stays in the table until it has
        // completed.
        let prepared = unsafe { (self.api.prep_io)(ring, iov, reads, memory, fd, at, len, number) };
        answer(prepared).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
    }

    /// What a ring's thread does, until the way has ended.
    fn run(&self, number: usize) {
        let mut cqes = vec![Cqe::EMPTY; self.state().tables[number].requests.len()];
        loop {
            let Some(waits) = self.sleep(number) else {
                return;
            };
            let count = if waits {
                self.wait(number, &mut cqes)
            } else {
                0
            };
            let mut over = Over::new();
            let mut state = self.state();
            self.take(&mut state, number, &cqes[..count], &mut over);
            self.submit(&mut state, &mut over);
            let silent = self.is_silent(&state);
            while let Some((since, _)) = state.waiting.front()
                && (silent || since.elapsed() >= self.patience)
            {
                let late = state.waiting.pop_front();
                over.extend(late.map(|(_, request)| (request, Err(libc::ETIMEDOUT))));
            }
            drop(state);
            report(over);
        }
    }

    /// Sleeps until there is something to do: to wait for the ring, or else to look for room again.
    fn sleep(&self, number: usize) -> Option<bool> {
        let mut state = self.state();
        let mut rested = false;
        loop {
            let table = &state.tables[number];
            let stalled = self.is_stalled(table) && !self.is_probed(table, STEP);
            let pause = match (table.under_way(), stalled) {
                _ if state.ended => return None,
                (0, _) if state.waiting.is_empty() => None,
                (0, _) => Some(AGAIN),
                // The library would look a thousand times a second.
                (_, true) => Some(STEP),
                (_, false) => return Some(true),
            };
            if rested && pause.is_some() {
                return Some(pause == Some(STEP));
            }
            state = match pause {
                None => self.changed[number]
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(pause) => {
                    rested = true;
                    let slept = self.changed[number].wait_timeout(state, pause);
                    slept.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Waits for completions; how many there are.
    fn wait(&self, number: usize, cqes: &mut [Cqe]) -> usize {
        let end = SystemTime::now() + STEP;
        let end = end.duration_since(UNIX_EPOCH).unwrap_or_default();
        let end = libc::timespec {
            tv_sec: end.as_secs() as libc::time_t,
            tv_nsec: libc::c_long::from(end.subsec_nanos() as i32),
        };
        let (ring, most) = (self.rings[number].raw.get(), cqes.len() as i32);
        // SAFETY: the ring is there, this thread alone waits for it, and `cqes` has as many entries
        // as is said.
        let count =
            unsafe { (self.api.wait_for_ios)(ring, cqes.as_mut_ptr(), most, 1, &raw const end) };
        match usize::try_from(count) {
            Ok(count) => count.min(cqes.len()),
            Err(_) => {
                std::thread::sleep(STEP);
                0
            }
        }
    }

    /// Takes what has completed out of a ring's table; what has moved less than it should goes on.
    fn take(&self, state: &mut State, number: usize, cqes: &[Cqe], over: &mut Over) {
        if cqes.is_empty() {
            state.tables[number].full = false;
            return;
        }
        for cqe in cqes {
            let table = &mut state.tables[number];
            let entry = cqe.userdata.addr().wrapping_sub(1);
            let request = table.requests.get_mut(entry).and_then(Option::take);
            let Some(mut request) = request else { continue };
            table.free.push(entry);
            table.heard = Instant::now();
            table.full = false;
            let left = request.len - request.done;
            match usize::try_from(cqe.result) {
                Ok(moved @ 1..) if moved < left => {
                    request.done += moved;
                    state.waiting.push_front((Instant::now(), request));
                }
                Ok(moved) => {
                    request.done += moved.min(left);
                    over.push((request, Ok(())));
                }
                Err(_) => {
                    let errno = i32::try_from(-cqe.result).unwrap_or(libc::EIO);
                    over.push((request, Err(errno)));
                }
            }
        }
    }

    /// No code that runs under this lock can panic half way, so poison means nothing.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn under_way(&self) -> usize {
        self.requests.len() - self.free.len()
    }
}

impl Request {
    fn is_cancelled(&self) -> bool {
        match &self.whom {
            Whom::Receipt(receipt) => receipt.is_cancelled(),
            Whom::Thread(..) => false,
        }
    }
}

/// Tells everybody. What follows a receipt is others' code, and the thread is everybody's; its file
/// is let go first, so that mostly others close it.
fn report(over: Over) {
    for (
        Request {
            file, done, whom, ..
        },
        ended,
    ) in over
    {
        drop(file);
        let ended = ended.map(|()| done);
        match (whom, ended) {
            (Whom::Receipt(receipt), ended) => {
                let tell = || match ended {
                    Ok(moved) => receipt.carried(moved),
                    Err(libc::ECANCELED) => drop(receipt),
                    Err(errno) => receipt.failed(Failure::Os { errno }),
                };
                drop(catch_unwind(AssertUnwindSafe(tell)));
            }
            // It may have given up; the slot goes back then.
            (Whom::Thread(thread, slot), ended) => drop(thread.send((ended, slot))),
        }
    }
}

impl Ring {
    fn new(memory: &Memory, op: Op, entries: usize, origin: Origin) -> Result<Self> {
        let fail = |problem: io::Error| {
            Error::io(
                "create a ring (hf3fs_iorcreate4) for",
                memory.mount.display().to_string(),
                problem,
            )
        };
        let mount = mount(&memory.mount).map_err(fail)?;
        let mut raw = Box::new(UnsafeCell::new(Ior::EMPTY));
        // A depth of zero: whatever there is is done as soon as possible.
        // SAFETY: `raw` is writable, and `mount` a string.
        let created = unsafe {
            let (entries, reads) = (entries as i32, op == Op::Read);
            (memory.api.iorcreate4)(raw.get_mut(), mount.as_ptr(), entries, reads, 0, 0, -1, 0)
        };
        answer(created).map_err(fail)?;
        Ok(Self {
            api: Arc::clone(&memory.api),
            raw,
            origin,
        })
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if self.origin.is_here() {
            // SAFETY: the library made it, and nobody uses it any more.
            unsafe { (self.api.iordestroy)(self.raw.get()) };
        }
    }
}

impl fmt::Debug for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Way")
            .field("op", &self.op)
            .field("rings", &self.rings.len())
            .finish_non_exhaustive()
    }
}
