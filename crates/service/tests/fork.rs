//! A forked child owns nothing. Alone in its process, because it forks.

#![expect(unsafe_code, reason = "forks")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::time::Duration;

use common::{Place, Served, get, has, key, keys, namespace, put};
use kvdepot_store::{BlockBuffers, Depot, Error, Namespace, Outcome, Pin, Reservation, Task};

/// What the child finds wrong; 0 if nothing.
fn in_child(
    depot: &Depot,
    ns: &Namespace,
    pins: &[Pin],
    reserved: &[Reservation],
    waiting: &Task,
) -> i32 {
    let closed = |result: Result<(), Error>| matches!(result, Err(Error::Closed(_)));
    let blocks = || BlockBuffers::whole([common::block(1, 100)]);
    let answers = [
        closed(ns.contains(&[key(1)]).map(drop)),
        closed(ns.prefix(&[key(1)]).map(drop)),
        closed(ns.get(keys([1]), blocks()).map(drop)),
        closed(ns.put(keys([5]), blocks()).map(drop)),
        closed(ns.remove(&[key(1)]).map(drop)),
        closed(ns.clear().map(drop)),
        closed(ns.pin(&[key(1)], false).map(drop)),
        closed(ns.reserve(&[(key(6), vec![10])]).map(drop)),
        closed(
            ns.commit(reserved, &[vec![kvdepot_store::Checksum([0; 16])]])
                .map(drop),
        ),
    ];
    if let Some(wrong) = answers.iter().position(|closed| !closed) {
        return 10 + wrong as i32;
    }
    if ns.discard(pins) != 0 {
        return 2;
    }
    // Its lanes are in the parent, who may never fork again and never answer here.
    if !closed(waiting.wait(None).map(drop)) || !closed(waiting.wait_released(None)) {
        return 3;
    }
    ns.abort(reserved);
    ns.unpin(pins, true);
    depot.close();
    0
}

/// Runs `child` in a fork and answers its exit code, or that it is still running.
fn fork(child: impl FnOnce() -> i32) -> libc::pid_t {
    // SAFETY: the child uses the C library's allocator, which handles forks, and no lock that
    // another thread of the parent holds: the depot is idle.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(100);
        // SAFETY: ends this process without the parent's exit handlers.
        unsafe { libc::_exit(code) }
    }
    pid
}

fn exit_code(pid: libc::pid_t) -> i32 {
    let mut status = 0;
    // SAFETY: waits for a child of this process.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status), "status {status:#x}");
    libc::WEXITSTATUS(status)
}

#[test]
fn a_forked_child_can_do_nothing_and_keeps_nothing_alive() {
    let place = Place::new("Cache|Dax", "1MiB", "4MiB");
    let depot = place.serve();
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1, 2], 5000), [true; 2]);
    let pins: Vec<_> = ns
        .pin(&[key(1)], false)
        .unwrap()
        .into_iter()
        .flatten()
        .collect();
    let reserved: Vec<_> = ns
        .reserve(&[(key(3), vec![10])])
        .unwrap()
        .into_iter()
        .flatten()
        .collect();
    // Waits for the reservation.
    let waiting = common::start_put(&ns, &[3], 10);
    let child = fork(|| in_child(&depot, &ns, &pins, &reserved, &waiting));
    assert_eq!(exit_code(child), 0);
    // Dropping everything in the child changes nothing here either.
    let twin = (depot.clone(), ns.clone());
    let code = exit_code(fork(move || {
        drop(twin);
        0
    }));
    assert_eq!(code, 0);
    let stats = depot.stats();
    assert_eq!(
        (stats.tiers[0].pinned_blocks, stats.tiers[0].reserved_blocks),
        (1, 1)
    );
    assert!(has(&ns, &[1, 2], 5000));
    assert_eq!(put(&ns, &[5], 5000), [true]);
    assert!(kvdepot_service::Mover::attach(&place.socket(), Some(1), true).is_ok());
    ns.unpin(&pins, false);
    ns.abort(&reserved);
    assert_eq!(waiting.wait(Some(common::PATIENCE)).unwrap(), [true]);
    // A child that lives on does not keep the lock of its parent, who closes.
    let child = fork(|| {
        std::thread::sleep(Duration::from_secs(60));
        0
    });
    depot.close();
    let next = place.serve();
    let ns = namespace(&next);
    assert_eq!(
        get(&ns, &[1, 2, 4], 5000),
        [Outcome::Done, Outcome::Done, Outcome::Miss]
    );
    assert_eq!(
        put(&ns, &[4], 5000),
        [true],
        "nor does it count as a writer"
    );
    // SAFETY: a child of this process, which has not been waited for.
    assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
    let mut status = 0;
    // SAFETY: waits for that child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
}
