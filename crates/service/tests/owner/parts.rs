//! Blocks in parts: any part that does not verify decides against its block, whichever door it is
//! asked through.

use std::slice::from_ref;
use std::time::Duration;

use crate::common;
use crate::common::raw::Raw;
use crate::common::{
    PATIENCE, Place, Served, assert_at_rest, eventually, key, keys, namespace, verify,
};
use kvdepot_service::Mover;
use kvdepot_store::{BlockBuffers, Buffer, DrainTo, Namespace, Outcome};
use kvdepot_testkit::bytes::content;

/// The first of them is longer than a page, so that a part does not begin where its bytes would
/// lie in one piece.
const LENS: [u64; 4] = [5000, 3000, 1, 70_000];

/// The block that stays as it is.
const SOUND: u64 = 99;

/// Stores a block whose parts have the contents of their numbers.
fn store(place: &Place, ns: &Namespace, number: u64) {
    let mover = Mover::attach(&place.socket(), Some(1), true).unwrap();
    let reserved = ns.reserve(&[(key(number), LENS.to_vec())]).unwrap();
    let reserved = reserved.into_iter().next().unwrap().unwrap();
    let mut sums = Vec::new();
    for (part, len) in LENS.into_iter().enumerate() {
        let buffers = BlockBuffers::whole([common::block(part as u64, len as usize)]);
        let job = mover.store(&[reserved.placement()], &buffers, part as u32);
        let job = job.unwrap();
        assert!(job.wait(Some(PATIENCE)));
        sums.push(job.checksums()[0].unwrap());
    }
    assert_eq!(ns.commit(from_ref(&reserved), &[sums]).unwrap(), [true]);
}

/// The block's bytes, its parts one behind the other.
fn whole() -> Vec<u8> {
    let parts = LENS.into_iter().enumerate();
    parts
        .flat_map(|(part, len)| content(part as u64, len as usize))
        .collect()
}

/// Gets a block; panics at wrong bytes.
fn get(ns: &Namespace, number: u64) -> Outcome {
    let buffer = Buffer::from_vec(vec![0xEE; whole().len()]);
    let wanted = BlockBuffers::whole([buffer.clone()]);
    let task = ns.get(keys([number]), wanted).unwrap();
    task.wait(Some(PATIENCE)).unwrap();
    let outcome = task.outcomes()[0];
    assert!(
        outcome != Outcome::Done || buffer.to_vec() == whole(),
        "wrong bytes for block {number}"
    );
    outcome
}

/// Flips a byte of part `part` of a block.
fn rot(raw: &Raw, number: u64, part: usize) {
    let (at, _) = raw
        .live(&key(number))
        .unwrap()
        .1
        .extents
        .iter()
        .next()
        .unwrap();
    let before = LENS[..part].iter().map(|len| len.next_multiple_of(4096));
    let at = at + before.sum::<u64>() + LENS[part] / 2;
    let byte = raw.file.read(at, 1)[0];
    raw.file.write(at, &[!byte]);
}

/// Stores a block for each part, and one more.
fn store_all(place: &Place, ns: &Namespace) {
    let rotting = 0..LENS.len() as u64;
    rotting
        .chain([SOUND])
        .for_each(|number| store(place, ns, number));
}

/// Flips a byte of another part of each, but for the one more.
fn rot_all(place: &Place) {
    let raw = Raw::open(&place.arena());
    (0..LENS.len()).for_each(|part| rot(&raw, part as u64, part));
}

/// What came of them somewhere else.
fn only_the_sound_one_is_there(ns: &Namespace) {
    assert_eq!(get(ns, SOUND), Outcome::Done);
    for number in 0..LENS.len() as u64 {
        assert_eq!(get(ns, number), Outcome::Miss);
    }
}

#[test]
fn a_get_of_a_block_with_any_rotten_part_is_no_hit_here_and_through_the_socket() {
    let place = Place::new("Dax", "", "16MiB");
    let owner = place.serve();
    let client = kvdepot_service::connect(&place.socket(), Some(2)).unwrap();
    let raw = Raw::open(&place.arena());
    for (door, depot) in [&owner, &client].into_iter().enumerate() {
        let ns = namespace(depot);
        for part in 0..LENS.len() {
            let number = (door * LENS.len() + part) as u64;
            store(&place, &ns, number);
            assert_eq!(get(&ns, number), Outcome::Done);
            rot(&raw, number, part);
            assert_eq!(
                get(&ns, number),
                Outcome::Corrupt,
                "door {door}, part {part}"
            );
            // Unpublished: the next put writes it again.
            assert_eq!(ns.contains(&keys([number])).unwrap(), [false]);
        }
    }
    client.close();
    assert_at_rest(&owner);
}

#[test]
fn a_block_with_any_rotten_part_is_named_by_verify() {
    let place = Place::new("Dax", "", "16MiB");
    let owner = place.serve();
    let ns = namespace(&owner);
    store_all(&place, &ns);
    rot_all(&place);
    let verified = verify(&place.arena());
    assert_eq!((verified.blocks, verified.sound), (5, 1));
    let bad: Vec<_> = verified
        .bad
        .iter()
        .map(|one| one.record.identity.key)
        .collect();
    assert_eq!(bad, keys(0..LENS.len() as u64));
}

#[test]
fn a_block_with_any_rotten_part_is_not_copied_to_another_device() {
    let place = Place::new("Dax", "", "16MiB");
    let owner = place.serve();
    let ns = namespace(&owner);
    store_all(&place, &ns);
    rot_all(&place);
    let second = place.dir().join("second");
    owner.add_device(&second, Some(16 << 20)).unwrap();
    let drained = owner
        .drain_device(&place.arena(), DrainTo::Others, Duration::from_secs(10))
        .unwrap();
    assert_eq!(drained.moved_blocks, 1, "{drained:?}");
    only_the_sound_one_is_there(&ns);
}

#[test]
fn a_block_with_any_rotten_part_is_not_promoted() {
    let place = Place::new("Cache|Dax", "4MiB", "16MiB");
    let owner = place.serve();
    let ns = namespace(&owner);
    store_all(&place, &ns);
    assert!(owner.drain(PATIENCE));
    owner.close();
    rot_all(&place);
    let owner = place.serve();
    let ns = namespace(&owner);
    let wanted = keys((0..LENS.len() as u64).chain([SOUND]));
    for one in &wanted {
        let task = ns.prefetch(from_ref(one)).unwrap();
        let ahead = task.wait(Some(PATIENCE)).unwrap();
        assert_eq!(ahead, [*one == key(SOUND)]);
    }
    eventually("the promotion", || {
        ns.nearest(&keys([SOUND])).unwrap() == [Some("Cache")]
    });
    only_the_sound_one_is_there(&ns);
    assert_at_rest(&owner);
}
