//! Owners that are stopped or gone: no call of a client waits for longer than its time limit, and
//! every verb answers by one rule.

#![expect(unsafe_code, reason = "stops another process and lets it go on")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::{
    PATIENCE, Place, config_of, eventually, get, has, key, keys, namespace, put, start_put,
};
use kvdepot_store::{Depot, DrainTo, Error, Namespace, Outcome, interruptible};
use kvdepot_testkit::child::{self, Child};
use kvdepot_testkit::log::Log;

const LEN: usize = 40_000;
const LIMIT: Duration = Duration::from_millis(300);
/// What a call may take on a busy machine.
const SOON: Duration = Duration::from_secs(8);

fn signal(child: &Child, number: libc::c_int) {
    // SAFETY: sends a signal to a child of this process.
    unsafe { assert_eq!(libc::kill(child.pid() as libc::pid_t, number), 0) };
}

/// Stops every thread of a process.
fn stop(child: &Child) {
    signal(child, libc::SIGSTOP);
    let state = |task: std::io::Result<std::fs::DirEntry>| {
        let text = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
        text.as_bytes()[text.rfind(')').unwrap() + 2]
    };
    eventually("the stop", || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", child.pid())).unwrap();
        tasks.map(state).all(|state| state == b'T')
    });
}

/// A depot that another process serves, which runs `test` too; `None` in that process, at its end.
fn served(test: &str) -> Option<(Place, Child)> {
    if child::role().is_some() {
        own();
        return None;
    }
    let place = Place::new("Cache|Dax", "4MiB", "16MiB");
    let owner = serve(test, &place);
    Some((place, owner))
}

/// Another process that serves `place`; runs `test` as its owner.
fn serve(test: &str, place: &Place) -> Child {
    let mut owner = Child::start(test, "owner", &[("spec", &place.spec())]);
    owner.expect("open");
    owner
}

/// What that process does.
fn own() {
    let _depot = kvdepot_service::open(&config_of(&child::value("spec"))).unwrap();
    child::say("open");
    child::sleep_until_killed();
}

/// A client that waits so long for each answer.
fn connect_within(place: &Place, limit: Duration) -> Depot {
    let mut client = None;
    // A machine may stand still for longer.
    eventually("a client", || {
        let connected = kvdepot_service::connect_within(&place.socket(), Some(1), Some(limit));
        client = connected.ok();
        client.is_some()
    });
    client.unwrap()
}

fn connect(place: &Place) -> Depot {
    connect_within(place, LIMIT)
}

fn within<T>(limit: Duration, what: &str, run: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let answer = run();
    assert!(begun.elapsed() < limit, "{what} took {:?}", begun.elapsed());
    answer
}

/// Blocks that somebody has pinned or is writing.
fn held(depot: &Depot) -> u64 {
    let stats = depot.stats();
    let each = stats.tiers.iter();
    each.map(|tier| tier.pinned_blocks + tier.reserved_blocks)
        .sum()
}

fn is_gone<T>(answer: Result<T, Error>) -> bool {
    matches!(answer, Err(Error::Peer { .. }))
}

/// A call, and whether its answer is what the rule says of a depot without an owner.
type Verb = (&'static str, fn(&Depot, &Namespace) -> bool);

const VERBS: [Verb; 17] = [
    ("contains", |_, ns| {
        ns.contains(&keys([1])).unwrap() == [false]
    }),
    ("prefix", |_, ns| ns.prefix(&keys([1])).unwrap() == 0),
    ("nearest", |_, ns| ns.nearest(&keys([1])).unwrap() == [None]),
    ("pin", |_, ns| {
        ns.pin(&keys([1]), false).unwrap()[0].is_none()
    }),
    ("reserve", |_, ns| {
        ns.reserve(&[(key(9), vec![10])])
            .unwrap()
            .iter()
            .all(Option::is_none)
    }),
    ("get", |_, ns| get(ns, &[1], LEN) == [Outcome::Miss]),
    ("put", |_, ns| {
        let task = start_put(ns, &[77], LEN);
        task.wait(Some(PATIENCE)).unwrap() == [false] && task.outcomes() == [Outcome::Dropped]
    }),
    ("prefetch", |_, ns| {
        ns.prefetch(&keys([1]))
            .unwrap()
            .wait(Some(PATIENCE))
            .unwrap()
            == [false]
    }),
    ("blocks", |_, ns| ns.blocks().unwrap().is_empty()),
    ("namespaces", |depot, _| {
        depot.namespaces().unwrap().is_empty()
    }),
    ("devices", |depot, _| depot.devices().unwrap().is_empty()),
    ("gone", |depot, _| depot.gone(9).unwrap().blocks.is_empty()),
    ("stats", |depot, _| {
        let stats = depot.stats();
        stats.tiers.len() == 2 && stats.put_blocks == 0 && stats.tiers[1].blocks == 0
    }),
    ("drain", |depot, _| !depot.drain(Duration::from_millis(100))),
    ("remove", |_, ns| is_gone(ns.remove(&keys([1])))),
    ("clear", |_, ns| is_gone(ns.clear())),
    ("drain_device", |depot, _| {
        is_gone(depot.drain_device("/x".as_ref(), DrainTo::Others, Duration::ZERO))
    }),
];

#[test]
fn no_call_outlasts_its_limit_when_the_owner_is_stopped() {
    let Some((place, owner)) =
        served("share_hung::no_call_outlasts_its_limit_when_the_owner_is_stopped")
    else {
        return;
    };
    // One client each: after the first call that has waited in vain the others need not wait.
    let clients: Vec<_> = VERBS.iter().map(|_| connect(&place)).collect();
    let spaces: Vec<_> = clients.iter().map(namespace).collect();
    eventually("a block", || put(&spaces[0], &[1], LEN) == [true]);
    stop(&owner);
    std::thread::scope(|scope| {
        for (at, (name, ask)) in VERBS.iter().enumerate() {
            let (client, ns) = (&clients[at], &spaces[at]);
            scope.spawn(move || {
                assert!(
                    within(SOON, name, || ask(client, ns)),
                    "the answer of {name}"
                );
                // Again at once: it is known to be gone.
                within(SOON, name, || ask(client, ns));
                assert!(!client.is_connected());
            });
        }
    });
    // Some leave without it.
    let mut left = clients;
    let leaving = left.pop().unwrap();
    within(4 * SOON, "close", || leaving.close());
    signal(&owner, libc::SIGCONT);
    for (client, ns) in left.iter().zip(&spaces) {
        eventually("the owner's return", || client.is_connected());
        // What was asked of it before may still happen: blocks are removed.
        eventually("a block", || {
            put(ns, &[1], LEN) == [true] && has(ns, &[1], LEN)
        });
    }
    eventually("the end of whatever was granted meanwhile", || {
        held(&left[0]) == 0
    });
}

#[test]
fn after_the_owners_death_every_verb_answers_by_one_rule() {
    const TEST: &str = "share_hung::after_the_owners_death_every_verb_answers_by_one_rule";
    let Some((place, mut owner)) = served(TEST) else {
        return;
    };
    let client = connect_within(&place, PATIENCE);
    let ns = namespace(&client);
    assert_eq!(put(&ns, &[1], LEN), [true]);
    assert!(client.drain(PATIENCE) && client.is_connected());
    owner.kill();
    eventually("the news", || !client.is_connected());
    for (name, ask) in VERBS {
        assert!(
            within(SOON, name, || ask(&client, &ns)),
            "the answer of {name}"
        );
    }
    let owner = serve(TEST, &place);
    eventually("the next owner", || client.is_connected());
    // A put was dropped meanwhile: whoever asks hears of it once.
    assert!(!client.drain(PATIENCE));
    assert!(client.drain(PATIENCE));
    assert!(has(&ns, &[1], LEN));
    // It knows the namespace by its name too.
    let known = client.namespaces().unwrap();
    assert!(
        known.iter().all(|one| one.description.is_some()),
        "{known:?}"
    );
    drop(owner);
}

#[test]
fn an_owner_that_does_not_answer_is_named_by_its_socket() {
    let Some((place, owner)) =
        served("share_hung::an_owner_that_does_not_answer_is_named_by_its_socket")
    else {
        return;
    };
    let client = connect(&place);
    let ns = namespace(&client);
    stop(&owner);
    let log = Log::default();
    tracing::subscriber::with_default(log.clone(), || {
        assert_eq!(ns.contains(&keys([1])).unwrap(), [false]);
    });
    let named = format!(
        "server at {}: no response within 0.3 s",
        place.socket().display()
    );
    assert!(
        !log.lines_with(&named).is_empty(),
        "{:?}",
        log.lines_with("")
    );
    signal(&owner, libc::SIGCONT);
}

static SIGNAL: AtomicBool = AtomicBool::new(false);

#[test]
fn a_signal_ends_a_call_at_once_and_what_it_was_granted_is_given_back() {
    let Some((place, owner)) =
        served("share_hung::a_signal_ends_a_call_at_once_and_what_it_was_granted_is_given_back")
    else {
        return;
    };
    let client = kvdepot_service::connect(&place.socket(), Some(1)).unwrap();
    let ns = namespace(&client);
    assert_eq!(put(&ns, &[1, 2, 3], LEN), [true; 3]);
    stop(&owner);
    let answers = std::thread::scope(|scope| {
        let ask = |ask: fn(&Namespace) -> Result<(), Error>| {
            let ns = &ns;
            scope.spawn(move || {
                let answer = interruptible(|| SIGNAL.load(Ordering::Relaxed), || ask(ns));
                (Instant::now(), answer)
            })
        };
        let calls = [
            ask(|ns| ns.pin(&keys([1, 2, 9]), false).map(drop)),
            ask(|ns| {
                ns.reserve(&[(key(5), vec![100]), (key(6), vec![1, 2])])
                    .map(drop)
            }),
            ask(|ns| ns.clear().map(drop)),
            ask(|ns| ns.prefix(&keys([1])).map(drop)),
        ];
        std::thread::sleep(Duration::from_millis(200));
        let pressed = Instant::now();
        SIGNAL.store(true, Ordering::Relaxed);
        calls.map(|call| {
            let (ended, answer) = call.join().unwrap();
            (ended - pressed, answer)
        })
    });
    for (late, answer) in answers {
        assert!(matches!(answer, Err(Error::Interrupted)), "{answer:?}");
        assert!(late < Duration::from_secs(10), "{late:?}");
    }
    signal(&owner, libc::SIGCONT);
    // The connection is sound, and so is what it holds.
    assert!(client.is_connected());
    eventually("nothing held", || held(&client) == 0);
    assert_eq!(put(&ns, &[5, 6], LEN), [true; 2]);
}

#[test]
fn ending_pins_never_waits_for_the_owner_or_another_call() {
    let Some((place, owner)) =
        served("share_hung::ending_pins_never_waits_for_the_owner_or_another_call")
    else {
        return;
    };
    let client = kvdepot_service::connect(&place.socket(), Some(1)).unwrap();
    let ns = namespace(&client);
    let numbers: Vec<u64> = (0..60).collect();
    assert!(put(&ns, &numbers, LEN).iter().all(|stored| *stored));
    let pins = ns.pin(&keys(numbers), false).unwrap();
    let pins: Vec<_> = pins.into_iter().flatten().collect();
    assert_eq!(pins.len(), 60);
    stop(&owner);
    let (waiting, ended) = (ns.clone(), Arc::new(AtomicBool::new(false)));
    let done = Arc::clone(&ended);
    let call = std::thread::spawn(move || {
        let found = waiting.prefix(&keys([0])).unwrap();
        done.store(true, Ordering::Relaxed);
        found
    });
    std::thread::sleep(Duration::from_millis(100));
    for pin in &pins {
        within(SOON, "unpin", || {
            ns.unpin(std::slice::from_ref(pin), false);
        });
    }
    assert!(!ended.load(Ordering::Relaxed), "the other call waits");
    signal(&owner, libc::SIGCONT);
    assert_eq!(call.join().unwrap(), 1);
    eventually("the end of the pins", || held(&client) == 0);
}

#[test]
fn what_ends_while_the_owner_is_stopped_is_given_back_when_it_goes_on() {
    let Some((place, owner)) =
        served("share_hung::what_ends_while_the_owner_is_stopped_is_given_back_when_it_goes_on")
    else {
        return;
    };
    // It waits for longer than a machine stands still.
    let limit = Duration::from_secs(5);
    let client = connect_within(&place, limit);
    let ns = namespace(&client);
    assert_eq!(put(&ns, &[1, 2, 3], LEN), [true; 3]);
    assert!(client.drain(PATIENCE));
    let pins = ns.pin(&keys([1, 2, 3]), false).unwrap();
    let pins: Vec<_> = pins.into_iter().flatten().collect();
    let wanted: Vec<_> = (4..9).map(|number| (key(number), vec![100])).collect();
    let reserved = ns.reserve(&wanted).unwrap();
    let reserved: Vec<_> = reserved.into_iter().flatten().collect();
    assert_eq!((pins.len(), reserved.len()), (3, 5));
    let held = || {
        let tiers = client.stats().tiers;
        let sum = |of: fn(&_) -> u64| tiers.iter().map(of).sum::<u64>();
        (
            sum(|tier: &kvdepot_store::TierStats| tier.pinned_blocks),
            sum(|tier: &kvdepot_store::TierStats| tier.reserved_blocks),
        )
    };
    assert_eq!(held(), (3, 5));
    stop(&owner);
    let commit = |at: usize| {
        let sums = [vec![kvdepot_media::Checksum::default()]];
        ns.commit(&reserved[at..=at], &sums).unwrap()
    };
    std::thread::scope(|scope| {
        // It holds the connection until the owner is taken for gone.
        let waiting = scope.spawn(|| commit(0));
        std::thread::sleep(limit / 3);
        ns.unpin(&pins[..1], true);
        ns.abort(&reserved[1..2]);
        assert_eq!(waiting.join().unwrap(), [false]);
    });
    assert!(!client.is_connected());
    ns.unpin(&pins[1..2], false);
    ns.abort(&reserved[2..3]);
    assert_eq!(commit(3), [false]);
    signal(&owner, libc::SIGCONT);
    eventually("the owner's return", || client.is_connected());
    eventually("the end of all but one of each", || held() == (1, 1));
    ns.unpin(&pins[2..], false);
    ns.abort(&reserved[4..]);
    eventually("the end of all", || held() == (0, 0));
    assert_eq!(
        put(&ns, &[5, 6, 7], 100),
        [true; 3],
        "nobody is writing them"
    );
}

#[test]
fn what_an_interrupted_call_was_granted_is_given_back_without_another_call() {
    let Some((place, owner)) = served(
        "share_hung::what_an_interrupted_call_was_granted_is_given_back_without_another_call",
    ) else {
        return;
    };
    let (client, other) = (
        kvdepot_service::connect(&place.socket(), Some(1)).unwrap(),
        kvdepot_service::connect(&place.socket(), Some(1)).unwrap(),
    );
    let ns = namespace(&client);
    assert_eq!(put(&ns, &[1, 2], LEN), [true; 2]);
    stop(&owner);
    static PRESSED: AtomicBool = AtomicBool::new(false);
    let asked = std::thread::scope(|scope| {
        let ask = scope.spawn(|| {
            interruptible(
                || PRESSED.load(Ordering::Relaxed),
                || ns.reserve(&[(key(5), vec![100])]),
            )
        });
        std::thread::sleep(Duration::from_millis(200));
        PRESSED.store(true, Ordering::Relaxed);
        ask.join().unwrap()
    });
    assert!(matches!(asked, Err(Error::Interrupted)), "{asked:?}");
    signal(&owner, libc::SIGCONT);
    // Who interrupts may go to sleep then; others want to store that block.
    assert_eq!(put(&namespace(&other), &[5], LEN), [true]);
    eventually("nothing held", || held(&other) == 0);
    assert!(client.is_connected());
}
