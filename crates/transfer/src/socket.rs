//! Bytes between a socket and ranges of memory, by as few calls as the kernel allows.
//!
//! All memory is given as raw ranges, since others may change it at any time: no reference to it is
//! ever made.

use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Instant;

use kvdepot_media::Checksum;
use kvdepot_media::checksum::Sum;
use libc::iovec;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use rustix::net::sockopt::{Timeout, set_socket_timeout};

/// Most ranges that the kernel takes in a call.
const RANGES_MAX: usize = 1024;

/// Most bytes that are received before they are hashed: what was just stored is in the caches then.
const HASHED_AT_ONCE: usize = 256 << 10;

/// Ranges of memory, one after the other.
#[derive(Default)]
pub(crate) struct Ranges {
    all: Vec<iovec>,
    /// The first that is not done, which may have lost its beginning.
    next: usize,
}

// SAFETY: addresses are numbers here; who made them promised that they may be used until they are
// given back, by any thread.
unsafe impl Send for Ranges {}

impl Ranges {
    /// None, with room for so many.
    pub(crate) fn with_room(count: usize) -> Ranges {
        Ranges {
            all: Vec::with_capacity(count),
            next: 0,
        }
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// Forgets all of them.
    pub(crate) fn clear(&mut self) {
        self.all.clear();
        self.next = 0;
    }

    /// Adds one.
    ///
    /// # Safety
    ///
    /// It stays readable, and writable where it is received into, until these ranges are cleared or
    /// dropped.
    pub(crate) unsafe fn push(&mut self, at: usize, len: usize) {
        if len == 0 {
            return;
        }
        self.all.push(iovec {
            iov_base: std::ptr::with_exposed_provenance_mut(at),
            iov_len: len,
        });
    }

    /// Adds bytes that somebody has a hold of, to be sent.
    ///
    /// # Safety
    ///
    /// They stay where they are until these ranges are cleared or dropped.
    pub(crate) unsafe fn push_bytes(&mut self, bytes: &[u8]) {
        // SAFETY: passed on.
        unsafe { self.push(bytes.as_ptr().expose_provenance(), bytes.len()) };
    }

    /// The sum of the bytes of all from the `first` on, which are `len`; none has been sent.
    pub(crate) fn sum(&self, first: usize, len: u64) -> Checksum {
        let mut sum = Sum::new(len);
        for range in &self.all[first..] {
            // SAFETY: `push` has promised that they are readable.
            unsafe { sum.feed(range.iov_base.cast(), range.iov_len) };
        }
        sum.finish()
    }

    fn left(&self) -> &[iovec] {
        &self.all[self.next..]
    }

    /// Notes that the next `bytes` are done; they are fed to the sum, if there is one.
    fn advance(&mut self, mut bytes: usize, mut sum: Option<&mut Sum>) {
        while bytes > 0 {
            let range = &mut self.all[self.next];
            let done = bytes.min(range.iov_len);
            if let Some(sum) = &mut sum {
                // SAFETY: as above.
                unsafe { sum.feed(range.iov_base.cast(), done) };
            }
            range.iov_base = range.iov_base.wrapping_byte_add(done);
            range.iov_len -= done;
            bytes -= done;
            if range.iov_len == 0 {
                self.next += 1;
            }
        }
    }

    /// Sends all of them.
    ///
    /// # Errors
    /// What the socket says.
    pub(crate) fn send(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.send_by(socket, None)
    }

    /// Sends all of them before a moment, where there is one.
    ///
    /// # Errors
    /// What the socket says; [`ErrorKind::TimedOut`] where they have not all gone.
    pub(crate) fn send_by(
        &mut self,
        socket: BorrowedFd<'_>,
        by: Option<Instant>,
    ) -> io::Result<()> {
        let limit = Limit::new(socket, Timeout::Send, by);
        while !self.left().is_empty() {
            limit.set()?;
            let sent = transmit(self.left(), |message| {
                // SAFETY: `message` describes ranges that `push` has promised to be readable.
                unsafe { libc::sendmsg(socket.as_raw_fd(), message, libc::MSG_NOSIGNAL) }
            })?;
            self.advance(sent, None);
        }
        Ok(())
    }

    /// Receives into all of them; with `len` bytes in all, also their sum.
    ///
    /// # Errors
    /// What the socket says; [`ErrorKind::UnexpectedEof`] where it ends before.
    pub(crate) fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        summed: Option<u64>,
    ) -> io::Result<Option<Checksum>> {
        self.receive_by(socket, summed, None)
    }

    /// The same before a moment, where there is one, however slowly the bytes come.
    ///
    /// # Errors
    /// As there; [`ErrorKind::TimedOut`] where they have not all come.
    pub(crate) fn receive_by(
        &mut self,
        socket: BorrowedFd<'_>,
        summed: Option<u64>,
        by: Option<Instant>,
    ) -> io::Result<Option<Checksum>> {
        let limit = Limit::new(socket, Timeout::Recv, by);
        let mut sum = summed.map(Sum::new);
        while !self.left().is_empty() {
            limit.set()?;
            let count = match sum {
                Some(_) => self.few(HASHED_AT_ONCE),
                None => self.left().len(),
            };
            let got = transmit(&self.left()[..count], |message| {
                // SAFETY: `message` describes ranges that `push` has promised to be writable.
                unsafe { libc::recvmsg(socket.as_raw_fd(), message, libc::MSG_WAITALL) }
            })?;
            if got == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            self.advance(got, sum.as_mut());
        }
        Ok(sum.map(|sum| sum.finish()))
    }

    /// How many ranges have at least so many bytes together.
    fn few(&self, bytes: usize) -> usize {
        let mut sum = 0;
        let is_enough = |range: &iovec| {
            sum += range.iov_len;
            sum >= bytes
        };
        let left = self.left();
        left.iter()
            .position(is_enough)
            .map_or(left.len(), |at| at + 1)
    }
}

/// What calls wait at most, until it is dropped.
struct Limit<'a> {
    socket: BorrowedFd<'a>,
    which: Timeout,
    by: Option<Instant>,
}

impl Limit<'_> {
    fn new(socket: BorrowedFd<'_>, which: Timeout, by: Option<Instant>) -> Limit<'_> {
        Limit { socket, which, by }
    }

    /// The next call waits for what is left: the system adds up the waits of one call.
    fn set(&self) -> io::Result<()> {
        let Some(by) = self.by else { return Ok(()) };
        let left = by.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        Ok(set_socket_timeout(self.socket, self.which, Some(left))?)
    }
}

impl Drop for Limit<'_> {
    fn drop(&mut self) {
        if self.by.is_some() {
            // It fails where the connection is of no use any more.
            let _ended = set_socket_timeout(self.socket, self.which, None);
        }
    }
}

/// One call with as many ranges as it takes, again where a signal interrupted it.
fn transmit(
    ranges: &[iovec],
    mut call: impl FnMut(*mut libc::msghdr) -> isize,
) -> io::Result<usize> {
    // SAFETY: a message without a name, control data and flags is all zeros.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = ranges.as_ptr().cast_mut();
    message.msg_iovlen = ranges.len().min(RANGES_MAX) as _;
    loop {
        let done = call(&raw mut message);
        if let Ok(done) = usize::try_from(done) {
            return Ok(done);
        }
        let error = io::Error::last_os_error();
        if error.kind() != ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Sends bytes.
///
/// # Errors
/// What the socket says.
pub(crate) fn send(socket: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<()> {
    let mut ranges = Ranges::with_room(1);
    // SAFETY: the ranges go before the bytes.
    unsafe { ranges.push_bytes(bytes) };
    ranges.send(socket)
}

/// Receives exactly these bytes.
///
/// # Errors
/// As [`Ranges::receive`].
pub(crate) fn receive(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<()> {
    let mut ranges = Ranges::with_room(1);
    // SAFETY: the ranges go before the bytes, which nobody else has meanwhile.
    unsafe { ranges.push(bytes.as_mut_ptr().expose_provenance(), bytes.len()) };
    ranges.receive(socket, None).map(drop)
}

/// Receives exactly these bytes before a moment, however slowly they come.
///
/// # Errors
/// As [`Ranges::receive`]; [`ErrorKind::TimedOut`] where they have not all come.
pub(crate) fn receive_by(
    socket: BorrowedFd<'_>,
    mut bytes: &mut [u8],
    by: Instant,
) -> io::Result<()> {
    while !bytes.is_empty() {
        let left = by.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        let limit = Timespec::try_from(left).ok();
        let mut polled = [PollFd::from_borrowed_fd(socket, PollFlags::IN)];
        match rustix::event::poll(&mut polled, limit.as_ref()) {
            Ok(0) | Err(Errno::INTR) => continue,
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        match rustix::net::recv(socket, &mut *bytes, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok((_, got)) => bytes = &mut bytes[got..],
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Receives so many bytes, of which nothing becomes.
///
/// # Errors
/// As [`Ranges::receive`].
pub(crate) fn skip(socket: BorrowedFd<'_>, mut bytes: u64) -> io::Result<()> {
    let mut scratch = [0; 16 << 10];
    while bytes > 0 {
        let take = bytes.min(scratch.len() as u64) as usize;
        receive(socket, &mut scratch[..take])?;
        bytes -= take as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn ranges_go_over_a_socket_in_their_order_and_are_summed() {
        let (one, other) = UnixStream::pair().unwrap();
        let bytes: Vec<u8> = (0..3_000_000_u32).map(|i| (i ^ (i >> 9)) as u8).collect();
        let sent = bytes.clone();
        let sender = std::thread::spawn(move || {
            let mut ranges = Ranges::with_room(0);
            for piece in sent.chunks(997) {
                // SAFETY: `sent` outlives the ranges.
                unsafe { ranges.push_bytes(piece) };
            }
            ranges.send(one.as_fd()).unwrap();
        });
        let mut got = vec![0_u8; bytes.len()];
        let at = got.as_mut_ptr().expose_provenance();
        let mut ranges = Ranges::with_room(0);
        for start in (0..bytes.len()).step_by(1234) {
            // SAFETY: `got` outlives the ranges.
            unsafe { ranges.push(at + start, 1234.min(bytes.len() - start)) };
        }
        let len = bytes.len() as u64;
        let sum = ranges.receive(other.as_fd(), Some(len)).unwrap().unwrap();
        sender.join().unwrap();
        assert!(got == bytes);
        assert_eq!(sum.to_u128(), kvdepot_media::checksum::digest(&bytes));
    }

    #[test]
    fn an_end_before_the_last_byte_is_an_error() {
        let (one, other) = UnixStream::pair().unwrap();
        send(one.as_fd(), &[1, 2, 3]).unwrap();
        drop(one);
        let error = receive(other.as_fd(), &mut [0; 4]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
    }
}
