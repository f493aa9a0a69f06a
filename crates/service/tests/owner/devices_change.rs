//! Devices that are removed, added, grown and refused while the depot serves.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::several::{LEN, SHORT, at, fill, on, says, several, state, two};
use crate::common::{
    PATIENCE, Place, Served, block, config_of, eventually, get, has, key, keys, namespace, number,
    put, verify,
};
use kvdepot_service::Mover;
use kvdepot_store::format::superblock;
use kvdepot_store::{
    BlockBuffers, Buffer, Config, DeviceState, DrainTo, Error, Key, NamespaceSpec, Outcome, SAVED,
};
use kvdepot_testkit::child::{self, Child};
use kvdepot_testkit::{Rng, rounds};
use serde_json::json;

#[test]
fn a_removed_device_belongs_to_whoever_opens_it_next() {
    let place = two().with("", "socket", "off");
    let depot = place.serve();
    let ns = namespace(&depot);
    fill(&ns, 0..32);
    let (a, b) = (at(&place, "a"), at(&place, "b"));
    let alone = json!({"dax": {"path": a}, "socket": "off", "lock_wait": "0s", "lanes": 1});
    let alone = Config::new("Dax", &alone).unwrap();
    let error = depot.remove_device(&a, false, SHORT).unwrap_err();
    says(&error, &["path", a.to_str().unwrap(), "drained or empty"]);
    assert!(matches!(
        kvdepot_service::open(&alone),
        Err(Error::Locked { .. })
    ));
    let held = on(&b);
    depot.remove_device(&a, true, SHORT).unwrap();
    assert!(has(&ns, &held.into_iter().collect::<Vec<_>>(), LEN));
    // Whoever was looking at the devices has them for a moment longer.
    eventually("its end as a mapping", || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        !maps.contains(&format!("{}\n", a.display()))
    });
    let error = depot.remove_device(&b, true, SHORT).unwrap_err();
    says(&error, &["path", b.to_str().unwrap(), "add another device"]);
    let error = depot.drain_device(&b, DrainTo::Others, SHORT).unwrap_err();
    says(&error, &["to", "other_devices", "evict"]);
    // Elsewhere, and back with what was put there.
    let other = kvdepot_service::open(&alone).unwrap();
    fill(&namespace(&other), 500..510);
    says(
        &depot.add_device(&a, None).unwrap_err(),
        &[a.to_str().unwrap(), "in use by another depot"],
    );
    other.close();
    let opening = depot.add_device(&a, None).unwrap();
    assert_eq!(opening.blocks, 10);
    assert!(has(&ns, &(500..510).collect::<Vec<_>>(), LEN));
}

#[test]
fn what_a_device_has_counted_and_noted_outlives_its_removal() {
    let place = two();
    let depot = place.serve();
    let ns = namespace(&depot);
    assert!(depot.gone(100).unwrap().blocks.is_empty());
    fill(&ns, 0..16);
    let (a, b) = (at(&place, "a"), at(&place, "b"));
    let lay = on(&a);
    assert!(!lay.is_empty());
    let told = || {
        let gone = depot.gone(100).unwrap();
        assert!(!gone.overflowed);
        let of = gone.blocks.iter();
        of.map(|(identity, _)| number(&identity.key))
            .collect::<HashSet<u64>>()
    };
    depot.remove_device(&a, true, PATIENCE).unwrap();
    let tier = depot.stats().tiers.remove(0);
    let counted = (tier.stored_blocks, tier.evicted_blocks);
    assert_eq!(counted, (16, lay.len() as u64));
    assert_eq!(tier.capacity_bytes, depot.devices().unwrap()[0].data_bytes);
    assert_eq!(told(), lay);

    // Whoever listens hears of a device that came later, too.
    depot.add_device(&a, None).unwrap();
    fill(&ns, 100..116);
    let lay = on(&a);
    assert!(!lay.is_empty() && !on(&b).is_empty());
    depot.remove_device(&a, true, PATIENCE).unwrap();
    assert_eq!(told(), lay);
}

#[test]
fn a_key_that_a_call_names_twice_is_reserved_on_one_device() {
    let place = two();
    let depot = place.serve();
    // Others go for all of what is saved on purpose.
    let spec = NamespaceSpec {
        model: "m".into(),
        dtype: "float32".into(),
        block_tokens: 16,
        group: Some(format!("{SAVED}x")),
        ..NamespaceSpec::default()
    };
    let ns = depot.namespace(&spec).unwrap();
    // One device takes less than what lies between the two.
    let long: Vec<u64> = (0..80).chain(0..8).collect();
    let full = vec![0x5A; LEN];
    for round in 0..2 {
        let blocks: Vec<(Key, Vec<u64>)> = long
            .iter()
            .map(|number| (key(*number), vec![LEN as u64]))
            .collect();
        let reserved = ns.reserve(&blocks).unwrap();
        assert!(reserved[..80].iter().all(Option::is_some), "round {round}");
        assert!(reserved[80..].iter().all(Option::is_none), "round {round}");
        assert_eq!(depot.stats().tiers[0].reserved_blocks, 80);
        ns.abort(&reserved.into_iter().flatten().collect::<Vec<_>>());

        let mut buffers = BlockBuffers::default();
        long.iter()
            .for_each(|_| buffers.push([Buffer::from_vec(full.clone())]));
        let named = keys(long.iter().copied());
        let task = ns.put(named, buffers).unwrap();
        assert_eq!(task.wait(Some(PATIENCE)).unwrap(), [true; 88]);
        assert!(on(&at(&place, "a")).is_disjoint(&on(&at(&place, "b"))));
        assert_eq!(ns.prefix(&keys(0..90)).unwrap(), 80);
        // And where others have to go for them.
        ns.clear().unwrap();
        fill(&ns, 1000..1100);
    }
}

#[test]
fn a_device_is_there_once_under_one_name_and_with_one_size() {
    let place = two();
    let depot = place.serve();
    let c = at(&place, "c");
    assert!(depot.add_device(&c, Some(1 << 20)).unwrap().created);
    depot.add_device(&c, Some(1 << 20)).unwrap();
    depot.add_device(&c, None).unwrap();
    assert_eq!(depot.devices().unwrap().len(), 3);
    let error = depot.add_device(&c, Some(2 << 20)).unwrap_err();
    says(&error, &["capacity: 2 MiB", "1 MiB", "grow_device"]);
    let (link, hard) = (at(&place, "link"), at(&place, "hard"));
    std::os::unix::fs::symlink(&c, &link).unwrap();
    std::fs::hard_link(&c, &hard).unwrap();
    for other in [&link, &hard] {
        let error = depot.add_device(other, None).unwrap_err();
        says(
            &error,
            &["path", other.to_str().unwrap(), c.to_str().unwrap()],
        );
    }
    let nowhere = at(&place, "nowhere");
    says(
        &depot.grow_device(&nowhere, 1 << 21).unwrap_err(),
        &["path", c.to_str().unwrap()],
    );
    says(
        &depot.add_device(&nowhere, Some(4096)).unwrap_err(),
        &["capacity: 4 KiB", "256 KiB"],
    );
    assert!(!nowhere.exists());
    // A drained one takes writes again when it is added again.
    depot.drain_device(&c, DrainTo::Others, SHORT).unwrap();
    assert_eq!(state(&depot, &c), DeviceState::Draining);
    depot.add_device(&c, None).unwrap();
    assert_eq!(state(&depot, &c), DeviceState::Serving);
    depot.close();
    let near =
        kvdepot_service::open(&Config::new("Cache", &json!({"socket": "off"})).unwrap()).unwrap();
    says(
        &near.add_device(&c, None).unwrap_err(),
        &["pipeline: Cache", "a Dax or Nvme tier"],
    );
}

#[test]
fn a_device_that_was_cut_is_added_again_by_the_capacity_it_is_opened_with() {
    let place = two();
    place.serve().close();
    let b = at(&place, "b");
    let file = std::fs::File::options().write(true).open(&b).unwrap();
    file.set_len(700 << 10).unwrap();
    let depot = place.serve();
    depot
        .drain_device(&b, DrainTo::Others, Duration::ZERO)
        .unwrap();
    let error = depot.add_device(&b, Some(700 << 10)).unwrap_err();
    says(&error, &["capacity: 700 KiB", "1 MiB"]);
    depot.add_device(&b, Some(1 << 20)).unwrap();
    assert_eq!(state(&depot, &b), DeviceState::Serving);
}

#[test]
fn every_device_of_the_list_must_open() {
    let place = two();
    place.serve().close();
    let owner = json!({"dax": {"path": at(&place, "b")}, "socket": "off", "lock_wait": "0s"});
    let owner = kvdepot_service::open(&Config::new("Dax", &owner).unwrap()).unwrap();
    let error = kvdepot_service::open(&place.config()).err().unwrap();
    says(
        &error,
        &[at(&place, "b").to_str().unwrap(), "in use by another depot"],
    );
    owner.close();
    place.serve().close();
    let twice = json!({"dax": {"devices": [
        {"path": at(&place, "a")}, {"path": at(&place, "b")}, {"path": at(&place, "a")},
    ]}, "socket": "off"});
    let error = Config::new("Dax", &twice).err().unwrap();
    says(&error, &["dax.devices[2].path", "already listed"]);
    std::fs::write(at(&place, "b"), vec![7; 1 << 20]).unwrap();
    let error = kvdepot_service::open(&place.config()).err().unwrap();
    says(
        &error,
        &[at(&place, "b").to_str().unwrap(), "not a kvdepot arena"],
    );
    let other = json!({"dax": {"devices": [{"path": at(&place, "a"), "capacity": "2MiB"}]}});
    let error = kvdepot_service::open(&Config::new("Dax", &other).unwrap())
        .err()
        .unwrap();
    says(&error, &["dax.devices[0].capacity: 2 MiB", "1 MiB"]);
}

#[test]
fn an_added_device_keeps_no_second_copy_of_a_block() {
    let place = two();
    let depot = place.serve();
    let c = at(&place, "c");
    let other = json!({"dax": {"path": c, "capacity": "1MiB"}, "socket": "off"});
    let other = kvdepot_service::open(&Config::new("Dax", &other).unwrap()).unwrap();
    fill(&namespace(&other), 0..16);
    other.close();
    let ns = namespace(&depot);
    fill(&ns, 8..24);
    depot.add_device(&c, None).unwrap();
    assert!(has(&ns, &(0..24).collect::<Vec<_>>(), LEN));
    assert_eq!(on(&c), (0..8).collect());
    assert_eq!(depot.stats().tiers[0].blocks, 24);
    depot.close();
    // As a process leaves it that dies while a block moves.
    let other = kvdepot_service::open(&place.with_path(&c)).unwrap();
    fill(&namespace(&other), 8..12);
    other.close();
    let list = ["c", "a", "b"].map(|name| json!({"path": at(&place, name)}));
    let place = place.with_section("dax", json!({ "devices": list }));
    let depot = place.serve();
    assert!(has(&namespace(&depot), &(0..24).collect::<Vec<_>>(), LEN));
    assert_eq!(depot.stats().tiers[0].blocks, 24);
}

#[test]
fn a_device_grows_while_it_serves_and_does_not_shrink() {
    let place = Place::new("Dax", "", "1MiB").with("dax", "records", 512);
    let depot = place.serve();
    let ns = namespace(&depot);
    let mover = Mover::attach(&place.socket(), Some(1), true).unwrap();
    fill(&ns, 0..40);
    let old = ns.pin(&[key(3)], false).unwrap().remove(0).unwrap();
    let reserved = ns
        .reserve(&[(key(700), vec![LEN as u64])])
        .unwrap()
        .remove(0)
        .unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (reader, stop) = (ns.clone(), &stop);
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                assert!(has(&reader, &(0..40).collect::<Vec<_>>(), LEN));
            }
        });
        for capacity in [1_u64 << 20, 3 << 20, 8 << 20] {
            depot.grow_device(&place.arena(), capacity).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(depot.devices().unwrap()[0].capacity_bytes, 8 << 20);
    // Placements from before are good where they were mapped.
    let buffer = Buffer::from_vec(vec![0; LEN]);
    let into = BlockBuffers::whole([buffer.clone()]);
    let loaded = mover.load(&[old.placement()], &into, 0).unwrap();
    assert!(loaded.wait(Some(PATIENCE)) && loaded.checksums()[0].is_some());
    assert_eq!(buffer.to_vec(), block(3, LEN).to_vec());
    let from = BlockBuffers::whole([block(700, LEN)]);
    let stored = mover.store(&[reserved.placement()], &from, 0).unwrap();
    assert!(stored.wait(Some(PATIENCE)));
    let sum = stored.checksums()[0].unwrap();
    assert_eq!(ns.commit(&[reserved], &[vec![sum]]).unwrap(), [true]);
    ns.unpin(&[old], false);
    mover.close();
    // As many records as before, so larger blocks.
    assert_eq!(put(&ns, &[900], 4 << 20), [true]);
    assert!(has(&ns, &[900], 4 << 20) && has(&ns, &[3, 700], LEN));
    let error = depot.grow_device(&place.arena(), 4 << 20).unwrap_err();
    says(&error, &["capacity: 4 MiB", "8 MiB", "cannot shrink"]);
    let error = depot.grow_device(&place.arena(), 1 << 30).unwrap_err();
    says(&error, &["capacity: 1 GiB", "64 MiB"]);
    depot.close();
    assert_eq!(verify(&place.arena()).bad.len(), 0);
    let error = kvdepot_service::open(&place.config()).err().unwrap();
    says(&error, &["dax.capacity: 1 MiB", "8 MiB"]);
    let place = place.with("dax", "capacity", "8MiB");
    let depot = place.serve();
    assert!(has(&namespace(&depot), &[900], 4 << 20));
    assert!(has(&namespace(&depot), &[0, 3, 39, 700], LEN));
}

#[test]
fn crash_kill9_while_a_device_grows() {
    const TEST: &str = "devices_change::crash_kill9_while_a_device_grows";
    if let Some(role) = child::role() {
        assert_eq!(role, "grower");
        let depot = kvdepot_service::open(&config_of(&child::value("spec"))).unwrap();
        let ns = namespace(&depot);
        let path = depot.path().unwrap();
        fill(&ns, 0..16);
        child::say("open");
        for step in 1.. {
            child::say(&format!("to {}", (1 << 20) + step * 65536));
            depot.grow_device(&path, (1 << 20) + step * 65536).unwrap();
            child::say(&format!("at {}", (1 << 20) + step * 65536));
            fill(&ns, 16 + step..17 + step);
            child::say(&format!("put {}", 16 + step));
        }
    }
    let mut rng = Rng::for_test(TEST);
    for _ in 0..rounds(25) {
        let place = Place::new("Dax", "", "1MiB").with("dax", "records", 512);
        let mut grower = Child::start(TEST, "grower", &[("spec", &place.spec())]);
        grower.expect("open");
        let (mut to, mut reached) = (1 << 20, 1 << 20);
        let mut known: Vec<u64> = (0..16).collect();
        let more = Duration::from_micros(rng.below(20_000));
        for line in grower.kill_after("put", rng.below(3), more) {
            let (word, number) = line.split_once(' ').unwrap();
            let number: u64 = number.parse().unwrap();
            match word {
                "to" => to = number,
                "at" => reached = number,
                _ => known.push(number),
            }
        }
        assert_eq!(verify(&place.arena()).bad.len(), 0);
        let place = place.without("dax", "capacity");
        let depot = place.serve();
        let capacity = depot.devices().unwrap()[0].capacity_bytes;
        assert!(
            capacity == reached || capacity == to,
            "{capacity}, not {reached} or {to}"
        );
        // The last 40 cannot have been evicted: there is room for them at any size.
        let last = &known[known.len().saturating_sub(40)..];
        assert!(has(&namespace(&depot), last, LEN));
    }
}

/// What is not a device for this depot is refused with its reason, and stays as it is.
#[test]
fn what_cannot_be_a_device_is_refused_and_left_alone() {
    let place = two();
    let depot = place.serve();
    let newer = {
        let mut page = vec![0; superblock::LEN];
        page[..8].copy_from_slice(b"KVDEPOT\0");
        page[8] = 9;
        let sum = xxhash_rust::xxh3::xxh3_64(&page[..superblock::LEN - 8]);
        page[superblock::LEN - 8..].copy_from_slice(&sum.to_le_bytes());
        page.resize(1 << 20, 0);
        page
    };
    let cases: [(&str, Vec<u8>, &[&str]); 5] = [
        (
            "short",
            vec![0; 4096],
            &["the medium is too small (4 KiB): an arena needs", "256 KiB"],
        ),
        ("empty", Vec::new(), &["path", "a file that is not empty"]),
        (
            "foreign",
            vec![b'#'; 1 << 20],
            &["not a kvdepot arena", "format: true"],
        ),
        ("odd", vec![b'#'; (1 << 20) + 77], &["not a kvdepot arena"]),
        (
            "newer",
            newer,
            &[
                "format version 9, but this release reads only version 1",
                "the release that wrote the arena",
            ],
        ),
    ];
    for (name, content, words) in cases {
        let path = at(&place, name);
        std::fs::write(&path, &content).unwrap();
        for error in [
            depot.add_device(&path, None).unwrap_err(),
            kvdepot_service::open(&place.with_path(&path))
                .err()
                .unwrap(),
        ] {
            says(&error, words);
            says(&error, &[path.to_str().unwrap()]);
        }
        assert_eq!(std::fs::read(&path).unwrap(), content, "{name} was touched");
    }
    let c = at(&place, "c");
    depot.add_device(&c, Some((1 << 20) + 77)).unwrap();
    let devices = depot.devices().unwrap();
    assert_eq!(
        devices.last().unwrap().capacity_bytes,
        1 << 20,
        "in whole granules"
    );
    depot.remove_device(&c, false, SHORT).unwrap();
    let error = depot.add_device(&c, Some(512 << 10)).unwrap_err();
    says(&error, &["capacity: 512 KiB", "1 MiB", "format: force"]);
    assert_eq!(depot.devices().unwrap().len(), 2);
    fill(&namespace(&depot), 0..8);
}

#[test]
fn a_device_that_failed_takes_no_writes_and_can_be_removed() {
    let place = two().with("", "socket", "off");
    let depot = place.serve();
    let ns = namespace(&depot);
    fill(&ns, 0..32);
    let b = at(&place, "b");
    let lost: Vec<u64> = on(&b).into_iter().collect();
    let kept: Vec<u64> = on(&at(&place, "a")).into_iter().collect();
    assert!(!lost.is_empty() && !kept.is_empty());
    std::fs::File::options()
        .write(true)
        .open(&b)
        .unwrap()
        .set_len(0)
        .unwrap();
    let held = ns.pin(&[key(lost[0])], false).unwrap();
    assert!(!get(&ns, &lost, LEN).contains(&Outcome::Done));
    assert!(has(&ns, &kept, LEN));
    says(
        &depot.grow_device(&b, 2 << 20).unwrap_err(),
        &["has 0 bytes"],
    );
    // A touch of the record table says so.
    eventually("the failure", || {
        fill(&ns, 100..104);
        ns.remove(&keys(100..104)).unwrap();
        state(&depot, &b) == DeviceState::Failed
    });
    fill(&ns, 200..208);
    assert!(has(&ns, &(200..208).collect::<Vec<_>>(), LEN));
    ns.unpin(&held.into_iter().flatten().collect::<Vec<_>>(), false);
    depot.remove_device(&b, true, SHORT).unwrap();
    assert_eq!(depot.devices().unwrap().len(), 1);
    assert!(has(&ns, &kept, LEN));
}

#[test]
fn what_is_reserved_behind_a_block_without_room_is_given_back() {
    const BIG: usize = 8 << 20;
    const SMALL: usize = 512 << 10;
    let whole = several(&["a", "b"], "24MiB");
    let (a, b) = (at(&whole, "a"), at(&whole, "b"));
    // b alone: full, and then with 10 MiB free, in holes of half a MiB each.
    let section = json!({"path": b, "capacity": "24MiB", "records": 256});
    let alone = Place::new("Dax", "", "24MiB").with_section("dax", section);
    let depot = alone.serve();
    let ns = namespace(&depot);
    let all: Vec<u64> = (100..140).collect();
    assert_eq!(put(&ns, &all, SMALL), [true; 40]);
    let free = depot.stats().tiers[0].free_bytes;
    // Whatever is left at the end is no room.
    let rest = BlockBuffers::whole([block(140, free as usize)]);
    let rest = ns.put(keys([140]), rest).unwrap().wait(Some(PATIENCE));
    assert_eq!(rest.unwrap(), [true]);
    let removed: Vec<u64> = (100..140).step_by(2).collect();
    assert_eq!(ns.remove(&keys(removed.iter().copied())).unwrap(), 20);
    let tier = depot.stats().tiers.remove(0);
    let holes = (tier.free_bytes, tier.largest_free_bytes);
    assert_eq!(holes, (20 * SMALL as u64, SMALL as u64));
    depot.close();

    let depot = whole.serve();
    let ns = namespace(&depot);
    let pair = |number: u64| BlockBuffers::whole([block(number, BIG), block(number + 1, SMALL)]);
    let stored = ns.put(keys([0, 1]), pair(0)).unwrap().wait(Some(PATIENCE));
    assert_eq!(stored.unwrap(), [true; 2]);
    assert_eq!(on(&a), HashSet::from([0, 1]), "where most is free");
    let drained = depot.drain_device(&a, DrainTo::Others, 40 * SHORT);
    let drained = drained.unwrap();
    assert_eq!((drained.moved_blocks, drained.evicted_blocks), (1, 1));
    assert!(has(&ns, &[1], SMALL));
    depot.remove_device(&a, false, SHORT).unwrap();
    // And whoever wants those keys gets them.
    let again = ns.put(keys([0, 1]), pair(0)).unwrap();
    assert_eq!(again.wait(Some(PATIENCE)).unwrap(), [true; 2]);
    let tier = depot.stats().tiers.remove(0);
    assert_eq!((tier.reserved_blocks, tier.pinned_blocks), (0, 0));
    let (sender, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        depot.close();
        sender.send(()).unwrap();
    });
    ended.recv_timeout(PATIENCE).unwrap();
}

#[test]
fn a_device_that_comes_back_is_written_although_workers_never_let_it_go() {
    let place = two();
    let depot = place.serve();
    let ns = namespace(&depot);
    fill(&ns, 0..16);
    let worker = Mover::attach(&place.socket(), Some(1), true).unwrap();
    let (a, b) = (at(&place, "a"), at(&place, "b"));
    for _ in 0..2 {
        depot.remove_device(&a, true, PATIENCE).unwrap();
        depot.add_device(&a, None).unwrap();
    }
    depot.drain_device(&b, DrainTo::Others, PATIENCE).unwrap();
    fill(&ns, 100..108);
    assert_eq!(on(&a).len(), 8 + 8);
    assert!(
        depot
            .devices()
            .unwrap()
            .iter()
            .all(|device| device.orphans.is_empty())
    );
    depot.add_device(&b, None).unwrap();
    depot.remove_device(&a, true, PATIENCE).unwrap();
    // Another owner in between: its workers, and ours for it, might write.
    let other = Place::new("Dax", "", "1MiB").with_section("dax", json!({ "path": a }));
    let elsewhere = other.serve();
    assert_eq!(
        put(&namespace(&elsewhere), &[1], LEN),
        [false],
        "our worker has it"
    );
    elsewhere.close();
    depot.add_device(&a, None).unwrap();
    depot.drain_device(&b, DrainTo::Nowhere, PATIENCE).unwrap();
    assert_eq!(put(&ns, &[200], LEN), [false]);
    drop(worker);
    assert_eq!(put(&ns, &[200], LEN), [true]);
}
