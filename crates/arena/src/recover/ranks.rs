//! Which records count: of those that overlap or repeat an identity, the highest sequence.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use crate::format::GRANULE;
use crate::format::record::{Record, State as RecordState};
use crate::key::Identity;

/// Returns true if all extents of a record are between the offsets `begin` and `end`.
pub fn is_inside(record: &Record, begin: u64, end: u64) -> bool {
    let within =
        |(at, len): (u64, u64)| at >= begin && at.checked_add(len).is_some_and(|to| to <= end);
    record.extents.iter().all(within)
}

/// Returns, for each of these records in slot order, true if it is live and no other record
/// supersedes it.
pub fn judge(records: &[(u32, Record)]) -> Vec<bool> {
    let mut highest: HashMap<Identity, Rank> = HashMap::new();
    for (slot, record) in records {
        let rank = rank(*slot, record);
        let known = highest.entry(record.identity).or_insert(rank);
        *known = rank.max(*known);
    }
    let each = records
        .iter()
        .flat_map(|(slot, record)| places(*slot, record));
    let mut extents: Vec<Place> = each.collect();
    let at = |slot: u32| records.partition_point(|(other, _)| *other < slot);
    let mut below = HashSet::new();
    overlaps(&mut extents, |a, b| {
        let rank = |slot| rank(slot, &records[at(slot)].1);
        below.insert(if rank(a) > rank(b) { b } else { a });
    });
    let is_served = |(slot, record): &(u32, Record)| {
        record.state == RecordState::Live
            && highest[&record.identity] == rank(*slot, record)
            && !below.contains(slot)
    };
    records.iter().map(is_served).collect()
}

/// Where a record counts: by falling sequence, and of equal ones, which no sound arena holds, the
/// lower slot first.
pub(super) type Rank = (u64, Reverse<u32>);

pub(super) fn rank(slot: u32, record: &Record) -> Rank {
    (record.sequence, Reverse(slot))
}

/// An extent, and whose it is: begin and length in granules, so that the order is that of their
/// begins, and the record's slot.
pub(super) type Place = (u64, u32);

const LEN_BITS: u32 = 24;

pub(super) fn places(slot: u32, record: &Record) -> impl Iterator<Item = Place> + use<'_> {
    let place = move |(at, len): (u64, u64)| (((at / GRANULE) << LEN_BITS) | (len / GRANULE), slot);
    record.extents.iter().map(place)
}

/// Begin and end of a place in bytes.
pub(super) fn range((packed, _): &Place) -> (u64, u64) {
    let begin = packed >> LEN_BITS;
    let len = packed & ((1 << LEN_BITS) - 1);
    (begin * GRANULE, (begin + len) * GRANULE)
}

/// Sorts extents, and calls `each` with the slots of two records that share bytes.
pub(super) fn overlaps(extents: &mut [Place], mut each: impl FnMut(u32, u32)) {
    extents.sort_unstable();
    // One pass; `open` keeps the extents that reach beyond the current begin.
    let mut open: Vec<(u64, u32)> = Vec::new();
    for place in &*extents {
        let ((begin, end), slot) = (range(place), place.1);
        open.retain(|(end, _)| *end > begin);
        for (_, other) in &open {
            if *other != slot {
                each(*other, slot);
            }
        }
        open.push((end, slot));
    }
}
