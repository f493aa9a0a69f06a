//! What a batch moves: parts, the leaves they are hashed in, and who owns the memory.

use crate::buffer::Owner;
use crate::carrier::{Alignment, Carrier};
use crate::checksum::{Checksum, LEAF, LeafMac, Mac, MacKey, PartId, compose};
use crate::end::End;
use crate::error::{Error, Failure, Result};
use crate::memory::staged::{Desks, Direct};
use crate::memory::{kernel::Isa, lost, mover::Mover, mover::Units};
use crate::slab::{Region, Slab};
use crate::way::{Sides, Way};
use kvdepot_plan::{Range, Span, Unit, zip_units};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Maximum number of parts in one batch. It protects against an endless loop and is much larger
/// than the batches of any engine.
pub const PARTS_MAX: usize = 1 << 20;

/// Maximum length of a part in bytes (16 GiB), a limit of the format.
pub const PART_LEN_MAX: u64 = 1 << 34;

/// The most units that are read without a lane between: each takes some microseconds to ask for.
const READ_UNITS_MAX: usize = 64;

pub(super) const SOURCE: usize = 0;
pub(super) const DESTINATION: usize = 1;

/// Everything the lanes look at. While a batch is in flight it is only read, except for the
/// atomics; every one of them is written by one lane and read after the join.
#[derive(Debug, Default)]
pub(crate) struct Cargo {
    pub(super) parts: Vec<Part>,
    pub(super) units: Vec<Unit>,
    pub(super) spans: Vec<Span>,
    pub(super) bytes: u64,
    /// The digest of every unit of a part with several, low and high half; of every unit where
    /// they are kept.
    digests: Vec<[AtomicU64; 2]>,
    /// The same of units whose parts have a MAC, where any has.
    macs: Vec<[AtomicU64; 2]>,
    /// Whether whoever submits the batch wants the digests of leaves too.
    pub(super) keeps_leaves: bool,
    owners: Vec<Owner>,
    /// The last owners of a source and of a destination, by position: many buffers in a row have
    /// the same owner, and counting references is not free.
    last: [Option<usize>; 2],
    /// Room to turn buffers into ranges.
    pub(super) ranges: (Vec<Range>, Vec<Range>),
    /// What parts go through that cannot go at once, or are not to.
    pub(super) slab: Option<Arc<Slab>>,
    /// Whether copies in memory go through it too.
    pub(super) staged: bool,
    /// Whom routes name.
    carriers: Vec<Known>,
    /// The call that it takes turns for.
    pub(super) call: Option<usize>,
}

/// A carrier of the batch, and the end that it is for.
#[derive(Debug)]
struct Known {
    end: End,
    carrier: Arc<dyn Carrier>,
    alignment: Alignment,
}

/// Which carrier a part comes from, and which it goes to: numbers, and none where that is memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Route {
    pub(super) from: Option<u32>,
    pub(super) to: Option<u32>,
}

/// One part in flight.
#[derive(Debug)]
pub(crate) struct Part {
    id: PartId,
    len: u64,
    pub(super) expected: Option<Checksum>,
    /// What it is authenticated with, and the MAC that is expected.
    key: Option<Arc<MacKey>>,
    pub(super) mac_expected: Option<Mac>,
    pub(super) tag: u32,
    copies: bool,
    route: Route,
    /// The first of its units, and how many are not done yet.
    first_unit: u32,
    units: u32,
    units_left: AtomicU32,
    checksum: [AtomicU64; 2],
    mac: [AtomicU64; 2],
    /// Whether both hold.
    done: AtomicBool,
    /// What became of a piece of it that a carrier did not carry.
    failure: OnceLock<Failure>,
}

impl Part {
    /// A part that goes that route, or else is only hashed.
    pub(super) fn new(
        id: &PartId,
        expected: Option<Checksum>,
        tag: u32,
        (route, copies): (Route, bool),
    ) -> Self {
        Self {
            id: *id,
            len: 0,
            expected,
            key: None,
            mac_expected: None,
            tag,
            copies,
            route,
            first_unit: 0,
            units: 0,
            units_left: AtomicU32::new(0),
            checksum: [const { AtomicU64::new(0) }; 2],
            mac: [const { AtomicU64::new(0) }; 2],
            done: AtomicBool::new(false),
            failure: OnceLock::new(),
        }
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        self.failure.get().copied()
    }

    pub(super) fn checksum(&self) -> Option<Checksum> {
        let done = self.done.load(Ordering::Relaxed);
        done.then(|| Checksum::from_u128(load(&self.checksum)))
    }

    /// What [`Part::checksum`] goes with, of a part that is authenticated.
    pub(super) fn mac(&self) -> Option<Mac> {
        self.key.as_ref()?;
        Some(Mac(load(&self.mac).to_le_bytes()))
    }
}

impl Cargo {
    pub(super) fn add(&mut self, mut part: Part, src: &[Range], dst: &[Range]) -> Result<usize> {
        let index = self.parts.len();
        if index >= PARTS_MAX {
            return Err(Error::BatchFull { max: PARTS_MAX });
        }
        let (spans, units) = (self.spans.len(), self.units.len());
        let zipped = zip_units(
            index as u32,
            src,
            dst,
            LEAF,
            &mut self.spans,
            &mut self.units,
        );
        let checked = zipped
            .map_err(|error| plan_error(error, part.tag))
            .and_then(|len| {
                check_len(len)?;
                check_overlap(&self.spans[spans..], &part)?;
                Ok(len)
            });
        part.len = checked.inspect_err(|_| {
            self.spans.truncate(spans);
            self.units.truncate(units);
        })?;
        part.first_unit = units as u32;
        part.units = (self.units.len() - units) as u32;
        part.units_left = AtomicU32::new(part.units);
        self.bytes += part.len;
        self.parts.push(part);
        Ok(index)
    }

    /// Has a part authenticated too, and its MAC compared if one is expected.
    pub(super) fn authenticate(&mut self, part: usize, key: &Arc<MacKey>, expected: Option<Mac>) {
        if let Some(part) = self.parts.get_mut(part) {
            part.key = Some(Arc::clone(key));
            part.mac_expected = expected;
        }
    }

    pub(super) fn hold_once(&mut self, owner: &Owner, side: usize) {
        let same = |at: &usize| Arc::as_ptr(&self.owners[*at]).addr() == Arc::as_ptr(owner).addr();
        if self.last[side].filter(same).is_none() {
            self.last[side] = Some(self.owners.len());
            self.owners.push(Arc::clone(owner));
        }
    }

    /// Whether a part was copied to where its medium has failed.
    pub(super) fn is_lost(&self, part: usize) -> bool {
        lost::any()
            && self.parts.get(part).is_some_and(|part| {
                let units = part.first_unit as usize..(part.first_unit + part.units) as usize;
                let spans = self.units[units].iter();
                let mut spans = spans.flat_map(|unit| unit.spans(&self.spans).unwrap_or(&[]));
                part.copies
                    && part.route.to.is_none()
                    && spans.any(|span| lost::is_lost(span.dst as usize, span.len as usize))
            })
    }

    /// The digests of a part's leaves, in order, where they are kept.
    pub(super) fn leaves(&self, part: usize) -> impl Iterator<Item = u128> + use<'_> {
        let units = self.parts.get(part).map_or(0..0, |part| {
            part.first_unit as usize..(part.first_unit + part.units) as usize
        });
        self.digests.get(units).unwrap_or(&[]).iter().map(load)
    }

    /// Makes room for the lanes' results.
    pub(super) fn prepare(&mut self) {
        self.digests.resize_with(self.units.len(), Default::default);
        if self.parts.iter().any(|part| part.key.is_some()) {
            self.macs.resize_with(self.units.len(), Default::default);
        }
    }

    /// Lets the owners go and forgets the batch.
    pub(super) fn clear(&mut self) {
        self.owners.clear();
        self.last = [None; 2];
        self.parts.clear();
        self.units.clear();
        self.spans.clear();
        self.digests.clear();
        self.macs.clear();
        self.keeps_leaves = false;
        self.slab = None;
        self.staged = false;
        self.carriers.clear();
        self.call = None;
        self.bytes = 0;
    }

    /// The number of `end`'s carrier; none for memory of this process. `slab` is what its parts may
    /// go through.
    pub(super) fn carrier_of(
        &mut self,
        end: &End,
        slab: impl FnOnce() -> Result<Arc<Slab>>,
    ) -> Result<Option<u32>> {
        let known = self.carriers.iter().position(|known| known.end.is(end));
        if let Some(known) = known {
            return Ok(Some(known as u32));
        }
        let Some(carrier) = end.carrier() else {
            return Ok(None);
        };
        let slab = slab()?;
        slab.register(&carrier);
        self.slab = Some(slab);
        self.carriers.push(Known {
            end: end.clone(),
            alignment: carrier.alignment(),
            carrier,
        });
        Ok(Some(self.carriers.len() as u32 - 1))
    }

    pub(super) fn alignment(&self, carrier: Option<u32>) -> Option<Alignment> {
        Some(self.carriers.get(carrier? as usize)?.alignment)
    }

    pub(super) fn carrier(&self, number: u32) -> Option<Arc<dyn Carrier>> {
        let known = self.carriers.get(number as usize)?;
        Some(Arc::clone(&known.carrier))
    }

    /// The route of a unit.
    pub(super) fn route(&self, unit: u32) -> Route {
        self.part_of(unit).route
    }

    pub(super) fn is_carried(&self, unit: u32) -> bool {
        !self.carriers.is_empty() && self.route(unit) != Route::default()
    }

    /// Whether neighbours of a unit are asked for with it.
    pub(super) fn asks_seldom(&self, unit: u32) -> bool {
        let Route { from, to } = self.route(unit);
        let seldom = |side: Option<u32>| {
            let known = side.and_then(|number| self.carriers.get(number as usize));
            known.is_some_and(|known| known.carrier.asks_seldom())
        };
        seldom(from) || seldom(to)
    }

    /// What a carry of its carriers should have at least.
    pub(super) fn carry_least(&self) -> u64 {
        let least = self
            .carriers
            .iter()
            .map(|known| known.carrier.carry_least());
        least.max().unwrap_or(0)
    }

    /// Whether it has a carrier that is better asked seldom.
    pub(super) fn has_seldom_asked(&self) -> bool {
        let mut carriers = self.carriers.iter();
        carriers.any(|known| known.carrier.asks_seldom())
    }

    /// Whether all of it is read first by who takes long for it, in few pieces.
    pub(super) fn waits_for_reads(&self) -> bool {
        let slow = |number: u32| {
            let known = self.carriers.get(number as usize);
            known.is_some_and(|known| known.carrier.is_slow())
        };
        let few = self.units.len() <= READ_UNITS_MAX && !self.carriers.is_empty();
        few && self
            .parts
            .iter()
            .all(|part| part.route.from.is_some_and(slow))
    }

    /// The first unit after `first` that has another route.
    pub(super) fn route_end(&self, first: u32) -> u32 {
        let count = self.units.len() as u32;
        if self.carriers.is_empty() {
            return count;
        }
        let differs = |unit: &u32| self.route(*unit) != self.route(first);
        (first..count).find(differs).unwrap_or(count)
    }

    /// How a unit goes.
    pub(super) fn way(&self, unit: u32) -> Way {
        let Route { from, to } = self.route(unit);
        let (from, to) = (self.alignment(from), self.alignment(to));
        let (spans, _, copies) = self.unit(unit);
        Sides { from, to, copies }.way(spans)
    }

    pub(super) fn copies(&self, unit: u32) -> bool {
        self.part_of(unit).copies
    }

    /// What a unit is authenticated with, as its bytes pass.
    pub(super) fn mac_of(&self, unit: u32) -> Option<LeafMac> {
        Some(LeafMac::new(self.part_of(unit).key.as_ref()?))
    }

    /// All bytes of a unit are in place: their digest, and their MAC if they have one.
    pub(super) fn seal(&self, unit: u32, digest: u128, mac: Option<u128>) {
        if let Some((cell, mac)) = self.macs.get(unit as usize).zip(mac) {
            store(cell, mac);
        }
        self.sealed(unit, digest);
    }

    /// The MAC of a unit that lies in memory where it went, or was read.
    fn mac_in_memory(&self, unit: u32) -> Option<u128> {
        let mut mac = self.mac_of(unit)?;
        let (spans, _, copies) = self.unit(unit);
        for span in spans {
            let at = if copies { span.dst } else { span.src };
            let at = std::ptr::with_exposed_provenance::<u8>(at as usize);
            // SAFETY: this lane has just read or written it, and whoever submitted the batch has
            // promised that it stays; no other part writes there.
            mac.update(unsafe { std::slice::from_raw_parts(at, span.len as usize) });
        }
        Some(mac.finish())
    }

    /// Notes that some bytes of a unit were not carried.
    pub(super) fn fail(&self, unit: u32, failure: Failure) {
        // The first failure is the part's.
        let _first = self.part_of(unit).failure.set(failure);
    }

    /// Whoever brings the last digest of a part seals the part.
    fn sealed(&self, number: u32, digest: u128) {
        let part = self.part_of(number);
        let units = part.first_unit as usize..(part.first_unit + part.units) as usize;
        let macs = || self.macs.get(units.clone()).unwrap_or(&[]).iter().map(load);
        if part.units > 1 || self.keeps_leaves {
            store(&self.digests[number as usize], digest);
        }
        if part.units == 1 {
            part.seal(std::iter::once(digest), macs());
            return;
        }
        // Release what was just stored, acquire what the others have stored.
        if part.units_left.fetch_sub(1, Ordering::AcqRel) == 1 {
            let digests = self.digests[units.clone()].iter().map(load);
            part.seal(digests, macs());
        }
    }

    fn part_of(&self, unit: u32) -> &Part {
        &self.parts[self.units[unit as usize].tag as usize]
    }

    /// Moves units `first..first + count`, all from memory to memory, through a region if there is
    /// one.
    ///
    /// # Safety
    ///
    /// As [`Mover::run`].
    pub(super) unsafe fn run(&self, mover: Mover, first: u32, count: u32, region: Option<&Region>) {
        let Some(region) = region else {
            // SAFETY: the caller's promise.
            return unsafe { mover.run(self, first, count, &mut Direct) };
        };
        // SAFETY: the region is this call's alone; otherwise the caller's promise.
        unsafe {
            let mut desks = Desks::new(Isa::best(), region.as_mut_ptr(), region.len());
            mover.run(self, first, count, &mut desks);
        }
    }

    /// Roughly how many bytes are kept for later batches.
    pub(super) fn footprint(&self) -> usize {
        self.parts.capacity() * size_of::<Part>()
            + self.units.capacity() * (size_of::<Unit>() + 16)
            + self.spans.capacity() * size_of::<Span>()
            + self.owners.capacity() * size_of::<Owner>()
    }
}

impl Units for Cargo {
    fn unit(&self, number: u32) -> (&[Span], u64, bool) {
        let unit = &self.units[number as usize];
        let spans = unit.spans(&self.spans).unwrap_or(&[]);
        (spans, unit.bytes, self.parts[unit.tag as usize].copies)
    }

    fn source(&self, number: u32) -> u64 {
        let first = self
            .units
            .get(number as usize)
            .map(|unit| unit.first_span as usize);
        first
            .and_then(|first| self.spans.get(first))
            .map_or(0, |span| span.src)
    }

    fn report(&self, number: u32, digest: u128) {
        self.seal(number, digest, self.mac_in_memory(number));
    }
}

impl Part {
    fn seal(&self, digests: impl Iterator<Item = u128>, macs: impl Iterator<Item = u128>) {
        if let Some(key) = &self.key {
            let mac = key.compose(&self.id, self.len, macs);
            store(&self.mac, u128::from_le_bytes(mac.0));
        }
        store(
            &self.checksum,
            compose(&self.id, self.len, digests).to_u128(),
        );
        self.done.store(true, Ordering::Relaxed);
    }
}

fn store(cell: &[AtomicU64; 2], value: u128) {
    cell[0].store(value as u64, Ordering::Relaxed);
    cell[1].store((value >> 64) as u64, Ordering::Relaxed);
}

fn load(cell: &[AtomicU64; 2]) -> u128 {
    let [low, high] = [&cell[0], &cell[1]].map(|half| half.load(Ordering::Relaxed));
    (u128::from(high) << 64) | u128::from(low)
}

fn check_len(len: u64) -> Result<()> {
    if (1..=PART_LEN_MAX).contains(&len) {
        return Ok(());
    }
    Err(Error::Invalid {
        field: "part length",
        value: len,
        allowed: "1 to 17179869184 bytes",
    })
}

/// A span that is copied within itself would be hashed as one thing and stored as another.
fn check_overlap(spans: &[Span], part: &Part) -> Result<()> {
    let overlaps = |span: &&Span| span.src < span.dst + span.len && span.dst < span.src + span.len;
    match spans.iter().find(overlaps) {
        Some(span) if part.copies && part.route.from == part.route.to => Err(Error::Overlap {
            tag: part.tag,
            addr: span.src.max(span.dst),
        }),
        _ => Ok(()),
    }
}

fn plan_error(error: kvdepot_plan::Error, tag: u32) -> Error {
    match error {
        kvdepot_plan::Error::LengthMismatch { src, dst } => Error::LengthMismatch { tag, src, dst },
        kvdepot_plan::Error::RangeOverflow { addr, len } => Error::OutOfBounds {
            offset: addr,
            len,
            end: u64::MAX,
        },
        kvdepot_plan::Error::TotalOverflow => Error::Invalid {
            field: "part length",
            value: u64::MAX,
            allowed: "1 to 17179869184 bytes",
        },
        _ => Error::BatchFull { max: PARTS_MAX },
    }
}
