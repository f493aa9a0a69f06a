//! What one peer of a socket can take from all others: nothing, or no more than its part. Clients
//! that stand still, that say nothing, that do not read, that claim much, or that talk nonsense.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::common;
use crate::common::frames::{self, Bare, VERSION, frame, hello, read_frame, with_keys};
use crate::common::{
    PATIENCE, Place, Served, assert_at_rest, config_of, eventually, has, key, keys, namespace, put,
};
use kvdepot_service::Mover;
use kvdepot_store::{Depot, Error};
use kvdepot_testkit::child::{self, Child};
use kvdepot_testkit::log::Log;
use kvdepot_testkit::seed::{self, Rng};
use rustix::process::{Resource, getrlimit, setrlimit};

const LEN: usize = 60_000;

/// A pipeline whose queue takes 2 MiB.
fn pipeline() -> Place {
    Place::new("Cache|Dax", "16MiB", "64MiB")
        .with("", "write_back_depth", "2MiB")
        .with("", "overload", "drop")
}

/// Bytes of a process's memory that are in use.
fn memory(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find(|line| line.starts_with("RssAnon:"));
    let kib = line.unwrap().split_whitespace().nth(1).unwrap();
    kib.parse::<u64>().unwrap() << 10
}

/// An owner in a process of its own, so that its memory can be looked at.
fn owner_of(test: &str, place: &Place) -> Child {
    let dir = place.dir().to_str().unwrap();
    let mut owner = Child::start(test, "owner", &[("spec", &place.spec()), ("dir", dir)]);
    owner.expect("open");
    owner
}

fn be_owner() -> ! {
    // Where noise may name files.
    std::env::set_current_dir(child::value("dir")).unwrap();
    let _depot = kvdepot_service::open(&config_of(&child::value("spec"))).unwrap();
    child::say("open");
    child::sleep_until_killed();
}

#[test]
fn a_client_that_stands_still_leaves_room_in_the_queue_for_others() {
    let place = pipeline();
    let owner = place.serve();
    let id = namespace(&owner).id();
    let mut stopped = Bare::attach(&place.socket(), 0);
    // Far more than the queue takes; the moves that are asked for are never made.
    let many = keys(1000..1100);
    let request = frames::put(1, id, &many, LEN as u64);
    stopped.tasks.write_all(&request).unwrap();
    eventually("reservations", || {
        owner.stats().tiers[0].reserved_blocks > 0
    });
    let client = kvdepot_service::connect(&place.socket(), Some(1)).unwrap();
    let ns = namespace(&client);
    for number in 0..40 {
        assert_eq!(put(&ns, &[number], LEN), [true], "block {number}");
    }
    // The same by the two-phase verbs.
    let other = kvdepot_service::connect(&place.socket(), Some(1)).unwrap();
    let blocks: Vec<_> = keys(2000..2100)
        .into_iter()
        .map(|key| (key, vec![LEN as u64]))
        .collect();
    let kept = namespace(&other).reserve(&blocks).unwrap();
    assert!(kept.iter().flatten().count() > 0);
    for number in 40..80 {
        assert_eq!(put(&ns, &[number], LEN), [true], "block {number}");
    }
    assert!(has(&namespace(&owner), &(0..80).collect::<Vec<u64>>(), LEN));
    stopped
        .tasks
        .write_all(&frame(frames::GOODBYE, 0, &[]))
        .unwrap();
    other.close();
    eventually("the end", || owner.stats().write_back_bytes == 0);
    eventually("the end", || owner.stats().tiers[0].reserved_blocks == 0);
    assert_at_rest(&owner);
}

#[test]
fn a_head_that_claims_much_costs_what_has_come() {
    const TEST: &str = "share_bounds::a_head_that_claims_much_costs_what_has_come";
    if child::role().is_some() {
        be_owner();
    }
    let place = Place::new("Cache", "1MiB", "");
    let owner = owner_of(TEST, &place);
    let mut clients: Vec<Bare> = (0..20).map(|_| Bare::attach(&place.socket(), 0)).collect();
    let before = memory(owner.pid());
    for client in &mut clients {
        let mut head = frame(2, 1, &[]);
        head[..4].copy_from_slice(&(128u32 << 20).to_le_bytes());
        for socket in [&mut client.calls, &mut client.tasks] {
            socket.write_all(&head).unwrap();
            socket.write_all(&[0; 1000]).unwrap();
        }
    }
    std::thread::sleep(Duration::from_millis(500));
    let more = memory(owner.pid()).saturating_sub(before);
    assert!(more < 16 << 20, "{more} bytes for 40 heads");
}

#[test]
fn a_body_that_is_longer_than_any_call_ends_that_connection() {
    let place = Place::new("Cache", "1MiB", "");
    let _owner = place.serve();
    let mut client = Bare::attach(&place.socket(), 0);
    let mut head = frame(2, 1, &[]);
    head[..4].copy_from_slice(&((128u32 << 20) + 1).to_le_bytes());
    client.calls.write_all(&head).unwrap();
    assert!(read_frame(&client.calls).is_none());
    // A call of too many keys is refused, and its connection goes on.
    let mut client = Bare::attach(&place.socket(), 0);
    let id = kvdepot_store::NamespaceId([1; 16]);
    let many = vec![key(1); (1 << 20) + 1];
    let (status, refusal) = client.ask(3, &with_keys(id, &[], &many));
    assert_eq!((status, refusal[0]), (1, frames::INPUT));
    assert_eq!(client.ask(3, &with_keys(id, &[], &many[..9])).0, 0);
}

#[test]
fn peers_that_say_nothing_hold_nobody_up() {
    let place = Place::new("Cache", "1MiB", "");
    let _owner = place.serve();
    let begun = Instant::now();
    let mut silent: Vec<UnixStream> = Vec::new();
    for round in 0..200 {
        let mut socket = UnixStream::connect(place.socket()).unwrap();
        // Some begin to speak.
        socket
            .write_all(&hello(VERSION, 2, 0)[..round % 32])
            .unwrap();
        silent.push(socket);
        if round % 20 == 0 {
            assert!(Mover::attach(&place.socket(), Some(1), true).is_ok());
        }
    }
    let client = kvdepot_service::connect(&place.socket(), Some(1)).unwrap();
    assert_eq!(put(&namespace(&client), &[1], 100), [true]);
    assert!(
        begun.elapsed() < Duration::from_secs(30),
        "{:?}",
        begun.elapsed()
    );
    // Who goes on in time is welcomed, and the others are told that they are too late.
    let last = &mut silent[199];
    last.write_all(&hello(VERSION, 2, 0)[199 % 32..]).unwrap();
    let mut welcome = [0; 16];
    last.read_exact(&mut welcome).unwrap();
    assert_eq!(&welcome[12..], [0; 4]);
    let refusal = |socket: &mut UnixStream| {
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut answer = Vec::new();
        let _end = socket.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    };
    assert!(refusal(&mut silent[0]).contains("in time"));
    assert!(refusal(&mut silent[198]).contains("in time"));
    assert!(begun.elapsed() >= Duration::from_secs(4));
}

#[test]
fn a_process_attaches_a_bounded_number_of_times() {
    let place = Place::new("Cache", "1MiB", "");
    let _owner = place.serve();
    let attach = || Mover::attach(&place.socket(), Some(1), false);
    let mut movers = Vec::new();
    let error = loop {
        match attach() {
            Ok(mover) => movers.push(mover),
            Err(error) => break error,
        }
        assert!(movers.len() <= 256);
    };
    // Each has descriptors of the owner.
    let most = 256.min(getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) / 16);
    let reached = format!("{most} of them");
    assert!(
        matches!(&error, Error::Peer { reason, .. } if reason.contains(&reached)),
        "{error}"
    );
    movers.pop();
    eventually("room", || attach().is_ok());
}

#[test]
fn those_who_attach_leave_descriptors_to_the_owner() {
    const TEST: &str = "share_bounds::those_who_attach_leave_descriptors_to_the_owner";
    if child::role().is_some() {
        let mut limit = getrlimit(Resource::Nofile);
        limit.current = Some(400);
        setrlimit(Resource::Nofile, limit).unwrap();
        be_owner();
    }
    let place = Place::new("Cache", "1MiB", "");
    let _owner = owner_of(TEST, &place);
    let attach = || kvdepot_service::connect(&place.socket(), Some(1));
    let clients: Vec<Depot> = (0..25).map(|_| attach().unwrap()).collect();
    let error = attach().err().unwrap();
    assert!(error.to_string().contains("at most 25, and"), "{error}");
    for client in &clients {
        let ns = namespace(client);
        assert_eq!(put(&ns, &[1], LEN), [true]);
        assert!(has(&ns, &[1], LEN));
    }
}

#[test]
fn a_client_that_does_not_read_loses_its_connection_at_a_bound() {
    const TEST: &str = "share_bounds::a_client_that_does_not_read_loses_its_connection_at_a_bound";
    if child::role().is_some() {
        be_owner();
    }
    let place = Place::new("Cache", "1MiB", "");
    let owner = owner_of(TEST, &place);
    let before = memory(owner.pid());
    let mut client = Bare::attach(&place.socket(), 0);
    let body = with_keys(
        kvdepot_store::NamespaceId([1; 16]),
        &[],
        &vec![key(1); 100_000],
    );
    let begun = Instant::now();
    let mut most = 0;
    let ended = (1..).find(|number| {
        let sent = client
            .tasks
            .write_all(&frame(frames::PREFETCH, *number, &body));
        most = most.max(memory(owner.pid()));
        assert!(begun.elapsed() < PATIENCE);
        sent.is_err()
    });
    let more = most.saturating_sub(before);
    assert!(more < 300 << 20, "{more} bytes after {ended:?} tasks");
    // Of others it takes nothing.
    let other = kvdepot_service::connect(&place.socket(), Some(1)).unwrap();
    assert_eq!(put(&namespace(&other), &[1], 100), [true]);
    eventually("the end of its memory", || {
        memory(owner.pid()).saturating_sub(before) < 64 << 20
    });
}

#[test]
fn more_tasks_than_a_client_may_have_are_refused() {
    let place = Place::new("Dax", "", "4MiB");
    let owner = place.serve();
    let id = namespace(&owner).id();
    let mut client = Bare::attach(&place.socket(), 0);
    // One key, which its own first put is still writing: the others wait for that one.
    let mut reader = client.tasks.try_clone().unwrap();
    let writer = std::thread::spawn(move || {
        let many = vec![key(1); 1 << 18];
        for number in 1..=9 {
            client
                .tasks
                .write_all(&frames::put(number, id, &many, 5000))
                .unwrap();
        }
        client
    });
    let refused = loop {
        let (verb, _, number, body) = read_frame(&reader).unwrap();
        if verb == frames::REFUSED {
            break (number, body[0]);
        }
    };
    assert_eq!(refused, (9, frames::INPUT));
    let mut client = writer.join().unwrap();
    client
        .tasks
        .write_all(&frame(frames::GOODBYE, 0, &[]))
        .unwrap();
    let _end = reader.read_to_end(&mut Vec::new());
    eventually("the end", || owner.stats().tiers[0].reserved_blocks == 0);
    assert_at_rest(&owner);
}

/// A frame of noise that looks like one of the protocol, more or less.
fn noise(rng: &mut Rng, known: &[u8]) -> Vec<u8> {
    let verb = rng.below(56) as u16;
    let mut body = Vec::new();
    if rng.below(3) > 0 {
        body.extend_from_slice(known);
    }
    for _ in 0..rng.below(4) {
        match rng.below(4) {
            0 => body.push(rng.below(3) as u8),
            1 => body.extend(frames::rows(&(rng.below(5) as u32).to_le_bytes())),
            2 => body.extend(frames::rows(&key(rng.below(5)).0)),
            _ => body.extend((0..rng.below(40)).map(|_| rng.below(256) as u8)),
        }
    }
    if rng.below(8) == 0 {
        body.extend(frames::varint(rng.bits() >> rng.below(64)));
    }
    let mut bytes = frame(verb, rng.below(4), &body);
    if rng.below(10) == 0 {
        let claimed = rng.below(1 << 32) as u32;
        bytes[..4].copy_from_slice(&claimed.to_le_bytes());
    }
    bytes
}

/// Attaches again and again, and says what is no sense.
fn be_noisy() {
    let socket = child::value("socket");
    let id = child::value("id").parse::<u64>().unwrap();
    let mut rng = Rng::new(child::value("seed").parse().unwrap());
    let mut known = [0; 16];
    known[..8].copy_from_slice(&id.to_le_bytes());
    for number in 0..100 {
        // An owner with few descriptors has few clients, and those that do not say goodbye have
        // their places as long as this process lives.
        let calls = match Bare::try_first_half(socket.as_ref(), 0, 0) {
            Ok(calls) => calls,
            Err(refusal) => {
                assert!(number > 30, "{refusal}");
                break;
            }
        };
        let mut bare = Bare::of(socket.as_ref(), calls);
        for _ in 0..rng.below(12) {
            let bytes = noise(&mut rng, &known);
            let socket = match rng.below(2) {
                0 => &mut bare.calls,
                _ => &mut bare.tasks,
            };
            // The owner may have hung up.
            let _sent = socket.write_all(&bytes);
        }
        if rng.once_in(2) {
            let _sent = bare.tasks.write_all(&frame(frames::GOODBYE, 0, &[]));
        }
    }
    child::say("done");
    child::sleep_until_killed();
}

#[test]
fn noise_never_ends_the_owner_nor_grows_it_nor_leaves_anything_behind() {
    const TEST: &str =
        "share_bounds::noise_never_ends_the_owner_nor_grows_it_nor_leaves_anything_behind";
    match child::role().as_deref() {
        Some("owner") => be_owner(),
        Some(_) => return be_noisy(),
        None => {}
    }
    let place = Place::new("Dax", "", "4MiB").with("dax", "records", 1024);
    let owner = owner_of(TEST, &place);
    let client = kvdepot_service::connect(&place.socket(), Some(1)).unwrap();
    // A namespace that noise meets with.
    let mut id = kvdepot_store::NamespaceId([0; 16]);
    id.0[..8].copy_from_slice(&7u64.to_le_bytes());
    let ns = client.namespace_by_id(id);
    put(&ns, &[1, 2, 3], 5000);
    let mut rng = Rng::for_test(TEST);
    let before = memory(owner.pid());
    for _ in 0..seed::rounds(4) {
        let values = [
            ("socket", place.socket().to_str().unwrap().to_owned()),
            ("id", "7".to_owned()),
            ("seed", rng.bits().to_string()),
        ];
        let values = values
            .each_ref()
            .map(|(name, value)| (*name, value.as_str()));
        let mut noisy = Child::start(TEST, "noisy", &values);
        noisy.expect("done");
        let more = memory(owner.pid()).saturating_sub(before);
        assert!(more < 96 << 20, "{more} bytes");
        noisy.kill();
        eventually("the end of what it held", || {
            let tier = &client.stats().tiers[0];
            tier.pinned_blocks + tier.reserved_blocks == 0
        });
    }
    assert_eq!(put(&ns, &[700], 5000), [true]);
    assert!(has(&ns, &[700], 5000));
    client.close();
    drop(owner);
    assert!(common::verify(&place.arena()).bad.is_empty());
}

#[test]
fn requests_that_are_refused_are_one_line_a_minute() {
    let log = Log::default();
    tracing::subscriber::set_global_default(log.clone()).unwrap();
    let place = pipeline();
    let _owner = place.serve();
    for number in 0..20 {
        let mut one = UnixStream::connect(place.socket()).unwrap();
        one.set_read_timeout(Some(PATIENCE)).unwrap();
        // The tasks of a client that is unknown.
        one.write_all(&hello(VERSION, 3, 987_654_300 + number))
            .unwrap();
        let _refusal = one.read_to_end(&mut Vec::new());
    }
    // The owner logs after its answer, and before it takes the next connection; a machine that
    // stands still for a minute has a second line.
    let lines = log.lines_with("client 9876543");
    assert!((1..5).contains(&lines.len()), "{lines:?}");
}
