//! Who is at the other end, and whether it still lives.
//!
//! A process number says little: it is reused after a death. [`Process`] holds a descriptor that
//! stands for one process for good, and [`Identity`] adds the start time, for places where only
//! numbers can be kept (an arena's owner page).

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

use super::{Error, Result};

/// Who opened the other end of a Unix socket, as the kernel recorded it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Credentials {
    /// Process number.
    pub pid: u32,
    /// Effective user.
    pub uid: u32,
    /// Effective group.
    pub gid: u32,
}

/// The credentials of the process that connected (or that listens at) the other end.
///
/// They are those of the moment of connecting: a descriptor passed on later does not change them.
///
/// # Errors
///
/// [`Error::ForeignPeer`] when the peer has no process number here, [`Error::Os`] when the socket
/// is not connected.
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
    match u32::try_from(raw.pid) {
        Ok(pid) if pid != 0 => Ok(Credentials {
            pid,
            uid: raw.uid,
            gid: raw.gid,
        }),
        _ => Err(Error::ForeignPeer { uid: raw.uid }),
    }
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
        return Err(Error::last_os("ask who the peer is"));
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

/// The effective user of this process: what another process sees as its [`Credentials::uid`].
#[must_use]
pub fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// A process by number and start time: unique on a host until it boots again
/// (see [`boot_id`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(
    clippy::exhaustive_structs,
    reason = "two numbers that callers store and read back"
)]
pub struct Identity {
    /// Process number, in the namespace of whoever asked.
    pub pid: u32,
    /// When it started, in clock ticks since the host booted (field 22 of `/proc/<pid>/stat`).
    pub start_ticks: u64,
}

impl Identity {
    /// This process.
    ///
    /// # Errors
    ///
    /// [`Error::Path`] or [`Error::Malformed`] when `/proc` cannot be read.
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

    /// Whether this very process still runs; one that merely reuses its number, or that waits to
    /// be reaped, does not count.
    ///
    /// # Errors
    ///
    /// [`Error::Path`] or [`Error::Malformed`] when `/proc` cannot be read.
    pub fn is_running(&self) -> Result<bool> {
        Ok(stat(self.pid)?
            .is_some_and(|stat| stat.start_ticks == self.start_ticks && !stat.has_ended))
    }
}

/// A process whose death can be noticed, and waited for beside other descriptors: [`AsFd`] gives
/// one that is readable (`POLLIN`) once the process is dead.
///
/// Dead means that every thread has ended and given up its memory and its descriptors: nothing
/// that only this process mapped is written any more.
#[derive(Debug)]
pub struct Process {
    pidfd: OwnedFd,
    identity: Identity,
}

impl Process {
    /// The process with this number at this moment.
    ///
    /// Between learning a number and opening it the number may be reused; compare
    /// [`Process::identity`] where the start time is known, or use [`Process::of_peer`].
    ///
    /// # Errors
    ///
    /// [`Error::NoProcess`] when it does not exist or has ended, [`Error::Os`] when the system
    /// refuses.
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

    /// The process at the other end of a socket (see [`credentials`]).
    ///
    /// From Linux 6.5 on this is exactly the process that connected, also when its number has been
    /// reused; older kernels only know the number.
    ///
    /// # Errors
    ///
    /// Those of [`credentials`] and [`Process::open`].
    pub fn of_peer(socket: &UnixStream) -> Result<Process> {
        let pid = credentials(socket)?.pid;
        let mut raw: libc::c_int = -1;
        // SAFETY: an integer is valid for any bytes.
        match unsafe { socket_option(socket.as_fd(), libc::SO_PEERPIDFD, &mut raw) } {
            Ok(()) => {
                // SAFETY: the kernel has just made this descriptor for us; nobody else knows it.
                let pidfd = unsafe { OwnedFd::from_raw_fd(raw) };
                Process::with_pidfd(pidfd, pid)
            }
            Err(Error::Os { source, .. }) => match source.raw_os_error() {
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
        let start_ticks = stat(pid)?.map(|stat| stat.start_ticks);
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

    /// Number and start time.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// Whether the process has died (also when nobody has reaped it yet).
    ///
    /// # Errors
    ///
    /// [`Error::Os`] when the system is out of memory.
    pub fn is_dead(&self) -> Result<bool> {
        self.wait_dead(Duration::ZERO)
    }

    /// Waits at most `timeout` for the process to die, and says whether it has.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] when the system is out of memory.
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
    /// Waits until there is something to read from a socket, its end included, or the process is
    /// dead. True for the socket: what a process has said counts also after its death.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] when the system is out of memory.
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

/// Waits until something can be read from one of these, or one has ended, at most `timeout` where
/// there is one: which of them. A listening socket is readable when somebody connects.
///
/// # Errors
///
/// [`Error::Os`] when the system is out of memory.
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

/// Whether the other end of a connection still has it open; what it has sent stays unread.
///
/// # Errors
///
/// [`Error::Os`] when the system is out of memory.
pub fn is_connected(socket: impl AsFd) -> Result<bool> {
    let mut polled = [PollFd::new(&socket, PollFlags::RDHUP)];
    let now = Timespec::default();
    loop {
        match rustix::event::poll(&mut polled, Some(&now)) {
            Ok(_) => return Ok(polled[0].revents().is_empty()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::os("look at a connection")(errno)),
        }
    }
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

/// When the process with this number started, in clock ticks since the host booted; `None` when
/// there is none.
///
/// # Errors
///
/// [`Error::Path`] or [`Error::Malformed`] when `/proc` cannot be read.
pub fn start_ticks(pid: u32) -> Result<Option<u64>> {
    Ok(stat(pid)?.map(|stat| stat.start_ticks))
}

/// The host's name.
#[must_use]
pub fn hostname() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

/// The name of the present run of the kernel: a fresh one after each boot.
///
/// # Errors
///
/// [`Error::Path`] when `/proc` cannot be read.
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
