//! What a lane has to do, is doing, and how that ends. All under the lane's lock.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use super::conn::Conn;
use crate::error::Fault;
use crate::flight::{Flight, Op};
use crate::task::PRIORITIES;
use crate::window::{Granted, Window};
use crate::wire::{Bytes, Row, Verb};

/// What a question was answered with, or that nobody answers.
pub(crate) type Answer = Result<(Granted, Vec<u8>), Fault>;

/// Who wants the answer to a question.
pub(super) enum Wants {
    Caller(Sender<Answer>),
    /// The number of a grant that was unknown.
    Number(Arc<Window>),
    /// Nobody, and only this target has to hear it.
    Nobody(u32),
}

/// A question that is no slice.
pub(super) struct Ask {
    /// Nobody waits for it any more then.
    pub(super) until: Option<Instant>,
    /// It was asked over a connection that was lost, and may be asked once more.
    pub(super) is_again: bool,
    pub(super) verb: Verb,
    pub(super) first: Row,
    pub(super) body: Vec<u8>,
    pub(super) most: Bytes,
    pub(super) wants: Wants,
}

impl Ask {
    /// Whether it does the same when it is asked once more.
    fn may_go_again(&self) -> bool {
        !self.is_again && matches!(self.verb, Verb::Open | Verb::Ping)
    }

    /// Whether it is of use to this target.
    pub(super) fn is_for(&self, target: u32) -> bool {
        !matches!(self.wants, Wants::Nobody(its) if its != target)
    }

    /// It is over.
    pub(super) fn end(self, answer: Answer) {
        match self.wants {
            // Who does not wait any more does not miss it.
            Wants::Caller(reply) => drop(reply.send(answer)),
            Wants::Number(window) => match answer {
                Ok((grant, _)) => window.renew(grant),
                Err(Fault::Unknown) => window.note_gone(),
                Err(_) => window.ask_again(),
            },
            Wants::Nobody(_) => {}
        }
    }
}

/// What waits in a lane.
pub(super) enum Item {
    Flight(Flight),
    Ask(Ask),
}

impl Item {
    pub(super) fn end(self, fault: Fault) {
        match self {
            Item::Flight(flight) => {
                let cause = flight.cause();
                flight.end(Err(cause.unwrap_or(fault)));
            }
            Item::Ask(ask) => ask.end(Err(fault)),
        }
    }

    fn priority(&self) -> usize {
        match self {
            Item::Flight(flight) => flight.priority(),
            Item::Ask(_) => 0,
        }
    }
}

/// What was sent, or is being sent, and has no answer yet.
pub(super) struct Flying {
    pub(super) number: u64,
    pub(super) what: Sent,
    /// All of it has left this process.
    pub(super) is_sent: bool,
    /// Its answer is being received.
    pub(super) is_touched: bool,
    /// A caller carries it itself.
    pub(super) is_inline: bool,
}

pub(super) enum Sent {
    Item(Item),
    /// A read that nobody waits for any more, of so many bytes.
    Orphan(u64),
}

impl Flying {
    /// What its answer has to be.
    pub(super) fn expects(&self) -> (Verb, Bytes) {
        match &self.what {
            Sent::Orphan(bytes) => (Verb::Read, Bytes::Just(*bytes)),
            Sent::Item(Item::Ask(ask)) => (ask.verb, ask.most),
            Sent::Item(Item::Flight(flight)) => match flight.op {
                Op::Read => (Verb::Read, Bytes::Just(flight.bytes)),
                Op::Write => (Verb::Write, Bytes::Just(0)),
            },
        }
    }

    /// The slice that it is, if its memory may still be used.
    pub(super) fn flight(&self) -> Option<&Flight> {
        match &self.what {
            Sent::Item(Item::Flight(flight)) => Some(flight),
            _ => None,
        }
    }

    fn is_write(&self) -> bool {
        self.flight().is_some_and(|flight| flight.op == Op::Write)
    }

    /// Takes the slice of a read that only waits for its answer: what comes is passed over.
    fn orphan(&mut self) -> Option<Flight> {
        let flight = self.flight()?;
        let waits = self.is_sent && !self.is_touched && !self.is_inline;
        if flight.op != Op::Read || !waits {
            return None;
        }
        let orphan = Sent::Orphan(flight.bytes);
        match std::mem::replace(&mut self.what, orphan) {
            Sent::Item(Item::Flight(flight)) => Some(flight),
            _ => None,
        }
    }
}

/// Why a lane does not connect for a while.
pub(super) struct Down {
    pub(super) until: Instant,
    /// How long it is this time.
    pub(super) pause: Duration,
}

/// All that a lane knows.
#[derive(Default)]
pub(super) struct State {
    queues: [VecDeque<Item>; PRIORITIES],
    pub(super) flying: VecDeque<Flying>,
    pub(super) conn: Option<Arc<Conn>>,
    /// Writes that nobody has answered may still lie in the connection that was lost.
    pub(super) is_fenced: bool,
    /// It was fenced when it gave up connecting, and has not connected since.
    pub(super) has_given_up: bool,
    pub(super) is_closing: bool,
    /// A thread sends what waits, or is about to be started.
    pub(super) has_thread: bool,
    /// Attempts to connect that failed one after the other.
    pub(super) failures: u32,
    pub(super) down: Option<Down>,
}

impl State {
    pub(super) fn push(&mut self, item: Item) {
        self.queues[item.priority()].push_back(item);
    }

    pub(super) fn push_front(&mut self, item: Item) {
        self.queues[item.priority()].push_front(item);
    }

    /// Whether it does not connect for a while.
    pub(super) fn is_down(&self) -> bool {
        let down = self.down.as_ref();
        down.is_some_and(|down| Instant::now() < down.until)
    }

    /// Whether it may be connecting.
    pub(super) fn is_connecting(&self) -> bool {
        self.has_thread && self.conn.is_none() && !self.is_down()
    }

    /// Whether nothing waits and nothing is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.flying.is_empty() && !self.has_work()
    }

    pub(super) fn has_work(&self) -> bool {
        self.queues.iter().any(|queue| !queue.is_empty())
    }

    fn first(&self) -> Option<&Item> {
        self.queues.iter().find_map(VecDeque::front)
    }

    /// Whether the next item may go; no writes while another lane is fenced.
    pub(super) fn is_ready(&self, window: usize, fences: usize) -> bool {
        if self.flying.len() >= window {
            return false;
        }
        match self.first() {
            None => false,
            Some(Item::Ask(_)) => true,
            Some(Item::Flight(flight)) => {
                let held_back = flight.op == Op::Write && fences > 0;
                !held_back && !flight.window.is_asked_for()
            }
        }
    }

    pub(super) fn pop(&mut self) -> Option<Item> {
        self.queues.iter_mut().find_map(VecDeque::pop_front)
    }

    /// All that waits.
    pub(super) fn drain(&mut self) -> Vec<Item> {
        self.queues.iter_mut().flat_map(std::mem::take).collect()
    }

    /// Takes out the writes that wait.
    pub(super) fn take_writes(&mut self) -> Vec<Item> {
        let is_write = |item: &Item| matches!(item, Item::Flight(one) if one.op == Op::Write);
        let mut writes = Vec::new();
        for queue in &mut self.queues {
            let (out, left) = std::mem::take(queue).into_iter().partition(&is_write);
            writes.extend::<VecDeque<Item>>(out);
            *queue = left;
        }
        writes
    }

    /// Takes out the slices that are to end and can at once; whether others can only where the
    /// connection ends.
    pub(super) fn cancel(&mut self, ends: impl Fn(&Flight) -> bool) -> (Vec<Flight>, bool) {
        let mut ended = Vec::new();
        for queue in &mut self.queues {
            for item in std::mem::take(queue) {
                match item {
                    Item::Flight(flight) if ends(&flight) => ended.push(flight),
                    other => queue.push_back(other),
                }
            }
        }
        let mut stuck = false;
        for flying in &mut self.flying {
            if flying.flight().is_some_and(&ends) {
                match flying.orphan() {
                    Some(flight) => ended.push(flight),
                    None => stuck = true,
                }
            }
        }
        (ended, stuck)
    }

    /// Questions that nobody waits for any more go.
    pub(super) fn forget_questions(&mut self, now: Instant) {
        let is_late = |item: &Item| match item {
            Item::Ask(ask) => ask.until.is_some_and(|until| until <= now),
            Item::Flight(_) => false,
        };
        for queue in &mut self.queues {
            queue.retain(|item| !is_late(item));
        }
    }

    /// The connection is lost: what was under way waits again, or is given back because it is not
    /// to be tried any more. Whether a write was among it. It `counts` as a try, but for what
    /// another slice's end has cut off.
    pub(super) fn lose(&mut self, retries: u32, counts: bool) -> (Vec<(Item, Fault)>, bool) {
        let wrote = self.flying.iter().any(Flying::is_write);
        let mut over = Vec::new();
        let closing = self.is_closing;
        for flying in std::mem::take(&mut self.flying).into_iter().rev() {
            match flying.what {
                Sent::Orphan(_) => {}
                // The connection of a target that has started anew is found to be dead by the first
                // that uses it.
                Sent::Item(Item::Ask(mut ask)) if ask.may_go_again() && !closing => {
                    ask.is_again = true;
                    self.push_front(Item::Ask(ask));
                }
                Sent::Item(Item::Ask(ask)) => over.push((Item::Ask(ask), Fault::Lost)),
                Sent::Item(Item::Flight(mut flight)) => {
                    flight.tries += u32::from(counts);
                    let spent = flight.tries > retries;
                    if closing || spent || flight.cause().is_some() {
                        let fault = if closing { Fault::Closed } else { Fault::Lost };
                        over.push((Item::Flight(flight), fault));
                    } else {
                        self.push_front(Item::Flight(flight));
                    }
                }
            }
        }
        (over, wrote)
    }
}
