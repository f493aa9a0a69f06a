//! What a restart makes of the order of use, and of what a power cut has left where nobody asked
//! for more: a depot puts again what is missing.

use crate::common::raw::Raw;
use crate::common::{Place, assert_at_rest, get, has, key, keys, namespace, put, verify};
use kvdepot_store::Outcome;
use kvdepot_store::format::record;
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::{Rng, rounds};

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
    // More than an eighth of the arena is evicted for blocks that are offered again.
    put(&ns, &numbers, len);
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
    let mut rng = Rng::for_test("recovery::crash_power_a_record_without_its_payload_is_a_miss");
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
