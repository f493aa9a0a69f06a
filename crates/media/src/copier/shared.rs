//! What a copier's threads share: its queues, its slab, and the batches that are under way.

use super::cargo::Cargo;
use super::config::CopierConfig;
use super::outcome::Done;
use super::patience::{Expected, Watch};
use super::trip::Trip;
use crate::carrier::{Carrier, Receipt};
use crate::copy_kernel;
use crate::error::Result;
use crate::lane::{Queues, Task};
use crate::memory::mover::Mover;
use crate::simulated::is_simulated;
use crate::slab::{Region, Slab, Waits};
use crate::way::Way;
use kvdepot_host::fork::Origin;
use kvdepot_plan::{Ending, Guard, Join, Limits, Planner, Ready};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// The least bytes of a slice: below, handing it over costs more than moving it.
const SLICE_MIN: u64 = 128 << 10;

/// Slices that a batch should have for each lane, so that lanes end at about the same time.
const SLICES_PER_LANE: u64 = 4;

/// Reads of so many bytes are asked for by who submits them, without a lane between: of few pieces
/// that takes some hundred microseconds, and there is nothing to hash before they have come.
const READ_BYTES_MAX: u64 = 8 << 20;

/// Batches whose memory is kept for later ones, and how much of it each may keep.
const SPARES_MAX: usize = 8;
const SPARE_BYTES_MAX: usize = 64 << 20;

/// What the copier, its lanes, its batches and its tickets share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// In the place of the lanes.
    #[cfg(feature = "sim")]
    pub(super) schedule: Option<Arc<crate::sim::Schedule>>,
    pub(super) queues: Queues<Errand>,
    pub(super) config: CopierConfig,
    spares: Mutex<Vec<Cargo>>,
    planners: Mutex<Vec<Planner>>,
    slab: Mutex<Option<Arc<Slab>>>,
    pub(super) watch: Watch,
    /// Batches submitted and not ended.
    in_flight: AtomicUsize,
    pub(super) closing: AtomicBool,
    /// Nobody waits for carriers any more, and nothing new is begun.
    given_up: AtomicBool,
    pub(super) origin: Origin,
}

impl Shared {
    pub(super) fn new(config: CopierConfig, mover: Mover, origin: Origin) -> Self {
        Self {
            #[cfg(feature = "sim")]
            schedule: crate::sim::current(),
            queues: Queues::new(config.lanes, mover),
            config,
            spares: Mutex::new(Vec::new()),
            planners: Mutex::new(Vec::new()),
            slab: Mutex::new(None),
            watch: Watch::default(),
            in_flight: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
            origin,
        }
    }

    /// Room for a batch, mostly an earlier one's.
    pub(super) fn spare(&self) -> Cargo {
        lock(&self.spares).pop().unwrap_or_default()
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closing.load(Ordering::SeqCst) || !self.origin.is_here()
    }

    /// The slab, made when it is asked for first.
    pub(super) fn slab(&self) -> Result<Arc<Slab>> {
        let mut slab = lock(&self.slab);
        if let Some(slab) = &*slab {
            return Ok(Arc::clone(slab));
        }
        let (len, regions) = self.config.slab();
        let new = Arc::new(Slab::new(len, regions)?);
        *slab = Some(Arc::clone(&new));
        Ok(new)
    }

    /// Lets go of what waits for a region and is cancelled.
    pub(super) fn drop_cancelled(&self) {
        let slab = lock(&self.slab).clone();
        slab.iter().for_each(|slab| slab.drop_cancelled());
    }

    pub(super) fn give_up(&self) {
        self.given_up.store(true, Ordering::SeqCst);
        self.drop_cancelled();
        self.watch.abandon_all();
    }

    /// Waits so long for a leg's carrier; not in a simulation, whose carriers answer.
    pub(super) fn expect(&self, leg: Weak<dyn Expected>, patience: Duration) {
        if !is_simulated() {
            self.watch.expect(leg, patience);
        }
        if self.has_given_up() {
            self.watch.abandon_all();
        }
    }

    pub(super) fn has_given_up(&self) -> bool {
        self.given_up.load(Ordering::SeqCst)
    }

    /// Keeps a batch's memory for a later one.
    pub(super) fn recycle(&self, mut cargo: Cargo) {
        cargo.clear();
        let mut spares = lock(&self.spares);
        if spares.len() < SPARES_MAX && cargo.footprint() <= SPARE_BYTES_MAX {
            spares.push(cargo);
        }
    }

    /// How much is kept for later batches: memory of batches, and planners.
    #[cfg(test)]
    pub(super) fn spares(&self) -> [usize; 2] {
        [lock(&self.spares).len(), lock(&self.planners).len()]
    }

    /// Moves a small batch in the calling thread; otherwise as [`Shared::dispatch`].
    pub(super) fn start(&self, join: &Join<Flight>) {
        let Some(cargo) = join.payload().cargo() else {
            return;
        };
        if self.config.kernel.is_none() {
            copy_kernel::moves(cargo.bytes);
        }
        if cargo.bytes > self.inline_max() {
            return self.dispatch(join, cargo);
        }
        let count = cargo.units.len() as u32;
        let mut first = 0;
        while first < count {
            let next = cargo.route_end(first);
            self.queues.execute(Errand::Slice(Slice {
                guard: join.guard(),
                first,
                count: next - first,
            }));
            first = next;
        }
    }

    /// Plans the batch and gives its slices to the lanes, wave by wave. All units of a slice have
    /// the same route.
    fn dispatch(&self, join: &Join<Flight>, cargo: &Cargo) {
        let Some(mut planner) = self.planner(cargo) else {
            return;
        };
        let (mut first, mut next) = (0, 0);
        let mut route_end = cargo.route_end(0);
        let here = cargo.bytes <= self.reads_max() && cargo.waits_for_reads();
        for unit in &cargo.units {
            if next == route_end {
                route_end = cargo.route_end(next);
                self.hand_out(join, (&mut first, here), planner.finish());
            }
            next += 1;
            // Never refused: units come from `zip_units`, which makes none of no bytes and at most
            // 2^32. If it were, the parts left out would fail.
            let Ok(ready) = planner.push_unit(*unit) else {
                break;
            };
            self.hand_out(join, (&mut first, here), ready);
        }
        self.hand_out(join, (&mut first, here), planner.finish());
        lock(&self.planners).push(planner);
    }

    /// Gives slices to the lanes, or begins them `here`.
    fn hand_out(&self, join: &Join<Flight>, (first, here): (&mut u32, bool), ready: Ready<'_>) {
        let Some(slice) = ready.slices().first() else {
            return;
        };
        let (lane, count) = (slice.lane, ready.len());
        for (slice, pieces) in ready {
            let next = Slice {
                guard: join.guard(),
                first: *first,
                count: pieces.len() as u32,
            };
            *first += next.count;
            match here {
                true => self.queues.execute(Errand::Slice(next)),
                false => self.push(slice.lane, Errand::Slice(next)),
            }
        }
        if !here {
            self.queues.wake(lane, count);
        }
    }

    /// A planner for a batch: lanes get shares of it, but for carriers that rather get few large
    /// requests.
    fn planner(&self, cargo: &Cargo) -> Option<Planner> {
        let lanes = self.config.lanes;
        let fair = match cargo.has_seldom_asked() {
            true => self.config.slice_size,
            false => cargo.bytes / (lanes as u64 * SLICES_PER_LANE),
        };
        let least = self.slice_min().max(cargo.carry_least());
        let slice_size = fair.max(least).min(self.config.slice_size);
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
    fn push(&self, lane: usize, errand: Errand) {
        self.queues.push(lane, errand);
    }

    /// Gives the lanes what goes before new slices.
    #[cfg(not(feature = "sim"))]
    pub(super) fn resume(&self, errand: Errand) {
        self.queues.resume(errand);
    }

    #[cfg(not(feature = "sim"))]
    #[expect(clippy::unused_self, reason = "a schedule may come between")]
    pub(super) fn carry(&self, carrier: Arc<dyn Carrier>, receipts: Vec<Receipt>) {
        carrier.carry(receipts);
    }

    #[cfg(not(feature = "sim"))]
    pub(super) fn threads(&self) -> usize {
        self.config.lanes
    }

    #[cfg(not(feature = "sim"))]
    fn inline_max(&self) -> u64 {
        self.config.inline_max
    }

    #[cfg(not(feature = "sim"))]
    #[expect(clippy::unused_self, reason = "a schedule may come between")]
    fn reads_max(&self) -> u64 {
        READ_BYTES_MAX
    }

    #[cfg(not(feature = "sim"))]
    fn slice_min(&self) -> u64 {
        SLICE_MIN
    }

    /// Ends the lanes when the copier is closed and nothing is in flight.
    pub(super) fn stop_if_idle(&self) {
        if self.closing.load(Ordering::SeqCst) && self.in_flight.load(Ordering::SeqCst) == 0 {
            self.queues.stop();
        }
    }
}

/// The same where a schedule may stand in the lanes' place.
#[cfg(feature = "sim")]
impl Shared {
    fn push(&self, lane: usize, errand: Errand) {
        match &self.schedule {
            Some(schedule) => self.list(schedule, errand),
            None => self.queues.push(lane, errand),
        }
    }

    /// Gives the lanes what goes before new slices.
    pub(super) fn resume(&self, errand: Errand) {
        match &self.schedule {
            Some(schedule) => self.list(schedule, errand),
            None => self.queues.resume(errand),
        }
    }

    /// Each carry has a turn of its own.
    pub(super) fn carry(&self, carrier: Arc<dyn Carrier>, receipts: Vec<Receipt>) {
        let Some(schedule) = &self.schedule else {
            return carrier.carry(receipts);
        };
        for receipt in receipts {
            let carrier = Arc::clone(&carrier);
            // A receipt that is dropped fails the parts that it had a piece of.
            schedule.push(move |runs| match runs {
                true => carrier.carry(vec![receipt]),
                false => drop(receipt),
            });
        }
    }

    fn list(&self, schedule: &crate::sim::Schedule, errand: Errand) {
        let mover = self.queues.mover();
        // An errand that is dropped fails the parts that it had a piece of.
        schedule.push(move |runs| match runs {
            true => crate::lane::execute(errand, mover),
            false => drop(errand),
        });
    }

    pub(super) fn threads(&self) -> usize {
        self.schedule.as_ref().map_or(self.config.lanes, |_| 0)
    }

    /// All goes to the schedule.
    fn inline_max(&self) -> u64 {
        self.schedule.as_ref().map_or(self.config.inline_max, |_| 0)
    }

    fn reads_max(&self) -> u64 {
        self.schedule.as_ref().map_or(READ_BYTES_MAX, |_| 0)
    }

    /// Small histories shall have many slices too.
    fn slice_min(&self) -> u64 {
        self.schedule.as_ref().map_or(SLICE_MIN, |_| 8 << 10)
    }
}

/// What a lane does at once.
#[derive(Debug)]
pub(crate) enum Errand {
    /// A slice that nobody has begun.
    Slice(Slice),
    /// A slice that goes through the region it has got.
    Staged(Slice, Region),
    /// A slice whose carriers have done what they were asked for.
    Trip(Box<Trip>),
}

/// Units `first..first + count` of the batch that `guard` holds.
#[derive(Debug)]
pub(crate) struct Slice {
    guard: Guard<Flight>,
    first: u32,
    count: u32,
}

impl Task for Errand {
    fn is_slow(&self) -> bool {
        matches!(self, Self::Trip(trip) if trip.is_slow())
    }

    fn call(&self) -> usize {
        match self {
            Self::Slice(slice) | Self::Staged(slice, _) => slice.guard.payload().call(),
            Self::Trip(trip) => trip.call(),
        }
    }

    fn run(self, mover: Mover) {
        match self {
            Self::Slice(slice) => slice.begin(mover),
            Self::Staged(slice, region) => slice.copy(mover, Some(region)),
            Self::Trip(trip) => trip.go(mover),
        }
    }
}

impl Slice {
    fn begin(self, mover: Mover) {
        let Some(cargo) = self.guard.payload().cargo() else {
            return;
        };
        if cargo.is_carried(self.first) {
            return self.travel(cargo, mover);
        }
        let Some(slab) = cargo.slab.clone().filter(|_| cargo.staged) else {
            return self.copy(mover, None);
        };
        if let Some((slice, region)) = slab.take(self, [None; 2]) {
            slice.copy(mover, Some(region));
        }
    }

    /// Units that go straight travel alone, so that they do so side by side, unless their carrier
    /// would rather not; neighbours that go through a region share it.
    fn travel(&self, cargo: &Cargo, mover: Mover) {
        let (mut first, end) = (self.first, self.first + self.count);
        while first < end && !self.is_given_up() {
            let way = cargo.way(first);
            let together = way == Way::Region || cargo.asks_seldom(first);
            let alike = |unit: &u32| together && cargo.way(*unit) == way;
            let next = first + 1 + (first + 1..end).take_while(alike).count() as u32;
            Trip::begin(self.guard.clone(), (first, next), way, mover);
            first = next;
        }
    }

    /// Whether what nobody has begun is not to be begun. Units that are not reported fail their
    /// parts.
    fn is_given_up(&self) -> bool {
        self.guard.is_cancelled() || self.guard.payload().shared().has_given_up()
    }

    /// The region goes before the guard: where the batch has ended, all regions are back.
    fn copy(self, mover: Mover, region: Option<Region>) {
        if let Some(cargo) = self.guard.payload().cargo()
            && !self.is_given_up()
        {
            // SAFETY: whoever added a part promised that its ranges are there until the batch has
            // ended, which `guard` prevents; `Cargo::add` refused spans that overlap themselves,
            // and `mover` has kernels of this machine only.
            unsafe { cargo.run(mover, self.first, self.count, region.as_ref()) };
        }
    }
}

impl Waits for Slice {
    fn is_cancelled(&self) -> bool {
        self.is_given_up()
    }

    fn call(&self) -> usize {
        self.guard.payload().call()
    }

    /// As soon as a lane is free.
    fn go_on(self: Box<Self>, region: Region) {
        let shared = Arc::clone(self.guard.payload().shared());
        shared.resume(Errand::Staged(*self, region));
    }
}

/// A batch in flight: the payload of its join.
#[derive(Debug)]
pub(crate) struct Flight {
    /// Lanes always find it, only the completion takes it away.
    cargo: Option<Cargo>,
    token: Token,
}

impl Flight {
    pub(super) fn new(cargo: Cargo, shared: &Arc<Shared>) -> Self {
        Self {
            cargo: Some(cargo),
            token: Token::new(shared),
        }
    }

    pub(super) fn end(
        &mut self,
        ending: Ending,
        refused: bool,
        on_done: impl FnOnce(&mut Done<'_>),
    ) {
        if let Some(cargo) = &self.cargo {
            on_done(&mut Done::new(cargo, ending, refused));
        }
        if let Some(cargo) = self.cargo.take() {
            self.token.0.recycle(cargo);
        }
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.token.0
    }

    /// The call that takes turns with others: the one that was named, or else the batch itself.
    pub(super) fn call(&self) -> usize {
        let named = self.cargo.as_ref().and_then(|cargo| cargo.call);
        named.unwrap_or_else(|| std::ptr::from_ref(self).addr())
    }

    pub(super) fn cargo(&self) -> Option<&Cargo> {
        self.cargo.as_ref()
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
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
