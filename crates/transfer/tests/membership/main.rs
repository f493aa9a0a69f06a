//! Hosts that register in a real etcd, which Debian calls `etcd-server`. Where there is none these
//! tests say that they are skipped.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod server;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvdepot_testkit::child::{self, Child};
use kvdepot_transfer::homes::{Host, View};
use kvdepot_transfer::membership::{Membership, Settings, Standing};
use rustix::process::Signal;
use serde_json::json;
use server::{PATIENCE, Server, Way, hanging, refusing, signal, until};

/// The least that etcd grants.
const TTL: Duration = Duration::from_secs(2);
/// What a close may take with nobody answering: one request that is under way, and one more.
const CLOSE: Duration = Duration::from_secs(4);

fn host(name: &str, incarnation: u64) -> Host {
    Host {
        name: name.into(),
        address: format!("{name}:7700"),
        capacity: 1 << 30,
        incarnation,
    }
}

/// A membership, and every view that it has published.
struct Member {
    membership: Membership,
    views: Arc<Mutex<Vec<Arc<View>>>>,
}

impl Member {
    fn start_with(settings: &Settings, own: Option<Host>) -> Member {
        let views = Arc::new(Mutex::new(Vec::new()));
        let all = Arc::clone(&views);
        let on_view = move |view: &Arc<View>| all.lock().unwrap().push(Arc::clone(view));
        let membership = Membership::etcd(settings, own, Box::new(on_view)).unwrap();
        Member { membership, views }
    }

    fn start(url: &str, own: Host) -> Member {
        Member::start_with(&settings(&[url.to_owned()]), Some(own))
    }

    fn looking(url: &str) -> Member {
        Member::start_with(&settings(&[url.to_owned()]), None)
    }

    fn names(&self) -> Vec<String> {
        names(&self.membership.view())
    }

    fn sees(&self, wanted: &[&str]) {
        until(&format!("{wanted:?} are there"), || self.names() == wanted);
    }

    fn stands(&self, wanted: Standing) {
        let standing = || self.membership.status().standing;
        until(&format!("{wanted:?}"), || standing() == wanted);
    }

    fn is_current(&self) -> bool {
        self.membership.status().is_current
    }
}

fn names(view: &View) -> Vec<String> {
    view.hosts().iter().map(|host| host.name.clone()).collect()
}

fn settings(endpoints: &[String]) -> Settings {
    let mut settings = Settings::new(endpoints.to_vec());
    settings.ttl = TTL;
    settings
}

/// A process of its own that is a member, and says how it stands.
fn member_process() -> bool {
    let Some(role) = child::role() else {
        return false;
    };
    assert_eq!(role, "member");
    let own = host(&child::value("name"), 1);
    let member = Member::start(&child::value("url"), own);
    let mut last = None;
    loop {
        let standing = member.membership.status().standing;
        if last.replace(standing) != Some(standing) {
            child::say(&format!("{standing:?}"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn spawn(test: &str, url: &str, name: &str) -> Child {
    let mut child = Child::start(test, "member", &[("name", name), ("url", url)]);
    child.expect("Joined");
    child
}

#[test]
fn hosts_join_change_and_leave() {
    let Some(server) = Server::start() else {
        return;
    };
    let one = Member::start(&server.url(), host("one", 1));
    one.stands(Standing::Joined);
    let two = Member::start(&server.url(), host("two", 5));
    for member in [&one, &two] {
        member.sees(&["one", "two"]);
        let view = member.membership.view();
        assert_eq!(view.hosts(), [host("one", 1), host("two", 5)]);
        assert!(member.is_current());
    }
    let epochs = [&one, &two].map(|member| member.membership.view().epoch());
    assert_eq!(epochs[0], epochs[1]);
    let larger = Host {
        capacity: 7,
        ..host("two", 5)
    };
    two.membership.announce(larger.clone()).unwrap();
    until("the capacity is known", || {
        one.membership.view().hosts()[1] == larger
    });
    assert!(one.membership.view().epoch() > epochs[0]);
    let error = two.membership.announce(host("three", 5)).unwrap_err();
    assert!(error.to_string().starts_with("own.name: "), "{error}");
    // Who leaves tells it: nobody waits for a lease. What was not left stays.
    let start = Instant::now();
    assert!(two.membership.close(CLOSE));
    one.sees(&["one"]);
    assert!(start.elapsed() < TTL, "{:?}", start.elapsed());
    assert_eq!(two.names(), ["one", "two"]);
    // A dropped one leaves too.
    drop(one);
    let looking = Member::looking(&server.url());
    looking.sees(&[]);
    until("it is heard", || looking.is_current());
    assert_eq!(looking.membership.status().standing, Standing::Looking);
    assert!(looking.membership.announce(host("three", 5)).is_err());
    let epochs: Vec<u64> = one_by_one(&two);
    assert!(epochs.is_sorted(), "{epochs:?}");
}

fn one_by_one(member: &Member) -> Vec<u64> {
    let views = member.views.lock().unwrap();
    views.iter().map(|view| view.epoch()).collect()
}

#[test]
fn a_killed_process_is_gone_when_its_lease_has_run_out() {
    if member_process() {
        return;
    }
    let Some(server) = Server::start() else {
        return;
    };
    let one = Member::start(&server.url(), host("one", 1));
    let test = "a_killed_process_is_gone_when_its_lease_has_run_out";
    let mut child = spawn(test, &server.url(), "two");
    one.sees(&["one", "two"]);
    let start = Instant::now();
    child.kill();
    one.sees(&["one"]);
    assert!(start.elapsed() > TTL / 3, "{:?}", start.elapsed());
    // Whoever comes back under the name before that takes it over, and keeps it.
    let mut child = spawn(test, &server.url(), "two");
    child.kill();
    let two = Member::start(&server.url(), host("two", 2));
    two.stands(Standing::Joined);
    let knows = |member: &Member| member.membership.view().hosts().last() == Some(&host("two", 2));
    until("both know", || knows(&one) && knows(&two));
    let before = two.views.lock().unwrap().len();
    std::thread::sleep(TTL * 2);
    assert_eq!(two.views.lock().unwrap().len(), before);
    assert_eq!(one.names(), ["one", "two"]);
}

#[test]
fn a_stopped_process_comes_back_unless_its_name_is_taken() {
    if member_process() {
        return;
    }
    let Some(server) = Server::start() else {
        return;
    };
    let one = Member::start(&server.url(), host("one", 1));
    let test = "a_stopped_process_comes_back_unless_its_name_is_taken";
    let mut child = spawn(test, &server.url(), "two");
    one.sees(&["one", "two"]);
    signal(child.pid(), Signal::STOP);
    one.sees(&["one"]);
    signal(child.pid(), Signal::CONT);
    one.sees(&["one", "two"]);
    signal(child.pid(), Signal::STOP);
    one.sees(&["one"]);
    // A later process has the name meanwhile.
    let two = Member::start(&server.url(), host("two", 2));
    one.sees(&["one", "two"]);
    signal(child.pid(), Signal::CONT);
    child.expect("Displaced");
    assert_eq!(one.membership.view().hosts()[1].incarnation, 2);
    assert!(two.membership.close(CLOSE));
    child.expect("Joined");
    until("it is the old one", || {
        one.membership.view().hosts().last() == Some(&host("two", 1))
    });
}

#[test]
fn the_last_view_stays_while_etcd_restarts() {
    let Some(mut server) = Server::start() else {
        return;
    };
    let members = ["one", "two"].map(|name| Member::start(&server.url(), host(name, 1)));
    members
        .iter()
        .for_each(|member| member.sees(&["one", "two"]));
    let published = || {
        members
            .each_ref()
            .map(|member| member.views.lock().unwrap().len())
    };
    let before = published();
    server.kill();
    for member in &members {
        until("it is said", || !member.is_current());
        let status = member.membership.status();
        assert!(
            status.stale.is_some() && status.error.is_some(),
            "{status:?}"
        );
    }
    // Longer than a lease: etcd gives each one anew when it is back.
    std::thread::sleep(TTL * 2);
    server.run();
    for member in &members {
        until("it is heard again", || member.is_current());
        member.stands(Standing::Joined);
    }
    std::thread::sleep(TTL * 2);
    assert_eq!(published(), before);
    let three = Member::start(&server.url(), host("three", 1));
    three.stands(Standing::Joined);
    members
        .iter()
        .for_each(|member| member.sees(&["one", "three", "two"]));
}

#[test]
fn an_etcd_without_its_memory_takes_nobody_away() {
    if member_process() {
        return;
    }
    let Some(mut server) = Server::start() else {
        return;
    };
    let members = ["one", "two"].map(|name| Member::start(&server.url(), host(name, 1)));
    let test = "an_etcd_without_its_memory_takes_nobody_away";
    let mut child = spawn(test, &server.url(), "gone");
    members
        .iter()
        .for_each(|member| member.sees(&["gone", "one", "two"]));
    server.kill();
    child.kill();
    server.forget();
    server.run();
    // Who was killed meanwhile goes in the end; those who are there have never been away.
    for member in &members {
        member.sees(&["one", "two"]);
        member.stands(Standing::Joined);
        let views = member.views.lock().unwrap();
        let whole = views.iter().skip_while(|view| view.hosts().len() < 3);
        for view in whole {
            assert!(
                view.find("one").is_some() && view.find("two").is_some(),
                "{view:?}"
            );
        }
    }
    let three = Member::start(&server.url(), host("three", 1));
    three.sees(&["one", "three", "two"]);
    members
        .iter()
        .for_each(|member| member.sees(&["one", "three", "two"]));
}

#[test]
fn what_was_compacted_during_a_partition_is_listed() {
    let Some(server) = Server::start() else {
        return;
    };
    let way = Way::to(&server);
    let two = Member::start(&server.url(), host("two", 1));
    let far = Member::start(&way.url(), host("far", 1));
    far.sees(&["far", "two"]);
    way.cut();
    until("it is said", || !far.is_current());
    two.sees(&["two"]);
    let three = Member::start(&server.url(), host("three", 1));
    assert!(two.membership.close(CLOSE));
    three.sees(&["three"]);
    server.compact();
    assert_eq!(far.names(), ["far", "two"]);
    way.heal();
    far.sees(&["far", "three"]);
    far.stands(Standing::Joined);
    assert!(far.is_current());
    // And without a compaction, where it was.
    way.cut();
    until("it is said", || !far.is_current());
    let four = Member::start(&server.url(), host("four", 1));
    four.stands(Standing::Joined);
    way.heal();
    far.sees(&["far", "four", "three"]);
}

#[test]
fn of_two_endpoints_one_may_be_dead() {
    let Some(server) = Server::start() else {
        return;
    };
    let (_listener, hanging) = hanging();
    // Which of them is asked first is drawn.
    for dead in [refusing(), hanging] {
        for round in 0..4 {
            let endpoints = match round % 2 {
                0 => [dead.clone(), server.url()],
                _ => [server.url(), dead.clone()],
            };
            let own = host(&format!("host-{round}"), 1);
            let member = Member::start_with(&settings(&endpoints), Some(own));
            member.stands(Standing::Joined);
            until("it is heard", || member.is_current());
            assert!(member.membership.close(CLOSE));
        }
    }
}

#[test]
fn the_other_endpoint_takes_over_before_the_lease_has_run_out() {
    let Some(server) = Server::start() else {
        return;
    };
    let ways = [Way::to(&server), Way::to(&server)];
    let looking = Member::looking(&server.url());
    let mut settings = settings(&ways.each_ref().map(Way::url));
    settings.ttl = Duration::from_secs(6);
    let member = Member::start_with(&settings, Some(host("one", 1)));
    looking.sees(&["one"]);
    for round in 0..4 {
        let [cut, left] = [round % 2, (round + 1) % 2];
        ways[left].heal();
        ways[cut].cut();
        until("it is heard by the other", || member.is_current());
        let other = Member::start(&server.url(), host("two", round as u64));
        member.sees(&["one", "two"]);
        assert!(other.membership.close(CLOSE));
        member.sees(&["one"]);
    }
    std::thread::sleep(settings.ttl);
    let views = looking.views.lock().unwrap();
    let since = views.iter().skip_while(|view| view.find("one").is_none());
    for view in since {
        assert!(view.find("one").is_some(), "{view:?}");
    }
}

#[test]
fn an_endpoint_that_hangs_is_left_by_the_watch_too() {
    let Some(first) = Server::start() else { return };
    // Two clusters stand for two members: the watch must not stay with the one that is stopped.
    let Some(second) = Server::start() else {
        return;
    };
    let on_second = Member::start(&second.url(), host("second", 1));
    on_second.stands(Standing::Joined);
    first.signal(Signal::STOP);
    let member = Member::start_with(&settings(&[first.url(), second.url()]), None);
    member.sees(&["second"]);
    first.signal(Signal::CONT);
    second.signal(Signal::STOP);
    // The other cluster's hosts are believed; who is not there has his time, and then goes.
    member.sees(&[]);
    until("it is heard", || member.is_current());
    second.signal(Signal::CONT);
}

#[test]
fn a_key_that_somebody_removes_is_written_again() {
    let Some(server) = Server::start() else {
        return;
    };
    let one = Member::start(&server.url(), host("one", 1));
    one.sees(&["one"]);
    // `/kvdepot/hosts/one`
    let key = json!({"key": "L2t2ZGVwb3QvaG9zdHMvb25l"});
    for _ in 0..3 {
        let before = one.views.lock().unwrap().len();
        let answer = server.ask("kv/deleterange", &key);
        assert_eq!(answer["deleted"], "1", "{answer}");
        until("it was away", || {
            one.views.lock().unwrap().len() >= before + 2
        });
        one.sees(&["one"]);
    }
    // What is no host is nobody's trouble.
    let odd = json!({"key": "L2t2ZGVwb3QvaG9zdHMvb2Rk", "value": "bm8="});
    server.ask("kv/put", &odd);
    let two = Member::start(&server.url(), host("two", 1));
    two.sees(&["one", "two"]);
    one.sees(&["one", "two"]);
}

#[test]
fn nobody_waits_for_an_etcd_that_does_not_answer() {
    let (_listener, hanging) = hanging();
    // Who waits for a question hears of its end, an error. A machine may stand still meanwhile.
    let at_once = (0..5).any(|_| {
        let member = Member::start(&hanging, host("one", 1));
        member.membership.announce(host("one", 2)).unwrap();
        member.membership.status().error.is_none()
    });
    assert!(at_once);
    for url in [refusing(), hanging] {
        let member = Member::start(&url, host("one", 1));
        let status = member.membership.status();
        assert!(!status.is_current && status.standing == Standing::Joining);
        assert_eq!(
            (member.membership.view().epoch(), member.names().len()),
            (0, 0)
        );
        member.membership.announce(host("one", 2)).unwrap();
        until("it is said", || member.membership.status().error.is_some());
        let start = Instant::now();
        assert!(member.membership.close(PATIENCE));
        assert!(start.elapsed() < CLOSE, "{:?}", start.elapsed());
        assert!(member.views.lock().unwrap().is_empty());
    }
}

#[test]
fn a_close_ends_beside_an_etcd_that_has_stopped() {
    let Some(server) = Server::start() else {
        return;
    };
    let member = Member::start(&server.url(), host("one", 1));
    member.sees(&["one"]);
    server.signal(Signal::STOP);
    let start = Instant::now();
    assert!(member.membership.close(PATIENCE));
    assert!(start.elapsed() < CLOSE, "{:?}", start.elapsed());
    // A bound that is shorter holds too.
    server.signal(Signal::CONT);
    let member = Member::start(&server.url(), host("two", 1));
    until("it is there", || member.names().contains(&"two".to_owned()));
    server.signal(Signal::STOP);
    let start = Instant::now();
    member.membership.close(Duration::from_millis(50));
    assert!(
        start.elapsed() < Duration::from_secs(1),
        "{:?}",
        start.elapsed()
    );
}
