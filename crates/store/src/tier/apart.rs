//! An asynchronous tier, as the pipeline calls it: each call has a time limit, and a tier that does
//! not respond is not called until its circuit breaker closes ([`Breaker`]). The limit of a lookup
//! bounds the whole call, and the blocks found by then count. Any other limit bounds the time
//! between two responses within the call.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvdepot_arena::held::turn_len;
use kvdepot_arena::{
    Cause, Full, Key, NamespaceId, Place, Refused, Reserved, TierStats, Token, Wanted,
};
use kvdepot_media::{Checksum, is_simulated};
use parking_lot::{Mutex, RwLock};

use super::alarm::Alarm;
use super::breaker::{Breaker, Question};
use super::contract::{NamespacePage, Page, Tier};
use super::door::DoorKey;
use super::file::Directory;
use super::late::{Pending, Reply, ask, ask_or};
use super::slots::{Permits, Slots};
use crate::chances::UNKNOWN;
use crate::ghosts::Ghosts;

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
    question: Option<Question>,
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
        if let Some(question) = later.question {
            question.heard_late(answer.is_some(), &unasked);
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
            question,
            alarm,
        } = self;
        let unasked = pending.unasked();
        pending.then(Some((&alarm, limit)), move |answer| {
            if let Some(question) = question {
                question.heard_late(answer.is_some(), &unasked);
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
        (stats.timeouts, stats.circuit_open) = self.breaker.counts();
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
                question: None,
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
            let some = places.by_ref().take(turn_len());
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
        for some in places.chunks(turn_len()) {
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
            Some(question) => self.put_through((question, limit), (reply, pending), put),
            None => Answer::Now(None),
        }
    }

    fn put_through<T: Send + 'static>(
        &self,
        (question, limit): (Question, Duration),
        (reply, pending): (Reply<T>, Pending<T>),
        put: impl FnOnce(Reply<T>),
    ) -> Answer<T> {
        put(reply);
        let unasked = pending.unasked();
        match pending.now() {
            Ok(answer) => {
                match answer.is_some() && unasked.load(Ordering::Relaxed) {
                    // The next call tries.
                    true => drop(question),
                    false => question.heard(answer.is_some()),
                }
                Answer::Now(answer)
            }
            Err(pending) => Answer::Later(Later {
                pending,
                limit,
                question: Some(question),
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
        let question = self.breaker.lets_through();
        let waits = question.is_some();
        let question = question.unwrap_or_else(|| self.breaker.question());
        let answer = self.put_through((question, self.patience), ask(), |reply| {
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

    pub(crate) fn remove(&self, id: NamespaceId, keys: &[Key]) -> Answer<Vec<bool>> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tier::breaker::{FAILURES, trial_of};

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
                question: Some(trial_of(&breaker)),
                alarm: Arc::clone(&alarm),
            };
            assert!(Answer::Later(later).wait().is_some());
            drop(reply);
        };
        (1..FAILURES).for_each(|_| trial_of(&breaker).heard(false));
        refused();
        trial_of(&breaker).heard(false);
        assert!(breaker.lets_through().is_none(), "failures are counted on");
        breaker.pass_time();
        refused();
        assert!(breaker.lets_through().is_none(), "it is open still");
    }
}
