//! Clients that want the same block of a far tier at once, one of which may die at it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::{PATIENCE, assert_at_rest, eventually, get, has, keys, namespace, put};
use crate::tiers::late::{Mood, slow_files};
use kvdepot_store::{BlockBuffers, Buffer, Config, Depot, Namespace, Outcome, Task};
use kvdepot_testkit::child::{self, Child};
use serde_json::json;

const LEN: usize = 9000;

/// Has blocks 1 to 9 far, and nothing near.
fn serve(home: &Path, mood: &Arc<Mood>, timeout: &str) -> Depot {
    let path = |name| home.join(name).to_str().unwrap().to_owned();
    let settings = json!({
        "lanes": 1, "socket": path("s"), "cache": {"capacity": "1MiB"},
        "slow": {"path": path("files")}, "lookup_timeout": timeout, "tier_timeout": timeout,
        "close_timeout": "10s",
    });
    let config = Config::with_kinds(&slow_files(mood), "Cache|Slow", &settings).unwrap();
    let all: Vec<u64> = (1..10).collect();
    let depot = kvdepot_service::open(&config).unwrap();
    assert_eq!(put(&namespace(&depot), &all, LEN), [true; 9]);
    depot.close();
    kvdepot_service::open(&config).unwrap()
}

#[test]
fn what_clients_and_the_owner_want_at_once_is_read_once_and_once_more_to_be_near() {
    let (home, mood) = (tempfile::tempdir().unwrap(), Arc::new(Mood::default()));
    let owner = serve(home.path(), &mood, "60s");
    let connect = |seat| kvdepot_service::connect(&home.path().join("s"), Some(seat)).unwrap();
    let clients = [1, 2, 3, 4].map(connect);
    mood.delay.store(50_000, Ordering::Relaxed);
    mood.reached.store(0, Ordering::Relaxed);
    std::thread::scope(|scope| {
        for depot in clients.iter().chain([&owner]) {
            for _ in 0..3 {
                scope.spawn(|| assert!(has(&namespace(depot), &[1, 2, 3], LEN)));
            }
        }
    });
    let reads = mood.reached.load(Ordering::Relaxed);
    assert!(reads <= 2 * 3, "{reads} reads");
    assert!(owner.stats().coalesced_blocks > 0);
    assert_at_rest(&owner);
    clients.iter().for_each(Depot::close);
    owner.close();
}

fn start_get(ns: &Namespace, numbers: &[u64], len: usize) -> Task {
    let into = numbers.iter().map(|_| Buffer::from_vec(vec![0xEE; len]));
    let into = BlockBuffers::whole(into);
    ns.get(keys(numbers.iter().copied()), into).unwrap()
}

/// A client that loads block 1, and is stopped before it moves any byte of it.
fn stopped_client(test: &str, home: &Path, owner: &Depot, mood: &Mood) -> Child {
    mood.silent.store(true, Ordering::Relaxed);
    let client = Child::start(test, "client", &[("home", home.to_str().unwrap())]);
    eventually("its load", || owner.stats().inflight_load_blocks == 1);
    signal(&client, "-STOP");
    eventually("the stop of its threads", || {
        let threads = std::fs::read_dir(format!("/proc/{}/task", client.pid())).unwrap();
        let state = |thread: std::io::Result<std::fs::DirEntry>| {
            std::fs::read_to_string(thread.unwrap().path().join("stat")).unwrap()
        };
        threads.map(state).all(|stat| stat.contains(") T "))
    });
    mood.silent.store(false, Ordering::Relaxed);
    eventually("the answer", || mood.reached.load(Ordering::Relaxed) > 0);
    client
}

fn signal(child: &Child, name: &str) {
    let pid = child.pid().to_string();
    let told = std::process::Command::new("kill")
        .args([name, &pid])
        .status();
    assert!(told.unwrap().success());
}

fn load_as_a_client() {
    let home = child::value("home");
    let socket = Path::new(&home).join("s");
    let client = kvdepot_service::connect_within(&socket, Some(1), Some(PATIENCE)).unwrap();
    let _outcomes = get(&namespace(&client), &[1], LEN);
    child::say("served");
    child::sleep_until_killed();
}

#[test]
fn who_dies_at_a_load_keeps_nobody() {
    const TEST: &str = "loads::who_dies_at_a_load_keeps_nobody";
    if child::role().is_some() {
        return load_as_a_client();
    }
    let (home, mood) = (tempfile::tempdir().unwrap(), Arc::new(Mood::default()));
    let owner = serve(home.path(), &mood, "600s");
    mood.reached.store(0, Ordering::Relaxed);
    let mut client = stopped_client(TEST, home.path(), &owner, &mood);
    let other = kvdepot_service::connect(&home.path().join("s"), Some(2)).unwrap();
    let gets = [&owner, &other].map(|depot| start_get(&namespace(depot), &[1, 2], LEN));
    eventually("the wait", || owner.stats().coalesced_blocks >= 2);
    let waits = gets[0].wait(Some(Duration::from_millis(50)));
    assert!(waits.is_err() && gets[0].outcomes()[0] == Outcome::Pending);
    client.kill();
    for got in gets {
        assert_eq!(got.wait(Some(PATIENCE)).unwrap(), [true; 2]);
    }
    assert!(has(&namespace(&owner), &[1, 2], LEN));
    assert_at_rest(&owner);
    other.close();
    owner.close();
}

#[test]
fn who_is_stopped_at_a_load_keeps_others_no_longer_than_a_tier_may() {
    const TEST: &str = "loads::who_is_stopped_at_a_load_keeps_others_no_longer_than_a_tier_may";
    if child::role().is_some() {
        return load_as_a_client();
    }
    let (home, mood) = (tempfile::tempdir().unwrap(), Arc::new(Mood::default()));
    let owner = serve(home.path(), &mood, "4s");
    mood.reached.store(0, Ordering::Relaxed);
    let mut client = stopped_client(TEST, home.path(), &owner, &mood);
    let ns = namespace(&owner);
    let gets = [(); 3].map(|()| start_get(&ns, &[1], LEN));
    for got in gets {
        assert_eq!(got.wait(Some(PATIENCE)).unwrap(), [true]);
    }
    // The gets have read block 1 themselves; its promotion is a load that others may join.
    eventually("the promotion", || owner.stats().inflight_load_blocks == 0);
    let joined = owner.stats().coalesced_blocks;
    assert!(joined >= 3);
    assert!(has(&ns, &[1], LEN));
    assert_eq!(
        owner.stats().coalesced_blocks,
        joined,
        "nobody joins it any more"
    );
    signal(&client, "-CONT");
    client.expect("served");
    client.kill();
    assert_at_rest(&owner);
    owner.close();
}
