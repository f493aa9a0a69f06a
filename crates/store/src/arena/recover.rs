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
                Slot::Used(record) if inside(&record, layout.data, layout.capacity) => {
                    survey.highest = survey.highest.max(record.sequence);
                    if inside(&record, layout.data, mapping.len()) {
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

fn inside(record: &Record, begin: u64, end: u64) -> bool {
    let within =
        |(at, len): (u64, u64)| at >= begin && at.checked_add(len).is_some_and(|to| to <= end);
    record.extents.iter().all(within)
}

/// Which of the surveyed records are served: true where a live record is outranked by none.
pub(crate) fn judge(records: &[(u32, Record)]) -> Vec<bool> {
    let mut served: Vec<bool> = records
        .iter()
        .map(|(_, record)| record.state == RecordState::Live)
        .collect();
    overlaps(records, &mut served);
    identities(records, &mut served);
    served
}

/// Clears `served` where a record of a higher sequence, live or dead, has some of the bytes.
fn overlaps(records: &[(u32, Record)], served: &mut [bool]) {
    // (begin, end, record), in the order of the medium; one pass keeps the extents that reach
    // beyond the current begin.
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
    let mut open: Vec<(u64, u32)> = Vec::new();
    for (begin, end, index) in extents {
        open.retain(|(end, _)| *end > begin);
        for (_, other) in &open {
            let (a, b) = (index as usize, *other as usize);
            let lower = if records[a].1.sequence < records[b].1.sequence {
                a
            } else {
                b
            };
            if a != b {
                served[lower] = false;
            }
        }
        open.push((end, index));
    }
}

/// Clears `served` where a record of a higher sequence, live or dead, has the same identity.
fn identities(records: &[(u32, Record)], served: &mut [bool]) {
    let mut map = KeyMap::with_capacity(records.len());
    let mut namespaces = Namespaces::default();
    for (index, (_, record)) in records.iter().enumerate() {
        let namespace = namespaces.intern(record.identity.namespace);
        let Some(other) = map.insert(namespace, &record.identity.key, index as u32) else {
            continue;
        };
        let higher = if records[other as usize].1.sequence > record.sequence {
            map.insert(namespace, &record.identity.key, other);
            other as usize
        } else {
            index
        };
        served[if higher == index {
            other as usize
        } else {
            index
        }] = false;
    }
}

/// Recovers an arena that says it has `layout`; the pool covers what the medium has of it.
pub(super) fn recover(
    mapping: &Mapping,
    layout: Layout,
    uuid: &[u8; 16],
    uses: &Uses,
) -> Result<Recovered, Error> {
    let survey = survey(mapping, layout, uuid)?;
    let served = judge(&survey.records);
    let mut namespaces = Namespaces::default();
    let blocks = served.iter().filter(|served| **served).count();
    let mut live = KeyMap::with_capacity(blocks);
    let mut outranked = Vec::new();
    let mut order: Vec<(u64, u32)> = Vec::with_capacity(blocks);
    let mut extents: Vec<(u64, u64)> = Vec::with_capacity(blocks);
    let mut live_bytes = 0;
    let mut entries = Entries::new(layout.records as u32);
    let mut kept = Vec::with_capacity(blocks);
    for ((slot, record), served) in survey.records.iter().zip(&served) {
        if !served {
            if record.state == RecordState::Live {
                outranked.push((*slot, *record));
            }
            continue;
        }
        let namespace = namespaces.intern(record.identity.namespace);
        live.insert(namespace, &record.identity.key, *slot);
        order.push((record.sequence, *slot));
        extents.extend(
            record
                .extents
                .iter()
                .map(|(at, len)| (at - layout.data, len)),
        );
        live_bytes += record.len;
        let mut entry = Entry::new(record.identity.key, namespace, record.extents, record.len);
        entry.parts = record.parts;
        entry.checksum = record.checksum;
        entry.sequence = record.sequence;
        entry.created = record.created;
        entry.stage = Stage::Live;
        kept.push((*slot, entry));
    }
    entries.restore(kept.into_iter(), survey.used);
    order.sort_unstable();
    let stamps = uses.call(order.len());
    for ((_, slot), newer) in order.iter().zip((0..order.len()).rev()) {
        entries.touch(*slot, stamps.of(newer));
        entries.link(*slot);
    }
    extents.sort_unstable();
    let pool = Pool::rebuild(
        layout.on(mapping.len()).data_len(),
        GRANULE,
        extents
            .into_iter()
            .map(|(offset, len)| Extent { offset, len }),
    )
    .map_err(|error| Error::config("capacity", size::show(layout.capacity), error.to_string()))?;
    let opening = Opening {
        blocks: blocks as u64,
        damaged: (survey.damaged.len() + survey.lost.len()) as u64,
        outranked: outranked.len() as u64,
        created: false,
    };
    Ok(Recovered {
        pool,
        entries,
        live,
        namespaces,
        live_bytes,
        outranked,
        highest: survey.highest,
        opening,
    })
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
