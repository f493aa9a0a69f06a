//! The target's side: who may connect, what each initiator has opened, and its connections.

mod frames;
mod served;
mod session;

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_host::fork::Unshared;
use kvdepot_host::{EachMinute, limits};
use kvdepot_media::Buffer;
use parking_lot::Mutex;

use crate::arrivals::{self, Arrived, Host};
use crate::error::Error;
use crate::grant::{Grant, Names, Rights};
use crate::line::Line;
use crate::peer::Shake;
use crate::rdma::Fabric;
use crate::socket;
use crate::tls::Failure;
use crate::wire::{Greeting, Hello};
use served::Served;
use session::Session;

/// How long what an initiator has opened outlives its last connection.
const SESSION_KEPT: Duration = Duration::from_secs(60);

/// Connections take no more than this part of the descriptors that the process may have.
const DESCRIPTORS_PART: usize = 4;

/// Descriptors of a connection: with TLS also both ends of a pair of sockets.
const DESCRIPTORS: usize = 1;
const DESCRIPTORS_TLS: usize = 3;

/// Handler for the calls of peers.
///
/// # Examples
/// ```
/// use std::sync::Arc;
///
/// use kvdepot_transfer::{Answers, Config, Engine};
///
/// struct Echo;
///
/// impl Answers for Echo {
///     fn answer(&self, _initiator: [u8; 16], call: &[u8]) -> Option<Vec<u8>> {
///         Some(call.to_vec())
///     }
/// }
///
/// let target = Engine::answering(Config::default(), Some(Arc::new(Echo)))?;
/// let engine = Engine::start(Config { listen: None, ..Config::default() })?;
/// let address = target.address().expect("the default configuration listens");
/// assert_eq!(engine.call(address, b"hello".to_vec())?, b"hello");
/// # Ok::<_, kvdepot_transfer::Error>(())
/// ```
pub trait Answers: Send + Sync {
    /// Returns the response to a call, or `None` to reject it.
    ///
    /// `initiator` is a random number that the calling engine chose at its start. Calls over one
    /// connection arrive one after the other.
    fn answer(&self, initiator: [u8; 16], call: &[u8]) -> Option<Vec<u8>>;

    /// Handles the end of an initiator: all of its connections are closed, and none of its
    /// transfers is in progress.
    fn left(&self, _initiator: [u8; 16]) {}
}

/// What a server is told.
pub(crate) struct Terms {
    pub(crate) shake: Shake,
    /// Requests that may be unanswered on a connection.
    pub(crate) credit: u32,
    pub(crate) connections_max: usize,
    pub(crate) answers: Option<Arc<dyn Answers>>,
    /// Devices of this end.
    pub(crate) fabric: Option<Arc<Fabric>>,
}

/// What has been refused, or has come to nothing.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) greetings: AtomicU64,
    pub(crate) grants: AtomicU64,
    pub(crate) frames: AtomicU64,
}

/// Connections that read a withdrawn grant may go on for this part of what a call may take. An
/// initiator that has all bytes gives the grant back by another connection, which may be heard
/// before the thread that has sent them runs again: to end its connection would lose what comes
/// next on it. What is written is over before that is said.
const GRACE_PART: u32 = 4;

/// What all threads of a server share.
pub(crate) struct House {
    pub(crate) terms: Terms,
    pub(crate) names: Arc<Names>,
    pub(crate) counts: Counts,
    sessions: Mutex<HashMap<[u8; 16], Arc<Session>>>,
    /// Numbers of grants, of all initiators: one that comes back after its session was forgotten
    /// may have old ones, which shall be nothing then, and not something else.
    numbers: AtomicU32,
    served: Mutex<Vec<Arc<Served>>>,
    connections: AtomicUsize,
    is_closing: AtomicBool,
    /// Lines of the log about connections that are refused, about those that end by a malformed
    /// frame, and about devices that are not joined.
    refusals: EachMinute,
    malformed: EachMinute,
    unjoined: EachMinute,
}

impl House {
    /// The session of an initiator.
    fn session(&self, engine: [u8; 16]) -> Arc<Session> {
        let mut sessions = self.sessions.lock();
        let now = Instant::now();
        sessions.retain(|_, session| !session.is_left(now, SESSION_KEPT));
        let new = || Arc::new(Session::new(engine));
        let session = Arc::clone(sessions.entry(engine).or_insert_with(new));
        // Under the lock: a connection that is about to be in it would be in none if it were
        // forgotten before.
        session.expect();
        session
    }

    /// A connection of a session has ended.
    fn leave(&self, session: &Session, lane: u32, served: &Arc<Served>) {
        if session.leave(lane, served)
            && let Some(answers) = &self.terms.answers
        {
            // Who panics has nothing to say, and the connection ends all the same.
            let left = AssertUnwindSafe(|| answers.left(session.engine));
            drop(catch_unwind(left));
        }
    }

    /// Ends what uses a grant: devices and connections that write at once, those that read after a
    /// moment.
    fn end_users_of(&self, grant: &Arc<Grant>) {
        for session in self.sessions.lock().values() {
            session.unexpose(grant);
        }
        self.end_connections(grant, true);
        if !grant.is_unused_within(self.terms.shake.timeout / GRACE_PART) {
            self.end_connections(grant, false);
        }
    }

    fn end_connections(&self, grant: &Arc<Grant>, that_write: bool) {
        for served in self.served.lock().iter() {
            if served.uses(grant, that_write) {
                served.kill();
            }
        }
    }

    /// Most connections: what is configured, and what the system has descriptors for.
    fn connections_max(&self) -> usize {
        let each = match self.terms.shake.secrets.load().secured.is_some() {
            true => DESCRIPTORS_TLS,
            false => DESCRIPTORS,
        };
        let most = limits::descriptors() / DESCRIPTORS_PART / each;
        self.terms.connections_max.min(most.max(1))
    }

    /// Serves one that has proved itself, until it ends.
    fn serve(&self, served: &Arc<Served>, hello: &Hello, welcome: &[u8]) {
        let session = self.session(hello.engine);
        let lane = hello.lane.get();
        session.enter(lane, served);
        match self.welcome(served, welcome) {
            Ok(()) => frames::serve(self, &session, served),
            Err(error) => {
                let why = served
                    .line
                    .failure()
                    .map_or_else(|| error.to_string(), Failure::into_text);
                self.refused(Some(served.line.peer()), &why);
            }
        }
        served.end();
        self.leave(&session, lane, served);
        served.kill();
        self.gone(served);
    }

    fn welcome(&self, served: &Served, welcome: &[u8]) -> io::Result<()> {
        let line = &served.line;
        line.set_write_timeout(Some(self.terms.shake.timeout))?;
        socket::send(line.as_fd(), welcome)?;
        line.set_write_timeout(None)
    }

    fn gone(&self, served: &Arc<Served>) {
        self.served.lock().retain(|one| !Arc::ptr_eq(one, served));
        self.connections.fetch_sub(1, Ordering::AcqRel);
    }

    /// A connection that has proved itself gets a thread, where there is room for it.
    fn admit(self: &Arc<Self>, arrived: Arrived, peer: SocketAddr) -> io::Result<()> {
        let Arrived { way, hello, .. } = arrived;
        if self.connections.fetch_add(1, Ordering::AcqRel) >= self.connections_max() {
            self.connections.fetch_sub(1, Ordering::AcqRel);
            return Err(io::Error::other("too many connections"));
        }
        let secrets = self.terms.shake.secrets.load_full();
        let line = Line::from(way, peer, secrets.secured.as_ref());
        let line = line.inspect_err(|_| {
            self.connections.fetch_sub(1, Ordering::AcqRel);
        })?;
        let served = Arc::new(Served::new(line));
        self.served.lock().push(Arc::clone(&served));
        let (its, theirs) = (Arc::clone(&served), Arc::clone(self));
        let serve = move || theirs.serve(&its, &hello, &arrived.welcome);
        let thread = kvdepot_host::cpu::spawn("kvdepot-serve", serve);
        thread.map(drop).inspect_err(|_| self.gone(&served))
    }
}

impl Host for House {
    fn shake(&self) -> &Shake {
        &self.terms.shake
    }

    fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Acquire)
    }

    fn may_try(&self, _socket: &OwnedFd) -> bool {
        true
    }

    fn greeting(&self) -> (Greeting, u32) {
        let is_full = self.connections.load(Ordering::Acquire) >= self.connections_max();
        let greeting = match (self.is_closing(), is_full) {
            (true, _) => Greeting::Closing,
            (_, true) => Greeting::TooMany,
            _ => Greeting::GoOn,
        };
        (greeting, self.terms.credit)
    }

    fn enter(self: &Arc<Self>, arrived: Arrived) {
        let Some(peer) = arrived.peer else { return };
        if let Err(error) = self.admit(arrived, peer) {
            self.refused(Some(peer), &error.to_string());
        }
    }

    fn refused(&self, peer: Option<SocketAddr>, why: &str) {
        self.counts.greetings.fetch_add(1, Ordering::Relaxed);
        if let Some(unsaid) = self.refusals.may_say() {
            let peer = peer.map(tracing::field::display);
            tracing::warn!(
                peer,
                why,
                unsaid,
                "handshake with another host failed; connection rejected"
            );
        }
    }
}

/// A listening engine.
pub(crate) struct Server {
    house: Arc<House>,
    address: SocketAddr,
    listener: Arc<Unshared<TcpListener>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Server {
    /// Listens.
    pub(crate) fn start(
        address: SocketAddr,
        names: Arc<Names>,
        terms: Terms,
    ) -> Result<Server, Error> {
        let listener = kvdepot_host::socket::listen_tcp(address);
        let listener = listener.map_err(Error::io(format!("listen on {address}")))?;
        let address = listener.local_addr().map_err(Error::io("listen"))?;
        let house = Arc::new(House {
            terms,
            names,
            counts: Counts::default(),
            sessions: Mutex::default(),
            numbers: AtomicU32::new(1),
            served: Mutex::default(),
            connections: AtomicUsize::new(0),
            is_closing: AtomicBool::new(false),
            refusals: EachMinute::default(),
            malformed: EachMinute::default(),
            unjoined: EachMinute::default(),
        });
        let listener = Arc::new(listener);
        let (its, theirs) = (Arc::clone(&listener), Arc::clone(&house));
        let accept = move || arrivals::run(&its, &theirs);
        let thread = kvdepot_host::cpu::spawn("kvdepot-listen", accept);
        let thread = Mutex::new(Some(thread.map_err(Error::io("start a thread"))?));
        Ok(Server {
            house,
            address,
            listener,
            thread,
        })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn counts(&self) -> &Counts {
        &self.house.counts
    }

    pub(crate) fn connections(&self) -> usize {
        self.house.connections.load(Ordering::Acquire)
    }

    /// Ends what uses a grant.
    pub(crate) fn end_users_of(&self, grant: &Arc<Grant>) {
        self.house.end_users_of(grant);
    }

    /// Grants memory to one initiator, under a number that it is told, until what is returned is
    /// dropped. `None` where it has no session, or too much.
    pub(crate) fn lend(
        &self,
        initiator: [u8; 16],
        buffers: &[Buffer],
        rights: Rights,
    ) -> Result<Option<Lent>, Error> {
        let session = self.house.sessions.lock().get(&initiator).cloned();
        let Some(session) = session else {
            return Ok(None);
        };
        let grant = Grant::checked(buffers, rights, None)?;
        let number = session.open(Arc::clone(&grant), &self.house.numbers);
        Ok(number.map(|number| Lent {
            house: Arc::downgrade(&self.house),
            session,
            grant,
            number,
        }))
    }

    /// Ends all connections. When this returns no thread is left.
    pub(crate) fn close(&self) {
        self.house.is_closing.store(true, Ordering::Release);
        // Whoever accepts returns from it.
        let _listens = rustix::net::shutdown(&**self.listener, rustix::net::Shutdown::Both);
        let thread = self.thread.lock().take();
        drop(thread.map(JoinHandle::join));
        loop {
            let Some(served) = self.house.served.lock().first().cloned() else {
                break;
            };
            served.kill();
            served.wait();
            self.house
                .served
                .lock()
                .retain(|one| !Arc::ptr_eq(one, &served));
        }
        while self.house.connections.load(Ordering::Acquire) > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Memory that one initiator may use. Dropping it withdraws it: when that returns nothing of that
/// initiator touches it.
pub(crate) struct Lent {
    house: Weak<House>,
    session: Arc<Session>,
    grant: Arc<Grant>,
    number: u32,
}

impl Lent {
    /// What the initiator has to know.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.session.close(self.number);
        self.grant.withdraw(|| {
            // Without a house there is no connection that could use it.
            if let Some(house) = self.house.upgrade() {
                house.end_users_of(&self.grant);
            }
        });
    }
}
