//! Slots for blocks that are pinned or written: each has an open file in a tier of files, and a
//! process may have a limited number of descriptors. A call waits in turn until it has all slots
//! that it needs.
//!
//! A call gets its slots at once or waits without any, so two calls never wait for each other.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::late::{Progress, Reply};

/// The slots of one tier.
pub(crate) struct Slots {
    most: usize,
    state: Mutex<State>,
}

struct State {
    free: usize,
    /// Calls that wait, in turn.
    waiting: VecDeque<Waiting>,
}

struct Waiting {
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
    count: usize,
}

impl Permits {
    /// Takes one of them; `None` if all are taken.
    pub(crate) fn take(&mut self) -> Option<Permits> {
        self.count = self.count.checked_sub(1)?;
        Some(Permits {
            slots: Arc::clone(&self.slots),
            count: 1,
        })
    }
}

impl Drop for Permits {
    fn drop(&mut self) {
        if self.count > 0 {
            self.slots.release(self.count);
        }
    }
}

impl Slots {
    pub(super) fn new(most: usize) -> Arc<Slots> {
        Arc::new(Slots {
            most,
            state: Mutex::new(State {
                free: most,
                waiting: VecDeque::new(),
            }),
        })
    }

    /// Most slots that are in use at a time.
    pub(super) fn most(&self) -> usize {
        self.most
    }

    /// Runs `then` with `count` slots, or with all that the tier has if these are fewer: in this
    /// call if they are free, else in the thread that releases the last of them. A call that still
    /// waits at its limit is answered with `refusal`.
    pub(super) fn acquire<T: Send + 'static>(
        self: &Arc<Slots>,
        count: usize,
        reply: Reply<T>,
        refusal: impl FnOnce() -> T + Send + 'static,
        then: impl FnOnce(Reply<T>, Permits) + Send + 'static,
    ) {
        let count = count.min(self.most);
        let mut state = self.state.lock();
        let over = state.drop_over();
        if state.next().is_none() && state.free >= count {
            state.free -= count;
            drop(state);
            let slots = Arc::clone(self);
            return then(reply, Permits { slots, count });
        }
        let has_given_up = Arc::new(AtomicBool::new(false));
        let (slots, gives_up) = (Arc::downgrade(self), Arc::clone(&has_given_up));
        reply.waits(move || {
            gives_up.store(true, Ordering::Release);
            if let Some(slots) = slots.upgrade() {
                slots.release(0);
            }
            refusal()
        });
        let question = reply.progress();
        let run = Box::new(move |permits| {
            reply.begins();
            then(reply, permits);
        });
        state.waiting.push_back(Waiting {
            count,
            question,
            has_given_up,
            run,
        });
        drop(state);
        drop(over);
    }

    /// No call waits any longer.
    pub(super) fn close(&self) {
        let waiting = std::mem::take(&mut self.state.lock().waiting);
        drop(waiting);
    }

    fn release(self: &Arc<Slots>, count: usize) {
        let mut released = count;
        loop {
            let mut state = self.state.lock();
            state.free += std::mem::take(&mut released);
            let over = state.drop_over();
            let free = state.free;
            let next = state.next().filter(|at| state.waiting[*at].count <= free);
            let next = next.and_then(|at| state.waiting.remove(at));
            let Some(next) = next else {
                drop(state);
                drop(over);
                return;
            };
            state.free -= next.count;
            drop(state);
            drop(over);
            let (slots, count) = (Arc::clone(self), next.count);
            (next.run)(Permits { slots, count });
        }
    }
}

impl State {
    /// The first call that still waits.
    fn next(&self) -> Option<usize> {
        let waits = |one: &Waiting| !one.has_given_up.load(Ordering::Acquire);
        self.waiting.iter().position(waits)
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
    use crate::tier::late::ask;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn calls_wait_in_turn_and_get_all_their_slots_at_once() {
        let slots = Slots::new(4);
        let (sender, receiver) = mpsc::channel();
        let begin = |name: u32, count: usize| {
            let (reply, pending) = ask::<u32>();
            let sender = sender.clone();
            slots.acquire(
                count,
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
        assert_eq!(slots.state.lock().free, 4);
        // One that needs more than there are gets all.
        let _all = begin(4, 9);
        assert_eq!(receiver.try_recv().unwrap().1.count, 4);
    }

    #[test]
    fn a_call_that_waits_until_its_limit_is_refused_and_holds_nothing() {
        let slots = Slots::new(2);
        let (reply, _pending) = ask::<u32>();
        let (sender, receiver) = mpsc::channel();
        slots.acquire(
            2,
            reply,
            || 0,
            move |_, permits| sender.send(permits).unwrap(),
        );
        let held = receiver.recv().unwrap();
        let (reply, pending) = ask();
        slots.acquire(1, reply, || 7, |_, _| panic!("the call was refused"));
        assert_eq!(pending.wait(Duration::ZERO), Some(7));
        drop(held);
        assert_eq!(slots.state.lock().free, 2);
        assert!(slots.state.lock().waiting.is_empty());
        let (reply, pending) = ask();
        let (sender, receiver) = mpsc::channel();
        slots.acquire(
            2,
            reply,
            || 0,
            move |_, permits| sender.send(permits).unwrap(),
        );
        drop(pending);
        let held = receiver.recv().unwrap();
        let (reply, pending) = ask();
        slots.acquire(1, reply, || 7, |_, _| panic!("it is closed"));
        slots.close();
        assert_eq!(pending.wait(LONG), None);
        drop(held);
    }

    #[test]
    fn calls_behind_one_that_has_given_up_get_what_is_free() {
        let slots = Slots::new(3);
        let begin = |count: usize| {
            let (reply, pending) = ask::<Option<Permits>>();
            let then = |reply: Reply<_>, permits| {
                reply.answer(Some(permits));
            };
            slots.acquire(count, reply, || None, then);
            pending
        };
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
        assert_eq!(slots.state.lock().free, 3);
    }
}
