//! A tier that may answer late, as the pipeline asks it: each question has a limit, and one that
//! does not answer is left alone for a while. A lookup's limit is of the whole, and what was found
//! by then counts; any other is of the silence between one sign of an answer and the next.
//!
//! *The breaker.* Where several answers in a row have not come, nothing is asked for some time: a
//! broken tier is a miss, at once. Then one question goes through; if it is answered the breaker
//! closes, and if not it stays open for twice as long, up to five seconds.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvdepot_arena::held::TURN;
use kvdepot_arena::{
    Cause, Full, Key, NamespaceId, Place, Refused, Reserved, TierStats, Token, Wanted, clock,
};
use kvdepot_media::{Checksum, is_simulated};
use parking_lot::{Mutex, RwLock};

use super::alarm::Alarm;
use super::contract::{NamespacePage, Page, Tier};
use super::door::DoorKey;
use super::file::Directory;
use super::late::{Pending, Reply, ask, ask_or};
use super::slots::{Permits, Slots};
use crate::chances::UNKNOWN;
use crate::ghosts::Ghosts;

/// Questions in a row without an answer that open the breaker.
const FAILURES: u32 = 3;

/// Time for which the breaker is open at first, and at most: a tier that answers again is of use
/// within seconds, however long it was silent. A trial in vain takes its own time besides.
const OPEN_FIRST: Duration = Duration::from_millis(500);
const OPEN_MOST: Duration = Duration::from_secs(5);

/// Steps of calls whose blocks are pinned or reserved at a time: for callers who end that when they
/// like, for gets and puts of clients, for promotions, and for write-back to the next tier. Calls
/// of this process find others beside these.
const LASTING: usize = 4;
const MOVED: usize = 5;
const PROMOTED: usize = 4;
const WRITTEN_BACK: usize = 2;

/// Blocks that were read through a door and are remembered, and their bytes: more than a tier of
/// this host holds, in a table of a few megabytes.
const READ_BLOCKS: u64 = 1 << 17;
const READ_BYTES: u64 = 1 << 40;

/// A tier that may answer late.
pub(crate) struct Apart {
    tier: Arc<dyn Tier>,
    /// That its placements bear.
    number: u32,
    /// Time limit of a lookup; for every other call, the limit between two reports of progress.
    lookup: Duration,
    patience: Duration,
    breaker: Arc<Breaker>,
    /// Slots for pins and reservations that callers have, who end them when they like.
    lasting: Arc<Slots>,
    /// Slots for what clients are told to move.
    moved: Arc<Slots>,
    /// Blocks that were refused for want of them.
    full: AtomicU64,
    /// Those pins: closing ends what is left.
    lent: Mutex<HashMap<Token, (Place, Option<Permits>)>>,
    /// Blocks that were read through the tier's door.
    read: OnceLock<Ghosts>,
    /// Nothing is pinned there any more, whoever ends a pin. Held while one is ended.
    closed: RwLock<bool>,
    alarm: Arc<Alarm>,
}

/// A tier's answer to a call.
pub(crate) enum Answer<T> {
    /// It is known in the call; `None` if the tier does not answer.
    Now(Option<T>),
    Later(Later<T>),
}

/// An answer that arrives later.
pub(crate) struct Later<T> {
    pending: Pending<T>,
    limit: Duration,
    /// `None` if it is no answer of the tier.
    breaker: Option<Arc<Breaker>>,
    alarm: Arc<Alarm>,
}

impl<T: Send + 'static> Answer<T> {
    /// Has `then` run with the answer: at once, or in the thread that brings it.
    pub(crate) fn then(self, then: impl FnOnce(Option<T>) + Send + 'static) {
        match self {
            Answer::Now(answer) => then(answer),
            Answer::Later(later) => later.then(then),
        }
    }

    /// Waits for it.
    pub(crate) fn wait(self) -> Option<T> {
        let later = match self {
            Answer::Now(answer) => return answer,
            Answer::Later(later) => later,
        };
        let unasked = later.pending.unasked();
        let answer = wait(later.pending, &later.alarm, later.limit);
        if let Some(breaker) = later.breaker {
            breaker.heard_late(answer.is_some(), &unasked);
        }
        answer
    }
}

/// Waits for an answer in this thread.
fn wait<T: Send + 'static>(pending: Pending<T>, alarm: &Alarm, limit: Duration) -> Option<T> {
    // In a simulation its schedule ends the question.
    if is_simulated() {
        return pending.wait(limit);
    }
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    pending.then(Some((alarm, limit)), move |answer| {
        let _sent = sender.send(answer);
    });
    receiver.recv().unwrap_or(None)
}

impl<T: Send + 'static> Later<T> {
    fn then(self, then: impl FnOnce(Option<T>) + Send + 'static) {
        let Later {
            pending,
            limit,
            breaker,
            alarm,
        } = self;
        let unasked = pending.unasked();
        pending.then(Some((&alarm, limit)), move |answer| {
            if let Some(breaker) = breaker {
                breaker.heard_late(answer.is_some(), &unasked);
            }
            then(answer);
        });
    }
}

impl Apart {
    pub(crate) fn new(
        (tier, number): (Arc<dyn Tier>, u32),
        (lookup, patience): (Duration, Duration),
        alarm: Arc<Alarm>,
    ) -> Apart {
        Apart {
            breaker: Arc::new(Breaker::new(tier.name())),
            lasting: Slots::new(tier.step_max().saturating_mul(LASTING), Some(&alarm)),
            moved: Slots::new(tier.step_max().saturating_mul(MOVED), Some(&alarm)),
            full: AtomicU64::new(0),
            tier,
            number,
            lookup,
            patience,
            lent: Mutex::default(),
            read: OnceLock::new(),
            closed: RwLock::new(false),
            alarm,
        }
    }

    pub(crate) fn tier(&self) -> &Arc<dyn Tier> {
        &self.tier
    }

    /// The directory by which other processes' lanes reach what it has, and its number; `None`
    /// where they do not.
    pub(crate) fn directory(&self) -> Option<(u32, Directory)> {
        Some((self.number, self.tier.ends().directory()?))
    }

    /// Returns the credentials by which other processes of this user read the tier's blocks on
    /// other hosts, and the tier's number.
    pub(crate) fn door(&self) -> Option<(u32, DoorKey)> {
        Some((self.number, self.tier.ends().door()?))
    }

    /// Returns true if a block that was read through the tier's door was read before, and is worth
    /// a promotion. Remembers the block if it was not.
    pub(crate) fn was_read(&self, place: &Place) -> bool {
        let read = self
            .read
            .get_or_init(|| Ghosts::new(READ_BLOCKS, READ_BYTES));
        let (id, key) = (place.identity.namespace, &place.identity.key);
        !read.offered(id, key, place.len, UNKNOWN, true)
    }

    /// Returns the tier's counters, and the number of calls without an answer.
    pub(crate) fn stats(&self) -> TierStats {
        let mut stats = self.tier.stats();
        stats.full += self.full.load(Ordering::Relaxed);
        stats.timeouts = self.breaker.unheard.load(Ordering::Relaxed);
        stats.circuit_open = self.breaker.opened.load(Ordering::Relaxed);
        stats
    }

    /// Returns the cause of a refusal by [`Apart::take_lasting`].
    pub(crate) fn no_lasting(&self) -> Cause {
        let most = self.lasting.most() as u64;
        Cause::Files { most }
    }

    /// Returns the cause of a refusal by [`Apart::take_for_moves`].
    pub(crate) fn no_moved(&self) -> Cause {
        let most = self.moved.most() as u64;
        Cause::Files { most }
    }

    /// Rejects a block of `len` bytes for lack of slots, and counts it as the tier counts its own
    /// rejections.
    pub(crate) fn no_slots(&self, len: u64, cause: Cause) -> Refused {
        self.full.fetch_add(1, Ordering::Relaxed);
        Refused::Full(Full {
            tier: self.tier.name(),
            requested: len,
            cause,
        })
    }

    /// Takes slots for blocks that a caller is about to pin or to reserve, for as long as it likes.
    /// Others may have them all: `None` if they still do after `limit`.
    pub(crate) fn take_lasting(&self, seat: u64, count: usize, limit: Duration) -> Option<Permits> {
        let taken = match self.lasting.ask(seat, count).now() {
            Ok(taken) => taken,
            Err(pending) if limit.is_zero() => pending.wait(limit),
            Err(pending) => wait(pending, &self.alarm, limit),
        };
        taken.flatten()
    }

    /// Takes slots for a step of a get or a put. This process moves its bytes without help and
    /// needs none. A client may be stopped, and holds what it has been told to move for as long as
    /// it is. `None` if it gets no slots in time.
    pub(crate) fn take_for_moves(&self, seat: u64, count: usize) -> Answer<Option<Permits>> {
        if seat == 0 {
            return Answer::Now(Some(Some(self.moved.none())));
        }
        // A client that has some waits for what it moves itself.
        let limit = match self.moved.has_some(seat) {
            true => self.patience,
            false => self.lookup,
        };
        match self.moved.ask(seat, count).now() {
            Ok(taken) => Answer::Now(taken),
            Err(pending) => Answer::Later(Later {
                pending,
                limit,
                breaker: None,
                alarm: Arc::clone(&self.alarm),
            }),
        }
    }

    /// Notes pins that a caller has from now on, each with its slot.
    pub(crate) fn lend<'a>(&self, places: impl Iterator<Item = &'a Place>, mut slots: Permits) {
        if slots.is_empty() {
            return;
        }
        let mut places = places.peekable();
        while places.peek().is_some() {
            let some = places.by_ref().take(TURN);
            let mut lent = self.lent.lock();
            lent.extend(some.map(|place| (place.token, (*place, slots.take()))));
        }
    }

    /// Ends pins.
    pub(crate) fn unpin(&self, places: &[Place]) {
        let closed = self.closed.read();
        if places.is_empty() || *closed {
            return;
        }
        let mut ended: Vec<Permits> = Vec::new();
        for some in places.chunks(TURN) {
            let mut lent = self.lent.lock();
            for place in some {
                let slots = lent.remove(&place.token).and_then(|(_, slots)| slots);
                let other = match (ended.last_mut(), slots) {
                    (Some(last), Some(slots)) => last.merge(slots),
                    (_, slots) => slots,
                };
                ended.extend(other);
            }
        }
        self.tier.unpin(places);
        drop(closed);
        // Only now, and without a lock: their slots are others' from here on.
        drop(ended);
    }

    /// Ends all questions, and those that are still to come: nobody has the time to wait for them.
    pub(crate) fn hurry(&self) {
        self.alarm.hurry();
    }

    /// Nobody asks any more.
    pub(crate) fn close(&self) {
        let left = {
            let mut closed = self.closed.write();
            *closed = true;
            std::mem::take(&mut *self.lent.lock())
        };
        if !left.is_empty() {
            let places: Vec<Place> = left.values().map(|(place, _)| *place).collect();
            self.tier.unpin(&places);
        }
        self.tier.close();
        self.alarm.stop();
    }

    fn ask<T: Send + 'static>(&self, limit: Duration, put: impl FnOnce(Reply<T>)) -> Answer<T> {
        self.put(limit, ask(), put)
    }

    /// As [`Apart::ask`], where an answer has pins: what comes when nobody waits any more goes
    /// `back`.
    fn ask_for_pins<T: Send + 'static>(
        &self,
        limit: Duration,
        put: impl FnOnce(Reply<T>),
        back: impl FnOnce(&dyn Tier, T) + Send + 'static,
    ) -> Answer<T> {
        let tier = Arc::clone(&self.tier);
        let back = Box::new(move |late| back(tier.as_ref(), late));
        self.put(limit, ask_or(Some(back)), put)
    }

    fn put<T: Send + 'static>(
        &self,
        limit: Duration,
        (reply, pending): (Reply<T>, Pending<T>),
        put: impl FnOnce(Reply<T>),
    ) -> Answer<T> {
        match self.breaker.lets_through() {
            true => self.put_through(limit, (reply, pending), put),
            false => Answer::Now(None),
        }
    }

    fn put_through<T: Send + 'static>(
        &self,
        limit: Duration,
        (reply, pending): (Reply<T>, Pending<T>),
        put: impl FnOnce(Reply<T>),
    ) -> Answer<T> {
        put(reply);
        let unasked = pending.unasked();
        match pending.now() {
            Ok(answer) => {
                match answer.is_some() && unasked.load(Ordering::Relaxed) {
                    // The next call tries.
                    true => self.breaker.state.lock().tries = false,
                    false => self.breaker.heard(answer.is_some()),
                }
                Answer::Now(answer)
            }
            Err(pending) => Answer::Later(Later {
                pending,
                limit,
                breaker: Some(Arc::clone(&self.breaker)),
                alarm: Arc::clone(&self.alarm),
            }),
        }
    }

    /// How long a lookup may take, and any other question.
    pub(crate) fn lookup_limit(&self) -> Duration {
        self.lookup
    }

    pub(crate) fn limit(&self) -> Duration {
        self.patience
    }

    /// Most blocks of a step.
    pub(crate) fn step_max(&self) -> usize {
        self.tier.step_max()
    }

    /// Most blocks that are pinned to be promoted: calls find pins beside them.
    pub(crate) fn promotions_max(&self) -> usize {
        self.step_max().saturating_mul(PROMOTED)
    }

    /// Most blocks that are pinned to be written to the next tier.
    pub(crate) fn write_back_max(&self) -> usize {
        self.step_max().saturating_mul(WRITTEN_BACK)
    }

    pub(crate) fn probe(&self, id: NamespaceId, keys: &[Key]) -> Answer<Vec<bool>> {
        self.ask(self.lookup, |reply| self.tier.probe(id, keys, reply))
    }

    pub(crate) fn pin(
        &self,
        id: NamespaceId,
        keys: &[Key],
        used: &[u64],
    ) -> Answer<Vec<Option<Place>>> {
        self.ask_for_pins(
            self.lookup,
            |reply| self.tier.pin(id, keys, used, reply),
            |tier, places| tier.unpin(&places.into_iter().flatten().collect::<Vec<_>>()),
        )
    }

    /// One that is left alone hears of it all the same, and nobody waits.
    pub(crate) fn discard(&self, places: &[Place]) -> Answer<usize> {
        let waits = self.breaker.lets_through();
        let answer = self.put_through(self.patience, ask(), |reply| {
            self.tier.discard(places, reply);
        });
        if waits {
            return answer;
        }
        answer.then(drop);
        Answer::Now(None)
    }

    pub(crate) fn reserve(
        &self,
        id: NamespaceId,
        blocks: &[Wanted],
    ) -> Answer<Vec<Result<Reserved, Refused>>> {
        self.ask(self.patience, |reply| self.tier.reserve(id, blocks, reply))
    }

    pub(crate) fn commit(
        &self,
        written: Vec<(Reserved, Checksum)>,
        pinned: bool,
    ) -> Answer<Vec<bool>> {
        if !pinned {
            return self.ask(self.patience, |reply| {
                self.tier.commit(written, false, reply);
            });
        }
        let places: Vec<Place> = written.iter().map(|(reserved, _)| **reserved).collect();
        self.ask_for_pins(
            self.patience,
            |reply| self.tier.commit(written, true, reply),
            move |tier, stored| {
                let pins = places.into_iter().zip(stored).filter(|(_, stored)| *stored);
                tier.unpin(&pins.map(|(place, _)| place).collect::<Vec<_>>());
            },
        )
    }

    pub(crate) fn remove(&self, id: NamespaceId, keys: &[Key]) -> Answer<usize> {
        self.ask(self.patience, |reply| self.tier.remove(id, keys, reply))
    }

    pub(crate) fn clear(&self, id: NamespaceId) -> Answer<usize> {
        self.ask(self.patience, |reply| self.tier.clear(id, reply))
    }

    pub(crate) fn namespaces(&self, from: u64) -> Answer<NamespacePage> {
        self.ask(self.patience, |reply| self.tier.namespaces(from, reply))
    }

    pub(crate) fn list(&self, id: NamespaceId, from: u64, limit: usize) -> Answer<Page> {
        self.ask(self.patience, |reply| {
            self.tier.list(id, from, limit, reply);
        })
    }
}

/// Circuit breaker of a tier.
struct Breaker {
    name: &'static str,
    state: Mutex<Circuit>,
    unheard: AtomicU64,
    opened: AtomicU64,
}

#[derive(Default)]
struct Circuit {
    failures: u32,
    /// Nothing is asked before.
    open_until: Option<Instant>,
    open_for: Duration,
    /// One question is under way to see whether it can be closed.
    tries: bool,
}

impl Breaker {
    fn new(name: &'static str) -> Breaker {
        Breaker {
            name,
            state: Mutex::default(),
            unheard: AtomicU64::new(0),
            opened: AtomicU64::new(0),
        }
    }

    fn lets_through(&self) -> bool {
        let mut state = self.state.lock();
        let Some(until) = state.open_until else {
            return true;
        };
        if state.tries || clock::now() < until {
            return false;
        }
        state.tries = true;
        true
    }

    /// Notes whether a question was answered that took its time. One that waited in this process
    /// until its limit says nothing of the tier: it neither closes the breaker nor counts.
    fn heard_late(&self, answered: bool, unasked: &AtomicBool) {
        if !(answered && unasked.load(Ordering::Relaxed)) {
            return self.heard(answered);
        }
        let mut state = self.state.lock();
        if state.tries {
            state.tries = false;
            state.open_until = clock::now().checked_add(state.open_for);
        }
    }

    /// Notes whether a question was answered.
    fn heard(&self, answered: bool) {
        let mut state = self.state.lock();
        if answered {
            if state.open_until.is_some() {
                tracing::info!(
                    tier = self.name,
                    "tier responding again; circuit breaker closed"
                );
            }
            *state = Circuit::default();
            return;
        }
        self.unheard.fetch_add(1, Ordering::Relaxed);
        state.failures = state.failures.saturating_add(1);
        let was_open = state.open_until.is_some();
        if state.failures < FAILURES || (was_open && !state.tries) {
            return;
        }
        state.open_for = match was_open {
            true => (state.open_for * 2).min(OPEN_MOST),
            false => OPEN_FIRST,
        };
        state.open_until = clock::now().checked_add(state.open_for);
        state.tries = false;
        if !was_open {
            self.opened.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                tier = self.name,
                "tier not responding; circuit breaker open, lookups are misses"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tier_that_does_not_answer_is_left_alone_until_it_does() {
        let breaker = Breaker::new("Test");
        for _ in 0..FAILURES {
            assert!(breaker.lets_through());
            breaker.heard(false);
        }
        assert!(!breaker.lets_through());
        let over = clock::now().checked_sub(Duration::from_millis(1));
        breaker.state.lock().open_until = over;
        assert!(breaker.lets_through());
        assert!(!breaker.lets_through(), "one tries");
        breaker.heard(false);
        assert!(!breaker.lets_through());
        assert_eq!(breaker.state.lock().open_for, 2 * OPEN_FIRST);
        breaker.state.lock().open_until = over;
        assert!(breaker.lets_through());
        breaker.heard(true);
        assert!(breaker.lets_through() && breaker.lets_through());
        assert_eq!(breaker.opened.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn an_answer_that_no_tier_gave_closes_no_breaker() {
        let breaker = Arc::new(Breaker::new("Test"));
        let alarm = Arc::new(Alarm::start().unwrap());
        let refused = || {
            let (reply, pending) = ask::<()>();
            reply.waits(|| ());
            let later = Later {
                pending,
                limit: Duration::from_millis(1),
                breaker: Some(Arc::clone(&breaker)),
                alarm: Arc::clone(&alarm),
            };
            assert!(Answer::Later(later).wait().is_some());
            drop(reply);
        };
        (1..FAILURES).for_each(|_| breaker.heard(false));
        refused();
        breaker.heard(false);
        assert!(!breaker.lets_through(), "failures are counted on");
        let over = clock::now().checked_sub(Duration::from_millis(1));
        breaker.state.lock().open_until = over;
        assert!(breaker.lets_through());
        refused();
        assert!(breaker.state.lock().open_until > Some(clock::now()));
        assert!(!breaker.lets_through(), "it is open still");
    }

    #[test]
    fn a_tier_is_asked_again_within_seconds_however_long_it_was_silent() {
        let breaker = Breaker::new("Test");
        (0..FAILURES).for_each(|_| breaker.heard(false));
        for _ in 0..100 {
            let over = clock::now().checked_sub(Duration::from_millis(1));
            breaker.state.lock().open_until = over;
            assert!(breaker.lets_through());
            breaker.heard(false);
        }
        let pause = breaker.state.lock().open_for;
        assert_eq!(pause, OPEN_MOST);
        assert!(pause < Duration::from_secs(10), "{pause:?}");
    }
}
