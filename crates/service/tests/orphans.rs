//! Whoever worked for an owner that is gone keeps a medium from being written, is named, and leaves
//! nothing in children of the next owner.

#![expect(unsafe_code, reason = "stops and forks processes")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
#[path = "common/sleeper.rs"]
mod sleeper;

use common::{PATIENCE, Place, Served, config_of, eventually, key, namespace, put, start_put};
use kvdepot_service::Mover;
use kvdepot_store::Depot;
use kvdepot_store::inspect::Inspection;
use kvdepot_testkit::child::{self, Child};
use sleeper::fork_a_sleeper;

/// What the children of this file do.
fn play(role: &str) {
    match role {
        "owner" => {
            let depot = kvdepot_service::open(&config_of(&child::value("spec"))).unwrap();
            assert_eq!(put(&namespace(&depot), &[1], 20_000), [true]);
            child::say("open");
            child::sleep_until_killed();
        }
        "forks" => {
            let _depot = kvdepot_service::open(&config_of(&child::value("spec"))).unwrap();
            child::say(&fork_a_sleeper().to_string());
            child::sleep_until_killed();
        }
        _ => {
            let _mover = Mover::attach(child::value("socket").as_ref(), Some(1), true).unwrap();
            child::say("attached");
            child::sleep_until_killed();
        }
    }
}

fn free(depot: &Depot) -> bool {
    let ns = namespace(depot);
    let reserved = ns.reserve(&[(key(50), vec![1000])]).unwrap();
    let reserved: Vec<_> = reserved.into_iter().flatten().collect();
    ns.abort(&reserved);
    !reserved.is_empty()
}

#[test]
fn a_stopped_worker_of_the_last_owner_is_named() {
    const TEST: &str = "a_stopped_worker_of_the_last_owner_is_named";
    if let Some(role) = child::role() {
        return play(&role);
    }
    let place = Place::new("Cache|Dax", "1MiB", "4MiB");
    let mut owner = Child::start(TEST, "owner", &[("spec", &place.spec())]);
    owner.expect("open");
    let socket = place.socket();
    let mut worker = Child::start(TEST, "worker", &[("socket", socket.to_str().unwrap())]);
    worker.expect("attached");
    let inspection = Inspection::open(&place.arena()).unwrap();
    assert_eq!(
        inspection.orphans(),
        [],
        "it has an owner, and works for it"
    );
    owner.kill();
    // SAFETY: sends a signal to a child of this process.
    let stopped = unsafe { libc::kill(worker.pid() as libc::pid_t, libc::SIGSTOP) };
    assert_eq!(stopped, 0);
    let depot = place.serve();
    let ns = namespace(&depot);
    let pending = start_put(&ns, &[4], 20_000);
    let orphans = || depot.devices().unwrap().remove(0).orphans;
    eventually("its name", || orphans() == [worker.pid()]);
    let found = inspection.orphans();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(
        found[0].pid == worker.pid() && found[0].stopped,
        "{found:?}"
    );
    // Larger than the near tier, it would go to the medium at once.
    let error = ns
        .reserve_strict(&[(key(9), vec![2 << 20])])
        .unwrap_err()
        .to_string();
    let named = format!("process {} of the arena's previous owner", worker.pid());
    assert!(error.contains(&named), "{error}");
    worker.kill();
    assert_eq!(pending.wait(Some(PATIENCE)).unwrap(), [true]);
    assert!(orphans().is_empty() && inspection.orphans().is_empty());
}

#[test]
fn an_owner_that_has_forked_leaves_its_socket_to_the_next() {
    const TEST: &str = "an_owner_that_has_forked_leaves_its_socket_to_the_next";
    if let Some(role) = child::role() {
        return play(&role);
    }
    let place = Place::new("Cache|Dax", "1MiB", "4MiB");
    let mut owner = Child::start(TEST, "forks", &[("spec", &place.spec())]);
    let child: libc::pid_t = owner.line().unwrap().parse().unwrap();
    owner.kill();
    let next = kvdepot_service::open(&place.config());
    // SAFETY: ends a process that this test has had forked, and that nobody has waited for.
    let alive = unsafe { libc::kill(child, libc::SIGKILL) } == 0;
    assert!(alive, "proves nothing");
    assert!(next.is_ok(), "{:?}", next.err());
}

#[test]
fn a_child_of_an_owner_keeps_nothing_of_what_went_to_its_workers() {
    let place = Place::new("Dax", "", "1MiB");
    let attach = || Mover::attach(&place.socket(), Some(1), true).unwrap();
    let first = place.serve();
    let orphan = attach();
    first.close();
    let second = place.serve();
    // Before this owner is alone: its twin of what it sends gets the lock later.
    let worker = attach();
    assert!(!free(&second));
    let child = fork_a_sleeper();
    drop(orphan);
    assert!(free(&second));
    second.close();
    drop(worker);
    let third = place.serve();
    let stored = free(&third);
    // SAFETY: signal 0 asks whether the child is there; the other one ends it.
    let alive = unsafe { libc::kill(child, 0) } == 0;
    // SAFETY: as above, and its end is waited for.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
    assert!(alive, "proves nothing");
    assert!(stored, "the child keeps a lock");
}
