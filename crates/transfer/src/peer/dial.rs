//! How a connection is made, on both sides.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use kvdepot_host::fork::Unshared;
use zerocopy::{FromZeros, IntoBytes};

use crate::error::Error;
use crate::line::Line;
use crate::socket;
use crate::tls::{Failure, Secured};
use crate::wire::{Challenge, Hello, Key, MAC, Malformed, Proof, Turn};

/// How what TLS says to who speaks none begins.
const ALERT: [u8; 3] = [21, 3, 3];

/// Tokens and certificates of an engine. They are replaced as a whole, for connections that begin
/// afterwards.
#[derive(Clone, Debug)]
pub(crate) struct Secrets {
    /// An engine proves itself by the first, and believes who proves any of them.
    keys: Vec<Key>,
    /// TLS of connections to other hosts; connections within this host have none.
    pub(crate) secured: Option<Arc<Secured>>,
}

impl Secrets {
    /// Of these tokens. Without one the empty token is what both sides have.
    pub(crate) fn new(tokens: &[Vec<u8>], secured: Option<Arc<Secured>>) -> Secrets {
        let mut keys: Vec<Key> = tokens.iter().map(|token| Key::of(token)).collect();
        if keys.is_empty() {
            keys.push(Key::of(&[]));
        }
        Secrets { keys, secured }
    }

    /// All that are believed.
    pub(crate) fn keys(&self) -> &[Key] {
        &self.keys
    }

    /// The one that this engine proves itself by.
    fn own(&self) -> &Key {
        // There is one at least.
        &self.keys[0]
    }
}

/// What an initiator greets with.
#[derive(Clone, Debug)]
pub(crate) struct Shake {
    /// What is said to who connects, before anything is proved.
    pub(crate) engine: [u8; 16],
    /// What is said to whom this engine connects to; nobody else hears it.
    pub(crate) initiator: [u8; 16],
    pub(crate) secrets: Arc<ArcSwap<Secrets>>,
    pub(crate) timeout: Duration,
}

/// Why a greeting came to nothing.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Cold {
    /// It says no; another attempt is of no use.
    #[error("{0}")]
    Refused(String),
    /// It did not come to that.
    #[error(transparent)]
    Lost(#[from] io::Error),
}

impl From<Malformed> for Cold {
    fn from(error: Malformed) -> Cold {
        Cold::Refused(error.to_string())
    }
}

impl Shake {
    /// Greets a target as this lane, and makes sure that it has the same token.
    pub(crate) fn greet(&self, fd: BorrowedFd<'_>, lane: u32) -> Result<Challenge, Cold> {
        let nonce = random().map_err(|_| io::Error::from(io::ErrorKind::Interrupted))?;
        let hello = Hello::new(lane, self.initiator, nonce);
        socket::send(fd, hello.as_bytes())?;
        let mut challenge = Challenge::new_zeroed();
        let by = Instant::now() + self.timeout;
        socket::receive_by(fd, challenge.as_mut_bytes(), by).map_err(|error| {
            match challenge.as_bytes().starts_with(&ALERT) {
                true => Cold::Refused("it uses TLS; configure TLS on this host too".to_owned()),
                false => error.into(),
            }
        })?;
        if let Some(reason) = challenge.refusal()? {
            return Err(Cold::Refused(reason));
        }
        let secrets = self.secrets.load_full();
        let proof = Proof {
            key: secrets.own(),
            hello: &hello,
            challenge: &challenge,
        };
        let mine = proof.mac(Turn::Initiator, &[]);
        socket::send(fd, &mine)?;
        let mut theirs = [0; MAC];
        match socket::receive_by(fd, &mut theirs, by) {
            Ok(()) if proof.proves(Turn::Target, &mine, theirs) => Ok(challenge),
            Ok(()) => Err(Cold::Refused("it uses a different token".to_owned())),
            Err(error) => Err(error.into()),
        }
    }
}

/// Who dials.
#[derive(Debug)]
pub(crate) struct Dialer {
    pub(crate) address: SocketAddr,
    pub(crate) shake: Shake,
}

/// A connection that was greeted.
pub(crate) struct Greeted {
    pub(crate) line: Line,
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
        self.try_dial(lane).map_err(|error| {
            let peer = self.address.to_string();
            match error {
                Cold::Refused(reason) => Error::Refused { peer, reason },
                Cold::Lost(error) => Error::Unreachable {
                    peer,
                    reason: error.to_string(),
                },
            }
        })
    }

    fn try_dial(&self, lane: u32) -> Result<Greeted, Cold> {
        let timeout = Some(self.shake.timeout);
        let connect = || TcpStream::connect_timeout(&self.address, self.shake.timeout);
        let stream = Unshared::open(connect)?;
        let secrets = self.shake.secrets.load_full();
        let line = Line::to(stream, self.address, secrets.secured.as_ref())?;
        line.set_write_timeout(timeout)?;
        let greeted = self.shake.greet(line.as_fd(), lane);
        // Where TLS has ended it, that is why.
        let challenge = greeted.map_err(|error| match (line.failure(), error) {
            (Some(Failure::Refused(reason)), _) => Cold::Refused(reason),
            (Some(Failure::Lost(reason)), Cold::Lost(_)) => io::Error::other(reason).into(),
            (_, error) => error,
        })?;
        line.set_write_timeout(None)?;
        Ok(Greeted {
            line,
            credit: challenge.credit.get() as usize,
            target: challenge.engine,
        })
    }
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
