//! Locks, descriptors, peers and forks between real processes.
//!
//! A test that needs another process starts this test program again, with the part to play in an
//! environment variable ([`Player`]); [`play`] is the entry of that process.

#![expect(
    unsafe_code,
    reason = "forks, and maps memory that a child must not see"
)]
#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

mod players;

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use kvdepot_host::fork::LockFd;
use kvdepot_host::lock::{self, Kind};
use kvdepot_host::peer::{self, Identity, Process};
use kvdepot_host::{Error, dirs, fds};
use players::{PATIENCE, Player, becomes_free, linger, map, medium, open, say};

#[test]
#[ignore = "the entry of the processes that the other tests start"]
fn play() {
    let Some((part, argument)) = players::part() else {
        return;
    };
    match part.as_str() {
        "hold exclusive" => play_hold(&argument, Kind::Exclusive),
        "hold shared" => play_hold(&argument, Kind::Shared),
        "receive" => play_receive(&argument),
        "connect" => play_connect(&argument),
        "dirs" => play_dirs(),
        other => panic!("no such part: {other}"),
    }
}

// --- locks -----------------------------------------------------------------------------------

fn play_hold(path: &Path, kind: Kind) {
    let file = open(path);
    say(lock::try_lock(&file, 0, kind).unwrap());
    linger();
}

#[test]
fn an_exclusive_lock_keeps_other_processes_out_of_its_byte_alone() {
    let (_dir, path) = medium();
    let mut holder = Player::start("hold exclusive", &path);
    assert_eq!(holder.hear(), "true");
    let file = open(&path);
    assert!(!lock::try_lock(&file, 0, Kind::Exclusive).unwrap());
    assert!(!lock::try_lock(&file, 0, Kind::Shared).unwrap());
    assert_eq!(
        lock::held_by_other(&file, 0).unwrap(),
        Some(Kind::Exclusive)
    );
    assert!(lock::try_lock(&file, 1, Kind::Exclusive).unwrap());
    assert!(!lock::is_locked(&file, 1).unwrap(), "its own lock");
    assert!(holder.finish());
    assert!(lock::try_lock(&file, 0, Kind::Exclusive).unwrap());
}

#[test]
fn shared_locks_of_several_processes_keep_an_exclusive_one_out() {
    let (_dir, path) = medium();
    let mut first = Player::start("hold shared", &path);
    let mut second = Player::start("hold shared", &path);
    assert_eq!(
        (first.hear(), second.hear()),
        ("true".into(), "true".into())
    );
    let file = open(&path);
    assert!(lock::try_lock(&file, 0, Kind::Shared).unwrap());
    assert!(!lock::try_lock(&file, 0, Kind::Exclusive).unwrap());
    assert!(first.finish());
    assert!(!lock::try_lock(&file, 0, Kind::Exclusive).unwrap());
    assert_eq!(lock::held_by_other(&file, 0).unwrap(), Some(Kind::Shared));
    assert!(second.finish());
    assert!(lock::try_lock(&file, 0, Kind::Exclusive).unwrap());
}

#[test]
fn a_killed_process_holds_no_lock_once_it_is_known_to_be_dead() {
    let (_dir, path) = medium();
    let file = open(&path);
    for _ in 0..5 {
        let mut holder = Player::start("hold exclusive", &path);
        assert_eq!(holder.hear(), "true");
        let process = Process::open(holder.child.id()).unwrap();
        assert!(!lock::try_lock(&file, 0, Kind::Exclusive).unwrap());
        holder.kill();
        assert!(process.wait_dead(PATIENCE).unwrap());
        // At once, not after a while: whoever sees the death may rely on the lock.
        assert!(lock::try_lock(&file, 0, Kind::Exclusive).unwrap());
        lock::unlock(&file, 0).unwrap();
    }
}

#[test]
fn a_waiting_locker_gets_the_lock_when_the_holder_ends() {
    let (_dir, path) = medium();
    let mut holder = Player::start("hold exclusive", &path);
    assert_eq!(holder.hear(), "true");
    let file = open(&path);
    let start = Instant::now();
    let wait = Duration::from_millis(120);
    assert!(!lock::lock_timeout(&file, 0, Kind::Shared, wait).unwrap());
    assert!(start.elapsed() >= wait);
    let ending = thread::spawn(move || {
        thread::sleep(Duration::from_millis(100));
        holder.kill();
    });
    assert!(lock::lock_timeout(&file, 0, Kind::Exclusive, Duration::MAX).unwrap());
    ending.join().unwrap();
}

#[test]
fn two_descriptions_of_one_process_exclude_each_other_and_duplicates_do_not() {
    let (_dir, path) = medium();
    let (first, second) = (open(&path), open(&path));
    assert!(lock::try_lock(&first, 7, Kind::Exclusive).unwrap());
    assert!(!lock::try_lock(&second, 7, Kind::Shared).unwrap());
    let duplicate = first.try_clone().unwrap();
    assert!(lock::try_lock(&duplicate, 7, Kind::Exclusive).unwrap());
    drop(first);
    assert!(lock::is_locked(&second, 7).unwrap(), "the duplicate lives");
    // Conversion, and release by the duplicate.
    assert!(lock::try_lock(&duplicate, 7, Kind::Shared).unwrap());
    assert!(lock::try_lock(&second, 7, Kind::Shared).unwrap());
    lock::unlock(&duplicate, 7).unwrap();
    assert!(lock::try_lock(&second, 7, Kind::Exclusive).unwrap());
}

#[test]
fn a_read_only_descriptor_locks_shared_and_asks_but_never_locks_exclusively() {
    let (_dir, path) = medium();
    let reader = File::open(&path).unwrap();
    assert!(lock::try_lock(&reader, 1, Kind::Shared).unwrap());
    let error = lock::try_lock(&reader, 0, Kind::Exclusive).unwrap_err();
    assert!(matches!(error, Error::Os { .. }), "{error}");
    let writer = open(&path);
    assert!(lock::try_lock(&writer, 0, Kind::Exclusive).unwrap());
    assert!(lock::is_locked(&reader, 0).unwrap());
    let error = lock::try_lock(&reader, u64::MAX, Kind::Shared).unwrap_err();
    assert!(
        matches!(error, Error::Input { field: "byte", .. }),
        "{error}"
    );
}

#[test]
fn a_character_device_can_be_locked() {
    let (first, second) = (open(Path::new("/dev/null")), open(Path::new("/dev/null")));
    // Every program may lock this device's bytes: take one that nobody else would.
    let byte = (1 << 62) + u64::from(std::process::id());
    assert!(lock::try_lock(&first, byte, Kind::Exclusive).unwrap());
    assert!(!lock::try_lock(&second, byte, Kind::Exclusive).unwrap());
    drop(first);
    assert!(becomes_free(&second, byte));
}

#[test]
fn a_mapping_keeps_the_locks_of_the_description_it_was_made_from() {
    let (_dir, path) = medium();
    let (mapped, other) = (open(&path), open(&path));
    assert!(lock::try_lock(&mapped, 0, Kind::Exclusive).unwrap());
    let own = LockFd::reopen(&mapped, false).unwrap();
    assert!(own.try_lock(1, Kind::Exclusive).unwrap());
    let addr = map(mapped.as_fd());
    drop(mapped);
    assert!(lock::is_locked(&other, 0).unwrap(), "the mapping lives");
    drop(own);
    assert!(!lock::is_locked(&other, 1).unwrap(), "never mapped");
    // SAFETY: mapped above, and nothing refers to it.
    unsafe { rustix::mm::munmap(addr, 4096) }.unwrap();
    assert!(becomes_free(&other, 0));
}

// --- descriptors over a socket ---------------------------------------------------------------

fn play_receive(socket: &Path) {
    let stream = UnixStream::connect(socket).unwrap();
    let mut bytes = [0; 16];
    let (count, received) = fds::recv(&stream, &mut bytes).unwrap();
    drop(stream);
    say(format!("{count} bytes, {} descriptors", received.len()));
    linger();
    drop(received);
}

#[test]
fn a_passed_descriptor_keeps_the_shared_lock_until_its_receiver_dies() {
    let (dir, path) = medium();
    let socket = dir.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    let mut receiver = Player::start("receive", &socket);
    let (stream, _) = listener.accept().unwrap();

    let sender = open(&path);
    let other = open(&path);
    assert!(lock::try_lock(&sender, 1, Kind::Shared).unwrap());
    fds::send(&stream, b"medium", &[sender.as_fd()]).unwrap();
    assert_eq!(receiver.hear(), "6 bytes, 1 descriptors");
    drop(sender);
    assert!(lock::try_lock(&other, 1, Kind::Shared).unwrap());
    assert!(!lock::try_lock(&other, 1, Kind::Exclusive).unwrap());

    let process = Process::of_peer(&stream).unwrap();
    receiver.kill();
    assert!(process.wait_dead(PATIENCE).unwrap());
    assert!(becomes_free(&other, 1));
}

#[test]
fn bytes_and_descriptors_arrive_whole_and_closed_on_exec() {
    let (_dir, path) = medium();
    let file = open(&path);
    rustix::io::pwrite(&file, b"content", 0).unwrap();
    let (near, far) = UnixStream::pair().unwrap();
    fds::send(&near, b"first", &[file.as_fd(), file.as_fd()]).unwrap();
    fds::send(&near, b"second", &[]).unwrap();
    drop(near);
    let mut bytes = [0; 64];
    let (count, received) = fds::recv(&far, &mut bytes[..3]).unwrap();
    assert_eq!((&bytes[..count], received.len()), (&b"fir"[..], 2));
    for fd in &received {
        let flags = rustix::io::fcntl_getfd(fd).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        let mut content = [0; 7];
        rustix::io::pread(fd, &mut content, 0).unwrap();
        assert_eq!(&content, b"content");
    }
    let mut rest = Vec::new();
    loop {
        let (count, received) = fds::recv(&far, &mut bytes).unwrap();
        assert!(received.is_empty());
        if count == 0 {
            break;
        }
        rest.extend_from_slice(&bytes[..count]);
    }
    assert_eq!(rest, b"stsecond");
}

#[test]
fn a_long_message_carries_its_descriptors_once() {
    let (_dir, path) = medium();
    let file = open(&path);
    let (near, far) = UnixStream::pair().unwrap();
    let sending = thread::spawn(move || {
        // Larger than any socket's buffer, so that it goes in pieces.
        fds::send(&near, &vec![7; 8 << 20], &[file.as_fd()]).unwrap();
    });
    let mut bytes = vec![0; 1 << 16];
    let (mut total, mut descriptors) = (0, 0);
    loop {
        let (count, received) = fds::recv(&far, &mut bytes).unwrap();
        if count == 0 {
            break;
        }
        assert!(bytes[..count].iter().all(|byte| *byte == 7));
        (total, descriptors) = (total + count, descriptors + received.len());
    }
    sending.join().unwrap();
    assert_eq!((total, descriptors), (8 << 20, 1));
}

#[test]
fn messages_that_cannot_be_sent_are_refused() {
    let (_dir, path) = medium();
    let file = open(&path);
    let (near, far) = UnixStream::pair().unwrap();
    let many = vec![file.as_fd(); fds::DESCRIPTORS_MAX + 1];
    let error = fds::send(&near, b"x", &many).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Input {
                field: "descriptors",
                ..
            }
        ),
        "{error}"
    );
    let error = fds::send(&near, b"", &many[..1]).unwrap_err();
    assert!(
        matches!(error, Error::Input { field: "bytes", .. }),
        "{error}"
    );
    fds::send(&near, b"x", &many[1..]).unwrap();
    let (_, received) = fds::recv(&far, &mut [0; 1]).unwrap();
    assert_eq!(received.len(), fds::DESCRIPTORS_MAX);
    drop(far);
    let error = fds::send(&near, b"x", &[]).unwrap_err();
    assert_eq!(error.io_kind(), Some(io::ErrorKind::BrokenPipe), "{error}");
}

#[test]
fn a_peer_that_attaches_too_many_descriptors_is_refused_and_leaves_none_open() {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
    let (_dir, path) = medium();
    let file = open(&path);
    let open_count = || {
        let entries = fs::read_dir("/proc/self/fd").unwrap();
        entries
            .filter(|entry| {
                let link = entry.as_ref().map(|entry| fs::read_link(entry.path()));
                matches!(link, Ok(Ok(target)) if target == path)
            })
            .count()
    };
    for count in [fds::DESCRIPTORS_MAX + 1, 200] {
        let (near, far) = UnixStream::pair().unwrap();
        let many = vec![file.as_fd(); count];
        let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
        let bytes = [io::IoSlice::new(b"x")];
        rustix::net::sendmsg(&near, &bytes, &mut control, SendFlags::empty()).unwrap();
        let error = fds::recv(&far, &mut [0; 1]).unwrap_err();
        assert!(matches!(error, Error::Malformed { .. }), "{count}: {error}");
        assert_eq!(open_count(), 1);
    }
}

#[test]
fn a_receive_ends_with_the_sockets_time_limit() {
    let (near, _far) = UnixStream::pair().unwrap();
    near.set_read_timeout(Some(Duration::from_millis(20)))
        .unwrap();
    let error = fds::recv(&near, &mut [0; 1]).unwrap_err();
    assert_eq!(error.io_kind(), Some(io::ErrorKind::WouldBlock), "{error}");
}

#[test]
fn a_reopened_descriptor_has_a_description_of_its_own() {
    let (_dir, path) = medium();
    let file = open(&path);
    assert!(lock::try_lock(&file, 0, Kind::Exclusive).unwrap());
    fs::remove_file(&path).unwrap();
    let writer = fds::reopen(&file, false).unwrap();
    assert!(!lock::try_lock(&writer, 0, Kind::Shared).unwrap());
    assert!(lock::try_lock(&writer, 1, Kind::Exclusive).unwrap());
    rustix::io::pwrite(&writer, b"reopened", 0).unwrap();
    let reader = fds::reopen(&file, true).unwrap();
    let mut content = [0; 8];
    rustix::io::pread(&reader, &mut content, 0).unwrap();
    assert_eq!(&content, b"reopened");
    assert!(rustix::io::pwrite(&reader, b"x", 0).is_err());
}

#[test]
fn memory_files_and_devices_can_be_reopened_and_sockets_cannot() {
    let memory = rustix::fs::memfd_create("kvdepot", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::io::pwrite(&memory, b"memory", 0).unwrap();
    let reader = fds::reopen(&memory, true).unwrap();
    let mut content = [0; 6];
    rustix::io::pread(&reader, &mut content, 0).unwrap();
    assert_eq!(&content, b"memory");
    fds::reopen(open(Path::new("/dev/null")), false).unwrap();
    let (near, _far) = UnixStream::pair().unwrap();
    let error = fds::reopen(&near, true).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Input {
                field: "descriptor",
                ..
            }
        ),
        "{error}"
    );
}

// --- peers -----------------------------------------------------------------------------------

fn play_connect(socket: &Path) {
    let _stream = UnixStream::connect(socket).unwrap();
    say(Identity::current().unwrap().start_ticks);
    linger();
}

fn connected_player() -> (tempfile::TempDir, Player, UnixStream, Identity) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    let mut player = Player::start("connect", &socket);
    let (stream, _) = listener.accept().unwrap();
    let start_ticks = player.hear().parse().unwrap();
    let pid = player.child.id();
    (dir, player, stream, Identity { pid, start_ticks })
}

#[test]
fn the_peer_is_known_by_its_process_and_user() {
    let (_dir, player, stream, identity) = connected_player();
    let credentials = peer::credentials(&stream).unwrap();
    assert_eq!(credentials.pid, player.child.id());
    assert_eq!(credentials.uid, rustix::process::geteuid().as_raw());
    assert_eq!(credentials.gid, rustix::process::getegid().as_raw());
    let process = Process::of_peer(&stream).unwrap();
    assert_eq!(process.identity(), identity);
    assert_eq!(
        Process::open(identity.pid).unwrap().identity(),
        process.identity()
    );
    assert_eq!(
        peer::start_ticks(identity.pid).unwrap(),
        Some(identity.start_ticks)
    );
    assert!(!process.is_dead().unwrap());
    assert!(!process.wait_dead(Duration::from_millis(20)).unwrap());
}

#[test]
fn a_death_is_noticed_before_anybody_reaps_and_wakes_a_poll() {
    use rustix::event::{PollFd, PollFlags};
    let (_dir, mut player, stream, identity) = connected_player();
    let process = Process::of_peer(&stream).unwrap();
    let waiting = thread::spawn(move || {
        let mut polled = [PollFd::new(&process, PollFlags::IN)];
        let ready = rustix::event::poll(&mut polled, None).unwrap();
        (ready, process.is_dead().unwrap())
    });
    assert!(identity.is_running().unwrap());
    player.kill();
    assert_eq!(waiting.join().unwrap(), (1, true));
    // A zombie still has its number and its start time, and is dead all the same.
    assert_eq!(
        peer::start_ticks(identity.pid).unwrap(),
        Some(identity.start_ticks)
    );
    assert!(!identity.is_running().unwrap());
    for opened in [Process::open(identity.pid), Process::of_peer(&stream)] {
        let error = opened.unwrap_err();
        assert!(
            matches!(error, Error::NoProcess { pid } if pid == identity.pid),
            "{error}"
        );
    }
    player.child.wait().unwrap();
    assert!(!identity.is_running().unwrap());
    for opened in [Process::open(identity.pid), Process::of_peer(&stream)] {
        let error = opened.unwrap_err();
        assert!(
            matches!(error, Error::NoProcess { pid } if pid == identity.pid),
            "{error}"
        );
    }
}

fn play_dirs() {
    say(dirs::runtime_dir().unwrap().display());
    say(dirs::cache_dir().unwrap().display());
}

#[test]
fn the_environment_says_where_the_users_directories_are() {
    let root = tempfile::tempdir().unwrap();
    let home = root.path().join("home");
    fs::create_dir(&home).unwrap();
    let (session, cache) = (root.path().join("run"), root.path().join("cache/deep"));
    fs::create_dir(&session).unwrap();
    let vars = [
        ("XDG_RUNTIME_DIR", session.as_path()),
        ("XDG_CACHE_HOME", cache.as_path()),
        ("HOME", home.as_path()),
    ];
    let mut player = Player::start_with("dirs", "", &vars);
    assert_eq!(Path::new(&player.hear()), session.join("kvdepot"));
    assert_eq!(Path::new(&player.hear()), cache.join("kvdepot"));
    assert!(player.finish());
    assert!(cache.join("kvdepot").is_dir());

    // Not absolute: ignored, as its specification demands.
    let vars = [vars[0], ("XDG_CACHE_HOME", Path::new("relative")), vars[2]];
    let mut player = Player::start_with("dirs", "", &vars);
    player.hear();
    assert_eq!(Path::new(&player.hear()), home.join(".cache/kvdepot"));
    assert!(player.finish());
}
