//! What a batch moves: parts, the leaves they are hashed in, and who owns the memory.

use super::Shared;
use super::slab::{Region, Slab};
use crate::buffer::{Buffer, Owner};
use crate::checksum::{Checksum, LEAF, PartId, compose};
use crate::cuda::{Device, Sink};
use crate::error::{Error, Result};
use crate::memory::staged::{Desks, Direct};
use crate::memory::{lost, mover::Mover, mover::Units};
use kvdepot_plan::{Range, Span, Unit, zip_units};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// The most parts of one batch; a bound against a wrong loop, far above any engine's batch.
pub const PARTS_MAX: usize = 1 << 20;

/// The longest part, in bytes (16 GiB): a limit of the format.
pub const PART_LEN_MAX: u64 = 1 << 34;

/// Parts that shall be moved together. Its memory comes from earlier batches of its copier.
#[derive(Debug)]
pub struct Batch {
    pub(super) memory: Option<Memory>,
    home: Arc<Shared>,
}

impl Batch {
    pub(super) fn new(memory: Memory, home: Arc<Shared>) -> Self {
        Self {
            memory: Some(memory),
            home,
        }
    }

    /// Whether `home` made this batch.
    pub(super) fn is_from(&self, home: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.home, home)
    }

    /// Adds a part: the bytes of `src`, one buffer after the other, go to those of `dst`. Returns
    /// its position in the batch; `tag` is the caller's own number for it.
    ///
    /// Its checksum is computed on the way, and compared if one is `expected`; the bytes are moved
    /// either way. Destinations of different parts must not overlap, and no part may write what
    /// another reads: their bytes would be unspecified (the checksums tell). The batch keeps the
    /// buffers' owners until every lane has stopped and the completion has run.
    ///
    /// # Errors
    ///
    /// The batch is then as it was. [`Error::Invalid`] for a part of no bytes or of more than
    /// [`PART_LEN_MAX`], [`Error::LengthMismatch`], [`Error::ReadOnly`], [`Error::Overlap`],
    /// [`Error::BatchFull`] beyond [`PARTS_MAX`], [`Error::OnDevice`] for sources on a device and
    /// destinations that are not all in the same one's memory.
    pub fn part(
        &mut self,
        id: &PartId,
        src: &[Buffer],
        dst: &[Buffer],
        expected: Option<Checksum>,
        tag: u32,
    ) -> Result<usize> {
        if let Some(fixed) = dst.iter().find(|buffer| !buffer.is_writable()) {
            return Err(Error::ReadOnly { addr: fixed.addr() });
        }
        let device = self.device_of(dst)?;
        let index = self.add_buffers(Part::new(id, expected, tag, true), src, Some(dst))?;
        if let Some((slab, device)) = device {
            let memory = self.memory();
            (memory.slab, memory.device) = (Some(slab), Some(device));
        }
        Ok(index)
    }

    /// Adds a part that is only hashed, in place.
    ///
    /// # Errors
    ///
    /// As [`Batch::part`].
    pub fn hash_only(
        &mut self,
        id: &PartId,
        src: &[Buffer],
        expected: Option<Checksum>,
        tag: u32,
    ) -> Result<usize> {
        self.add_buffers(Part::new(id, expected, tag, false), src, None)
    }

    /// Has all parts go through the staging slab: bytes are read into a region of it, hashed on the
    /// way, and carried from there to their destination, at any alignment.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when there is no memory for the slab, which the first batch takes.
    pub fn stage(&mut self) -> Result<()> {
        self.memory().slab = Some(self.home.slab()?);
        Ok(())
    }

    /// The number of parts.
    #[must_use]
    pub fn len(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.parts.len())
    }

    /// Whether there are no parts yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes of all parts together.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.memory.as_ref().map_or(0, |memory| memory.bytes)
    }

    /// The device that `dst` belongs to, if it is one's, and the slab, pinned for it.
    fn device_of(&self, dst: &[Buffer]) -> Result<Option<(Arc<Slab>, Arc<Device>)>> {
        let first = dst.first().and_then(Buffer::device);
        let known = match self.memory.as_ref().filter(|memory| memory.copies) {
            Some(memory) => memory.device.as_ref(),
            None => first,
        };
        let differs = |one: &&Buffer| one.device().map(Arc::as_ptr) != known.map(Arc::as_ptr);
        if let Some(other) = dst.iter().find(differs) {
            return Err(Error::OnDevice { addr: other.addr() });
        }
        let Some(device) = first else {
            return Ok(None);
        };
        let slab = self.home.slab()?;
        slab.pin_for(device);
        Ok(Some((slab, Arc::clone(device))))
    }

    fn add_buffers(&mut self, part: Part, src: &[Buffer], dst: Option<&[Buffer]>) -> Result<usize> {
        src.iter().try_for_each(Buffer::check_host)?;
        let memory = self.memory();
        let (mut from, mut to) = std::mem::take(&mut memory.ranges);
        let range = |buffer: &Buffer| Range::new(buffer.addr() as u64, buffer.len() as u64);
        from.extend(src.iter().map(range));
        to.extend(dst.unwrap_or(src).iter().map(range));
        let added = memory.add(part, &from, &to);
        from.clear();
        to.clear();
        memory.ranges = (from, to);
        let index = added?;
        for buffer in src {
            memory.hold_once(buffer.owner(), SOURCE);
        }
        for buffer in dst.unwrap_or(&[]) {
            memory.hold_once(buffer.owner(), DESTINATION);
        }
        Ok(index)
    }

    /// The memory, which only `submit` takes away, together with the batch.
    fn memory(&mut self) -> &mut Memory {
        self.memory.get_or_insert_default()
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.home.recycle(memory);
        }
    }
}

const SOURCE: usize = 0;
const DESTINATION: usize = 1;

/// Everything the lanes look at. While a batch is in flight it is only read, except for the
/// atomics; every one of them is written by one lane and read after the join.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(super) parts: Vec<Part>,
    pub(super) units: Vec<Unit>,
    pub(super) spans: Vec<Span>,
    pub(super) bytes: u64,
    /// The digest of every unit of a part with several, low and high half.
    digests: Vec<[AtomicU64; 2]>,
    owners: Vec<Owner>,
    /// The last owners of a source and of a destination, by position: many buffers in a row have
    /// the same owner, and counting references is not free.
    last: [Option<usize>; 2],
    /// Room to turn buffers into ranges.
    ranges: (Vec<Range>, Vec<Range>),
    /// What the parts go through, if they do.
    slab: Option<Arc<Slab>>,
    /// Whose memory the destinations are, unless this process's.
    device: Option<Arc<Device>>,
    /// Whether there are any.
    copies: bool,
}

/// One part in flight.
#[derive(Debug)]
pub(crate) struct Part {
    id: PartId,
    len: u64,
    pub(super) expected: Option<Checksum>,
    pub(super) tag: u32,
    copies: bool,
    /// The first of its units, and how many are not done yet.
    first_unit: u32,
    units: u32,
    units_left: AtomicU32,
    checksum: [AtomicU64; 2],
    /// Whether `checksum` holds.
    done: AtomicBool,
    /// Whether a device did not take a piece of it.
    failed: AtomicBool,
}

impl Part {
    fn new(id: &PartId, expected: Option<Checksum>, tag: u32, copies: bool) -> Self {
        Self {
            id: *id,
            len: 0,
            expected,
            tag,
            copies,
            first_unit: 0,
            units: 0,
            units_left: AtomicU32::new(0),
            checksum: [const { AtomicU64::new(0) }; 2],
            done: AtomicBool::new(false),
            failed: AtomicBool::new(false),
        }
    }

    pub(super) fn failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    pub(super) fn checksum(&self) -> Option<Checksum> {
        let done = self.done.load(Ordering::Relaxed);
        done.then(|| Checksum::from_u128(load(&self.checksum)))
    }
}

impl Memory {
    fn add(&mut self, mut part: Part, src: &[Range], dst: &[Range]) -> Result<usize> {
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
        self.copies |= part.copies;
        self.parts.push(part);
        Ok(index)
    }

    fn hold_once(&mut self, owner: &Owner, side: usize) {
        let same = |at: &usize| Arc::as_ptr(&self.owners[*at]).addr() == Arc::as_ptr(owner).addr();
        if self.last[side].filter(same).is_none() {
            self.last[side] = Some(self.owners.len());
            self.owners.push(Arc::clone(owner));
        }
    }

    /// Whether a part was copied to where its medium has failed.
    pub(super) fn is_lost(&self, part: usize) -> bool {
        lost::any()
            && self.device.is_none()
            && self.parts.get(part).is_some_and(|part| {
                let units = part.first_unit as usize..(part.first_unit + part.units) as usize;
                let spans = self.units[units].iter();
                let mut spans = spans.flat_map(|unit| unit.spans(&self.spans).unwrap_or(&[]));
                part.copies && spans.any(|span| lost::is_lost(span.dst as usize, span.len as usize))
            })
    }

    /// Makes room for the lanes' results.
    pub(super) fn prepare(&mut self) {
        self.digests.resize_with(self.units.len(), Default::default);
    }

    /// Lets the owners go and forgets the batch.
    pub(super) fn clear(&mut self) {
        self.owners.clear();
        self.last = [None; 2];
        self.parts.clear();
        self.units.clear();
        self.spans.clear();
        self.digests.clear();
        self.slab = None;
        self.device = None;
        self.copies = false;
        self.bytes = 0;
    }

    /// Moves units `first..first + count`.
    ///
    /// # Safety
    ///
    /// As [`Mover::run`].
    pub(crate) unsafe fn run(&self, mover: Mover, first: u32, count: u32) {
        let Some(slab) = &self.slab else {
            // SAFETY: the caller's promise.
            return unsafe { mover.run(self, first, count, &mut Direct) };
        };
        let region = slab.take();
        let Some(device) = &self.device else {
            // SAFETY: the region is this call's alone until it is dropped, after the desks;
            // otherwise the caller's promise.
            return unsafe {
                let mut desks = Desks::new(mover.isa, region.as_mut_ptr(), region.len());
                mover.run(self, first, count, &mut desks);
            };
        };
        // Two where there are: the device reads one while this lane fills the other.
        let more = slab.try_take();
        let regions = std::iter::once(&region).chain(&more);
        let regions: Vec<*mut u8> = regions.map(Region::as_mut_ptr).collect();
        // SAFETY: as above; the sink waits for the device before it is gone.
        let taken = unsafe {
            let mut sink = Sink::new(device, &regions, region.len());
            mover.run(self, first, count, &mut sink);
            sink.finish()
        };
        if taken.is_err() {
            for unit in &self.units[first as usize..(first + count) as usize] {
                let part = &self.parts[unit.tag as usize];
                part.failed.store(part.copies, Ordering::Relaxed);
            }
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

impl Units for Memory {
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

    /// Whoever brings the last digest of a part seals the part.
    fn report(&self, number: u32, digest: u128) {
        let part = &self.parts[self.units[number as usize].tag as usize];
        if part.units == 1 {
            part.seal(std::iter::once(digest));
            return;
        }
        store(&self.digests[number as usize], digest);
        // Release what was just stored, acquire what the others have stored.
        if part.units_left.fetch_sub(1, Ordering::AcqRel) == 1 {
            let all = &self.digests[part.first_unit as usize..][..part.units as usize];
            part.seal(all.iter().map(load));
        }
    }
}

impl Part {
    fn seal(&self, digests: impl Iterator<Item = u128>) {
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
        Some(span) if part.copies => Err(Error::Overlap {
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
