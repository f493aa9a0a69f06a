//! Object stores that fail under the tier `S3`: each fault is a miss or a block that is not stored,
//! within its time and counted; what was acknowledged is there, and no wrong byte comes.

use std::fs;
use std::time::{Duration, Instant};

use crate::bucket::{LEN, Server, Trouble};
use crate::common::{self, eventually, get, has, keys, namespace, namespace_of, put};
use hyper::Method;
use kvdepot_store::{Depot, Outcome};
use kvdepot_testkit::child::{self, Child};
use serde_json::json;

const ALWAYS: usize = usize::MAX;

fn faults(depot: &Depot, cause: &str) -> u64 {
    let tiers = depot.stats().tiers;
    tiers[0].request_errors.get(cause).copied().unwrap_or(0)
}

/// A few cases at a time: each has a server of its own, and waits for time-outs.
fn side_by_side<T: Sync>(cases: &[T], run: impl Fn(&T) + Sync) {
    for some in cases.chunks(4) {
        std::thread::scope(|scope| {
            for case in some {
                scope.spawn(|| run(case));
            }
        });
    }
}

/// Nothing is held.
fn at_rest(depot: &Depot) {
    eventually("the end of pins and reservations", || {
        let tier = &depot.stats().tiers[0];
        tier.pinned_blocks + tier.reserved_blocks == 0
    });
}

#[test]
fn reads_that_fail_are_misses_and_counted_by_cause() {
    let second = Duration::from_secs(1);
    let cases = [
        (Trouble::Answer(503, "SlowDown"), ALWAYS, "throttled"),
        (Trouble::Answer(500, "InternalError"), ALWAYS, "throttled"),
        (
            Trouble::Answer(403, "AccessDenied"),
            ALWAYS,
            "access_denied",
        ),
        (
            Trouble::Answer(400, "ExpiredToken"),
            ALWAYS,
            "access_denied",
        ),
        (
            Trouble::Answer(403, "RequestTimeTooSkewed"),
            ALWAYS,
            "access_denied",
        ),
        (Trouble::Answer(404, "NoSuchKey"), ALWAYS, "not_found"),
        (
            Trouble::Answer(412, "PreconditionFailed"),
            ALWAYS,
            "precondition_failed",
        ),
        (Trouble::OtherVersion, ALWAYS, "precondition_failed"),
        (Trouble::Silence, ALWAYS, "timeout"),
        (Trouble::Slow(4 * second), ALWAYS, "timeout"),
        (Trouble::Closed, ALWAYS, "connection_error"),
        (Trouble::Half, ALWAYS, "connection_error"),
        (Trouble::Stalled, ALWAYS, "timeout"),
        (Trouble::Longer, ALWAYS, "connection_error"),
        (Trouble::Rot, 1, "invalid_object"),
    ];
    side_by_side(&cases, |(trouble, count, cause)| {
        let server = Server::start_impatient();
        let settings = json!({"timeout": "1s", "lookup_timeout": "1s"});
        let depot = server.open_with("S3", &settings);
        let ns = namespace(&depot);
        // On a busy machine it takes longer than the time-out.
        eventually("the first blocks", || put(&ns, &[1, 2], LEN) == [true; 2]);
        server.trouble(Some(Method::GET), "/blocks/", *count, trouble.clone());
        let begun = Instant::now();
        let outcome = get(&ns, &[1], LEN)[0];
        assert_ne!(outcome, Outcome::Done, "{trouble:?}");
        assert!(begun.elapsed() < common::PATIENCE, "{trouble:?}");
        at_rest(&depot);
        assert!(
            faults(&depot, cause) > 0,
            "{trouble:?}: {:?}",
            depot.stats().tiers[0].request_errors
        );
        server.calm();
        eventually("the block that nothing happened to", || has(&ns, &[2], LEN));
        // So does the other one: what changed in transit is right in the bucket.
        eventually("the other one", || has(&ns, &[1], LEN));
        depot.close();
    });
}

#[test]
fn an_object_whose_header_changes_in_transit_stays() {
    let server = Server::start();
    let depot = server.open();
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1], LEN), [true]);
    depot.close();
    // As if another program had copied it here: only its header says what it is.
    let [object] = &server.objects()[..] else {
        panic!("{:?}", server.objects());
    };
    let [attributes, _] = server.beside(object);
    fs::remove_file(attributes).unwrap();
    let depot = server.open();
    let ns = namespace(&depot);
    server.trouble(Some(Method::GET), "/blocks/", 1, Trouble::Rot);
    assert_eq!(get(&ns, &[1], LEN), [Outcome::Miss]);
    assert!(faults(&depot, "invalid_object") > 0);
    eventually("the block", || has(&ns, &[1], LEN));
    depot.close();
}

#[test]
fn what_passes_is_asked_for_again() {
    for trouble in [
        Trouble::Answer(503, "SlowDown"),
        Trouble::Answer(429, "TooManyRequests"),
        Trouble::Closed,
        Trouble::Half,
    ] {
        let server = Server::start();
        let depot = server.open();
        let ns = namespace(&depot);
        server.trouble(Some(Method::PUT), "/blocks/", 2, trouble.clone());
        assert_eq!(put(&ns, &[1], LEN), [true], "{trouble:?}");
        server.calm();
        server.trouble(Some(Method::GET), "/blocks/", 2, trouble.clone());
        assert!(has(&ns, &[1], LEN), "{trouble:?}");
        if trouble != Trouble::Half {
            assert_eq!(depot.stats().tiers[0].retries, 4, "{trouble:?}");
        }
        depot.close();
    }
}

#[test]
fn a_storm_is_not_answered_by_more_requests() {
    let server = Server::start_impatient();
    let depot = server.open();
    let ns = namespace(&depot);
    let all: Vec<u64> = (0..100).collect();
    common::stored(&ns, &all, 5000);
    let before = server.requests();
    server.trouble(None, "/blocks/", ALWAYS, Trouble::Answer(503, "SlowDown"));
    for _ in 0..3 {
        assert!(!get(&ns, &all, 5000).contains(&Outcome::Done));
    }
    let asked = server.requests() - before;
    assert!(asked < 400, "{asked} requests");
    server.calm();
    eventually("the end of the storm", || has(&ns, &all, 5000));
    depot.close();
}

#[test]
fn writes_that_fail_are_not_acknowledged() {
    let cases = [
        Trouble::Answer(503, "SlowDown"),
        Trouble::Answer(403, "AccessDenied"),
        Trouble::Answer(404, "NoSuchBucket"),
        Trouble::Silence,
        Trouble::Unanswered,
        Trouble::Closed,
    ];
    side_by_side(&cases, |trouble| {
        for len in [LEN, 17 << 20] {
            let server = Server::start_impatient();
            let settings = json!({"timeout": "1s", "lookup_timeout": "1s", "capacity": "1GiB"});
            let depot = server.open_with("S3", &settings);
            let ns = namespace(&depot);
            // On a busy machine it takes longer than the time-out.
            eventually("the first block", || put(&ns, &[9], LEN) == [true]);
            server.trouble(Some(Method::PUT), "/blocks/", ALWAYS, trouble.clone());
            let begun = Instant::now();
            assert_eq!(put(&ns, &[1], len), [false], "{trouble:?}");
            assert!(begun.elapsed() < common::PATIENCE, "{trouble:?}");
            server.calm();
            at_rest(&depot);
            eventually("the store", || has(&ns, &[9], LEN));
            eventually("the block", || put(&ns, &[1], len) == [true]);
            // A read of 17 MiB takes longer than the time-out on a machine that stalls.
            eventually("its bytes", || has(&ns, &[1], len));
            depot.close();
        }
    });
}

#[test]
fn a_block_that_is_removed_on_its_way_is_not_there() {
    let server = Server::start();
    let depot = server.open();
    let ns = namespace(&depot);
    let slow = Trouble::Slow(Duration::from_secs(1));
    server.trouble(Some(Method::PUT), "/blocks/", 1, slow);
    let task = common::start_put(&ns, &[1], LEN);
    eventually("the request", || {
        server
            .seen()
            .iter()
            .any(|line| line.starts_with("PUT") && line.contains("/blocks/"))
    });
    ns.remove(&keys([1])).unwrap();
    task.wait(Some(common::PATIENCE)).unwrap();
    at_rest(&depot);
    assert_eq!(get(&ns, &[1], LEN), [Outcome::Miss]);
    assert!(server.objects().is_empty());
    depot.close();
}

#[test]
fn an_object_that_is_not_what_its_name_says_is_a_miss_and_goes() {
    let server = Server::start();
    let depot = server.open();
    let ns = namespace(&depot);
    common::stored(&ns, &[1, 2], LEN);
    assert_eq!(put(&namespace_of(&depot, "other"), &[1], LEN), [true]);
    depot.close();
    // Those of block 1 in both namespaces, and block 2.
    let mut objects = server.objects();
    let twos = objects.extract_if(.., |path| server.is_of(path, 2));
    let two: Vec<_> = twos.collect();
    let ones = objects;
    let good: Vec<Vec<u8>> = ones.iter().map(|path| fs::read(path).unwrap()).collect();
    let half = good[0][..good[0].len() / 2].to_vec();
    for (bytes, attributes) in [
        // As one leaves it who copies an object, with its attributes and without.
        (fs::read(&two[0]).unwrap(), Some(&two[0])),
        (fs::read(&two[0]).unwrap(), None),
        (good[1].clone(), Some(&ones[1])),
        (good[1].clone(), None),
        (half, Some(&ones[0])),
        (vec![], None),
        (vec![7; LEN], None),
        (vec![7; good[0].len()], Some(&ones[0])),
    ] {
        let depot = server.open();
        let ns = namespace(&depot);
        let attributes = attributes.map(|from| server.attributes(from));
        for one in &ones {
            server.replace(one, &bytes, attributes.as_deref());
        }
        let both = [&ns, &namespace_of(&depot, "other")];
        let outcomes = both.map(|ns| get(ns, &[1], LEN)[0]);
        let done = outcomes.iter().filter(|one| **one == Outcome::Done).count();
        assert_eq!(done, usize::from(bytes == good[1]), "{outcomes:?}");
        assert!(faults(&depot, "invalid_object") >= 1);
        for ns in both {
            eventually("a new one", || {
                put(ns, &[1], LEN) == [true] && has(ns, &[1], LEN)
            });
        }
        depot.close();
        let again: Vec<Vec<u8>> = ones.iter().map(|path| fs::read(path).unwrap()).collect();
        // The time of writing is another.
        assert!(again.iter().all(|bytes| bytes.len() == good[0].len()));
    }
}

#[test]
fn a_pinned_block_that_is_replaced_is_a_miss() {
    let server = Server::start();
    let depot = server.open();
    let ns = namespace(&depot);
    common::stored(&ns, &[1], LEN);
    let other = server.open();
    let theirs = namespace(&other);
    // Both know the version, and one of them writes another.
    assert!(has(&theirs, &[1], LEN));
    ns.remove(&keys([1])).unwrap();
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(put(&ns, &[1], LEN), [true]);
    assert_eq!(get(&theirs, &[1], LEN), [Outcome::Miss]);
    assert_eq!(faults(&other, "precondition_failed"), 1);
    assert!(has(&theirs, &[1], LEN), "it looks again");
    other.close();
    depot.close();
}

#[test]
fn a_store_that_never_answers_delays_no_close() {
    let server = Server::start_impatient();
    let depot = server.open();
    let ns = namespace(&depot);
    common::stored(&ns, &[1], LEN);
    server.trouble(None, "", ALWAYS, Trouble::Silence);
    assert_ne!(get(&ns, &[1], LEN), [Outcome::Done]);
    let begun = Instant::now();
    depot.close();
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "{:?}",
        begun.elapsed()
    );
}

#[test]
fn credentials_that_expire_are_misses_until_they_are_renewed() {
    let server = Server::start_impatient();
    let good = fs::read(server.credentials()).unwrap();
    let depot = server.open();
    let ns = namespace(&depot);
    common::stored(&ns, &[1], LEN);
    fs::write(
        server.credentials(),
        "aws_access_key_id = me\naws_secret_access_key = an old one\n",
    )
    .unwrap();
    assert_ne!(get(&ns, &[1], LEN), [Outcome::Done]);
    assert_eq!(put(&ns, &[2], LEN), [false]);
    assert!(faults(&depot, "access_denied") >= 2);
    fs::write(server.credentials(), good).unwrap();
    eventually("a hit", || has(&ns, &[1], LEN));
    common::stored(&ns, &[2], LEN);
    depot.close();
}

#[test]
fn a_bucket_that_is_gone_is_empty_and_takes_nothing() {
    let server = Server::start_impatient();
    let depot = server.open();
    let ns = namespace(&depot);
    common::stored(&ns, &[1], LEN);
    server.trouble(None, "", ALWAYS, Trouble::Answer(404, "NoSuchBucket"));
    assert_ne!(get(&ns, &[1], LEN), [Outcome::Done]);
    assert_eq!(put(&ns, &[2], LEN), [false]);
    assert!(faults(&depot, "not_found") >= 2);
    server.calm();
    eventually("the bucket", || has(&ns, &[1], LEN));
    eventually("the block", || put(&ns, &[2], LEN) == [true]);
    depot.close();
}

#[test]
fn what_is_not_there_is_no_fault() {
    let server = Server::start();
    let depot = server.open();
    let ns = namespace(&depot);
    assert_eq!(get(&ns, &[1, 2], LEN), [Outcome::Miss; 2]);
    assert_eq!(put(&ns, &[1], LEN), [true]);
    assert_eq!(ns.remove(&keys([1, 2])).unwrap(), 1);
    assert_eq!(faults(&depot, "not_found"), 0);
    depot.close();
}

#[test]
fn many_writers_keep_to_the_capacity_and_the_oldest_go() {
    const CAPACITY: u64 = 8 << 20;
    let server = Server::start_impatient();
    let settings = json!({"capacity": "8MiB"});
    let depots = [0; 2].map(|_| server.open_with("S3", &settings));
    std::thread::scope(|scope| {
        for writer in 0..4 {
            let (server, depot) = (&server, &depots[writer % 2]);
            scope.spawn(move || {
                let ns = namespace(depot);
                for round in 0..10 {
                    let from = (writer as u64) * 1000 + round * 8;
                    let numbers: Vec<u64> = (from..from + 8).collect();
                    put(&ns, &numbers, LEN);
                    let used = server.used();
                    assert!(used <= CAPACITY, "{used} bytes");
                }
            });
        }
    });
    let used = server.used();
    assert!(used >= CAPACITY / 2, "{used} bytes");
    let last: Vec<u64> = (5000..5008).collect();
    let ns = namespace(&depots[0]);
    eventually("room for the last", || {
        put(&ns, &last, LEN).iter().all(|ok| *ok)
    });
    let evicted: u64 = depots
        .iter()
        .map(|one| one.stats().tiers[0].evicted_blocks)
        .sum();
    assert!(evicted > 50, "{evicted} {:?}", depots[0].stats().tiers);
    assert!(has(&ns, &last, LEN));
    depots.iter().for_each(Depot::close);
}

#[test]
fn what_is_announced_is_not_used_before_the_others_were_looked_at() {
    const CAPACITY: u64 = 1 << 20;
    let server = Server::start_impatient();
    let depot = server.open_with("S3", &json!({"capacity": "1MiB"}));
    let ns = namespace(&depot);
    common::stored(&ns, &[0], LEN);
    // Somebody else collects from now on, and makes no room.
    let lease = server.path().join("bucket/kv/test/usage/lease");
    eventually("the end of the first count", || !lease.exists());
    fs::write(lease, "\"somebody\"").unwrap();
    assert!((1..20).any(|number| put(&ns, &[number], LEN) == [false]));
    let slow = Trouble::Slow(Duration::from_millis(200));
    server.trouble(Some(Method::GET), "/usage/count", ALWAYS, slow);
    std::thread::scope(|scope| {
        for number in 100..108 {
            let ns = &ns;
            scope.spawn(move || put(ns, &[number], LEN));
        }
    });
    let used = server.used();
    assert!(used <= CAPACITY, "{used} bytes");
    depot.close();
}

#[test]
fn what_a_killed_process_has_acknowledged_is_there_and_what_it_promised_comes_back() {
    const TEST: &str = concat!(
        "s3_faults::",
        "what_a_killed_process_has_acknowledged_is_there_and_what_it_promised_comes_back"
    );
    const LONG: usize = 17 << 20;
    if let Some(settings) = child::role() {
        let settings: serde_json::Value = serde_json::from_str(&settings).unwrap();
        let settings = json!({"lanes": 2, "socket": "off", "s3": settings});
        let depot = Depot::open(&kvdepot_store::Config::new("S3", &settings).unwrap()).unwrap();
        let ns = namespace(&depot);
        let begin: u64 = child::value("begin").parse().unwrap();
        for number in begin.. {
            let len = if number % 8 == 7 { LONG } else { LEN };
            if put(&ns, &[number], len) == [true] {
                child::say(&number.to_string());
            }
        }
    }
    let server = Server::start();
    let mut settings = server.settings();
    settings["capacity"] = "1GiB".into();
    let mut acknowledged = Vec::new();
    for round in 0..3 {
        let begin = (round * 1000).to_string();
        let values = [("begin", &*begin)];
        let mut child = Child::start(TEST, &settings.to_string(), &values);
        let mut number = || child.line().unwrap().parse::<u64>().unwrap();
        acknowledged.extend((0..7 + round).map(|_| number()));
        // Also in the middle of one that goes in pieces.
        child.kill();
    }
    let depot = server.open_with("S3", &settings);
    let ns = namespace(&depot);
    for number in acknowledged {
        let len = if number % 8 == 7 { LONG } else { LEN };
        assert!(has(&ns, &[number], len), "{number}");
    }
    for round in 0..3 {
        // It is there, or it is written now; another length would be another block's.
        let unknown = round * 1000 + 7;
        assert!(put(&ns, &[unknown], LONG) == [true] && has(&ns, &[unknown], LONG));
    }
    depot.close();
}

#[test]
fn an_upload_that_is_broken_off_leaves_nothing() {
    const LONG: usize = 17 << 20;
    let server = Server::start_impatient();
    // Longer than a machine stands still.
    let settings = json!({"timeout": "5s", "capacity": "1GiB"});
    let depot = server.open_with("S3", &settings);
    let ns = namespace(&depot);
    let uploads = || {
        let mut seen = server.seen();
        seen.retain(|line| line.contains("/blocks/"));
        let of = |method| seen.iter().filter(|line| line.starts_with(method)).count();
        (of("POST"), of("DELETE"))
    };
    server.trouble(Some(Method::PUT), "/blocks/", ALWAYS, Trouble::Silence);
    assert_eq!(put(&ns, &[1], LONG), [false]);
    at_rest(&depot);
    assert_eq!(uploads(), (1, 1), "it is ended");
    assert!(server.objects().is_empty());
    assert_eq!(get(&ns, &[1], LONG), [Outcome::Miss]);
    server.calm();
    eventually("the block", || put(&ns, &[1], LONG) == [true]);
    depot.close();
}

#[test]
fn what_is_near_waits_for_no_store() {
    let server = Server::start_impatient();
    let limits = json!({"timeout": "60s", "lookup_timeout": "60s"});
    let depot = server.open_with("Cache|S3", &limits);
    let ns = namespace(&depot);
    let all: Vec<u64> = (0..4).collect();
    assert!(put(&ns, &all, LEN).iter().all(|ok| *ok));
    assert!(depot.drain(common::PATIENCE));
    assert!(has(&ns, &all, LEN));
    server.trouble(None, "", ALWAYS, Trouble::Silence);
    // Somebody else is waiting for it meanwhile.
    let waiting = {
        let ns = ns.clone();
        std::thread::spawn(move || get(&ns, &[99], LEN))
    };
    for _ in 0..100 {
        assert!(has(&ns, &all, LEN));
    }
    assert!(!waiting.is_finished(), "it waits for the store");
    depot.close();
    assert_eq!(waiting.join().unwrap(), [Outcome::Miss]);
}

#[test]
fn a_clock_that_was_set_stops_no_collection() {
    let server = Server::start_impatient();
    let settings = json!({"capacity": "2MiB"});
    let depot = server.open_with("S3", &settings);
    let ns = namespace(&depot);
    common::stored(&ns, &[1], LEN);
    depot.close();
    // A process that collected was killed when the store's clock was a day ahead.
    let usage = server.path().join("bucket/kv/test/usage");
    fs::write(usage.join("lease"), "\"somebody\"").unwrap();
    let day = Duration::from_secs(24 * 3600);
    for file in fs::read_dir(&usage).unwrap().map(|file| file.unwrap()) {
        let file = fs::File::options().write(true).open(file.path()).unwrap();
        file.set_modified(std::time::SystemTime::now() + day)
            .unwrap();
    }
    let depot = server.open_with("S3", &settings);
    let ns = namespace(&depot);
    for number in 100..150 {
        eventually("room", || put(&ns, &[number], LEN) == [true]);
        assert!(server.used() <= 2 << 20);
    }
    assert!(has(&ns, &[149], LEN));
    depot.close();
}

#[test]
fn what_may_have_been_written_comes_back_in_the_end() {
    let server = Server::start_impatient();
    let settings = json!({"timeout": "300ms", "lookup_timeout": "300ms", "capacity": "1MiB"});
    let depot = server.open_with("S3", &settings);
    let ns = namespace(&depot);
    eventually("the first count", || put(&ns, &[0], LEN) == [true]);
    for number in 1..20 {
        server.trouble(Some(Method::PUT), "/blocks/", ALWAYS, Trouble::Silence);
        assert_eq!(put(&ns, &[number], LEN), [false]);
        server.calm();
    }
    eventually("room", || put(&ns, &[50], LEN) == [true]);
    depot.close();
}

#[test]
fn a_large_block_whose_last_answer_was_lost_is_there() {
    const LONG: usize = 17 << 20;
    let server = Server::start_impatient();
    let settings = json!({"capacity": "1GiB"});
    let depot = server.open_with("S3", &settings);
    let ns = namespace(&depot);
    // One begins it, and one ends it.
    server.trouble(
        Some(Method::POST),
        "/blocks/",
        1,
        Trouble::Slow(Duration::ZERO),
    );
    server.trouble(Some(Method::POST), "/blocks/", 1, Trouble::Lost);
    assert_eq!(put(&ns, &[1], LONG), [true], "{:?}", server.seen());
    assert!(has(&ns, &[1], LONG));
    depot.close();
}

#[test]
fn a_put_without_room_waits_a_second() {
    let server = Server::start_impatient();
    let settings = json!({"capacity": "1MiB", "timeout": "10s"});
    let depot = server.open_with("S3", &settings);
    let ns = namespace(&depot);
    common::stored(&ns, &[0], LEN);
    // Somebody else collects from now on, and makes no room.
    let lease = server.path().join("bucket/kv/test/usage/lease");
    eventually("the end of the first count", || !lease.exists());
    fs::write(lease, "\"somebody\"").unwrap();
    let all: Vec<u64> = (1..40).collect();
    let begun = Instant::now();
    let stored = put(&ns, &all, LEN);
    let took = begun.elapsed();
    let count = stored.iter().filter(|one| **one).count();
    assert!(count > 5, "{count} stored in {took:?}");
    assert!(took < Duration::from_secs(20), "{took:?}");
    depot.close();
}

#[test]
fn what_comes_from_a_nearer_tier_waits_for_memory() {
    let server = Server::start();
    let mut settings = json!({"lanes": 2, "socket": "off", "s3": server.settings()});
    settings["s3"]["staging"] = "1MiB".into();
    settings["dax"] = json!({"path": server.path().join("dax"), "capacity": "16MiB"});
    let depot = Depot::open(&kvdepot_store::Config::new("Dax|S3", &settings).unwrap()).unwrap();
    let ns = namespace(&depot);
    let all: Vec<u64> = (0..60).collect();
    assert!(put(&ns, &all, LEN).iter().all(|one| *one));
    assert!(depot.drain(common::PATIENCE));
    assert_eq!(server.objects().len(), all.len());
    depot.close();
}

/// What one call asks of the store bounds no other one.
#[test]
fn a_long_lookup_does_not_delay_who_gets() {
    let server = Server::start_impatient();
    let depot = server.open_with("S3", &json!({"requests": 8}));
    let ns = namespace(&depot);
    common::stored(&ns, &[1], LEN);
    let slow = Trouble::Slow(Duration::from_millis(50));
    server.trouble(Some(Method::HEAD), "/blocks/", ALWAYS, slow);
    let looking = {
        let ns = ns.clone();
        std::thread::spawn(move || ns.contains(&keys(1000..5000)))
    };
    eventually("the lookup", || {
        server.seen().iter().any(|line| line.starts_with("HEAD"))
    });
    let begun = Instant::now();
    let outcome = get(&ns, &[1], LEN);
    let took = begun.elapsed();
    assert_eq!(outcome, [Outcome::Done], "after {took:?}");
    assert!(took < Duration::from_secs(10), "{took:?}");
    let _found = looking.join().unwrap();
    depot.close();
}
