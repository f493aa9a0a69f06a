//! Clients that ask tiers which answer late: a lookup is a task, and nobody else waits for it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::common::{self, PATIENCE, eventually, has, key, keys, namespace, put};
use crate::tiers::late::{self, Mood};
use kvdepot_store::{Config, Depot, Outcome};
use kvdepot_testkit::child::{self, Child};
use serde_json::json;

const LEN: usize = 9000;

fn serve(home: &Path, mood: &Arc<Mood>, lookup_timeout: &str) -> Depot {
    let path = |name| home.join(name).to_str().unwrap().to_owned();
    let settings = json!({
        "lanes": 1, "socket": path("s"), "cache": {"capacity": "1MiB"},
        "slow": {"path": path("files")}, "lookup_timeout": lookup_timeout, "close_timeout": "10s",
    });
    let config = Config::with_kinds(&late::slow_files(mood), "Cache|Slow", &settings).unwrap();
    kvdepot_service::open(&config).unwrap()
}

/// Has blocks 1 and 2 far, and 100 near as well.
fn serve_stored(home: &Path, mood: &Arc<Mood>, lookup_timeout: &str) -> Depot {
    let depot = serve(home, mood, "60s");
    assert_eq!(put(&namespace(&depot), &[1, 2], LEN), [true; 2]);
    depot.close();
    let depot = serve(home, mood, lookup_timeout);
    common::stored(&namespace(&depot), &[100], LEN);
    depot
}

#[test]
fn a_clients_lookup_is_a_task_that_nobody_else_waits_for() {
    let (home, mood) = (tempfile::tempdir().unwrap(), Arc::new(Mood::default()));
    let owner = serve_stored(home.path(), &mood, "60s");
    let client = kvdepot_service::connect(&home.path().join("s"), Some(1)).unwrap();
    let ns = namespace(&client);
    mood.silent.store(true, Ordering::Relaxed);
    let lookups = [[100, 2, 99], [1, 100, 98]].map(|of| ns.lookup(&keys(of)).unwrap());
    // What is near is known at once, and so is all that needs no late answer.
    eventually("the near answer", || {
        lookups[0].outcomes()[0] == Outcome::Done
    });
    assert!(has(&ns, &[100], LEN));
    assert_eq!(client.stats().tiers.len(), 2);
    assert!(
        ns.lookup(&keys([100]))
            .unwrap()
            .wait(Some(PATIENCE))
            .unwrap()[0]
    );
    assert!(ns.lookup(&[]).unwrap().is_done());
    assert_eq!(lookups[0].outcomes()[1..], [Outcome::Pending; 2]);
    assert!(!lookups[1].is_done());
    mood.silent.store(false, Ordering::Relaxed);
    let found = lookups.map(|lookup| lookup.wait(Some(PATIENCE)).unwrap());
    assert_eq!(found, [[true, true, false], [true, true, false]]);
    assert_eq!(ns.contains(&keys([1, 99])).unwrap(), [true, false]);
    assert_eq!(ns.prefix(&keys([100, 1, 2, 99, 1])).unwrap(), 3);
    let many = vec![key(100); (1 << 20) + 1];
    let refused = [
        ns.contains(&many).map(drop),
        ns.prefix(&many).map(drop),
        ns.lookup(&many).map(drop),
    ];
    for refused in refused {
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("1048576"), "{error}");
    }
    client.close();
    owner.close();
}

#[test]
fn a_question_that_is_not_answered_in_its_time_is_a_miss_but_for_what_is_known() {
    let (home, mood) = (tempfile::tempdir().unwrap(), Arc::new(Mood::default()));
    let owner = serve_stored(home.path(), &mood, "200ms");
    let client = kvdepot_service::connect(&home.path().join("s"), Some(1)).unwrap();
    let ns = namespace(&client);
    mood.silent.store(true, Ordering::Relaxed);
    // A machine may stand still for longer than that.
    eventually("what is known", || {
        ns.contains(&keys([100, 2])).unwrap() == [true, false]
    });
    eventually("its prefix", || ns.prefix(&keys([100, 2])).unwrap() == 1);
    mood.silent.store(false, Ordering::Relaxed);
    client.close();
    owner.close();
}

#[test]
fn an_owner_that_is_stopped_keeps_a_question_for_its_time_and_no_longer() {
    const TEST: &str =
        "lookups::an_owner_that_is_stopped_keeps_a_question_for_its_time_and_no_longer";
    if child::role().is_some() {
        let home = child::value("home");
        let _owner = serve_stored(home.as_ref(), &Arc::default(), "5s");
        child::say("serving");
        child::sleep_until_killed();
    }
    let home = tempfile::tempdir().unwrap();
    let mut owner = Child::start(TEST, "owner", &[("home", home.path().to_str().unwrap())]);
    owner.expect("serving");
    let limit = Some(PATIENCE);
    let client = kvdepot_service::connect_within(&home.path().join("s"), Some(1), limit).unwrap();
    let ns = namespace(&client);
    let signal = |name: &str| {
        let pid = owner.pid().to_string();
        let told = std::process::Command::new("kill")
            .args([name, &pid])
            .status();
        assert!(told.unwrap().success());
    };
    signal("-STOP");
    eventually("the stop of its threads", || {
        let threads = std::fs::read_dir(format!("/proc/{}/task", owner.pid())).unwrap();
        let state = |thread: std::io::Result<std::fs::DirEntry>| {
            std::fs::read_to_string(thread.unwrap().path().join("stat")).unwrap()
        };
        threads.map(state).all(|stat| stat.contains(") T "))
    });
    let begun = Instant::now();
    let lookup = ns.lookup(&keys([2])).unwrap();
    assert_eq!(ns.contains(&keys([100, 2])).unwrap(), [false; 2]);
    assert!(begun.elapsed() < PATIENCE / 2 && !lookup.is_done());
    signal("-CONT");
    assert_eq!(lookup.wait(Some(PATIENCE)).unwrap(), [true]);
}
