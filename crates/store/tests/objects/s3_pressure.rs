//! A bucket under pressure: who collects keeps nobody waiting for long, and what is used stays.

use std::fs;
use std::path::PathBuf;

use crate::bucket::{LEN, Server, Trouble};
use crate::common::{PATIENCE, block, eventually, get, has, key, keys, namespace, pin_all, put};
use hyper::Method;
use kvdepot_store::{BlockBuffers, Config, Depot, Outcome};
use kvdepot_testkit::child::{self, Child};
use kvdepot_testkit::few_rounds;
use rustix::process::{Resource, getrlimit, setrlimit};
use serde_json::json;

/// Requests of one method so far whose path or query has this.
fn asked(server: &Server, method: &Method, within: &str) -> usize {
    let method = format!("{method} ");
    let seen = server.seen();
    let seen = seen.iter().filter(|line| line.starts_with(&method));
    seen.filter(|line| line.contains(within)).count()
}

fn lease(server: &Server) -> PathBuf {
    let folder = server.path().join("bucket/kv/test/usage");
    fs::create_dir_all(&folder).unwrap();
    folder.join("lease")
}

/// Blocks until one finds no room, as somebody else has begun to collect and makes none.
fn fill(server: &Server, depot: &Depot) {
    let ns = namespace(depot);
    eventually("the first count", || put(&ns, &[0], LEN) == [true]);
    eventually("the end of the first count", || !lease(server).exists());
    fs::write(lease(server), "\"somebody\"").unwrap();
    assert!((1..40).any(|number| put(&ns, &[number], LEN) == [false]));
}

#[test]
fn one_who_is_killed_while_it_collects_stops_others_for_seconds() {
    let server = Server::start_impatient();
    let depot = server.open_with("S3", &json!({"capacity": "1MiB"}));
    fill(&server, &depot);
    let ns = namespace(&depot);
    // For less long than anything here takes on a busy machine.
    eventually("room", || put(&ns, &[100], LEN) == [true]);
    depot.close();
}

#[test]
fn while_another_one_collects_the_store_is_asked_little() {
    const PUTS: usize = 8;
    let server = Server::start_impatient();
    let depot = server.open_with("S3", &json!({"capacity": "1MiB"}));
    fill(&server, &depot);
    let ns = namespace(&depot);
    let before = server.requests();
    let mut refused = 0;
    for number in 100..100 + PUTS as u64 {
        // It says again that it does.
        fs::write(lease(&server), "\"somebody\"").unwrap();
        refused += usize::from(put(&ns, &[number], LEN) == [false]);
    }
    // On a machine that stalls, somebody may seem to be dead.
    let asked = server.requests() - before;
    assert!(
        asked < 24 * PUTS as u64,
        "{asked} requests, {refused} refused"
    );
    depot.close();
}

#[test]
fn where_nobody_has_counted_nobody_is_waited_for() {
    let server = Server::start_impatient();
    fs::write(lease(&server), "\"somebody\"").unwrap();
    let depot = server.open();
    let ns = namespace(&depot);
    let mut number = 0;
    eventually("a put", || {
        // Somebody goes on and on.
        fs::write(lease(&server), "\"somebody\"").unwrap();
        number += 1;
        put(&ns, &[number], LEN) == [true]
    });
    let lease = fs::read_to_string(lease(&server)).unwrap();
    assert_eq!(lease, "\"somebody\"");
    depot.close();
}

#[test]
fn a_prompt_larger_than_its_bucket_leaves_the_others_and_keeps_its_own_head() {
    const USUAL: u64 = 8;
    let usual = |prompt: u64| 1000 * prompt..1000 * prompt + USUAL;
    for call in [96, 7] {
        let server = Server::start();
        // 64 blocks with their headers.
        let capacity = format!("{}KiB", 64 * (LEN + 4096) / 1024);
        let depot = server.open_with("S3", &json!({"capacity": capacity}));
        let ns = namespace(&depot);
        let hits = |prompt| ns.prefix(&keys(prompt)).unwrap() as u64;
        for prompt in 1..7 {
            let blocks: Vec<u64> = usual(prompt).collect();
            eventually("a prompt", || put(&ns, &blocks, LEN) == [true; 8]);
        }
        let large: Vec<u64> = (100_000..100_096).collect();
        let offer = || {
            for some in large[hits(100_000..100_096) as usize..].chunks(call) {
                let after = (some[0] > large[0]).then(|| key(some[0] - 1));
                let blocks = some.iter().map(|number| block(*number, LEN));
                let blocks = BlockBuffers::whole(blocks);
                let task = ns.put_after(after, keys(some.iter().copied()), blocks);
                task.unwrap().wait(Some(PATIENCE)).unwrap();
            }
        };
        offer();
        let left: Vec<u64> = (1..7).map(|prompt| hits(usual(prompt))).collect();
        assert_eq!(left, [USUAL; 6], "calls of {call}");
        let first = hits(100_000..100_096);
        assert!(first >= 8, "calls of {call}: {first}");
        // Whoever is there again takes what nobody has used since.
        offer();
        let again = hits(100_000..100_096);
        assert!(again > first, "calls of {call}: {first}, {again}");
        depot.close();
    }
}

#[test]
fn what_every_request_reads_is_there_while_the_bucket_turns_over() {
    let server = Server::start();
    let depot = server.open_with("S3", &json!({"capacity": "2MiB"}));
    let ns = namespace(&depot);
    let head = [0, 1];
    assert_eq!(put(&ns, &head, LEN), [true; 2]);
    for number in 10..120 {
        eventually("a put", || put(&ns, &[number], LEN) == [true]);
        assert!(has(&ns, &head, LEN), "lost after {number}");
    }
    let evicted = depot.stats().tiers[0].evicted_blocks;
    assert!(evicted > 60, "{evicted}");
    depot.close();
}

#[test]
fn of_what_was_put_at_once_the_tail_goes_first() {
    let server = Server::start();
    let depot = server.open_with("S3", &json!({"capacity": "2MiB"}));
    let ns = namespace(&depot);
    let prompt: Vec<u64> = (0..16).collect();
    assert_eq!(put(&ns, &prompt, LEN), [true; 16]);
    let mut number = 100;
    eventually("the first that is gone", || {
        number += 1;
        eventually("a put", || put(&ns, &[number], LEN) == [true]);
        depot.stats().tiers[0].evicted_blocks > 0
    });
    let left = get(&ns, &prompt, LEN);
    let first = left.iter().position(|one| *one != Outcome::Done);
    let first = first.unwrap_or(prompt.len());
    assert!(
        first > 0 && !left[first..].contains(&Outcome::Done),
        "{left:?}"
    );
    depot.close();
}

#[test]
fn what_others_have_used_stays_and_that_costs_few_requests() {
    const GETS: usize = 60;
    let server = Server::start();
    let settings = json!({"capacity": "2MiB"});
    let (writer, reader) = (
        server.open_with("S3", &settings),
        server.open_with("S3", &settings),
    );
    let ns = namespace(&writer);
    let all: Vec<u64> = (0..12).collect();
    for number in &all {
        assert_eq!(put(&ns, &[*number], LEN), [true]);
    }
    let used = [2, 3, 5];
    server.seen();
    for _ in 0..GETS {
        assert!(has(&namespace(&reader), &used, LEN));
    }
    reader.close();
    let marked = asked(&server, &Method::PUT, "/marks/");
    assert!((1..GETS / 10).contains(&marked), "{marked} marks");
    let mut number = 100;
    eventually("the first that are gone", || {
        number += 1;
        eventually("a put", || put(&ns, &[number], LEN) == [true]);
        depot_evicted(&writer) > 0
    });
    let left = get(&ns, &all, LEN);
    assert!(left.contains(&Outcome::Miss));
    assert!(has(&ns, &used, LEN), "{left:?}");
    writer.close();
}

fn depot_evicted(depot: &Depot) -> u64 {
    depot.stats().tiers[0].evicted_blocks
}

#[test]
fn a_store_that_is_silent_for_long_costs_no_other_tier_and_serves_again_once_it_answers() {
    let server = Server::start_impatient();
    let settings = json!({"timeout": "1s", "lookup_timeout": "1s"});
    let depot = server.open_with("Cache|S3", &settings);
    let ns = namespace(&depot);
    let near = [0, 1, 2];
    eventually("the first blocks", || put(&ns, &near, LEN) == [true; 3]);
    // Five minutes in `make test-all`: however long it is, the pauses do not grow to a minute.
    let silent = few_rounds(3, 3);
    let in_vain = || {
        let stats = &depot.stats().tiers[1];
        (stats.timeouts, stats.circuit_open)
    };
    let (unheard, opened) = in_vain();
    server.trouble(None, "", usize::MAX, Trouble::Silence);
    let mut number = 100;
    for count in 1..=silent {
        eventually("a question in vain", || {
            number += 1;
            assert!(has(&ns, &near, LEN), "what is near stays");
            put(&ns, &[number], LEN);
            let (timeouts, circuit_open) = in_vain();
            // At last it is left alone, too.
            timeouts >= unheard + count && (count < silent || circuit_open > opened)
        });
    }
    for number in 1000..1020 {
        assert_ne!(get(&ns, &[number], LEN), [Outcome::Done]);
        assert!(has(&ns, &near, LEN));
    }
    server.calm();
    eventually("a put", || put(&ns, &[5000], LEN) == [true]);
    let all: Vec<u64> = (6000..6010).collect();
    eventually("all of a call", || {
        put(&ns, &all, LEN) == [true; 10] && has(&ns, &all, LEN)
    });
    depot.close();
    let depot = server.open_with("S3", &settings);
    let ns = namespace(&depot);
    eventually("what was acknowledged", || {
        has(&ns, &all, LEN) && has(&ns, &near, LEN) && has(&ns, &[5000], LEN)
    });
    depot.close();
}

/// Each block that waits behind `Posix` has an open file there.
#[test]
fn blocks_that_wait_for_a_silent_store_leave_open_files_for_others() {
    const TEST: &str =
        "s3_pressure::blocks_that_wait_for_a_silent_store_leave_open_files_for_others";
    const LEN: usize = 1000;
    if child::role().is_none() {
        return Child::start(TEST, "owner", &[]).expect("done");
    }
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = Some(1024);
    setrlimit(Resource::Nofile, limit).unwrap();
    let server = Server::start_impatient();
    server.trouble(Some(Method::PUT), "/blocks/", usize::MAX, Trouble::Silence);
    let mut settings = json!({
        "lanes": 2, "socket": "off", "overload": "drop", "close_timeout": "1s",
        "s3": server.settings(),
    });
    settings["s3"]["timeout"] = json!("60s");
    settings["posix"] = json!({
        "path": server.path().join("posix"), "capacity": "256MiB", "timeout": "60s",
        "lookup_timeout": "60s",
    });
    let depot = Depot::open(&Config::new("Posix|S3", &settings).unwrap()).unwrap();
    let ns = namespace(&depot);
    let all: Vec<u64> = (0..3000).collect();
    for some in all.chunks(500) {
        assert!(!put(&ns, some, LEN).contains(&false));
    }
    eventually("blocks on their way", || depot.stats().write_back_bytes > 0);
    assert!(has(&ns, &all, LEN));
    let pins = pin_all(&ns, 0..64);
    assert_eq!(pins.len(), 64);
    ns.unpin(&pins, false);
    assert_eq!(depot.stats().tiers[0].timeouts, 0);
    depot.close();
    child::say("done");
    child::sleep_until_killed();
}
