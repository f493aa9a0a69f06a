//! Limits of connections, and the time that a connection has.

use std::time::Duration;

use kvdepot_host::limits;
use parking_lot::Mutex;
use tokio::time::Instant;

/// Most connections at a time: a scraper has one.
const CONNECTIONS_MAX: usize = 64;

/// They take no more than this part of the descriptors that the process may have.
const DESCRIPTORS_PART: usize = 8;

/// Limits of the server.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// Most connections at a time.
    pub(super) connections: usize,
    /// Time from the first byte of a request's head, or from the connection, to the last byte.
    pub(super) head: Duration,
    /// Time from a response to the next request. The peer reads the response within that time, too.
    pub(super) idle: Duration,
    /// Time that the responses in progress have when the server ends.
    pub(super) end: Duration,
}

impl Limits {
    /// Returns the limits of a server in this process.
    pub(super) fn here() -> Limits {
        let part = (limits::descriptors() / DESCRIPTORS_PART).max(1);
        Limits {
            connections: CONNECTIONS_MAX.min(part),
            head: Duration::from_secs(5),
            idle: Duration::from_secs(30),
            end: Duration::from_secs(1),
        }
    }
}

/// Progress of a connection, and the time at which the server ends the connection.
pub(super) struct Progress {
    limits: Limits,
    state: Mutex<State>,
}

struct State {
    /// True from a response to the first byte of the next request.
    is_idle: bool,
    /// Time of the last change between the two.
    since: Instant,
}

impl Progress {
    /// Begins when the connection has been accepted.
    pub(super) fn new(limits: Limits) -> Progress {
        let state = State {
            is_idle: false,
            since: Instant::now(),
        };
        Progress {
            limits,
            state: Mutex::new(state),
        }
    }

    /// Notes bytes of the peer.
    pub(super) fn received(&self) {
        let mut state = self.state.lock();
        if state.is_idle {
            state.is_idle = false;
            state.since = Instant::now();
        }
    }

    /// Notes a response, which is to be sent.
    pub(super) fn answered(&self) {
        let mut state = self.state.lock();
        state.is_idle = true;
        state.since = Instant::now();
    }

    /// Returns the time of the last change.
    pub(super) fn since(&self) -> Instant {
        self.state.lock().since
    }

    /// Returns the time at which the server ends the connection, unless there is progress.
    pub(super) fn deadline(&self) -> Instant {
        let state = self.state.lock();
        let limit = match state.is_idle {
            true => self.limits.idle,
            false => self.limits.head,
        };
        state.since + limit
    }
}
