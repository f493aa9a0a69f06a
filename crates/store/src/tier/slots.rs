//! Slots for blocks that are pinned or written: each has an open file in a tier of files, and a
//! process may have a limited number of descriptors. A call waits in turn until it has all slots
//! that it needs.
//!
//! A call gets its slots at once or waits without any, so two calls never wait for each other. A
//! client that has its [share](Shares) waits until it gives slots back, and calls of others pass
//! it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::alarm::Alarm;
use super::late::{Pending, Progress, Reply, ask};
use crate::shares::Shares;

/// The slots of one tier.
pub(crate) struct Slots {
    most: usize,
    /// Has threads for calls that get the slots of others, if they are not to run in the thread
    /// that releases these: it may hold locks.
    alarm: Option<Arc<Alarm>>,
    state: Mutex<State>,
}

struct State {
    shares: Shares,
    /// Calls that wait, in turn.
    waiting: VecDeque<Waiting>,
}

struct Waiting {
    seat: u64,
    count: usize,
    /// The caller still waits for the answer.
    question: Progress,
    /// Its limit is over: it is being answered, and calls after it may have their slots.
    has_given_up: Arc<AtomicBool>,
    run: Box<dyn FnOnce(Permits) + Send>,
}

/// Slots that are not in use yet. They are released when this is dropped.
pub(crate) struct Permits {
    slots: Arc<Slots>,
    seat: u64,
    count: usize,
}

impl Permits {
    /// Adds the slots of another call of the same client; returns them if they are of another.
    pub(super) fn merge(&mut self, mut other: Permits) -> Option<Permits> {
        if other.seat != self.seat {
            return Some(other);
        }
        self.count += std::mem::take(&mut other.count);
        None
    }

    /// Returns true if none is left.
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Takes one of them; `None` if all are taken.
    pub(crate) fn take(&mut self) -> Option<Permits> {
        self.count = self.count.checked_sub(1)?;
        Some(Permits {
            slots: Arc::clone(&self.slots),
            seat: self.seat,
            count: 1,
        })
    }
}

impl Drop for Permits {
    fn drop(&mut self) {
        if self.count > 0 {
            self.slots.release(self.seat, self.count);
        }
    }
}

impl Slots {
    pub(super) fn new(most: usize, alarm: Option<&Arc<Alarm>>) -> Arc<Slots> {
        Arc::new(Slots {
            most,
            alarm: alarm.cloned(),
            state: Mutex::new(State {
                shares: Shares::new(most as u64),
                waiting: VecDeque::new(),
            }),
        })
    }

    /// Most slots that are in use at a time.
    pub(super) fn most(&self) -> usize {
        self.most
    }

    /// Returns the permits of a call that needs no slots.
    pub(super) fn none(self: &Arc<Slots>) -> Permits {
        Permits {
            slots: Arc::clone(self),
            seat: 0,
            count: 0,
        }
    }

    /// Returns true if a client holds slots.
    pub(super) fn has_some(&self, seat: u64) -> bool {
        self.state.lock().shares.of(seat) > 0
    }

    /// Runs `then` with `count` slots for `seat`, or with all that the tier has if these are fewer:
    /// in this call if they are free, else soon after the last of them is released. A call that
    /// still waits at its limit is answered with `refusal`.
    pub(super) fn acquire<T: Send + 'static>(
        self: &Arc<Slots>,
        (seat, count): (u64, usize),
        reply: Reply<T>,
        refusal: impl FnOnce() -> T + Send + 'static,
        then: impl FnOnce(Reply<T>, Permits) + Send + 'static,
    ) {
        let count = count.min(self.most);
        let mut state = self.state.lock();
        let over = state.drop_over();
        // In turn, unless all that wait have their shares.
        let is_next = state.next(Some((seat, count))) == Some(state.waiting.len());
        if is_next {
            state.shares.take(seat, count as u64);
            drop(state);
            let slots = Arc::clone(self);
            return then(reply, Permits { slots, seat, count });
        }
        let has_given_up = Arc::new(AtomicBool::new(false));
        let (slots, gives_up) = (Arc::downgrade(self), Arc::clone(&has_given_up));
        reply.waits(move || {
            gives_up.store(true, Ordering::Release);
            if let Some(slots) = slots.upgrade() {
                slots.release(0, 0);
            }
            refusal()
        });
        let question = reply.progress();
        let run = Box::new(move |permits| {
            reply.begins();
            then(reply, permits);
        });
        state.waiting.push_back(Waiting {
            seat,
            count,
            question,
            has_given_up,
            run,
        });
        drop(state);
        drop(over);
    }

    /// Asks for `count` slots for `seat`. The answer is `None` at the limit of the question.
    pub(super) fn ask(self: &Arc<Slots>, seat: u64, count: usize) -> Pending<Option<Permits>> {
        let (reply, pending) = ask();
        let refusal = || None;
        self.acquire((seat, count), reply, refusal, |reply, permits| {
            reply.answer(Some(permits));
        });
        pending
    }

    /// No call waits any longer.
    pub(super) fn close(&self) {
        let waiting = std::mem::take(&mut self.state.lock().waiting);
        drop(waiting);
    }

    fn release(self: &Arc<Slots>, seat: u64, count: usize) {
        let mut released = count as u64;
        loop {
            let mut state = self.state.lock();
            state.shares.give_back(seat, std::mem::take(&mut released));
            let over = state.drop_over();
            let next = state.next(None);
            let next = next.and_then(|at| state.waiting.remove(at));
            if let Some(next) = &next {
                state.shares.take(next.seat, next.count as u64);
            }
            drop(state);
            drop(over);
            let Some(Waiting {
                seat, count, run, ..
            }) = next
            else {
                return;
            };
            let slots = Arc::clone(self);
            let permits = Permits { slots, seat, count };
            match &self.alarm {
                Some(alarm) => alarm.hand_over(Box::new(move || run(permits))),
                None => run(permits),
            }
        }
    }
}

impl State {
    /// The first call that may have its slots now, of those that wait and of a `last` one behind
    /// them. Calls of clients that have their shares are passed.
    fn next(&self, last: Option<(u64, usize)>) -> Option<usize> {
        let waits = self.waiting.iter().map(|one| {
            let gave_up = one.has_given_up.load(Ordering::Acquire);
            (!gave_up).then_some((one.seat, one.count))
        });
        let free = self.shares.free();
        for (at, one) in waits.chain(last.map(Some)).enumerate() {
            let Some((seat, count)) = one else { continue };
            if self.shares.fits(seat, count as u64) {
                return Some(at);
            }
            // Large calls have their turn before small ones that came later. One whose client holds
            // slots goes on when these are released.
            if count as u64 > free && self.shares.of(seat) == 0 {
                return None;
            }
        }
        None
    }

    /// Takes out the first calls whose callers wait no longer. They are dropped without the lock.
    fn drop_over(&mut self) -> Vec<Waiting> {
        let over = |one: &Waiting| !one.question.is_wanted();
        let count = self.waiting.iter().take_while(|one| over(one)).count();
        self.waiting.drain(..count).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn calls_wait_in_turn_and_get_all_their_slots_at_once() {
        let slots = Slots::new(4, None);
        let (sender, receiver) = mpsc::channel();
        let begin = |name: u32, count: usize| {
            let (reply, pending) = ask::<u32>();
            let sender = sender.clone();
            slots.acquire(
                (0, count),
                reply,
                || 0,
                move |reply, permits| {
                    sender.send((name, permits)).unwrap();
                    reply.answer(name);
                },
            );
            pending
        };
        let _first = begin(1, 3);
        let (name, mut first) = receiver.try_recv().unwrap();
        assert_eq!((name, first.count), (1, 3));
        // The second needs more than is free, and the third does not overtake it.
        let second = begin(2, 2);
        let third = begin(3, 1);
        assert!(receiver.try_recv().is_err());
        drop(first.take());
        let (name, second_has) = receiver.try_recv().unwrap();
        assert_eq!((name, second.wait(LONG)), (2, Some(2)));
        assert!(receiver.try_recv().is_err());
        drop(first);
        let (name, third_has) = receiver.try_recv().unwrap();
        assert_eq!((name, third.wait(LONG)), (3, Some(3)));
        drop((second_has, third_has));
        assert_eq!(slots.state.lock().shares.free(), 4);
        // One that needs more than there are gets all.
        let _all = begin(4, 9);
        assert_eq!(receiver.try_recv().unwrap().1.count, 4);
    }

    #[test]
    fn a_call_that_waits_until_its_limit_is_refused_and_holds_nothing() {
        let slots = Slots::new(2, None);
        let (reply, _pending) = ask::<u32>();
        let (sender, receiver) = mpsc::channel();
        slots.acquire(
            (0, 2),
            reply,
            || 0,
            move |_, permits| sender.send(permits).unwrap(),
        );
        let held = receiver.recv().unwrap();
        let (reply, pending) = ask();
        slots.acquire((0, 1), reply, || 7, |_, _| panic!("the call was refused"));
        assert_eq!(pending.wait(Duration::ZERO), Some(7));
        drop(held);
        assert_eq!(slots.state.lock().shares.free(), 2);
        assert!(slots.state.lock().waiting.is_empty());
        let (reply, pending) = ask();
        let (sender, receiver) = mpsc::channel();
        slots.acquire(
            (0, 2),
            reply,
            || 0,
            move |_, permits| sender.send(permits).unwrap(),
        );
        drop(pending);
        let held = receiver.recv().unwrap();
        let (reply, pending) = ask();
        slots.acquire((0, 1), reply, || 7, |_, _| panic!("it is closed"));
        slots.close();
        assert_eq!(pending.wait(LONG), None);
        drop(held);
    }

    #[test]
    fn calls_behind_one_that_has_given_up_get_what_is_free() {
        let slots = Slots::new(3, None);
        let begin = |count| slots.ask(0, count);
        let first = begin(2).wait(LONG).flatten();
        assert!(first.is_some());
        let large = begin(3);
        let Err(small) = begin(1).now() else {
            panic!("it overtakes one that waits");
        };
        assert!(
            large
                .wait(Duration::ZERO)
                .is_some_and(|none| none.is_none())
        );
        assert!(small.wait(LONG).flatten().is_some());
        drop(first);
        assert_eq!(slots.state.lock().shares.free(), 3);
    }

    #[test]
    fn a_client_that_gives_nothing_back_leaves_slots_for_others() {
        let slots = Slots::new(16, None);
        let begin = |seat, count| slots.ask(seat, count);
        let stopped: Vec<_> = (0..4).map(|_| begin(1, 4)).collect();
        // Half of them. The other calls wait, and others pass them.
        let mut stopped = stopped.into_iter().map(|pending| pending.now());
        let held: Vec<_> = stopped.by_ref().take(2).map(Result::ok).collect();
        assert!(held.iter().all(Option::is_some));
        let waits: Vec<_> = stopped.filter_map(Result::err).collect();
        assert_eq!(waits.len(), 2);
        for seat in [2, 2, 3, 0, 0] {
            assert!(begin(seat, 4).now().is_ok_and(|got| got.is_some()));
        }
        // In turn behind one that lacks slots, not a share.
        let others: Vec<_> = (0..2).map(|_| begin(0, 4).now().ok()).collect();
        let large = begin(5, 16);
        let Err(small) = begin(0, 1).now() else {
            panic!("it overtakes one that waits");
        };
        drop((others, held));
        let waits = waits
            .into_iter()
            .map(|pending| pending.wait(LONG).flatten());
        assert_eq!(waits.filter(Option::is_some).count(), 2);
        assert!(large.wait(LONG).flatten().is_some());
        assert!(small.wait(LONG).flatten().is_some());
        assert_eq!(slots.state.lock().shares.held(), 0);
    }

    #[test]
    fn a_client_that_lacks_slots_and_holds_some_is_passed() {
        let slots = Slots::new(16, None);
        let begin = |seat, count| slots.ask(seat, count);
        let _held = [begin(1, 4).now().ok(), begin(1, 4).now().ok()];
        let _waits = begin(1, 4);
        let _others = [begin(2, 4).now().ok(), begin(3, 3).now().ok()];
        assert!(begin(4, 1).now().is_ok());
    }
}
