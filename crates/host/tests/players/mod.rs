//! Other processes: the test program once more, with a part to play.

#![allow(
    dead_code,
    unreachable_pub,
    unsafe_code,
    clippy::print_stderr,
    clippy::allow_attributes,
    reason = "each test binary uses its own part of this"
)]

use std::env;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::Duration;

use kvdepot_host::fork::LockFd;
use kvdepot_host::lock::{self, Kind};

/// Long enough for a process to start on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(20);

const PART: &str = "KVDEPOT_TEST_PART";
const ARGUMENT: &str = "KVDEPOT_TEST_ARGUMENT";
/// Marks the lines that a player says to its test, among what the test harness prints.
const MARK: &str = "@@";

/// A process that plays a part, and is killed with `SIGKILL` at the latest when this goes.
pub struct Player {
    pub child: Child,
    lines: BufReader<ChildStderr>,
}

impl Player {
    pub fn start(part: &str, argument: impl AsRef<Path>) -> Player {
        Player::start_with(part, argument, &[])
    }

    pub fn start_with(part: &str, argument: impl AsRef<Path>, vars: &[(&str, &Path)]) -> Player {
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
    pub fn hear(&mut self) -> String {
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
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
    }

    /// Lets the player come to its end by itself.
    pub fn finish(mut self) -> bool {
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

/// The part that this process plays, and its argument; none in the test itself.
pub fn part() -> Option<(String, PathBuf)> {
    Some((env::var(PART).ok()?, env::var_os(ARGUMENT)?.into()))
}

pub fn say(words: impl std::fmt::Display) {
    eprintln!("{MARK}{words}");
}

/// Until the test lets go of this process.
pub fn linger() {
    let mut rest = Vec::new();
    io::stdin().read_to_end(&mut rest).unwrap();
}

pub fn medium() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("arena");
    fs::write(&path, vec![0; 4096]).unwrap();
    (dir, path)
}

pub fn open(path: &Path) -> File {
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
pub fn becomes_free(file: &File, byte: u64) -> bool {
    let is_free = lock::lock_timeout(file, byte, Kind::Exclusive, PATIENCE).unwrap();
    lock::unlock(file, byte).unwrap();
    is_free
}

pub fn open_lock_fd(path: &Path) -> LockFd {
    LockFd::open(|| Ok(OwnedFd::from(open(path)))).unwrap()
}

/// One page of a file, as any program maps it.
pub fn map(file: BorrowedFd<'_>) -> *mut std::ffi::c_void {
    use rustix::mm::{MapFlags, ProtFlags};
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let null = std::ptr::null_mut();
    // SAFETY: a new mapping at an address that the kernel chooses.
    unsafe { rustix::mm::mmap(null, 4096, protection, MapFlags::SHARED, file, 0) }.unwrap()
}
