//! Recovery: the index and the allocator from the record table alone.
//!
//! Sequences decide. A live record is dead when a higher one, live or dead, overlaps its extents
//! or repeats its identity; everything else live is served. Payloads are not read here: they
//! verify when they are used.

use kvdepot_alloc::{Extent, Pool};
use kvdepot_media::Mapping;

use super::Arena;
use super::open::Opening;
use crate::Error;
use crate::config::size;
use crate::format::GRANULE;
use crate::format::layout::{self, Layout};
use crate::format::record::{self, Record, Slot, State as RecordState};
use crate::index::{Entries, Entry, KeyMap, Namespaces, Stage, Uses};

/// Table bytes read at a time.
const CHUNK: usize = 1 << 20;

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
        records: Vec::new(),
        lost: Vec::new(),
        damaged: Vec::new(),
        highest: 0,
        used: 0,
    };
    let total = layout.records as usize * record::LEN;
    mapping.populate_read(layout::TABLE, total as u64)?;
    let mut chunk = vec![0; CHUNK.min(total)];
    let mut slot = 0;
    for begin in (0..total).step_by(CHUNK) {
        let len = CHUNK.min(total - begin);
        mapping.read_into(layout::TABLE + begin as u64, &mut chunk[..len])?;
        let (records, _) = chunk[..len].as_chunks::<{ record::LEN }>();
        for bytes in records {
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

/// What the rules say of surveyed records.
pub(crate) struct Judgement {
    /// By record: whether it is live and outranked by none.
    pub(crate) served: Vec<bool>,
    /// The served ones' identities, to their slots.
    live: KeyMap,
    namespaces: Namespaces,
    /// All extents as `(begin, end, record)`, in the order of the medium.
    extents: Vec<(u64, u64, u32)>,
}

/// Applies the rules to the surveyed records, which are in the order of their slots.
pub(crate) fn judge(records: &[(u32, Record)]) -> Judgement {
    let mut served: Vec<bool> = records
        .iter()
        .map(|(_, record)| record.state == RecordState::Live)
        .collect();
    let extents = overlaps(records, &mut served);
    let (live, namespaces) = identities(records, &mut served);
    Judgement {
        served,
        live,
        namespaces,
        extents,
    }
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
            let higher = records[a].1.sequence > records[b].1.sequence;
            if a != b {
                served[if higher { b } else { a }] = false;
            }
        }
        open.push((*end, *index));
    }
    extents
}

/// Clears `served` where a record of a higher sequence, live or dead, has the same identity;
/// answers the rest by identity.
fn identities(records: &[(u32, Record)], served: &mut [bool]) -> (KeyMap, Namespaces) {
    let blocks = served.iter().filter(|served| **served).count();
    let mut live = KeyMap::with_capacity(blocks);
    let mut namespaces = Namespaces::default();
    let at = |slot: u32| records.partition_point(|(other, _)| *other < slot);
    for (index, (slot, record)) in records.iter().enumerate() {
        if !served[index] {
            continue;
        }
        let (id, key) = (record.identity.namespace, &record.identity.key);
        let namespace = namespaces.intern(id);
        let Some(other) = live.insert(namespace, key, *slot) else {
            continue;
        };
        let before = at(other);
        if records[before].1.sequence > record.sequence {
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
        let (id, key) = (record.identity.namespace, &record.identity.key);
        let Some(namespace) = namespaces.number(id) else {
            continue;
        };
        let Some(slot) = live.get(namespace, key) else {
            continue;
        };
        let index = at(slot);
        if records[index].1.sequence < record.sequence {
            served[index] = false;
            live.remove(namespace, key, slot);
        }
    }
    (live, namespaces)
}

/// Recovers an arena that says it has `layout`; the pool covers what the medium has of it.
pub(super) fn recover(
    mapping: &Mapping,
    layout: Layout,
    uuid: &[u8; 16],
    uses: &Uses,
) -> Result<Recovered, Error> {
    let survey = survey(mapping, layout, uuid)?;
    let Judgement {
        served,
        live,
        namespaces,
        extents,
    } = judge(&survey.records);
    let pool = Pool::rebuild(
        layout.on(mapping.len()).data_len(),
        GRANULE,
        extents
            .iter()
            .filter(|(_, _, record)| served[*record as usize])
            .map(|(begin, end, _)| Extent {
                offset: begin - layout.data,
                len: end - begin,
            }),
    )
    .map_err(|error| Error::config("capacity", size::show(layout.capacity), error.to_string()))?;
    drop(extents);
    let rows = || survey.records.iter().zip(&served);
    let outranked: Vec<(u32, Record)> = rows()
        .filter(|((_, record), served)| !**served && record.state == RecordState::Live)
        .map(|(row, _)| *row)
        .collect();
    let mut entries = Entries::new(layout.records as u32);
    let kept = rows()
        .filter(|(_, served)| **served)
        .map(|((slot, record), _)| {
            let namespace = namespaces.number(record.identity.namespace).unwrap_or(0);
            (*slot, entry(record, namespace))
        });
    entries.restore(kept, survey.used, uses);
    let served = rows().filter(|(_, served)| **served);
    let opening = Opening {
        blocks: live.len() as u64,
        damaged: (survey.damaged.len() + survey.lost.len()) as u64,
        outranked: outranked.len() as u64,
        created: false,
    };
    Ok(Recovered {
        pool,
        entries,
        live_bytes: served.map(|((_, record), _)| record.len).sum(),
        live,
        namespaces,
        outranked,
        highest: survey.highest,
        opening,
    })
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
    pub(super) fn bury(&self, outranked: &[(u32, Record)]) {
        let Some(table) = &self.table else { return };
        for (slot, record) in outranked {
            let dead = Record {
                state: RecordState::Dead,
                ..*record
            };
            let bytes = dead.encode(record::seed(&table.uuid, *slot));
            if let Err(error) = self.mapping.write_from(self.layout.record(*slot), &bytes) {
                tracing::error!(tier = self.name, slot, %error, "a record could not be written");
            }
        }
        self.sync_records(&outranked.iter().map(|(slot, _)| *slot).collect::<Vec<_>>());
    }
}
