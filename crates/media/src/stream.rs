//! Memory over a socket with plain system calls: the baseline that a simple, fast program reaches,
//! for benchmarks.

use crate::buffer::{Buffer, check_range};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Sends a range of memory, at most `each` bytes per call.
///
/// # Errors
///
/// The errors of the socket; [`ErrorKind::InvalidInput`] for a range outside the memory.
pub fn send(
    socket: BorrowedFd<'_>,
    memory: &Buffer,
    range: Range<usize>,
    each: usize,
) -> io::Result<()> {
    walk(memory, range, each, |at, len| {
        // SAFETY: `walk` gives ranges that it has checked, and the buffer keeps its memory readable
        // for as long as it is borrowed. What others write there meanwhile goes as it is.
        unsafe {
            libc::send(
                socket.as_raw_fd(),
                memory.as_ptr().add(at).cast(),
                len,
                libc::MSG_NOSIGNAL,
            )
        }
    })
}

/// Receives exactly one range of memory, at most `each` bytes per call.
///
/// # Errors
///
/// The errors of [`send()`]; [`ErrorKind::UnexpectedEof`] if the peer closed the connection,
/// [`ErrorKind::PermissionDenied`] for memory that is not writable.
pub fn receive(
    socket: BorrowedFd<'_>,
    memory: &Buffer,
    range: Range<usize>,
    each: usize,
) -> io::Result<()> {
    if !memory.is_writable() {
        return Err(ErrorKind::PermissionDenied.into());
    }
    walk(memory, range, each, |at, len| {
        // SAFETY: as above, and the memory is writable.
        unsafe {
            libc::recv(
                socket.as_raw_fd(),
                memory.as_mut_ptr().add(at).cast(),
                len,
                0,
            )
        }
    })
}

/// Calls with what is left of the range until nothing is.
fn walk(
    memory: &Buffer,
    range: Range<usize>,
    each: usize,
    call: impl Fn(usize, usize) -> isize,
) -> io::Result<()> {
    let (mut at, end) = (range.start, range.end);
    let len = end.checked_sub(at).ok_or(ErrorKind::InvalidInput)?;
    check_range(at as u64, len as u64, memory.len() as u64).map_err(invalid)?;
    memory.check_host().map_err(invalid)?;
    while at < end {
        match usize::try_from(call(at, each.clamp(1, end - at))) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(done) => at += done,
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    }
    Ok(())
}

fn invalid(error: crate::error::Error) -> io::Error {
    io::Error::new(ErrorKind::InvalidInput, error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn what_is_sent_in_pieces_arrives_in_others() {
        let (one, other) = UnixStream::pair().unwrap();
        let bytes: Vec<u8> = (0..300_000_u32).map(|i| (i ^ (i >> 9)) as u8).collect();
        let (from, to) = (
            Buffer::from_vec(bytes.clone()),
            Buffer::from_vec(vec![0; 300_000]),
        );
        std::thread::scope(|scope| {
            scope.spawn(|| send(one.as_fd(), &from, 10..299_000, 7_777).unwrap());
            receive(other.as_fd(), &to, 20..299_010, 100_000).unwrap();
        });
        assert!(to.to_vec()[20..299_010] == bytes[10..299_000]);
    }

    #[test]
    fn no_byte_outside_of_the_memory_is_touched() {
        let (one, other) = UnixStream::pair().unwrap();
        let memory = Buffer::from_vec(vec![1; 100]);
        for range in [0..101, 100..101, 200..300] {
            let sent = send(one.as_fd(), &memory, range.clone(), 10);
            assert_eq!(sent.unwrap_err().kind(), ErrorKind::InvalidInput);
            let got = receive(other.as_fd(), &memory, range, 10);
            assert_eq!(got.unwrap_err().kind(), ErrorKind::InvalidInput);
        }
        let refused = receive(other.as_fd(), &memory.read_only(), 0..10, 10);
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::PermissionDenied);
        drop(one);
        let ended = receive(other.as_fd(), &Buffer::from_vec(vec![1; 100]), 0..10, 10);
        assert_eq!(ended.unwrap_err().kind(), ErrorKind::UnexpectedEof);
    }
}
