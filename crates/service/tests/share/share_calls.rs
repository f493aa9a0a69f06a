//! Calls that no honest client makes: refused, and without a trace.

use std::io::Write;

use crate::common::frames::{ABORT, Bare, COMMIT, GOODBYE, PIN, frame, rows, with_keys};
use crate::common::{Place, Served, assert_at_rest, eventually, key, keys, namespace, put};

#[test]
fn a_malformed_commit_leaves_the_reservation_to_its_client_and_to_its_end() {
    let place = Place::new("Dax", "", "4MiB");
    let owner = place.serve();
    let reserved = || owner.stats().tiers[0].reserved_blocks;
    let id = namespace(&owner).id();
    // What follows the names of one reservation.
    let sums = |promised: u32| [rows(&promised.to_le_bytes()), rows(&[7; 16])].concat();
    let tails: [Vec<u8>; 7] = [
        vec![],
        vec![1],
        // More checksums than there are, and fewer.
        sums(2),
        sums(0),
        // None, for one name and for none.
        [rows(&[0; 4]), rows(&[])].concat(),
        [rows(&[]), rows(&[])].concat(),
        // One, and something behind it.
        [sums(1), vec![0]].concat(),
    ];
    let mut ended = Bare::attach(&place.socket(), 0);
    let mut leaving = Bare::attach(&place.socket(), 0);
    for (number, tail) in tails.into_iter().enumerate() {
        for (which, client) in [&mut ended, &mut leaving].into_iter().enumerate() {
            let name = client.reserve(id, key((2 * number + which) as u64), 5000);
            let body = [rows(&name), tail.clone()].concat();
            let (status, _) = client.ask(COMMIT, &body);
            assert_ne!(status, 0, "tail {number}");
        }
    }
    assert_eq!(reserved(), 14);
    assert_eq!(namespace(&owner).prefix(&keys(0..14)).unwrap(), 0);
    leaving.tasks.write_all(&frame(GOODBYE, 0, &[])).unwrap();
    eventually("the end of what was held", || reserved() == 7);
    ended.tasks.write_all(&frame(GOODBYE, 0, &[])).unwrap();
    eventually("the end of what was held", || reserved() == 0);
    assert_at_rest(&owner);
}

#[test]
fn a_call_with_bytes_too_many_is_refused_before_it_does_anything() {
    let place = Place::new("Dax", "", "4MiB");
    let owner = place.serve();
    put(&namespace(&owner), &[1], 5000);
    let id = namespace(&owner).id();
    let held = || {
        let tier = &owner.stats().tiers[0];
        (tier.pinned_blocks, tier.reserved_blocks)
    };
    let mut client = Bare::attach(&place.socket(), 0);
    let pin = [with_keys(id, &[0], &[key(1)]), vec![0]].concat();
    assert_ne!(client.ask(PIN, &pin).0, 0);
    assert_eq!(held(), (0, 0));
    let name = client.reserve(id, key(2), 5000);
    let abort = [rows(&name), vec![0]].concat();
    assert_ne!(client.ask(ABORT, &abort).0, 0);
    assert_eq!(held(), (0, 1));
    let whole = frame(ABORT, 0, &abort[..abort.len() - 1]);
    client.calls.write_all(&whole).unwrap();
    eventually("the end of the reservation", || held() == (0, 0));
}
