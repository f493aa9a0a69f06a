//! Recovery by the record table alone: which records are blocks, whatever a crash, a power cut or
//! another opening has left there.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeSet;

use common::raw::Raw;
use common::{Place, assert_at_rest, get, has, key, keys, namespace, number, put, verify};
use kvdepot_store::format::record::{self, Packed, Record, Slot, State};
use kvdepot_store::inspect::Inspection;
use kvdepot_store::{Key, NamespaceId, Outcome};
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::{Rng, rounds};

const RECORDS: u32 = 16;

/// A closed arena that holds nothing, and the namespace that the tests use.
fn empty() -> (Place, Raw, NamespaceId) {
    let place = Place::new("Dax", "", "1MiB").with("dax", "records", RECORDS);
    let depot = place.open();
    let id = namespace(&depot).id();
    depot.close();
    let raw = Raw::open(&place.arena());
    (place, raw, id)
}

/// The keys of the blocks that a new owner serves, all of them whole.
fn served(place: &Place) -> Vec<u64> {
    let depot = place.open();
    assert_at_rest(&depot);
    let ns = namespace(&depot);
    let served: Vec<u64> = (0..20)
        .filter(|number| ns.contains(&[key(*number)]).unwrap()[0])
        .collect();
    depot.close();
    let found = verify(&place.arena());
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
    id: NamespaceId,
    slot: u32,
    number: u64,
    state: State,
    sequence: u64,
    granules: &[(u64, u64)],
) -> Record {
    let room: u64 = granules.iter().map(|(_, count)| count * 4096).sum();
    let payload = content(number, room as usize - 100);
    let record = raw.forge(id, key(number), state, sequence, granules, &payload);
    raw.write(slot, &record);
    record
}

#[test]
fn of_records_over_the_same_bytes_the_higher_sequence_counts() {
    let (place, raw, id) = empty();
    forge(&raw, id, 3, 1, State::Live, 10, &[(0, 3)]);
    forge(&raw, id, 1, 2, State::Live, 20, &[(2, 2)]);
    forge(&raw, id, 2, 3, State::Live, 5, &[(8, 1)]);
    assert_eq!(served(&place), [2, 3]);
    assert!(matches!(raw.slot(3), Slot::Used(record) if record.state == State::Dead));
}

#[test]
fn a_dead_record_outranks_too_but_only_lower_ones() {
    let (place, raw, id) = empty();
    forge(&raw, id, 0, 1, State::Live, 10, &[(0, 2)]);
    forge(&raw, id, 1, 2, State::Dead, 20, &[(1, 1)]);
    forge(&raw, id, 2, 3, State::Dead, 5, &[(6, 1)]);
    forge(&raw, id, 3, 4, State::Live, 10, &[(6, 2)]);
    assert_eq!(served(&place), [4]);
}

#[test]
fn a_repeated_identity_counts_once_and_death_is_final() {
    let (place, raw, id) = empty();
    forge(&raw, id, 0, 1, State::Live, 20, &[(0, 1)]);
    forge(&raw, id, 1, 1, State::Live, 10, &[(3, 2)]);
    forge(&raw, id, 2, 2, State::Live, 10, &[(6, 1)]);
    forge(&raw, id, 3, 2, State::Dead, 30, &[(9, 1)]);
    assert_eq!(served(&place), [1]);
    let depot = place.open();
    let outcome = get(&namespace(&depot), &[1], 4096 - 100);
    assert_eq!(outcome, [Outcome::Done], "the newer one");
}

#[test]
fn a_record_that_is_dead_by_the_rules_outranks_all_the_same() {
    let (place, raw, id) = empty();
    // 3 takes bytes of 2, and 2 had taken bytes of 1 before.
    forge(&raw, id, 0, 1, State::Live, 10, &[(0, 3)]);
    forge(&raw, id, 1, 2, State::Live, 20, &[(2, 3)]);
    forge(&raw, id, 2, 3, State::Live, 30, &[(4, 3)]);
    assert_eq!(served(&place), [3]);
}

#[test]
fn what_was_outranked_does_not_come_back_when_its_better_is_gone() {
    let (place, raw, id) = empty();
    forge(&raw, id, 0, 1, State::Live, 10, &[(0, 2)]);
    forge(&raw, id, 1, 2, State::Live, 20, &[(1, 2)]);
    let depot = place.open();
    assert_eq!(depot.opening().outranked, 1);
    let ns = namespace(&depot);
    assert_eq!(ns.remove(&[key(2)]).unwrap(), 1);
    // Low slots are used first: this takes the slot of 2, and its record with it.
    assert_eq!(put(&ns, &[7], 4096), [true]);
    assert_eq!(put(&ns, &[8], 4096), [true]);
    depot.close();
    assert!(raw.live(&key(7)).unwrap().0 <= 1 || raw.live(&key(8)).unwrap().0 <= 1);
    assert_eq!(served(&place), [7, 8]);
}

#[test]
fn damage_counts_as_empty_and_is_counted() {
    let (place, raw, id) = empty();
    let sound = forge(&raw, id, 0, 1, State::Live, 10, &[(0, 2)]);
    let seed = |slot| record::seed(&raw.superblock.uuid, slot);
    // Copied to another slot, with another key so that nothing but the slot is wrong.
    let other = Record {
        identity: kvdepot_store::Identity {
            namespace: id,
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
    assert_eq!(
        verify(&place.arena()).damaged_records,
        [1, 2, 3, 4, 5, 6, 7]
    );
    let depot = place.open();
    assert_eq!((depot.opening().blocks, depot.opening().damaged), (1, 7));
    depot.close();
    assert_eq!(
        verify(&place.arena()).damaged_records,
        [] as [u32; 0],
        "mended"
    );
    assert_eq!(place.open().opening().damaged, 0);
    assert_eq!(served(&place), [1]);
}

#[test]
fn sequences_rise_over_openings_and_above_the_whole_table() {
    let (place, raw, id) = empty();
    let mut last = 0;
    for round in 0..4 {
        let depot = place.open();
        put(&namespace(&depot), &[round], 1000);
        depot.close();
        let (_, record) = raw.live(&key(round)).unwrap();
        assert!(record.sequence > last, "{} after {last}", record.sequence);
        assert_eq!(record.sequence >> 40, 2 + round, "the generation");
        last = record.sequence;
    }
    // A table that is further than its superblock: both copies of an older time were restored.
    let far = 0xFF_0000 << 40 | 7;
    forge(&raw, id, 9, 9, State::Dead, far, &[(40, 1)]);
    let depot = place.open();
    put(&namespace(&depot), &[10], 1000);
    depot.close();
    assert!(raw.live(&key(10)).unwrap().1.sequence > far);
}

#[test]
fn after_a_restart_the_tails_of_the_oldest_prompt_go_first() {
    let place = Place::new("Dax", "", "1MiB").with("dax", "records", 64);
    let depot = place.open();
    let ns = namespace(&depot);
    // Three prompts of ten blocks: 30 of 34 possible ones.
    let data = depot.stats().tiers[0].capacity_bytes;
    let len = (data / 34 / 4096 * 4096) as usize;
    for prompt in 0..3 {
        let numbers: Vec<u64> = (prompt * 10..prompt * 10 + 10).collect();
        assert_eq!(put(&ns, &numbers, len), [true; 10]);
    }
    depot.close();
    let depot = place.open();
    let ns = namespace(&depot);
    let numbers: Vec<u64> = (100..109).collect();
    assert_eq!(put(&ns, &numbers, len), [true; 9]);
    let kept = |prompt: u64| ns.prefix(&keys(prompt * 10..prompt * 10 + 10)).unwrap();
    let there = ns.contains(&keys(0..10)).unwrap();
    let kept_of_first = kept(0);
    assert!(
        there[kept_of_first..].iter().all(|there| !there),
        "{there:?}"
    );
    assert!((1..10).contains(&kept_of_first), "{kept_of_first}");
    assert_eq!((kept(1), kept(2)), (10, 10));
}

/// Records that reached the medium without their payload, and payloads without their records:
/// what a power cut leaves where nobody asked for `durability: power`, or a medium that lied.
#[test]
fn crash_power_a_record_without_its_payload_is_a_miss() {
    let place = Place::new("Dax", "", "4MiB");
    let mut rng = Rng::for_test("crash_power_a_record_without_its_payload_is_a_miss");
    for _ in 0..rounds(20) {
        let _fresh = std::fs::remove_file(place.arena());
        let depot = place.open();
        let ns = namespace(&depot);
        let numbers: Vec<u64> = (0..30).collect();
        assert_eq!(put(&ns, &numbers, 30_000), [true; 30]);
        depot.close();
        let raw = Raw::open(&place.arena());
        let (mut without_payload, mut without_record) = (Vec::new(), Vec::new());
        for number in &numbers {
            let (slot, record) = raw.live(&key(*number)).unwrap();
            let (offset, _) = record.extents.iter().next().unwrap();
            match rng.below(4) {
                0 => {
                    // Some pages of it: nothing, or what was there before.
                    let page = offset + rng.below(7) * 4096;
                    let stale = content(rng.bits(), 4096);
                    raw.file
                        .write(page, if rng.once_in(2) { &[0; 4096] } else { &stale });
                    without_payload.push(*number);
                }
                1 => {
                    let half = raw.bytes(slot)[..64].to_vec();
                    raw.file.write(raw.layout.record(slot), &[0; record::LEN]);
                    if rng.once_in(2) {
                        raw.file.write(raw.layout.record(slot), &half);
                    }
                    without_record.push(*number);
                }
                _ => {}
            }
        }
        let depot = place.open();
        assert_at_rest(&depot);
        let ns = namespace(&depot);
        for (number, outcome) in numbers.iter().zip(get(&ns, &numbers, 30_000)) {
            let wanted = if without_payload.contains(number) {
                Outcome::Corrupt
            } else if without_record.contains(number) {
                Outcome::Miss
            } else {
                Outcome::Done
            };
            assert_eq!(outcome, wanted, "block {number}");
        }
        // What is missing is written again, and stays.
        assert_eq!(put(&ns, &numbers, 30_000), [true; 30]);
        depot.close();
        assert!(has(&namespace(&place.open()), &numbers, 30_000));
    }
}

/// An evicted extent was given away and written, the medium lost the dead record, and the crash
/// came before the new one: the old record must not be served with the new bytes.
#[test]
fn crash_power_a_lost_dead_record_does_not_serve_other_bytes() {
    let place = Place::new("Dax", "", "1MiB").with("dax", "durability", "power");
    let depot = place.open();
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1], 50_000), [true]);
    let raw = Raw::open(&place.arena());
    let (slot, before) = raw.live(&key(1)).unwrap();
    ns.remove(&[key(1)]).unwrap();
    assert_eq!(put(&ns, &[2], 50_000), [true]);
    let (new_slot, after) = raw.live(&key(2)).unwrap();
    assert_eq!(after.extents, before.extents, "the extents were reused");
    depot.close();
    let old_slot = if new_slot == slot { slot + 1 } else { slot };
    // Both there: the newer one counts.
    raw.write(old_slot, &before);
    assert_eq!(served(&place), [2]);
    // Only the old one there: its bytes are not.
    raw.write(old_slot, &before);
    raw.file
        .write(raw.layout.record(new_slot), &[0; record::LEN]);
    let depot = place.open();
    let ns = namespace(&depot);
    assert_eq!(get(&ns, &[1, 2], 50_000), [Outcome::Corrupt, Outcome::Miss]);
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
    let (place, raw, id) = empty();
    let mut rng = Rng::for_test("random_tables_recover_by_the_book");
    for _ in 0..rounds(400) {
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
            let record = raw.forge(id, key(number), state, sequence, &granules, &payload);
            raw.write(slot, &record);
            records.push((slot, record));
        }
        let wanted = by_the_book(&records);
        let listed = || -> BTreeSet<u32> {
            let (blocks, damaged) = Inspection::open(&place.arena()).unwrap().blocks().unwrap();
            assert_eq!(damaged, [] as [u32; 0]);
            blocks.iter().map(|block| block.slot).collect()
        };
        assert_eq!(listed(), wanted, "{records:?}");
        let depot = place.open();
        assert_eq!(depot.opening().blocks, wanted.len() as u64);
        assert_at_rest(&depot);
        let ns = namespace(&depot);
        let blocks: BTreeSet<u64> = records
            .iter()
            .filter(|(slot, _)| wanted.contains(slot))
            .map(|(_, record)| number(&record.identity.key))
            .collect();
        let all: Vec<Key> = keys(0..12);
        for (number, there) in (0..12).zip(ns.contains(&all).unwrap()) {
            assert_eq!(there, blocks.contains(&number), "{records:?}");
        }
        depot.close();
        // Nothing of what opening wrote changes the answer.
        assert_eq!(listed(), wanted);
        let live = raw.records(State::Live).len();
        assert_eq!(live, wanted.len(), "the outranked are dead on the medium");
    }
}
