//! Clients that are stopped while they have open files of a tier: others find files to open beside
//! them.

use std::io::Write;
use std::path::Path;

use crate::common::frames::{self, Bare, frame};
use crate::common::{
    PATIENCE, Place, Served, assert_at_rest, eventually, get, has, keys, namespace, pin_all, put,
};
use kvdepot_store::{Depot, Outcome};
use kvdepot_testkit::child::{self, Child};
use rustix::process::{Resource, getrlimit, setrlimit};
use serde_json::json;

const LEN: usize = 1000;

/// Blocks of one large call: more than the 512 files that the process may have open for a tier.
const MANY: u64 = 600;

fn place(pipeline: &str) -> Place {
    let place = Place::new(pipeline, "1MiB", "");
    let files = place.dir().join("files");
    let settings = json!({
        "path": files, "capacity": "256MiB", "timeout": "60s", "lookup_timeout": "60s",
    });
    place.with_section("posix", settings)
}

/// Runs `body` in a child process that may open 1,024 files.
fn with_1024_descriptors(test: &str, body: impl FnOnce()) {
    if child::role().is_none() {
        return Child::start(test, "owner", &[]).expect("done");
    }
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = Some(1024);
    setrlimit(Resource::Nofile, limit).unwrap();
    body();
    child::say("done");
    child::sleep_until_killed();
}

/// Gets and puts of clients that make none of the moves that they are told to make.
fn stop_some(socket: &Path, id: kvdepot_store::NamespaceId) -> Vec<Bare> {
    let stopped = (0..2).map(|number: u64| {
        let mut client = Bare::attach(socket, 0);
        let first = number * MANY;
        let some = keys(first..first + MANY);
        let get = match number {
            0 => frames::get(1, id, &some, LEN as u64),
            _ => frames::get_prefix(1, id, &some, LEN as u64),
        };
        client.tasks.write_all(&get).unwrap();
        let new = keys((number + 1) << 32..((number + 1) << 32) + MANY);
        let put = frames::put(2, id, &new, LEN as u64);
        client.tasks.write_all(&put).unwrap();
        client
    });
    stopped.collect()
}

#[test]
fn stopped_clients_leave_open_files_for_others() {
    const TEST: &str = "share_files::stopped_clients_leave_open_files_for_others";
    with_1024_descriptors(TEST, || {
        for pipeline in ["Posix", "Cache|Posix"] {
            let place = place(pipeline);
            let owner = place.serve();
            let all: Vec<u64> = (0..6 * MANY).collect();
            assert!(!put(&namespace(&owner), &all, LEN).contains(&false));
            assert!(owner.drain(PATIENCE));
            owner.close();
            // Nothing is in memory.
            let owner = place.serve();
            let far = owner.stats().tiers.len() - 1;
            let ns = namespace(&owner);
            let mut stopped = stop_some(&place.socket(), ns.id());
            eventually("open files", || {
                let tier = &owner.stats().tiers[far];
                tier.pinned_blocks + tier.reserved_blocks >= 64
            });

            let client = kvdepot_service::connect(&place.socket(), Some(1)).unwrap();
            let theirs = namespace(&client);
            for (at, one) in [&ns, &theirs].into_iter().enumerate() {
                let first = (2 + 2 * at as u64) * MANY;
                let some: Vec<u64> = (first..first + 2 * MANY).collect();
                let came = get(one, &some, LEN);
                let missed = came.iter().filter(|came| **came != Outcome::Done).count();
                assert_eq!(missed, 0, "{pipeline}: caller {at}");
                let new: Vec<u64> = some.iter().map(|number| number + (1 << 40)).collect();
                assert!(
                    !put(one, &new, LEN).contains(&false),
                    "{pipeline}: caller {at}"
                );
                assert!(has(one, &[first], LEN));
                let pins = pin_all(one, first..first + 8);
                assert_eq!(pins.len(), 8, "{pipeline}: caller {at}");
                one.unpin(&pins, false);
            }
            assert_eq!(owner.stats().tiers[far].timeouts, 0);
            client.close();
            for client in &mut stopped {
                client
                    .tasks
                    .write_all(&frame(frames::GOODBYE, 0, &[]))
                    .unwrap();
            }
            assert_at_rest(&owner);
            owner.close();
        }
    });
}

#[test]
fn a_client_that_never_reads_leaves_space_for_prefetches_of_others() {
    const LEN: usize = 16_000;
    let place = place("Cache|Posix");
    let owner = place.serve();
    let all: Vec<u64> = (0..128).collect();
    assert!(!put(&namespace(&owner), &all, LEN).contains(&false));
    assert!(owner.drain(PATIENCE));
    owner.close();
    // Nothing is in memory.
    let owner = place.serve();
    let prefetched = |client: &Depot, numbers: std::ops::Range<u64>| {
        let task = namespace(client).prefetch(&keys(numbers)).unwrap();
        task.wait(Some(PATIENCE)).unwrap();
        let came = task.outcomes().into_iter();
        came.filter(|came| *came == Outcome::Done).count() * LEN
    };
    let [greedy, other] =
        [0, 1].map(|_| kvdepot_service::connect(&place.socket(), Some(1)).unwrap());
    // The first tier has 1 MiB: half of it for all that nobody has read, half of this for one.
    let came = prefetched(&greedy, 0..64);
    assert!((200_000..=1 << 18).contains(&came), "{came}");
    assert_eq!(prefetched(&greedy, 64..65), 0);
    assert_eq!(prefetched(&other, 100..107), 7 * LEN);
    assert!(has(&namespace(&greedy), &(0..8).collect::<Vec<u64>>(), LEN));
    assert_eq!(prefetched(&greedy, 64..68), 4 * LEN);
    greedy.close();
    other.close();
    assert_at_rest(&owner);
}

#[test]
fn pins_that_last_keep_no_client_from_its_gets() {
    const TEST: &str = "share_files::pins_that_last_keep_no_client_from_its_gets";
    with_1024_descriptors(TEST, || {
        let place = place("Posix");
        let owner = place.serve();
        let ns = namespace(&owner);
        let all: Vec<u64> = (0..MANY).collect();
        assert!(!put(&ns, &all, LEN).contains(&false));
        let client = kvdepot_service::connect(&place.socket(), Some(1)).unwrap();
        let theirs = namespace(&client);
        for pinned_by in [&ns, &theirs] {
            // As many as there may be.
            let pins = pin_all(pinned_by, 0..MANY);
            assert!((32..MANY as usize).contains(&pins.len()), "{}", pins.len());
            for one in [&ns, &theirs] {
                assert!(has(one, &all, LEN));
            }
            pinned_by.unpin(&pins, false);
        }
        client.close();
        assert_at_rest(&owner);
    });
}
