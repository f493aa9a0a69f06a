//! Reserve, move, commit or abort; pin, move, unpin: what parts, paused workers and joined puts
//! may and may not do.

use std::slice;
use std::time::Duration;

use crate::common;
use crate::common::raw::Raw;
use crate::common::{
    PATIENCE, Place, Served, assert_at_rest, get, has, key, keys, namespace, namespace_of, put,
    start_put, verify,
};
use kvdepot_service::Mover;
use kvdepot_store::{
    BlockBuffers, Buffer, Checksum, Depot, Error, Key, Namespace, Outcome, Pin, Reservation,
};
use kvdepot_testkit::bytes::content;

const SHORT: Duration = Duration::from_millis(50);

fn reserve(ns: &Namespace, number: u64, parts: &[u64]) -> Option<Reservation> {
    let mut reserved = ns.reserve(&[(key(number), parts.to_vec())]).unwrap();
    reserved.remove(0)
}

fn attach(place: &Place) -> Mover {
    Mover::attach(&place.socket(), Some(1), true).unwrap()
}

/// Moves one part's content, which is that of `number`, and answers its checksum.
fn store(mover: &Mover, reserved: &Reservation, part: u32, number: u64, len: u64) -> Checksum {
    let buffers = BlockBuffers::whole([common::block(number, len as usize)]);
    let job = mover
        .store(&[reserved.placement()], &buffers, part)
        .unwrap();
    assert!(job.wait(Some(PATIENCE)));
    job.checksums()[0].unwrap()
}

/// The bytes of one part of a pinned block, if they verify.
fn load(mover: &Mover, pin: &Pin, part: u32, len: u64) -> Option<Vec<u8>> {
    let buffer = Buffer::from_vec(vec![0; len as usize]);
    let buffers = BlockBuffers::whole([buffer.clone()]);
    let job = mover.load(&[pin.placement()], &buffers, part).unwrap();
    assert!(job.wait(Some(PATIENCE)));
    job.checksums()[0].map(|_| buffer.to_vec())
}

fn pin(ns: &Namespace, number: u64) -> Option<Pin> {
    ns.pin(&[key(number)], false).unwrap().remove(0)
}

/// Reserves, fills and commits block `number` of these parts; part `i` is content `number + i`.
fn put_parts(ns: &Namespace, mover: &Mover, number: u64, parts: &[u64]) {
    let reserved = reserve(ns, number, parts).unwrap();
    let checksums = parts
        .iter()
        .zip(0..)
        .map(|(len, part)| store(mover, &reserved, part, number + u64::from(part), *len))
        .collect();
    assert_eq!(ns.commit(&[reserved], &[checksums]).unwrap(), [true]);
}

/// What a get of the whole block delivers.
fn whole(number: u64, parts: &[u64]) -> Vec<u8> {
    let part = |(len, at): (&u64, u64)| content(number + at, *len as usize);
    parts.iter().zip(0..).flat_map(part).collect()
}

fn get_whole(ns: &Namespace, number: u64, parts: &[u64]) -> Outcome {
    let wanted = whole(number, parts);
    let buffer = Buffer::from_vec(vec![0; wanted.len()]);
    let task = ns
        .get(keys([number]), BlockBuffers::whole([buffer.clone()]))
        .unwrap();
    task.wait(Some(PATIENCE)).unwrap();
    let outcome = task.outcomes()[0];
    assert!(
        outcome != Outcome::Done || buffer.to_vec() == wanted,
        "wrong bytes"
    );
    outcome
}

const PARTS: [&[u64]; 5] = [
    &[1, 1],
    &[5000, 4096, 100],
    &[1 << 20, (1 << 20) + 1],
    &[70_000, 1, 3, 8192],
    &[9000],
];

#[test]
fn blocks_of_several_parts_come_back_part_by_part_and_whole() {
    for pipeline in ["Cache", "Dax", "Cache|Dax"] {
        let place = Place::new(pipeline, "8MiB", "16MiB");
        let depot = place.serve();
        let (ns, mover) = (namespace(&depot), attach(&place));
        for (number, parts) in (0..).step_by(10).zip(PARTS) {
            put_parts(&ns, &mover, number, parts);
            let pinned = pin(&ns, number).unwrap();
            assert_eq!(pinned.bytes(), parts.iter().sum::<u64>());
            for (part, len) in (0..).zip(parts) {
                let wanted = content(number + u64::from(part), *len as usize);
                assert_eq!(
                    load(&mover, &pinned, part, *len),
                    Some(wanted),
                    "{pipeline}"
                );
            }
            ns.unpin(&[pinned], true);
            assert_eq!(get_whole(&ns, number, parts), Outcome::Done);
        }
        assert!(depot.drain(PATIENCE));
        common::eventually("rest", || {
            depot
                .stats()
                .tiers
                .iter()
                .all(|tier| tier.pinned_blocks == 0)
        });
        assert_at_rest(&depot);
        depot.close();
        if pipeline != "Cache" {
            assert_eq!(verify(&place.arena()).sound, PARTS.len() as u64);
            let depot = place.serve();
            for (number, parts) in (0..).step_by(10).zip(PARTS) {
                assert_eq!(get_whole(&namespace(&depot), number, parts), Outcome::Done);
            }
        }
    }
}

#[test]
fn commit_needs_every_part_of_this_reservation() {
    let place = Place::new("Dax", "", "4MiB");
    let depot = place.serve();
    let (ns, mover) = (namespace(&depot), attach(&place));
    let lens = [5000, 5000, 5000];
    let reserved = reserve(&ns, 1, &lens).unwrap();
    let sums: Vec<Checksum> = (0..3)
        .map(|part| store(&mover, &reserved, part, 7, 5000))
        .collect();
    for wrong in [
        &sums[..0],
        &sums[..2],
        &[sums.as_slice(), &sums[..1]].concat(),
    ] {
        let error = ns
            .commit(slice::from_ref(&reserved), &[wrong.to_vec()])
            .unwrap_err();
        assert!(matches!(error, Error::Input { .. }), "{error}");
        assert_eq!(ns.contains(&[key(1)]).unwrap(), [false]);
    }
    assert!(ns.commit(slice::from_ref(&reserved), &[]).is_err());
    // All there, but the one of rank 1 in the place of rank 2's, for the same bytes.
    let swapped = vec![sums[0], sums[2], sums[1]];
    assert_eq!(
        ns.commit(slice::from_ref(&reserved), &[swapped]).unwrap(),
        [true]
    );
    assert_eq!(get_whole(&ns, 1, &lens), Outcome::Corrupt);
    // What was committed once cannot be again, nor aborted.
    assert_eq!(
        ns.commit(slice::from_ref(&reserved), &[sums]).unwrap(),
        [false]
    );
    ns.abort(&[reserved]);
    assert_at_rest(&depot);
}

#[test]
fn one_rotten_part_makes_the_block_a_miss() {
    let place = Place::new("Dax", "", "4MiB");
    let lens = [20_000, 300, 9000];
    let table = 20_480 + 4096 + 12_288;
    for (at, part) in [
        (0, Some(0)),
        (20_480 + 299, Some(1)),
        (36_000 - 2700, Some(2)),
        (table + 5, None),
    ] {
        let depot = place.serve();
        let (ns, mover) = (namespace(&depot), attach(&place));
        put_parts(&ns, &mover, 40, &lens);
        let raw = Raw::open(&place.arena());
        let (_, record) = raw.live(&key(40)).unwrap();
        let (offset, _) = record.extents.iter().next().unwrap();
        let byte = raw.file.read(offset + at, 1)[0];
        raw.file.write(offset + at, &[byte ^ 4]);
        assert_eq!(verify(&place.arena()).bad.len(), 1, "byte {at}");
        match part {
            Some(rotten) => {
                let pinned = pin(&ns, 40).unwrap();
                for (part, len) in (0..).zip(lens) {
                    let loaded = load(&mover, &pinned, part, len);
                    assert_eq!(loaded.is_some(), part != rotten);
                }
                assert_eq!(ns.discard(slice::from_ref(&pinned)), 1);
                ns.unpin(&[pinned], false);
            }
            None => assert_eq!(pin(&ns, 40), None),
        }
        assert_eq!(get_whole(&ns, 40, &lens), Outcome::Miss);
        assert_at_rest(&depot);
        depot.close();
    }
    let depot = place.serve();
    let (ns, mover) = (namespace(&depot), attach(&place));
    put_parts(&ns, &mover, 40, &lens);
    assert_eq!(get_whole(&ns, 40, &lens), Outcome::Done);
}

#[test]
fn a_paused_writer_finds_its_room_untouched_whatever_happened_meanwhile() {
    let place = Place::new("Dax", "", "1MiB");
    let depot = place.serve();
    let ns = namespace(&depot);
    let reserved = reserve(&ns, 1, &[100_000]).unwrap();
    // Its worker goes away, which ends nothing, and everything is under pressure.
    drop(attach(&place));
    for round in 0..30 {
        assert_eq!(put(&ns, &[100 + round], 90_000), [true]);
    }
    assert_eq!(depot.stats().tiers[0].reserved_blocks, 1);
    let mover = attach(&place);
    let checksum = store(&mover, &reserved, 0, 1, 100_000);
    let others: Vec<u64> = (100..130).collect();
    let found = get(&ns, &others, 90_000);
    assert!(found.contains(&Outcome::Done) && !found.contains(&Outcome::Corrupt));
    assert_eq!(ns.commit(&[reserved], &[vec![checksum]]).unwrap(), [true]);
    assert!(has(&ns, &[1], 100_000));
}

#[test]
fn a_pinned_block_stays_readable_although_it_was_removed() {
    let place = Place::new("Dax", "", "1MiB");
    let depot = place.serve();
    let (ns, mover) = (namespace(&depot), attach(&place));
    assert_eq!(put(&ns, &[1], 100_000), [true]);
    let pins = [pin(&ns, 1).unwrap(), pin(&ns, 1).unwrap()];
    assert_eq!(ns.remove(&[key(1)]).unwrap(), 1);
    assert_eq!(ns.contains(&[key(1)]).unwrap(), [false]);
    ns.unpin(&pins[..1], false);
    for round in 0..30 {
        assert_eq!(put(&ns, &[100 + round], 90_000), [true]);
    }
    assert_eq!(
        load(&mover, &pins[1], 0, 100_000),
        Some(content(1, 100_000))
    );
    ns.unpin(&pins[1..], false);
    assert_at_rest(&depot);
}

#[test]
fn a_reservation_that_was_given_back_touches_nothing_any_more() {
    let place = Place::new("Dax", "", "1MiB");
    let depot = place.serve();
    let (ns, mover) = (namespace(&depot), attach(&place));
    // Two parts: its commit would write a part table.
    let stale = reserve(&ns, 1, &[100, 100]).unwrap();
    let sums: Vec<Checksum> = (0..2)
        .map(|part| store(&mover, &stale, part, 1, 100))
        .collect();
    ns.abort(slice::from_ref(&stale));
    // Somebody else has its room.
    assert_eq!(put(&ns, &[2], 12_000), [true]);
    assert_eq!(
        ns.commit(slice::from_ref(&stale), &[sums]).unwrap(),
        [false]
    );
    ns.abort(&[stale]);
    assert!(has(&ns, &[2], 12_000));
    assert_at_rest(&depot);
}

#[test]
fn a_reservation_named_twice_is_committed_once() {
    for durability in ["process", "power"] {
        let place = Place::new("Dax", "", "1MiB").with("dax", "durability", durability);
        let depot = place.serve();
        let (ns, mover) = (namespace(&depot), attach(&place));
        let reserved = reserve(&ns, 1, &[5000]).unwrap();
        let sum = vec![store(&mover, &reserved, 0, 1, 5000)];
        let both = [reserved.clone(), reserved];
        assert_eq!(
            ns.commit(&both, &[sum.clone(), sum]).unwrap(),
            [true, false]
        );
        assert!(has(&ns, &[1], 5000));
        assert_eq!(depot.stats().tiers[0].live_bytes, 5000);
        assert_eq!(ns.remove(&keys([1])).unwrap(), 1);
        assert_at_rest(&depot);
        assert_eq!(put(&ns, &[2, 3], 5000), [true; 2]);
        assert_at_rest(&depot);
    }
}

#[test]
fn another_depots_reservations_and_pins_are_refused() {
    let (one, two) = (
        Place::new("Cache", "1MiB", ""),
        Place::new("Cache", "1MiB", ""),
    );
    let (depot, other) = (one.serve(), two.serve());
    let (ns, strange) = (namespace(&depot), namespace(&other));
    let reserved = reserve(&ns, 1, &[5000]).unwrap();
    // The first reservation of each has the same slot and the same number.
    let same = reserve(&strange, 1, &[5000]).unwrap();
    let sums = [vec![Checksum([0; 16])]];
    let error = strange
        .commit(slice::from_ref(&reserved), &sums)
        .unwrap_err();
    assert!(matches!(error, Error::Input { .. }), "{error}");
    strange.abort(slice::from_ref(&reserved));
    assert_eq!(other.stats().tiers[0].reserved_blocks, 1);
    ns.abort(&[reserved]);
    strange.abort(&[same]);
    assert_eq!(put(&ns, &[1], 500), [true]);
    assert_eq!(put(&strange, &[1], 500), [true]);
    let pinned = pin(&ns, 1).unwrap();
    strange.unpin(slice::from_ref(&pinned), false);
    assert_eq!(strange.discard(slice::from_ref(&pinned)), 0);
    ns.unpin(&[pinned], false);
    assert!(has(&strange, &[1], 500));
    assert_at_rest(&depot);
    assert_at_rest(&other);
}

#[test]
fn a_put_shares_the_outcome_of_a_reservation_and_takes_over_when_it_aborts() {
    for pipeline in ["Cache", "Dax", "Cache|Dax"] {
        let place = Place::new(pipeline, "1MiB", "4MiB");
        let depot = place.serve();
        let (ns, mover) = (namespace(&depot), attach(&place));
        for aborts in [false, true] {
            let number = u64::from(aborts) + 1;
            let reserved = reserve(&ns, number, &[5000]).unwrap();
            assert_eq!(
                reserve(&ns, number, &[5000]),
                None,
                "somebody is writing it"
            );
            // Twice in one call, and beside a key of its own.
            let task = start_put(&ns, &[number, 50, number], 5000);
            let again = start_put(&ns, &[number], 5000);
            assert!(matches!(task.wait(Some(SHORT)), Err(Error::Timeout { .. })));
            assert!(!again.is_done());
            assert_eq!(ns.contains(&[key(number)]).unwrap(), [false]);
            if aborts {
                ns.abort(&[reserved]);
            } else {
                let sum = store(&mover, &reserved, 0, number, 5000);
                assert_eq!(ns.commit(&[reserved], &[vec![sum]]).unwrap(), [true]);
            }
            assert_eq!(task.wait(Some(PATIENCE)).unwrap(), [true; 3]);
            assert_eq!(again.wait(Some(PATIENCE)).unwrap(), [true]);
            assert!(has(&ns, &[number, 50], 5000));
        }
        assert_at_rest(&depot);
    }
}

/// A depot whose far tier somebody is writing block 1 to, for as long as the test likes.
fn with_far_reservation() -> (Place, Depot, Reservation) {
    let place = Place::new("Cache|Dax", "1MiB", "4MiB").with("", "write_back_depth", "64KiB");
    let depot = place.serve();
    // Too long to wait in the near tier: it goes to the far one at once.
    let reserved = reserve(&namespace(&depot), 1, &[100_000]).unwrap();
    assert_eq!(depot.stats().tiers[1].reserved_blocks, 1);
    (place, depot, reserved)
}

#[test]
fn a_put_of_a_block_that_is_not_yet_durable_waits_for_it() {
    let (place, depot, reserved) = with_far_reservation();
    let ns = namespace(&depot);
    let first = start_put(&ns, &[1], 5000);
    first.wait_released(Some(PATIENCE)).unwrap();
    common::eventually("commit", || ns.contains(&[key(1)]).unwrap()[0]);
    let second = start_put(&ns, &[1], 5000);
    second.wait_released(Some(PATIENCE)).unwrap();
    for task in [&first, &second] {
        assert!(matches!(task.wait(Some(SHORT)), Err(Error::Timeout { .. })));
    }
    assert_eq!(depot.pending_bytes(), 5000);
    ns.abort(&[reserved]);
    for task in [&first, &second] {
        assert_eq!(task.wait(Some(PATIENCE)).unwrap(), [true]);
    }
    assert_at_rest(&depot);
    depot.close();
    assert_eq!(verify(&place.arena()).sound, 1);
}

#[test]
fn a_block_removed_while_it_is_written_back_does_not_come_back() {
    let (place, depot, reserved) = with_far_reservation();
    let ns = namespace(&depot);
    let task = start_put(&ns, &[1], 5000);
    task.wait_released(Some(PATIENCE)).unwrap();
    assert_eq!(ns.remove(&[key(1)]).unwrap(), 1);
    ns.abort(&[reserved]);
    assert!(depot.drain(PATIENCE));
    assert_eq!(ns.contains(&[key(1)]).unwrap(), [false]);
    assert_eq!(get(&ns, &[1], 5000), [Outcome::Miss]);
    assert_at_rest(&depot);
    depot.close();
    assert_eq!(verify(&place.arena()).blocks, 0);
}

#[test]
fn close_answers_puts_that_wait_for_a_reservation_nobody_ends() {
    for pipeline in ["Cache", "Dax", "Cache|Dax"] {
        let place = Place::new(pipeline, "1MiB", "4MiB");
        let depot = place.serve();
        let ns = namespace(&depot);
        let reserved = reserve(&ns, 1, &[5000]).unwrap();
        let pinned_by_nobody = start_put(&ns, &[1], 5000);
        depot.close();
        assert_eq!(pinned_by_nobody.wait(Some(PATIENCE)).unwrap(), [false]);
        assert_eq!(pinned_by_nobody.outcomes(), [Outcome::Closed]);
        // Late ends do no harm, and change nothing on the medium.
        ns.abort(&[reserved]);
        assert!(matches!(ns.contains(&[key(1)]), Err(Error::Closed(_))));
    }
}

#[test]
fn close_gives_up_what_the_far_tier_does_not_take_in_time() {
    let place = Place::new("Cache|Dax", "1MiB", "4MiB")
        .with("", "write_back_depth", "64KiB")
        .with("", "close_timeout", "100ms");
    let depot = place.serve();
    let ns = namespace(&depot);
    let _held = reserve(&ns, 1, &[100_000]).unwrap();
    let task = start_put(&ns, &[1], 5000);
    depot.close();
    assert_eq!(task.wait(Some(PATIENCE)).unwrap(), [false]);
    assert_eq!(task.outcomes(), [Outcome::Closed]);
}

#[test]
fn late_unpins_and_discards_of_a_closed_depot_write_nothing() {
    let place = Place::new("Dax", "", "1MiB");
    let depot = place.serve();
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1], 5000), [true]);
    let pinned = pin(&ns, 1).unwrap();
    depot.close();
    let next = place.serve();
    assert_eq!(ns.discard(slice::from_ref(&pinned)), 0);
    ns.unpin(&[pinned], true);
    next.close();
    let last = place.serve();
    assert!(has(&namespace(&last), &[1], 5000));
}

#[test]
fn namespaces_never_see_each_other() {
    let place = Place::new("Cache|Dax", "1MiB", "4MiB");
    let depot = place.serve();
    let (one, two) = (namespace(&depot), namespace_of(&depot, "other"));
    assert_eq!(put(&one, &[1], 5000), [true]);
    assert_eq!(get(&two, &[1], 5000), [Outcome::Miss]);
    assert_eq!(two.remove(&[key(1)]).unwrap(), 0);
    let held = reserve(&two, 1, &[5000]).unwrap();
    assert_eq!(put(&one, &[1], 5000), [true]);
    two.abort(&[held]);
    assert_eq!(put(&two, &[1], 300), [true]);
    assert!(has(&one, &[1], 5000) && has(&two, &[1], 300));
    assert!(one.clear().unwrap() >= 1);
    assert_eq!(get(&one, &[1], 5000), [Outcome::Miss]);
    assert!(has(&two, &[1], 300));
}

#[test]
fn a_block_whose_write_back_failed_is_sent_again_by_the_next_store() {
    let place = Place::new("Cache|Dax", "256KiB", "1MiB");
    let depot = place.serve();
    let (ns, mover) = (namespace(&depot), attach(&place));
    // Goes round the near tier; pinned it leaves no room in the far one.
    assert_eq!(put(&ns, &[1], 900_000), [true]);
    let pinned = pin(&ns, 1).unwrap();
    put_parts(&ns, &mover, 10, &[50_000, 50_000]);
    assert!(depot.drain(PATIENCE));
    assert_eq!(depot.stats().tiers[1].stored_blocks, 1);
    ns.unpin(&[pinned], false);
    assert_eq!(reserve(&ns, 10, &[50_000, 50_000]), None, "it is stored");
    assert!(depot.drain(PATIENCE));
    assert_eq!(depot.stats().tiers[1].stored_blocks, 2);
    // Once more, there is nothing to do.
    assert_eq!(reserve(&ns, 10, &[50_000, 50_000]), None);
    assert!(depot.drain(PATIENCE));
    assert_eq!(depot.stats().tiers[1].stored_blocks, 2);
    assert_at_rest(&depot);
}

#[test]
fn a_pin_asks_the_next_tier_when_the_near_part_table_does_not_verify() {
    let place = Place::new("Cache|Dax", "1MiB", "4MiB");
    let depot = place.serve();
    let (ns, mover) = (namespace(&depot), attach(&place));
    put_parts(&ns, &mover, 10, &[5000, 100]);
    assert!(depot.drain(PATIENCE));
    let near = pin(&ns, 10).unwrap();
    assert_eq!(near.tier(), "Cache");
    let (medium, offset, len) = mover.locate(&near.placement(), 1).unwrap()[0];
    let table = offset + len.next_multiple_of(4096);
    mover.media()[medium]
        .write_at(table as usize, &[0xEE; 64])
        .unwrap();
    ns.unpin(&[near], false);
    let far = pin(&ns, 10).unwrap();
    assert_eq!(far.tier(), "Dax");
    assert_eq!(load(&mover, &far, 1, 100), Some(content(11, 100)));
    assert_eq!(depot.stats().tiers[0].corrupt_blocks, 1);
    ns.unpin(&[far], false);
    assert_at_rest(&depot);
}

/// A queue to the far tier that takes six blocks of 10,000 bytes and drops what comes behind them.
fn short_queue(cache: &str) -> Place {
    Place::new("Cache|Dax", cache, "4MiB")
        .with("", "write_back_depth", 65_000)
        .with("", "overload", "drop")
}

fn blocks(numbers: impl IntoIterator<Item = u64>) -> Vec<(Key, Vec<u64>)> {
    let block = |number| (key(number), vec![10_000]);
    numbers.into_iter().map(block).collect()
}

fn all(reserved: Vec<Option<Reservation>>) -> Vec<Reservation> {
    reserved.into_iter().map(Option::unwrap).collect()
}

#[test]
fn a_block_behind_a_full_queue_is_kept_near_until_a_later_store_sends_it_on() {
    let place = short_queue("1MiB");
    let depot = place.serve();
    let (ns, mover) = (namespace(&depot), attach(&place));
    let queue = all(ns.reserve(&blocks(0..6)).unwrap());
    let mut behind = all(ns.reserve(&blocks(6..9)).unwrap());
    assert_eq!(depot.stats().put_dropped_blocks, 3);
    let given_back = behind.pop().unwrap();
    let commit = |reserved: Vec<Reservation>, first: u64| {
        let sums = (first..)
            .zip(&reserved)
            .map(|(number, one)| vec![store(&mover, one, 0, number, 10_000)]);
        let sums: Vec<Vec<Checksum>> = sums.collect();
        assert_eq!(ns.commit(&reserved, &sums).unwrap(), vec![true; sums.len()]);
    };
    commit(behind, 6);
    ns.abort(slice::from_ref(&given_back));
    assert!(has(&ns, &[6, 7], 10_000), "in the near tier");
    // What they take is not the queue's: it still has those that were before them, and no others.
    assert_eq!(depot.stats().tiers[0].pinned_blocks, 0);
    commit(queue, 0);
    assert!(depot.drain(PATIENCE));
    assert_eq!(depot.stats().tiers[1].blocks, 6);
    assert_eq!(ns.prefix(&keys(0..9)).unwrap(), 8);
    assert_at_rest(&depot);

    assert_eq!(ns.reserve(&blocks(0..8)).unwrap(), vec![None; 8], "stored");
    assert!(depot.drain(PATIENCE));
    assert_eq!(depot.stats().tiers[1].blocks, 8);
    assert_at_rest(&depot);
}

#[test]
fn a_key_that_is_written_near_is_not_written_far_when_the_queue_fills() {
    let place = short_queue("1MiB").with("", "overload", "wait");
    let depot = place.serve();
    let ns = namespace(&depot);
    let queue = all(ns.reserve(&blocks(0..6)).unwrap());
    let reserved = || {
        let tiers = depot.stats().tiers;
        (tiers[0].reserved_blocks, tiers[1].reserved_blocks)
    };
    assert_eq!(ns.reserve(&blocks(0..6)).unwrap(), vec![None; 6]);
    assert_eq!(reserved(), (6, 0));
    let far = all(ns.reserve(&blocks(5..7)).unwrap().split_off(1));
    assert_eq!(reserved(), (6, 1), "behind a full queue it goes far");
    // A put joins, and takes over what is given back.
    let joined = start_put(&ns, &[0], 10_000);
    assert_eq!(joined.outcomes(), [Outcome::Pending]);
    assert_eq!(reserved(), (6, 1));
    ns.abort(&queue);
    ns.abort(&far);
    assert_eq!(joined.wait(Some(PATIENCE)).unwrap(), [true]);
    assert!(depot.drain(PATIENCE));
    assert_eq!(depot.stats().tiers[1].stored_blocks, 1);
    assert_at_rest(&depot);
}

#[test]
fn a_prompt_is_reserved_up_to_the_first_block_that_finds_no_room() {
    // Behind the six of the queue there is room for two more.
    let place = short_queue("96KiB");
    let depot = place.serve();
    let client = kvdepot_service::connect(&place.socket(), Some(1)).unwrap();
    for ns in [namespace(&depot), namespace(&client)] {
        let held = all(ns.reserve(&blocks(0..2)).unwrap());
        let skipped = ns.reserve(&blocks(0..12)).unwrap();
        let found = |reserved: &[Option<Reservation>]| -> Vec<bool> {
            reserved.iter().map(Option::is_some).collect()
        };
        let wanted: Vec<bool> = (0..12).map(|at| (2..8).contains(&at)).collect();
        assert_eq!(found(&skipped), wanted);
        let skipped: Vec<Reservation> = skipped.into_iter().flatten().collect();
        ns.abort(&skipped[..1]);
        // One that is being written is no gap. There is room for block 2, and none for block 8.
        let prompt = ns.reserve_prefix(&blocks(0..12)).unwrap();
        assert_eq!(
            found(&prompt),
            wanted[..8]
                .iter()
                .enumerate()
                .map(|(at, _)| at == 2)
                .collect::<Vec<_>>()
        );
        let more = ns.reserve_prefix(&blocks([9, 2, 10])).unwrap();
        assert_eq!(more, [], "nothing behind a gap");
        ns.abort(&prompt.into_iter().flatten().collect::<Vec<_>>());
        ns.abort(&skipped[1..]);
        ns.abort(&held);
        common::eventually("rest", || depot.stats().tiers[0].reserved_blocks == 0);
        assert_at_rest(&depot);
    }
}
