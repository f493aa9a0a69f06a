//! Locks, descriptors, peers and forks between real processes.
//!
//! A test that needs another process starts this test program again, with the part to play in an
//! environment variable ([`Player`]); [`play`] is the entry of that process.

#![expect(
    unsafe_code,
    reason = "forks, and maps memory that a child must not see"
)]
#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]
#![expect(
    clippy::print_stderr,
    reason = "how a player speaks to the test that started it"
)]

use std::env;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvdepot_media::Mapping;
use kvdepot_media::host::fork::{self, LOCK_FDS_MAX, LockFd};
use kvdepot_media::host::lock::{self, Kind};
use kvdepot_media::host::peer::{self, Identity, Process};
use kvdepot_media::host::{Error, dirs, fds};

/// Long enough for a process to start on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

// --- other processes -------------------------------------------------------------------------

const PART: &str = "KVDEPOT_TEST_PART";
const ARGUMENT: &str = "KVDEPOT_TEST_ARGUMENT";
/// Marks the lines that a player says to its test, among what the test harness prints.
const MARK: &str = "@@";

/// A process that plays a part, and is killed with `SIGKILL` at the latest when this goes.
struct Player {
    child: Child,
    lines: BufReader<ChildStderr>,
}

impl Player {
    fn start(part: &str, argument: impl AsRef<Path>) -> Player {
        Player::start_with(part, argument, &[])
    }

    fn start_with(part: &str, argument: impl AsRef<Path>, vars: &[(&str, &Path)]) -> Player {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "play", "--ignored", "--nocapture"])
            .env(PART, part)
            .env(ARGUMENT, argument.as_ref())
            .envs(vars.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap());
        Player { child, lines }
    }

    /// The next line that the player says.
    fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            let count = self.lines.read_line(&mut line).unwrap();
            assert!(count > 0, "the other process ended without a word");
            match line.trim_end().strip_prefix(MARK) {
                Some(said) => return said.to_owned(),
                None => eprint!("{line}"),
            }
        }
    }

    /// `SIGKILL`, without reaping.
    fn kill(&mut self) {
        self.child.kill().unwrap();
    }

    /// Lets the player come to its end by itself.
    fn finish(mut self) -> bool {
        drop(self.child.stdin.take());
        self.child.wait().unwrap().success()
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

fn say(words: impl std::fmt::Display) {
    eprintln!("{MARK}{words}");
}

/// Until the test lets go of this process.
fn linger() {
    let mut rest = Vec::new();
    io::stdin().read_to_end(&mut rest).unwrap();
}

#[test]
#[ignore = "the entry of the processes that the other tests start"]
fn play() {
    let (Ok(part), Some(argument)) = (env::var(PART), env::var_os(ARGUMENT)) else {
        return;
    };
    let argument = PathBuf::from(argument);
    match part.as_str() {
        "hold exclusive" => play_hold(&argument, Kind::Exclusive),
        "hold shared" => play_hold(&argument, Kind::Shared),
        "receive" => play_receive(&argument),
        "connect" => play_connect(&argument),
        "fork with LockFd" => play_fork_with_lock_fd(&argument),
        "fork with plain descriptor" => play_fork_with_plain_descriptor(&argument),
        "check child" => play_check_child(&argument),
        "storm" => play_storm(&argument),
        "fill registry" => play_fill_registry(&argument),
        "dirs" => play_dirs(),
        other => panic!("no such part: {other}"),
    }
}

fn medium() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("arena");
    fs::write(&path, vec![0; 4096]).unwrap();
    (dir, path)
}

fn open(path: &Path) -> File {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap()
}

/// Whether a lock goes that this process has just closed.
///
/// Not always at once: a process that another test is starting meanwhile has a copy of every
/// descriptor until its program begins.
fn becomes_free(file: &File, byte: u64) -> bool {
    let is_free = lock::lock_timeout(file, byte, Kind::Exclusive, PATIENCE).unwrap();
    lock::unlock(file, byte).unwrap();
    is_free
}

fn open_lock_fd(path: &Path) -> LockFd {
    LockFd::open(|| Ok(OwnedFd::from(open(path)))).unwrap()
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

/// One page of a file, as any program maps it.
fn map(file: BorrowedFd<'_>) -> *mut std::ffi::c_void {
    use rustix::mm::{MapFlags, ProtFlags};
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let null = std::ptr::null_mut();
    // SAFETY: a new mapping at an address that the kernel chooses.
    unsafe { rustix::mm::mmap(null, 4096, protection, MapFlags::SHARED, file, 0) }.unwrap()
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

// --- forks -----------------------------------------------------------------------------------

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
    say(fork_into(sleep_for_ever));
    linger();
    drop(lock_fd);
}

fn play_fork_with_plain_descriptor(path: &Path) {
    let file = open(path);
    assert!(lock::try_lock(&file, 0, Kind::Exclusive).unwrap());
    say(fork_into(sleep_for_ever));
    linger();
}

/// Whether the lock outlives a holder that has forked and was then killed.
fn lock_outlives_holder_in_its_child(part: &str) -> bool {
    let (_dir, path) = medium();
    let mut holder = Player::start(part, &path);
    let child: i32 = holder.hear().parse().unwrap();
    let child_process = Process::open(child.try_into().unwrap()).unwrap();
    let file = open(&path);
    // The handler runs in the child a moment after the fork has returned in the parent, and
    // leaves the parent's lock alone.
    thread::sleep(Duration::from_millis(50));
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
    assert_eq!(player.hear(), "full");
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

#[test]
fn a_child_that_touches_its_parents_mapping_is_killed() {
    let touch = |addr: usize| {
        let pid = fork_into(move || {
            // SAFETY: mapped in the parent; in the child the address may be missing, which is what
            // the test is about.
            unsafe { std::ptr::with_exposed_provenance_mut::<u8>(addr).write_volatile(1) };
            0
        });
        reap(pid)
    };
    let mapping = Mapping::anonymous("kvdepot-test", 4096).unwrap();
    let buffer = mapping.buffer(0, 4096).unwrap();
    assert_eq!(touch(buffer.addr()).signal(), Some(libc::SIGSEGV));
    assert_eq!(buffer.to_vec(), vec![0; 4096]);
    // Any other memory of the parent is there.
    let (_dir, path) = medium();
    let plain = map(open(&path).as_fd());
    assert_eq!(touch(plain.expose_provenance()).code(), Some(0));
    // SAFETY: mapped above, and nothing refers to it.
    unsafe { rustix::mm::munmap(plain, 4096) }.unwrap();
}

// --- directories -----------------------------------------------------------------------------

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
