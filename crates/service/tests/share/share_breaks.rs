//! Connections that break while both processes live: what was being moved stays untouched until
//! the client says that it has stopped, and nobody waits for what cannot come any more.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::common;
use crate::common::frames::{
    self, Bare, CLOSING, CONTAINS, GOODBYE, MOVE, QUIET, VERSION, frame, hello,
};
use crate::common::{
    PATIENCE, Place, Served, assert_at_rest, eventually, has, key, keys, namespace, start_put,
};
use kvdepot_store::{Depot, Key, NamespaceId};
use kvdepot_testkit::child::{self, Child};

const LEN: usize = 40_000;

/// A client asks for one block to be stored.
fn ask_to_put(client: &mut Bare, id: NamespaceId, key: Key) {
    let request = frames::put(7, id, &[key], LEN as u64);
    client.tasks.write_all(&request).unwrap();
}

/// The head of what the owner says next.
fn next_verb(client: &mut Bare) -> u16 {
    let mut head = [0; 16];
    client.tasks.read_exact(&mut head).unwrap();
    let mut body = vec![0; u32::from_le_bytes(head[..4].try_into().unwrap()) as usize];
    client.tasks.read_exact(&mut body).unwrap();
    u16::from_le_bytes(head[4..6].try_into().unwrap())
}

fn reserved(owner: &Depot) -> u64 {
    owner.stats().tiers[0].reserved_blocks
}

#[test]
fn a_move_for_a_client_whose_connection_broke_fails_at_once() {
    let place = Place::new("Dax", "", "16MiB");
    let owner = place.serve();
    let ns = namespace(&owner);
    let first = ns.reserve(&[(key(1), vec![LEN as u64])]).unwrap();
    let first: Vec<_> = first.into_iter().flatten().collect();
    // Joins that reservation, and breaks.
    let mut client = Bare::attach(&place.socket(), 0);
    ask_to_put(&mut client, ns.id(), key(1));
    // A second call says when the first has been taken.
    ask_to_put(&mut client, ns.id(), key(2));
    assert_eq!(next_verb(&mut client), MOVE);
    let mine = start_put(&ns, &[1], LEN);
    client.tasks.shutdown(Shutdown::Both).unwrap();
    client.calls.shutdown(Shutdown::Both).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    // The client's put comes first, and has nobody to move for it.
    ns.abort(&first);
    assert_eq!(mine.wait(Some(PATIENCE)).unwrap(), [true]);
    assert!(has(&ns, &[1], LEN));
    // What it was told before is its own until it is quiet.
    assert_eq!(reserved(&owner), 1);
    let mut client = Bare::attach(&place.socket(), client.number);
    client.tasks.write_all(&frame(QUIET, 0, &[])).unwrap();
    eventually("the end of the move", || reserved(&owner) == 0);
    assert_at_rest(&owner);
}

#[test]
fn what_a_client_was_moving_is_kept_until_it_says_that_it_has_stopped() {
    let place = Place::new("Dax", "", "16MiB");
    let owner = place.serve();
    let ns = namespace(&owner);
    let mut client = Bare::attach(&place.socket(), 0);
    let number = client.number;
    ask_to_put(&mut client, ns.id(), key(1));
    assert_eq!(next_verb(&mut client), MOVE);
    let name = client.reserve(ns.id(), key(2), LEN as u64);
    assert_eq!(reserved(&owner), 2);
    let joined = start_put(&ns, &[1], LEN);
    // It breaks, comes back, breaks again, and comes back, all without having been quiet.
    for _ in 0..3 {
        client.tasks.shutdown(Shutdown::Both).unwrap();
        client = Bare::attach(&place.socket(), number);
        assert_eq!(client.number, number, "as whom it was known");
        std::thread::sleep(Duration::from_millis(50));
        assert!(!joined.is_done());
        assert_eq!(reserved(&owner), 2);
    }
    // Its calls name what it held before.
    let abort = frame(frames::ABORT, 0, &frames::rows(&name));
    client.calls.write_all(&abort).unwrap();
    eventually("the end of its reservation", || reserved(&owner) == 1);
    client.tasks.write_all(&frame(QUIET, 0, &[])).unwrap();
    assert_eq!(joined.wait(Some(PATIENCE)).unwrap(), [true]);
    assert!(has(&ns, &[1], LEN));
    // A stranger that says it was this client gets nothing of it, and ends nothing.
    let _kept = client.reserve(ns.id(), key(3), 100);
    let mut stranger = Bare::attach(&place.socket(), number + 1);
    assert_ne!(stranger.number, number);
    stranger.tasks.write_all(&frame(GOODBYE, 0, &[])).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(reserved(&owner), 1);
    client.tasks.write_all(&frame(GOODBYE, 0, &[])).unwrap();
    eventually("the end of all", || reserved(&owner) == 0);
    assert_at_rest(&owner);
}

#[test]
fn a_client_that_closes_without_a_connection_gives_back_what_it_held() {
    let place = Place::new("Dax", "", "16MiB");
    let owner = place.serve();
    common::put(&namespace(&owner), &[1, 2], LEN);
    let client = kvdepot_service::connect(&place.socket(), Some(1)).unwrap();
    let ns = namespace(&client);
    let pins = ns.pin(&keys([1, 2]), false).unwrap();
    assert_eq!(pins.iter().flatten().count(), 2);
    for _ in 0..20 {
        frames::break_connections(&place.socket());
        std::thread::sleep(Duration::from_millis(5));
    }
    client.close();
    eventually("the end of the pins", || {
        owner.stats().tiers[0].pinned_blocks == 0
    });
}

#[test]
fn what_is_given_back_while_there_is_no_connection_is_not_held_behind_the_next_one() {
    let place = Place::new("Dax", "", "16MiB");
    let owner = place.serve();
    common::put(&namespace(&owner), &[1, 2], LEN);
    let client = kvdepot_service::connect(&place.socket(), Some(1)).unwrap();
    let ns = namespace(&client);
    for round in 0..20 {
        let pins = ns.pin(&keys([1, 2]), false).unwrap();
        let pins: Vec<_> = pins.into_iter().flatten().collect();
        let mine = ns.reserve(&[(key(3), vec![LEN as u64])]).unwrap();
        let mine: Vec<_> = mine.into_iter().flatten().collect();
        assert_eq!((pins.len(), mine.len()), (2, 1), "round {round}");
        frames::break_connections(&place.socket());
        // At once, or while another connection is made.
        std::thread::sleep(Duration::from_micros(round * 50));
        ns.unpin(&pins, false);
        ns.abort(&mine);
        eventually("a connection", || client.is_connected());
        eventually("the end of what it held", || {
            let stats = &owner.stats().tiers[0];
            stats.pinned_blocks + stats.reserved_blocks == 0
        });
    }
}

#[test]
fn an_owner_that_closes_welcomes_nobody_and_waits_for_nobody_who_has_gone() {
    let place = Place::new("Dax", "", "16MiB");
    let owner = place.serve();
    let id = namespace(&owner).id();
    let mut client = Bare::attach(&place.socket(), 0);
    ask_to_put(&mut client, id, key(1));
    assert_eq!(next_verb(&mut client), MOVE);
    std::thread::scope(|scope| {
        // Which waits for that move, a minute at most.
        let closing = scope.spawn(|| owner.close());
        assert_eq!(next_verb(&mut client), CLOSING);
        let mut next = UnixStream::connect(place.socket()).unwrap();
        next.set_read_timeout(Some(PATIENCE)).unwrap();
        next.write_all(&hello(VERSION, 2, client.number)).unwrap();
        let mut answer = Vec::new();
        next.read_to_end(&mut answer).unwrap();
        let said = String::from_utf8_lossy(&answer[16..]);
        assert_eq!(said, "the depot is closed");
        let begun = Instant::now();
        client.tasks.write_all(&frame(GOODBYE, 0, &[])).unwrap();
        closing.join().unwrap();
        assert!(begun.elapsed() < PATIENCE / 2, "{:?}", begun.elapsed());
    });
}

#[test]
#[expect(
    clippy::zombie_processes,
    reason = "its parent is killed before it ends"
)]
fn a_client_that_is_killed_in_the_middle_of_a_word_holds_nothing_by_a_child_that_lives_on() {
    const TEST: &str = concat!(
        "share_breaks::",
        "a_client_that_is_killed_in_the_middle_of_a_word_holds_nothing_by_a_child_that_lives_on"
    );
    if child::role().is_some() {
        let mut client = Bare::attach(child::value("socket").as_ref(), 0);
        let _held = client.reserve(NamespaceId([1; 16]), key(1), 5000);
        // It has the other end, and does nothing with it.
        let end = OwnedFd::from(client.tasks.try_clone().unwrap());
        let mut heir = std::process::Command::new("sleep");
        let heir = heir.arg("300").stdin(end).spawn().unwrap();
        let whole = frames::put(7, NamespaceId([1; 16]), &[key(2)], 5000);
        client.tasks.write_all(&whole[..20]).unwrap();
        child::say(&heir.id().to_string());
        child::sleep_until_killed();
    }
    let place = Place::new("Dax", "", "4MiB");
    let owner = place.serve();
    let socket = place.socket();
    let mut client = Child::start(TEST, "client", &[("socket", socket.to_str().unwrap())]);
    let heir = client.line().unwrap();
    assert_eq!(reserved(&owner), 1);
    std::thread::sleep(Duration::from_millis(50));
    client.kill();
    let begun = Instant::now();
    while reserved(&owner) > 0 && begun.elapsed() < PATIENCE / 4 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let ended = std::process::Command::new("kill").arg(&heir).status();
    assert!(ended.unwrap().success(), "the child that lives on has gone");
    assert_eq!(reserved(&owner), 0);
}

#[test]
fn a_client_that_does_not_read_an_answer_comes_back_and_keeps_nobody_waiting() {
    let place = Place::new("Dax", "", "16MiB");
    let owner = place.serve();
    let mut client = Bare::attach(&place.socket(), 0);
    // An answer longer than what a socket takes.
    let many: Vec<Key> = (0..1 << 20).map(key).collect();
    let request = frames::with_keys(NamespaceId([1; 16]), &[], &many);
    let asks = frame(CONTAINS, 0, &request);
    client.calls.write_all(&asks).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let begun = Instant::now();
    let again = Bare::attach(&place.socket(), client.number);
    assert_eq!(again.number, client.number);
    owner.close();
    assert!(begun.elapsed() < PATIENCE / 2, "{:?}", begun.elapsed());
}
