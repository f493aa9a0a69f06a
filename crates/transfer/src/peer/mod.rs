//! A target as its initiator sees it: lanes to one address.

mod answers;
mod conn;
mod dial;
mod known;
mod lane;
mod queue;

pub(crate) use dial::{Dialer, Secrets, Shake, random};
pub(crate) use known::Peers;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use kvdepot_host::fork::Origin;
use parking_lot::Mutex;

use crate::error::{Error, Fault};
use crate::flight::{Flight, Op};
use crate::memory::Memory;
use crate::rdma::{Asks, Fabric, Link};
use crate::task::Progress;
use crate::window::Granted;
use crate::wire::{Bytes, Row, Verb};
use lane::Lane;
use queue::{Ask, Item, State, Wants};

/// How long connections are kept that no remote is left of.
const UNUSED_KEPT: Duration = Duration::from_secs(5);

/// What is under a checksum on the way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Summed {
    pub(crate) writes: bool,
    pub(crate) reads: bool,
}

impl Summed {
    /// Whether slices that go this way are.
    pub(crate) fn is(self, op: Op) -> bool {
        match op {
            Op::Read => self.reads,
            Op::Write => self.writes,
        }
    }
}

/// What all lanes to a target share.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) dialer: Dialer,
    /// The process that has the threads.
    origin: Origin,
    /// Requests of a lane that may be unanswered.
    pub(crate) window: usize,
    pub(crate) retries: u32,
    /// Whether what is written is under a checksum, and what is read.
    pub(crate) summed: Summed,
    /// Lanes whose lost connection may still carry writes.
    fences: AtomicUsize,
    /// Those of them that do not get another connection.
    given_up: AtomicUsize,
    lanes: OnceLock<Vec<Weak<Lane>>>,
    /// The engine that was met last at the address, and its number; 0 before there was one.
    target: Mutex<([u8; 16], u32)>,
    /// Why it could not be connected to, the last time.
    failure: Mutex<Option<String>>,
    sent: AtomicU64,
}

impl Core {
    pub(crate) fn new(
        dialer: Dialer,
        origin: Origin,
        (window, retries): (usize, u32),
        summed: Summed,
    ) -> Core {
        Core {
            dialer,
            origin,
            window,
            retries,
            summed,
            fences: AtomicUsize::new(0),
            given_up: AtomicUsize::new(0),
            lanes: OnceLock::new(),
            target: Mutex::default(),
            failure: Mutex::default(),
            sent: AtomicU64::new(0),
        }
    }

    fn fences(&self) -> usize {
        self.fences.load(Ordering::Acquire)
    }

    fn fence(&self) {
        self.fences.fetch_add(1, Ordering::AcqRel);
    }

    fn lift(&self) {
        self.fences.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether writes wait for a lane that cannot connect: they fail instead.
    fn refuses_writes(&self) -> bool {
        self.given_up.load(Ordering::Acquire) > 0
    }

    /// The number of an engine that is there now: another one than before gives its grants' numbers
    /// anew.
    fn target(&self, engine: [u8; 16]) -> u32 {
        // Of all addresses, as one may be forgotten and met again.
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let mut target = self.target.lock();
        if target.1 == 0 || target.0 != engine {
            *target = (engine, NEXT.fetch_add(1, Ordering::Relaxed));
        }
        target.1
    }

    fn count_sent(&self) {
        self.sent.fetch_add(1, Ordering::Relaxed);
    }

    /// Has all lanes look again.
    fn wake_all(&self) {
        self.tell_all(|_| ());
    }

    /// The target is not there.
    fn note_failure(&self, error: &Error) {
        *self.failure.lock() = match error {
            Error::Refused { reason, .. } | Error::Unreachable { reason, .. } => {
                Some(reason.clone())
            }
            other => Some(other.to_string()),
        };
    }

    /// The target is there: all lanes look again, also those that would not have for a while.
    fn note_there(&self) {
        *self.failure.lock() = None;
        self.tell_all(|state| state.down = None);
    }

    fn tell_all(&self, tell: impl Fn(&mut State)) {
        for lane in self.lanes.get().into_iter().flatten() {
            if let Some(lane) = lane.upgrade() {
                // With the lock, so that nobody who has just looked misses it.
                tell(&mut lane.state.lock());
                lane.wake.notify_one();
            }
        }
    }
}

/// A target.
pub(crate) struct Peer {
    core: Arc<Core>,
    lanes: Vec<Arc<Lane>>,
    turn: AtomicUsize,
    /// Devices that both ends have, once somebody has looked.
    link: Mutex<Option<Option<Arc<Link>>>>,
    /// Frames that were sent when it was last found busy, or to have sent some, and when that was.
    quiet: Mutex<(u64, Instant)>,
    /// It was asked calls: it may hold something for this engine as long as it is connected.
    was_called: AtomicBool,
}

/// A target that may be gone when it is asked.
struct Weakly(Weak<Peer>);

impl Asks for Weakly {
    fn ask(&self, verb: Verb, body: Vec<u8>, most: Bytes, timeout: Duration) -> Option<Vec<u8>> {
        let peer = self.0.upgrade()?;
        let (_, answer) = peer.ask(verb, body, most, timeout).ok()?;
        Some(answer)
    }
}

impl Peer {
    /// With so many lanes from a number on, which connect when they have something to do.
    /// `fenced` are those, by their positions, that writes of an earlier [`Peer`] may still lie in.
    pub(crate) fn new(core: Core, (first, count): (u32, usize), fenced: &[usize]) -> Peer {
        let core = Arc::new(core);
        let lane = |number| Lane::new(number, Arc::clone(&core));
        let lanes: Vec<Arc<Lane>> = (first..).take(count).map(lane).collect();
        let _first = core.lanes.set(lanes.iter().map(Arc::downgrade).collect());
        let fenced = fenced.iter().filter_map(|number| lanes.get(*number));
        fenced.for_each(|lane| lane.fence());
        Peer {
            core,
            lanes,
            turn: AtomicUsize::new(0),
            link: Mutex::new(None),
            quiet: Mutex::new((0, Instant::now())),
            was_called: AtomicBool::new(false),
        }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.core.dialer.address
    }

    /// The engine that was met last at the address.
    pub(crate) fn engine(&self) -> Option<[u8; 16]> {
        let (engine, number) = *self.core.target.lock();
        (number > 0).then_some(engine)
    }

    pub(crate) fn shake(&self) -> &Shake {
        &self.core.dialer.shake
    }

    /// The engine whose peer it is.
    pub(crate) fn initiator(&self) -> [u8; 16] {
        self.core.dialer.shake.initiator
    }

    pub(crate) fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// A lane, another one each time.
    pub(crate) fn turn(&self) -> usize {
        self.turn.fetch_add(1, Ordering::Relaxed) % self.lanes.len()
    }

    /// Gives a lane a slice.
    pub(crate) fn submit(&self, lane: usize, flight: Flight) {
        self.lanes[lane % self.lanes.len()].push(Item::Flight(flight));
    }

    /// Carries a slice in this thread, where a lane is idle; otherwise it is given back.
    pub(crate) fn carry(&self, mut flight: Flight) -> Result<(), Flight> {
        for lane in &self.lanes {
            match lane.carry(flight) {
                Ok(()) => return Ok(()),
                Err(back) => flight = back,
            }
        }
        Err(flight)
    }

    /// The devices that both ends have, joined now or before; anew where they have failed.
    pub(crate) fn link(
        self: &Arc<Self>,
        fabric: &Arc<Fabric>,
        memory: &Arc<Memory>,
    ) -> Option<Arc<Link>> {
        let mut link = self.link.lock();
        match link.as_ref() {
            Some(Some(known)) if !known.is_up() => {}
            Some(known) => return known.clone(),
            None => {}
        }
        let asks = Arc::new(Weakly(Arc::downgrade(self)));
        let joined = Link::join(fabric, memory, asks, self.shake().timeout).map(Arc::new);
        *link = Some(joined.clone());
        joined
    }

    /// Asks something else, and waits for the answer as long as `timeout`.
    pub(crate) fn ask(
        &self,
        verb: Verb,
        body: Vec<u8>,
        most: Bytes,
        timeout: Duration,
    ) -> Result<(Granted, Vec<u8>), Error> {
        self.ask_of(verb, Row::default(), body, most, timeout)
    }

    /// As [`Peer::ask`], about what is in a row.
    pub(crate) fn ask_of(
        &self,
        verb: Verb,
        first: Row,
        body: Vec<u8>,
        most: Bytes,
        timeout: Duration,
    ) -> Result<(Granted, Vec<u8>), Error> {
        let (reply, answer) = channel();
        let wants = Wants::Caller(reply);
        let ask = Ask {
            until: Instant::now().checked_add(timeout),
            is_again: false,
            verb,
            first,
            body,
            most,
            wants,
        };
        self.lanes[self.turn()].push(Item::Ask(ask));
        let peer = || self.address().to_string();
        let lost = |reason: String| Error::Unreachable {
            peer: peer(),
            reason,
        };
        match answer.recv_timeout(timeout) {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(Fault::Unknown)) => {
                let reason = "nothing is published under this name".to_owned();
                Err(Error::Refused {
                    peer: peer(),
                    reason,
                })
            }
            Ok(Err(Fault::Failed)) => Err(Error::Refused {
                peer: peer(),
                reason: "the peer could not execute the call; see the log of the peer".to_owned(),
            }),
            Ok(Err(Fault::Closed)) => Err(Error::Closed),
            Ok(Err(_)) => Err(lost(match &*self.core.failure.lock() {
                Some(why) => format!("cannot be reached: {why}"),
                None => "cannot be reached".to_owned(),
            })),
            Err(_) => Err(lost(format!("no response within {timeout:?}"))),
        }
    }

    /// A grant's number is not used any more.
    pub(crate) fn let_go(&self, grant: Granted) {
        if !self.core.origin.is_here() {
            return;
        }
        let lane = &self.lanes[self.turn()];
        // One that has lost its connection has nothing to say: the target forgets by itself.
        if lane.state.lock().conn.is_some() {
            lane.push(Item::Ask(lane::close_of(grant)));
        }
    }

    /// Ends what is under way for a batch.
    pub(crate) fn cancel(&self, progress: &Arc<Progress>) {
        let is_of = |flight: &Flight| flight.is_of(progress);
        self.lanes.iter().for_each(|lane| lane.cancel(is_of));
    }

    /// Ends what has taken too long by now; whether anything is under way.
    pub(crate) fn expire(&self, now: Instant) -> bool {
        for lane in &self.lanes {
            lane.state.lock().forget_questions(now);
        }
        let is_late = |flight: &Flight| flight.is_late(now);
        self.lanes.iter().for_each(|lane| lane.cancel(is_late));
        self.lanes.iter().any(|lane| !lane.state.lock().is_idle())
    }

    /// Ends connections that the target has ended. Whether nothing is lost when the peer goes, once
    /// no remote of it is left: it has no connection, or has been of no use for a while.
    pub(crate) fn may_go(&self, now: Instant) -> bool {
        let (mut is_idle, mut is_connected) = (true, false);
        for lane in &self.lanes {
            lane.end_if_gone();
            let state = lane.state.lock();
            // Whoever closes it would wait for one that connects.
            is_idle &= state.is_idle() && !state.is_connecting();
            is_connected |= state.conn.is_some();
        }
        let sent = self.sent();
        let mut quiet = self.quiet.lock();
        if !is_idle || quiet.0 != sent {
            *quiet = (sent, now);
        }
        let is_unused = now.saturating_duration_since(quiet.1) >= UNUSED_KEPT
            && !self.was_called.load(Ordering::Acquire);
        is_idle && (!is_connected || is_unused)
    }

    /// It is asked a call.
    pub(crate) fn note_call(&self) {
        self.was_called.store(true, Ordering::Release);
    }

    /// How often devices were told of work requests, and of how many.
    pub(crate) fn posted(&self) -> (u64, u64) {
        let link = self.link.lock().clone().flatten();
        link.map_or((0, 0), |link| link.counts())
    }

    /// Frames sent so far.
    pub(crate) fn sent(&self) -> u64 {
        self.core.sent.load(Ordering::Relaxed)
    }

    /// The lanes that writes may still lie in, once it is closed.
    pub(crate) fn fenced(&self) -> Vec<usize> {
        let is_fenced = |number: &usize| self.lanes[*number].state.lock().is_fenced;
        (0..self.lanes.len()).filter(is_fenced).collect()
    }

    /// Ends all that is under way. When this returns no thread is left.
    pub(crate) fn close(&self) {
        let link = self.link.lock().replace(None);
        if let Some(link) = link.flatten() {
            link.close();
        }
        self.lanes.iter().for_each(|lane| lane.close());
        self.lanes.iter().for_each(|lane| lane.join());
    }
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peer")
            .field("address", &self.address())
            .finish_non_exhaustive()
    }
}
