//! Hosts that are killed, stopped, cut off, or come back; those that lie, and those that are none.

use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use kvdepot_store::{BlockBuffers, Buffer, Namespace, Outcome};
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::child::{Child, role, say, sleep_until_killed, value};
use kvdepot_testkit::proxy::{Act, Proxy, Way};
use serde_json::{Value, json};

use crate::LEN;
use crate::hosts::{
    Cluster, PATIENCE, addresses, at_rest, count_done, eventually, get, has, keys, namespace, open,
    put, share,
};
use crate::raw::{Head, Raw};

/// How long a tier is waited for in these tests, and what a machine that stands still may add to
/// that and to the 100 ms that a batch may be behind it: less than is waited by default.
const TIMEOUT: Duration = Duration::from_secs(2);
const BUSY: Duration = Duration::from_secs(7);

fn impatient(cluster: &Cluster, pipeline: &str, host: usize) -> Value {
    let mut settings = cluster.settings(pipeline, host);
    settings["lookup_timeout"] = json!("2s");
    settings["tier_timeout"] = json!("2s");
    settings
}

/// A host that is a process of its own.
fn start(test: &str, settings: &Value) -> Child {
    let mut child = Child::start(test, "host", &[("settings", &settings.to_string())]);
    child.expect("open");
    child
}

/// What such a process does.
fn be_a_host() -> ! {
    let settings: Value = serde_json::from_str(&value("settings")).unwrap();
    let _depot = open("Peer", &settings);
    say("open");
    sleep_until_killed()
}

/// Puts blocks until all are stored: the tier is waited for less than a machine stands still.
fn stored(ns: &Namespace, numbers: &[u64]) {
    eventually("puts that are stored", || {
        put(ns, numbers, LEN).iter().all(|ok| *ok)
    });
}

fn signal(child: &Child, signal: i32) {
    // SAFETY: a signal to a child of this process that was not waited for.
    let sent = unsafe { libc::kill(child.pid() as i32, signal) };
    assert_eq!(sent, 0);
}

/// Begins a get, has something happen, and says how long it took and what came of it.
fn get_while(ns: &Namespace, numbers: &[u64], happens: impl FnOnce()) -> (Duration, Vec<Outcome>) {
    let buffer = |_: &u64| Buffer::from_vec(vec![0xEE; LEN]);
    let buffers: Vec<Buffer> = numbers.iter().map(buffer).collect();
    let began = Instant::now();
    let task = ns
        .get(keys(numbers), BlockBuffers::whole(buffers.clone()))
        .unwrap();
    happens();
    task.wait(Some(PATIENCE)).unwrap();
    let took = began.elapsed();
    let outcomes = task.outcomes();
    for ((number, buffer), outcome) in numbers.iter().zip(&buffers).zip(&outcomes) {
        let right = *outcome != Outcome::Done || buffer.to_vec() == content(*number, LEN);
        assert!(right, "wrong bytes for block {number}");
    }
    (took, outcomes)
}

#[test]
fn a_host_that_is_killed_in_a_batch_costs_no_more_than_the_time_out_and_its_own_blocks() {
    const TEST: &str = "faults::a_host_that_is_killed_in_a_batch_costs_no_more_than_the_time_out_and_its_own_blocks";
    if role().is_some() {
        be_a_host();
    }
    let cluster = Cluster::new(3);
    let first = open("Peer", &impatient(&cluster, "Peer", 0));
    let second = open("Peer", &impatient(&cluster, "Peer", 1));
    let mut third = start(TEST, &impatient(&cluster, "Peer", 2));
    let all: Vec<u64> = (0..300).collect();
    let ns = namespace(&first);
    stored(&ns, &all);
    let kept = (share(&first).blocks + share(&second).blocks) as usize;
    let (took, outcomes) = get_while(&ns, &all, || {
        third.kill();
    });
    assert!(
        took < TIMEOUT + Duration::from_millis(100) + BUSY,
        "{took:?}"
    );
    // Where the machine stood still, those that live were late.
    let is_late = took > TIMEOUT;
    assert!(is_late || count_done(&outcomes) >= kept, "those that live");
    // From now on it is asked nothing: a miss, and at once.
    eventually("it is left alone", || {
        let began = Instant::now();
        let found = count_done(&get(&ns, &all, LEN));
        assert!(found <= kept);
        found == kept && began.elapsed() < Duration::from_millis(500)
    });
    // Its blocks have another home meanwhile.
    stored(&ns, &all);
    eventually("all of them", || has(&namespace(&second), &all, LEN));
    // It comes back, with nothing, and is asked again.
    let _back = start(TEST, &impatient(&cluster, "Peer", 2));
    let more: Vec<u64> = (1000..1060).collect();
    let before = share(&first).stored_blocks + share(&second).stored_blocks;
    eventually("it is a home again", || ns.remove(&keys(&more)).is_ok());
    stored(&ns, &more);
    let here = share(&first).stored_blocks + share(&second).stored_blocks - before;
    assert!(here < 60, "all of them are here");
    eventually("all", || has(&ns, &all, LEN) && has(&ns, &more, LEN));
}

#[test]
fn what_is_acknowledged_while_a_host_is_killed_is_at_two_of_them() {
    const TEST: &str = "faults::what_is_acknowledged_while_a_host_is_killed_is_at_two_of_them";
    if role().is_some() {
        be_a_host();
    }
    let mut cluster = Cluster::new(3).with("replicas", 2);
    cluster.capacity = "32MiB";
    let settings = |host| {
        let mut settings = keyed(&cluster, host, '1');
        settings["tier_timeout"] = json!("2s");
        settings["peer"]["path"] = json!(cluster.dir().join(format!("share-{host}")));
        settings
    };
    let first = open("Peer", &settings(0));
    let ns = namespace(&first);
    let mut at = 0;
    for pause in [0, 1, 2, 4, 8] {
        let second = open("Peer", &settings(1));
        let mut third = start(TEST, &settings(2));
        eventually("both are homes", || {
            at += 100;
            let (one, two) = (share(&first).stored_blocks, share(&second).stored_blocks);
            let some: Vec<u64> = (at..at + 30).collect();
            let all = put(&ns, &some, 1000).iter().all(|ok| *ok);
            let (one, two) = (
                share(&first).stored_blocks - one,
                share(&second).stored_blocks - two,
            );
            all && two > 0 && one + two < 60
        });
        at += 100;
        let some: Vec<u64> = (at..at + 100).collect();
        let blocks = some.iter().map(|one| Buffer::from_vec(content(*one, LEN)));
        let task = ns.put(keys(&some), BlockBuffers::whole(blocks)).unwrap();
        std::thread::sleep(Duration::from_millis(pause));
        third.kill();
        let stored = task.wait(Some(PATIENCE)).unwrap();
        let stored = some.iter().zip(stored).filter(|(_, stored)| *stored);
        let stored: Vec<u64> = stored.map(|(number, _)| *number).collect();
        assert!(has(&ns, &stored, LEN), "with the first and the second");
        // The killed one is there again with what its medium has, and the other one is not.
        second.close();
        let _third = start(TEST, &settings(2));
        eventually("with the first and the third", || has(&ns, &stored, LEN));
    }
    at_rest(&[first]);
}

#[test]
fn a_host_that_is_stopped_is_a_miss_in_time_and_there_again_when_it_goes_on() {
    const TEST: &str =
        "faults::a_host_that_is_stopped_is_a_miss_in_time_and_there_again_when_it_goes_on";
    if role().is_some() {
        be_a_host();
    }
    let cluster = Cluster::new(2);
    let first = open("Peer", &impatient(&cluster, "Peer", 0));
    let second = start(TEST, &impatient(&cluster, "Peer", 1));
    let all: Vec<u64> = (0..100).collect();
    let ns = namespace(&first);
    stored(&ns, &all);
    let kept = share(&first).blocks as usize;
    let (took, outcomes) = get_while(&ns, &all, || signal(&second, libc::SIGSTOP));
    assert!(
        took < TIMEOUT + Duration::from_millis(100) + BUSY,
        "{took:?}"
    );
    assert!(count_done(&outcomes) >= kept);
    let (took, outcomes) = get_while(&ns, &all, || ());
    assert!(
        took < TIMEOUT + Duration::from_millis(100) + BUSY,
        "{took:?}"
    );
    assert_eq!(count_done(&outcomes), kept);
    signal(&second, libc::SIGCONT);
    eventually("all of them again", || has(&ns, &all, LEN));
    at_rest(&[first]);
}

#[test]
fn a_home_that_comes_back_with_an_older_share_serves_what_verifies() {
    let mut cluster = Cluster::new(2);
    let path = |cluster: &Cluster, host: usize| cluster.dir().join(format!("share-{host}"));
    let settings = |cluster: &Cluster, host: usize| {
        let mut settings = cluster.settings("Peer", host);
        settings["peer"]["path"] = json!(path(cluster, host));
        settings
    };
    cluster.capacity = "16MiB";
    let first = open("Peer", &settings(&cluster, 0));
    let second = open("Peer", &settings(&cluster, 1));
    let ns = namespace(&first);
    let old: Vec<u64> = (0..20).collect();
    assert!(put(&ns, &old, LEN).iter().all(|ok| *ok));
    second.close();
    drop(second);
    let older = fs::read(path(&cluster, 1)).unwrap();
    let second = open("Peer", &settings(&cluster, 1));
    eventually("it is back", || has(&ns, &old, LEN));
    let new: Vec<u64> = (100..120).collect();
    eventually("it is a home", || put(&ns, &new, LEN).iter().all(|ok| *ok));
    let kept = share(&first).blocks;
    second.close();
    drop(second);
    // What it had before, and a bit of one of its blocks is another.
    let mut rotten = older;
    let wanted = content(*old.iter().find(|one| is_in(&rotten, **one)).unwrap(), LEN);
    let at = find(&rotten, &wanted).unwrap();
    rotten[at + LEN / 2] ^= 4;
    fs::write(path(&cluster, 1), rotten).unwrap();
    let second = open("Peer", &settings(&cluster, 1));
    eventually("it is back", || {
        count_done(&get(&ns, &old, LEN)) == old.len() - 1
    });
    let found = count_done(&get(&ns, &new, LEN)) + count_done(&get(&ns, &old, LEN));
    assert_eq!(found as u64, kept + share(&second).blocks);
    assert!(share(&second).corrupt_blocks > 0);
    // What is lost is put anew.
    assert!(put(&ns, &old, LEN).iter().all(|ok| *ok));
    assert!(put(&ns, &new, LEN).iter().all(|ok| *ok));
    assert!(has(&ns, &old, LEN) && has(&ns, &new, LEN));
    at_rest(&[first, second]);
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    let each = (0..bytes.len().saturating_sub(wanted.len())).step_by(4096);
    each.into_iter().find(|at| bytes[*at..].starts_with(wanted))
}

fn is_in(bytes: &[u8], number: u64) -> bool {
    find(bytes, &content(number, LEN)).is_some()
}

#[test]
fn who_has_another_token_gets_nothing_and_gives_nothing() {
    let cluster = Cluster::new(2);
    let first = cluster.open("Peer", 0);
    let mut stranger = cluster.settings("Peer", 1);
    stranger["peer"]["token"] = json!("something else");
    let stranger = open("Peer", &stranger);
    let (ns, other) = (namespace(&first), namespace(&stranger));
    let all: Vec<u64> = (0..40).collect();
    assert!(
        put(&ns, &all, LEN).iter().all(|ok| *ok),
        "the other is passed over"
    );
    assert_eq!(share(&first).blocks, 40);
    assert_eq!(share(&stranger).blocks, 0);
    assert_eq!(count_done(&get(&other, &all, LEN)), 0);
    assert!(has(&ns, &all, LEN));
}

#[test]
fn an_address_that_is_another_hosts_by_now_counts_for_that_one_alone() {
    let mut cluster = Cluster::new(3).with("replicas", 2);
    // `b` has gone, and `c` has its address.
    cluster.addresses[1] = cluster.addresses[2].clone();
    let (first, third) = (cluster.open("Peer", 0), cluster.open("Peer", 2));
    let ns = namespace(&first);
    let all: Vec<u64> = (0..40).collect();
    assert!(put(&ns, &all, LEN).iter().all(|ok| *ok));
    assert_eq!((share(&first).blocks, share(&third).blocks), (40, 40));
    assert!(has(&namespace(&third), &all, LEN) && has(&ns, &all, LEN));
    at_rest(&[first, third]);
}

/// Answers as a server of the web does.
fn serve_web(listener: &TcpListener) {
    for socket in listener.incoming() {
        let mut socket = socket.unwrap();
        let _request = socket.read(&mut [0; 64]);
        let answer = "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n";
        let _gone = socket.write_all(answer.as_bytes());
    }
}

#[test]
fn an_address_that_is_no_hosts_by_now_is_passed_over() {
    for is_silent in [true, false] {
        let cluster = Cluster::new(2);
        let other = TcpListener::bind(&cluster.addresses[1]).unwrap();
        let kept = other.try_clone().unwrap();
        if !is_silent {
            std::thread::spawn(move || serve_web(&other));
        }
        // One that says nothing is waited for as long.
        let mut settings = cluster.settings("Peer", 0);
        settings["lookup_timeout"] = json!("5s");
        let first = open("Peer", &settings);
        let ns = namespace(&first);
        let all: Vec<u64> = (0..40).collect();
        assert!(put(&ns, &all, LEN).iter().all(|ok| *ok));
        assert_eq!(share(&first).blocks, 40);
        assert!(has(&ns, &all, LEN));
        drop(kept);
    }
}

fn keyed(cluster: &Cluster, host: usize, digit: char) -> Value {
    let path: PathBuf = cluster.dir().join(format!("key-{digit}"));
    let key: String = std::iter::repeat_n(digit, 64).collect();
    fs::write(&path, format!("- {key}\n")).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    let mut settings = cluster.settings("Peer", host);
    settings["mac_key_file"] = json!(path);
    settings
}

#[test]
fn what_a_host_without_the_key_has_made_is_a_miss_and_goes() {
    let cluster = Cluster::new(3);
    let first = open("Peer", &keyed(&cluster, 0, '1'));
    let second = open("Peer", &keyed(&cluster, 1, '1'));
    let liar = open("Peer", &keyed(&cluster, 2, '2'));
    let (ns, other) = (namespace(&first), namespace(&second));
    let all: Vec<u64> = (0..40).collect();
    assert!(put(&ns, &all, LEN).iter().all(|ok| *ok));
    assert!(has(&other, &all, LEN) && has(&ns, &all, LEN));
    // Blocks whose checksums are right, and whose MACs are of another key.
    let forged: Vec<u64> = (100..140).collect();
    assert!(put(&namespace(&liar), &forged, LEN).iter().all(|ok| *ok));
    assert_eq!(count_done(&get(&ns, &forged, LEN)), 0);
    assert!(
        put(&ns, &forged, LEN).iter().all(|ok| *ok),
        "they have gone"
    );
    assert!(has(&other, &forged, LEN));
    at_rest(&[first, second, liar]);
}

/// Holds back the bytes of blocks that come from there, so that they stay pinned.
fn hold_back(proxy: &Proxy) {
    proxy.rule(|chunk, bytes| match chunk.way {
        Way::Back if bytes.len() > 4096 => Act::Delay(Duration::from_millis(300)),
        _ => Act::Pass,
    });
}

#[test]
fn numbers_of_grants_are_of_use_to_nobody_else_and_to_nobody_afterwards() {
    let mut cluster = Cluster::new(2);
    let listen = addresses(1).remove(0);
    let home: SocketAddr = listen.parse().unwrap();
    let proxy = Proxy::plain(home);
    cluster.addresses[1] = proxy.address.to_string();
    let first = cluster.open("Peer", 0);
    let mut behind = cluster.settings("Peer", 1);
    behind["peer"]["listen"] = json!(listen);
    let second = open("Peer", &behind);
    let ns = namespace(&first);
    let all: Vec<u64> = (0..30).collect();
    assert!(put(&ns, &all, LEN).iter().all(|ok| *ok));
    hold_back(&proxy);
    let buffer = |_: &u64| Buffer::from_vec(vec![0; LEN]);
    let task = ns.get(keys(&all), BlockBuffers::whole(all.iter().map(buffer)));
    let task = task.unwrap();
    eventually("pins", || share(&second).pinned_blocks > 0);
    // Who has the token, and knows or guesses numbers.
    let mut raw = Raw::greet(home, 0, [7; 16], b"only we know");
    for grant in 0..200 {
        raw.send(Head::new(2, 1, 0).row(grant, 0, 4096), &[]);
        assert_eq!(raw.answer().unwrap().0.status, 1, "{grant} is read");
        raw.send(Head::new(3, 1, 8).row(grant, 0, 8), &[0; 8]);
        assert_eq!(raw.answer().unwrap().0.status, 1, "{grant} is written");
    }
    assert!(
        share(&second).pinned_blocks > 0,
        "they were pinned meanwhile"
    );
    // Bytes that are no question have no answer, and end nothing.
    let calls = [
        &b""[..],
        &[0],
        &[1],
        &[1, 1, 255, 255, 255, 255, 255, 255],
        &[9; 500],
    ];
    for call in calls {
        raw.send(Head::new(6, 0, call.len() as u64), call);
        assert_eq!(raw.answer().unwrap().0.status, 5);
    }
    proxy.rule(|_, _| Act::Pass);
    task.wait(Some(PATIENCE)).unwrap();
    eventually("all of them", || has(&ns, &all, LEN));
    at_rest(&[first, second]);
}

#[test]
fn bits_that_change_and_connections_that_are_cut_on_the_way_are_no_wrong_bytes() {
    let mut cluster = Cluster::new(2);
    let home = addresses(1).remove(0);
    let proxy = Proxy::plain(home.parse().unwrap());
    cluster.addresses[1] = proxy.address.to_string();
    let first = open("Peer", &impatient(&cluster, "Peer", 0));
    let mut behind = impatient(&cluster, "Peer", 1);
    behind["peer"]["listen"] = json!(home);
    let second = open("Peer", &behind);
    let ns = namespace(&first);
    let all: Vec<u64> = (0..60).collect();
    let mut chunks = 0_u64;
    proxy.rule(move |chunk, bytes| {
        chunks += 1;
        match chunk.way {
            Way::There if bytes.len() > 1000 && chunks.is_multiple_of(5) => Act::Flip(777),
            Way::Back if chunk.before > 3000 && chunks.is_multiple_of(11) => Act::Flip(99),
            _ if chunk.before > 400_000 && chunks.is_multiple_of(13) => Act::Cut(bytes.len() / 2),
            _ => Act::Pass,
        }
    });
    for _ in 0..3 {
        // What is not stored is said not to be; whatever is read is right.
        let _some = put(&ns, &all, LEN);
        let _some = get(&ns, &all, LEN);
    }
    proxy.rule(|_, _| Act::Pass);
    eventually("what was put", || put(&ns, &all, LEN).iter().all(|ok| *ok));
    eventually("what was stored", || has(&ns, &all, LEN));
    at_rest(&[first, second]);
}

#[test]
fn a_block_that_changed_only_on_its_way_stays_where_it_is() {
    let mut cluster = Cluster::new(2);
    let home = addresses(1).remove(0);
    let proxy = Proxy::plain(home.parse().unwrap());
    cluster.addresses[1] = proxy.address.to_string();
    let first = cluster.open("Peer", 0);
    let mut behind = cluster.settings("Peer", 1);
    behind["peer"]["listen"] = json!(home);
    let second = open("Peer", &behind);
    let ns = namespace(&first);
    let all: Vec<u64> = (0..40).collect();
    assert!(put(&ns, &all, LEN).iter().all(|ok| *ok));
    let kept = share(&second).blocks;
    assert!(kept > 0);
    proxy.rule(|chunk, bytes| match chunk.way {
        Way::Back if bytes.len() > 4096 => Act::Flip(8 * (bytes.len() as u64 - 1000)),
        _ => Act::Pass,
    });
    let outcomes = get(&ns, &all, LEN);
    assert!(count_done(&outcomes) < all.len(), "some have changed");
    proxy.rule(|_, _| Act::Pass);
    assert_eq!(share(&second).blocks, kept, "nothing of it has gone");
    assert!(has(&ns, &all, LEN));
    at_rest(&[first, second]);
}

#[test]
fn what_was_answered_too_late_is_not_held_for_ever() {
    let mut cluster = Cluster::new(2);
    let listen = addresses(1).remove(0);
    let proxy = Proxy::plain(listen.parse().unwrap());
    cluster.addresses[1] = proxy.address.to_string();
    let first = open("Peer", &impatient(&cluster, "Peer", 0));
    let mut behind = impatient(&cluster, "Peer", 1);
    behind["peer"]["listen"] = json!(listen);
    let second = open("Peer", &behind);
    let ns = namespace(&first);
    let all: Vec<u64> = (0..40).collect();
    stored(&ns, &all);
    let kept = share(&first).blocks as usize;
    // Questions arrive and are answered; nobody hears the answers in time.
    proxy.rule(|chunk, _| match chunk.way {
        Way::Back => Act::Delay(Duration::from_millis(1500)),
        Way::There => Act::Pass,
    });
    let (took, outcomes) = get_while(&ns, &all, || ());
    assert!(took < TIMEOUT + BUSY, "{took:?}");
    assert_eq!(count_done(&outcomes), kept);
    assert!(
        share(&second).pinned_blocks > 0,
        "they were pinned for nobody"
    );
    let others: Vec<u64> = (100..140).collect();
    let _some = put(&ns, &others, LEN);
    proxy.rule(|_, _| Act::Pass);
    eventually("all of them", || has(&ns, &all, LEN));
    at_rest(&[first, second]);
}

#[test]
fn what_a_host_had_pinned_ends_with_its_connections() {
    const TEST: &str = "faults::what_a_host_had_pinned_ends_with_its_connections";
    let all: Vec<u64> = (0..30).collect();
    if role().is_some() {
        let settings: Value = serde_json::from_str(&value("settings")).unwrap();
        let depot = open("Peer", &settings);
        say("open");
        let _cut_off = get(&namespace(&depot), &all, LEN);
        sleep_until_killed();
    }
    let cluster = Cluster::new(2);
    let first = cluster.open("Peer", 0);
    // The other host is not there yet: all of it has a home here.
    assert!(put(&namespace(&first), &all, LEN).iter().all(|ok| *ok));
    assert_eq!(share(&first).blocks, 30);
    let proxy = Proxy::plain(cluster.addresses[0].parse().unwrap());
    hold_back(&proxy);
    let mut settings = cluster.settings("Peer", 1);
    let hosts = settings["peer"]["hosts"].as_str().unwrap();
    let hosts = hosts.replace(&cluster.addresses[0], &proxy.address.to_string());
    settings["peer"]["hosts"] = json!(hosts);
    let mut other = start(TEST, &settings);
    eventually("pins", || share(&first).pinned_blocks > 0);
    other.kill();
    at_rest(&[first]);
}
