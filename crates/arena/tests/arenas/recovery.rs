//! Recovery by the record table alone: which records are blocks, whatever a crash, a power cut or
//! another opening has left there, and whichever way the medium is read.

use std::collections::BTreeSet;

use crate::common::raw::Raw;
use crate::common::{ACCESSES, NAMESPACE, Site, key, number, verify};
use kvdepot_arena::Access;
use kvdepot_arena::format::record::{self, Packed, Record, Slot, State};
use kvdepot_arena::inspect::Inspection;
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::{Rng, rounds};

const RECORDS: u32 = 16;

/// A closed arena that holds nothing.
fn empty(access: Access) -> (Site, Raw) {
    let site = Site::new(access, 1 << 20, RECORDS.into());
    drop(site.open());
    let raw = Raw::open(&site.path());
    (site, raw)
}

/// The keys of the blocks that a new owner serves, all of them whole.
fn served(site: &Site) -> Vec<u64> {
    let open = site.open();
    open.assert_at_rest();
    let served: Vec<u64> = (0..20).filter(|number| open.serves(*number)).collect();
    drop(open);
    let found = verify(&site.path());
    assert_eq!(found.bad, []);
    assert_eq!(
        found.sound,
        served.len() as u64,
        "the tools and the owner agree"
    );
    served
}

/// Writes a record of block `number` into `slot`, with its payload.
fn forge(
    raw: &Raw,
    slot: u32,
    number: u64,
    state: State,
    sequence: u64,
    granules: &[(u64, u64)],
) -> Record {
    let room: u64 = granules.iter().map(|(_, count)| count * 4096).sum();
    let payload = content(number, room as usize - 100);
    let record = raw.forge(NAMESPACE, key(number), state, sequence, granules, &payload);
    raw.write(slot, &record);
    record
}

#[test]
fn of_records_over_the_same_bytes_the_higher_sequence_counts() {
    for access in ACCESSES {
        let (site, raw) = empty(access);
        forge(&raw, 3, 1, State::Live, 10, &[(0, 3)]);
        forge(&raw, 1, 2, State::Live, 20, &[(2, 2)]);
        forge(&raw, 2, 3, State::Live, 5, &[(8, 1)]);
        assert_eq!(served(&site), [2, 3]);
        assert!(matches!(raw.slot(3), Slot::Used(record) if record.state == State::Dead));
    }
}

#[test]
fn a_dead_record_outranks_too_but_only_lower_ones() {
    for access in ACCESSES {
        let (site, raw) = empty(access);
        forge(&raw, 0, 1, State::Live, 10, &[(0, 2)]);
        forge(&raw, 1, 2, State::Dead, 20, &[(1, 1)]);
        forge(&raw, 2, 3, State::Dead, 5, &[(6, 1)]);
        forge(&raw, 3, 4, State::Live, 10, &[(6, 2)]);
        assert_eq!(served(&site), [4]);
    }
}

#[test]
fn a_repeated_identity_counts_once_and_death_is_final() {
    for access in ACCESSES {
        let (site, raw) = empty(access);
        forge(&raw, 0, 1, State::Live, 20, &[(0, 1)]);
        forge(&raw, 1, 1, State::Live, 10, &[(3, 2)]);
        forge(&raw, 2, 2, State::Live, 10, &[(6, 1)]);
        forge(&raw, 3, 2, State::Dead, 30, &[(9, 1)]);
        assert_eq!(served(&site), [1]);
        let open = site.open();
        assert!(open.serves(1), "the newer one");
    }
}

#[test]
fn a_record_that_is_dead_by_the_rules_outranks_all_the_same() {
    for access in ACCESSES {
        let (site, raw) = empty(access);
        // 3 takes bytes of 2, and 2 had taken bytes of 1 before.
        forge(&raw, 0, 1, State::Live, 10, &[(0, 3)]);
        forge(&raw, 1, 2, State::Live, 20, &[(2, 3)]);
        forge(&raw, 2, 3, State::Live, 30, &[(4, 3)]);
        assert_eq!(served(&site), [3]);
    }
}

#[test]
fn what_was_outranked_does_not_come_back_when_its_better_is_gone() {
    for access in ACCESSES {
        let (site, raw) = empty(access);
        forge(&raw, 0, 1, State::Live, 10, &[(0, 2)]);
        forge(&raw, 1, 2, State::Live, 20, &[(1, 2)]);
        let open = site.open();
        assert_eq!(open.opening.outranked, 1);
        assert_eq!(open.remove(2), 1);
        // Low slots are used first: this takes the slot of 2, and its record with it.
        assert_eq!(open.put(&[(7, 4096)]), [7]);
        assert_eq!(open.put(&[(8, 4096)]), [8]);
        drop(open);
        assert!(raw.live(&key(7)).unwrap().0 <= 1 || raw.live(&key(8)).unwrap().0 <= 1);
        assert_eq!(served(&site), [7, 8]);
    }
}

#[test]
fn damage_counts_as_empty_and_is_counted() {
    for access in ACCESSES {
        let (site, raw) = empty(access);
        let sound = forge(&raw, 0, 1, State::Live, 10, &[(0, 2)]);
        let seed = |slot| record::seed(&raw.superblock.uuid, slot);
        // Copied to another slot, with another key so that nothing but the slot is wrong.
        let other = Record {
            identity: kvdepot_arena::Identity {
                namespace: NAMESPACE,
                key: key(2),
            },
            sequence: 99,
            ..sound
        };
        raw.file.write(raw.layout.record(1), &other.encode(seed(0)));
        // Left from an earlier formatting.
        let strange = record::seed(&[0x55; 16], 2);
        raw.file.write(raw.layout.record(2), &other.encode(strange));
        // Beyond the arena, before its data, over its own extent.
        let at = |offset: u64, len: u64| Record {
            extents: Packed::new(&[(offset, len)]).unwrap(),
            len: 1,
            ..other
        };
        raw.write(3, &at(raw.layout.capacity, 4096));
        raw.write(4, &at(raw.layout.capacity - 4096, 8192));
        raw.write(5, &at(raw.layout.data - 4096, 8192));
        let twice = Packed::new(&[(raw.granule(4), 8192), (raw.granule(5), 4096)]).unwrap();
        raw.write(
            6,
            &Record {
                extents: twice,
                len: 9000,
                ..other
            },
        );
        // Torn: the first half of one record, the second of another.
        let (a, b) = (sound.encode(seed(7)), other.encode(seed(7)));
        raw.file
            .write(raw.layout.record(7), &[&a[..64], &b[64..]].concat());
        assert_eq!(verify(&site.path()).damaged_records, [1, 2, 3, 4, 5, 6, 7]);
        let open = site.open();
        assert_eq!((open.opening.blocks, open.opening.damaged), (1, 7));
        drop(open);
        assert_eq!(
            verify(&site.path()).damaged_records,
            [] as [u32; 0],
            "mended"
        );
        assert_eq!(site.open().opening.damaged, 0);
        assert_eq!(served(&site), [1]);
    }
}

#[test]
fn sequences_rise_over_openings_and_above_the_whole_table() {
    for access in ACCESSES {
        let (site, raw) = empty(access);
        let mut last = 0;
        for round in 0..4 {
            let open = site.open();
            open.put(&[(round, 1000)]);
            drop(open);
            let (_, record) = raw.live(&key(round)).unwrap();
            assert!(record.sequence > last, "{} after {last}", record.sequence);
            assert_eq!(record.sequence >> 40, 2 + round, "the generation");
            last = record.sequence;
        }
        // A table that is further than its superblock: both copies of an older time were restored.
        let far = 0xFF_0000 << 40 | 7;
        forge(&raw, 9, 9, State::Dead, far, &[(40, 1)]);
        let open = site.open();
        open.put(&[(10, 1000)]);
        drop(open);
        assert!(raw.live(&key(10)).unwrap().1.sequence > far);
    }
}

/// The document's recovery, word by word.
fn by_the_book(records: &[(u32, Record)]) -> BTreeSet<u32> {
    let mut left: Vec<(u32, Record)> = records.to_vec();
    left.sort_by_key(|(slot, record)| (std::cmp::Reverse(record.sequence), *slot));
    let overlap = |a: &Record, b: &Record| {
        a.extents
            .iter()
            .any(|(x, l)| b.extents.iter().any(|(y, m)| x < y + m && y < x + l))
    };
    let outranks = |a: &Record, b: &Record| a.identity == b.identity || overlap(a, b);
    let mut blocks = BTreeSet::new();
    for (at, (slot, record)) in left.iter().enumerate() {
        let outranked = left[..at].iter().any(|(_, taken)| outranks(taken, record));
        if record.state == State::Live && !outranked {
            blocks.insert(*slot);
        }
    }
    blocks
}

#[test]
fn random_tables_recover_by_the_book() {
    for access in ACCESSES {
        let (site, raw) = empty(access);
        let mut rng = Rng::for_test("recovery::random_tables_recover_by_the_book");
        for _ in 0..rounds(200) {
            let mut records = Vec::new();
            for slot in 0..RECORDS {
                raw.file.write(raw.layout.record(slot), &[0; record::LEN]);
                if rng.once_in(3) {
                    continue;
                }
                let mut granules = BTreeSet::new();
                for _ in 0..rng.between(1, 3) {
                    granules.insert(rng.below(40));
                }
                let granules: Vec<(u64, u64)> = granules.into_iter().map(|at| (at, 1)).collect();
                let state = if rng.once_in(3) {
                    State::Dead
                } else {
                    State::Live
                };
                // Few of each, so that all of them collide.
                let (number, sequence) = (rng.below(12), rng.below(30));
                let payload = content(number, 100);
                let record =
                    raw.forge(NAMESPACE, key(number), state, sequence, &granules, &payload);
                raw.write(slot, &record);
                records.push((slot, record));
            }
            let wanted = by_the_book(&records);
            let listed = || -> BTreeSet<u32> {
                let (blocks, damaged) = Inspection::open(&site.path()).unwrap().blocks().unwrap();
                assert_eq!(damaged, [] as [u32; 0]);
                blocks.iter().map(|block| block.slot).collect()
            };
            assert_eq!(listed(), wanted, "{records:?}");
            let open = site.open();
            assert_eq!(open.opening.blocks, wanted.len() as u64);
            open.assert_at_rest();
            let blocks: BTreeSet<u64> = records
                .iter()
                .filter(|(slot, _)| wanted.contains(slot))
                .map(|(_, record)| number(&record.identity.key))
                .collect();
            for number in 0..12 {
                assert_eq!(open.has(number), blocks.contains(&number), "{records:?}");
            }
            drop(open);
            // Nothing of what opening wrote changes the answer.
            assert_eq!(listed(), wanted);
            let live = raw.records(State::Live).len();
            assert_eq!(live, wanted.len(), "the outranked are dead on the medium");
        }
    }
}
