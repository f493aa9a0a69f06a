//! Who connects, until it has said what it wants: one thread for all of them, which waits for
//! nobody. A peer that says nothing costs a descriptor, for a few seconds, and nobody else's time.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvdepot_arena::{Error, clock};
use kvdepot_host::peer::{self, Credentials};

use crate::frame::hello::{self, Role};

/// How long a process that connects may take to say what it wants.
const PATIENCE: Duration = Duration::from_secs(5);

/// Most that have not said it yet. Whoever means well says it at once, so of more the one that
/// has waited longest goes.
const SILENT_MAX: usize = 64;

/// Pause before accepting is tried again, where the system refuses it: out of descriptors, say.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// One that has connected.
struct Arrival {
    socket: UnixStream,
    from: Credentials,
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
/// does not let in.
pub(crate) fn run(
    listener: &UnixListener,
    stop: &AtomicBool,
    may: impl Fn(&Credentials) -> Result<(), Error>,
    mut serve: impl FnMut(UnixStream, Credentials, Role),
) {
    let mut waiting: VecDeque<Arrival> = VecDeque::new();
    let mut failing = None;
    if let Err(error) = listener.set_nonblocking(true) {
        tracing::error!(%error, "the socket cannot be listened at");
        return;
    }
    while !stop.load(Ordering::SeqCst) {
        let now = clock::now();
        let left = waiting
            .front()
            .map(|first| first.until.saturating_duration_since(now));
        let fds = std::iter::once(listener.as_fd());
        let fds = fds.chain(waiting.iter().map(|arrival| arrival.socket.as_fd()));
        let ready = match peer::wait_any(&fds.collect::<Vec<_>>(), left) {
            Ok(ready) => ready,
            Err(error) => {
                tracing::error!(%error, "the socket cannot be waited for");
                std::thread::sleep(ACCEPT_PAUSE);
                continue;
            }
        };
        if stop.load(Ordering::SeqCst) {
            return;
        }
        let now = clock::now();
        for (mut arrival, spoke) in std::mem::take(&mut waiting).into_iter().zip(&ready[1..]) {
            match if *spoke {
                arrival.hear()
            } else {
                Heard::Little
            } {
                Heard::Role(role) => serve(arrival.socket, arrival.from, role),
                Heard::Little if now < arrival.until => waiting.push_back(arrival),
                Heard::Little => arrival.refuse(&silent()),
                Heard::Gone(error) => arrival.refuse(&error),
                Heard::Nothing => {
                    tracing::debug!(pid = arrival.from.pid, "a process looked in");
                }
            }
        }
        if !ready[0] {
            continue;
        }
        match listener.accept() {
            Ok((socket, _)) => {
                failing = None;
                match Arrival::new(socket, &may) {
                    Ok(arrival) => waiting.push_back(arrival),
                    Err(error) => tracing::warn!(%error, "a process could not attach"),
                }
                if waiting.len() > SILENT_MAX
                    && let Some(first) = waiting.pop_front()
                {
                    first.refuse(&silent());
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => {
                // Whoever wants to attach still stands in line: once is enough.
                if failing.replace(error.kind()) != Some(error.kind()) {
                    tracing::warn!(%error, "no process can attach");
                }
                std::thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

fn silent() -> Error {
    Error::Peer {
        socket: "(peer)".into(),
        reason: "it did not say in time what it wants".into(),
    }
}

impl Arrival {
    fn new(
        socket: UnixStream,
        may: impl Fn(&Credentials) -> Result<(), Error>,
    ) -> Result<Arrival, Error> {
        // Nothing that is written before it has attached fills the memory of a socket.
        socket.set_nonblocking(true).map_err(|source| Error::Io {
            path: "socket".into(),
            source,
        })?;
        let from = peer::credentials(&socket)?;
        if let Err(error) = may(&from) {
            let _told = hello::send_refusal(&socket, &error.to_string());
            return Err(error);
        }
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
        match self.socket.read(&mut bytes[..room]) {
            // Somebody has looked whether anybody listens.
            Ok(0) if self.request.is_empty() => return Heard::Nothing,
            Ok(0) => return Heard::Gone(gone("it ended before its request did")),
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

    fn refuse(&self, error: &Error) {
        let _told = hello::send_refusal(&self.socket, &error.to_string());
        tracing::warn!(pid = self.from.pid, %error, "a process could not attach");
    }
}

fn gone(reason: &str) -> Error {
    Error::Peer {
        socket: "(peer)".into(),
        reason: reason.to_owned(),
    }
}
