//! Blocks that are kept and evicted as one, in tiers of one device and of several.

use std::ops::Range;

use crate::common::several::{LEN, at, fill, two};
use crate::common::{PATIENCE, Place, eventually, keys, namespace, put};
use kvdepot_store::{Class, Depot, Namespace};

fn there(ns: &Namespace, numbers: Range<u64>) -> usize {
    let found = ns.contains(&keys(numbers)).unwrap();
    found.into_iter().filter(|found| *found).count()
}

/// Fills the depot with others until not all of these are there.
fn press(ns: &Namespace, next: &mut u64, numbers: Range<u64>) {
    let before = there(ns, numbers.clone());
    while there(ns, numbers.clone()) == before {
        // As long as the others: calls that are larger than usual evict less.
        fill(ns, *next..*next + 8);
        *next += 8;
    }
}

fn of_tier(depot: &Depot, tier: usize) -> (u64, u64) {
    let stats = &depot.stats().tiers[tier];
    (stats.grouped_blocks, stats.evicted_groups)
}

#[test]
fn a_group_leaves_all_devices_as_one_and_by_its_class() {
    let place = two();
    let depot = place.open();
    let ns = namespace(&depot);
    // A call a device.
    fill(&ns, 0..8);
    fill(&ns, 8..16);
    let kept = ns.group(&keys([0, 1, 8, 9]), Class::Last).unwrap();
    let one = ns.group(&keys(4..14), Class::Ordinary).unwrap();
    assert_eq!(of_tier(&depot, 0), (12, 0));
    let mut next = 100;
    press(&ns, &mut next, 4..8);
    // One after the other, by a thread that evicts ahead of need.
    eventually("the end of all", || {
        there(&ns, 4..8) + there(&ns, 10..14) == 0
    });
    assert_eq!(there(&ns, 8..10), 2, "two are in the other group");
    fill(&ns, next..next + 200);
    assert_eq!(
        (there(&ns, 0..2), there(&ns, 8..10)),
        (2, 2),
        "nothing else is left"
    );
    kept.set_class(Class::First).unwrap();
    press(&ns, &mut 1000, 0..2);
    eventually("its end on the other device", || there(&ns, 0..14) == 0);
    eventually("the count of them", || of_tier(&depot, 0).0 == 0);
    // What comes again is in its groups.
    fill(&ns, 4..6);
    assert_eq!(of_tier(&depot, 0).0, 2);
    drop((kept, one));
    assert_eq!(of_tier(&depot, 0).0, 0);
    depot.close();
}

#[test]
fn a_device_that_comes_later_knows_the_groups() {
    let place = two();
    let depot = place.open();
    let ns = namespace(&depot);
    let group = ns.group(&keys(0..4), Class::Last).unwrap();
    fill(&ns, 50..120);
    depot.add_device(&at(&place, "c"), Some(1 << 20)).unwrap();
    fill(&ns, 0..4);
    group.add(&keys(4..8)).unwrap();
    fill(&ns, 4..8);
    assert_eq!(depot.devices().unwrap()[2].blocks, 8, "most is free there");
    fill(&ns, 200..500);
    assert_eq!(there(&ns, 0..8), 8);
    drop(group);
    fill(&ns, 500..800);
    assert_eq!(there(&ns, 0..8), 0);
    depot.close();
}

#[test]
fn a_group_is_pinned_whole_or_not_and_declared_again_after_a_restart() {
    let place = Place::new("Dax", "", "1MiB");
    let depot = place.open();
    let all: Vec<u64> = (0..40).collect();
    let ns = namespace(&depot);
    let _old = ns.group(&keys(10..20), Class::Last).unwrap();
    assert!(put(&ns, &all, LEN).iter().all(|ok| *ok));
    depot.close();
    let depot = place.open();
    let ns = namespace(&depot);
    assert_eq!(of_tier(&depot, 0), (0, 0));
    let group = ns.group(&keys(10..20), Class::First).unwrap();
    let pins = group.pin().unwrap().unwrap();
    assert_eq!((pins.len(), of_tier(&depot, 0)), (10, (10, 0)));
    fill(&ns, 100..300);
    assert_eq!((there(&ns, 10..20), there(&ns, 0..10)), (10, 0));
    ns.unpin(&pins, true);
    press(&ns, &mut 300, 10..20);
    eventually("its end", || there(&ns, 10..20) == 0);
    eventually("the count of it", || of_tier(&depot, 0) == (0, 1));
    fill(&ns, 10..19);
    assert_eq!(group.pin().unwrap(), None);
    assert_eq!(depot.stats().tiers[0].pinned_blocks, 0);
    assert_eq!(group.keys(), keys(10..20));
    depot.close();
    assert!(group.add(&keys(20..21)).is_err());
}

#[test]
fn each_tier_keeps_a_group_and_what_is_brought_near_joins_it() {
    let place = Place::new("Cache|Dax", "256KiB", "4MiB");
    let depot = place.open();
    let ns = namespace(&depot);
    fill(&ns, 0..60);
    assert!(depot.drain(PATIENCE));
    let tier = |number| ns.nearest(&keys(number..number + 1)).unwrap()[0] == Some("Cache");
    assert!(!tier(0));
    let group = ns.group(&keys(0..2), Class::Last).unwrap();
    assert_eq!((of_tier(&depot, 0).0, of_tier(&depot, 1).0), (0, 2));
    assert_eq!(
        ns.prefetch(&keys(0..2))
            .unwrap()
            .wait(Some(PATIENCE))
            .unwrap(),
        [true; 2]
    );
    assert_eq!(of_tier(&depot, 0).0, 2);
    fill(&ns, 100..160);
    assert!(depot.drain(PATIENCE));
    assert!(tier(0) && tier(1) && !tier(100));
    drop(group);
    fill(&ns, 160..220);
    assert!(!tier(0) && there(&ns, 0..2) == 2);
    depot.close();
}
