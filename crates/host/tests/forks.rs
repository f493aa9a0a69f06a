//! Forks, and what a child must not keep of its parent.
//!
//! A test that needs another process starts this test program again, with the part to play in an
//! environment variable ([`Player`]); [`play`] is the entry of that process.

#![expect(
    unsafe_code,
    reason = "forks, and maps memory that a child must not see"
)]
#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

mod players;

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvdepot_host::Error;
use kvdepot_host::fork::{self, LOCK_FDS_MAX, LockFd, Unshared};
use kvdepot_host::lock::{self, Kind};
use kvdepot_host::peer::Process;
use players::{PATIENCE, Player, linger, medium, open, open_lock_fd, say};

#[test]
#[ignore = "the entry of the processes that the other tests start"]
fn play() {
    let Some((part, argument)) = players::part() else {
        return;
    };
    match part.as_str() {
        "fork with LockFd" => play_fork_with_lock_fd(&argument),
        "fork with plain descriptor" => play_fork_with_plain_descriptor(&argument),
        "check child" => play_check_child(&argument),
        "check socket" => play_check_socket(&argument),
        "storm" => play_storm(&argument),
        "fill registry" => play_fill_registry(&argument),
        "fork without a number" => play_fork_without_a_number(),
        other => panic!("no such part: {other}"),
    }
}

/// Forks; the child runs `child`, which keeps to what is safe in the fork of a threaded process,
/// and ends with its result as status.
fn fork_into(child: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child calls `child` alone, which the caller restricts, and then ends without
    // running anything else of the test.
    unsafe {
        match libc::fork() {
            0 => {
                // Whatever happens to the test, no child stays for ever.
                libc::alarm(60);
                libc::_exit(child())
            }
            pid => {
                assert!(pid > 0, "fork: {}", io::Error::last_os_error());
                pid
            }
        }
    }
}

/// Forks a child that sleeps; it runs when this returns.
fn fork_a_sleeper() -> i32 {
    let (mut runs, mut says) = io::pipe().unwrap();
    let pid = fork_into(move || {
        drop(says.write_all(&[1]));
        sleep_for_ever()
    });
    runs.read_exact(&mut [0]).unwrap();
    pid
}

fn sleep_for_ever() -> i32 {
    loop {
        // SAFETY: a system call without arguments.
        unsafe { libc::pause() };
    }
}

fn kill(pid: i32) {
    // SAFETY: a child of this test program, or of a player, that still sleeps.
    unsafe { libc::kill(pid, libc::SIGKILL) };
}

fn reap(pid: i32) -> std::process::ExitStatus {
    let mut status = 0;
    // SAFETY: writes one integer.
    let reaped = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(reaped, pid);
    std::process::ExitStatus::from_raw(status)
}

fn play_fork_with_lock_fd(path: &Path) {
    let lock_fd = open_lock_fd(path);
    assert!(lock_fd.try_lock(0, Kind::Exclusive).unwrap());
    say(fork_a_sleeper());
    linger();
    drop(lock_fd);
}

fn play_fork_with_plain_descriptor(path: &Path) {
    let file = open(path);
    assert!(lock::try_lock(&file, 0, Kind::Exclusive).unwrap());
    say(fork_a_sleeper());
    linger();
}

/// Whether the lock outlives a holder that has forked and was then killed.
fn lock_outlives_holder_in_its_child(part: &str) -> bool {
    let (_dir, path) = medium();
    let mut holder = Player::start(part, &path);
    let child: i32 = holder.hear().parse().unwrap();
    let child_process = Process::open(child.try_into().unwrap()).unwrap();
    let file = open(&path);
    // The handler has run in the child, and has left the parent's lock alone.
    assert!(!lock::try_lock(&file, 0, Kind::Exclusive).unwrap());
    let process = Process::open(holder.child.id()).unwrap();
    holder.kill();
    assert!(process.wait_dead(PATIENCE).unwrap());
    let outlives = !lock::try_lock(&file, 0, Kind::Exclusive).unwrap();
    assert!(!child_process.is_dead().unwrap(), "proves nothing");
    kill(child);
    assert!(child_process.wait_dead(PATIENCE).unwrap());
    assert!(lock::try_lock(&file, 0, Kind::Exclusive).unwrap());
    outlives
}

#[test]
fn a_forked_child_does_not_keep_the_lock_of_its_dead_parent() {
    assert!(!lock_outlives_holder_in_its_child("fork with LockFd"));
    // The danger is real: this is what a descriptor without the registry does.
    assert!(lock_outlives_holder_in_its_child(
        "fork with plain descriptor"
    ));
}

fn play_check_child(path: &Path) {
    let lock_fd = open_lock_fd(path);
    let number = lock_fd.fd().unwrap().as_raw_fd();
    let before = fork::epoch();
    let other = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    let pid = fork_into(move || {
        if fork::epoch() == before {
            return 1;
        }
        if !matches!(lock_fd.fd(), Err(Error::Forked))
            || !matches!(lock_fd.try_lock(0, Kind::Shared), Err(Error::Forked))
        {
            return 2;
        }
        // SAFETY: asks about a number that is closed, gives it to another file, and asks again.
        unsafe {
            if libc::fcntl(number, libc::F_GETFD) != -1 {
                return 3;
            }
            if libc::dup2(other.as_raw_fd(), number) != number {
                return 4;
            }
            drop(lock_fd);
            if libc::fcntl(number, libc::F_GETFD) == -1 {
                return 5;
            }
        }
        // A child of the child has yet another epoch, and nothing left to close.
        let middle = fork::epoch();
        let grandchild = fork_into(|| i32::from(fork::epoch() == middle));
        if reap(grandchild).code() == Some(0) {
            0
        } else {
            6
        }
    });
    assert_eq!(fork::epoch(), before);
    say(reap(pid));
}

#[test]
fn in_a_forked_child_a_lock_descriptor_is_closed_and_refuses() {
    let (_dir, path) = medium();
    let mut player = Player::start("check child", &path);
    assert_eq!(player.hear(), "exit status: 0");
    assert!(player.finish());
}

fn play_check_socket(_: &Path) {
    let mut ends = None;
    let mine = Unshared::open(|| {
        let (mine, other) = UnixStream::pair()?;
        ends = Some(other);
        Ok::<_, io::Error>(mine)
    });
    let (mut mine, mut other) = (mine.ok(), ends.unwrap());
    let number = mine.as_ref().unwrap().as_fd().as_raw_fd();
    let (mut runs, mut says) = io::pipe().unwrap();
    let pid = fork_into(|| {
        // The number is taken, by something else than the socket, and closed with its owner.
        let is_socket = mine.as_ref().unwrap().local_addr().is_ok();
        // SAFETY: asks about a number.
        let is_open = |number| unsafe { libc::fcntl(number, libc::F_GETFD) } != -1;
        let was_open = is_open(number);
        drop(mine.take());
        let fine = !is_socket && was_open && !is_open(number);
        drop(says.write_all(&[u8::from(fine)]));
        sleep_for_ever()
    });
    let mut fine = [0];
    runs.read_exact(&mut fine).unwrap();
    other.write_all(&[1]).unwrap();
    (&**mine.as_ref().unwrap()).read_exact(&mut [0]).unwrap();
    drop(mine);
    // It ends although the child lives.
    let ended = other.read(&mut [0]).unwrap() == 0;
    kill(pid);
    reap(pid);
    say(fine == [1] && ended);
}

#[test]
fn a_forked_child_keeps_no_socket_of_its_parents() {
    let (_dir, path) = medium();
    let mut player = Player::start("check socket", &path);
    assert_eq!(player.hear(), "true");
    assert!(player.finish());
}

/// Locks that a storm keeps, each on a byte of its own.
const STORM_KEPT: u64 = 400;
const STORM_CHILDREN: usize = 60;

/// One thread forks children that stay, another opens and locks all the time, and closes every
/// other descriptor again. Says the children, then how often a lock was refused whose holder had
/// been closed, then `done`; and waits to be killed.
fn play_storm(path: &Path) {
    // Memory that makes each fork long enough to be met at any of its stages.
    let ballast = vec![1_u8; 64 << 20];
    let done = AtomicBool::new(false);
    let mut kept = Vec::new();
    let mut refused = 0;
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..STORM_CHILDREN {
                say(fork_into(sleep_for_ever));
            }
            done.store(true, Ordering::SeqCst);
        });
        for byte in 0.. {
            if done.load(Ordering::SeqCst) {
                break;
            }
            let closed = open_lock_fd(path);
            assert!(closed.try_lock(byte, Kind::Exclusive).unwrap());
            drop(closed);
            let lock_fd = open_lock_fd(path);
            refused += u32::from(!lock_fd.try_lock(byte, Kind::Exclusive).unwrap());
            if byte < STORM_KEPT {
                kept.push(lock_fd);
            }
        }
    });
    say(refused);
    say(kept.len());
    linger();
    drop((kept, ballast));
}

#[test]
fn forks_at_any_moment_leave_no_lock_in_a_child() {
    let (_dir, path) = medium();
    for _ in 0..3 {
        let mut player = Player::start("storm", &path);
        let children: Vec<i32> = (0..STORM_CHILDREN)
            .map(|_| player.hear().parse().unwrap())
            .collect();
        assert_eq!(player.hear(), "0", "refused");
        let kept: u64 = player.hear().parse().unwrap();
        let process = Process::open(player.child.id()).unwrap();
        player.kill();
        assert!(process.wait_dead(PATIENCE).unwrap());
        let file = open(&path);
        // The last child may not have run its handler yet.
        let deadline = Instant::now() + Duration::from_secs(5);
        let mut in_children: Vec<u64> = (0..kept).collect();
        while !in_children.is_empty() && Instant::now() < deadline {
            in_children.retain(|byte| lock::is_locked(&file, *byte).unwrap());
        }
        children.into_iter().for_each(kill);
        assert!(kept > 0, "no lock was ever had");
        assert!(in_children.is_empty(), "{in_children:?} of {kept}");
    }
}

fn play_fill_registry(path: &Path) {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let needed = LOCK_FDS_MAX as u64 + 64;
    if limit.maximum.is_some_and(|most| most < needed) {
        return say(format_args!("skipped: needs {needed} descriptors"));
    }
    setrlimit(Resource::Nofile, limit).unwrap();
    let mut held: Vec<LockFd> = (0..LOCK_FDS_MAX).map(|_| open_lock_fd(path)).collect();
    let error = LockFd::open(|| Ok(OwnedFd::from(open(path)))).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Input {
                field: "lock descriptors",
                ..
            }
        ),
        "{error}"
    );
    held.pop();
    held.push(open_lock_fd(path));
    say("full");
}

#[test]
fn the_registry_is_bounded_and_its_places_are_used_again() {
    let (_dir, path) = medium();
    let mut player = Player::start("fill registry", &path);
    let said = player.hear();
    if said.starts_with("skipped") {
        eprintln!("{said}");
    } else {
        assert_eq!(said, "full");
    }
    assert!(player.finish());
}

#[test]
fn dropping_a_lock_descriptor_releases_its_lock_and_its_number() {
    let (_dir, path) = medium();
    let other = open(&path);
    let mut number_max = 0;
    for _ in 0..LOCK_FDS_MAX * 2 {
        let lock_fd = open_lock_fd(&path);
        assert!(lock_fd.try_lock(3, Kind::Exclusive).unwrap());
        assert!(lock::is_locked(&other, 3).unwrap());
        number_max = number_max.max(lock_fd.fd().unwrap().as_raw_fd());
        drop(lock_fd);
        assert!(!lock::is_locked(&other, 3).unwrap());
    }
    let max = i32::try_from(LOCK_FDS_MAX).unwrap();
    assert!(number_max < max, "numbers leak: {number_max}");
}

fn play_fork_without_a_number() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    fork::install().unwrap();
    let pairs = [(); 3].map(|()| UnixStream::pair().unwrap());
    let (sockets, others): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
    let sockets = sockets.into_iter().map(|one| Unshared::new(one).unwrap());
    let sockets: Vec<_> = sockets.collect();
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = Some(64);
    setrlimit(Resource::Nofile, limit).unwrap();
    let zero = || std::fs::File::open("/dev/zero");
    let mut all = Vec::new();
    while let Ok(file) = zero() {
        all.push(file);
    }
    let child = fork_into(move || {
        // Each number is still taken, and free once its owner has dropped it.
        let (taken, was_one_free) = (sockets.len(), zero().is_ok());
        drop(sockets);
        let free = std::iter::from_fn(|| zero().map(std::mem::ManuallyDrop::new).ok());
        i32::from(was_one_free || free.take(100).count() != taken)
    });
    drop((all, others));
    say(reap(child).code().unwrap_or(-1));
}

#[test]
fn a_child_of_a_process_without_a_free_number_keeps_those_of_its_sockets() {
    let mut player = Player::start("fork without a number", Path::new(""));
    assert_eq!(player.hear(), "0");
    assert!(player.finish());
}

// --- directories -----------------------------------------------------------------------------
