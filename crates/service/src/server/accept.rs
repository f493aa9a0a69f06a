//! Who connects, until it has said what it wants: one thread for all of them, which waits for
//! nobody. A peer that says nothing costs a descriptor, for a few seconds, and nobody else's time.

use std::collections::{HashMap, VecDeque};
use std::io::{ErrorKind, Read};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvdepot_arena::{Error, clock};
use kvdepot_host::fork::Unshared;
use kvdepot_host::peer::{self, Credentials};
use kvdepot_host::{EachMinute, limits};

use crate::frame::hello::{self, Role};

/// How long a process that connects may take to say what it wants.
const PATIENCE: Duration = Duration::from_secs(5);

/// Most that have not said it yet. Whoever means well says it at once, so of more the one that
/// has waited longest goes, of the process that has most.
const SILENT_MAX: usize = 64;

/// They take no more than this part of the descriptors that the process may have.
const DESCRIPTORS_PART: usize = 8;

/// Pause before accepting is tried again, where the system refuses it: out of descriptors, say.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// One that has connected.
struct Arrival {
    socket: Unshared<UnixStream>,
    /// Or why it may not. It hears of that when it has said all: what is unread when a connection
    /// ends takes the answer with it.
    from: Result<Credentials, Error>,
    until: Instant,
    request: Vec<u8>,
}

/// What became of one.
enum Heard {
    /// All of its request.
    Role(Role),
    /// Not all of it yet.
    Little,
    /// It is gone, or has said what is no request.
    Gone(Error),
    /// It is gone, and has said nothing.
    Nothing,
}

/// Accepts until `stop`, and hands on who has said what it wants, and may. `may` refuses whom it
/// does not let in, and `serve` whom it cannot. `woken` ends a wait when it can be read.
pub(crate) fn run(
    listener: &UnixListener,
    (stop, woken): (&AtomicBool, &UnixStream),
    may: impl Fn(&Credentials) -> Result<(), Error>,
    mut serve: impl FnMut(&UnixStream, Credentials, Role) -> Result<(), Error>,
) {
    let mut waiting: VecDeque<Arrival> = VecDeque::new();
    let (mut failing, refusals) = (None, EachMinute::default());
    if let Err(error) = listener.set_nonblocking(true) {
        tracing::error!(%error, "cannot listen on the socket; other processes cannot attach");
        return;
    }
    while !stop.load(Ordering::SeqCst) {
        let now = clock::now();
        let left = waiting
            .front()
            .map(|first| first.until.saturating_duration_since(now));
        let fds = [listener.as_fd(), woken.as_fd()].into_iter();
        let fds = fds.chain(waiting.iter().map(|arrival| arrival.socket.as_fd()));
        let ready = match peer::wait_any(&fds.collect::<Vec<_>>(), left) {
            Ok(ready) => ready,
            Err(error) => {
                tracing::error!(%error,
                    "cannot poll the socket; other processes cannot attach until a retry succeeds");
                std::thread::sleep(ACCEPT_PAUSE);
                continue;
            }
        };
        if ready[1] || stop.load(Ordering::SeqCst) {
            return;
        }
        let now = clock::now();
        for (mut arrival, spoke) in std::mem::take(&mut waiting).into_iter().zip(&ready[2..]) {
            match if *spoke {
                arrival.hear()
            } else {
                Heard::Little
            } {
                Heard::Role(role) => match arrival.from {
                    Ok(from) => {
                        if let Err(error) = serve(&arrival.socket, from, role) {
                            arrival.refuse(&error, &refusals);
                        }
                    }
                    Err(_) => arrival.refuse(&silent(), &refusals),
                },
                Heard::Little if now < arrival.until => waiting.push_back(arrival),
                Heard::Little => arrival.refuse(&silent(), &refusals),
                Heard::Gone(error) => arrival.refuse(&error, &refusals),
                Heard::Nothing => {
                    tracing::debug!(
                        pid = arrival.pid(),
                        "a process connected and disconnected without a request"
                    );
                }
            }
        }
        if !ready[0] {
            continue;
        }
        match Unshared::open(|| listener.accept().map(|(socket, _)| socket)) {
            Ok(socket) => {
                failing = None;
                match Arrival::new(socket, &may) {
                    Ok(arrival) => waiting.push_back(arrival),
                    Err(error) => say(&refusals, &error, None),
                }
                if waiting.len() > silent_max()
                    && let Some(one) = waiting.remove(to_drop(&waiting))
                {
                    one.refuse(&silent(), &refusals);
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => {
                // Whoever wants to attach still stands in line: once is enough.
                if failing.replace(error.kind()) != Some(error.kind()) {
                    tracing::warn!(%error,
                        "cannot accept connections; other processes wait until a retry succeeds");
                }
                std::thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

fn silent_max() -> usize {
    SILENT_MAX.min((limits::descriptors() / DESCRIPTORS_PART).max(1))
}

/// The oldest of the process that has most.
fn to_drop(waiting: &VecDeque<Arrival>) -> usize {
    let mut counts = HashMap::new();
    for arrival in waiting {
        *counts.entry(arrival.pid()).or_insert(0) += 1;
    }
    let count = |arrival: &Arrival| counts.get(&arrival.pid()).copied();
    let highest = waiting.iter().filter_map(count).max();
    let is_its = |arrival: &Arrival| count(arrival) == highest;
    waiting.iter().position(is_its).unwrap_or(0)
}

/// One line a minute, whatever the number of those that come.
fn say(refusals: &EachMinute, error: &Error, pid: Option<u32>) {
    // Clients look for the next owner several times a second, as long as this closes.
    if let Error::Closed(_) = error {
        tracing::debug!(pid, "rejected a connection: the depot is closing");
    } else if let Some(unsaid) = refusals.may_say() {
        tracing::warn!(pid, %error, unsaid,
            "rejected a connection; the connecting process cannot use the depot");
    }
}

fn silent() -> Error {
    Error::Peer {
        socket: "(peer)".into(),
        reason: "the process sent no complete request in time".into(),
    }
}

impl Arrival {
    fn new(
        socket: Unshared<UnixStream>,
        may: impl Fn(&Credentials) -> Result<(), Error>,
    ) -> Result<Arrival, Error> {
        // Nothing that is written before it has attached fills the memory of a socket.
        socket.set_nonblocking(true).map_err(|source| Error::Io {
            path: "cannot set up the socket".into(),
            source,
        })?;
        let from = peer::credentials(&*socket).map_err(Error::from);
        let from = from.and_then(|from| may(&from).map(|()| from));
        Ok(Arrival {
            socket,
            from,
            until: clock::now() + PATIENCE,
            request: Vec::with_capacity(hello::REQUEST),
        })
    }

    /// Reads what has come, and no more than the request: frames may follow.
    fn hear(&mut self) -> Heard {
        let mut bytes = [0; hello::REQUEST];
        let room = hello::REQUEST - self.request.len();
        match (&*self.socket).read(&mut bytes[..room]) {
            // Somebody has looked whether anybody listens.
            Ok(0) if self.request.is_empty() => return Heard::Nothing,
            Ok(0) => {
                return Heard::Gone(gone(
                    "the process disconnected before its request was complete",
                ));
            }
            Ok(count) => self.request.extend_from_slice(&bytes[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Heard::Little,
            Err(error) if error.kind() == ErrorKind::Interrupted => return Heard::Little,
            Err(error) => return Heard::Gone(gone(&error.to_string())),
        }
        match hello::read_request(&self.request) {
            Ok(Some(role)) => Heard::Role(role),
            Ok(None) => Heard::Little,
            Err(error) => Heard::Gone(error),
        }
    }

    /// Says why it may not attach, or else what is wrong with what it has said.
    fn refuse(&self, error: &Error, refusals: &EachMinute) {
        let error = self.from.as_ref().err().unwrap_or(error);
        let _told = hello::send_refusal(&self.socket, &error.to_string());
        say(refusals, error, self.pid());
    }

    fn pid(&self) -> Option<u32> {
        self.from.as_ref().ok().map(|from| from.pid)
    }
}

fn gone(reason: &str) -> Error {
    Error::Peer {
        socket: "(peer)".into(),
        reason: reason.to_owned(),
    }
}
