//! Peer processes: the credentials of the other end of a socket, and detection of its exit.
//!
//! A process ID alone does not identify a process, because the system reuses it. [`Process`] holds
//! a descriptor that always refers to one process. [`Identity`] adds the start time, for places
//! that can store only numbers, such as an arena's owner page.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

use super::{Error, Result};

/// The credentials that the kernel recorded for the other end of a Unix socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Credentials {
    /// Process ID; 0 if the process has none in this PID namespace.
    pub pid: u32,
    /// Effective user ID.
    pub uid: u32,
    /// Effective group ID.
    pub gid: u32,
}

/// Returns the credentials of the process that connected to this end, or that listens at the other
/// end.
///
/// The kernel records them at the time of the connection. Sending the descriptor to another process
/// later does not change them.
///
/// # Errors
///
/// [`Error::Os`] if the socket is not connected.
pub fn credentials(socket: impl AsFd) -> Result<Credentials> {
    let mut raw = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    // rustix's wrapper has a process number that cannot be zero; for a peer outside this namespace
    // the kernel answers zero.
    // SAFETY: `ucred` is three plain integers, valid for any bytes.
    unsafe { socket_option(socket.as_fd(), libc::SO_PEERCRED, &mut raw) }?;
    Ok(Credentials {
        pid: u32::try_from(raw.pid).unwrap_or(0),
        uid: raw.uid,
        gid: raw.gid,
    })
}

/// Reads a socket-level option into `value`.
///
/// # Safety
///
/// Every pattern of bytes must be a valid `T`.
unsafe fn socket_option<T>(socket: BorrowedFd<'_>, option: i32, value: &mut T) -> Result<()> {
    let size = libc::socklen_t::try_from(size_of::<T>()).unwrap_or(0);
    let mut len = size;
    // SAFETY: the socket is open while borrowed; the kernel writes at most `len` bytes into
    // `value`, which is exclusive for the call, and the caller vouches for any bytes.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw mut *value).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(Error::last_os("get the peer's credentials"));
    }
    if len != size {
        return Err(Error::Malformed {
            what: "the peer's credentials".to_owned(),
            value: format!("{len} bytes"),
            expected: "the size of the structure",
        });
    }
    Ok(())
}

/// Returns the effective user ID of this process, which other processes see as its
/// [`Credentials::uid`].
#[must_use]
pub fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// A process by ID and start time: unique on a host until the next boot (see [`boot_id`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(
    clippy::exhaustive_structs,
    reason = "two numbers that callers store and read back"
)]
pub struct Identity {
    /// Process ID, in the PID namespace of the process that created this value; 0 if it has none
    /// there.
    pub pid: u32,
    /// Start time in clock ticks since the host booted (field 22 of `/proc/<pid>/stat`).
    pub start_ticks: u64,
}

impl Identity {
    /// Returns the identity of this process.
    ///
    /// # Errors
    ///
    /// [`Error::Path`] or [`Error::Malformed`] if `/proc` cannot be read. [`Error::NoProcess`] if
    /// `/proc` does not list this process.
    pub fn current() -> Result<Identity> {
        let pid = std::process::id();
        match stat(pid)? {
            Some(stat) => Ok(Identity {
                pid,
                start_ticks: stat.start_ticks,
            }),
            None => Err(Error::NoProcess { pid }),
        }
    }

    /// Returns true while this process runs.
    ///
    /// It is false for a process that only reuses the ID, and for a zombie.
    ///
    /// # Errors
    ///
    /// [`Error::Path`] or [`Error::Malformed`] if `/proc` cannot be read.
    pub fn is_running(&self) -> Result<bool> {
        Ok(stat(self.pid)?
            .is_some_and(|stat| stat.start_ticks == self.start_ticks && !stat.has_ended))
    }
}

/// A process whose exit can be detected. [`AsFd`] returns a descriptor that becomes readable
/// (`POLLIN`) when the process is dead.
///
/// A process is dead when every thread has ended and has released its memory and its descriptors.
/// Memory that only this process mapped is then no longer written.
#[derive(Debug)]
pub struct Process {
    pidfd: OwnedFd,
    identity: Identity,
}

impl Process {
    /// Opens the process that has the ID `pid` at this moment.
    ///
    /// The system may reuse an ID between reading and opening it. Compare [`Process::identity`] if
    /// the start time is known, or use [`Process::of_peer`].
    ///
    /// # Errors
    ///
    /// [`Error::NoProcess`] if the process does not exist or has ended. [`Error::Input`] for an ID
    /// of 0 or above `i32::MAX`. [`Error::Os`] if a system call fails.
    pub fn open(pid: u32) -> Result<Process> {
        let raw = i32::try_from(pid)
            .ok()
            .and_then(Pid::from_raw)
            .ok_or_else(|| Error::Input {
                field: "pid",
                value: pid.to_string(),
                allowed: format!("1 to {}", i32::MAX),
            })?;
        match rustix::process::pidfd_open(raw, PidfdFlags::empty()) {
            Ok(pidfd) => Process::with_pidfd(pidfd, pid),
            Err(Errno::SRCH) => Err(Error::NoProcess { pid }),
            Err(errno) => Err(Error::os("watch a process")(errno)),
        }
    }

    /// Opens the process at the other end of a socket (see [`credentials`]).
    ///
    /// With Linux 6.5 or later, this is exactly the process that connected, also if its ID has been
    /// reused or if it has no ID in this PID namespace. Older kernels provide only the ID.
    ///
    /// # Errors
    ///
    /// The errors of [`credentials`] and [`Process::open`]. [`Error::ForeignPeer`] if an older
    /// kernel has no ID for the process.
    pub fn of_peer(socket: &UnixStream) -> Result<Process> {
        let Credentials { pid, uid, .. } = credentials(socket)?;
        let mut raw: libc::c_int = -1;
        // SAFETY: an integer is valid for any bytes.
        match unsafe { socket_option(socket.as_fd(), libc::SO_PEERPIDFD, &mut raw) } {
            Ok(()) => {
                // SAFETY: the kernel has just made this descriptor for us; nobody else knows it.
                let pidfd = unsafe { OwnedFd::from_raw_fd(raw) };
                Process::with_pidfd(pidfd, pid)
            }
            Err(Error::Os { source, .. }) => match source.raw_os_error() {
                Some(libc::ENOPROTOOPT) if pid == 0 => Err(Error::ForeignPeer { uid }),
                Some(libc::ENOPROTOOPT) => Process::open(pid),
                Some(libc::ESRCH | libc::EINVAL) => Err(Error::NoProcess { pid }),
                _ => Err(Error::Os {
                    operation: "watch the peer's process",
                    source,
                }),
            },
            Err(error) => Err(error),
        }
    }

    fn with_pidfd(pidfd: OwnedFd, pid: u32) -> Result<Process> {
        let start_ticks = match pid {
            // Its descriptor alone tells it from others.
            0 => Some(0),
            _ => stat(pid)?.map(|stat| stat.start_ticks),
        };
        let process = Process {
            pidfd,
            identity: Identity {
                pid,
                start_ticks: start_ticks.unwrap_or(0),
            },
        };
        // While the process lives its number is not reused: alive after the reading, it is the one
        // that was read.
        if start_ticks.is_none() || process.is_dead()? {
            return Err(Error::NoProcess { pid });
        }
        Ok(process)
    }

    /// Returns the process ID and the start time.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// Returns true if the process has died, also before it is reaped.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] if the system is out of memory.
    pub fn is_dead(&self) -> Result<bool> {
        self.wait_dead(Duration::ZERO)
    }

    /// Waits at most for `timeout` until the process dies. Returns true if it has died.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] if the system is out of memory.
    pub fn wait_dead(&self, timeout: Duration) -> Result<bool> {
        let start = Instant::now();
        loop {
            let left = timeout.saturating_sub(start.elapsed());
            // A time that does not fit is as good as for ever.
            let limit = Timespec::try_from(left).ok();
            let mut polled = [PollFd::new(&self.pidfd, PollFlags::IN)];
            match rustix::event::poll(&mut polled, limit.as_ref()) {
                Ok(ready) => return Ok(ready != 0),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(Error::os("wait for a process to end")(errno)),
            }
        }
    }
}

impl Process {
    /// Waits until `socket` is readable or closed, or the process is dead.
    ///
    /// Returns true if the socket is readable or closed. Data that a process sent before its death
    /// is still readable.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] if the system is out of memory.
    pub fn wait_readable(&self, socket: &UnixStream) -> Result<bool> {
        loop {
            let mut polled = [
                PollFd::new(socket, PollFlags::IN),
                PollFd::new(&self.pidfd, PollFlags::IN),
            ];
            match rustix::event::poll(&mut polled, None) {
                Ok(_) => return Ok(!polled[0].revents().is_empty()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(Error::os("wait for a process")(errno)),
            }
        }
    }
}

/// Waits until at least one of `fds` is readable or has ended, at most for `timeout` if there is
/// one.
///
/// Returns one entry per descriptor: true if it is ready. A listening socket is readable when a
/// connection arrives.
///
/// # Errors
///
/// [`Error::Os`] if the system is out of memory.
pub fn wait_any(fds: &[BorrowedFd<'_>], timeout: Option<Duration>) -> Result<Vec<bool>> {
    let begun = Instant::now();
    loop {
        // A time that does not fit is as good as for ever.
        let left = timeout.map(|timeout| timeout.saturating_sub(begun.elapsed()));
        let limit = left.and_then(|left| Timespec::try_from(left).ok());
        let polled = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN));
        let mut polled: Vec<PollFd<'_>> = polled.collect();
        match rustix::event::poll(&mut polled, limit.as_ref()) {
            Ok(_) => return Ok(polled.iter().map(|fd| !fd.revents().is_empty()).collect()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::os("wait for a peer")(errno)),
        }
    }
}

/// Returns true while the other end of a connection is open. Received data stays unread.
///
/// # Errors
///
/// [`Error::Os`] if the system is out of memory.
pub fn is_connected(socket: impl AsFd) -> Result<bool> {
    let mut polled = [PollFd::new(&socket, PollFlags::RDHUP)];
    let now = Timespec::default();
    loop {
        match rustix::event::poll(&mut polled, Some(&now)) {
            Ok(_) => return Ok(polled[0].revents().is_empty()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::os("examine a connection")(errno)),
        }
    }
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

/// Returns the start time of the process `pid` in clock ticks since the host booted, or `None` if
/// it does not exist.
///
/// # Errors
///
/// [`Error::Path`] or [`Error::Malformed`] if `/proc` cannot be read.
pub fn start_ticks(pid: u32) -> Result<Option<u64>> {
    Ok(stat(pid)?.map(|stat| stat.start_ticks))
}

/// Returns the name of the host.
#[must_use]
pub fn hostname() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

/// Returns the ID of the current boot of the kernel. Each boot has a new ID.
///
/// # Errors
///
/// [`Error::Path`] if `/proc` cannot be read.
pub fn boot_id() -> Result<String> {
    let path = "/proc/sys/kernel/random/boot_id";
    let text = fs::read_to_string(path).map_err(Error::path("read", path))?;
    Ok(text.trim().to_owned())
}

#[derive(Debug, PartialEq, Eq)]
struct Stat {
    start_ticks: u64,
    /// Zombie or dead: nothing of it runs any more.
    has_ended: bool,
}

fn stat(pid: u32) -> Result<Option<Stat>> {
    let path = format!("/proc/{pid}/stat");
    let text = match fs::read(&path) {
        Ok(text) => text,
        // Gone before the open, or between the open and the read.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
        Err(error) => return Err(Error::path("read", path)(error)),
    };
    let text = String::from_utf8_lossy(&text);
    match parse_stat(&text) {
        Some(stat) => Ok(Some(stat)),
        None => Err(Error::Malformed {
            what: path,
            value: text.into_owned(),
            expected: "the fields of proc(5), the 22nd a number",
        }),
    }
}

/// The second field is the program's name in parentheses and may hold anything, parentheses and
/// spaces included; the fields are counted from behind it.
fn parse_stat(text: &str) -> Option<Stat> {
    let (_, rest) = text.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next()?; // field 3
    let start_ticks = fields.nth(18)?.parse().ok()?; // field 22
    Some(Stat {
        start_ticks,
        has_ended: matches!(state, "Z" | "X" | "x"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_name_with_parentheses_and_spaces_does_not_shift_the_fields() {
        let text = "42 (a) R 1 (b) S 1 42 42 0 -1 4194560 5 6 7 8 9 10 11 12 20 0 1 0 987654 13 14";
        let expected = Stat {
            start_ticks: 987_654,
            has_ended: false,
        };
        assert_eq!(parse_stat(text), Some(expected));
    }

    #[test]
    fn a_zombie_has_ended() {
        let text = "42 (x) Z 1 42 42 0 -1 4194560 5 6 7 8 9 10 11 12 20 0 1 0 77 13 14";
        assert_eq!(
            parse_stat(text),
            Some(Stat {
                start_ticks: 77,
                has_ended: true
            })
        );
    }

    #[test]
    fn a_cut_line_is_refused() {
        assert_eq!(parse_stat("42 (x) S 1 42 42 0 -1"), None);
        assert_eq!(parse_stat("42 (x"), None);
        assert_eq!(parse_stat(""), None);
    }

    #[test]
    fn this_process_runs_and_another_start_time_does_not() {
        let me = Identity::current().unwrap();
        assert!(me.is_running().unwrap());
        let other = Identity {
            start_ticks: me.start_ticks + 1,
            ..me
        };
        assert!(!other.is_running().unwrap());
    }

    #[test]
    fn numbers_that_no_process_can_have_are_refused() {
        for pid in [0, u32::MAX] {
            let error = Process::open(pid).unwrap_err();
            assert!(
                matches!(error, Error::Input { field: "pid", .. }),
                "{error}"
            );
        }
        // Above the kernel's largest possible limit of process numbers.
        let error = Process::open(1 << 30).unwrap_err();
        assert!(
            matches!(error, Error::NoProcess { pid } if pid == 1 << 30),
            "{error}"
        );
    }

    #[test]
    fn the_boot_has_a_name() {
        assert_eq!(boot_id().unwrap().len(), 36);
        assert!(!hostname().is_empty());
    }
}
