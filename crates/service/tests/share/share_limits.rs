//! Processes that may not have many descriptors.

#![expect(unsafe_code, reason = "limits another process")]

use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::common::{self, Place, config_of, has, namespace, put};
use crate::tiers;
use kvdepot_service::Mover;
use kvdepot_store::Config;
use kvdepot_testkit::child::{self, Child};
use serde_json::json;

/// Limits the numbers of the descriptors that a process may open, to what it may ask for at most;
/// returns the limit.
fn limit_descriptors(pid: u32, most: libc::rlim_t) -> u64 {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    let pid = pid as libc::pid_t;
    // SAFETY: reads into a local, and sets from it, the limits of a child of this process.
    unsafe {
        assert_eq!(
            libc::prlimit(pid, libc::RLIMIT_NOFILE, std::ptr::null(), &mut limit),
            0
        );
        limit.rlim_cur = most.min(limit.rlim_max);
        assert_eq!(
            libc::prlimit(pid, libc::RLIMIT_NOFILE, &limit, std::ptr::null_mut()),
            0
        );
    }
    limit.rlim_cur
}

/// Processor time that the socket's thread of a process has used.
fn socket_thread_time(pid: u32) -> Duration {
    let is_it = |task: &std::path::PathBuf| {
        // One that has ended meanwhile has no name.
        let name = std::fs::read_to_string(task.join("comm")).unwrap_or_default();
        name.trim() == "kvdepot-share"
    };
    let find = || {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        tasks
            .filter_map(Result::ok)
            .map(|task| task.path())
            .find(is_it)
    };
    // A thread takes its name in its first moments.
    common::eventually("the thread", || find().is_some());
    let task = find().unwrap();
    let text = std::fs::read_to_string(task.join("schedstat")).unwrap();
    Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
}

#[test]
fn an_owner_out_of_descriptors_waits_for_some_and_does_not_spin() {
    const TEST: &str = "share_limits::an_owner_out_of_descriptors_waits_for_some_and_does_not_spin";
    if child::role().is_some() {
        let _depot = kvdepot_service::open(&config_of(&child::value("spec"))).unwrap();
        child::say("open");
        child::sleep_until_killed();
    }
    let place = Place::new("Cache", "1MiB", "");
    let mut owner = Child::start(TEST, "owner", &[("spec", &place.spec())]);
    owner.expect("open");
    limit_descriptors(owner.pid(), 3);
    let before = socket_thread_time(owner.pid());
    let waiting = UnixStream::connect(place.socket()).unwrap();
    std::thread::sleep(Duration::from_millis(600));
    let used = socket_thread_time(owner.pid()) - before;
    assert!(used < Duration::from_millis(100), "{used:?}");
    drop(waiting);
    limit_descriptors(owner.pid(), 1024);
    assert!(Mover::attach(&place.socket(), Some(1), true).is_ok());
}

#[test]
fn a_client_has_no_more_files_open_than_some_hundred() {
    const TEST: &str = "share_limits::a_client_has_no_more_files_open_than_some_hundred";
    const LEN: usize = 30_000;
    // It has each file open that a client reads.
    let most = limit_descriptors(std::process::id(), 10_000);
    let all: Vec<u64> = (0..(most - 200).min(3000)).collect();
    if child::role().is_some() {
        let socket = child::value("socket");
        let client = kvdepot_service::connect(socket.as_ref(), Some(1)).unwrap();
        limit_descriptors(std::process::id(), 700);
        assert!(has(&namespace(&client), &all, LEN));
        client.close();
        child::say("all");
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let socket = home.path().join("s");
    let settings = json!({"socket": socket, "files": {"path": home.path().join("files")}});
    let config = Config::with_kinds(&tiers::files::kinds(), "Files", &settings).unwrap();
    let owner = kvdepot_service::open(&config).unwrap();
    assert!(put(&namespace(&owner), &all, LEN).iter().all(|ok| *ok));
    let values = [("socket", socket.to_str().unwrap())];
    Child::start(TEST, "client", &values).expect("all");
    owner.close();
}
