//! A tier whose blocks lie in files, and other processes that open them by themselves: what they
//! get is what was put, or nothing, whatever has become of a file's name.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::common;
use crate::common::frames::{self, Bare, MOVE, read_frame};
use crate::common::{PATIENCE, eventually, get, has, key, keys, namespace, put};
use crate::folder;
use crate::tiers::files;
use kvdepot_service::Mover;
use kvdepot_store::{BlockBuffers, Buffer, Checksum, Config, Depot, Namespace, Outcome, Pin};
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::child::{self, Child};
use serde_json::json;

const LEN: usize = 70_001;

/// A directory with a socket and the files of a depot.
struct Home(tempfile::TempDir);

impl Home {
    fn new() -> Home {
        Home(tempfile::tempdir().unwrap())
    }

    fn socket(&self) -> PathBuf {
        self.0.path().join("s")
    }

    fn files(&self) -> PathBuf {
        self.0.path().join("files")
    }

    fn serve(&self, pipeline: &str) -> Depot {
        serve(self.0.path(), pipeline)
    }

    fn connect(&self) -> Depot {
        kvdepot_service::connect(&self.socket(), Some(2)).unwrap()
    }

    /// A depot whose blocks lie in files only.
    fn serve_stored(&self, pipeline: &str, numbers: &[u64]) -> Depot {
        let depot = self.serve(pipeline);
        assert!(put(&namespace(&depot), numbers, LEN).iter().all(|ok| *ok));
        assert!(depot.drain(PATIENCE));
        depot.close();
        self.serve(pipeline)
    }

    fn path_of(&self, ns: &Namespace, number: u64) -> PathBuf {
        self.files().join(format!("{}-{}", ns.id(), key(number)))
    }

    /// Files that were not published.
    fn unfinished(&self) -> usize {
        let names = fs::read_dir(self.files()).unwrap();
        let names = names.map(|entry| entry.unwrap().path());
        names.filter(|path| path.extension().is_some()).count()
    }
}

fn serve(home: &Path, pipeline: &str) -> Depot {
    serve_closing(home, pipeline, "10s")
}

/// One that waits so long for its clients when it closes.
fn serve_closing(home: &Path, pipeline: &str, close_timeout: &str) -> Depot {
    let path = |name| home.join(name).to_str().unwrap().to_owned();
    let mut settings = json!({
        "lanes": 2,
        "close_timeout": close_timeout,
        // Longer than a machine stands still.
        "lookup_timeout": "60s",
        "socket": path("s"),
        "files": {"path": path("files")},
    });
    if pipeline.contains("Cache") {
        settings["cache"] = json!({"capacity": "1MiB"});
    }
    let config = Config::with_kinds(&files::kinds(), pipeline, &settings).unwrap();
    kvdepot_service::open(&config).unwrap()
}

fn attach(home: &Home) -> Mover {
    Mover::attach(&home.socket(), Some(1), false).unwrap()
}

fn pin(ns: &Namespace, number: u64) -> Pin {
    ns.pin(&[key(number)], false).unwrap().remove(0).unwrap()
}

/// What a worker gets of a pinned block, and whether it says that its bytes are wrong.
fn load(mover: &Mover, pin: &Pin) -> (Option<Checksum>, bool, Vec<u8>) {
    let buffer = Buffer::from_vec(vec![0; LEN]);
    let buffers = BlockBuffers::whole([buffer.clone()]);
    let job = mover.load(&[pin.placement()], &buffers, 0).unwrap();
    assert!(job.wait(Some(PATIENCE)));
    (job.checksums()[0], job.corrupt()[0], buffer.to_vec())
}

#[test]
fn clients_and_workers_get_what_only_files_have() {
    for pipeline in ["Files", "Cache|Files"] {
        let home = Home::new();
        let all: Vec<u64> = (0..40).collect();
        let owner = home.serve_stored(pipeline, &all);
        let (client, worker) = (home.connect(), attach(&home));
        let (there, here) = (namespace(&client), namespace(&owner));
        for ns in [&there, &here] {
            let pinned = pin(ns, 7);
            let (checksum, _, bytes) = load(&worker, &pinned);
            assert!(checksum.is_some() && bytes == content(7, LEN), "{pipeline}");
            ns.unpin(&[pinned], false);
        }
        assert!(has(&there, &all, LEN), "{pipeline}");
        assert_eq!(get(&there, &[1, 99], LEN), [Outcome::Done, Outcome::Miss]);
        assert_eq!(get(&there, &[1], LEN + 1), [Outcome::Length]);
        assert_eq!(there.pin(&keys([99]), false).unwrap(), [None]);
        drop(worker);
        client.close();
        // The tier panics where files are held.
        owner.close();
    }
}

#[test]
fn clients_store_into_files() {
    for pipeline in ["Files", "Cache|Files"] {
        let home = Home::new();
        let all: Vec<u64> = (0..40).collect();
        let owner = home.serve(pipeline);
        let client = home.connect();
        let ns = namespace(&client);
        assert!(put(&ns, &all, LEN).iter().all(|ok| *ok), "{pipeline}");
        // Larger than the memory before the files.
        assert_eq!(put(&ns, &[77], 2 << 20), [true]);
        assert!(put(&ns, &all, LEN).iter().all(|ok| *ok), "again");
        assert!(client.drain(PATIENCE));
        assert!(
            has(&ns, &all, LEN) && has(&ns, &[77], 2 << 20),
            "{pipeline}"
        );
        client.close();
        owner.close();
        assert_eq!(home.unfinished(), 0);
        let owner = home.serve(pipeline);
        assert!(has(&namespace(&owner), &all, LEN), "{pipeline}");
        owner.close();
    }
}

#[test]
fn a_file_that_rots_is_a_miss_for_clients_and_is_written_anew() {
    let home = Home::new();
    let owner = home.serve_stored("Files", &[1, 2, 3]);
    let client = home.connect();
    let ns = namespace(&client);
    let mut bytes = fs::read(home.path_of(&ns, 1)).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(home.path_of(&ns, 1), bytes).unwrap();
    let cut = fs::OpenOptions::new()
        .write(true)
        .open(home.path_of(&ns, 2));
    cut.unwrap().set_len(5000).unwrap();
    let outcomes = get(&ns, &[1, 2, 3], LEN);
    assert_eq!(outcomes[0], Outcome::Corrupt);
    assert_ne!(outcomes[1], Outcome::Done);
    assert_eq!(outcomes[2], Outcome::Done);
    assert_eq!(ns.contains(&keys([1])).unwrap(), [false]);
    assert_eq!(put(&ns, &[1], LEN), [true]);
    assert!(has(&ns, &[1], LEN));
    client.close();
    owner.close();
}

#[test]
fn what_a_client_puts_behind_what_was_corrupt_is_stored() {
    use crate::rotten::{BLOCKS, Finder, LEN, find_and_put, rot};
    let all: Vec<u64> = (0..BLOCKS).collect();
    for (pipeline, finders) in [
        ("Posix", &[Finder::Get, Finder::Discard][..]),
        ("Cache|Posix", &[Finder::Get, Finder::Prefetch]),
    ] {
        let home = Home::new();
        let serve = || {
            let mut settings = json!({
                "lanes": 2,
                "close_timeout": "10s",
                "lookup_timeout": "60s",
                "socket": home.socket(),
                "posix": {"path": home.0.path().join("posix"), "capacity": "64MiB"},
            });
            if pipeline.contains("Cache") {
                settings["cache"] = json!({"capacity": "1MiB"});
            }
            let config = Config::new(pipeline, &settings).unwrap();
            kvdepot_service::open(&config).unwrap()
        };
        let owner = serve();
        assert!(put(&namespace(&owner), &all, LEN).iter().all(|ok| *ok));
        assert!(owner.drain(PATIENCE));
        owner.close();
        folder::files(home.0.path())
            .iter()
            .for_each(|file| rot(file));
        let owner = serve();
        let client = home.connect();
        find_and_put(&namespace(&client), finders);
        client.close();
        assert!(owner.drain(PATIENCE));
        owner.close();
        let owner = serve();
        assert!(has(&namespace(&owner), &all, LEN), "{pipeline}");
        owner.close();
    }
}

#[test]
fn a_name_that_means_something_else_by_now_is_a_miss_and_stays() {
    let home = Home::new();
    let owner = home.serve_stored("Files", &[1, 2, 3, 4]);
    let (client, worker) = (home.connect(), attach(&home));
    let ns = namespace(&client);
    let pins: Vec<Pin> = (1..=4).map(|number| pin(&ns, number)).collect();
    let outside = home.0.path().join("outside");
    // The very file, but elsewhere and behind a link; another one, whose bytes are right; none.
    fs::rename(home.path_of(&ns, 1), &outside).unwrap();
    std::os::unix::fs::symlink(&outside, home.path_of(&ns, 1)).unwrap();
    fs::copy(home.path_of(&ns, 2), home.path_of(&ns, 9)).unwrap();
    fs::rename(home.path_of(&ns, 9), home.path_of(&ns, 2)).unwrap();
    fs::remove_file(home.path_of(&ns, 3)).unwrap();
    for (pinned, number) in pins.iter().zip(1..) {
        let (checksum, corrupt, bytes) = load(&worker, pinned);
        assert_eq!(checksum.is_some(), number == 4, "block {number}");
        assert!(!corrupt, "block {number}: nothing is known of its bytes");
        assert!(number == 4 || bytes == vec![0; LEN], "read through a link");
    }
    assert!(home.path_of(&ns, 1).is_symlink() && home.path_of(&ns, 2).exists());
    // Pinned anew, what is there is what it is.
    assert_eq!(get(&ns, &[1, 2, 3, 4], LEN)[1], Outcome::Done);
    assert_eq!(ns.pin(&keys([1]), false).unwrap(), [None]);
    ns.unpin(&pins, false);
    drop(worker);
    client.close();
    owner.close();
}

#[test]
fn a_client_that_is_killed_leaves_no_file() {
    const TEST: &str = "files::a_client_that_is_killed_leaves_no_file";
    if child::role().is_some() {
        let socket = PathBuf::from(child::value("socket"));
        let client = kvdepot_service::connect(&socket, Some(1)).unwrap();
        let ns = namespace(&client);
        assert_eq!(put(&ns, &[1], LEN), [true]);
        let _held = pin(&ns, 1);
        let mut bare = Bare::attach(&socket, 0);
        let asked = frames::put(7, ns.id(), &[key(2)], LEN as u64);
        bare.tasks.write_all(&asked).unwrap();
        assert_eq!(read_frame(&bare.tasks).unwrap().0, MOVE);
        child::say("moving");
        child::sleep_until_killed();
    }
    let home = Home::new();
    let owner = home.serve("Files");
    let socket = home.socket();
    let values = [("socket", socket.to_str().unwrap())];
    let mut client = Child::start(TEST, "client", &values);
    client.expect("moving");
    assert_eq!(home.unfinished(), 1);
    client.kill();
    eventually("the end of its file", || home.unfinished() == 0);
    let ns = namespace(&owner);
    assert_eq!(ns.contains(&keys([1, 2])).unwrap(), [true, false]);
    assert_eq!(put(&ns, &[2], LEN), [true]);
    // Once nothing is held for it.
    owner.close();
}

#[test]
fn what_a_stopped_client_was_at_leaves_no_file_when_its_owner_closes() {
    let home = Home::new();
    let owner = serve_closing(home.0.path(), "Files", "200ms");
    let ns = namespace(&owner);
    assert_eq!(put(&ns, &[1], LEN), [true]);
    // It never says that it has written, or has pinned what it was granted for good.
    let mut stopped = Bare::attach(&home.socket(), 0);
    let asked = frames::put(7, ns.id(), &[key(2)], LEN as u64);
    stopped.tasks.write_all(&asked).unwrap();
    assert_eq!(read_frame(&stopped.tasks).unwrap().0, MOVE);
    let joined = common::start_put(&ns, &[2], LEN);
    owner.close();
    // Who had joined it takes over, if the close has still time for that.
    let _either = joined.wait(Some(PATIENCE)).unwrap();
    assert_eq!(home.unfinished(), 0);
}

#[test]
fn pins_that_nobody_has_ended_end_with_their_owner() {
    let home = Home::new();
    let owner = home.serve_stored("Files", &[1, 2]);
    let client = home.connect();
    let (here, there) = (namespace(&owner), namespace(&client));
    let held = [(&here, pin(&here, 1)), (&there, pin(&there, 2))];
    // The tier panics where files are held.
    owner.close();
    for (ns, held) in held {
        ns.unpin(&[held], true);
    }
    client.close();
}

#[test]
fn a_block_that_is_promoted_after_its_pin_is_as_new_as_its_use() {
    let home = Home::new();
    let all: Vec<u64> = (0..20).collect();
    let owner = home.serve_stored("Cache|Files", &all);
    let client = home.connect();
    for ns in [namespace(&client), namespace(&owner)] {
        let is_near = |number| ns.nearest(&keys([number])).unwrap() == [Some("Cache")];
        let bring = |numbers: std::ops::Range<u64>| {
            for number in numbers {
                // Read again if the one before was still on its way: there is room for one alone.
                eventually("its promotion", || {
                    has(&ns, &[number], LEN) && is_near(number)
                });
            }
        };
        bring(0..10);
        eventually("its promotion", || {
            let pinned = pin(&ns, 10);
            ns.unpin(&[pinned], true);
            is_near(10)
        });
        // Some of the first have to go for these.
        bring(11..17);
        assert!(is_near(10) && !is_near(0));
        // Others again.
        bring(0..8);
    }
    client.close();
    owner.close();
}

#[test]
fn what_a_killed_owner_has_stored_its_successor_has() {
    const TEST: &str = "files::what_a_killed_owner_has_stored_its_successor_has";
    if child::role().is_some() {
        let _owner = serve(child::value("home").as_ref(), "Cache|Files");
        child::say("serving");
        child::sleep_until_killed();
    }
    let home = Home::new();
    let values = [("home", home.0.path().to_str().unwrap())];
    let mut owner = Child::start(TEST, "owner", &values);
    owner.expect("serving");
    let (client, worker) = (home.connect(), attach(&home));
    let ns = namespace(&client);
    let all: Vec<u64> = (0..20).collect();
    assert!(put(&ns, &all, LEN).iter().all(|ok| *ok));
    assert!(client.drain(PATIENCE));
    owner.kill();
    eventually("the end of the connection", || !client.is_connected());
    assert_eq!(get(&ns, &[1], LEN), [Outcome::Miss]);
    let mut owner = Child::start(TEST, "owner", &values);
    owner.expect("serving");
    eventually("another connection", || client.is_connected());
    let pinned = pin(&ns, 3);
    // Of another owner than that worker's.
    assert_eq!(load(&worker, &pinned).0, None);
    let worker = attach(&home);
    assert_eq!(load(&worker, &pinned).2, content(3, LEN));
    ns.unpin(&[pinned], true);
    assert!(has(&ns, &all, LEN));
    client.close();
}
