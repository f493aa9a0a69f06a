//! A forked child that sleeps.

use std::io::{Read, Write, pipe};

use kvdepot_testkit::child;

/// Forks a child that sleeps until it is killed; its process id. It runs when this returns: before
/// that it still has the descriptors of this process.
pub(crate) fn fork_a_sleeper() -> libc::pid_t {
    let (mut runs, mut says) = pipe().unwrap();
    // SAFETY: the child writes, sleeps, and takes no lock that another thread of the parent may
    // hold.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        drop(says.write_all(&[1]));
        child::sleep_until_killed();
    }
    drop(says);
    assert!(pid > 0, "{}", std::io::Error::last_os_error());
    runs.read_exact(&mut [0]).unwrap();
    pid
}
