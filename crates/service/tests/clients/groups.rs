//! Groups of clients: their owner keeps them, as long as they are there, and so many.

use std::io::Write;

use crate::common::frames::{self, Bare, GOODBYE, frame, varint, with_keys};
use crate::common::{Place, Served, eventually, key, keys, namespace, put};
use kvdepot_store::{Class, Depot, Error};

const LEN: usize = 16 << 10;

fn grouped(owner: &Depot) -> u64 {
    owner.stats().tiers[0].grouped_blocks
}

#[test]
fn a_client_s_group_is_the_owner_s_to_keep_until_the_client_drops_it_or_ends() {
    let place = Place::new("Dax", "", "1MiB");
    let owner = place.serve();
    let ours = namespace(&owner);
    let client = kvdepot_service::connect(&place.socket(), Some(1)).unwrap();
    let ns = namespace(&client);
    let all: Vec<u64> = (0..20).collect();
    assert!(put(&ns, &all, LEN).iter().all(|ok| *ok));
    let kept = ns.group(&keys(0..4), Class::Ordinary).unwrap();
    let other = ns.group(&keys(10..12), Class::Last).unwrap();
    kept.add(&keys(4..8)).unwrap();
    kept.set_class(Class::Last).unwrap();
    assert_eq!(grouped(&owner), 10);
    let press = |from: u64| {
        for number in from..from + 200 {
            assert_eq!(put(&ours, &[number], LEN), [true]);
        }
    };
    press(100);
    assert!(!ours.contains(&keys(0..8)).unwrap().contains(&false));
    let pins = kept.pin().unwrap().unwrap();
    assert_eq!(pins.len(), 8);
    ns.unpin(&pins, true);
    // Whatever becomes of the connections.
    frames::break_connections(&place.socket());
    eventually("another connection", || client.is_connected());
    press(400);
    assert!(!ours.contains(&keys(0..8)).unwrap().contains(&false));
    drop(kept);
    eventually("its end", || grouped(&owner) == 2);
    press(700);
    assert!(!ours.contains(&keys(0..8)).unwrap().contains(&true));
    client.close();
    eventually("the end of the others", || grouped(&owner) == 0);
    assert!(matches!(other.add(&keys(12..13)), Err(Error::Closed(_))));
}

#[test]
fn the_next_owner_hears_of_a_group_with_its_next_change() {
    let place = Place::new("Dax", "", "1MiB");
    let owner = place.serve();
    let client = kvdepot_service::connect(&place.socket(), Some(1)).unwrap();
    let ns = namespace(&client);
    assert_eq!(put(&ns, &[1, 2, 3], LEN), [true; 3]);
    let group = ns.group(&keys(1..3), Class::Last).unwrap();
    owner.close();
    drop(owner);
    assert!(matches!(
        group.set_class(Class::First),
        Err(Error::Peer { .. })
    ));
    let owner = place.serve();
    eventually("another owner", || client.is_connected());
    assert_eq!(grouped(&owner), 0);
    group.add(&keys(3..4)).unwrap();
    assert_eq!(grouped(&owner), 3);
    drop(group);
    eventually("its end", || grouped(&owner) == 0);
}

#[test]
fn a_client_has_so_many_and_no_more() {
    const GROUP: u16 = 20;
    const KEYS: u64 = 1 << 18;
    let place = Place::new("Dax", "", "1MiB");
    let owner = place.serve();
    let ours = namespace(&owner);
    assert_eq!(put(&ours, &[1], LEN), [true]);
    let mut client = Bare::attach(&place.socket(), 0);
    let call = |number: u64, class: u8, keys: Vec<_>| {
        [varint(number), with_keys(ours.id(), &[class], &keys)].concat()
    };
    assert_ne!(client.ask(GROUP, &call(1, 3, keys(0..2))).0, 0, "no class");
    assert_eq!(client.ask(GROUP, &call(1, 2, keys(0..2))).0, 0);
    for number in 2..5 {
        let body = call(number, 1, keys(0..KEYS));
        assert_eq!(client.ask(GROUP, &body).0, 0);
    }
    let (status, error) = client.ask(GROUP, &call(5, 1, keys(0..KEYS)));
    assert_ne!(status, 0);
    assert!(String::from_utf8_lossy(&error).contains("at most 1048576"));
    assert_ne!(client.ask(GROUP, &call(1, 1, keys(0..KEYS))).0, 0);
    assert_eq!(grouped(&owner), 1);
    // Another class takes nothing.
    let rest = keys(0..(1 << 20) - 3 * (KEYS + 1) - 3 - 1);
    assert_eq!(client.ask(GROUP, &call(6, 1, rest)).0, 0);
    assert_ne!(client.ask(GROUP, &call(7, 1, Vec::new())).0, 0);
    assert_eq!(client.ask(GROUP, &call(1, 0, Vec::new())).0, 0);
    // What it gives back it may have again.
    let dissolve = |number| frame(GROUP + 1, 0, &varint(number));
    client.calls.write_all(&dissolve(2)).unwrap();
    client.calls.write_all(&dissolve(77)).unwrap();
    assert_eq!(client.ask(GROUP, &call(5, 1, keys(0..KEYS))).0, 0);
    assert_eq!(ours.contains(&[key(1)]).unwrap(), [true]);
    client.tasks.write_all(&frame(GOODBYE, 0, &[])).unwrap();
    eventually("the end of all", || grouped(&owner) == 0);
}
