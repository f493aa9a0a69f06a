//! The thread of a protected connection: bytes of the engine to the peer and back.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, shutdown};
use rustls::Connection;

use super::ended::{Ended, Failure};

/// Most bytes that are taken from either side before they are on their way: with what the kernel
/// holds, all that a connection has.
const CHUNK: usize = 128 << 10;

/// How long what the engine has said before its end is still sent.
const LINGER: Duration = Duration::from_millis(100);

/// Both ends, and what is between them.
pub(super) struct Pump {
    tls: Connection,
    /// The connection to the peer.
    outer: TcpStream,
    /// The engine has the other end of it.
    inner: UnixStream,
    ended: Arc<Ended>,
    taken: Box<[u8]>,
    /// What the peer has said, and how much of it the engine has.
    heard: Vec<u8>,
    delivered: usize,
    /// The peer says nothing any more.
    is_silent: bool,
    /// When this ends at the latest, since the engine's end is shut.
    leaves: Option<Instant>,
    /// All that the engine has said is taken.
    is_taken: bool,
}

impl Pump {
    pub(super) fn new(
        mut tls: Connection,
        outer: TcpStream,
        inner: UnixStream,
        ended: Arc<Ended>,
    ) -> Pump {
        // What is given to it is bounded here.
        tls.set_buffer_limit(None);
        Pump {
            tls,
            outer,
            inner,
            ended,
            taken: vec![0; CHUNK].into_boxed_slice(),
            heard: Vec::new(),
            delivered: 0,
            is_silent: false,
            leaves: None,
            is_taken: false,
        }
    }

    /// Moves bytes until one end is over.
    pub(super) fn run(mut self) {
        if let Err(failure) = self.work() {
            self.ended.note(failure);
        }
    }

    fn work(&mut self) -> Result<(), Failure> {
        loop {
            if let Err(error) = self.send() {
                // The peer may have said why before it ended, and answers before that.
                self.receive()?;
                self.deliver();
                return Err(self.lost(&error));
            }
            self.deliver();
            if self.is_over() {
                return Ok(());
            }
            if self.leaves.is_some() && !self.tls.wants_write() {
                self.take();
                continue;
            }
            self.wait()?;
        }
    }

    fn is_over(&self) -> bool {
        match self.leaves {
            Some(until) => {
                let is_sent = self.is_taken && !self.tls.wants_write();
                // What was said to a peer that has not proved itself stays here.
                is_sent || self.tls.is_handshaking() || Instant::now() >= until
            }
            None => self.is_silent && self.is_delivered(),
        }
    }

    fn is_delivered(&self) -> bool {
        self.delivered == self.heard.len()
    }

    /// Waits until one of the ends has something, or takes something, and takes it.
    fn wait(&mut self) -> Result<(), Failure> {
        let flag = |holds: bool, flag: PollFlags| match holds {
            true => flag,
            false => PollFlags::empty(),
        };
        let leaves = self.leaves.is_some();
        let takes = !leaves && !self.tls.wants_write() && !self.tls.is_handshaking();
        let receives = !leaves && !self.is_silent && self.is_delivered();
        let outer = flag(receives, PollFlags::IN) | flag(self.tls.wants_write(), PollFlags::OUT);
        let inner = flag(takes, PollFlags::IN) | flag(!self.is_delivered(), PollFlags::OUT);
        let left = self
            .leaves
            .map(|until| until.saturating_duration_since(Instant::now()));
        let limit = left.and_then(|left| Timespec::try_from(left).ok());
        let mut polled = [
            PollFd::new(&self.outer, outer),
            PollFd::new(&self.inner, inner),
        ];
        // An end that is shut would be reported again and again.
        let count = if leaves { 1 } else { 2 };
        match rustix::event::poll(&mut polled[..count], limit.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(()),
            Err(error) => return Err(self.lost(&error.into())),
        }
        let [outer, inner] = polled.map(|one| one.revents());
        let over = PollFlags::HUP | PollFlags::ERR;
        if inner.intersects(over) {
            self.leave();
        } else if inner.contains(PollFlags::IN) {
            self.take();
        }
        if receives && outer.intersects(PollFlags::IN | over) {
            self.receive()?;
        } else if outer.intersects(over) {
            return Err(self.lost(&ErrorKind::ConnectionReset.into()));
        }
        Ok(())
    }

    /// The engine's end is shut: it hears nothing any more.
    fn leave(&mut self) {
        self.leaves.get_or_insert_with(|| Instant::now() + LINGER);
        self.heard.clear();
        self.delivered = 0;
    }

    /// Takes what the engine says.
    fn take(&mut self) {
        match rustix::net::recv(&self.inner, &mut *self.taken, RecvFlags::DONTWAIT) {
            Ok((_, got)) if got > 0 => {
                // It has room for all that it is given.
                drop(self.tls.writer().write_all(&self.taken[..got]));
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            Ok(_) | Err(_) => {
                self.is_taken = true;
                self.leave();
                self.tls.send_close_notify();
            }
        }
    }

    /// Gives the engine what has come, as far as it takes it now.
    fn deliver(&mut self) {
        while !self.is_delivered() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(&self.inner, &self.heard[self.delivered..], flags) {
                Ok(sent) => self.delivered += sent,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => self.leave(),
            }
        }
        self.heard.clear();
        self.delivered = 0;
    }

    /// Sends what is to go to the peer, as far as that takes it now.
    fn send(&mut self) -> io::Result<()> {
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
    fn receive(&mut self) -> Result<(), Failure> {
        let mut wire = [0; CHUNK / 2];
        match rustix::net::recv(&self.outer, &mut wire, RecvFlags::DONTWAIT) {
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

    fn lost(&self, error: &io::Error) -> Failure {
        Failure::Lost(match self.tls.is_handshaking() {
            true => format!("TLS: it ends the handshake, or speaks no TLS: {error}"),
            false => format!("TLS: {error}"),
        })
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        // A forked process may still have both: that they are closed here would not end them.
        let _gone = shutdown(&self.outer, Shutdown::Both);
        let _gone = shutdown(&self.inner, Shutdown::Both);
    }
}

fn refused(error: &rustls::Error) -> Failure {
    Failure::Refused(match error {
        rustls::Error::InvalidMessage(_) => format!("TLS: {error}: it may speak no TLS"),
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
