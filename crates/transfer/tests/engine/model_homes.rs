//! Homes beside a naive twin: every host's time by the system's logarithm, sorted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvdepot_transfer::homes::{HomeMap, Host, Point, REPLICAS_MAX, Shift, View, ask, ideal};
use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

fn host(name: String, capacity: u64) -> Host {
    Host {
        address: format!("{name}:1"),
        name,
        capacity,
        incarnation: 1,
    }
}

fn map(capacities: &BTreeMap<u16, u64>, replicas: usize) -> HomeMap {
    let hosts = capacities.iter();
    let hosts = hosts.map(|(number, capacity)| host(format!("host-{number}"), *capacity));
    HomeMap::new(Arc::new(View::new(1, hosts.collect()).unwrap()), replicas)
}

fn names(map: &HomeMap, places: &[u32]) -> Vec<String> {
    let name = |place: &u32| map.view().hosts()[*place as usize].name.clone();
    places.iter().map(name).collect()
}

/// The same homes, by all times.
fn twin(map: &HomeMap, point: Point, count: usize) -> Vec<String> {
    let hosts = map.view().hosts().iter().filter(|host| host.capacity > 0);
    let mut times: Vec<(f64, String)> = hosts
        .map(|host| {
            let mixed =
                (point.0 ^ xxh3_64(host.name.as_bytes())).wrapping_mul(0x9FB2_1C65_1E98_DF25);
            let drawn = (mixed ^ (mixed >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
            let part = (drawn as f64 + 0.5) / 2.0_f64.powi(64);
            let rest = ((u64::MAX - drawn) as f64 + 0.5) / 2.0_f64.powi(64);
            let time = if part < 0.25 {
                -(-part).ln_1p()
            } else {
                -rest.ln()
            };
            (time / host.capacity as f64, host.name.clone())
        })
        .collect();
    times.sort_by(|one, other| one.0.total_cmp(&other.0));
    times
        .into_iter()
        .take(count)
        .map(|(_, name)| name)
        .collect()
}

/// Points that look random, the same each time.
fn points(from: u64) -> impl Iterator<Item = Point> {
    (from..).map(|number| Point::of(&number.to_le_bytes()))
}

fn capacity() -> impl Strategy<Value = u64> {
    prop_oneof![
        8 => 1_u64..5,
        4 => (0_u32..50).prop_map(|bits| 1 << bits),
        2 => any::<u64>(),
        1 => Just(0),
    ]
}

fn cluster() -> impl Strategy<Value = BTreeMap<u16, u64>> {
    prop_oneof![
        prop::collection::btree_map(any::<u16>(), capacity(), 0..9),
        prop::collection::btree_map(any::<u16>(), capacity(), 0..200),
    ]
}

/// One change: a host that joins or gets another capacity, or leaves.
fn change() -> impl Strategy<Value = (prop::sample::Index, u16, Option<u64>)> {
    (
        any::<prop::sample::Index>(),
        any::<u16>(),
        prop::option::of(capacity()),
    )
}

fn apply(
    cluster: &BTreeMap<u16, u64>,
    (index, new, capacity): &(prop::sample::Index, u16, Option<u64>),
) -> (BTreeMap<u16, u64>, String) {
    let known: Vec<u16> = cluster.keys().copied().collect();
    let number = match known.is_empty() || new % 2 == 0 {
        true => *new,
        false => known[index.index(known.len())],
    };
    let mut after = cluster.clone();
    match capacity {
        Some(capacity) => after.insert(number, *capacity),
        None => after.remove(&number),
    };
    (after, format!("host-{number}"))
}

proptest! {
    #[test]
    fn homes_are_those_with_the_earliest_times(
        cluster in cluster(), replicas in 1..=REPLICAS_MAX, seed in any::<u64>(),
    ) {
        let map = map(&cluster, replicas);
        for point in points(seed >> 1).take(50).chain([Point(0), Point(u64::MAX), Point(seed)]) {
            let homes = map.homes(point);
            prop_assert_eq!(names(&map, &homes), twin(&map, point, replicas));
            for fewer in 0..replicas {
                let first = map.first(point, fewer);
                prop_assert_eq!(&first[..], &homes[..fewer.min(homes.len())]);
            }
        }
    }

    #[test]
    fn one_change_moves_only_to_or_from_the_host_that_changed(
        cluster in cluster(), change in change(), replicas in 1..4_usize, seed in any::<u32>(),
    ) {
        let (after, changed) = apply(&cluster, &change);
        let (before, after) = (map(&cluster, replicas), map(&after, replicas));
        let grows = |map: &HomeMap| {
            let place = map.view().find(&changed);
            place.map_or(0, |place| map.view().hosts()[place].capacity)
        };
        let (less, more) = (grows(&before), grows(&after));
        let mut shift = Shift::new(&before, &after);
        let mut moved = 0;
        for point in points(seed.into()).take(100) {
            shift.look(&before, &after, point);
            let old = names(&before, &before.homes(point));
            let new = names(&after, &after.homes(point));
            let sets = [&old, &new].map(|names| names.iter().cloned().collect::<BTreeSet<_>>());
            let [lost, gained] = [(0, 1), (1, 0)].map(|(one, other)| &sets[one] - &sets[other]);
            moved += gained.len() as u64;
            prop_assert!(gained.len() <= 1 && lost.len() <= 1, "{:?} {:?}", lost, gained);
            // Whoever stays, stays in order.
            let rest = |names: Vec<String>, but: &BTreeSet<String>| -> Vec<String> {
                let mut names = names;
                names.retain(|name| !but.contains(name) && *name != changed);
                names
            };
            prop_assert_eq!(rest(old, &lost), rest(new, &gained));
            if !gained.is_empty() && more >= less {
                prop_assert!(gained.contains(&changed), "{:?}", gained);
            }
            if !lost.is_empty() && more <= less {
                prop_assert!(lost.contains(&changed), "{:?}", lost);
            }
            // A block is found while nothing has moved yet, where a home is still there.
            let asked = names(&after, &ask(&after, Some(&before), point));
            prop_assert!(asked.len() <= 2);
            let left = sets[0].iter().any(|name| after.view().find(name).is_some());
            prop_assert!(!left || asked.iter().any(|name| sets[0].contains(name)));
            let asked = names(&before, &ask(&before, None, point));
            prop_assert!(asked.iter().all(|name| sets[0].contains(name)));
        }
        prop_assert_eq!((shift.points, shift.moved), (100, moved));
    }
}

/// By how many standard deviations a count is off what a share says.
fn off(count: u64, of: u64, share: f64) -> f64 {
    let (mean, of) = (of as f64 * share, of as f64);
    (count as f64 - mean) / (of * share * (1.0 - share)).sqrt()
}

#[test]
fn keys_lie_by_capacity_and_spread_over_all_when_a_host_leaves() {
    let cluster: BTreeMap<u16, u64> = (0..60)
        .map(|host| (host, 1 + u64::from(host) % 4))
        .collect();
    let mut without = cluster.clone();
    without.remove(&3);
    let (all, rest) = (map(&cluster, 1), map(&without, 1));
    let mut shift = Shift::new(&all, &rest);
    let gone = all.view().find("host-3").unwrap() as u32;
    let mut heirs = vec![0_u64; rest.view().hosts().len()];
    for point in points(0).take(400_000) {
        let (old, new) = (all.homes(point), rest.homes(point));
        shift.count(&old, &new);
        match old[0] == gone {
            true => heirs[new[0] as usize] += 1,
            false => assert_eq!(names(&all, &old), names(&rest, &new)),
        }
    }
    for (place, held) in shift.held_before.iter().enumerate() {
        let off = off(*held, shift.points, all.share(place));
        assert!(off.abs() < 4.5, "host {place}: {off:.1}");
    }
    for (place, taken) in heirs.iter().enumerate() {
        let off = off(*taken, shift.moved, rest.share(place));
        assert!(off.abs() < 4.5, "heir {place}: {off:.1}");
    }
    let ideal = ideal(&all, &rest) * shift.points as f64;
    assert!((shift.moved as f64 / ideal - 1.0).abs() < 0.03);
    let mut twice = shift.clone();
    twice.add(&shift);
    assert_eq!((twice.points, twice.moved), (800_000, 2 * shift.moved));
}

#[test]
fn keys_of_any_kind_lie_by_capacity() {
    let cluster: BTreeMap<u16, u64> = (0..16)
        .map(|host| (host, 1 + u64::from(host) % 2))
        .collect();
    let map = map(&cluster, 2);
    // Counters, multiples of large powers of two, and bits that are set alone.
    let kinds: [fn(u64) -> u64; 3] = [
        |number| number,
        |number| number << 40,
        |number| number.rotate_left(number as u32 % 64) ^ (1 << (number % 64)),
    ];
    for kind in kinds {
        let mut first = [0_u64; 16];
        for number in 0..100_000 {
            first[map.homes(Point(kind(number)))[0] as usize] += 1;
        }
        for (place, held) in first.iter().enumerate() {
            let off = off(*held, 100_000, map.share(place));
            assert!(off.abs() < 5.5, "host {place}: {off:.1}");
        }
    }
}

#[test]
fn names_count_and_addresses_do_not() {
    let hosts = |port: u16| -> Vec<Host> {
        let host = |number| Host {
            address: format!("10.0.0.{number}:{port}"),
            ..host(format!("host-{number}"), 7)
        };
        (0..9).map(host).collect()
    };
    let maps = [1, 2].map(|port| {
        let view = View::new(u64::from(port), hosts(port)).unwrap();
        HomeMap::new(Arc::new(view), 2)
    });
    for point in points(0).take(1000) {
        assert_eq!(maps[0].homes(point), maps[1].homes(point));
    }
}

#[test]
fn nobody_is_home_where_nobody_has_room() {
    let none = HomeMap::new(Arc::new(View::default()), 2);
    assert!(none.homes(Point(1)).is_empty() && ask(&none, None, Point(1)).is_empty());
    let empty = map(&BTreeMap::from([(1, 0), (2, 0)]), 2);
    assert!(empty.homes(Point(1)).is_empty());
    let one = map(&BTreeMap::from([(1, 0), (2, u64::MAX)]), 2);
    assert_eq!(names(&one, &one.homes(Point(1))), ["host-2"]);
}

#[test]
fn homes_are_where_they_have_always_been() {
    let cluster: BTreeMap<u16, u64> = (0..1000)
        .map(|host| (host, 1 + u64::from(host) % 4))
        .collect();
    let map = map(&cluster, 2);
    let found: Vec<Vec<String>> = points(0)
        .take(3)
        .map(|point| names(&map, &map.homes(point)))
        .collect();
    // Never to be changed: every block of every cluster would move.
    assert_eq!(
        found,
        [
            ["host-641", "host-467"],
            ["host-527", "host-681"],
            ["host-323", "host-404"]
        ]
    );
    assert!(map.bytes() < 40 * 1000 && map.view().bytes() < 150 * 1000);
}
