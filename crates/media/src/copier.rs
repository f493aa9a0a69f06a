//! Moves batches of parts with persistent threads, checksums fused into the copy.
//!
//! A batch is planned in the thread that submits it, and its first slices move while the rest is
//! still being planned; a small one that thread moves itself. Whatever happens to a lane, every
//! part of a batch gets an outcome or a failure, the completion runs exactly once, and no buffer
//! is let go before all lanes have stopped.

mod batch;
mod outcome;
mod slab;

pub(crate) use batch::Memory;
pub use batch::{Batch, PART_LEN_MAX, PARTS_MAX};
pub use outcome::{Done, Failure, Outcome};

use crate::error::{Error, Result};
use crate::lane::{Queues, Task, Work};
use crate::memory::kernel::Isa;
use crate::memory::mover::Mover;
use kvdepot_host::cpu;
use kvdepot_host::fork::Origin;
use kvdepot_plan::{Ending, Join, Limits, Planner, Waiter};
use slab::Slab;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How a copier works. Start from the default and change what matters.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CopierConfig {
    /// Threads that move bytes, 1 to 256. Default: the processors this process may use, at most 8;
    /// a few saturate the memory of most machines.
    pub lanes: usize,
    /// The most bytes that a lane takes at once, at least 4096. Default 4 MiB. Smaller batches are
    /// cut finer, so that all lanes have something to do.
    pub slice_size: u64,
    /// Leaves of at least this many bytes bypass the caches on their way to the destination.
    /// Default 4 KiB.
    pub stream_min: u64,
    /// Batches of at most this many bytes are moved by the thread that submits them: waking a lane,
    /// and being woken by it, takes longer. Default 256 KiB, some 20 µs; 0 leaves all to the lanes.
    pub inline_max: u64,
    /// How long an idle lane looks for work before it sleeps. Default 20 µs.
    pub spin: Duration,
    /// The lanes' nice value, 0 to 19: above 0 for work that nobody waits for, which then leaves
    /// the processors to everybody else. Default 0.
    pub nice: u8,
    /// Bytes of the slab that staged batches go through, at least 64 KiB for each region; taken
    /// when the first one is made. Default 2 MiB for each region.
    pub staging_slab: Option<u64>,
    /// Regions of that slab, 1 to 4096: so many slices are staged at a time. Default two for each
    /// lane.
    pub staging_regions: Option<usize>,
}

/// The most lanes of a copier; a bound against a wrong unit in a configuration.
const LANES_MAX: usize = 256;

/// The least bytes of a slice: below, handing it over costs more than moving it.
const SLICE_MIN: u64 = 128 << 10;

/// Slices that a batch should have for each lane, so that lanes end at about the same time.
const SLICES_PER_LANE: u64 = 4;

/// Batches whose memory is kept for later ones, and how much of it each may keep.
const SPARES_MAX: usize = 8;
const SPARE_BYTES_MAX: usize = 64 << 20;

/// The lanes' stacks: they call nothing deep, and completions run on them as well.
const STACK_BYTES: usize = 1 << 20;

impl Default for CopierConfig {
    fn default() -> Self {
        let processors = std::thread::available_parallelism().map_or(2, usize::from);
        Self {
            lanes: processors.min(8),
            slice_size: 4 << 20,
            stream_min: 4 << 10,
            inline_max: 256 << 10,
            spin: Duration::from_micros(20),
            nice: 0,
            staging_slab: None,
            staging_regions: None,
        }
    }
}

impl CopierConfig {
    fn check(&self) -> Result<()> {
        if self.lanes == 0 || self.lanes > LANES_MAX {
            let value = self.lanes as u64;
            return Err(Error::Invalid {
                field: "lanes",
                value,
                allowed: "1 to 256",
            });
        }
        if self.slice_size < 4096 {
            let value = self.slice_size;
            return Err(Error::Invalid {
                field: "slice_size",
                value,
                allowed: "4096 or more",
            });
        }
        if self.nice > 19 {
            let value = u64::from(self.nice);
            return Err(Error::Invalid {
                field: "nice",
                value,
                allowed: "0 to 19",
            });
        }
        slab::check(self)
    }
}

/// A group of lanes. Dropping it closes it.
#[derive(Debug)]
pub struct Copier {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Copier {
    /// Starts the lanes: threads named `kvdepot-lane-N` that may run on every processor that this
    /// process's control group allows, whatever the calling thread is pinned to.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a wrong configuration, [`Error::Io`] when a thread cannot be started.
    pub fn new(config: CopierConfig) -> Result<Self> {
        config.check()?;
        let mover = Mover {
            isa: Isa::best(),
            stream_min: config.stream_min,
        };
        Self::with_mover(config, mover)
    }

    fn with_mover(config: CopierConfig, mover: Mover) -> Result<Self> {
        let origin = Origin::here();
        let origin = origin.map_err(|e| Error::io("start", "lanes", std::io::Error::other(e)))?;
        let shared = Arc::new(Shared {
            #[cfg(feature = "sim")]
            schedule: crate::sim::current(),
            queues: Queues::new(config.lanes, mover),
            config,
            spares: Mutex::new(Vec::new()),
            planners: Mutex::new(Vec::new()),
            slab: Mutex::new(None),
            in_flight: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            origin,
        });
        let copier = Self {
            shared,
            threads: Mutex::new(Vec::new()),
        };
        for lane in 0..copier.shared.threads() {
            let shared = Arc::clone(&copier.shared);
            let name = format!("kvdepot-lane-{lane}");
            let spawned = std::thread::Builder::new()
                .name(name)
                .stack_size(STACK_BYTES)
                .spawn(move || {
                    // Pinned lanes still work, only slower; there is nobody to tell.
                    drop(cpu::reset_affinity());
                    cpu::be_nice(shared.config.nice);
                    shared.queues.run(lane, shared.config.spin);
                });
            // On failure, dropping `copier` ends those that run.
            let thread = spawned.map_err(|error| Error::io("start a thread", "lane", error))?;
            lock(&copier.threads).push(thread);
        }
        Ok(copier)
    }

    /// An empty batch.
    #[must_use]
    pub fn batch(&self) -> Batch {
        let memory = lock(&self.shared.spares).pop().unwrap_or_default();
        Batch::new(memory, Arc::clone(&self.shared))
    }

    /// Takes the memory that staged batches go through, unless an earlier one has.
    ///
    /// # Errors
    ///
    /// As [`Batch::stage`].
    pub fn make_slab(&self) -> Result<()> {
        self.shared.slab().map(drop)
    }

    /// Hands a batch to the lanes. `on_done` runs once, in the thread that finishes last (a lane,
    /// or the calling one), when no lane touches the buffers any more; they are let go after it,
    /// and only then does the ticket count as done. It must not wait for the ticket. A panic in it
    /// is caught and changes nothing else.
    ///
    /// On a closed copier, or in a forked child, every part fails with [`Failure::Closed`].
    pub fn submit(
        &self,
        mut batch: Batch,
        on_done: impl FnOnce(&mut Done<'_>) + Send + 'static,
    ) -> Ticket {
        debug_assert!(
            batch.is_from(&self.shared),
            "a batch belongs to the copier that made it"
        );
        let mut memory = batch.memory.take().unwrap_or_default();
        memory.prepare();
        let token = Token::new(&self.shared);
        let refused = self.shared.is_closed();
        let flight = Flight {
            memory: Some(memory),
            token,
        };
        let join = Join::new(flight, move |flight, ending| {
            flight.end(ending, refused, on_done)
        });
        let waiter = join.waiter();
        if !refused {
            self.shared.start(&join);
        }
        drop(join);
        Ticket {
            waiter,
            shared: Arc::clone(&self.shared),
        }
    }

    /// The configuration it was started with.
    #[must_use]
    pub fn config(&self) -> &CopierConfig {
        &self.shared.config
    }

    /// The instruction set that its lanes use, for people.
    #[must_use]
    pub fn kernels(&self) -> &'static str {
        self.shared.queues.mover().isa.name()
    }

    /// Takes no more batches, waits for those in flight, and ends the lanes. From a completion it
    /// returns at once, and the lanes end after the last batch.
    pub fn close(&self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        self.shared.stop_if_idle();
        let threads = std::mem::take(&mut *lock(&self.threads));
        let current = std::thread::current().id();
        // A forked child has no lanes, and a lane cannot wait for itself.
        let foreign = !self.shared.origin.is_here();
        if foreign || threads.iter().any(|thread| thread.thread().id() == current) {
            return;
        }
        for thread in threads {
            // A lane catches what its tasks throw; there is no result to look at.
            drop(thread.join());
        }
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        self.close();
    }
}

/// A batch that was submitted. Dropping it changes nothing for the batch.
#[derive(Clone, Debug)]
pub struct Ticket {
    waiter: Waiter,
    shared: Arc<Shared>,
}

impl Ticket {
    /// Waits until the completion has run and the buffers have been let go; false when `timeout`
    /// passed first. The batch goes on in that case. `None` waits without a limit.
    #[must_use]
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        #[cfg(feature = "sim")]
        if let Some(schedule) = &self.shared.schedule {
            schedule.until(|| self.waiter.is_done());
            return true;
        }
        let start = Instant::now();
        let left = || timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
        // The last slices are often microseconds away, sleeping and waking costs many of them.
        while start.elapsed() < self.shared.config.spin {
            if self.waiter.is_done() {
                return true;
            }
            std::hint::spin_loop();
        }
        self.waiter.wait(left())
    }

    /// Whether the completion has run and the buffers have been let go.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.waiter.is_done()
    }

    /// Asks the lanes to leave out what they have not begun. Parts that miss a piece fail with
    /// [`Failure::Cancelled`]; the completion runs all the same.
    pub fn cancel(&self) {
        self.waiter.cancel();
    }
}

/// What the copier, its lanes, its batches and its tickets share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// In the place of the lanes.
    #[cfg(feature = "sim")]
    schedule: Option<Arc<crate::sim::Schedule>>,
    queues: Queues<Flight>,
    config: CopierConfig,
    spares: Mutex<Vec<Memory>>,
    planners: Mutex<Vec<Planner>>,
    slab: Mutex<Option<Arc<Slab>>>,
    /// Batches submitted and not ended.
    in_flight: AtomicUsize,
    closing: AtomicBool,
    origin: Origin,
}

impl Shared {
    fn is_closed(&self) -> bool {
        self.closing.load(Ordering::SeqCst) || !self.origin.is_here()
    }

    /// The staging slab, made when it is asked for first.
    fn slab(&self) -> Result<Arc<Slab>> {
        let mut slab = lock(&self.slab);
        if let Some(slab) = &*slab {
            return Ok(Arc::clone(slab));
        }
        let new = Arc::new(Slab::new(&self.config)?);
        *slab = Some(Arc::clone(&new));
        Ok(new)
    }

    /// Keeps a batch's memory for a later one.
    fn recycle(&self, mut memory: Memory) {
        memory.clear();
        let mut spares = lock(&self.spares);
        if spares.len() < SPARES_MAX && memory.footprint() <= SPARE_BYTES_MAX {
            spares.push(memory);
        }
    }

    /// Moves a small batch in the calling thread; otherwise as [`Shared::dispatch`].
    fn start(&self, join: &Join<Flight>) {
        let units = join
            .payload()
            .memory()
            .map(|memory| (memory.bytes, memory.units.len()));
        match units {
            Some((bytes, count)) if bytes <= self.inline_max() => {
                let task = Task {
                    guard: join.guard(),
                    first: 0,
                    count: count as u32,
                };
                self.queues.execute(task);
            }
            _ => self.dispatch(join),
        }
    }

    /// Plans the batch and gives its slices to the lanes, wave by wave.
    fn dispatch(&self, join: &Join<Flight>) {
        let Some(memory) = join.payload().memory() else {
            return;
        };
        let Some(mut planner) = self.planner(memory.bytes) else {
            return;
        };
        let mut first = 0;
        for unit in &memory.units {
            // Never refused: units come from `zip_units`, which makes none of no bytes and at most
            // 2^32. If it were, the parts left out would fail.
            let Ok(ready) = planner.push_unit(*unit) else {
                break;
            };
            self.hand_out(join, &mut first, ready);
        }
        self.hand_out(join, &mut first, planner.finish());
        lock(&self.planners).push(planner);
    }

    fn hand_out(&self, join: &Join<Flight>, first: &mut u32, ready: kvdepot_plan::Ready<'_>) {
        let Some(slice) = ready.slices().first() else {
            return;
        };
        let (lane, count) = (slice.lane, ready.len());
        for (slice, pieces) in ready {
            let task = Task {
                guard: join.guard(),
                first: *first,
                count: pieces.len() as u32,
            };
            *first += task.count;
            self.push(slice.lane, task);
        }
        self.queues.wake(lane, count);
    }

    /// A planner for a batch of so many bytes.
    fn planner(&self, bytes: u64) -> Option<Planner> {
        let lanes = self.config.lanes;
        let fair = bytes / (lanes as u64 * SLICES_PER_LANE);
        let slice_size = fair.max(self.slice_min()).min(self.config.slice_size);
        let limits = Limits {
            slice_size,
            tail_merge: slice_size / 4,
            lanes,
            watermark: lanes,
        };
        let spare = lock(&self.planners).pop();
        match spare {
            Some(mut planner) => planner.reset_with(limits).map(|()| planner).ok(),
            None => Planner::new(limits).ok(),
        }
    }

    #[cfg(not(feature = "sim"))]
    fn push(&self, lane: usize, task: Task<Flight>) {
        self.queues.push(lane, task);
    }

    #[cfg(not(feature = "sim"))]
    fn threads(&self) -> usize {
        self.config.lanes
    }

    #[cfg(not(feature = "sim"))]
    fn inline_max(&self) -> u64 {
        self.config.inline_max
    }

    #[cfg(not(feature = "sim"))]
    fn slice_min(&self) -> u64 {
        SLICE_MIN
    }

    /// Ends the lanes when the copier is closed and nothing is in flight.
    fn stop_if_idle(&self) {
        if self.closing.load(Ordering::SeqCst) && self.in_flight.load(Ordering::SeqCst) == 0 {
            self.queues.stop();
        }
    }
}

/// The same where a schedule may stand in the lanes' place.
#[cfg(feature = "sim")]
impl Shared {
    fn push(&self, lane: usize, task: Task<Flight>) {
        let Some(schedule) = &self.schedule else {
            return self.queues.push(lane, task);
        };
        let mover = self.queues.mover();
        // A task that is dropped fails the parts that it had a piece of.
        schedule.push(move |runs| match runs {
            true => crate::lane::execute(task, mover),
            false => drop(task),
        });
    }

    fn threads(&self) -> usize {
        self.schedule.as_ref().map_or(self.config.lanes, |_| 0)
    }

    /// All goes to the schedule.
    fn inline_max(&self) -> u64 {
        self.schedule.as_ref().map_or(self.config.inline_max, |_| 0)
    }

    /// Small histories shall have many slices too.
    fn slice_min(&self) -> u64 {
        self.schedule.as_ref().map_or(SLICE_MIN, |_| 8 << 10)
    }
}

/// A batch in flight: the payload of its join.
#[derive(Debug)]
pub(crate) struct Flight {
    memory: Option<Memory>,
    token: Token,
}

impl Flight {
    fn end(&mut self, ending: Ending, refused: bool, on_done: impl FnOnce(&mut Done<'_>)) {
        if let Some(memory) = &self.memory {
            on_done(&mut Done::new(memory, ending, refused));
        }
        if let Some(memory) = self.memory.take() {
            self.token.0.recycle(memory);
        }
    }
}

impl Work for Flight {
    fn memory(&self) -> Option<&Memory> {
        self.memory.as_ref()
    }
}

/// Counts a batch in flight for as long as it lives.
#[derive(Debug)]
struct Token(Arc<Shared>);

impl Token {
    fn new(shared: &Arc<Shared>) -> Self {
        // Before the look at `closing`: `close` sets that first and looks at this count then, so
        // one of the two sees the other.
        shared.in_flight.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(shared))
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::SeqCst);
        self.0.stop_if_idle();
    }
}

/// No code that runs under these locks can panic half way, so poison means nothing.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Buffer;
    use crate::checksum::{self, PartId};
    use crate::memory::fault;

    fn copier(isa: Isa) -> Copier {
        let config = CopierConfig {
            lanes: 2,
            // These tests are about lanes.
            inline_max: 0,
            ..CopierConfig::default()
        };
        Copier::with_mover(
            config,
            Mover {
                isa,
                stream_min: 4096,
            },
        )
        .unwrap()
    }

    type Moved = std::result::Result<Outcome, Failure>;

    /// Parts of many lengths, from one buffer to another.
    fn run(copier: &Copier, lens: &[usize]) -> (Vec<Moved>, bool) {
        let total = lens.iter().sum();
        let content: Vec<u8> = (0..total).map(|i| (i * 131 + i / 251) as u8).collect();
        let (src, dst) = (
            Buffer::from_vec(content.clone()),
            Buffer::from_vec(vec![0; total]),
        );
        let mut batch = copier.batch();
        let mut at = 0;
        for (number, &len) in lens.iter().enumerate() {
            let id = PartId::whole([1; 16], [number as u8; 32]);
            let expected = checksum::of(&id, &content[at..at + len]);
            let (from, to) = (src.slice(at, len).unwrap(), dst.slice(at, len).unwrap());
            batch
                .part(&id, &[from], &[to], Some(expected), number as u32)
                .unwrap();
            at += len;
        }
        let (sender, receiver) = std::sync::mpsc::channel();
        let ticket = copier.submit(batch, move |done| {
            sender
                .send(done.parts().map(|(_, part)| part).collect())
                .unwrap();
        });
        assert!(
            ticket.wait(Some(Duration::from_secs(60))),
            "the batch hangs"
        );
        (receiver.recv().unwrap(), dst.to_vec() == content)
    }

    #[test]
    fn every_instruction_set_moves_the_same_bytes() {
        let lens: &[usize] = match cfg!(miri) {
            true => &[1, 240, 241, 4096, 5000],
            false => &[
                1,
                63,
                240,
                241,
                4096,
                65_536,
                70_001,
                (1 << 20) - 1,
                (1 << 20) + 1,
                3 << 20,
            ],
        };
        for isa in Isa::all() {
            let copier = copier(isa);
            assert_eq!(copier.kernels(), isa.name());
            let (outcomes, same) = run(&copier, lens);
            assert!(same, "{isa:?}");
            assert!(
                outcomes
                    .iter()
                    .all(|part| part.unwrap().matches == Some(true)),
                "{isa:?}"
            );
        }
    }

    #[test]
    fn a_panicking_lane_fails_its_parts_and_goes_on() {
        let copier = copier(Isa::best());
        // The panic strikes the unit of this length, the second leaf of the first part, whichever
        // lane has it. (Under Miri there is no time for whole leaves.)
        let (leaf, odd) = if cfg!(miri) {
            (0, 1001)
        } else {
            (1 << 20, (1 << 20) - 77)
        };
        let lens = [leaf + odd, leaf + 3000, 4096];
        let outcomes = {
            let _fault = fault::panic_at(odd as u64);
            run(&copier, &lens).0
        };
        assert_eq!(outcomes[0], Err(Failure::LanePanicked));
        assert!(outcomes.iter().all(|part| match part {
            Ok(outcome) => outcome.matches == Some(true),
            Err(failure) => *failure == Failure::LanePanicked,
        }));
        for _ in 0..if cfg!(miri) { 2 } else { 20 } {
            let (outcomes, same) = run(&copier, &lens);
            assert!(
                same && outcomes.iter().all(Moved::is_ok),
                "the lanes survived"
            );
        }
    }

    #[test]
    fn memory_of_a_batch_is_used_again() {
        let copier = copier(Isa::best());
        for _ in 0..3 {
            run(&copier, &[400; 100]);
        }
        let spares = lock(&copier.shared.spares);
        assert_eq!(spares.len(), 1);
        assert!(spares[0].footprint() > 100 * size_of::<u64>());
        assert_eq!(lock(&copier.shared.planners).len(), 1);
    }
}
