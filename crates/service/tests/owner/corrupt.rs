//! Bytes flipped, zeroed and swapped anywhere, files cut off: affected blocks are misses, the tools
//! name them, everything else is served.

use std::collections::BTreeSet;
use std::slice;

use crate::common;
use crate::common::raw::Raw;
use crate::common::{
    Place, Served, assert_at_rest, copier, eventually, get, has, key, keys, namespace,
    namespace_of, number, put, start_put, verify,
};
use kvdepot_service::Mover;
use kvdepot_store::format::superblock::Superblock;
use kvdepot_store::format::{layout, record};
use kvdepot_store::inspect::Inspection;
use kvdepot_store::{BlockBuffers, Depot, Error, Outcome};
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::rot::DAMAGES;
use kvdepot_testkit::{Rng, rounds};

const BLOCKS: u64 = 40;

/// A length of its own for every block, also below and above a leaf and a granule.
fn len(number: u64) -> usize {
    match number % 5 {
        0 => 1 + number as usize,
        1 => 4096,
        2 => 70_000 + number as usize,
        3 => 12_345,
        _ => 4097,
    }
}

/// A closed arena with all the blocks.
fn filled() -> Place {
    let place = Place::new("Dax", "", "4MiB");
    let depot = place.serve();
    let ns = namespace(&depot);
    for number in 0..BLOCKS {
        assert_eq!(put(&ns, &[number], len(number)), [true]);
    }
    depot.close();
    place
}

/// What each block answers now; `Done` means the right bytes.
fn outcomes(depot: &Depot) -> Vec<Outcome> {
    let ns = namespace(depot);
    (0..BLOCKS)
        .map(|number| get(&ns, &[number], len(number))[0])
        .collect()
}

fn all_but(affected: &BTreeSet<u64>, outcome: Outcome) -> Vec<Outcome> {
    let of = |number| {
        if affected.contains(&number) {
            outcome
        } else {
            Outcome::Done
        }
    };
    (0..BLOCKS).map(of).collect()
}

#[test]
fn damaged_payloads_are_misses_named_by_verify_and_written_again() {
    let mut rng =
        Rng::for_test("corrupt::damaged_payloads_are_misses_named_by_verify_and_written_again");
    for _ in 0..rounds(10) {
        let place = filled();
        let raw = Raw::open(&place.arena());
        let mut affected = BTreeSet::new();
        for _ in 0..6 {
            let number = rng.below(BLOCKS);
            if len(number) < 8 || !affected.insert(number) {
                continue;
            }
            let (_, record) = raw.live(&key(number)).unwrap();
            let (offset, room) = record.extents.iter().next().unwrap();
            let damage = *rng.pick(&DAMAGES);
            raw.file
                .damage(damage, offset, room.min(record.len), &mut rng);
        }
        let found = verify(&place.arena());
        let bad = found
            .bad
            .iter()
            .map(|block| number(&block.record.identity.key));
        assert_eq!(bad.collect::<BTreeSet<u64>>(), affected);
        assert_eq!(found.sound + affected.len() as u64, BLOCKS);
        let depot = place.serve();
        assert_eq!(outcomes(&depot), all_but(&affected, Outcome::Corrupt));
        // The first failed verification unpublished them, here and on the medium.
        assert_eq!(outcomes(&depot), all_but(&affected, Outcome::Miss));
        assert_eq!(verify(&place.arena()).bad, []);
        assert_eq!(depot.stats().tiers[0].corrupt_blocks, affected.len() as u64);
        assert_at_rest(&depot);
        let ns = namespace(&depot);
        for number in &affected {
            assert_eq!(put(&ns, &[*number], len(*number)), [true]);
        }
        assert_eq!(outcomes(&depot), [Outcome::Done; BLOCKS as usize]);
    }
}

#[test]
fn a_damaged_byte_anywhere_in_a_payload_is_noticed() {
    let place = Place::new("Dax", "", "1MiB");
    let depot = place.serve();
    let ns = namespace(&depot);
    for len in [1, 2, 63, 64, 65, 240, 241, 1000] {
        for at in (0..len).step_by((len / 16).max(1)).chain([len - 1]) {
            assert_eq!(put(&ns, &[7], len), [true]);
            let raw = Raw::open(&place.arena());
            let (offset, _) = raw.live(&key(7)).unwrap().1.extents.iter().next().unwrap();
            let byte = raw.file.read(offset + at as u64, 1)[0];
            raw.file.write(offset + at as u64, &[byte ^ 0x40]);
            assert_eq!(
                get(&ns, &[7], len),
                [Outcome::Corrupt],
                "byte {at} of {len}"
            );
        }
    }
}

#[test]
fn damaged_records_are_misses_and_named() {
    let mut rng = Rng::for_test("corrupt::damaged_records_are_misses_and_named");
    for _ in 0..rounds(10) {
        let place = filled();
        let raw = Raw::open(&place.arena());
        let (mut affected, mut slots) = (BTreeSet::new(), BTreeSet::new());
        for _ in 0..5 {
            let number = rng.below(BLOCKS);
            if affected.insert(number) {
                let (slot, _) = raw.live(&key(number)).unwrap();
                let at = raw.layout.record(slot);
                raw.file
                    .damage(*rng.pick(&DAMAGES), at, record::LEN as u64, &mut rng);
                slots.insert(slot);
            }
        }
        let found = verify(&place.arena());
        assert_eq!(found.damaged_records, slots.into_iter().collect::<Vec<_>>());
        assert_eq!(
            (found.bad.len(), found.sound),
            (0, BLOCKS - affected.len() as u64)
        );
        let depot = place.serve();
        assert_eq!(depot.opening().damaged, affected.len() as u64);
        assert_eq!(outcomes(&depot), all_but(&affected, Outcome::Miss));
        assert_at_rest(&depot);
        let ns = namespace(&depot);
        for number in &affected {
            assert_eq!(put(&ns, &[*number], len(*number)), [true]);
        }
        depot.close();
        assert_eq!(outcomes(&place.serve()), [Outcome::Done; BLOCKS as usize]);
    }
}

#[test]
fn one_superblock_is_enough_and_none_is_refused() {
    let mut rng = Rng::for_test("corrupt::one_superblock_is_enough_and_none_is_refused");
    let place = filled();
    for round in 0..rounds(10) {
        let raw = Raw::open(&place.arena());
        let page = if rng.once_in(2) {
            0
        } else {
            layout::SUPERBLOCK_B
        };
        raw.file
            .damage(DAMAGES[round as usize % 3], page, 112, &mut rng);
        let dead = || {
            let inspection = Inspection::open(&place.arena()).unwrap();
            inspection.damaged_superblocks().unwrap()
        };
        let bytes = raw.file.read(page, 4096).try_into().unwrap();
        assert_eq!(dead() == [page], Superblock::decode(&bytes).is_err());
        let depot = place.serve();
        assert_eq!(dead(), [0; 0], "the owner has written it anew");
        assert_eq!(outcomes(&depot), [Outcome::Done; BLOCKS as usize]);
        // What is written now outlives the next opening too, although a generation repeats.
        let fresh = 1000 + round;
        assert_eq!(put(&namespace(&depot), &[fresh], 500), [true]);
        depot.close();
        let depot = place.serve();
        assert!(has(&namespace(&depot), &[fresh], 500));
        assert_eq!(outcomes(&depot), [Outcome::Done; BLOCKS as usize]);
        depot.close();
    }
    let raw = Raw::open(&place.arena());
    let intact = raw.file.read(0, 8192);
    let refused = |damage: &dyn Fn(u64)| {
        damage(0);
        damage(layout::SUPERBLOCK_B);
        let error = kvdepot_service::open(&place.config()).err().unwrap();
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
        assert!(Inspection::open(&place.arena()).is_err());
        raw.file.write(0, &intact);
        error.to_string()
    };
    let text = refused(&|page| raw.file.write(page + 100, &[0xAA; 8]));
    assert!(
        text.contains("damaged") && text.contains("format: true"),
        "{text}"
    );
    let text = refused(&|page| raw.file.write(page, &[0; 4096]));
    assert!(text.contains("not a kvdepot arena"), "{text}");
    assert_eq!(outcomes(&place.serve()), [Outcome::Done; BLOCKS as usize]);
}

#[test]
fn told_to_format_it_makes_a_new_arena_of_anything() {
    let place = filled().with("dax", "format", true);
    let raw = Raw::open(&place.arena());
    raw.file.write(0, &[0xAA; 8192]);
    let depot = place.serve();
    assert_eq!((depot.opening().blocks, depot.opening().created), (0, true));
    assert_eq!(outcomes(&depot), [Outcome::Miss; BLOCKS as usize]);
    assert_eq!(put(&namespace(&depot), &[3], len(3)), [true]);
    depot.close();
    assert_eq!(verify(&place.arena()).sound, 1);
}

#[test]
fn the_directory_and_the_owner_page_are_only_informative() {
    let place = filled();
    let depot = place.serve();
    for model in ["a", "b", "c"] {
        namespace_of(&depot, model);
    }
    depot.close();
    let named = || {
        let entries = Inspection::open(&place.arena())
            .unwrap()
            .namespaces()
            .unwrap();
        entries
            .into_iter()
            .map(|(_, text)| text)
            .collect::<Vec<_>>()
    };
    assert_eq!(named().len(), 4);
    let raw = Raw::open(&place.arena());
    raw.file.write(layout::DIRECTORY + 512 + 20, b"rot");
    raw.file.write(layout::OWNER + 20, b"rot");
    let rest = named();
    assert_eq!(rest.len(), 3, "{rest:?}");
    assert!(
        rest[2].contains("model=c"),
        "what lies behind is still there: {rest:?}"
    );
    assert!(
        Inspection::open(&place.arena())
            .unwrap()
            .owner()
            .0
            .is_none()
    );
    let depot = place.serve();
    assert_eq!(outcomes(&depot), [Outcome::Done; BLOCKS as usize]);
    // It comes back with its next use, and in nobody else's place.
    for model in ["a", "d"] {
        namespace_of(&depot, model);
    }
    depot.close();
    let all = named();
    assert_eq!(all.len(), 5, "{all:?}");
    for model in ["m", "a", "b", "c", "d"] {
        let wanted = format!("model={model} ");
        assert_eq!(
            all.iter().filter(|text| text.starts_with(&wanted)).count(),
            1
        );
    }
}

/// For what is put into what is left of an arena.
const ROOM: u64 = 4 * (32 << 10);

#[test]
fn a_truncated_arena_serves_what_it_has_left() {
    let mut rng = Rng::for_test("corrupt::a_truncated_arena_serves_what_it_has_left");
    for _ in 0..rounds(8) {
        let place = filled();
        let raw = Raw::open(&place.arena());
        let end = |number| {
            let (_, record) = raw.live(&key(number)).unwrap();
            record
                .extents
                .iter()
                .map(|(at, len)| at + len)
                .max()
                .unwrap()
        };
        let ends: Vec<u64> = (0..BLOCKS).map(end).collect();
        let last = ends.iter().max().unwrap() - 1;
        let cut = rng.between(layout::CAPACITY_MIN + ROOM, last);
        let affected: BTreeSet<u64> = (0..BLOCKS)
            .filter(|number| ends[*number as usize] > cut / 4096 * 4096)
            .collect();
        raw.file.truncate(cut);
        let found = verify(&place.arena());
        let bad = found
            .bad
            .iter()
            .map(|block| number(&block.record.identity.key));
        let bad: BTreeSet<u64> = bad.collect();
        assert!(
            bad.is_subset(&affected) && !bad.is_empty(),
            "{bad:?} of {affected:?}"
        );
        let depot = place.serve();
        let missing = outcomes(&depot);
        for number in 0..BLOCKS {
            let wanted = !affected.contains(&number);
            let there = missing[number as usize] == Outcome::Done;
            assert!(there == wanted || !bad.contains(&number), "block {number}");
            assert!(there || affected.contains(&number), "block {number}");
        }
        // It goes on working in what is left.
        let ns = namespace(&depot);
        let fresh: Vec<u64> = (1000..1004).collect();
        // A put that meets what is lost fails, and is not led there again.
        let stored = (0..BLOCKS).any(|_| put(&ns, &fresh, 30_000) == [true; 4]);
        assert!(stored, "cut at {cut}");
        assert!(has(&ns, &[1000], 30_000), "the head of the last prompt");
        depot.close();
    }
}

#[test]
fn truncated_into_its_table_it_is_refused() {
    let place = filled();
    let raw = Raw::open(&place.arena());
    for len in [
        raw.layout.data,
        raw.layout.data - 4096,
        64 << 10,
        5000,
        1,
        0,
    ] {
        raw.file.truncate(len);
        let error = kvdepot_service::open(&place.config())
            .err()
            .unwrap()
            .to_string();
        assert!(
            error.contains(place.arena().to_str().unwrap()),
            "{len}: {error}"
        );
        assert!(Inspection::open(&place.arena()).is_err());
    }
}

/// A rotten near copy: the bytes of the near tier, reached as a worker would.
fn rot_near(mover: &Mover, ns: &kvdepot_store::Namespace, number: u64) {
    let pins: Vec<_> = ns
        .pin(&[key(number)], false)
        .unwrap()
        .into_iter()
        .flatten()
        .collect();
    assert_eq!(pins[0].tier(), "Cache");
    let (medium, offset, _) = mover.locate(&pins[0].placement(), 0).unwrap()[0];
    let byte = mover.media()[medium].slice(offset as usize, 1).unwrap();
    byte.write_at(0, &[byte.to_vec()[0] ^ 1]).unwrap();
    ns.unpin(&pins, false);
}

#[test]
fn a_rotten_near_copy_falls_back_to_the_far_one() {
    let place = Place::new("Cache|Dax", "1MiB", "4MiB");
    let depot = place.serve();
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1, 2, 3], 50_000), [true; 3]);
    let mover = Mover::attach(&place.socket(), Some(1), true).unwrap();
    rot_near(&mover, &ns, 2);
    assert!(has(&ns, &[1, 2, 3], 50_000));
    let stats = depot.stats();
    assert_eq!(
        (stats.tiers[0].corrupt_blocks, stats.tiers[1].corrupt_blocks),
        (1, 0)
    );
    assert_eq!(stats.hit_blocks, [2, 1]);
    eventually("promotion", || depot.stats().promoted_blocks == 1);
    assert!(has(&ns, &[1, 2, 3], 50_000));
    assert_eq!(depot.stats().hit_blocks, [5, 1], "the near copy is new");
    // Both rotten: a miss that the next put mends.
    rot_near(&mover, &ns, 2);
    let raw = Raw::open(&place.arena());
    let (offset, _) = raw.live(&key(2)).unwrap().1.extents.iter().next().unwrap();
    raw.file
        .write(offset + 49_999, &[raw.file.read(offset + 49_999, 1)[0] ^ 1]);
    assert_eq!(get(&ns, &[2], 50_000), [Outcome::Corrupt]);
    assert_eq!(get(&ns, &[2], 50_000), [Outcome::Miss]);
    assert_eq!(ns.contains(&[key(2)]).unwrap(), [false]);
    assert_eq!(put(&ns, &[2], 50_000), [true]);
    assert!(has(&ns, &[1, 2, 3], 50_000));
    eventually("rest", || {
        depot
            .stats()
            .tiers
            .iter()
            .all(|tier| tier.pinned_blocks == 0)
    });
    assert_at_rest(&depot);
}

#[test]
fn bytes_that_rot_before_their_write_back_never_reach_the_far_tier() {
    let place = Place::new("Cache|Dax", "1MiB", "4MiB");
    let depot = place.serve();
    let ns = namespace(&depot);
    let mover = Mover::attach(&place.socket(), Some(1), true).unwrap();
    let reserved = ns.reserve(&[(key(1), vec![50_000])]).unwrap();
    let reserved: Vec<_> = reserved.into_iter().flatten().collect();
    let placement = reserved[0].placement();
    let buffers = BlockBuffers::whole([common::block(1, 50_000)]);
    let job = mover
        .store(slice::from_ref(&placement), &buffers, 0)
        .unwrap();
    assert!(job.wait(None));
    let checksum = job.checksums()[0].unwrap();
    let (medium, offset, _) = mover.locate(&placement, 0).unwrap()[0];
    let byte = mover.media()[medium]
        .slice(offset as usize + 77, 1)
        .unwrap();
    byte.write_at(0, &[content(1, 78)[77] ^ 8]).unwrap();
    assert_eq!(ns.commit(&reserved, &[vec![checksum]]).unwrap(), [true]);
    assert!(depot.drain(common::PATIENCE));
    assert_eq!(get(&ns, &[1], 50_000), [Outcome::Miss]);
    assert_eq!(depot.stats().put_corrupt_blocks, 1);
    assert_eq!(depot.stats().tiers[1].blocks, 0);
    assert_at_rest(&depot);
    let task = start_put(&ns, &[1], 50_000);
    assert_eq!(task.wait(Some(common::PATIENCE)).unwrap(), [true]);
    depot.close();
    assert_eq!(verify(&place.arena()).sound, 1);
}

/// The right bytes under another key, another namespace, another length: the checksum is seeded
/// with the identity.
#[test]
fn the_right_bytes_under_a_wrong_name_do_not_verify() {
    let place = Place::new("Dax", "", "1MiB");
    let depot = place.serve();
    let other = namespace_of(&depot, "other").id();
    assert_eq!(put(&namespace(&depot), &[1], 5000), [true]);
    depot.close();
    let raw = Raw::open(&place.arena());
    let (slot, record) = raw.live(&key(1)).unwrap();
    let copier = copier();
    let mut forged = [record; 3];
    forged[0].identity.key = key(2);
    forged[1].identity.namespace = other;
    forged[2].len = 4999;
    for record in forged {
        raw.write(slot, &record);
        let found = Inspection::open(&place.arena()).unwrap();
        let found = found.verify(&copier, |_, _| true).unwrap();
        assert_eq!((found.sound, found.bad.len()), (0, 1));
        let depot = place.serve();
        let ns = if record.identity.namespace == other {
            namespace_of(&depot, "other")
        } else {
            namespace(&depot)
        };
        let numbers = [number(&record.identity.key)];
        assert_eq!(ns.contains(&keys(numbers)).unwrap(), [true]);
        assert_eq!(get(&ns, &numbers, record.len as usize), [Outcome::Corrupt]);
        depot.close();
    }
}
