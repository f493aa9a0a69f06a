//! Connections that have yet to prove themselves: one thread for all of a listener's, which waits
//! for none of them. A peer that says nothing costs a descriptor for a while, and only one of few.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_host::fork::Unshared;
use kvdepot_host::{EachMinute, limits};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketFlags};
use zerocopy::{FromBytes, IntoBytes};

use crate::line::Way;
use crate::peer::{Shake, random};
use crate::tls::Failure;
use crate::wire::{Challenge, Greeting, Hello, MAC, Proof, Turn};

/// Most connections that have not proved themselves yet. Who has the token does so in two round
/// trips.
const UNGREETED_MAX: usize = 64;

/// They take no more than this part of the descriptors that the process may have.
const DESCRIPTORS_PART: usize = 8;

/// Pause of a listener when the system has no descriptors for one more.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Who lets connections in.
pub(crate) trait Host: Send + Sync + 'static {
    fn shake(&self) -> &Shake;
    fn is_closing(&self) -> bool;
    /// Whether a connection may try.
    fn may_try(&self, socket: &OwnedFd) -> bool;
    /// What a hello is answered with, and the requests that may be unanswered.
    fn greeting(&self) -> (Greeting, u32);
    /// One has proved itself.
    fn enter(self: &Arc<Self>, arrived: Arrived);
    /// One has not.
    fn refused(&self, peer: Option<SocketAddr>, why: &str);
}

/// A connection that has proved itself, and hears so by `welcome`.
pub(crate) struct Arrived {
    pub(crate) way: Way,
    /// Where it comes from, over TCP.
    pub(crate) peer: Option<SocketAddr>,
    pub(crate) hello: Hello,
    pub(crate) welcome: [u8; MAC],
}

/// One that has not proved itself yet.
struct Arrival {
    way: Way,
    peer: Option<SocketAddr>,
    until: Instant,
    /// Its hello, and then its proof.
    heard: Vec<u8>,
    /// What its hello was answered with.
    challenge: Option<Challenge>,
}

/// What has become of one.
enum Heard {
    /// Not all of it has come.
    Little,
    Proof(Hello, [u8; MAC]),
    /// Why it is refused, and the bytes that say so to it.
    Wrong(String, Vec<u8>),
}

/// Accepts until the host closes, and the listener is shut for that.
pub(crate) fn run<H: Host>(listener: &Unshared<impl AsFd>, host: &Arc<H>) {
    // Without it, one that goes before it is accepted would keep the others waiting.
    let _waits = rustix::io::ioctl_fionbio(listener, true);
    // The oldest is the first.
    let mut waiting: Vec<Arrival> = Vec::new();
    let failures = EachMinute::default();
    while !host.is_closing() {
        let Ok(ready) = wait(listener, &waiting) else {
            std::thread::sleep(ACCEPT_PAUSE);
            continue;
        };
        if host.is_closing() {
            return;
        }
        let now = Instant::now();
        for (mut arrival, is_ready) in std::mem::take(&mut waiting).into_iter().zip(&ready[1..]) {
            let heard = match is_ready {
                true => arrival.hear(host.as_ref()),
                false => Heard::Little,
            };
            match heard {
                Heard::Proof(hello, welcome) => host.enter(Arrived {
                    way: arrival.way,
                    peer: arrival.peer,
                    hello,
                    welcome,
                }),
                Heard::Wrong(why, last) => {
                    // First, so that it is counted when the other end reads of it.
                    host.refused(arrival.peer, &why);
                    drop(arrival.say(&last));
                }
                Heard::Little if now < arrival.until => waiting.push(arrival),
                Heard::Little => host.refused(arrival.peer, "it did not authenticate in time"),
            }
        }
        if !ready[0] {
            continue;
        }
        match Arrival::accept(listener, host.as_ref()) {
            Ok(arrival) => waiting.extend(arrival),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
            Err(error) => {
                if let Some(unsaid) = failures.may_say() {
                    tracing::warn!(%error, unsaid,
                        "cannot accept connections; other processes wait until a retry succeeds");
                }
                std::thread::sleep(ACCEPT_PAUSE);
            }
        }
        if waiting.len() > most() {
            let dropped = waiting.remove(to_drop(&waiting));
            host.refused(
                dropped.peer,
                "closed, because too many connections have not authenticated yet",
            );
        }
    }
}

fn most() -> usize {
    UNGREETED_MAX.min((limits::descriptors() / DESCRIPTORS_PART).max(1))
}

/// The oldest of the address that has most, of those that have said nothing where there is one. The
/// last one stays, because it has had no time to say anything.
fn to_drop(waiting: &[Arrival]) -> usize {
    let address = |arrival: &Arrival| arrival.peer.map(|peer| peer.ip().to_canonical());
    let mut counts = HashMap::new();
    for arrival in waiting {
        *counts.entry(address(arrival)).or_insert(0) += 1;
    }
    let count = |arrival: &Arrival| counts.get(&address(arrival)).copied().unwrap_or(0);
    let highest = waiting.iter().map(count).max();
    let is_its = |arrival: &Arrival| Some(count(arrival)) == highest;
    let is_silent = |arrival: &Arrival| is_its(arrival) && arrival.challenge.is_none();
    let before = &waiting[..waiting.len().saturating_sub(1)];
    let silent = before.iter().position(is_silent);
    silent
        .or_else(|| before.iter().position(is_its))
        .unwrap_or(0)
}

/// Waits until somebody connects or one of those that wait has something, or has waited too long.
fn wait(listener: &impl AsFd, waiting: &[Arrival]) -> Result<Vec<bool>, Errno> {
    let until = waiting.iter().map(|arrival| arrival.until).min();
    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
    let limit = left.and_then(|left| Timespec::try_from(left).ok());
    let first = PollFd::new(listener, PollFlags::IN);
    let polled = waiting
        .iter()
        .map(|arrival| PollFd::new(&arrival.way, arrival.waits_for()));
    let mut polled: Vec<PollFd<'_>> = std::iter::once(first).chain(polled).collect();
    match rustix::event::poll(&mut polled, limit.as_ref()) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error),
    }
    Ok(polled.iter().map(|one| !one.revents().is_empty()).collect())
}

impl Arrival {
    /// The next one that may try, if the system has one.
    fn accept(listener: &impl AsFd, host: &impl Host) -> Result<Option<Arrival>, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let accept = || {
            let accepted = rustix::net::accept_with(listener, flags);
            accepted.map_err(io::Error::from)
        };
        let socket = Unshared::open(accept);
        let socket =
            socket.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::NFILE))?;
        let socket = socket.map(TcpStream::from);
        // None of a Unix socket.
        let peer = socket.peer_addr().ok();
        let socket = socket.map(OwnedFd::from);
        if !host.may_try(&socket) {
            return Ok(None);
        }
        let secrets = host.shake().secrets.load_full();
        let way = match &secrets.secured {
            Some(secured) if peer.is_some() => {
                let Ok(talk) = secured.from(socket.map(TcpStream::from)) else {
                    return Ok(None);
                };
                Way::Tls(Box::new(talk))
            }
            _ => Way::Plain(socket),
        };
        Ok(Some(Arrival {
            way,
            peer,
            until: Instant::now() + host.shake().timeout,
            heard: Vec::new(),
            challenge: None,
        }))
    }

    fn waits_for(&self) -> PollFlags {
        match &self.way {
            Way::Tls(talk) if talk.wants_write() => PollFlags::IN | PollFlags::OUT,
            _ => PollFlags::IN,
        }
    }

    /// Hears what has come, and answers it.
    fn hear(&mut self, host: &impl Host) -> Heard {
        let heard = self.try_hear(host);
        heard.unwrap_or_else(|failure| Heard::Wrong(failure.into_text(), Vec::new()))
    }

    fn try_hear(&mut self, host: &impl Host) -> Result<Heard, Failure> {
        if !self.fill(size_of::<Hello>())? {
            return Ok(Heard::Little);
        }
        let (hello, proof) = self.heard.split_at(size_of::<Hello>());
        let hello = Hello::read_from_bytes(hello).map_err(lost)?;
        let Some(challenge) = self.challenge else {
            let (challenge, greeting) = Arrival::answer(&hello, host)?;
            if greeting != Greeting::GoOn {
                let last = challenge.as_bytes().to_vec();
                return Ok(Heard::Wrong(format!("{greeting:?}"), last));
            }
            self.say(challenge.as_bytes())?;
            self.challenge = Some(challenge);
            return self.try_hear(host);
        };
        if proof.len() < MAC {
            if !self.fill(size_of::<Hello>() + MAC)? {
                return Ok(Heard::Little);
            }
            return self.try_hear(host);
        }
        let theirs = <[u8; MAC]>::read_from_bytes(proof).map_err(lost)?;
        let secrets = host.shake().secrets.load_full();
        for key in secrets.keys() {
            let proof = Proof {
                key,
                hello: &hello,
                challenge: &challenge,
            };
            if proof.proves(Turn::Initiator, &[], theirs) {
                // Of the same token: an initiator knows no other.
                return Ok(Heard::Proof(hello, proof.mac(Turn::Target, &theirs)));
            }
        }
        // It need not try again, as one does whose connection ends.
        let last = vec![0; MAC];
        Ok(Heard::Wrong("it uses a different token".to_owned(), last))
    }

    /// The answer to a hello.
    fn answer(hello: &Hello, host: &impl Host) -> Result<(Challenge, Greeting), Failure> {
        let (greeting, credit) = host.greeting();
        let greeting = match (greeting, hello.greet().map_err(lost)?) {
            (Greeting::GoOn, told) => told,
            (other, _) => other,
        };
        let nonce = random().map_err(lost)?;
        let challenge = Challenge::new(greeting, credit, host.shake().engine, nonce);
        Ok((challenge, greeting))
    }

    /// Receives until there are so many bytes; false where more are to come.
    fn fill(&mut self, len: usize) -> Result<bool, Failure> {
        while self.heard.len() < len {
            let missing = len - self.heard.len();
            match &mut self.way {
                Way::Plain(socket) => {
                    let mut bytes = [0; size_of::<Hello>() + MAC];
                    let room = &mut bytes[..missing];
                    match rustix::net::recv(&*socket, &mut *room, RecvFlags::DONTWAIT) {
                        Ok((_, 0)) => return Err(lost("it closed the connection")),
                        Ok((_, got)) => self.heard.extend_from_slice(&bytes[..got]),
                        Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
                        Err(error) => return Err(lost(error)),
                    }
                }
                Way::Tls(talk) => {
                    let got = talk.take(missing)?;
                    if got.is_empty() {
                        return Ok(false);
                    }
                    self.heard.extend(got);
                }
            }
        }
        Ok(true)
    }

    /// Says a few bytes, which the system takes as nothing was said before.
    fn say(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        match &mut self.way {
            Way::Plain(socket) => {
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                match rustix::net::send(&*socket, bytes, flags).map_err(lost)? {
                    sent if sent == bytes.len() => Ok(()),
                    _ => Err(lost("it does not read")),
                }
            }
            Way::Tls(talk) => talk.say(bytes),
        }
    }
}

fn lost(error: impl ToString) -> Failure {
    Failure::Lost(error.to_string())
}
