//! The thread of a protected connection: bytes of the engine to the peer and back.

use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_host::fork::Unshared;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::ended::{Ended, Failure};
use super::talk::Talk;

/// Most bytes that are taken from the engine before they are on their way: with what the kernel
/// holds, all that a connection has.
const CHUNK: usize = 128 << 10;

/// How long what the engine has said before its end is still sent.
const LINGER: Duration = Duration::from_millis(100);

/// Both ends, and what is between them.
pub(super) struct Pump {
    talk: Talk,
    /// The engine has the other end of it.
    inner: Unshared<UnixStream>,
    ended: Arc<Ended>,
    chunk: Box<[u8]>,
    /// When this ends at the latest, since the engine's end is shut.
    leaves: Option<Instant>,
    /// All that the engine has said is taken.
    is_taken: bool,
}

impl Pump {
    pub(super) fn new(talk: Talk, inner: Unshared<UnixStream>, ended: Arc<Ended>) -> Pump {
        Pump {
            talk,
            inner,
            ended,
            chunk: vec![0; CHUNK].into_boxed_slice(),
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
            if let Err(error) = self.talk.send() {
                // The peer may have said why before it ended, and answers before that.
                self.talk.receive()?;
                self.deliver();
                return Err(self.talk.lost(&error));
            }
            self.deliver();
            if self.is_over() {
                return Ok(());
            }
            if self.leaves.is_some() && !self.talk.wants_write() {
                self.take();
                continue;
            }
            self.wait()?;
        }
    }

    fn is_over(&self) -> bool {
        match self.leaves {
            Some(until) => {
                let is_sent = self.is_taken && !self.talk.wants_write();
                // What was said to a peer that has not proved itself stays here.
                is_sent || self.talk.is_handshaking() || Instant::now() >= until
            }
            None => self.talk.is_silent && self.is_delivered(),
        }
    }

    fn is_delivered(&self) -> bool {
        self.talk.heard().is_empty()
    }

    /// Waits until one of the ends has something, or takes something, and takes it.
    fn wait(&mut self) -> Result<(), Failure> {
        let flag = |holds: bool, flag: PollFlags| match holds {
            true => flag,
            false => PollFlags::empty(),
        };
        let leaves = self.leaves.is_some();
        let wants_write = self.talk.wants_write();
        let takes = !leaves && !wants_write && !self.talk.is_handshaking();
        let receives = !leaves && !self.talk.is_silent && self.is_delivered();
        let outer = flag(receives, PollFlags::IN) | flag(wants_write, PollFlags::OUT);
        let inner = flag(takes, PollFlags::IN) | flag(!self.is_delivered(), PollFlags::OUT);
        let left = self
            .leaves
            .map(|until| until.saturating_duration_since(Instant::now()));
        let limit = left.and_then(|left| Timespec::try_from(left).ok());
        let mut polled = [
            PollFd::new(&self.talk, outer),
            PollFd::new(&self.inner, inner),
        ];
        // An end that is shut would be reported again and again.
        let count = if leaves { 1 } else { 2 };
        match rustix::event::poll(&mut polled[..count], limit.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(()),
            Err(error) => return Err(self.talk.lost(&error.into())),
        }
        let [outer, inner] = polled.map(|one| one.revents());
        let over = PollFlags::HUP | PollFlags::ERR;
        if inner.intersects(over) {
            self.leave();
        } else if inner.contains(PollFlags::IN) {
            self.take();
        }
        if receives && outer.intersects(PollFlags::IN | over) {
            self.talk.receive()?;
        } else if outer.intersects(over) {
            return Err(self.talk.lost(&ErrorKind::ConnectionReset.into()));
        }
        Ok(())
    }

    /// The engine's end is shut: it hears nothing any more.
    fn leave(&mut self) {
        self.leaves.get_or_insert_with(|| Instant::now() + LINGER);
        self.talk.forget();
    }

    /// Takes what the engine says.
    fn take(&mut self) {
        match rustix::net::recv(&*self.inner, &mut *self.chunk, RecvFlags::DONTWAIT) {
            Ok((_, got)) if got > 0 => self.talk.put(&self.chunk[..got]),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Ok(_) | Err(_) => {
                self.is_taken = true;
                self.leave();
                self.talk.end();
            }
        }
    }

    /// Gives the engine what has come, as far as it takes it now.
    fn deliver(&mut self) {
        while !self.is_delivered() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(&*self.inner, self.talk.heard(), flags) {
                Ok(sent) => self.talk.took(sent),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => self.leave(),
            }
        }
    }
}
