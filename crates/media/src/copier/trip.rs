//! A slice on its way from or to a carrier.
//!
//! A trip goes from leg to leg. A lane plans a leg and hands its receipts to the carrier; when the
//! last of them is gone, whatever became of it, the trip is given to the lanes again, which hash
//! and copy what has come and plan the next leg. So no lane waits for a carrier, no carrier's
//! thread copies or hashes, and between two legs a trip needs nothing but a free lane. It has the
//! guard of its batch and its region all the way.

use super::area::{Area, Run};
use super::cargo::{Cargo, Route};
use super::patience::Expected;
use super::shared::{Errand, Flight, Shared, lock};
use crate::carrier::{Carrier, Leg, Op, Receipt};
use crate::checksum::LeafMac;
use crate::error::Failure;
use crate::memory::kernel::{self, Isa, Store};
use crate::memory::leaf::{Leaf, Plan};
use crate::memory::mover::{Mover, Units};
use crate::slab::{Region, Waits};
use crate::way::Way;
use kvdepot_plan::{Guard, Span};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// Bytes that are hashed and then authenticated: they fit a near cache, and are many enough for all
/// that a processor computes at once.
const MAC_PIECE: usize = 64 << 10;

/// Units of one route that go the same way.
pub(crate) struct Trip {
    /// Goes before the guard: where the batch has ended, all regions are back.
    region: Option<Region>,
    from: Option<Arc<dyn Carrier>>,
    to: Option<Arc<dyn Carrier>>,
    /// What has been read into the region, and what is to be written from it. Without a region, the
    /// runs lie in the caller's memory.
    read: Area,
    write: Area,
    /// What is planned next, and where it began.
    next: Cursor,
    first: u32,
    end: u32,
    /// What is hashed next, and how much of its unit is left.
    hashed: u32,
    left: u64,
    leaf: Leaf,
    /// Of a unit whose part is authenticated.
    mac: Option<LeafMac>,
    /// What a lane does with the bytes of this leg, as addresses: copies or, from a span to itself,
    /// only hashes them.
    steps: Vec<Span>,
    /// Digests of what has not yet arrived.
    digests: Vec<(u32, u128, Option<u128>)>,
    /// What the carrier was asked for, and what it failed at.
    leg: Option<Op>,
    failures: Vec<(usize, Failure)>,
    /// Its carrier was waited for, and did not answer.
    late: bool,
    guard: Guard<Flight>,
}

/// A place in the spans of a batch: what is left of one span.
#[derive(Clone, Copy)]
struct Cursor {
    unit: u32,
    span: usize,
    done: u64,
}

impl Trip {
    /// Begins the trip of units `first..end`, which share a route and a way. One that finds no
    /// region waits for it without a lane.
    pub(super) fn begin(guard: Guard<Flight>, (first, end): (u32, u32), way: Way, mover: Mover) {
        let Some(cargo) = guard.payload().cargo() else {
            return;
        };
        let (Route { from, to }, slab) = (cargo.route(first), cargo.slab.clone());
        let carrier = |side: Option<u32>| side.and_then(|side| cargo.carrier(side));
        let trip = Box::new(Self {
            region: None,
            from: carrier(from),
            to: carrier(to),
            read: Area::default(),
            write: Area::default(),
            next: Cursor::at(first),
            first,
            end,
            hashed: first,
            left: 0,
            leaf: Leaf::EMPTY,
            mac: None,
            steps: Vec::new(),
            digests: Vec::new(),
            leg: None,
            failures: Vec::new(),
            late: false,
            guard,
        });
        if way != Way::Region {
            return trip.go(mover);
        }
        let hands = [&trip.from, &trip.to].map(|side| side.as_ref().map(|one| one.hands()));
        let hands = match hands {
            [from, to] if from == to => [from, None],
            both => both,
        };
        let taken = slab.and_then(|slab| slab.take(trip, hands));
        if let Some((trip, region)) = taken {
            trip.with_region(region).go(mover);
        }
    }

    /// Cuts the region in two where bytes are read into it and written from it: they may have to
    /// lie differently.
    fn with_region(mut self: Box<Self>, region: Region) -> Box<Self> {
        let len = region.len() as u64;
        let half = match self.from.is_some() && self.to.is_some() {
            true => len / 2 / 4096 * 4096,
            false => 0,
        };
        if let Some(from) = &self.from {
            let len = if half > 0 { half } else { len };
            self.read = Area::new(0, len, from.alignment());
        }
        if let Some(to) = &self.to {
            self.write = Area::new(half, len - half, to.alignment());
        }
        self.region = Some(region);
        self
    }

    /// Whether nobody waits for it any more, or the copier for what carriers have.
    fn is_given_up(&self) -> bool {
        self.late || self.guard.is_cancelled() || self.guard.payload().shared().has_given_up()
    }

    /// The call that it is of.
    pub(super) fn call(&self) -> usize {
        self.guard.payload().call()
    }

    /// Whether one of its carriers takes long for a leg.
    pub(super) fn is_slow(&self) -> bool {
        let mut carriers = self.from.iter().chain(&self.to);
        carriers.any(|carrier| carrier.is_slow())
    }

    /// Gives the trip to the lanes, from any thread.
    fn go_on(self: Box<Self>) {
        let shared = Arc::clone(self.guard.payload().shared());
        shared.resume(Errand::Trip(self));
    }

    /// What a lane does between two legs. Where the batch was cancelled, nothing: units that are
    /// not reported fail their parts.
    pub(super) fn go(mut self: Box<Self>, mover: Mover) {
        let guard = self.guard.clone();
        let Some(cargo) = guard.payload().cargo() else {
            return;
        };
        if self.late {
            let errno = libc::ETIMEDOUT;
            let left = self.first..self.end;
            left.for_each(|unit| cargo.fail(unit, Failure::Os { errno }));
        }
        if self.is_given_up() {
            return;
        }
        self.note_failures(cargo);
        match self.leg.take() {
            Some(Op::Read) => self.hash(cargo, mover),
            Some(Op::Write) => {
                self.write.clear();
                self.report(cargo);
            }
            None => {}
        }
        loop {
            self.plan(cargo);
            if self.steps.is_empty() && self.write.runs().is_empty() {
                return;
            }
            if self.steps.is_empty() {
                return self.embark(Op::Write, guard.payload().shared());
            }
            if self.from.is_some() {
                return self.embark(Op::Read, guard.payload().shared());
            }
            self.hash(cargo, mover);
        }
    }

    /// Parts that have bytes of a run which was not carried fail, and others do not.
    fn note_failures(&mut self, cargo: &Cargo) {
        let runs = match self.leg {
            Some(Op::Write) => self.write.runs(),
            _ => self.read.runs(),
        };
        for (number, failure) in self.failures.drain(..) {
            if let Some(Run { units, .. }) = runs.get(number) {
                (units.0..=units.1).for_each(|unit| cargo.fail(unit, failure));
            }
        }
    }

    /// Lays out as much as there is room for. Nothing, when all is planned or what is to be written
    /// has to go first.
    fn plan(&mut self, cargo: &Cargo) {
        self.steps.clear();
        self.read.clear();
        let base = self
            .region
            .as_ref()
            .map(|region| region.as_mut_ptr().addr() as u64);
        while self.next.unit < self.end {
            let (unit, span) = (self.next.unit, self.next.span(cargo));
            let step = match base {
                None => self.straight(unit, span),
                Some(base) => self.through(base, unit, span, cargo.copies(unit)),
            };
            if step.len == 0 {
                return;
            }
            self.steps.push(step);
            self.next.advance(step.len, cargo);
        }
    }

    /// Bytes that are carried from or to where they are in the caller's memory, and hashed there.
    fn straight(&mut self, unit: u32, span: Span) -> Span {
        let Span { src, dst, len } = span;
        let (area, at, memory) = match self.from.is_some() {
            true => (&mut self.read, src, dst),
            false => (&mut self.write, dst, src),
        };
        area.lie(at, memory, len, unit);
        Span::new(memory, memory, len)
    }

    /// Bytes that go through the region at `base`.
    fn through(&mut self, base: u64, unit: u32, span: Span, copies: bool) -> Span {
        let Span {
            mut src,
            mut dst,
            mut len,
        } = span;
        if self.from.is_some() {
            len = len.min(self.read.room(src));
        }
        if self.to.is_some() {
            len = len.min(self.write.room(dst));
        }
        if len == 0 {
            return Span::new(src, dst, 0);
        }
        if self.from.is_some() {
            src = base + self.read.add(src, len, unit);
        }
        if self.to.is_some() {
            dst = base + self.write.add(dst, len, unit);
        } else if !copies {
            dst = src;
        }
        Span::new(src, dst, len)
    }

    /// Hashes the bytes of this leg, and copies them to where they go.
    fn hash(&mut self, cargo: &Cargo, mover: Mover) {
        for step in std::mem::take(&mut self.steps) {
            if self.left == 0 {
                self.left = cargo.units[self.hashed as usize].bytes;
                self.leaf = Leaf::new(self.left);
                self.mac = cargo.mac_of(self.hashed);
                #[cfg(test)]
                crate::memory::fault::strike(self.left);
            }
            let passes = self.to.as_ref().is_none_or(|to| to.passes_caches());
            let streams = passes && cargo.units[self.hashed as usize].bytes >= mover.stream_min;
            let store = match step.src == step.dst {
                true => Store::Nothing,
                false if streams => Store::Streaming,
                false => Store::Cached,
            };
            let next = std::ptr::null();
            let src = std::ptr::with_exposed_provenance(step.src as usize);
            let dst = std::ptr::with_exposed_provenance_mut(step.dst as usize);
            // SAFETY: both are the caller's memory, which the guard keeps as whoever added the part
            // promised, or lie in the region, which is this trip's alone while no leg is under way;
            // `Area` lays out nothing beyond its end. They do not overlap: areas are apart, regions
            // are in nobody's buffer, and a step from memory to memory there is none.
            unsafe { self.feed((src, dst, step.len as usize), Plan { store, next }) };
            self.left -= step.len;
            if self.left == 0 {
                let mac = self.mac.take().map(|mac| mac.finish());
                self.digests.push((self.hashed, self.leaf.finish(), mac));
                self.hashed += 1;
            }
        }
        kernel::fence();
        if self.to.is_none() {
            self.report(cargo);
        }
    }

    /// Hashes some bytes, and copies them as `plan` says; while the processor has them at hand
    /// their MAC goes on too.
    ///
    /// # Safety
    ///
    /// As [`Leaf::feed`].
    unsafe fn feed(&mut self, (mut src, mut dst, len): (*const u8, *mut u8, usize), plan: Plan) {
        let piece = match self.mac {
            Some(_) => MAC_PIECE,
            None => len,
        };
        let mut left = len;
        while left > 0 {
            let now = left.min(piece);
            // SAFETY: the caller's promise, of a part of it.
            unsafe { self.leaf.feed(Isa::best(), src, dst, now, plan) };
            if let Some(mac) = &mut self.mac {
                // SAFETY: readable, by the caller's promise; what is copied does not overlap it.
                mac.update(unsafe { std::slice::from_raw_parts(src, now) });
            }
            (src, dst, left) = (src.wrapping_add(now), dst.wrapping_add(now), left - now);
        }
    }

    /// Units that are where they go.
    fn report(&mut self, cargo: &Cargo) {
        for (unit, digest, mac) in self.digests.drain(..) {
            cargo.seal(unit, digest, mac);
        }
    }

    /// Hands this leg to the carrier, with everything it touches.
    fn embark(mut self: Box<Self>, op: Op, shared: &Shared) {
        let (carrier, area) = match op {
            Op::Read => (self.from.clone(), &self.read),
            Op::Write => (self.to.clone(), &self.write),
        };
        let Some(carrier) = carrier else { return };
        let base = self
            .region
            .as_ref()
            .map(|region| region.as_mut_ptr().addr() as u64);
        let at = carrier.alignment().at;
        let orders: Vec<Order> = area
            .runs()
            .iter()
            .map(|run| Order::new(op, run, base, at))
            .collect();
        self.leg = Some(op);
        let patience = carrier.patience(op);
        let leg = Arc::new(UnderWay {
            call: self.call(),
            trip: Mutex::new(Some(self)),
            failures: Mutex::default(),
            region: Mutex::default(),
        });
        if let Some(patience) = patience {
            let leg: Weak<UnderWay> = Arc::downgrade(&leg);
            shared.expect(leg, patience);
        }
        let receipt = |(number, order): (usize, Order)| {
            let leg = Arc::clone(&leg) as Arc<dyn Leg>;
            // SAFETY: the trip, which the leg holds, has the region, and the guard of the batch,
            // which keeps the caller's memory; it touches neither until the leg is gone. Runs do
            // not overlap: destinations are apart, and so are the runs of an area, rounded too.
            unsafe { Receipt::new(op, order.at, order.memory, order.least, number, leg) }
        };
        let receipts = orders.into_iter().enumerate().map(receipt).collect();
        drop(leg);
        shared.carry(carrier, receipts);
    }
}

impl Waits for Box<Trip> {
    fn is_cancelled(&self) -> bool {
        self.is_given_up()
    }

    fn call(&self) -> usize {
        Trip::call(self)
    }

    fn go_on(self: Box<Self>, region: Region) {
        Trip::go_on((*self).with_region(region));
    }
}

/// What a carrier is asked for: a run, rounded to what it takes.
struct Order {
    at: u64,
    memory: (usize, usize),
    least: usize,
}

impl Order {
    fn new(op: Op, run: &Run, base: Option<u64>, alignment: u64) -> Self {
        let (place, lead) = (base.unwrap_or(0) + run.place, run.at % alignment);
        let least = lead + run.len;
        let len = least.next_multiple_of(alignment);
        if op == Op::Write && len > least {
            let end: *mut u8 = std::ptr::with_exposed_provenance_mut((place + run.len) as usize);
            // SAFETY: what is rounded up lies in a region, whose areas end at multiples of every
            // alignment, and belongs to no other run.
            unsafe { end.write_bytes(0, (len - least) as usize) };
        }
        Self {
            at: run.at - lead,
            memory: ((place - lead) as usize, len as usize),
            least: least as usize,
        }
    }
}

/// A leg that a carrier has.
struct UnderWay {
    /// Whose it is.
    call: usize,
    trip: Mutex<Option<Box<Trip>>>,
    failures: Mutex<Vec<(usize, Failure)>>,
    /// Of a trip that went on without its carrier, which may still touch it.
    region: Mutex<Option<Region>>,
}

impl Expected for UnderWay {
    /// The trip's parts fail, and its region stays with what the carrier still has. Only for a leg
    /// that touches nothing else.
    fn abandon(&self, patience: Duration) {
        let Some(mut trip) = lock(&self.trip).take() else {
            return;
        };
        let Some(region) = trip.region.take() else {
            *lock(&self.trip) = Some(trip);
            return;
        };
        region.is_late(patience);
        *lock(&self.region) = Some(region);
        trip.late = true;
        trip.go_on();
    }
}

impl Leg for UnderWay {
    fn failed(&self, number: usize, failure: Failure) {
        lock(&self.failures).push((number, failure));
    }

    fn is_cancelled(&self) -> bool {
        let trip = lock(&self.trip);
        trip.as_ref().is_none_or(|trip| trip.is_given_up())
    }

    fn call(&self) -> usize {
        self.call
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let trip = lock(&self.trip).take();
        if let Some(mut trip) = trip {
            trip.failures = std::mem::take(&mut *lock(&self.failures));
            trip.go_on();
        }
    }
}

impl Cursor {
    fn at(unit: u32) -> Self {
        Self {
            unit,
            span: 0,
            done: 0,
        }
    }

    /// What is left of the span.
    fn span(&self, cargo: &Cargo) -> Span {
        let (spans, ..) = cargo.unit(self.unit);
        let Span { src, dst, len } = spans[self.span];
        Span::new(src + self.done, dst + self.done, len - self.done)
    }

    fn advance(&mut self, len: u64, cargo: &Cargo) {
        let (spans, ..) = cargo.unit(self.unit);
        self.done += len;
        if self.done < spans[self.span].len {
            return;
        }
        (self.span, self.done) = (self.span + 1, 0);
        if self.span == spans.len() {
            *self = Self::at(self.unit + 1);
        }
    }
}

impl std::fmt::Debug for Trip {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trip")
            .field("next", &self.next.unit)
            .field("end", &self.end)
            .field("leg", &self.leg)
            .finish_non_exhaustive()
    }
}
