//! The record table, read into an index: by several threads, each a part of it. Of a file only what
//! was ever written is read.

use std::ops::Range;
use std::panic::resume_unwind;
use std::thread;

use super::ranks::{Place, is_inside, places};
use crate::error::Error;
use crate::format::layout::{self, Layout};
use crate::format::record::{self, Record, Slot, State as RecordState};
use crate::index::{Arrivals, Entry, Index, Stage};
use crate::key::{Identity, NamespaceId};
use crate::medium::Medium;
use crate::roll::{Share, share_of};

/// Records read at a time: what a second-level cache holds beside the index.
const CHUNK: u32 = 1024;

/// Records of a page, and pages that are looked at to learn how many are in use.
const PAGE: u32 = 4096 / record::LEN as u32;
const PAGES: usize = 64;

/// Fewest records for which a thread is worth its while.
const RECORDS_EACH: u32 = if cfg!(test) { 32 } else { 1 << 15 };

/// Most threads: a few cores read as fast as memory is.
const THREADS: usize = 8;

/// What a slot of the table holds that is not empty.
pub(crate) enum Held<'a> {
    Record(&'a Record),
    /// A live record whose extents the medium does not have (any more): it was truncated.
    Lost(&'a Record),
    Damaged,
}

/// The records that may be more than zeros, by rising slot.
pub(crate) fn written(medium: &dyn Medium, layout: Layout) -> Result<Vec<Range<u32>>, Error> {
    let len = record::LEN as u64;
    let ranges = medium
        .opened()
        .written(layout::TABLE, layout.records * len)?;
    let slots = ranges.into_iter().map(|(at, bytes)| {
        let begin = at - layout::TABLE;
        (begin / len) as u32..(begin + bytes).div_ceil(len) as u32
    });
    Ok(slots.collect())
}

/// Calls `each` for those of some slots that are not empty, by rising slot, and answers the highest
/// sequence of their records.
pub(crate) fn read_table(
    medium: &dyn Medium,
    layout: Layout,
    uuid: &[u8; 16],
    slots: Range<u32>,
    mut each: impl FnMut(u32, Held<'_>),
) -> Result<u64, Error> {
    let mut highest = 0;
    let end = layout.capacity.min(medium.len());
    let bytes_of = |slots: &Range<u32>| slots.len() as u64 * record::LEN as u64;
    if let Err(error) = medium.expect(layout.record(slots.start), bytes_of(&slots)) {
        // Page by page below: what cannot be read costs the blocks that were recorded there.
        let path = medium
            .opened()
            .path()
            .map(|path| path.display().to_string());
        tracing::warn!(path, %error,
            "cannot read some records of the arena; the blocks of these records are lost");
    }
    let mut chunk = vec![0; CHUNK as usize * record::LEN];
    for begin in slots.clone().step_by(CHUNK as usize) {
        let some = begin..slots.end.min(begin + CHUNK);
        let bytes = &mut chunk[..bytes_of(&some) as usize];
        // What it could not read is zeros, and lost.
        if let Err(error) = medium.read_at(layout.record(begin), bytes)
            && medium.losses() == 0
        {
            return Err(error.into());
        }
        let (records, _) = bytes.as_chunks::<{ record::LEN }>();
        // What the medium has lost reads as zeros.
        let has_lost = medium.losses() > 0;
        let is_lost = |slot: u32| medium.is_lost(layout.record(slot), record::LEN as u64);
        for (slot, bytes) in some.zip(records) {
            if has_lost && is_lost(slot) {
                each(slot, Held::Damaged);
                continue;
            }
            match &Record::decode(bytes, record::seed(uuid, slot)) {
                Slot::Empty => {}
                Slot::Used(record) if is_inside(record, layout.data, layout.capacity) => {
                    highest = highest.max(record.sequence);
                    if end == layout.capacity || is_inside(record, layout.data, end) {
                        each(slot, Held::Record(record));
                    } else if record.state == RecordState::Live {
                        each(slot, Held::Lost(record));
                    }
                }
                _ => each(slot, Held::Damaged),
            }
        }
    }
    Ok(highest)
}

fn entry(slot: u32, record: &Record, namespace: u32) -> Entry {
    let mut entry = Entry::new(record.identity.key, namespace, record.extents, record.len);
    entry.record = slot;
    entry.parts = record.parts;
    entry.checksum = record.checksum;
    entry.sequence = record.sequence;
    entry.stage = Stage::Live;
    // Until the blocks of all devices are ranked.
    entry.stamp = record.sequence;
    entry
}

/// What a thread has found in its part of the table, but for what is in the index.
#[derive(Default)]
pub(crate) struct Part {
    /// Of all records that verify.
    pub(crate) places: Vec<Place>,
    /// Slots of dead records.
    pub(crate) dead: Vec<u32>,
    pub(crate) damaged: Vec<u32>,
    /// Live blocks that another one of their identity outranks.
    pub(crate) beaten: Vec<Entry>,
    pub(crate) lost: u64,
    /// Live blocks and their bytes, by the numbers of namespaces.
    pub(crate) shares: Vec<Share>,
    pub(crate) highest: u64,
    /// Behind the last slot that is not empty.
    pub(crate) used: u32,
}

impl Part {
    fn read(
        medium: &dyn Medium,
        layout: Layout,
        uuid: &[u8; 16],
        ranges: &[Range<u32>],
        index: &Index,
    ) -> Result<Part, Error> {
        let mut part = Part::default();
        let mut arrivals = Arrivals::new(index);
        // The namespace of the record before, and its number.
        let mut last: Option<(NamespaceId, u32)> = None;
        for some in ranges {
            let highest = read_table(medium, layout, uuid, some.clone(), |slot, held| {
                part.used = slot + 1;
                let record = match held {
                    Held::Record(record) => record,
                    Held::Lost(_) => return part.lost += 1,
                    Held::Damaged => return part.damaged.push(slot),
                };
                part.places.extend(places(slot, record));
                if record.state == RecordState::Dead {
                    return part.dead.push(slot);
                }
                let id = record.identity.namespace;
                let number = match last {
                    Some((known, number)) if known == id => number,
                    _ => index.intern(id, |_| true),
                };
                last = Some((id, number));
                let share = share_of(&mut part.shares, number);
                *share = (share.0 + 1, share.1 + record.len);
                arrivals.add(entry(slot, record, number));
            })?;
            part.highest = part.highest.max(highest);
        }
        part.beaten = arrivals.end();
        Ok(part)
    }

    /// Both, where the other one's part of the table is behind this one's.
    fn join(mut self, mut other: Part) -> Part {
        self.places.append(&mut other.places);
        self.dead.append(&mut other.dead);
        self.damaged.append(&mut other.damaged);
        self.beaten.append(&mut other.beaten);
        for (number, (blocks, bytes)) in (0..).zip(other.shares) {
            let share = share_of(&mut self.shares, number);
            *share = (share.0 + blocks, share.1 + bytes);
        }
        Part {
            lost: self.lost + other.lost,
            highest: self.highest.max(other.highest),
            used: self.used.max(other.used),
            ..self
        }
    }

    /// Takes a block out of the index whose identity this is, if it is one `whose`.
    pub(crate) fn outrank(
        &mut self,
        index: &Index,
        identity: &Identity,
        whose: impl Fn(&Entry) -> bool,
    ) {
        let number = index.number(identity.namespace);
        let at = number.and_then(|number| index.find(number, &identity.key));
        if let Some((at, entry)) = at.map(|at| (at, index.get(at)))
            && whose(&entry)
        {
            self.beaten.push(entry);
            index.drop_added(at);
        }
    }
}

/// The parts of so many threads, each about as many records, one behind the other.
pub(crate) fn shares_of(ranges: &[Range<u32>], threads: usize) -> Vec<Vec<Range<u32>>> {
    let all: usize = ranges.iter().map(ExactSizeIterator::len).sum();
    let each = all.div_ceil(threads.max(1)).max(1);
    let mut shares = vec![Vec::new()];
    let mut room = each;
    for range in ranges {
        let mut rest = range.clone();
        while !rest.is_empty() {
            if room == 0 {
                shares.push(Vec::new());
                room = each;
            }
            let end = rest.start + rest.len().min(room) as u32;
            let some = rest.start..end;
            (room, rest.start) = (room - some.len(), end);
            shares
                .last_mut()
                .into_iter()
                .for_each(|share| share.push(some.clone()));
        }
    }
    shares
}

/// About how many of these records are in use, by a look at some pages of them.
pub(crate) fn in_use(medium: &dyn Medium, layout: Layout, ranges: &[Range<u32>]) -> u64 {
    let all: usize = ranges.iter().map(ExactSizeIterator::len).sum();
    let mut page = [0; PAGE as usize * record::LEN];
    let (mut seen, mut used) = (0, 0);
    for range in ranges {
        for slot in range.clone().step_by((all / PAGES).max(PAGE as usize)) {
            let count = PAGE.min(range.end - slot) as usize;
            let bytes = &mut page[..count * record::LEN];
            if medium.read_at(layout.record(slot), bytes).is_err() {
                continue;
            }
            let (records, _) = bytes.as_chunks::<{ record::LEN }>();
            used += records.iter().filter(|bytes| bytes[0] > 0).count();
            seen += count;
        }
    }
    (used as u64 * all as u64).div_ceil(seen.max(1) as u64)
}

/// Reads what is written of the table into the index.
pub(crate) fn fill(
    medium: &dyn Medium,
    layout: Layout,
    uuid: &[u8; 16],
    index: &mut Index,
) -> Result<Part, Error> {
    let ranges = written(medium, layout)?;
    let records: u64 = ranges.iter().map(|some| some.len() as u64).sum();
    index.make_room(in_use(medium, layout, &ranges));
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let threads = cores
        .min(THREADS)
        .min((records / u64::from(RECORDS_EACH)) as usize);
    let shares = shares_of(&ranges, threads);
    let index = &*index;
    let parts = thread::scope(|scope| {
        let (first, rest) = shares.split_at(1);
        let read = |share: &[Range<u32>]| Part::read(medium, layout, uuid, share, index);
        let others = rest.iter().map(|share| scope.spawn(move || read(share)));
        let others: Vec<_> = others.collect();
        let first = first.iter().map(|share| read(share)).collect::<Vec<_>>();
        let others = others
            .into_iter()
            .map(|other| other.join().unwrap_or_else(|panic| resume_unwind(panic)));
        first
            .into_iter()
            .chain(others)
            .collect::<Result<Vec<_>, _>>()
    })?;
    Ok(parts.into_iter().reduce(Part::join).unwrap_or_default())
}
