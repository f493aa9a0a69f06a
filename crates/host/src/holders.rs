//! The processes that hold a lock.
//!
//! The kernel does not name the holders of open file description locks. But `/proc` lists, for each
//! descriptor of a process that this process may inspect, the locks of its description.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// A process that has a description with the lock.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// Process ID.
    pub pid: u32,
    /// Program name as the kernel reports it; empty if it could not be read.
    pub name: String,
    /// True if a signal or a debugger has stopped the process.
    pub stopped: bool,
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let stopped = if self.stopped { ", stopped" } else { "" };
        write!(f, "{} ({}{stopped})", self.pid, self.name)
    }
}

/// Returns the processes that hold `byte` of the medium that `fd` refers to, in order of their
/// process IDs.
///
/// The list can include this process. It does not include processes of other users, of other PID
/// namespaces, and processes that have only a mapping of the description. The call inspects every
/// descriptor of every process that it may read, which takes milliseconds.
#[must_use]
pub fn holders(fd: impl AsFd, byte: u64) -> Vec<Holder> {
    let medium = fd.as_fd().try_clone_to_owned().map(fs::File::from);
    let Ok(medium) = medium.and_then(|file| file.metadata()) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = process.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let folder = process.path();
        if holds(&folder, &medium, byte) {
            found.push(describe(pid, &folder));
        }
    }
    found.sort_unstable_by_key(|holder| holder.pid);
    found
}

/// Returns true if this process holds `byte` of the medium that `fd` refers to, with any
/// description.
#[must_use]
pub fn is_held_here(fd: impl AsFd, byte: u64) -> bool {
    let medium = fd.as_fd().try_clone_to_owned().map(fs::File::from);
    let medium = medium.and_then(|file| file.metadata());
    medium.is_ok_and(|medium| holds(Path::new("/proc/self"), &medium, byte))
}

fn holds(folder: &Path, medium: &fs::Metadata, byte: u64) -> bool {
    let fds = fs::read_dir(folder.join("fd"));
    let mut fds = fds.into_iter().flatten().flatten().map(|fd| fd.path());
    fds.any(|fd| {
        let is_it = fs::metadata(&fd).is_ok_and(|other| is_same(medium, &other));
        is_it && carries(&folder.join("fdinfo"), &fd, byte)
    })
}

fn is_same(a: &fs::Metadata, b: &fs::Metadata) -> bool {
    // One device may have several nodes; a lock on a block device is its node's.
    match a.file_type().is_char_device() {
        true => b.file_type().is_char_device() && a.rdev() == b.rdev(),
        false => (a.dev(), a.ino()) == (b.dev(), b.ino()),
    }
}

/// Whether the description of a descriptor carries a lock on `byte`.
fn carries(infos: &Path, fd: &Path, byte: u64) -> bool {
    let Some(number) = fd.file_name() else {
        return false;
    };
    let info = fs::read_to_string(infos.join(number)).unwrap_or_default();
    info.lines().any(|line| covers(line, byte))
}

/// Whether a line of `fdinfo` is a lock of this kind on `byte`, as in
/// `lock: 1: OFDLCK  ADVISORY  READ -1 08:02:1234 1 1`.
fn covers(line: &str, byte: u64) -> bool {
    let Some(lock) = line.strip_prefix("lock:") else {
        return false;
    };
    let fields: Vec<&str> = lock.split_ascii_whitespace().collect();
    let [.., begin, end] = fields.as_slice() else {
        return false;
    };
    let begins = begin.parse().is_ok_and(|begin: u64| begin <= byte);
    let ends = *end == "EOF" || end.parse().is_ok_and(|end: u64| byte <= end);
    fields.contains(&"OFDLCK") && begins && ends
}

fn describe(pid: u32, folder: &Path) -> Holder {
    let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap_or_default();
    let stat = read("stat");
    let state = stat.rsplit_once(')').map(|(_, rest)| rest.trim_start());
    Holder {
        pid,
        name: read("comm").trim_end().to_owned(),
        stopped: state.is_some_and(|state| state.starts_with(['T', 't'])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::{self, Kind};

    #[test]
    fn a_lock_is_found_at_its_byte_and_nowhere_else() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(holders(&file, 1), []);
        assert!(!is_held_here(&file, 1));
        assert!(lock::try_lock(&file, 1, Kind::Shared).unwrap());
        let found = holders(&file, 1);
        let pids: Vec<u32> = found.iter().map(|holder| holder.pid).collect();
        assert_eq!(pids, [std::process::id()]);
        assert!(!found[0].stopped && !found[0].name.is_empty());
        assert_eq!(holders(&file, 0), []);
        assert!(is_held_here(&file, 1) && !is_held_here(&file, 0));
        lock::unlock_all(&file).unwrap();
        assert_eq!(holders(&file, 1), []);
    }

    #[test]
    fn lines_of_fdinfo_are_read() {
        let line = "lock:\t1: OFDLCK  ADVISORY  READ -1 08:02:1234 1 1";
        assert!(covers(line, 1) && !covers(line, 0) && !covers(line, 2));
        assert!(covers(
            "lock:\t1: OFDLCK  ADVISORY  WRITE -1 08:02:1234 0 EOF",
            9
        ));
        assert!(!covers(
            "lock:\t1: POSIX  ADVISORY  READ 77 08:02:1234 1 1",
            1
        ));
        assert!(!covers("pos:\t0", 0) && !covers("lock:", 0));
    }
}
