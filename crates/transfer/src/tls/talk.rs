//! What is said to a peer and heard from it under TLS, without ever waiting for it.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

use kvdepot_host::fork::Unshared;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};
use rustls::Connection;

use super::ended::Failure;

/// Most bytes that are received at once.
const WIRE: usize = 64 << 10;

/// TLS, and the connection to the peer.
pub(crate) struct Talk {
    tls: Connection,
    outer: Unshared<TcpStream>,
    /// What the peer has said, and how much of it was taken.
    heard: Vec<u8>,
    taken: usize,
    /// The peer says nothing any more.
    pub(super) is_silent: bool,
}

impl AsFd for Talk {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.outer.as_fd()
    }
}

impl Talk {
    pub(super) fn new(mut tls: Connection, outer: Unshared<TcpStream>) -> Talk {
        // What is given to it is bounded by those that give it.
        tls.set_buffer_limit(None);
        Talk {
            tls,
            outer,
            heard: Vec::new(),
            taken: 0,
            is_silent: false,
        }
    }

    /// Whether something is to be sent, once the peer takes it.
    pub(crate) fn wants_write(&self) -> bool {
        self.tls.wants_write()
    }

    pub(super) fn is_handshaking(&self) -> bool {
        self.tls.is_handshaking()
    }

    /// What was heard and not taken.
    pub(super) fn heard(&self) -> &[u8] {
        &self.heard[self.taken..]
    }

    /// So many bytes of it have been taken.
    pub(super) fn took(&mut self, bytes: usize) {
        self.taken += bytes;
        if self.heard().is_empty() {
            self.forget();
        }
    }

    pub(super) fn forget(&mut self) {
        self.heard.clear();
        self.taken = 0;
    }

    /// At most so many bytes of what the peer has said by now; none where nothing has come.
    ///
    /// # Errors
    /// It is not the one, or its connection has ended.
    pub(crate) fn take(&mut self, most: usize) -> Result<Vec<u8>, Failure> {
        self.send().map_err(|error| self.lost(&error))?;
        if self.heard().is_empty() {
            self.receive()?;
        }
        self.send().map_err(|error| self.lost(&error))?;
        let some = &self.heard()[..self.heard().len().min(most)];
        if some.is_empty() && self.is_silent {
            return Err(self.lost(&ErrorKind::UnexpectedEof.into()));
        }
        let some = some.to_vec();
        self.took(some.len());
        Ok(some)
    }

    /// Says something, and sends what the peer takes now.
    ///
    /// # Errors
    /// The connection has ended.
    pub(crate) fn say(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.put(bytes);
        self.send().map_err(|error| self.lost(&error))
    }

    /// Says something that is yet to be sent.
    pub(super) fn put(&mut self, bytes: &[u8]) {
        // It has room for all that it is given.
        drop(self.tls.writer().write_all(bytes));
    }

    pub(super) fn end(&mut self) {
        self.tls.send_close_notify();
    }

    /// Sends what is to go to the peer, as far as that takes it now.
    pub(super) fn send(&mut self) -> io::Result<()> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut Outer(self.outer.as_fd())) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Receives from the peer, once.
    pub(super) fn receive(&mut self) -> Result<(), Failure> {
        let mut wire = [0; WIRE];
        match rustix::net::recv(&*self.outer, &mut wire, RecvFlags::DONTWAIT) {
            Ok((_, 0)) if self.tls.is_handshaking() => {
                Err(self.lost(&ErrorKind::UnexpectedEof.into()))
            }
            Ok((_, 0)) => {
                self.is_silent = true;
                Ok(())
            }
            Ok((_, got)) => self.open(&wire[..got]),
            Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(error) => Err(self.lost(&error.into())),
        }
    }

    /// What the peer has sent is what it said, if it is the one.
    fn open(&mut self, mut wire: &[u8]) -> Result<(), Failure> {
        while !wire.is_empty() && !self.is_silent {
            let got = self.tls.read_tls(&mut wire);
            if got.map_err(|error| self.lost(&error))? == 0 {
                self.is_silent = true;
                break;
            }
            let state = match self.tls.process_new_packets() {
                Ok(state) => state,
                Err(error) => {
                    // The peer hears why, if it still listens.
                    drop(self.send());
                    return Err(refused(&error));
                }
            };
            self.is_silent = state.peer_has_closed();
            let at = self.heard.len();
            self.heard.resize(at + state.plaintext_bytes_to_read(), 0);
            let read = self.tls.reader().read_exact(&mut self.heard[at..]);
            read.map_err(|error| self.lost(&error))?;
        }
        Ok(())
    }

    pub(super) fn lost(&self, error: &io::Error) -> Failure {
        Failure::Lost(match self.tls.is_handshaking() {
            true => format!("TLS handshake failed (the peer may not use TLS): {error}"),
            false => format!("TLS: {error}"),
        })
    }
}

fn refused(error: &rustls::Error) -> Failure {
    Failure::Refused(match error {
        rustls::Error::InvalidMessage(_) => format!("TLS: {error} (the peer may not use TLS)"),
        _ => format!("TLS: {error}"),
    })
}

/// The connection to the peer, which is never waited for.
struct Outer<'a>(BorrowedFd<'a>);

impl Write for Outer<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let mut none = SendAncillaryBuffer::default();
        loop {
            match rustix::net::sendmsg(self.0, slices, &mut none, flags) {
                Err(Errno::INTR) => {}
                sent => return Ok(sent?),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
