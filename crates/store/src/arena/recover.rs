//! Recovery: the index and the allocator from the record table alone.
//!
//! Sequences decide. A live record is dead when a higher one, live or dead, overlaps its extents
//! or repeats its identity; everything else live is served. Payloads are not read here: they
//! verify when they are used.

use std::path::Path;

use std::cmp::Reverse;

use kvdepot_alloc::{Extent, Pool};
use kvdepot_media::Mapping;

use super::Arena;
use crate::Error;
use crate::config::size;
use crate::format::GRANULE;
use crate::format::layout::{self, Layout};
use crate::format::record::{self, Record, Slot, State as RecordState};
use crate::index::{Entries, Entry, KeyMap, Namespaces, Stage, Uses};

/// Table bytes read at a time.
const CHUNK: usize = 1 << 20;

/// What opening found, for logs and `kvdepot doctor`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct Opening {
    /// Blocks served again.
    pub blocks: u64,
    /// Records that did not verify or named impossible extents.
    pub damaged: u64,
    /// Live records outranked by newer ones.
    pub outranked: u64,
    /// Whether the arena was made by this opening.
    pub created: bool,
}

/// What the table says.
pub(super) struct Recovered {
    pub(super) pool: Pool,
    pub(super) entries: Entries,
    pub(super) live: KeyMap,
    pub(super) namespaces: Namespaces,
    pub(super) live_bytes: u64,
    /// Live records that are dead by the rules, to be marked so on the medium.
    pub(super) outranked: Vec<(u32, Record)>,
    /// The highest sequence in the table, 0 when it is empty.
    pub(super) highest: u64,
    pub(super) opening: Opening,
}

/// The records that verify and lie inside the arena.
pub(crate) struct Survey {
    /// Live and dead ones, by slot.
    pub(crate) records: Vec<(u32, Record)>,
    /// Live ones whose extents the medium does not have (any more): it was truncated.
    pub(crate) lost: Vec<(u32, Record)>,
    /// Slots that hold something else.
    pub(crate) damaged: Vec<u32>,
    /// The highest sequence of all records.
    pub(crate) highest: u64,
    /// One past the last slot ever used.
    used: u32,
}

/// Reads the whole table of an arena that says it has this layout.
pub(crate) fn survey(mapping: &Mapping, layout: Layout, uuid: &[u8; 16]) -> Result<Survey, Error> {
    let mut survey = Survey {
        // Address space alone, up to the table of a middling arena.
        records: Vec::with_capacity(layout.records.min(1 << 21) as usize),
        lost: Vec::new(),
        damaged: Vec::new(),
        highest: 0,
        used: 0,
    };
    let total = layout.records as usize * record::LEN;
    if let Err(error) = mapping.populate_read(layout::TABLE, total as u64) {
        // Page by page below: what cannot be read costs the blocks that were recorded there.
        let path = mapping.path().map(|path| path.display().to_string());
        tracing::warn!(path, %error, "the record table could not be read as a whole");
    }
    let mut chunk = vec![0; CHUNK.min(total)];
    let mut slot = 0;
    for begin in (0..total).step_by(CHUNK) {
        let len = CHUNK.min(total - begin);
        mapping.read_into(layout::TABLE + begin as u64, &mut chunk[..len])?;
        let (records, _) = chunk[..len].as_chunks::<{ record::LEN }>();
        // What the medium has lost reads as zeros.
        let has_lost = mapping.losses() > 0;
        let is_lost = |slot: u32| mapping.is_lost(layout.record(slot), record::LEN as u64);
        for bytes in records {
            if has_lost && is_lost(slot)? {
                survey.damaged.push(slot);
                slot += 1;
                continue;
            }
            match Record::decode(bytes, record::seed(uuid, slot)) {
                Slot::Empty => {}
                Slot::Used(record) if is_inside(&record, layout.data, layout.capacity) => {
                    survey.highest = survey.highest.max(record.sequence);
                    if is_inside(&record, layout.data, mapping.len()) {
                        survey.records.push((slot, record));
                    } else if record.state == RecordState::Live {
                        survey.lost.push((slot, record));
                    }
                }
                _ => survey.damaged.push(slot),
            }
            slot += 1;
        }
    }
    let last = |slots: Option<u32>| slots.map_or(0, |slot| slot + 1);
    survey.used = last(survey.records.last().map(|(slot, _)| *slot))
        .max(last(survey.damaged.last().copied()))
        .max(last(survey.lost.last().map(|(slot, _)| *slot)));
    Ok(survey)
}

/// Whether all extents of a record lie between two offsets.
pub(crate) fn is_inside(record: &Record, begin: u64, end: u64) -> bool {
    let within =
        |(at, len): (u64, u64)| at >= begin && at.checked_add(len).is_some_and(|to| to <= end);
    record.extents.iter().all(within)
}

/// Which of the surveyed records, in the order of their slots, are live and outranked by none.
pub(crate) fn judge(records: &[(u32, Record)]) -> Vec<bool> {
    let mut served = live(records);
    overlaps(records, &mut served);
    let (_, numbers) = number(records);
    identities(records, &numbers, served).0
}

fn live(records: &[(u32, Record)]) -> Vec<bool> {
    records
        .iter()
        .map(|(_, record)| record.state == RecordState::Live)
        .collect()
}

/// The records' namespaces, and each record's by its number.
fn number(records: &[(u32, Record)]) -> (Namespaces, Vec<u32>) {
    let mut namespaces = Namespaces::default();
    let mut last = None;
    let mut of = |(_, record): &(u32, Record)| {
        let id = record.identity.namespace;
        match last {
            Some((known, number)) if known == id => number,
            _ => {
                let number = namespaces.intern(id, |_| true);
                last = Some((id, number));
                number
            }
        }
    };
    let numbers = records.iter().map(&mut of).collect();
    (namespaces, numbers)
}

/// Whether record `a` counts before record `b`: by falling sequence, and of equal ones, which no
/// sound arena holds, the lower slot first.
fn is_above(records: &[(u32, Record)], a: usize, b: usize) -> bool {
    let rank = |index: usize| (records[index].1.sequence, Reverse(index));
    rank(a) > rank(b)
}

/// Clears `served` where a record of a higher sequence, live or dead, has some of the bytes.
fn overlaps(records: &[(u32, Record)], served: &mut [bool]) -> Vec<(u64, u64, u32)> {
    let mut extents: Vec<(u64, u64, u32)> = Vec::with_capacity(records.len());
    for (index, (_, record)) in records.iter().enumerate() {
        extents.extend(
            record
                .extents
                .iter()
                .map(|(at, len)| (at, at + len, index as u32)),
        );
    }
    extents.sort_unstable();
    // One pass; `open` keeps the extents that reach beyond the current begin.
    let mut open: Vec<(u64, u32)> = Vec::new();
    for (begin, end, index) in &extents {
        open.retain(|(end, _)| end > begin);
        for (_, other) in &open {
            let (a, b) = (*index as usize, *other as usize);
            if a != b {
                served[if is_above(records, a, b) { b } else { a }] = false;
            }
        }
        open.push((*end, *index));
    }
    extents
}

/// Clears `served` where a record of a higher sequence, live or dead, has the same identity;
/// answers it with the slots of the rest by identity.
fn identities(
    records: &[(u32, Record)],
    numbers: &[u32],
    mut served: Vec<bool>,
) -> (Vec<bool>, KeyMap) {
    let mut live = KeyMap::with_capacity(served.iter().filter(|served| **served).count());
    let at = |slot: u32| records.partition_point(|(other, _)| *other < slot);
    for (index, (slot, record)) in records.iter().enumerate() {
        if !served[index] {
            continue;
        }
        let (namespace, key) = (numbers[index], &record.identity.key);
        let Some(other) = live.insert(namespace, key, *slot) else {
            continue;
        };
        let before = at(other);
        if is_above(records, before, index) {
            live.insert(namespace, key, other);
            served[index] = false;
        } else {
            served[before] = false;
        }
    }
    // The dead outrank too, and so do those that became dead just now.
    for (position, (_, record)) in records.iter().enumerate() {
        if served[position] {
            continue;
        }
        let (namespace, key) = (numbers[position], &record.identity.key);
        let Some(slot) = live.get(namespace, key) else {
            continue;
        };
        let index = at(slot);
        if is_above(records, position, index) {
            served[index] = false;
            live.remove(namespace, key, slot);
        }
    }
    (served, live)
}

/// Recovers an arena that says it has `layout`; the pool covers what the medium has of it.
pub(super) fn recover(
    mapping: &Mapping,
    layout: Layout,
    uuid: &[u8; 16],
    uses: &Uses,
) -> Result<Recovered, Error> {
    let survey = survey(mapping, layout, uuid)?;
    let records = &survey.records;
    let mut apart = live(records);
    let extents = overlaps(records, &mut apart);
    let (namespaces, numbers) = number(records);
    let fill = |served: &[bool]| {
        let pool = pool(layout, mapping.len(), &extents, served)?;
        let mut entries = Entries::new(layout.records as u32);
        let rows = records
            .iter()
            .zip(served)
            .zip(&numbers)
            .filter(|((_, served), _)| **served);
        let kept = rows.map(|(((slot, record), _), number)| (*slot, entry(record, *number)));
        entries.restore(kept, survey.used, uses);
        Ok::<_, Error>((pool, entries))
    };
    // The map waits for memory and so do the entries: two threads take little more than one.
    let ((served, live), filled) = std::thread::scope(|scope| {
        let start = apart.clone();
        let map = scope.spawn(|| identities(records, &numbers, start));
        let filled = fill(&apart);
        let panicked = |_| Error::Corrupt {
            path: mapping.path().unwrap_or_else(|| Path::new("arena")).into(),
            reason: "the index could not be built: recovery panicked".into(),
        };
        Ok::<_, Error>((map.join().map_err(panicked)?, filled))
    })?;
    // Identities seldom repeat; where they do, what was filled meanwhile is too much.
    let (pool, entries) = if served == apart {
        filled?
    } else {
        fill(&served)?
    };
    let rows = || records.iter().zip(&served);
    let outranked: Vec<(u32, Record)> = rows()
        .filter(|((_, record), served)| !**served && record.state == RecordState::Live)
        .map(|(row, _)| *row)
        .collect();
    let opening = Opening {
        blocks: live.len() as u64,
        damaged: (survey.damaged.len() + survey.lost.len()) as u64,
        outranked: outranked.len() as u64,
        created: false,
    };
    let kept = rows().filter(|(_, served)| **served);
    Ok(Recovered {
        pool,
        entries,
        live_bytes: kept.map(|((_, record), _)| record.len).sum(),
        live,
        namespaces,
        outranked,
        highest: survey.highest,
        opening,
    })
}

fn pool(
    layout: Layout,
    medium: u64,
    extents: &[(u64, u64, u32)],
    served: &[bool],
) -> Result<Pool, Error> {
    let kept = extents
        .iter()
        .filter(|(_, _, record)| served[*record as usize]);
    let extents = kept.map(|(begin, end, _)| Extent {
        offset: begin - layout.data,
        len: end - begin,
    });
    Pool::rebuild(layout.on(medium).data_len(), GRANULE, extents)
        .map_err(|error| Error::config("capacity", size::show(layout.capacity), error.to_string()))
}

fn entry(record: &Record, namespace: u32) -> Entry {
    let mut entry = Entry::new(record.identity.key, namespace, record.extents, record.len);
    entry.parts = record.parts;
    entry.checksum = record.checksum;
    entry.sequence = record.sequence;
    entry.created = record.created;
    entry.stage = Stage::Live;
    entry
}

impl Arena {
    /// Marks outranked records dead on the medium: what outranks them may be reused one day, and
    /// they must not come back then.
    pub(super) fn outrank(&self, outranked: &[(u32, Record)]) {
        let dead = |(slot, record): &(u32, Record)| {
            let state = RecordState::Dead;
            (*slot, Record { state, ..*record })
        };
        self.write_records(&outranked.iter().map(dead).collect::<Vec<_>>());
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_media::{Access, Mapping};

    use super::*;
    use crate::{Identity, Key, NamespaceId};
    use kvdepot_media::checksum::Checksum;

    #[test]
    fn a_page_of_the_table_that_cannot_be_read_costs_what_is_recorded_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("arena");
        let layout = Layout::new(4 << 20, 256).unwrap();
        let made = Mapping::create(&path, layout.capacity).unwrap();
        let uuid = [7; 16];
        for slot in 0..256 {
            let record = Record {
                state: RecordState::Live,
                parts: 1,
                created: 0,
                sequence: u64::from(slot) + 1,
                identity: Identity {
                    namespace: NamespaceId([1; 16]),
                    key: Key([slot as u8; 32]),
                },
                extents: record::Packed::new(&[(layout.data + u64::from(slot) * GRANULE, GRANULE)])
                    .unwrap(),
                len: 100,
                checksum: Checksum([0; 16]),
            };
            let bytes = record.encode(record::seed(&uuid, slot));
            made.write_from(layout.record(slot), &bytes).unwrap();
        }
        drop(made);
        let mapping = Mapping::open(&path, Access::ReadWrite).unwrap();
        // What is behind is gone as soon as it is touched.
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_len(layout.record(64)).unwrap();
        let uses = Uses::default();
        let found = recover(&mapping, layout, &uuid, &uses).unwrap();
        assert_eq!((found.opening.blocks, found.opening.damaged), (64, 192));
        assert_eq!(found.highest, 64);
    }
}
