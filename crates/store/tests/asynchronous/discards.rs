//! What a tier that stands apart has of a block that did not verify: it is gone before anybody
//! hears that, unless the tier does not answer.

use std::fs;
use std::path::{Path, PathBuf};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::bucket::Server;
use crate::common::{self, PATIENCE, get, has, key, keys, namespace, put};
use crate::folder;
use crate::rotten::{BLOCKS, Finder, LEN, find_and_put, rot};
use crate::tiers::late::{Mood, slow_files};
use kvdepot_store::{BlockBuffers, Buffer, Config, Depot, Namespace, Outcome, Task};
use serde_json::{Value, json};

fn all() -> Vec<u64> {
    (0..BLOCKS).collect()
}

/// Stores blocks that rot when the depot is closed, has each of `finders` find some of them and
/// put them again, and looks at all of them behind the next opening.
fn goes_round(open: impl Fn() -> Depot, files: impl Fn() -> Vec<PathBuf>, finders: &[Finder]) {
    let depot = open();
    assert!(put(&namespace(&depot), &all(), LEN).iter().all(|ok| *ok));
    assert!(depot.drain(PATIENCE));
    depot.close();
    assert_eq!(files().len(), BLOCKS as usize);
    files().iter().for_each(|file| rot(file));
    let depot = open();
    find_and_put(&namespace(&depot), finders);
    assert!(depot.drain(PATIENCE));
    depot.close();
    let depot = open();
    let outcomes = get(&namespace(&depot), &all(), LEN);
    let lost = outcomes.iter().filter(|one| **one != Outcome::Done).count();
    assert_eq!(lost, 0, "blocks that were acknowledged, {finders:?}");
    depot.close();
}

#[test]
fn a_put_behind_what_was_corrupt_in_files_is_stored() {
    for (pipeline, finders) in [
        ("Posix", &[Finder::Get, Finder::Discard][..]),
        (
            "Cache|Posix",
            &[Finder::Get, Finder::Prefetch, Finder::Discard],
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let open = || folder::open_with(pipeline, dir.path(), json!({}));
        goes_round(open, || folder::files(dir.path()), finders);
    }
}

#[test]
fn a_put_behind_what_was_corrupt_in_objects_is_stored() {
    for (pipeline, finders) in [
        ("S3", &[Finder::Get][..]),
        ("Cache|S3", &[Finder::Get, Finder::Prefetch]),
    ] {
        let server = Server::start();
        let open = || server.open_with(pipeline, &json!({}));
        goes_round(open, || server.objects(), finders);
    }
}

/// A depot over files that are slow to discard, with blocks of which the first ones have rotted.
fn rotten(dir: &Path, mood: &Arc<Mood>, mut settings: Value, rotten: u64) -> (Depot, Namespace) {
    settings["lanes"] = json!(1);
    settings["lookup_timeout"] = json!("60s");
    settings["slow"] = json!({"path": dir});
    let config = Config::with_kinds(&slow_files(mood), "Slow", &settings).unwrap();
    let depot = Depot::open(&config).unwrap();
    let ns = namespace(&depot);
    common::stored(&ns, &[0, 1, 2, 3, 4, 5], LEN);
    for number in 0..rotten {
        rot(&dir.join(format!("{}-{}", ns.id(), key(number))));
    }
    (depot, ns)
}

fn start_get(ns: &Namespace, numbers: &[u64]) -> Task {
    let buffers = numbers.iter().map(|_| Buffer::from_vec(vec![0; LEN]));
    ns.get(keys(numbers.iter().copied()), BlockBuffers::whole(buffers))
        .unwrap()
}

#[test]
fn who_waits_for_a_discard_waits_alone() {
    const DELAY: Duration = Duration::from_millis(400);
    let (dir, mood) = (tempfile::tempdir().unwrap(), Arc::new(Mood::default()));
    let (depot, ns) = rotten(dir.path(), &mood, json!({}), 3);
    mood.discard_delay
        .store(DELAY.as_micros() as u64, Ordering::Relaxed);
    let begun = Instant::now();
    let waiting = [start_get(&ns, &[0, 4]), start_get(&ns, &[5, 1])];
    // The one lane has time for others.
    assert!(has(&ns, &[3, 4, 5], LEN));
    let outcomes = || [waiting[0].outcomes(), waiting[1].outcomes()];
    let before = outcomes();
    if begun.elapsed() < DELAY {
        let (done, pending) = (Outcome::Done, Outcome::Pending);
        assert_eq!(before, [[pending, done], [done, pending]]);
    }
    for task in &waiting {
        task.wait(Some(PATIENCE)).unwrap();
    }
    assert!(begun.elapsed() >= DELAY);
    let (done, corrupt) = (Outcome::Done, Outcome::Corrupt);
    assert_eq!(outcomes(), [[corrupt, done], [done, corrupt]]);
    // A call of the verb waits, too, and says how many.
    let begun = Instant::now();
    let pins = common::pin_all(&ns, 2..3);
    assert_eq!(ns.discard(&pins), 1);
    assert!(begun.elapsed() >= DELAY);
    ns.unpin(&pins, false);
    depot.close();
}

#[test]
fn a_tier_that_does_not_answer_a_discard_is_waited_for_as_long_as_for_others() {
    let (dir, mood) = (tempfile::tempdir().unwrap(), Arc::new(Mood::default()));
    let settings = json!({"tier_timeout": "200ms", "close_timeout": "10s"});
    let (depot, ns) = rotten(dir.path(), &mood, settings, 6);
    mood.discard_delay.store(600_000_000, Ordering::Relaxed);
    let pins = common::pin_all(&ns, 0..4);
    let begun = Instant::now();
    assert_eq!(get(&ns, &[5], LEN), [Outcome::Corrupt]);
    assert!(begun.elapsed() >= Duration::from_millis(200));
    for pin in &pins {
        assert_eq!(ns.discard(slice::from_ref(pin)), 0);
    }
    // Behind the third the tier is left alone.
    let took = begun.elapsed();
    assert!(took >= Duration::from_millis(600), "{took:?}");
    assert!(took < PATIENCE, "{took:?}");
    assert!(depot.stats().tiers[0].timeouts >= 3);
    // It has heard of all of them.
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    ns.unpin(&pins, false);
    depot.close();
}

#[test]
fn a_discard_of_what_was_put_again_takes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let depot = folder::open(dir.path());
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1], LEN), [true]);
    rot(&folder::files(dir.path())[0]);
    // Two have found it, and each says so.
    let pins = [0; 2].map(|_| common::pin_all(&ns, 1..2));
    assert_eq!(ns.discard(&pins[0]), 1);
    assert_eq!(put(&ns, &[1], LEN), [true]);
    assert_eq!(ns.discard(&pins[1]), 0);
    assert_eq!(ns.contains(&keys([1])).unwrap(), [true]);
    assert!(has(&ns, &[1], LEN));
    pins.iter().for_each(|pins| ns.unpin(pins, false));
    depot.close();
}
