//! A worker that forks: its child, which never executes another program, holds nobody up.

#![expect(unsafe_code, reason = "forks")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
#[path = "common/sleeper.rs"]
mod sleeper;

use common::{Place, Served, namespace, put};
use kvdepot_service::Mover;
use kvdepot_testkit::child::{self, Child};
use sleeper::fork_a_sleeper;

/// Attaches, forks a child that lives on, and says its process id.
fn play() {
    let _mover = Mover::attach(child::value("socket").as_ref(), Some(1), true).unwrap();
    let pid = fork_a_sleeper();
    child::say(&pid.to_string());
    child::sleep_until_killed();
}

#[test]
fn the_child_of_a_killed_worker_does_not_count_as_a_writer() {
    const TEST: &str = "the_child_of_a_killed_worker_does_not_count_as_a_writer";
    if child::role().is_some() {
        return play();
    }
    let place = Place::new("Dax", "", "1MiB");
    let depot = place.serve();
    assert_eq!(put(&namespace(&depot), &[1], 5000), [true]);
    let socket = place.socket();
    let mut worker = Child::start(TEST, "worker", &[("socket", socket.to_str().unwrap())]);
    let grandchild: libc::pid_t = worker.line().unwrap().parse().unwrap();
    depot.close();
    let depot = place.serve();
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[2], 5000), [false], "the worker may still write");
    worker.kill();
    // SAFETY: signal 0 asks whether the process is there, and the other one ends it.
    let alive = unsafe { libc::kill(grandchild, 0) } == 0;
    let stored = put(&ns, &[2], 5000);
    // SAFETY: as above; it is nobody's child here, and cannot have been reaped while it sleeps.
    unsafe { libc::kill(grandchild, libc::SIGKILL) };
    assert!(alive, "proves nothing");
    assert_eq!(stored, [true]);
}
