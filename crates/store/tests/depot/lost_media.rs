//! A medium that fails under an open arena: its blocks are misses, and the rest goes on.

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::common::{
    PATIENCE, Place, assert_at_rest, fill_scattered, get, has, keys, namespace, put, put_each,
    verify,
};
use kvdepot_store::Outcome;
use kvdepot_testkit::Rng;

const LEN: usize = 40_000;

/// Truncates the file of an arena to a part of its length.
fn truncate(place: &Place, part: f64) {
    let file = File::options().write(true).open(place.arena()).unwrap();
    let len = file.metadata().unwrap().len();
    file.set_len((len as f64 * part) as u64).unwrap();
}

#[test]
fn blocks_of_a_truncated_arena_are_misses_and_puts_go_elsewhere() {
    for pipeline in ["Dax", "Cache|Dax"] {
        let place = Place::new(pipeline, "1MiB", "8MiB").with("dax", "records", 1024);
        let depot = place.open();
        let ns = namespace(&depot);
        let numbers: Vec<u64> = (0..150).collect();
        assert!(put(&ns, &numbers, LEN).iter().all(|stored| *stored));
        assert!(depot.drain(PATIENCE));
        truncate(&place, 0.6);
        let there: Vec<bool> = get(&ns, &numbers, LEN)
            .iter()
            .map(|outcome| *outcome == Outcome::Done)
            .collect();
        let kept = there.iter().filter(|there| **there).count();
        assert!((20..140).contains(&kept), "{pipeline}: {kept}");
        // What was lost is gone from the index, and what is there stays.
        for (number, there) in numbers.iter().zip(&there) {
            assert_eq!(has(&ns, &[*number], LEN), *there, "{pipeline}: {number}");
        }
        let far = depot.stats().tiers.last().cloned().unwrap();
        assert!(far.lost_bytes > 0 && far.corrupt_blocks > 0, "{far:?}");
        // New blocks find room where the medium is sound, again and again.
        for round in 0..6 {
            let numbers: Vec<u64> = (1000 + round * 50..1050 + round * 50).collect();
            put_each(&ns, &numbers, LEN);
            assert!(depot.drain(PATIENCE));
        }
        let last: Vec<u64> = (1250..1300).collect();
        assert!(has(&ns, &last, LEN), "{pipeline}");
        assert_at_rest(&depot);
        depot.close();
        assert!(verify(&place.arena()).sound >= 50, "{pipeline}");
    }
}

#[test]
fn losing_a_medium_amid_reads_and_writes_gives_no_wrong_bytes_and_no_crash() {
    let place = Place::new("Dax", "", "8MiB").with("dax", "records", 1024);
    let depot = place.open();
    let ns = namespace(&depot);
    let numbers: Vec<u64> = (0..120).collect();
    put(&ns, &numbers, LEN);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for reader in 0..2 {
            let (ns, numbers, stop) = (&ns, &numbers, &stop);
            scope.spawn(move || {
                let mut next = 10_000 * (reader + 1);
                while !stop.load(Ordering::Relaxed) {
                    // Compares what is served with what was put.
                    get(ns, numbers, LEN);
                    put(ns, &[next], LEN);
                    get(ns, &[next], LEN);
                    next += 1;
                }
            });
        }
        for part in [0.9, 0.8, 0.7, 0.6] {
            thread::sleep(Duration::from_millis(40));
            truncate(&place, part);
        }
        thread::sleep(Duration::from_millis(80));
        stop.store(true, Ordering::Relaxed);
    });
    assert!(depot.drain(PATIENCE));
    let fresh: Vec<u64> = (5000..5020).collect();
    for _ in 0..10 {
        put(&ns, &fresh, LEN);
    }
    assert!(has(&ns, &fresh, LEN));
    assert!(
        ns.contains(&keys(fresh))
            .unwrap()
            .iter()
            .all(|there| *there)
    );
    assert_at_rest(&depot);
}

#[test]
fn what_a_medium_has_lost_is_no_room_and_no_place_for_a_large_block() {
    let place = Place::new("Dax", "", "8MiB").with("dax", "records", 4096);
    let depot = place.open();
    let ns = namespace(&depot);
    let mut rng = Rng::for_test("what_a_medium_has_lost_is_no_room");
    let numbers: Vec<u64> = (0..fill_scattered(&depot, &ns, &mut rng)).collect();
    // Whose bytes are lost learn it when they are read; some of their room is free by then.
    let early: Vec<u64> = numbers
        .iter()
        .copied()
        .filter(|number| number % 7 == 0)
        .collect();
    ns.remove(&keys(early)).unwrap();
    truncate(&place, 0.6);
    get(&ns, &numbers, 4096);
    let len = 512 << 10;
    let before = depot.stats().tiers[0].evicted_bytes;
    for number in 10_000..10_004 {
        assert_eq!(put(&ns, &[number], len), [true], "{number}");
        assert!(has(&ns, &[number], len));
    }
    let tier = depot.stats().tiers.remove(0);
    let evicted = tier.evicted_bytes - before;
    assert!(
        evicted <= 6 * len as u64,
        "{evicted} evicted for 4 of {len}"
    );
    let sound = tier.capacity_bytes * 6 / 10;
    assert!(tier.free_bytes + tier.live_bytes <= sound, "{tier:?}");
    assert_at_rest(&depot);
}
