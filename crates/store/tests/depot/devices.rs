//! Several devices as one tier, and devices that come and go while the depot serves.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::common::several::{LEN, SHORT, at, fill, on, says, several, state, two};
use crate::common::{
    PATIENCE, Place, block, config_of, get, has, key, keys, namespace, number, put, verify,
};
use kvdepot_store::sim::{Schedule, Turn};
use kvdepot_store::{BlockBuffers, Config, Depot, DeviceState, DrainTo, Error, Namespace, Outcome};
use kvdepot_testkit::child::{self, Child};
use kvdepot_testkit::{Rng, rounds};
use serde_json::json;

#[test]
fn a_key_lives_on_one_device_also_after_a_restart() {
    let place = two();
    let depot = place.open();
    let ns = namespace(&depot);
    fill(&ns, 0..80);
    fill(&ns, 0..80);
    let (a, b) = (on(&at(&place, "a")), on(&at(&place, "b")));
    assert!(
        a.len() >= 32 && b.len() >= 32,
        "{} and {}",
        a.len(),
        b.len()
    );
    assert!(a.is_disjoint(&b));
    assert_eq!(a.len() + b.len(), 80);
    let all: Vec<u64> = (0..80).collect();
    assert_eq!(ns.prefix(&keys(0..90)).unwrap(), 80);
    let devices = depot.devices().unwrap();
    let sums = |of: fn(&kvdepot_store::DeviceStats) -> u64| devices.iter().map(of).sum::<u64>();
    let tier = depot.stats().tiers.remove(0);
    assert_eq!(sums(|device| device.blocks), tier.blocks);
    assert_eq!(sums(|device| device.data_bytes), tier.capacity_bytes);
    depot.close();
    let depot = place.open();
    assert_eq!(depot.opening().blocks, 80);
    assert!(has(&namespace(&depot), &all, LEN));
}

#[test]
fn a_size_that_no_file_has_is_refused_by_the_name_of_the_capacity() {
    let place = Place::new("Nvme", "", "64MiB");
    let depot = place.open();
    for capacity in [1 << 62, u64::MAX] {
        let refused = depot.grow_device(&place.arena(), capacity).unwrap_err();
        let text = refused.to_string();
        assert!(text.starts_with("capacity: "), "{text}");
    }
}

#[test]
fn depots_that_share_a_host_divide_its_defaults_and_an_arena_that_is_there_keeps_its_size() {
    let place = Place::new("Cache|Dax", "1MiB", "16MiB");
    place.open().close();
    let shared = place
        .without("dax", "capacity")
        .without("cache", "capacity");
    let of = |place: &Place| {
        let config = place.config();
        let arena = config.arena_capacity().unwrap();
        (config.cache_capacity().unwrap(), arena)
    };
    let alone = of(&shared);
    let shared = shared.with("", "shares", 8);
    let eighth = of(&shared);
    // What is free changes meanwhile, and both are at most so much.
    let is_less = |alone: u64, eighth: u64, most: u64| eighth <= alone / 4 || alone == most;
    assert!(is_less(alone.0, eighth.0, 8 << 30), "{alone:?} {eighth:?}");
    assert!(is_less(alone.1, eighth.1, 64 << 30), "{alone:?} {eighth:?}");
    let depot = shared.open();
    assert_eq!(depot.devices().unwrap()[0].capacity_bytes, 16 << 20);
}

#[test]
fn the_blocks_of_a_call_stay_together_and_the_next_go_where_most_is_free() {
    let place = two();
    let depot = place.open();
    let ns = namespace(&depot);
    fill(&ns, 0..8);
    fill(&ns, 8..16);
    fill(&ns, 16..24);
    let a = on(&at(&place, "a"));
    for call in [0..8, 8..16, 16..24_u64] {
        let here = call.clone().filter(|key| a.contains(key)).count();
        assert!(here == 0 || here == 8, "{here} of {call:?}");
    }
    assert!(a.len() == 8 || a.len() == 16, "{}", a.len());
    // What continues a prompt lies behind it.
    assert_eq!(put(&ns, &[23, 24], LEN), [true; 2]);
    let devices = ["a", "b"].map(|name| on(&at(&place, name)));
    assert!(
        devices
            .iter()
            .any(|device| device.contains(&23) && device.contains(&24))
    );
}

#[test]
fn a_full_tier_evicts_what_was_used_longest_ago_wherever_it_is() {
    let place = two();
    let depot = place.open();
    let ns = namespace(&depot);
    let mut next = 0;
    while depot.stats().tiers[0].evicted_blocks == 0 {
        fill(&ns, next..next + 1);
        next += 1;
    }
    // The oldest half is used again; then two thirds of the tier are written anew.
    let before = next;
    let kept: Vec<u64> = (before / 4..before / 2).collect();
    assert!(has(&ns, &kept, LEN));
    for new in before..before + before / 2 {
        fill(&ns, new..new + 1);
    }
    assert!(has(&ns, &kept, LEN), "used since");
    let young: Vec<u64> = (before..before + before / 2).collect();
    assert!(has(&ns, &young, LEN));
    let old: Vec<u64> = (before / 2..before * 9 / 10).collect();
    let left = ns.contains(&keys(old.iter().copied())).unwrap();
    let left = left.iter().filter(|found| **found).count();
    assert!(
        left * 5 < old.len() * 3,
        "{left} of {} old blocks are left",
        old.len()
    );
}

#[test]
fn a_device_is_drained_while_gets_and_puts_run() {
    let place = several(&["a", "b", "c"], "3MiB");
    let depot = place.open();
    let ns = namespace(&depot);
    fill(&ns, 0..160);
    let a = at(&place, "a");
    let held = on(&a).len() as u64;
    assert!(held > 20, "{held}");
    assert_eq!(depot.gone(1 << 20).unwrap().blocks, []);
    let stop = AtomicBool::new(false);
    let drained = std::thread::scope(|scope| {
        for offset in 0..2_u64 {
            let (ns, stop) = (ns.clone(), &stop);
            scope.spawn(move || {
                let mut at = offset * 77;
                while !stop.load(Ordering::Relaxed) {
                    let call: Vec<u64> = (at..at + 8).map(|key| key % 160).collect();
                    assert!(has(&ns, &call, LEN), "lost on the way: {call:?}");
                    assert_eq!(ns.contains(&keys(call.iter().copied())).unwrap(), [true; 8]);
                    at += 8;
                }
            });
        }
        let (writing, stop_writing) = (ns.clone(), &stop);
        scope.spawn(move || {
            let mut next = 1000;
            while !stop_writing.load(Ordering::Relaxed) {
                fill(&writing, next..next + 1);
                writing.remove(&[key(next)]).unwrap();
                next += 1;
            }
        });
        let drained = depot.drain_device(&a, DrainTo::Others, PATIENCE);
        std::thread::sleep(SHORT);
        stop.store(true, Ordering::Relaxed);
        drained.unwrap()
    });
    assert_eq!((drained.moved_blocks, drained.evicted_blocks), (held, 0));
    assert_eq!(drained.moved_bytes, held * LEN as u64);
    assert_eq!(on(&a).len(), 0);
    assert_eq!(state(&depot, &a), DeviceState::Draining);
    let gone = depot.gone(1 << 20).unwrap();
    let ours = gone
        .blocks
        .iter()
        .filter(|(identity, _)| number(&identity.key) < 160);
    assert_eq!(ours.count(), 0, "a move is no eviction");
    fill(&ns, 200..232);
    assert_eq!(on(&a).len(), 0, "nothing is written there any more");
    depot.remove_device(&a, false, SHORT).unwrap();
    assert!(has(&ns, &(0..160).collect::<Vec<u64>>(), LEN));
    assert_eq!(
        verify(&at(&place, "b")).bad.len() + verify(&at(&place, "c")).bad.len(),
        0
    );
}

#[test]
fn lookups_find_a_block_at_every_moment_of_its_moves() {
    let place = several(&["a", "b", "c"], "4MiB");
    let depot = place.open();
    let ns = namespace(&depot);
    let all: Vec<u64> = (0..160).collect();
    fill(&ns, 0..160);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for verb in 0..3 {
            let (ns, stop, all) = (ns.clone(), &stop, &all);
            scope.spawn(move || {
                let keys = keys(all.iter().copied());
                while !stop.load(Ordering::Relaxed) {
                    match verb {
                        0 => assert!(!ns.contains(&keys).unwrap().contains(&false)),
                        1 => assert_eq!(ns.prefix(&keys).unwrap(), keys.len()),
                        _ => assert!(has(&ns, all, LEN)),
                    }
                }
            });
        }
        // From the last to those asked before it, and back.
        for name in ["c", "a", "b"].into_iter().cycle().take(60) {
            let path = at(&place, name);
            let drained = depot.drain_device(&path, DrainTo::Others, PATIENCE);
            let added = depot.add_device(&path, None);
            if drained.is_err() || added.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            assert_eq!(drained.unwrap().evicted_blocks, 0);
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(has(&ns, &all, LEN));
}

#[test]
fn what_finds_no_room_elsewhere_is_evicted_the_oldest_first() {
    let place = two();
    let depot = place.open();
    let ns = namespace(&depot);
    fill(&ns, 0..88);
    let a = at(&place, "a");
    let mut here: Vec<u64> = on(&a).into_iter().collect();
    here.sort_unstable();
    let there = on(&at(&place, "b"));
    // Each by itself: the last is the one that was used last.
    here.iter().for_each(|key| assert!(has(&ns, &[*key], LEN)));
    let drained = depot.drain_device(&a, DrainTo::Others, PATIENCE).unwrap();
    let moved = drained.moved_blocks as usize;
    assert!(moved > 0 && drained.evicted_blocks > 0, "{drained:?}");
    assert_eq!(moved + drained.evicted_blocks as usize, here.len());
    let (evicted, kept) = here.split_at(here.len() - moved);
    assert!(has(&ns, kept, LEN));
    assert_eq!(get(&ns, evicted, LEN), vec![Outcome::Miss; evicted.len()]);
    assert!(
        has(&ns, &there.into_iter().collect::<Vec<_>>(), LEN),
        "for no other block"
    );
}

#[test]
fn a_drain_that_pins_or_reservations_hold_up_changes_nothing() {
    let place = two();
    let depot = place.open();
    let ns = namespace(&depot);
    fill(&ns, 0..16);
    let a = at(&place, "a");
    let mine = *on(&a).iter().next().unwrap();
    let pins: Vec<_> = ns
        .pin(&[key(mine)], false)
        .unwrap()
        .into_iter()
        .flatten()
        .collect();
    for to in [DrainTo::Nowhere, DrainTo::Others] {
        let error = depot.drain_device(&a, to, SHORT).unwrap_err();
        says(
            &error,
            &[
                a.to_str().unwrap(),
                "the device accepts writes",
                "1 blocks are pinned",
            ],
        );
        assert_eq!(state(&depot, &a), DeviceState::Serving);
        let error = depot.remove_device(&a, true, SHORT).unwrap_err();
        assert!(matches!(error, Error::Busy { pinned: 1, .. }), "{error}");
    }
    ns.unpin(&pins, false);
    assert!(
        has(&ns, &[mine], LEN),
        "it was copied before the drain gave up"
    );
    // Until one has landed there.
    let mut held = Vec::new();
    for number in 100.. {
        let reserved = ns.reserve(&[(key(number), vec![LEN as u64])]).unwrap();
        held.extend(reserved.into_iter().flatten());
        let devices = depot.devices().unwrap();
        if devices.iter().all(|device| device.reserved_blocks > 0) {
            break;
        }
    }
    let error = depot.drain_device(&a, DrainTo::Others, SHORT).unwrap_err();
    assert!(
        matches!(error, Error::Busy { reserved, .. } if reserved > 0),
        "{error}"
    );
    ns.abort(&held);
    depot.drain_device(&a, DrainTo::Others, SHORT).unwrap();
    assert_eq!(state(&depot, &a), DeviceState::Draining);
}

#[test]
fn what_is_removed_while_it_is_moved_stays_removed() {
    let place = several(&["a", "b"], "4MiB");
    let depot = place.open();
    let ns = namespace(&depot);
    for round in 0..10 {
        let first = round * 1000;
        fill(&ns, first..first + 96);
        let a = at(&place, ["a", "b"][round as usize % 2]);
        std::thread::scope(|scope| {
            let remover = ns.clone();
            scope.spawn(move || {
                for number in first..first + 96 {
                    remover.remove(&[key(number)]).unwrap();
                }
            });
            depot.drain_device(&a, DrainTo::Others, PATIENCE).unwrap();
        });
        let left = ns.contains(&keys(first..first + 96)).unwrap();
        assert!(!left.contains(&true), "{left:?}");
        depot.add_device(&a, None).unwrap();
    }
}

#[test]
fn what_is_removed_after_its_move_stays_removed_where_it_was_on_its_way_near() {
    let place = two();
    let far = place.open();
    fill(&namespace(&far), 0..2);
    let paths = [at(&place, "a"), at(&place, "b")];
    let a = paths.iter().find(|path| !on(path).is_empty()).unwrap();
    far.close();
    // Lanes and background are steps of this thread.
    let schedule = Schedule::new(|_| Turn {
        job: 0,
        fails: false,
    });
    let _entered = schedule.enter(|| {});
    let dax = json!({"devices": paths.each_ref().map(|path| json!({"path": path}))});
    let settings = json!({"dax": dax, "cache": {"capacity": "1MiB"}, "socket": "off"});
    let depot = Depot::open(&Config::new("Cache|Dax", &settings).unwrap()).unwrap();
    let ns = namespace(&depot);
    let task = ns.prefetch(&keys(0..2)).unwrap();
    let drained = depot.drain_device(a, DrainTo::Others, Duration::ZERO);
    assert!(matches!(drained, Err(Error::Busy { .. })), "{drained:?}");
    assert_eq!(on(a).len(), 0, "they have moved");
    ns.remove(&[key(0)]).unwrap();
    while depot.step_background() {}
    assert_eq!(task.outcomes(), [Outcome::Miss, Outcome::Done]);
    assert_eq!(ns.contains(&keys(0..2)).unwrap(), [false, true]);
    depot.close();
}

#[test]
fn what_is_published_while_a_device_is_drained_goes_too() {
    let schedule = Schedule::new(|_| Turn {
        job: 0,
        fails: false,
    });
    // Removed while it is copied, so that nothing of what the drain has begun with is moved.
    let removed = Arc::new(OnceLock::<Namespace>::new());
    let meanwhile = {
        let removed = Arc::clone(&removed);
        move || {
            if let Some(ns) = removed.get() {
                ns.remove(&[key(1)]).unwrap();
            }
        }
    };
    let _entered = schedule.enter(meanwhile);
    let place = several(&["a"], "1MiB").with("", "socket", "off");
    let depot = place.open();
    let ns = namespace(&depot);
    let write = |number| {
        let buffers = BlockBuffers::whole([block(number, LEN)]);
        ns.put(vec![key(number)], buffers).unwrap()
    };
    let first = write(1);
    while schedule.step() {}
    assert_eq!(first.outcomes(), [Outcome::Done]);
    let second = write(2);
    let (a, b) = (at(&place, "a"), at(&place, "b"));
    depot.add_device(&b, Some(1 << 20)).unwrap();
    assert!(removed.set(ns.clone()).is_ok());
    let drained = depot.drain_device(&a, DrainTo::Others, Duration::ZERO);
    assert_eq!(drained.unwrap().moved_blocks, 1);
    assert_eq!(second.outcomes(), [Outcome::Done]);
    assert_eq!((on(&a), on(&b)), (HashSet::new(), HashSet::from([2])));
}

#[test]
fn crash_kill9_while_a_device_is_drained() {
    const TEST: &str = "devices::crash_kill9_while_a_device_is_drained";
    // Some batches of a drain.
    const BLOCKS: u64 = 1600;
    if let Some(role) = child::role() {
        assert_eq!(role, "drainer");
        let depot = Depot::open(&config_of(&child::value("spec"))).unwrap();
        fill(&namespace(&depot), 0..BLOCKS);
        child::say("acknowledged");
        let a = depot.path().unwrap();
        depot.drain_device(&a, DrainTo::Others, PATIENCE).unwrap();
        child::say("drained");
        child::sleep_until_killed();
    }
    let mut rng = Rng::for_test(TEST);
    let kills = rounds(25);
    let (mut halfway, mut within) = (0, 30_000);
    for round in 0..2 * kills {
        if round >= kills && halfway > 0 {
            break;
        }
        let place = several(&["a", "b"], "32MiB").with("dax", "records", 2 * BLOCKS);
        let mut drainer = Child::start(TEST, "drainer", &[("spec", &place.spec())]);
        drainer.expect("acknowledged");
        let more = Duration::from_micros(rng.below(within));
        drainer.kill_after("drained", 0, more);
        let before = ["a", "b"].map(|name| on(&at(&place, name)));
        // However long a drain takes here, the next ones are killed in its midst.
        match (before[0].is_empty(), before[1].len() > BLOCKS as usize / 2) {
            (true, _) => within = (within / 2).max(1_000),
            (false, true) => halfway += 1,
            (false, false) => within = (within * 2).min(4_000_000),
        }
        let depot = place.open();
        assert!(has(
            &namespace(&depot),
            &(0..BLOCKS).collect::<Vec<_>>(),
            LEN
        ));
        let [a, b] = ["a", "b"].map(|name| on(&at(&place, name)));
        assert!(
            a.is_disjoint(&b),
            "on two devices: {:?}",
            a.intersection(&b)
        );
        assert_eq!(depot.stats().tiers[0].blocks, BLOCKS);
    }
    assert!(halfway > 0, "no drain was interrupted");
}
