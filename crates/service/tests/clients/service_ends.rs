//! Depots that another process serves: what the end of either side does to the other.

#![expect(
    unsafe_code,
    reason = "stops another process and lets it go on, and breaks connections"
)]

use std::io::{Read, Write};
use std::slice::from_ref;
use std::time::{Duration, Instant};

use crate::common;
use crate::common::frames::{Bare, PIN, break_connections, frame, with_keys};
use crate::common::{
    PATIENCE, Place, Served, assert_at_rest, config_of, eventually, get, has, key, keys, namespace,
    put, start_put,
};
use kvdepot_service::Mover;
use kvdepot_store::{BlockBuffers, Buffer, Depot, Outcome};
use kvdepot_testkit::child::{self, Child};

const LEN: usize = 40_000;

fn connect(place: &Place) -> Depot {
    kvdepot_service::connect(&place.socket(), Some(2)).unwrap()
}

fn unhex(text: &str) -> Vec<u8> {
    let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(byte).collect()
}

fn signal(child: &Child, number: libc::c_int) {
    // SAFETY: sends a signal to a child of this process.
    unsafe { assert_eq!(libc::kill(child.pid() as libc::pid_t, number), 0) };
}

#[test]
fn killing_clients_harms_nobody_and_gives_everything_back() {
    const TEST: &str = "service_ends::killing_clients_harms_nobody_and_gives_everything_back";
    if child::role().is_some() {
        let socket = child::value("socket");
        let client = kvdepot_service::connect(socket.as_ref(), Some(1)).unwrap();
        let ns = namespace(&client);
        let base: u64 = child::value("base").parse().unwrap();
        let _pins = ns.pin(&keys(0..20), false).unwrap();
        let _reserved = ns.reserve(&[(key(base), vec![LEN as u64])]).unwrap();
        child::say("at work");
        for round in 1u64.. {
            let numbers: Vec<u64> = (base + round * 8..base + round * 8 + 8).collect();
            let task = start_put(&ns, &numbers, LEN);
            assert!(has(&ns, &(0..20).collect::<Vec<_>>(), LEN));
            if task.wait(None).unwrap().iter().all(|stored| *stored) {
                numbers
                    .iter()
                    .for_each(|number| child::say(&format!("stored {number}")));
            }
        }
    }
    let place = Place::new("Dax", "", "64MiB");
    let owner = place.serve();
    let ns = namespace(&owner);
    let fixed: Vec<u64> = (0..20).collect();
    put(&ns, &fixed, LEN);
    let socket = place.socket();
    let mut stored = Vec::new();
    for round in 0..6u64 {
        let base = (round + 1) * 1_000_000;
        let values = [
            ("socket", socket.to_str().unwrap()),
            ("base", &base.to_string()),
        ];
        let mut children: Vec<Child> = (0..2)
            .map(|_| Child::start(TEST, "client", &values))
            .collect();
        children
            .iter_mut()
            .for_each(|child| child.expect("at work"));
        let mut said = Vec::new();
        for child in &mut children {
            said.extend(child.wait_for("stored", 1));
        }
        std::thread::sleep(Duration::from_millis(5 + round * 7));
        for child in &mut children {
            said.extend(child.kill_and_rest());
        }
        let numbers = said.iter().filter_map(|line| line.strip_prefix("stored "));
        stored.extend(numbers.map(|number| number.parse::<u64>().unwrap()));
        eventually("the end of the clients", || {
            let stats = owner.stats();
            stats.tiers[0].pinned_blocks + stats.tiers[0].reserved_blocks == 0
        });
        assert!(has(&ns, &fixed, LEN));
    }
    stored.sort_unstable();
    stored.dedup();
    assert!(!stored.is_empty());
    // The newest, which cannot have been evicted: what was acknowledged is there.
    let newest: Vec<u64> = stored.iter().rev().take(200).copied().collect();
    assert!(has(&ns, &newest, LEN));
    assert_at_rest(&owner);
}

#[test]
fn what_a_dead_client_reserved_is_kept_while_a_mover_is_still_at_it() {
    const TEST: &str =
        "service_ends::what_a_dead_client_reserved_is_kept_while_a_mover_is_still_at_it";
    // So long that the copy of it can be stopped on its way.
    const LONG: usize = 96 << 20;
    match child::role().as_deref() {
        Some("scheduler") => {
            let client =
                kvdepot_service::connect(child::value("socket").as_ref(), Some(1)).unwrap();
            let number = child::value("key").parse().unwrap();
            let reserved = namespace(&client).reserve(&[(key(number), vec![LONG as u64])]);
            let placement = reserved.unwrap()[0].as_ref().unwrap().placement();
            let hex: String = placement.iter().map(|byte| format!("{byte:02x}")).collect();
            child::say(&hex);
            child::sleep_until_killed();
        }
        Some(_) => {
            let mover = Mover::attach(child::value("socket").as_ref(), Some(1), true).unwrap();
            let placement = unhex(&child::value("placement"));
            let bytes = BlockBuffers::whole([Buffer::from_vec(vec![1; LONG])]);
            let job = mover.store(&[placement], &bytes, 0).unwrap();
            child::say("storing");
            assert!(job.wait(None));
            child::say("stored");
            child::sleep_until_killed();
        }
        None => {}
    }
    let place = Place::new("Cache", "512MiB", "");
    let owner = place.serve();
    let socket = place.socket();
    let socket = socket.to_str().unwrap();
    let reserved = || owner.stats().tiers[0].reserved_blocks;
    let mut kept = [false; 2];
    for attempt in 0..20 {
        let key = attempt.to_string();
        let mut scheduler = Child::start(TEST, "scheduler", &[("socket", socket), ("key", &key)]);
        let placement = scheduler.line().unwrap();
        let values = [("socket", socket), ("placement", placement.as_str())];
        let mut worker = Child::start(TEST, "worker", &values);
        worker.expect("storing");
        signal(&worker, libc::SIGSTOP);
        scheduler.kill();
        std::thread::sleep(Duration::from_millis(300));
        // Unless the copy was done already: then another attempt tells.
        let dies = attempt % 2 == 1;
        kept[usize::from(dies)] |= reserved() == 1;
        if dies {
            worker.kill();
        } else {
            signal(&worker, libc::SIGCONT);
            worker.expect("stored");
        }
        eventually("the end of the reservation", || reserved() == 0);
        // What is told late is refused: the room may be another block's by now.
        let mover = Mover::attach(&place.socket(), Some(1), true).unwrap();
        let bytes = BlockBuffers::whole([Buffer::from_vec(vec![1; LONG])]);
        let placement = unhex(&placement);
        let late = mover.store(from_ref(&placement), &bytes, 0).unwrap();
        assert!(late.wait(Some(PATIENCE)));
        assert_eq!(late.checksums(), [None]);
        assert!(late.error().unwrap().contains("a client that has exited"));
        assert_eq!(mover.locate(&placement, 0).unwrap(), []);
        drop(mover);
        if kept == [true; 2] {
            return assert_at_rest(&owner);
        }
    }
    panic!("kept while the worker was stopped: {kept:?}");
}

#[test]
fn a_client_whose_connection_breaks_goes_on_with_what_it_holds() {
    const TEST: &str = "service_ends::a_client_whose_connection_breaks_goes_on_with_what_it_holds";
    if child::role().is_some() {
        let socket = child::value("socket");
        let client = kvdepot_service::connect(socket.as_ref(), Some(1)).unwrap();
        let ns = namespace(&client);
        let pins = ns.pin(&keys(0..20), false).unwrap();
        let pins: Vec<_> = pins.into_iter().flatten().collect();
        let reserved = ns.reserve(&[(key(100), vec![LEN as u64])]).unwrap();
        let reserved: Vec<_> = reserved.into_iter().flatten().collect();
        assert_eq!((pins.len(), reserved.len()), (20, 1));
        assert!(client.gone(9).unwrap().blocks.is_empty());
        child::say("holds");
        break_connections(socket.as_ref());
        eventually("another link", || ns.prefix(&keys([0])).unwrap() == 1);
        child::say("is back");
        eventually("what left", || {
            let gone = client.gone(9).unwrap();
            assert!(!gone.overflowed);
            gone.blocks.len() == 1
        });
        ns.unpin(&pins, true);
        let mover = Mover::attach(socket.as_ref(), Some(1), true).unwrap();
        let bytes = BlockBuffers::whole([common::block(100, LEN)]);
        let job = mover.store(&[reserved[0].placement()], &bytes, 0).unwrap();
        assert!(job.wait(Some(PATIENCE)));
        let sums = [vec![job.checksums()[0].unwrap()]];
        assert_eq!(ns.commit(&reserved, &sums).unwrap(), [true]);
        child::say("committed");
        child::sleep_until_killed();
    }
    let place = Place::new("Dax", "", "16MiB");
    let owner = place.serve();
    let ns = namespace(&owner);
    put(&ns, &(0..21).collect::<Vec<u64>>(), LEN);
    let held = || {
        let tier = &owner.stats().tiers[0];
        (tier.pinned_blocks, tier.reserved_blocks)
    };
    let socket = place.socket();
    let mut client = Child::start(TEST, "client", &[("socket", socket.to_str().unwrap())]);
    client.expect("holds");
    client.expect("is back");
    assert_eq!(held(), (20, 1));
    assert_eq!(ns.remove(&keys([20])).unwrap(), 1);
    client.expect("committed");
    assert_eq!(held(), (0, 0));
    assert!(has(&ns, &[100], LEN));
    client.kill();
    assert_at_rest(&owner);
}

#[test]
fn a_grant_that_nobody_heard_of_is_given_back() {
    let place = Place::new("Dax", "", "4MiB");
    let owner = place.serve();
    put(&namespace(&owner), &[1, 2], LEN);
    let id = namespace(&owner).id();
    let client = Bare::attach(&place.socket(), 0);
    let mut socket = &client.calls;
    let pin = |number: u64| frame(PIN, number, &with_keys(id, &[0], &[key(number)]));
    let pinned = || owner.stats().tiers[0].pinned_blocks;
    socket.write_all(&pin(1)).unwrap();
    let mut answer = [0; 16 + 77];
    socket.read_exact(&mut answer).unwrap();
    eventually("the pin", || pinned() == 1);
    // From here on nothing that the owner says arrives.
    socket.shutdown(std::net::Shutdown::Read).unwrap();
    socket.write_all(&pin(2)).unwrap();
    // It has hung up after that.
    eventually("the end", || socket.write_all(&pin(2)).is_err());
    assert_eq!(pinned(), 1);
}

#[test]
fn whoever_joined_a_put_of_a_client_that_dies_takes_over() {
    const TEST: &str = "service_ends::whoever_joined_a_put_of_a_client_that_dies_takes_over";
    if child::role().is_some() {
        let socket = child::value("socket");
        let client = kvdepot_service::connect(socket.as_ref(), Some(1)).unwrap();
        let reserved = namespace(&client)
            .reserve(&[(key(1), vec![LEN as u64])])
            .unwrap();
        assert!(reserved[0].is_some());
        child::say("reserved");
        child::sleep_until_killed();
    }
    let place = Place::new("Dax", "", "4MiB");
    let owner = place.serve();
    let socket = place.socket();
    let values = [("socket", socket.to_str().unwrap())];
    let mut dying = Child::start(TEST, "client", &values);
    dying.expect("reserved");
    let client = connect(&place);
    let tasks = [
        start_put(&namespace(&owner), &[1], LEN),
        start_put(&namespace(&client), &[1], LEN),
    ];
    std::thread::sleep(Duration::from_millis(50));
    assert!(tasks.iter().all(|task| !task.is_done()));
    dying.kill();
    for task in tasks {
        assert_eq!(task.wait(Some(PATIENCE)).unwrap(), [true]);
    }
    assert!(has(&namespace(&client), &[1], LEN));
    client.close();
    assert_at_rest(&owner);
}

#[test]
fn a_client_outlives_its_owner_and_finds_the_next_one() {
    const TEST: &str = "service_ends::a_client_outlives_its_owner_and_finds_the_next_one";
    if child::role().is_some() {
        let _depot = kvdepot_service::open(&config_of(&child::value("spec"))).unwrap();
        child::say("open");
        child::sleep_until_killed();
    }
    let place = Place::new("Cache|Dax", "4MiB", "16MiB");
    let spec = place.spec();
    let mut owner = Child::start(TEST, "owner", &[("spec", &spec)]);
    owner.expect("open");
    let client = connect(&place);
    let ns = namespace(&client);
    let numbers: Vec<u64> = (0..50).collect();
    assert!(put(&ns, &numbers, LEN).iter().all(|stored| *stored));
    let pins = ns.pin(&keys([1, 2]), false).unwrap();
    let pins: Vec<_> = pins.into_iter().flatten().collect();
    let under_way = start_put(&ns, &(100..150).collect::<Vec<u64>>(), LEN);
    owner.kill();
    // Whatever was under way ends, and everything is a miss.
    under_way.wait(Some(PATIENCE)).unwrap();
    assert_eq!(ns.prefix(&keys([0])).unwrap(), 0);
    assert_eq!(get(&ns, &[0], LEN), [Outcome::Miss]);
    assert_eq!(put(&ns, &[500], LEN), [false]);
    assert!(ns.pin(&keys([0]), false).unwrap()[0].is_none());
    let mut owner = Child::start(TEST, "owner", &[("spec", &spec)]);
    owner.expect("open");
    eventually("the next owner", || ns.prefix(&keys([0])).unwrap() == 1);
    // Pins of the last owner name nothing here.
    ns.unpin(&pins, true);
    assert!(has(&ns, &numbers, LEN));
    // This process no longer maps the last owner's media, so the new one may allocate.
    eventually("room", || put(&ns, &[600], LEN) == [true]);
    assert!(has(&ns, &[600], LEN));
    owner.kill();
}

#[test]
fn an_owner_that_closes_does_not_wait_for_a_stopped_client() {
    const TEST: &str = "service_ends::an_owner_that_closes_does_not_wait_for_a_stopped_client";
    if child::role().is_some() {
        let socket = child::value("socket");
        let client = kvdepot_service::connect(socket.as_ref(), Some(1)).unwrap();
        let ns = namespace(&client);
        child::say("at work");
        for round in 0.. {
            let numbers: Vec<u64> = (round * 64..round * 64 + 64).collect();
            start_put(&ns, &numbers, LEN).wait(None).unwrap();
        }
    }
    let place = Place::new("Dax", "", "16MiB").with("", "close_timeout", "300ms");
    for _ in 0..3 {
        let owner = place.serve();
        let socket = place.socket();
        let mut child = Child::start(TEST, "client", &[("socket", socket.to_str().unwrap())]);
        child.expect("at work");
        eventually("puts", || owner.stats().put_acknowledged_blocks > 100);
        signal(&child, libc::SIGSTOP);
        let begun = Instant::now();
        owner.close();
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "{:?}",
            begun.elapsed()
        );
        child.kill();
        assert!(common::verify(&place.arena()).bad.is_empty());
    }
}

#[test]
fn a_client_that_was_stopped_while_its_owner_closed_lets_go_of_no_buffer_that_it_still_fills() {
    const TEST: &str = concat!(
        "service_ends::",
        "a_client_that_was_stopped_while_its_owner_closed_lets_go_of_no_buffer_that_it_still_fills"
    );
    const LARGE: usize = 8 << 20;
    if child::role().is_some() {
        let socket = child::value("socket");
        let client = kvdepot_service::connect(socket.as_ref(), Some(1)).unwrap();
        let ns = namespace(&client);
        assert_eq!(put(&ns, &[1, 2], LARGE), [true; 2]);
        let mine: Vec<Buffer> = (0..2).map(|_| Buffer::from_vec(vec![0; LARGE])).collect();
        child::say("at work");
        while client.is_connected() {
            let task = ns.get(keys([1, 2]), BlockBuffers::whole(mine.clone()));
            task.unwrap().wait(Some(PATIENCE)).unwrap();
            // From here on they are the caller's again.
            for buffer in &mine {
                buffer.write_at(LARGE - 8, &[0xAB; 8]).unwrap();
            }
            std::thread::sleep(Duration::from_millis(5));
            for buffer in &mine {
                assert_eq!(buffer.to_vec()[LARGE - 8..], [0xAB; 8]);
            }
        }
        child::say("over");
        return;
    }
    let place = Place::new("Dax", "", "64MiB").with("", "close_timeout", "0s");
    for round in 0..8 {
        let owner = place.serve();
        let socket = place.socket();
        let mut child = Child::start(TEST, "client", &[("socket", socket.to_str().unwrap())]);
        child.expect("at work");
        std::thread::sleep(Duration::from_millis(round));
        signal(&child, libc::SIGSTOP);
        owner.close();
        signal(&child, libc::SIGCONT);
        child.expect("over");
    }
}
