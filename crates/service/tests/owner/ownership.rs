//! One owner, and nobody left over from the one before.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::{Duration, Instant};

use crate::common;
use crate::common::raw::Raw;
use crate::common::{Place, Served, config_of, get, has, key, namespace, put, start_put, verify};
use kvdepot_service::Mover;
use kvdepot_store::{BlockBuffers, Depot, Error, Outcome, Reservation};
use kvdepot_testkit::child::{self, Child};

fn reserve(depot: &Depot, number: u64, len: u64) -> Option<Reservation> {
    namespace(depot)
        .reserve(&[(key(number), vec![len])])
        .unwrap()
        .remove(0)
}

/// What the children of this file do.
fn play(role: &str) {
    match role {
        "owner" => {
            let depot = kvdepot_service::open(&config_of(&child::value("spec"))).unwrap();
            let ns = namespace(&depot);
            assert_eq!(put(&ns, &[1, 2, 3], 20_000), [true; 3]);
            let reserved = reserve(&depot, 9, 20_000).unwrap();
            let hex: String = reserved
                .placement()
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect();
            child::say(&hex);
            child::sleep_until_killed();
        }
        "lanes" => {
            let chosen = child::value("lanes").parse().ok();
            let socket = child::value("socket");
            let _mover = Mover::attach(socket.as_ref(), chosen, true).unwrap();
            let lanes = || {
                let tasks = std::fs::read_dir("/proc/self/task").unwrap();
                let names = tasks.map(|task| std::fs::read_to_string(task?.path().join("comm")));
                // Without those that have ended meanwhile.
                let names = names.filter_map(Result::ok);
                names
                    .filter(|name| name.starts_with("kvdepot-lane"))
                    .count()
            };
            // A thread takes its name in its first moments.
            let wanted: usize = child::value("wanted").parse().unwrap();
            common::eventually("the lanes", || lanes() >= wanted);
            child::say(&lanes().to_string());
            child::sleep_until_killed();
        }
        "worker" => {
            let mover = Mover::attach(child::value("socket").as_ref(), Some(1), true).unwrap();
            child::say("attached");
            let hex = child::value("placement");
            let digits: Vec<u8> = (0..hex.len())
                .step_by(2)
                .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
                .collect();
            // Paused; when its owner is long dead it goes on, as it was told to.
            while !std::path::Path::new(&child::value("go")).exists() {
                std::thread::sleep(Duration::from_millis(1));
            }
            let buffers = BlockBuffers::whole([common::block(9, 20_000)]);
            let job = mover.store(&[digits], &buffers, 0).unwrap();
            assert!(job.wait(None) && job.checksums()[0].is_some());
            child::say("written");
            child::sleep_until_killed();
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_new_owner_serves_at_once_but_allocates_only_when_the_orphans_are_gone() {
    const TEST: &str =
        "ownership::a_new_owner_serves_at_once_but_allocates_only_when_the_orphans_are_gone";
    if let Some(role) = child::role() {
        return play(&role);
    }
    let place = Place::new("Dax", "", "1MiB");
    let spec = place.spec();
    let mut owner = Child::start(TEST, "owner", &[("spec", &spec)]);
    let placement = owner.line().unwrap();
    let go = place.dir().join("go");
    let socket = place.socket();
    let values = [
        ("socket", socket.to_str().unwrap()),
        ("placement", placement.as_str()),
        ("go", go.to_str().unwrap()),
    ];
    let mut orphan = Child::start(TEST, "worker", &values);
    orphan.expect("attached");
    owner.kill();
    // Its lock died with it, its worker's did not.
    let depot = place.serve();
    let ns = namespace(&depot);
    assert!(has(&ns, &[1, 2, 3], 20_000), "reads are served");
    assert_eq!(reserve(&depot, 4, 20_000), None);
    let task = start_put(&ns, &[4], 20_000);
    assert_eq!(task.wait(None).unwrap(), [false]);
    assert_eq!(task.outcomes(), [Outcome::Full]);
    let error = ns.reserve_strict(&[(key(4), vec![20_000])]).unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("tier Dax") && error.contains("previous owner"),
        "{error}"
    );
    // A worker of the new owner may come meanwhile, and must not be taken for one of the old.
    let mine = Mover::attach(&place.socket(), Some(1), true).unwrap();
    assert_eq!(reserve(&depot, 4, 20_000), None);
    // The orphan wakes up and writes where its dead owner had told it to.
    std::fs::write(&go, "").unwrap();
    orphan.expect("written");
    assert!(has(&ns, &[1, 2, 3], 20_000), "it hit nobody");
    assert_eq!(
        get(&ns, &[9], 20_000),
        [Outcome::Miss],
        "and nothing became visible"
    );
    assert_eq!(ns.remove(&[key(3)]).unwrap(), 1, "removing needs no room");
    orphan.kill();
    let reserved = reserve(&depot, 4, 20_000).expect("the orphan is gone");
    let buffers = BlockBuffers::whole([common::block(4, 20_000)]);
    let job = mine.store(&[reserved.placement()], &buffers, 0).unwrap();
    assert!(job.wait(None));
    let sum = job.checksums()[0].unwrap();
    assert_eq!(ns.commit(&[reserved], &[vec![sum]]).unwrap(), [true]);
    assert!(has(&ns, &[1, 2, 4], 20_000));
    // The early worker is a writer like others: the next owner waits for it.
    depot.close();
    let next = place.serve();
    assert_eq!(reserve(&next, 5, 1000), None);
    drop(mine);
    assert!(reserve(&next, 5, 1000).is_some());
}

#[test]
fn a_worker_has_the_lanes_that_its_owner_was_configured_with() {
    const TEST: &str = "ownership::a_worker_has_the_lanes_that_its_owner_was_configured_with";
    if let Some(role) = child::role() {
        return play(&role);
    }
    for (configured, chosen, lanes) in [(3, "", "3"), (7, "", "7"), (3, "2", "2")] {
        let place = Place::new("Cache", "1MiB", "").with("", "lanes", configured);
        let _depot = place.serve();
        let socket = place.socket();
        let values = [
            ("socket", socket.to_str().unwrap()),
            ("lanes", chosen),
            ("wanted", lanes),
        ];
        let mut worker = Child::start(TEST, "lanes", &values);
        assert_eq!(worker.line().unwrap(), lanes);
    }
}

#[test]
fn what_is_put_while_orphans_live_is_acknowledged_when_they_are_gone() {
    const TEST: &str =
        "ownership::what_is_put_while_orphans_live_is_acknowledged_when_they_are_gone";
    if let Some(role) = child::role() {
        return play(&role);
    }
    let place = Place::new("Cache|Dax", "1MiB", "1MiB");
    let spec = place.spec();
    let mut owner = Child::start(TEST, "owner", &[("spec", &spec)]);
    owner.line().unwrap();
    let socket = place.socket();
    let values = [
        ("socket", socket.to_str().unwrap()),
        ("placement", ""),
        ("go", ""),
    ];
    let mut orphan = Child::start(TEST, "worker", &values);
    orphan.expect("attached");
    owner.kill();
    let depot = place.serve();
    let ns = namespace(&depot);
    let task = start_put(&ns, &[4], 20_000);
    task.wait_released(Some(common::PATIENCE)).unwrap();
    assert!(task.wait(Some(Duration::from_millis(120))).is_err());
    assert!(has(&ns, &[1, 4], 20_000), "meanwhile it is served");
    orphan.kill();
    assert_eq!(task.wait(Some(common::PATIENCE)).unwrap(), [true]);
}

#[test]
fn a_worker_that_ends_with_its_owner_keeps_nobody_waiting() {
    let place = Place::new("Dax", "", "1MiB");
    let depot = place.serve();
    let worker = Mover::attach(&place.socket(), Some(1), true).unwrap();
    worker.end_with_owner().unwrap();
    let reserved = reserve(&depot, 1, 20_000).unwrap();
    let buffers = BlockBuffers::whole([common::block(1, 20_000)]);
    let job = worker.store(&[reserved.placement()], &buffers, 0).unwrap();
    assert!(job.wait(None) && job.checksums()[0].is_some() && !worker.has_ended());
    // Somebody has an eye on the memory itself.
    let view = worker.media();
    depot.close();
    common::eventually("the end", || worker.has_ended());
    assert_eq!(worker.media().len(), 0);
    let next = place.serve();
    assert_eq!(reserve(&next, 1, 20_000), None, "it may still be written");
    drop(view);
    let again = reserve(&next, 1, 20_000).expect("the worker does not write any more");
    for placement in [reserved.placement(), again.placement()] {
        let late = worker.store(&[placement], &buffers, 0).unwrap();
        assert!(late.wait(None) && late.error().is_some());
        assert_eq!(late.checksums(), [None]);
    }
    namespace(&next).abort(&[again]);
}

#[test]
fn an_owner_is_not_kept_out_by_its_own_workers() {
    let place = Place::new("Cache|Dax", "1MiB", "4MiB");
    let depot = place.serve();
    // They attach before anything was ever reserved.
    let _one = Mover::attach(&place.socket(), Some(1), true).unwrap();
    let _two = Mover::attach(&place.socket(), Some(1), true).unwrap();
    let _reader = Mover::attach(&place.socket(), Some(1), false).unwrap();
    assert_eq!(put(&namespace(&depot), &[1], 5000), [true]);
    depot.close();
    assert_eq!(verify(&place.arena()).sound, 1);
}

#[test]
fn a_reader_holds_nobody_up_and_cannot_write() {
    let place = Place::new("Cache|Dax", "1MiB", "4MiB");
    let depot = place.serve();
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1], 5000), [true]);
    let reader = Mover::attach(&place.socket(), Some(1), false).unwrap();
    let reserved = reserve(&depot, 2, 5000).unwrap();
    let buffers = BlockBuffers::whole([common::block(2, 5000)]);
    assert!(reader.store(&[reserved.placement()], &buffers, 0).is_err());
    assert!(reader.media().iter().all(|medium| !medium.is_writable()));
    ns.abort(&[reserved]);
    depot.close();
    let next = place.serve();
    assert!(reserve(&next, 3, 5000).is_some());
}

#[test]
fn where_a_block_lies_is_told_only_to_whom_the_next_owner_waits_for() {
    use kvdepot_host::lock::{self, Kind};
    let place = Place::new("Dax", "", "4MiB");
    let depot = place.serve();
    assert_eq!(put(&namespace(&depot), &[1], 20_000), [true]);
    depot.close();
    // One that worked for that owner, and goes on for a while.
    let orphan = std::fs::File::open(place.arena()).unwrap();
    assert!(lock::try_lock(&orphan, 1, Kind::Shared).unwrap());
    let depot = place.serve();
    let ns = namespace(&depot);
    let pin = ns.pin(&[key(1)], false).unwrap().remove(0).unwrap();
    let reader = Mover::attach(&place.socket(), Some(1), false).unwrap();
    let refused = reader.locate(&pin.placement(), 0);
    assert!(matches!(&refused, Err(Error::Input { field, .. }) if field == "write"));
    // The owner can give this one no lock yet that would outlive it.
    let early = Mover::attach(&place.socket(), Some(1), true).unwrap();
    assert_eq!(early.locate(&pin.placement(), 0).unwrap(), []);
    let buffer = kvdepot_store::Buffer::from_vec(vec![0; 20_000]);
    for mover in [&reader, &early] {
        let job = mover.load(
            &[pin.placement()],
            &BlockBuffers::whole([buffer.clone()]),
            0,
        );
        assert!(job.unwrap().wait(Some(common::PATIENCE)));
        assert_eq!(buffer.to_vec(), kvdepot_testkit::bytes::content(1, 20_000));
    }
    drop(orphan);
    common::eventually("the owner is alone", || put(&ns, &[2], 20_000) == [true]);
    assert_eq!(early.locate(&pin.placement(), 0).unwrap().len(), 1);
    drop(reader);
    ns.unpin(&[pin], false);
    depot.close();
    // A device may be reading what it was told of.
    let depot = place.serve();
    let room = || reserve(&depot, 9, 20_000);
    assert_eq!(room(), None);
    drop(early);
    common::eventually("room", || room().is_some());
}

#[test]
fn a_second_opener_learns_who_the_owner_is() {
    const TEST: &str = "ownership::a_second_opener_learns_who_the_owner_is";
    if let Some(role) = child::role() {
        return play(&role);
    }
    let place = Place::new("Dax", "", "1MiB");
    let spec = place.spec();
    let mut owner = Child::start(TEST, "owner", &[("spec", &spec)]);
    owner.line().unwrap();
    let error = kvdepot_service::open(&place.config()).err().unwrap();
    let text = error.to_string();
    let Error::Locked { pid, host, .. } = error else {
        panic!("{text}")
    };
    assert_eq!(pid, owner.pid());
    let own = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    assert_eq!(host, own.trim());
    assert!(
        text.contains(&pid.to_string()) && text.contains(&host),
        "{text}"
    );
    // The tools see it too, and read beside it.
    let inspection = kvdepot_store::inspect::Inspection::open(&place.arena()).unwrap();
    let (page, held) = inspection.owner();
    assert!(held && page.unwrap().pid == owner.pid());
    assert_eq!(verify(&place.arena()).sound, 3);
    // Waiting ends as soon as it is gone.
    let patient = Place::with(place, "", "lock_wait", "30s");
    let config = patient.config();
    let waiting =
        std::thread::spawn(move || kvdepot_service::open(&config).map(|depot| depot.close()));
    std::thread::sleep(Duration::from_millis(50));
    assert!(!waiting.is_finished());
    let begun = Instant::now();
    owner.kill();
    waiting.join().unwrap().unwrap();
    assert!(
        begun.elapsed() < Duration::from_secs(10),
        "the dead owner's lock outlived it"
    );
    assert!(!inspection.owner().1);
}

#[test]
fn within_one_process_too_there_is_one_owner() {
    let place = Place::new("Dax", "", "1MiB");
    let depot = place.serve();
    let error = kvdepot_service::open(&place.config()).err().unwrap();
    assert!(
        matches!(error, Error::Locked { pid, .. } if pid == std::process::id()),
        "{error}"
    );
    depot.close();
    place.serve();
}

#[test]
fn many_openers_of_a_missing_file_make_one_arena() {
    for _ in 0..kvdepot_testkit::rounds(5) {
        let place = Place::new("Dax", "", "1MiB")
            .with("", "lock_wait", "30s")
            .with("", "socket", "off");
        let threads: Vec<_> = (0..6)
            .map(|number| {
                let config = place.config();
                std::thread::spawn(move || {
                    let depot = loop {
                        match kvdepot_service::open(&config) {
                            // Another thread's, which nobody waits for.
                            Err(Error::Locked { .. }) => std::thread::yield_now(),
                            opened => break opened.unwrap(),
                        }
                    };
                    // While others try to open it, it may not be known to be nobody else's.
                    common::eventually("a put", || {
                        put(&namespace(&depot), &[number], 1000) == [true]
                    });
                    let created = depot.opening().created;
                    depot.close();
                    created
                })
            })
            .collect();
        let created = threads
            .into_iter()
            .filter_map(|thread| thread.join().unwrap().then_some(()));
        // Another may have the lock before the one that made the file, which then opens it again.
        assert!(created.count() <= 1);
        assert_eq!(verify(&place.arena()).sound, 6);
        let left = std::fs::read_dir(place.dir()).unwrap().count();
        assert_eq!(left, 1, "nothing but the arena");
    }
}

#[test]
fn no_room_on_the_file_system_is_an_error_that_leaves_no_file() {
    // More than any machine has, so that nothing depends on how full this one is.
    let place = Place::new("Dax", "", "64TiB");
    let error = kvdepot_service::open(&place.config())
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.contains("dax.capacity") && error.contains("64 TiB"),
        "{error}"
    );
    assert_eq!(std::fs::read_dir(place.dir()).unwrap().count(), 0);
    let place = Place::new("Dax", "", "1MiB");
    place.serve().close();
    assert!(
        allocated(&place) >= 1 << 20,
        "the space is really allocated"
    );
}

fn allocated(place: &Place) -> u64 {
    std::fs::metadata(place.arena()).unwrap().blocks() * 512
}

#[test]
fn a_file_with_holes_gets_its_space_before_anything_is_written() {
    let blank = Place::new("Dax", "", "4MiB");
    let sparse = std::fs::File::create(blank.arena()).unwrap();
    sparse.set_len(8 << 20).unwrap();
    let depot = blank.serve();
    let used = allocated(&blank);
    assert!(
        (4 << 20..6 << 20).contains(&used),
        "{used}: the arena's, and no more"
    );
    assert_eq!(put(&namespace(&depot), &[1, 2], 20_000), [true; 2]);
    depot.close();
    // Copied as `cp --sparse=always` does.
    let place = Place::new("Dax", "", "4MiB");
    let bytes = std::fs::read(blank.arena()).unwrap();
    let copy = std::fs::File::create(place.arena()).unwrap();
    copy.set_len(8 << 20).unwrap();
    for (page, at) in bytes.chunks(4096).zip((0..).step_by(4096)) {
        if page.iter().any(|byte| *byte != 0) {
            copy.write_all_at(page, at).unwrap();
        }
    }
    assert!(allocated(&place) < 1 << 20);
    let depot = place.serve();
    assert!(has(&namespace(&depot), &[1, 2], 20_000));
    assert!(allocated(&place) >= 4 << 20);
}

#[test]
fn a_file_whose_holes_find_no_room_is_refused_and_keeps_its_content() {
    // More than any machine has.
    let place = Place::new("Dax", "", "64TiB").with("dax", "format", true);
    let file = std::fs::File::create(place.arena()).unwrap();
    file.set_len(64 << 40).unwrap();
    file.write_all_at(b"precious", 0).unwrap();
    let error = kvdepot_service::open(&place.config())
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.contains("dax.capacity") && error.contains("64 TiB"),
        "{error}"
    );
    let mut begin = [0; 8];
    let file = std::fs::File::open(place.arena()).unwrap();
    file.read_exact_at(&mut begin, 0).unwrap();
    assert_eq!(&begin, b"precious");
}

#[test]
fn what_a_killed_creator_left_is_in_nobodys_way() {
    let place = Place::new("Dax", "", "1MiB");
    std::fs::write(place.dir().join(".arena.unfinished"), [0; 5000]).unwrap();
    let depot = place.serve();
    assert!(depot.opening().created);
    assert_eq!(put(&namespace(&depot), &[1], 1000), [true]);
    depot.close();
    assert_eq!(std::fs::read_dir(place.dir()).unwrap().count(), 1);
}

#[test]
fn closing_does_not_hang_when_the_socket_was_removed() {
    let place = Place::new("Cache", "1MiB", "");
    let depot = place.serve();
    std::fs::remove_file(place.socket()).unwrap();
    depot.close();
    // A socket that a killed owner left is replaced.
    let left = std::os::unix::net::UnixListener::bind(place.socket()).unwrap();
    drop(left);
    assert!(place.socket().exists());
    let depot = place.serve();
    assert!(Mover::attach(&place.socket(), Some(1), true).is_ok());
    depot.close();
    assert!(!place.socket().exists());
}

#[test]
fn generations_count_openings() {
    let place = Place::new("Dax", "", "1MiB");
    for opening in 1..6 {
        place.serve().close();
        assert_eq!(Raw::open(&place.arena()).superblock.generation, opening);
    }
}
