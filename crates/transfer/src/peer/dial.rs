//! How a connection to a target is made.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use zerocopy::{FromZeros, IntoBytes};

use crate::error::Error;
use crate::socket;
use crate::wire::{Challenge, Hello, Key, MAC, Proof, Turn};

/// Pause after which a silent connection is asked whether its peer is there, between two such
/// questions, and how many go unanswered before it ends: half a minute in all, less than it takes
/// anybody to wonder.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(10), Duration::from_secs(5), 4);

/// Who dials, and what it may take.
#[derive(Debug)]
pub(crate) struct Dialer {
    pub(crate) address: SocketAddr,
    pub(crate) engine: [u8; 16],
    pub(crate) key: Key,
    pub(crate) timeout: Duration,
}

/// A connection that was greeted.
pub(crate) struct Greeted {
    pub(crate) socket: TcpStream,
    /// What the target drew when its engine started.
    pub(crate) target: [u8; 16],
    /// Requests that may be unanswered.
    pub(crate) credit: usize,
}

impl Dialer {
    /// Connects a lane.
    ///
    /// # Errors
    /// [`Error::Refused`] where trying again is of no use, [`Error::Unreachable`] otherwise.
    pub(crate) fn dial(&self, lane: u32) -> Result<Greeted, Error> {
        let lost = |error: io::Error| self.unreachable(error.to_string());
        let stream = TcpStream::connect_timeout(&self.address, self.timeout).map_err(lost)?;
        prepare(&stream).map_err(lost)?;
        let by = Instant::now() + self.timeout;
        stream.set_write_timeout(Some(self.timeout)).map_err(lost)?;
        let hello = Hello::new(lane, self.engine, random()?);
        let fd = stream.as_fd();
        socket::send(fd, hello.as_bytes()).map_err(lost)?;
        let mut challenge = Challenge::new_zeroed();
        socket::receive_by(&stream, challenge.as_mut_bytes(), by).map_err(lost)?;
        let refusal = challenge
            .refusal()
            .map_err(|error| self.refused(error.to_string()))?;
        if let Some(reason) = refusal {
            return Err(self.refused(reason));
        }
        let proof = Proof {
            key: &self.key,
            hello: &hello,
            challenge: &challenge,
        };
        let mine = proof.mac(Turn::Initiator, &[]);
        socket::send(fd, &mine).map_err(lost)?;
        let mut theirs = [0; MAC];
        match socket::receive_by(&stream, &mut theirs, by) {
            Ok(()) if proof.proves(Turn::Target, &mine, theirs) => {}
            // It ends the connection of who does not know its token.
            Ok(()) => return Err(self.refused("it has another token".to_owned())),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(self.refused("it has another token, or has ended".to_owned()));
            }
            Err(error) => return Err(lost(error)),
        }
        stream.set_read_timeout(None).map_err(lost)?;
        stream.set_write_timeout(None).map_err(lost)?;
        let credit = challenge.credit.get() as usize;
        Ok(Greeted {
            socket: stream,
            target: challenge.engine,
            credit,
        })
    }

    fn unreachable(&self, reason: String) -> Error {
        Error::Unreachable {
            peer: self.address.to_string(),
            reason,
        }
    }

    fn refused(&self, reason: String) -> Error {
        Error::Refused {
            peer: self.address.to_string(),
            reason,
        }
    }
}

/// What every connection has, at both ends.
///
/// # Errors
/// What the system says.
pub(crate) fn prepare(stream: &TcpStream) -> io::Result<()> {
    let (idle, between, count) = KEEPALIVE;
    sockopt::set_tcp_nodelay(stream, true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, idle)?;
    sockopt::set_tcp_keepintvl(stream, between)?;
    sockopt::set_tcp_keepcnt(stream, count)?;
    let patience = idle + between * count;
    sockopt::set_tcp_user_timeout(stream, patience.as_millis() as u32)?;
    Ok(())
}

/// Bytes that nobody can guess.
///
/// # Errors
/// The kernel has none.
pub(crate) fn random<const LEN: usize>() -> Result<[u8; LEN], Error> {
    let mut bytes = [0; LEN];
    let got = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    match got {
        // Up to 256 bytes come whole.
        Ok(got) if got == LEN => Ok(bytes),
        Ok(_) => Err(Error::io("draw random bytes")(
            io::ErrorKind::Interrupted.into(),
        )),
        Err(error) => Err(Error::io("draw random bytes")(error.into())),
    }
}
