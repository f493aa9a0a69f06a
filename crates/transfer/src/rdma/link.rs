//! The initiator's side: a lane for each device that both ends have.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_host::Condvar;
use parking_lot::Mutex;

use super::{Fabric, Known};
use crate::error::Fault;
use crate::flight::{Flight, Op, Piece};
use crate::memory::Memory;
use crate::task::PRIORITIES;
use crate::verbs::{self, Completion, ENDPOINT_LEN, Endpoint, QueuePair};
use crate::wire::{Bytes, Verb};

/// How often what is under way is looked at: whether it is cancelled, or late.
const EVERY: Duration = Duration::from_millis(20);

/// Work requests that are ready before the device is told of them.
const WATERMARK: usize = 16;

/// What is asked of the target through its connections.
pub(crate) trait Asks: Send + Sync {
    fn ask(&self, verb: Verb, body: Vec<u8>, most: Bytes, timeout: Duration) -> Option<Vec<u8>>;
}

/// Memory that devices of a target know.
pub(crate) trait Exposes: Send + Sync {
    /// Where its ranges are.
    fn ranges(&self) -> Option<&Ranges>;

    /// Moves a slice by a connection.
    fn by_connection(&self, flight: Flight);
}

/// The devices between this process and a target, until something has failed on one of them.
pub(crate) struct Link {
    lanes: Vec<Arc<Lane>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    is_over: Arc<AtomicBool>,
}

struct Lane {
    device: usize,
    fabric: Arc<Fabric>,
    memory: Arc<Memory>,
    state: Mutex<State>,
    wake: Condvar,
    is_over: Arc<AtomicBool>,
    posts: AtomicU64,
    work_requests: AtomicU64,
}

#[derive(Default)]
struct State {
    queues: [VecDeque<(Flight, Arc<dyn Exposes>)>; PRIORITIES],
}

impl Link {
    /// Joins a target, which is asked by `asks`.
    pub(crate) fn join(
        fabric: &Arc<Fabric>,
        memory: &Arc<Memory>,
        asks: Arc<dyn Asks>,
        timeout: Duration,
    ) -> Option<Link> {
        let queues: Result<Vec<QueuePair>, verbs::Error> = (0..fabric.len())
            .map(|device| fabric.queue(device))
            .collect();
        let queues = queues
            .inspect_err(|error| tracing::warn!(%error, "RDMA setup failed; using TCP"))
            .ok()?;
        let ends: Vec<u8> = queues
            .iter()
            .flat_map(|queue| queue.local().to_bytes())
            .collect();
        let most = Bytes::Upto(ends.len() as u64);
        let answer = asks.ask(Verb::Join, ends, most, timeout)?;
        let (theirs, _) = answer.as_chunks::<ENDPOINT_LEN>();
        let is_over = Arc::new(AtomicBool::new(false));
        let mut link = Link {
            lanes: Vec::new(),
            threads: Mutex::default(),
            is_over: Arc::clone(&is_over),
        };
        for (device, (mut queue, end)) in queues.into_iter().zip(theirs).enumerate() {
            let connected = Endpoint::from_bytes(*end).and_then(|end| queue.connect(&end));
            let lane = connected.and_then(|()| verbs::Lane::new(queue, WATERMARK));
            let lane = lane
                .inspect_err(|error| tracing::warn!(%error, "RDMA setup failed; using TCP"))
                .ok()?;
            let ours = Arc::new(Lane {
                device,
                fabric: Arc::clone(fabric),
                memory: Arc::clone(memory),
                state: Mutex::default(),
                wake: Condvar::new(),
                is_over: Arc::clone(&is_over),
                posts: AtomicU64::new(0),
                work_requests: AtomicU64::new(0),
            });
            let (its, asks) = (Arc::clone(&ours), Arc::clone(&asks));
            let name = format!("kvdepot-rdma-{device}");
            let run = move || its.run(lane, asks.as_ref());
            let thread = kvdepot_host::cpu::spawn(&name, run).ok()?;
            link.lanes.push(ours);
            link.threads.get_mut().push(thread);
        }
        Some(link).filter(|link| !link.lanes.is_empty())
    }

    pub(crate) fn devices(&self) -> usize {
        self.lanes.len()
    }

    /// How often devices were told of work requests, and of how many.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let sum = |count: fn(&Lane) -> &AtomicU64| {
            let each = self
                .lanes
                .iter()
                .map(|lane| count(lane).load(Ordering::Relaxed));
            each.sum()
        };
        (sum(|lane| &lane.posts), sum(|lane| &lane.work_requests))
    }

    /// Whether it carries anything.
    pub(crate) fn is_up(&self) -> bool {
        !self.is_over.load(Ordering::Acquire)
    }

    /// Gives a device a slice.
    pub(crate) fn submit(&self, lane: usize, flight: Flight, opened: &Arc<dyn Exposes>) {
        let lane = &self.lanes[lane % self.lanes.len()];
        let mut state = lane.state.lock();
        // Under the lock: whoever ends the lane has emptied it, or is still to.
        if lane.is_over.load(Ordering::Acquire) {
            drop(state);
            opened.by_connection(flight);
            return;
        }
        state.queues[flight.priority()].push_back((flight, Arc::clone(opened)));
        drop(state);
        lane.wake.notify_one();
    }

    /// Ends it. What may go on goes by connections.
    pub(crate) fn close(&self) {
        self.is_over.store(true, Ordering::Release);
        for lane in &self.lanes {
            drop(lane.state.lock());
            lane.wake.notify_all();
        }
        for thread in std::mem::take(&mut *self.threads.lock()) {
            // It catches nothing, and has nothing to say.
            drop(thread.join());
        }
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link")
            .field("devices", &self.devices())
            .finish_non_exhaustive()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.close();
    }
}

/// A slice that was posted, and how many of its work requests are not reported.
struct Posted {
    flight: Flight,
    opened: Arc<dyn Exposes>,
    left: usize,
    failed: bool,
}

struct Work<'a> {
    lane: verbs::Lane,
    ours: &'a Lane,
    posted: BTreeMap<u64, Posted>,
    last: u64,
    out: Vec<Completion>,
}

impl Lane {
    fn run(&self, lane: verbs::Lane, asks: &dyn Asks) {
        let mut work = Work {
            lane,
            ours: self,
            posted: BTreeMap::new(),
            last: 0,
            out: Vec::new(),
        };
        while !self.is_over.load(Ordering::Acquire) && work.lane.is_open() {
            match self.next(work.posted.is_empty()) {
                Some((flight, opened)) => work.post(flight, opened),
                None => work.wait(),
            }
            work.settle();
            if work.is_stuck() {
                break;
            }
        }
        work.end(asks);
    }

    /// Local memory, as the device knows it. Under the registry's lock, so that what is forgotten
    /// meanwhile is not known again.
    fn know(&self, piece: &Piece) -> Option<Arc<verbs::Region>> {
        self.memory.look(|memory| {
            let region = memory.find(piece.local, u64::from(piece.len))?;
            self.fabric.know(self.device, region).ok()
        })
    }

    /// What comes next; with `idle` it is waited for.
    fn next(&self, idle: bool) -> Option<(Flight, Arc<dyn Exposes>)> {
        let mut state = self.state.lock();
        loop {
            let next = state.queues.iter_mut().find_map(VecDeque::pop_front);
            if next.is_some() || !idle || self.is_over.load(Ordering::Acquire) {
                return next;
            }
            self.wake.wait(&mut state);
        }
    }
}

impl Work<'_> {
    /// Posts a slice, as one work request for each of its ranges here and there.
    fn post(&mut self, flight: Flight, opened: Arc<dyn Exposes>) {
        if let Some(cause) = flight.cause() {
            return flight.end(Err(cause));
        }
        let Some(works) = self.works(&flight, opened.as_ref()) else {
            // Its memory is none that the device knows.
            return opened.by_connection(flight);
        };
        self.last += 1;
        let id = self.last;
        let op = match flight.op {
            Op::Read => verbs::Op::Read,
            Op::Write => verbs::Op::Write,
        };
        let left = works.len();
        let posted = Posted {
            flight,
            opened,
            left,
            failed: false,
        };
        self.posted.insert(id, posted);
        for (remote, piece) in works {
            while let Err(error) = self.lane.push(id, op, remote, std::slice::from_ref(&piece)) {
                let full = matches!(error, verbs::Error::Full { .. });
                if full && self.lane.is_open() && !self.is_stuck() {
                    self.wait();
                    self.settle_but(id);
                    continue;
                }
                if !matches!(error, verbs::Error::Full { .. } | verbs::Error::Shut) {
                    tracing::warn!(%error,
                        "RDMA transfer failed to start; using TCP for this transfer");
                }
                // Not taken, and so not reported.
                if let Some(posted) = self.posted.get_mut(&id) {
                    posted.left -= 1;
                    posted.failed = true;
                }
                break;
            }
        }
    }

    fn works(
        &self,
        flight: &Flight,
        opened: &dyn Exposes,
    ) -> Option<Vec<(verbs::Remote, verbs::Piece)>> {
        let mut works = Vec::with_capacity(flight.pieces.len());
        for piece in &flight.pieces {
            let known = self.ours.know(piece)?;
            let mut local = (piece.local - known.addr()) as usize;
            let mut each = |remote: verbs::Remote, len: usize| {
                works.push((remote, known.piece(local, len).ok()?));
                local += len;
                Some(())
            };
            opened.ranges()?.find(self.ours.device, piece, &mut each)?;
        }
        Some(works)
    }

    /// Waits for reports, a moment.
    fn wait(&mut self) {
        self.lane.wait(Instant::now() + EVERY, &mut self.out);
    }

    fn settle(&mut self) {
        self.settle_but(0);
    }

    /// Ends what all work requests are reported of, but for one that is still being posted.
    fn settle_but(&mut self, posting: u64) {
        let counts = self.lane.counts();
        self.ours.posts.store(counts.posts, Ordering::Relaxed);
        self.ours
            .work_requests
            .store(counts.work_requests, Ordering::Relaxed);
        for completion in std::mem::take(&mut self.out) {
            if let Some(posted) = self.posted.get_mut(&completion.id) {
                posted.left -= 1;
                posted.failed |= completion.ended.is_err();
            }
        }
        let is_over =
            |id: &u64, posted: &mut Posted| *id != posting && posted.left == 0 && !posted.failed;
        let over: Vec<u64> = self
            .posted
            .iter_mut()
            .filter_map(|(id, posted)| is_over(id, posted).then_some(*id))
            .collect();
        for id in over {
            if let Some(posted) = self.posted.remove(&id) {
                posted.flight.end(Ok(()));
            }
        }
    }

    /// Whether something that is under way is not to be waited for any more, or has failed.
    fn is_stuck(&self) -> bool {
        let now = Instant::now();
        self.posted.values().any(|posted| {
            posted.failed || posted.flight.cause().is_some() || posted.flight.is_late(now)
        })
    }

    /// Ends the lane: no device touches anything of it any more. What may go on goes by a
    /// connection, once the target has ended its side, too: no write arrives after that.
    fn end(mut self, asks: &dyn Asks) {
        self.ours.is_over.store(true, Ordering::Release);
        self.lane.finish(Instant::now(), &mut self.out);
        self.lane.shut(&mut self.out);
        self.settle();
        let mut left: Vec<(Flight, Arc<dyn Exposes>)> = Vec::new();
        left.extend(
            std::mem::take(&mut self.posted)
                .into_values()
                .map(|one| (one.flight, one.opened)),
        );
        let wrote = left.iter().any(|(flight, _)| flight.op == Op::Write);
        let mut state = self.ours.state.lock();
        left.extend(state.queues.iter_mut().flat_map(std::mem::take));
        drop(state);
        let now = Instant::now();
        let deadline = left
            .iter()
            .filter_map(|(flight, _)| Some(flight.progress()?.deadline))
            .min();
        let patience = deadline.map_or(EVERY, |deadline| deadline.saturating_duration_since(now));
        let apart = !wrote
            || asks
                .ask(Verb::Join, Vec::new(), Bytes::Just(0), patience)
                .is_some();
        let now = Instant::now();
        for (mut flight, opened) in left {
            let late = flight.is_late(now);
            flight.tries += 1;
            match flight.cause() {
                Some(cause) => flight.end(Err(cause)),
                None if late => flight.end(Err(Fault::TimedOut)),
                None if !apart => flight.end(Err(Fault::Lost)),
                None => opened.by_connection(flight),
            }
        }
    }
}

/// Ranges of a grant by device, as the target said them.
#[derive(Debug)]
pub(crate) struct Ranges {
    /// Of each device: where each begins in the grant, and what is known of it.
    all: Vec<Vec<(u64, Known)>>,
}

impl Ranges {
    /// From what the target said, which is of `devices` devices and `len` bytes of each.
    pub(crate) fn new(known: &[Known], devices: usize, len: u64) -> Option<Ranges> {
        let mut all: Vec<Vec<(u64, Known)>> = vec![Vec::new(); devices];
        let mut ends = vec![0_u64; devices];
        for range in known {
            let device = range.device.get() as usize;
            let end = ends.get_mut(device)?;
            all[device].push((*end, *range));
            *end = end.checked_add(range.len.get())?;
        }
        ends.iter().all(|end| *end == len).then_some(Ranges { all })
    }

    /// Where a piece lies, range by range.
    pub(crate) fn find(
        &self,
        device: usize,
        piece: &Piece,
        each: &mut dyn FnMut(verbs::Remote, usize) -> Option<()>,
    ) -> Option<()> {
        let ranges = self.all.get(device)?;
        let (mut offset, mut left) = (piece.offset, u64::from(piece.len));
        let mut number = ranges
            .partition_point(|(start, _)| *start <= offset)
            .checked_sub(1)?;
        while left > 0 {
            let (start, known) = ranges.get(number)?;
            let inside = offset - start;
            let take = left.min(known.len.get() - inside);
            let remote = verbs::Remote {
                addr: known.addr.get() + inside,
                rkey: known.rkey.get(),
            };
            each(remote, take as usize)?;
            (offset, left, number) = (offset + take, left - take, number + 1);
        }
        Some(())
    }
}
