//! Recovery: the index and the allocator from the record table alone.
//!
//! Sequences decide. A live record is dead when a higher one, live or dead, overlaps its extents
//! or repeats its identity; everything else live is served. Payloads are not read here: they
//! verify when they are used.
//!
//! The table goes into the index as it is read, each thread reading a part of it, so that nothing
//! else of all records is kept but where their extents lie. What a file has never written of its
//! table is not read.

mod fill;
mod ranks;

use kvdepot_alloc::{Extent, Pool};

use crate::error::Error;
use crate::format::GRANULE;
use crate::format::layout::Layout;
use crate::format::record::{self, Record, Slot, State as RecordState};
use crate::index::{Entry, Index, Records};
use crate::key::Identity;
use crate::medium::Medium;
use crate::roll::{Share, share_of};
use crate::size;
use fill::{Held, fill, read_table, written};
use ranks::{Place, overlaps, range, rank};
pub use ranks::{is_inside, judge};

/// The result of opening an arena, for logs and `kvdepot doctor`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct Opening {
    /// Number of recovered blocks.
    pub blocks: u64,
    /// Number of records that failed verification or have impossible extents.
    pub damaged: u64,
    /// Number of live records that newer ones supersede.
    pub outranked: u64,
    /// True if this opening created the arena.
    pub created: bool,
}

impl Opening {
    /// Combines the results of two media.
    #[must_use]
    pub fn and(self, other: Opening) -> Opening {
        Opening {
            blocks: self.blocks + other.blocks,
            damaged: self.damaged + other.damaged,
            outranked: self.outranked + other.outranked,
            created: self.created && other.created,
        }
    }
}

/// What the table says.
pub(crate) struct Recovered {
    pub(crate) pool: Pool,
    pub(crate) index: Index,
    pub(crate) records: Records,
    /// Blocks and bytes of each namespace, by its number.
    pub(crate) shares: Vec<Share>,
    /// Live records that are dead by the rules, to be marked so on the medium.
    pub(crate) outranked: Vec<(u32, Record)>,
    /// Slots that hold no record.
    pub(crate) damaged: Vec<u32>,
    /// The highest sequence in the table, 0 when it is empty.
    pub(crate) highest: u64,
    pub(crate) opening: Opening,
}

/// The records of a table that pass verification and are inside the arena.
#[derive(Default)]
pub struct Survey {
    /// Live and dead ones, by slot.
    pub(crate) records: Vec<(u32, Record)>,
    /// Live ones whose extents the medium does not have (any more): it was truncated.
    pub(crate) lost: Vec<(u32, Record)>,
    /// Slots that hold something else.
    pub(crate) damaged: Vec<u32>,
}

/// Reads the whole record table of an arena with this layout.
///
/// # Errors
///
/// [`Error::Media`] if the table cannot be read.
pub fn survey(medium: &dyn Medium, layout: Layout, uuid: &[u8; 16]) -> Result<Survey, Error> {
    let mut survey = Survey::default();
    for some in written(medium, layout)? {
        read_table(medium, layout, uuid, some, |slot, held| match held {
            Held::Record(record) => survey.records.push((slot, *record)),
            Held::Lost(record) => survey.lost.push((slot, *record)),
            Held::Damaged => survey.damaged.push(slot),
        })?;
    }
    Ok(survey)
}

/// Recovers an arena that says it has `layout`; the pool covers what the medium has of it.
pub(crate) fn recover(
    medium: &dyn Medium,
    layout: Layout,
    uuid: &[u8; 16],
) -> Result<Recovered, Error> {
    let mut index = Index::new(layout.records);
    let mut part = fill(medium, layout, uuid, &mut index)?;
    let mut places = std::mem::take(&mut part.places);
    // The dead outrank too.
    let dead = std::mem::take(&mut part.dead);
    for &slot in &dead {
        if let Some((slot, record)) = read_slot(medium, layout, uuid, slot) {
            let rank = rank(slot, &record);
            part.outrank(&index, &record.identity, |entry| entry.rank() < rank);
        }
    }
    overlaps(&mut places, |a, b| {
        // Dead ones, mostly, under what has come there since.
        let (a, b) = (
            read_slot(medium, layout, uuid, a),
            read_slot(medium, layout, uuid, b),
        );
        if let (Some(a), Some(b)) = (a, b) {
            let (slot, below) = std::cmp::min_by_key(a, b, |(slot, record)| rank(*slot, record));
            part.outrank(&index, &below.identity, |entry| entry.record == slot);
        }
    });
    let mut is_taken = vec![false; part.used as usize];
    let mut take = |slot: u32, taken: bool| is_taken[slot as usize] = taken;
    places.iter().for_each(|(_, slot)| take(*slot, true));
    dead.iter().for_each(|slot| take(*slot, false));
    for entry in &part.beaten {
        take(entry.record, false);
        let share = share_of(&mut part.shares, entry.namespace);
        *share = (share.0 - 1, share.1 - entry.len);
    }
    let kept = places.into_iter();
    let pool = pool(
        layout,
        medium.len(),
        kept.filter(|(_, slot)| is_taken[*slot as usize]),
    )?;
    let mut records = Records::new(layout.records as u32);
    let taken = (0..).zip(&is_taken).filter(|(_, taken)| **taken);
    records.restore(taken.map(|(slot, _)| slot), part.used);
    let opening = Opening {
        blocks: index.live(),
        damaged: part.damaged.len() as u64 + part.lost,
        outranked: part.beaten.len() as u64,
        created: false,
    };
    let dead = |entry: &Entry| (entry.record, record(&index, entry));
    let outranked = part.beaten.iter().map(dead).collect();
    Ok(Recovered {
        pool,
        records,
        shares: part.shares,
        outranked,
        damaged: part.damaged,
        highest: part.highest,
        opening,
        index,
    })
}

/// The record of a block that was read.
fn record(index: &Index, entry: &Entry) -> Record {
    Record {
        state: RecordState::Live,
        parts: entry.parts,
        created: 0,
        sequence: entry.sequence,
        identity: Identity {
            namespace: index.id(entry.namespace),
            key: entry.key,
        },
        extents: entry.extents,
        len: entry.len,
        checksum: entry.checksum,
    }
}

/// A record that was there when the table was read.
fn read_slot(
    medium: &dyn Medium,
    layout: Layout,
    uuid: &[u8; 16],
    slot: u32,
) -> Option<(u32, Record)> {
    let mut bytes = [0; record::LEN];
    medium.read_at(layout.record(slot), &mut bytes).ok()?;
    match Record::decode(&bytes, record::seed(uuid, slot)) {
        Slot::Used(record) => Some((slot, record)),
        _ => None,
    }
}

fn pool(layout: Layout, medium: u64, places: impl Iterator<Item = Place>) -> Result<Pool, Error> {
    // As large as places are, so that these are not copied.
    let extents = places.map(|place| {
        let (begin, end) = range(&place);
        Extent {
            offset: begin - layout.data,
            len: end - begin,
        }
    });
    Pool::rebuild(layout.on(medium).data_len(), GRANULE, extents)
        .map_err(|error| Error::config("capacity", size::show(layout.capacity), error.to_string()))
}

#[cfg(test)]
mod tests {
    use kvdepot_media::checksum::Checksum;
    use kvdepot_media::{Access, Mapping};
    use kvdepot_testkit::seed::{Rng, rounds};

    use super::*;
    use crate::index::Uses;
    use crate::key::{Identity, Key, NamespaceId};
    use fill::{in_use, shares_of};

    /// A file with an arena's table, in which these records are; each of another key.
    fn table(path: &std::path::Path, layout: Layout, slots: impl Iterator<Item = u32>) {
        let made = Mapping::create(path, layout.capacity).unwrap();
        for slot in slots {
            let mut key = [0; 32];
            key[..4].copy_from_slice(&slot.to_le_bytes());
            let extent = (layout.data + u64::from(slot) * GRANULE, GRANULE);
            let record = Record {
                state: RecordState::Live,
                parts: 1,
                created: 0,
                // Not in the order of the slots, nor without gaps.
                sequence: u64::from(slot ^ 0x55) * 3 + 1,
                identity: Identity {
                    namespace: NamespaceId([(slot % 3) as u8; 16]),
                    key: Key(key),
                },
                extents: record::Packed::new(&[extent]).unwrap(),
                len: 100,
                checksum: Checksum([0; 16]),
            };
            let bytes = record.encode(record::seed(&UUID, slot));
            made.write_from(layout.record(slot), &bytes).unwrap();
        }
    }

    const UUID: [u8; 16] = [7; 16];

    #[test]
    fn threads_that_read_parts_of_a_table_find_what_one_does() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("arena");
        let layout = Layout::new(96 << 20, 20_000).unwrap();
        // Pages of the table that nobody has written lie between others.
        let slots = || (0..20_000_u32).filter(|slot| slot % 4096 < 1500 && slot % 7 > 0);
        table(&path, layout, slots());
        let mapping = Mapping::open(&path, Access::ReadWrite).unwrap();
        let ranges = written(&mapping, layout).unwrap();
        let shares = shares_of(&ranges, 5);
        assert_eq!(shares.len(), 5);
        let all: Vec<u32> = shares.iter().flatten().flat_map(Clone::clone).collect();
        assert!(
            all.is_sorted_by(|a, b| a < b) && slots().all(|slot| all.binary_search(&slot).is_ok())
        );
        let used = in_use(&mapping, layout, &ranges) as usize;
        assert!(
            used.abs_diff(slots().count()) < slots().count() / 4,
            "{used}"
        );
        let mut found = recover(&mapping, layout, &UUID).unwrap();
        let count = slots().count() as u64;
        assert_eq!((found.opening.blocks, found.opening.damaged), (count, 0));
        assert_eq!(found.pool.live_count() as u64, count);
        let shares: u64 = found.shares.iter().map(|(blocks, _)| blocks).sum();
        assert_eq!((found.shares.len(), shares), (3, count));
        assert_eq!(found.records.vacant(), layout.records - count);
        let uses = Uses::default();
        uses.asked();
        let first = uses.now();
        found.index.rank(&uses);
        let mut stamps = Vec::new();
        found
            .index
            .walk(|_, entry| stamps.push((entry.sequence, entry.stamp)));
        stamps.sort_unstable();
        assert!(stamps.is_sorted_by(|a, b| a.1 < b.1) && stamps[0].1 == first);
        assert!(uses.asked().of(0) > stamps[stamps.len() - 1].1);
        // The first free record is the first that is not in use.
        assert_eq!(found.records.take(), Some(0));
    }

    #[test]
    fn a_page_of_the_table_that_cannot_be_read_costs_what_is_recorded_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("arena");
        let layout = Layout::new(4 << 20, 256).unwrap();
        table(&path, layout, 0..256);
        let mapping = Mapping::open(&path, Access::ReadWrite).unwrap();
        // What is behind is gone as soon as it is touched.
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_len(layout.record(64)).unwrap();
        let found = recover(&mapping, layout, &UUID).unwrap();
        assert_eq!((found.opening.blocks, found.opening.damaged), (64, 192));
        assert_eq!(found.highest, 127 * 3 + 1);
    }

    /// Any record, in an arena so small that it often shares bytes or the identity of another.
    fn any_record(rng: &mut Rng, layout: Layout) -> Record {
        let room = layout.data_len() / GRANULE;
        loop {
            let mut extents = Vec::new();
            for _ in 0..rng.between(1, 4) {
                let at = rng.below(room);
                let len = rng.between(1, (room - at).min(4));
                extents.push((layout.data + at * GRANULE, len * GRANULE));
            }
            let extents = record::Packed::new(&extents).unwrap();
            if !extents.is_sound() {
                continue;
            }
            return Record {
                state: *rng.pick(&[RecordState::Live, RecordState::Live, RecordState::Dead]),
                parts: 1,
                created: 0,
                // Also equal ones.
                sequence: rng.below(300),
                identity: Identity {
                    namespace: NamespaceId([rng.below(3) as u8; 16]),
                    key: Key([rng.below(60) as u8; 32]),
                },
                extents,
                len: rng.between(1, extents.room()),
                checksum: Checksum([rng.below(256) as u8; 16]),
            };
        }
    }

    #[test]
    fn what_is_served_of_any_table_is_what_the_rules_say() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("arena");
        let layout = Layout::new(1 << 20, 300).unwrap();
        let mut rng = Rng::for_test("recover");
        for round in 0..rounds(200) {
            drop(std::fs::remove_file(&path));
            let made = Mapping::create(&path, layout.capacity).unwrap();
            for slot in 0..layout.records as u32 {
                let mut bytes = match rng.once_in(2) {
                    true => any_record(&mut rng, layout).encode(record::seed(&UUID, slot)),
                    false => continue,
                };
                bytes[20] ^= u8::from(rng.once_in(20));
                made.write_from(layout.record(slot), &bytes).unwrap();
            }
            drop(made);
            if rng.once_in(4) {
                let file = std::fs::File::options().write(true).open(&path).unwrap();
                let cut = rng.between(layout.data + GRANULE, layout.capacity);
                file.set_len(cut).unwrap();
            }
            let mapping = Mapping::open(&path, Access::ReadWrite).unwrap();
            let survey = survey(&mapping, layout, &UUID).unwrap();
            let judged = survey.records.iter().zip(judge(&survey.records));
            let judged = judged.filter(|(_, served)| *served);
            let judged: Vec<_> = judged.map(|((slot, record), _)| (*slot, *record)).collect();
            let found = recover(&mapping, layout, &UUID).unwrap();
            let mut served = Vec::new();
            found
                .index
                .walk(|_, entry| served.push((entry.record, record(&found.index, &entry))));
            served.sort_unstable_by_key(|(slot, _)| *slot);
            assert_eq!(served, judged, "round {round}");
            let mut taken: Vec<(u64, u64)> = judged
                .iter()
                .flat_map(|(_, record)| record.extents.iter())
                .map(|(at, len)| (at - layout.data, len))
                .collect();
            taken.sort_unstable();
            let live = found.pool.live_extents();
            let live: Vec<(u64, u64)> = live.map(|live| (live.offset, live.len)).collect();
            assert_eq!(live, taken, "round {round}");
            assert_eq!(found.index.live(), judged.len() as u64);
            let room: u64 = taken.iter().map(|(_, len)| len).sum();
            assert_eq!(found.index.evictable_bytes(), room);
            assert_eq!(found.records.vacant(), layout.records - judged.len() as u64);
            let lost = survey.lost.len() + survey.damaged.len();
            assert_eq!(found.opening.damaged, lost as u64);
            // What is not served is dead, and marked so.
            let dead = survey.records.iter();
            let dead = dead.filter(|(_, record)| record.state == RecordState::Live);
            assert_eq!(
                found.opening.outranked,
                dead.count() as u64 - judged.len() as u64
            );
        }
    }
}
