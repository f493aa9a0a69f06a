//! Descriptors over Unix sockets: sending, receiving, duplicating and reopening them.
//!
//! A descriptor that is sent shares its open file description with the receiver: its locks (see
//! [`super::lock`]), its offset and its access mode. Therefore a sender never sends the description
//! that carries its own lock. A receiver that needs a lock of its own [`reopen`]s the descriptor.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    socket_with,
};

use super::{Error, Result};

/// Maximum number of descriptors in one message. An owner sends one per medium, one per directory
/// of a tier, and one more; the limit of the kernel is 253.
pub const DESCRIPTORS_MAX: usize = 49;

/// Creates an empty file in memory with mode 0600 and without a name in any file system.
///
/// `name` is shown to people who inspect descriptors.
///
/// # Errors
///
/// [`Error::Os`] if a system call fails.
pub fn memory_file(name: &str) -> Result<OwnedFd> {
    let file = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)
        .map_err(Error::os("create a file in memory"))?;
    rustix::fs::fchmod(&file, Mode::RUSR | Mode::WUSR)
        .map_err(Error::os("protect a file in memory"))?;
    Ok(file)
}

/// Sends all of `bytes`, with `fds` attached to the first byte.
///
/// The descriptors stay open in this process; the receiver gets duplicates.
///
/// # Errors
///
/// [`Error::Input`] for more than [`DESCRIPTORS_MAX`] descriptors, or for descriptors without any
/// bytes. [`Error::Os`] if the peer has closed the connection (without a signal) or the socket's
/// time limit expired. Then a part of the message may have been sent, and the connection must not
/// be used further.
pub fn send(socket: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
    if fds.len() > DESCRIPTORS_MAX {
        return Err(Error::Input {
            field: "descriptors",
            value: fds.len().to_string(),
            allowed: format!("at most {DESCRIPTORS_MAX} descriptors per message"),
        });
    }
    if bytes.is_empty() && !fds.is_empty() {
        return Err(Error::Input {
            field: "bytes",
            value: "empty".to_owned(),
            allowed: "at least one byte (descriptors cannot be sent without data)".to_owned(),
        });
    }
    let mut sent = 0;
    while sent < bytes.len() {
        // Once a byte is through, the descriptors are: a second copy would be a second grant.
        let attached = if sent == 0 { fds } else { &[] };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !attached.is_empty() && !control.push(SendAncillaryMessage::ScmRights(attached)) {
            return Err(Error::os("attach descriptors")(Errno::NOBUFS));
        }
        let rest = IoSlice::new(bytes.get(sent..).unwrap_or_default());
        sent += retry_on_intr(|| {
            rustix::net::sendmsg(socket, &[rest], &mut control, SendFlags::NOSIGNAL)
        })
        .map_err(Error::os("send to the peer"))?;
    }
    Ok(())
}

/// Connects to the socket at `path`. If the listener's queue is full, it waits for at most
/// `patience`.
///
/// # Errors
///
/// [`Error::Os`] if no process listens, or if the queue stays full.
pub fn connect(path: &Path, patience: Duration) -> Result<UnixStream> {
    let refused = |errno| Error::os("connect")(errno);
    let address = SocketAddrUnix::new(path).map_err(refused)?;
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let socket = socket.map_err(refused)?;
    // That of a Unix socket holds for its connect too; none at all would be for ever.
    let limit = patience.max(Duration::from_millis(1));
    set_socket_timeout(&socket, Timeout::Send, Some(limit)).map_err(refused)?;
    retry_on_intr(|| rustix::net::connect(&socket, &address)).map_err(refused)?;
    Ok(socket.into())
}

/// Connects to a socket with the name `name` in Linux's abstract namespace, without waiting.
///
/// Any process may listen there, so a listener with a full queue counts as absent.
///
/// # Errors
///
/// [`Error::Os`] if no process listens, or if its queue is full.
pub fn connect_abstract(name: &[u8]) -> Result<UnixStream> {
    let refused = |errno| Error::os("connect")(errno);
    let address = SocketAddrUnix::new_abstract_name(name).map_err(refused)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let socket = socket.map_err(refused)?;
    retry_on_intr(|| rustix::net::connect(&socket, &address)).map_err(refused)?;
    rustix::io::ioctl_fionbio(&socket, false).map_err(refused)?;
    Ok(socket.into())
}

/// Waits until data can be read or the connection has ended. Returns false after `timeout` or a
/// signal.
///
/// # Errors
///
/// [`Error::Os`] if the system call fails.
pub fn wait_readable(socket: &UnixStream, timeout: Duration) -> Result<bool> {
    wait(socket, PollFlags::IN, timeout)
}

/// Waits until [`try_send`] can send data or would fail. Returns false after `timeout` or a signal.
///
/// # Errors
///
/// [`Error::Os`] if the system call fails.
pub fn wait_writable(socket: &UnixStream, timeout: Duration) -> Result<bool> {
    wait(socket, PollFlags::OUT, timeout)
}

fn wait(socket: &UnixStream, what: PollFlags, timeout: Duration) -> Result<bool> {
    let limit = Timespec::try_from(timeout).ok();
    let mut polled = [PollFd::new(socket, what)];
    match rustix::event::poll(&mut polled, limit.as_ref()) {
        Ok(ready) => Ok(ready > 0),
        // A signal: the caller decides whether to go on.
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(Error::os("wait for the peer")(errno)),
    }
}

/// Sends as much of `bytes` as the connection accepts without waiting, and returns the number of
/// bytes sent.
///
/// # Errors
///
/// [`Error::Os`] if the peer has closed the connection (without a signal).
pub fn try_send(socket: &UnixStream, bytes: &[u8]) -> Result<usize> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    match retry_on_intr(|| rustix::net::send(socket, bytes, flags)) {
        Err(Errno::AGAIN) => Ok(0),
        sent => sent.map_err(Error::os("send to the peer")),
    }
}

/// Receives available data, at most `bytes.len()` bytes, with the attached descriptors.
///
/// A stream has no message boundaries: one call may return fewer bytes than the peer sent in one
/// call. The count is 0 if the peer closed the connection. Descriptors arrive with the first byte
/// of their message and are closed on exec.
///
/// # Errors
///
/// [`Error::Malformed`] if the peer attached more than [`DESCRIPTORS_MAX`] descriptors, or if this
/// process has too few free ones. Descriptors that arrived are then closed.
///
/// [`Error::Os`] if the connection failed or the socket's time limit expired. For the time limit,
/// [`Error::io_kind`] returns [`WouldBlock`](std::io::ErrorKind::WouldBlock).
pub fn recv(socket: &UnixStream, bytes: &mut [u8]) -> Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = retry_on_intr(|| {
        rustix::net::recvmsg(
            socket,
            &mut [IoSliceMut::new(bytes)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )
    })
    .map_err(Error::os("receive from the peer"))?;
    let mut fds = Vec::new();
    for ancillary in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = ancillary {
            fds.extend(received);
        }
    }
    // The alignment slack of the space may let one more through than was asked for.
    if message.flags.contains(ReturnFlags::CTRUNC) || fds.len() > DESCRIPTORS_MAX {
        return Err(Error::Malformed {
            what: "the peer's message".to_owned(),
            value: format!("truncated after {} descriptors", fds.len()),
            expected: "at most 49 descriptors (and enough free descriptors in this process)",
        });
    }
    Ok((message.bytes, fds))
}

/// Duplicates a descriptor. Both descriptors share one description, with its position and its
/// locks.
///
/// # Errors
///
/// [`Error::Os`] if the process has too many descriptors.
pub fn twin(fd: impl AsFd) -> Result<OwnedFd> {
    rustix::io::fcntl_dupfd_cloexec(fd, 0).map_err(Error::os("duplicate a descriptor"))
}

/// Opens the file or device of `fd` again, with a new open file description.
///
/// The new description has no locks, and nothing else refers to it. With `read_only` it can only be
/// read.
///
/// The call works for files without a name (a memory file, an unlinked file), and does not depend
/// on the present meaning of the name. The system checks the file's permissions again. So a process
/// that may open the file for writing can turn a read-only descriptor into a writable one.
///
/// # Errors
///
/// [`Error::Input`] if `fd` is neither a regular file nor a character or block device.
/// [`Error::Os`] if a system call fails, for example for lack of permission or of `/proc`.
pub fn reopen(fd: impl AsFd, read_only: bool) -> Result<OwnedFd> {
    let access = if read_only {
        OFlags::RDONLY
    } else {
        OFlags::RDWR
    };
    reopen_with(fd.as_fd(), access)
}

/// As [`reopen`], with these flags.
pub(crate) fn reopen_with(fd: BorrowedFd<'_>, flags: OFlags) -> Result<OwnedFd> {
    let stat = rustix::fs::fstat(fd).map_err(Error::os("examine a descriptor"))?;
    let file_type = FileType::from_raw_mode(stat.st_mode);
    if !matches!(
        file_type,
        FileType::RegularFile | FileType::CharacterDevice | FileType::BlockDevice
    ) {
        return Err(Error::Input {
            field: "descriptor",
            value: format!("{file_type:?}"),
            allowed: "a regular file, a character device or a block device".to_owned(),
        });
    }
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    retry_on_intr(|| {
        rustix::fs::open(
            &path,
            flags | OFlags::CLOEXEC | OFlags::NOCTTY,
            Mode::empty(),
        )
    })
    .map_err(Error::os("open a descriptor's file again"))
}
