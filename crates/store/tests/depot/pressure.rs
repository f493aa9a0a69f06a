//! Full arenas, full queues: what goes, in which order, and what is refused.

use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

use crate::common::{
    PATIENCE, Place, assert_at_rest, block, eventually, fill_scattered, get, has, key, keys,
    namespace, number, pin_all, put, start_put, verify,
};
use kvdepot_store::inspect::Inspection;
use kvdepot_store::{BlockBuffers, Depot, Error, Namespace, Outcome};
use kvdepot_testkit::{Rng, rounds};

/// Checks that every block that is there has its predecessor there, for prompts that share
/// prefixes: block `n` follows block `n / 2`, as in a binary tree.
fn assert_prefixes_closed(there: &BTreeSet<u64>) {
    for number in there.iter().filter(|number| **number > 1) {
        assert!(
            there.contains(&(number / 2)),
            "block {number} is there without its prefix"
        );
    }
}

/// The blocks of the last tier.
fn far(depot: &Depot, ns: &Namespace) -> BTreeSet<u64> {
    let Some(path) = depot.path() else {
        let there = ns.contains(&keys(0..256)).unwrap();
        return (0..256).filter(|number| there[*number as usize]).collect();
    };
    let (blocks, _) = Inspection::open(&path).unwrap().blocks().unwrap();
    blocks
        .iter()
        .map(|block| number(&block.record.identity.key))
        .collect()
}

/// The prompt that ends in a block: its path from the root.
fn prompt(end: u64) -> Vec<u64> {
    let mut path: Vec<u64> =
        std::iter::successors(Some(end), |at| (*at > 1).then_some(at / 2)).collect();
    path.reverse();
    path
}

#[test]
fn no_prompt_ever_loses_its_head_before_its_tail() {
    let mut rng = Rng::for_test("pressure::no_prompt_ever_loses_its_head_before_its_tail");
    for (pipeline, steps) in [("Cache", 600), ("Dax", 600), ("Cache|Dax", 300)] {
        let place = Place::new(pipeline, "512KiB", "1MiB").with("", "promote", false);
        let depot = place.open();
        let ns = namespace(&depot);
        for _ in 0..rounds(steps) {
            let path = prompt(rng.between(1, 255));
            match rng.below(4) {
                0 => {
                    get(&ns, &path, 9000);
                }
                1 => {
                    let pins = ns.pin(&keys(path), true).unwrap();
                    let pins: Vec<_> = pins.into_iter().flatten().collect();
                    ns.unpin(&pins, true);
                }
                _ => {
                    put(&ns, &path, 9000);
                }
            }
            assert!(depot.drain(PATIENCE));
            assert_prefixes_closed(&far(&depot, &ns));
        }
        assert!(
            depot
                .stats()
                .tiers
                .iter()
                .all(|tier| tier.evicted_blocks > 100)
        );
        assert_at_rest(&depot);
    }
}

#[test]
fn a_prompt_written_back_in_many_steps_keeps_its_order() {
    // Its blocks are committed near and written back one by one, with pauses between: what was
    // there before, what came with another call, what took the way round the queue.
    let place = Place::new("Cache|Dax", "1MiB", "2MiB").with("", "write_back_depth", "100KiB");
    let depot = place.open();
    let ns = namespace(&depot);
    let path: Vec<u64> = (0..40).collect();
    for end in [3, 17, 18, 40] {
        assert_eq!(put(&ns, &path[..end], 30_000), vec![true; end]);
    }
    for filler in 0..40 {
        assert_eq!(put(&ns, &[1000 + filler], 30_000), [true]);
        assert!(depot.drain(PATIENCE));
        let there = ns.contains(&keys(0..40)).unwrap();
        let kept = there.iter().take_while(|there| **there).count();
        assert!(there[kept..].iter().all(|there| !there), "{there:?}");
    }
    assert!(ns.prefix(&keys(0..40)).unwrap() < 40);
}

#[test]
fn what_was_used_stays_and_what_was_not_goes() {
    let place = Place::new("Dax", "", "1MiB");
    let depot = place.open();
    let ns = namespace(&depot);
    for round in 0..60 {
        assert_eq!(put(&ns, &[100 + round], 40_000), [true]);
        match round % 3 {
            0 if round == 0 => assert_eq!(put(&ns, &[1], 40_000), [true]),
            0 => assert!(has(&ns, &[1], 40_000)),
            1 => assert_eq!(put(&ns, &[1], 40_000), [true]),
            _ => {
                let pins: Vec<_> = ns
                    .pin(&[key(1)], false)
                    .unwrap()
                    .into_iter()
                    .flatten()
                    .collect();
                ns.unpin(&pins, true);
            }
        }
    }
    assert_eq!(
        depot.stats().tiers[0].stored_blocks,
        61,
        "block 1 was written once"
    );
}

#[test]
fn eviction_runs_at_most_two_percent_ahead() {
    let place = Place::new("Dax", "", "8MiB").with("dax", "records", 4096);
    let depot = place.open();
    let ns = namespace(&depot);
    let mut rng = Rng::for_test("pressure::eviction_runs_at_most_two_percent_ahead");
    let mut full = false;
    for number in 0..2000 {
        let len = rng.between(1, 20_000);
        assert_eq!(put(&ns, &[number], len as usize), [true]);
        let tier = &depot.stats().tiers[0];
        full |= tier.evicted_blocks > 0;
        // The last victim may be larger than what was missing.
        let ahead = tier.capacity_bytes / 50 + 20_480;
        assert!(
            !full || tier.free_bytes <= ahead,
            "{} free",
            tier.free_bytes
        );
    }
    assert!(full);
}

#[test]
fn the_blocks_of_a_put_lie_together_where_there_is_a_hole_for_all_of_them() {
    let place = Place::new("Dax", "", "4MiB").with("dax", "records", 4096);
    let depot = place.open();
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &(0..200).collect::<Vec<_>>(), 16_384), [true; 200]);
    // Holes of one and two blocks, and one of ten; the rest of the arena is taken.
    let free = depot.stats().tiers[0].free_bytes / 4096;
    let fill: Vec<u64> = (1000..1000 + free).collect();
    assert!(put(&ns, &fill, 4096).iter().all(|stored| *stored));
    for gone in [vec![3], vec![50, 51], (100..110).collect(), vec![190]] {
        assert_eq!(ns.remove(&keys(gone.clone())).unwrap(), gone.len());
    }
    let prompt: Vec<u64> = (500..508).collect();
    assert_eq!(put(&ns, &prompt, 16_384), [true; 8]);
    let (blocks, _) = Inspection::open(&place.arena()).unwrap().blocks().unwrap();
    let mut extents: Vec<(u64, u64)> = blocks
        .iter()
        .filter(|block| prompt.contains(&number(&block.record.identity.key)))
        .flat_map(|block| block.record.extents.iter().collect::<Vec<_>>())
        .collect();
    extents.sort_unstable();
    let together = |pair: &[(u64, u64)]| pair[0].0 + pair[0].1 == pair[1].0;
    assert!(
        extents.len() == 8 && extents.windows(2).all(together),
        "{extents:?}"
    );
}

#[test]
fn large_blocks_in_a_scattered_arena_share_a_hole() {
    let mut rng = Rng::for_test("large_blocks_in_a_scattered_arena");
    let place = Place::new("Dax", "", "64MiB").with("dax", "records", 20_000);
    let depot = place.open();
    let ns = namespace(&depot);
    fill_scattered(&depot, &ns, &mut rng);
    let (len, count) = (64 << 10, 20);
    let evicted = || depot.stats().tiers[0].evicted_bytes;
    let mut evicting = 0;
    for number in 0..count {
        let before = evicted();
        assert_eq!(put(&ns, &[100_000 + number], len), [true]);
        evicting += u32::from(evicted() > before);
    }
    // 256 KiB, 1/256 of the arena, have room for four.
    assert!(evicting <= 10, "{evicting} of {count} puts evicted");
    let tier = depot.stats().tiers[0].clone();
    // Some of the first blocks fit into what eviction by age had freed.
    let most = 2 * count * len as u64 + tier.capacity_bytes / 50;
    let evicted = tier.evicted_bytes;
    assert!(evicted <= most, "{evicted} evicted for {count} of {len}");
    assert!(has(
        &ns,
        &(100_000..100_000 + count).collect::<Vec<_>>(),
        len
    ));
    assert_at_rest(&depot);
}

#[test]
fn a_large_block_in_a_scattered_arena_evicts_little_more_than_its_room() {
    let mut rng = Rng::for_test("a_large_block_in_a_scattered_arena");
    let place = Place::new("Dax", "", "8MiB").with("dax", "records", 4096);
    let depot = place.open();
    let ns = namespace(&depot);
    let blocks = fill_scattered(&depot, &ns, &mut rng);
    let last: Vec<u64> = (0..20).map(|_| rng.below(blocks)).collect();
    assert!(has(&ns, &last, 4096));
    let len = 512 << 10;
    assert_eq!(put(&ns, &[10_000], len), [true]);
    let tier = depot.stats().tiers[0].clone();
    let most = 2 * len as u64 + tier.capacity_bytes / 50;
    assert!(
        tier.evicted_bytes <= most,
        "{} evicted for {len}",
        tier.evicted_bytes
    );
    assert!(has(&ns, &[10_000], len));
    // Where pinned blocks leave no place for it, no more than its room goes.
    let pins = pin_all(&ns, 0..blocks);
    let pinned: Vec<_> = pins.iter().filter(|_| rng.once_in(20)).cloned().collect();
    let free: Vec<_> = pins
        .iter()
        .filter(|pin| !pinned.contains(pin))
        .cloned()
        .collect();
    ns.unpin(&free, false);
    assert_eq!(put(&ns, &[10_001], 4 << 20), [false]);
    assert!(depot.stats().tiers[0].evicted_bytes <= 2 * most + (4 << 20));
    ns.unpin(&pinned, false);
    assert_at_rest(&depot);
}

#[test]
fn a_full_table_evicts_like_a_full_arena() {
    let place = Place::new("Dax", "", "4MiB").with("dax", "records", 16);
    let depot = place.open();
    let ns = namespace(&depot);
    for number in 0..100 {
        assert_eq!(put(&ns, &[number], 100), [true]);
        assert!(has(&ns, &[number], 100));
    }
    let tier = &depot.stats().tiers[0];
    assert!(tier.blocks == 16 && tier.blocks_max == 16, "{tier:?}");
    assert_at_rest(&depot);
    depot.close();
    assert_eq!(verify(&place.arena()).sound, 16);
}

#[test]
fn a_put_of_small_blocks_as_large_as_the_arena_is_stored_in_whole_and_so_is_the_next() {
    let place = Place::new("Dax", "", "4MiB");
    let depot = place.open();
    let ns = namespace(&depot);
    let blocks = depot.stats().tiers[0].capacity_bytes / 4096;
    for call in 0..2 {
        let numbers: Vec<u64> = (call * blocks..(call + 1) * blocks).collect();
        let stored = put(&ns, &numbers, 4096);
        // A prompt takes what others have when it is offered again.
        assert!(call == 0 || !stored.iter().all(|stored| *stored));
        assert!(put(&ns, &numbers, 4096).iter().all(|stored| *stored));
        assert_eq!(depot.stats().tiers[0].stored_blocks, (call + 1) * blocks);
        // On a busy machine eviction ahead of need may have begun on what was just stored.
        let ahead = depot.stats().tiers[0].evicted_blocks - call * blocks;
        assert!(
            ahead <= call * blocks.div_ceil(64),
            "{ahead} blocks beyond need"
        );
    }
}

#[test]
fn a_record_table_that_is_full_of_pinned_blocks_is_what_the_error_names() {
    let place = Place::new("Dax", "", "1MiB").with("dax", "records", 16);
    let depot = place.open();
    let ns = namespace(&depot);
    assert!(
        put(&ns, &(0..16).collect::<Vec<_>>(), 4096)
            .iter()
            .all(|stored| *stored)
    );
    let pins = pin_all(&ns, 0..16);
    let error = ns.reserve_strict(&[(key(16), vec![4096])]).unwrap_err();
    assert!(error.to_string().contains("16 records"), "{error}");
    ns.unpin(&pins, false);
}

#[test]
fn all_pinned_is_full_with_a_clear_error_and_evicts_nothing() {
    for pipeline in ["Cache", "Dax"] {
        let place = Place::new(pipeline, "1MiB", "1MiB");
        let depot = place.open();
        let ns = namespace(&depot);
        let blocks = depot.stats().tiers[0].capacity_bytes / 45_056;
        let numbers: Vec<u64> = (0..blocks).collect();
        assert!(put(&ns, &numbers, 45_056).iter().all(|stored| *stored));
        let pins = pin_all(&ns, 0..blocks);
        assert_eq!(pins.len() as u64, blocks);
        let task = start_put(&ns, &[500], 45_056);
        assert_eq!(task.wait(Some(PATIENCE)).unwrap(), [false]);
        assert_eq!(task.outcomes(), [Outcome::Full]);
        assert_eq!(ns.reserve(&[(key(500), vec![45_056])]).unwrap(), [None]);
        // Nothing stays reserved when one of them finds no room.
        let both = [(key(501), vec![100]), (key(500), vec![45_056])];
        let error = ns.reserve_strict(&both).unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(
                error,
                Error::Full {
                    requested: 45_056,
                    ..
                }
            ),
            "{text}"
        );
        assert!(
            text.contains(depot.tiers()[0]) && text.contains("45056"),
            "{text}"
        );
        assert_eq!(depot.stats().tiers[0].reserved_blocks, 0);
        // With one unpinned there is room for one, and for nothing twice as large.
        ns.unpin(&pins[..1], false);
        let task = start_put(&ns, &[502], 90_112);
        assert_eq!(task.wait(Some(PATIENCE)).unwrap(), [false]);
        assert!(has(&ns, &[0], 45_056), "it was not evicted for nothing");
        assert_eq!(put(&ns, &[500], 45_056), [true]);
        assert_eq!(get(&ns, &[0], 45_056), [Outcome::Miss]);
        ns.unpin(&pins[1..], false);
        assert_at_rest(&depot);
    }
}

#[test]
fn a_refusal_names_the_tier_and_what_stands_in_the_way() {
    let place = Place::new("Cache|Dax", "96KiB", "4MiB")
        .with("", "write_back_depth", 65_000)
        .with("", "overload", "drop");
    let depot = place.open();
    let ns = namespace(&depot);
    let refusal = |lens: &[u64]| {
        let blocks = (0..)
            .zip(lens)
            .map(|(number, len)| (key(number), vec![*len]));
        ns.reserve_strict(&blocks.collect::<Vec<_>>())
            .unwrap_err()
            .to_string()
    };
    let queue = refusal(&[10_000; 10]);
    assert!(
        queue.contains("10000 bytes") && queue.contains("write_back_depth = 65000"),
        "{queue}"
    );
    // Goes round the near tier, and is too large for the far one.
    let far = refusal(&[8 << 20]);
    let capacity = depot.stats().tiers[1].capacity_bytes;
    assert!(
        far.contains("tier Dax") && far.contains(&format!("the whole medium of {capacity} bytes")),
        "{far}"
    );
    assert_at_rest(&depot);
}

#[test]
fn larger_than_everything_is_full() {
    let place = Place::new("Cache|Dax", "256KiB", "1MiB");
    let depot = place.open();
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1], 5000), [true]);
    let task = start_put(&ns, &[2], 2 << 20);
    task.wait(Some(PATIENCE)).unwrap();
    assert_eq!(task.outcomes(), [Outcome::Full]);
    assert!(has(&ns, &[1], 5000), "nothing was evicted for it");
    assert_at_rest(&depot);
}

/// One call with more than the queue takes.
fn burst(depot: &Depot) -> Vec<Outcome> {
    let ns = namespace(depot);
    let numbers: Vec<u64> = (0..20).collect();
    let task = start_put(&ns, &numbers, 10_000);
    task.wait(Some(PATIENCE)).unwrap();
    task.outcomes()
}

#[test]
fn a_full_queue_drops_or_delays_as_it_was_told() {
    for (overload, stored) in [("drop", 6), ("wait", 20)] {
        let place = Place::new("Cache|Dax", "1MiB", "4MiB")
            .with("", "write_back_depth", 65_000)
            .with("", "overload", overload);
        let depot = place.open();
        let outcomes = burst(&depot);
        assert_eq!(outcomes[..stored], vec![Outcome::Done; stored]);
        assert_eq!(outcomes[stored..], vec![Outcome::Dropped; 20 - stored]);
        let stats = depot.stats();
        assert_eq!(stats.put_dropped_blocks, 20 - stored as u64);
        assert_at_rest(&depot);
        // The heads were kept, and what was dropped can be put again.
        let ns = namespace(&depot);
        assert_eq!(ns.prefix(&keys(0..20)).unwrap(), stored);
        for number in 0..20 {
            assert_eq!(put(&ns, &[number], 10_000), [true]);
        }
        depot.close();
        assert_eq!(verify(&place.arena()).sound, 20);
    }
}

#[test]
fn blocks_that_the_queue_or_the_near_tier_can_never_take_go_round_them() {
    for overload in ["drop", "wait"] {
        let place = Place::new("Cache|Dax", "128KiB", "4MiB").with("", "overload", overload);
        let depot = place.open();
        let ns = namespace(&depot);
        // The queue is half of the near tier: between the two, and above both.
        assert_eq!(put(&ns, &[1], 100_000), [true], "{overload}");
        assert_eq!(put(&ns, &[2], 1 << 20), [true], "{overload}");
        assert_eq!(depot.stats().tiers[0].stored_blocks, 0);
        assert!(has(&ns, &[1], 100_000) && has(&ns, &[2], 1 << 20));
        assert_eq!(put(&ns, &[3], 60_000), [true]);
        eventually("rest", || {
            depot
                .stats()
                .tiers
                .iter()
                .all(|tier| tier.pinned_blocks == 0)
        });
        assert_at_rest(&depot);
    }
}

#[test]
fn a_wait_times_out_without_giving_its_buffers_back() {
    let place = Place::new("Cache|Dax", "64MiB", "64MiB");
    let depot = place.open();
    let ns = namespace(&depot);
    let buffer = block(1, 16 << 20);
    let task = ns
        .put(keys([1]), BlockBuffers::whole([buffer.clone()]))
        .unwrap();
    let zero = Some(std::time::Duration::ZERO);
    // The caller gives up; what it wrote into its memory afterwards must not be stored if the
    // task still read it, so the task says when it does not.
    let late = task.wait(zero);
    assert!(late.is_err() || task.is_done());
    task.wait_released(Some(PATIENCE)).unwrap();
    buffer.write_at(0, &vec![0; 16 << 20]).unwrap();
    assert_eq!(task.wait(Some(PATIENCE)).unwrap(), [true]);
    assert!(has(&ns, &[1], 16 << 20));
    // A get that nobody waits for any more keeps its destination alive, and close waits for it.
    let destination = kvdepot_store::Buffer::from_vec(vec![0; 16 << 20]);
    let held = std::sync::Arc::downgrade(destination.owner());
    let task = ns
        .get(keys([1]), BlockBuffers::whole([destination]))
        .unwrap();
    if !task.is_done() {
        assert!(held.upgrade().is_some());
    }
    drop(task);
    depot.close();
    assert!(
        held.upgrade().is_none(),
        "released once nobody moves into it"
    );
}

#[test]
fn no_medium_is_waited_for_under_a_lock_and_nothing_is_lost_by_it() {
    // Debug builds panic where one is, whatever the thread.
    for pipeline in ["Dax", "Cache|Dax"] {
        let place = Place::new(pipeline, "2MiB", "4MiB")
            .with("dax", "durability", "power")
            // A full table evicts, too.
            .with("dax", "records", 128);
        let depot = place.open();
        let ns = namespace(&depot);
        let (begun, ended) = &(AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let ns = ns.clone();
                scope.spawn(move || {
                    let mut rng = Rng::new(thread + 1);
                    for round in 0..rounds(60) as u64 {
                        let first = thread * 10_000 + round * 8;
                        let call: Vec<u64> = (first..first + 8).collect();
                        let len = [4096, 20_000, 60_000][rng.below(3) as usize];
                        let ended_before = ended.load(SeqCst);
                        // Only who is cleared on the way to the arena is not stored, and who stands
                        // still while the others fill it: what has been used since does not go.
                        let ends = || {
                            let stored = put(&ns, &call, len);
                            stored == [true; 8] || begun.load(SeqCst) > ended_before
                        };
                        assert!((0..5).any(|_| ends()), "round {round} of thread {thread}");
                        get(&ns, &call, len);
                        match rng.below(6) {
                            0 => drop(ns.remove(&keys(call)).unwrap()),
                            1 => {
                                begun.fetch_add(1, SeqCst);
                                ns.clear().unwrap();
                                ended.fetch_add(1, SeqCst);
                            }
                            2 => {
                                let reserved = ns.reserve(&[(key(first), vec![70_000])]).unwrap();
                                ns.abort(&reserved.into_iter().flatten().collect::<Vec<_>>());
                            }
                            _ => {}
                        }
                    }
                });
            }
        });
        // Whatever the threads have cleared, more than each tier holds.
        for first in (100_000..100_256).step_by(8) {
            let call: Vec<u64> = (first..first + 8).collect();
            assert_eq!(put(&ns, &call, 20_000), vec![true; 8]);
        }
        assert!(depot.drain(PATIENCE));
        let tiers = depot.stats().tiers;
        assert!(tiers.iter().all(|tier| tier.evicted_blocks > 0));
        assert_at_rest(&depot);
        assert_eq!(verify(&place.arena()).bad.len(), 0);
    }
}

#[test]
fn what_others_must_make_room_for_is_made_ahead_of_need() {
    let place = Place::new("Dax", "", "64MiB");
    let depot = place.open();
    let ns = namespace(&depot);
    let len = 64 << 10;
    let tier = || depot.stats().tiers.remove(0);
    let blocks = tier().capacity_bytes / len as u64;
    let all: Vec<u64> = (0..blocks).collect();
    for call in all.chunks(16) {
        assert!(!put(&ns, call, len).contains(&false));
    }
    assert_eq!(tier().evicted_blocks, 0, "what fits stays");
    // From the first block on that others had to go for.
    let (ahead, most) = (tier().capacity_bytes / 64, tier().capacity_bytes / 50);
    for new in blocks..blocks + 40 {
        assert_eq!(put(&ns, &[new], len), [true]);
        eventually("room ahead", || tier().free_bytes >= ahead / 2);
        assert!(tier().free_bytes <= most + len as u64);
    }
}
