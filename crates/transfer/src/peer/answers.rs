//! What comes back over a connection, in the order of the requests.

use std::io;
use std::os::fd::AsFd;

use kvdepot_media::Checksum;

use super::conn::Conn;
use super::lane::Lane;
use super::queue::{Answer, Ask, Item, Sent};
use crate::error::Fault;
use crate::flight::{Flight, Op};
use crate::socket::{self, Ranges};
use crate::window::Granted;
use crate::wire::{Bytes, HEAD, Head, Malformed, SUM, Status};

/// Who receives from a connection. Under `receiving`.
pub(super) struct Answers<'a> {
    lane: &'a Lane,
    conn: &'a Conn,
    ranges: Ranges,
}

/// What the first of those that fly is answered with.
enum Next {
    /// The bytes of a slice are to be received into its memory.
    Bytes,
    /// Bytes are to be passed over.
    Skip(u64),
    /// The bytes of an answer to a question.
    Body,
    /// Nothing.
    Over(Status),
}

impl<'a> Answers<'a> {
    pub(super) fn new(lane: &'a Lane, conn: &'a Conn) -> Answers<'a> {
        Answers {
            lane,
            conn,
            ranges: Ranges::default(),
        }
    }

    /// Receives until the connection ends.
    pub(super) fn run(&mut self) {
        while self.await_one() {
            let receiving = self.conn.receiving.lock();
            // A caller may have received it meanwhile.
            let is_there = !self.lane.state.lock().flying.is_empty();
            if is_there && self.receive().is_err() {
                break;
            }
            drop(receiving);
        }
    }

    /// Waits until something flies; false when the connection has ended.
    fn await_one(&self) -> bool {
        let mut state = self.lane.state.lock();
        while state.flying.is_empty() && !self.conn.is_dead() {
            self.conn.arrived.wait(&mut state);
        }
        !self.conn.is_dead()
    }

    /// Whether a caller carries something that has no answer yet.
    pub(super) fn has_inline(&self) -> bool {
        self.lane
            .state
            .lock()
            .flying
            .iter()
            .any(|flying| flying.is_inline)
    }

    /// Receives one answer.
    ///
    /// # Errors
    /// The connection is to end.
    pub(super) fn receive(&mut self) -> io::Result<()> {
        let mut bytes = [0; HEAD];
        socket::receive(self.conn.as_fd(), &mut bytes)?;
        let head = Head::read(&bytes);
        match self.next(&head)? {
            Next::Over(status) => self.over(status, &head),
            Next::Skip(bytes) => {
                let sum = if head.is_summed() { SUM as u64 } else { 0 };
                socket::skip(self.conn.as_fd(), bytes + sum)?;
                self.take();
                Ok(())
            }
            Next::Body => {
                let mut body = vec![0; head.bytes.get() as usize];
                socket::receive(self.conn.as_fd(), &mut body)?;
                if let Some(Item::Ask(ask)) = self.take() {
                    let grant = self.granted(&head);
                    self.answered(ask, Ok((grant, body)));
                }
                Ok(())
            }
            Next::Bytes => self.fill(&head),
        }
    }

    /// What the answer with this head is of. From now on nobody else ends what it is for.
    fn next(&mut self, head: &Head) -> io::Result<Next> {
        let mut state = self.lane.state.lock();
        loop {
            let Some(first) = state.flying.front() else {
                return Err(broken(Malformed("unexpected response")));
            };
            if first.is_sent {
                break;
            }
            // It answers before it has heard all: what is being sent is not let go yet.
            if self.conn.is_dead() {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            self.conn.arrived.wait(&mut state);
        }
        let Some(first) = state.flying.front_mut() else {
            return Err(broken(Malformed("unexpected response")));
        };
        let (verb, most) = first.expects();
        let status = head.answers(verb, first.number, most).map_err(broken)?;
        first.is_touched = true;
        Ok(match (&first.what, status, most) {
            (Sent::Orphan(_), Status::Done, Bytes::Just(bytes)) => Next::Skip(bytes),
            (Sent::Item(Item::Ask(_)), Status::Done, _) => Next::Body,
            (Sent::Item(Item::Flight(flight)), Status::Done, _) if flight.op == Op::Read => {
                self.ranges.clear();
                // SAFETY: what is touched is not let go before this thread says so, and its ranges
                // are cleared before.
                unsafe { flight.add_to(&mut self.ranges) };
                Next::Bytes
            }
            _ => Next::Over(status),
        })
    }

    /// Receives the bytes of a read.
    fn fill(&mut self, head: &Head) -> io::Result<()> {
        if head.is_summed() != self.lane.core.summed.reads {
            return Err(broken(Malformed("unexpected or missing checksum")));
        }
        let summed = head.is_summed().then_some(head.bytes.get());
        let sum = self.ranges.receive(self.conn.as_fd(), summed);
        self.ranges.clear();
        let matches = match sum? {
            None => true,
            Some(sum) => {
                let mut said = [0; SUM];
                socket::receive(self.conn.as_fd(), &mut said)?;
                sum == Checksum(said)
            }
        };
        let Some(Item::Flight(flight)) = self.take() else {
            return Ok(());
        };
        match matches {
            true => flight.end(Ok(())),
            false => self.again(flight, Fault::Checksum),
        }
        Ok(())
    }

    /// The first of those that fly is over.
    fn take(&self) -> Option<Item> {
        let mut state = self.lane.state.lock();
        let first = state.flying.pop_front();
        let has_work = state.has_work();
        drop(state);
        if has_work {
            self.lane.wake.notify_one();
        }
        match first?.what {
            Sent::Item(item) => Some(item),
            Sent::Orphan(_) => None,
        }
    }

    /// An answer without bytes.
    fn over(&self, status: Status, head: &Head) -> io::Result<()> {
        if status == Status::Closing {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        match self.take() {
            None => {}
            Some(Item::Ask(ask)) => self.answered(
                ask,
                match status {
                    Status::Done => Ok((self.granted(head), Vec::new())),
                    Status::Unknown => Err(Fault::Unknown),
                    Status::Closing => Err(Fault::Lost),
                    _ => Err(Fault::Failed),
                },
            ),
            Some(Item::Flight(flight)) => match status {
                Status::Done => flight.end(Ok(())),
                Status::Unknown if !flight.renewed => self.renew(flight),
                Status::Unknown => flight.end(Err(Fault::Unknown)),
                Status::Checksum => self.again(flight, Fault::Checksum),
                Status::Range => self.refused(flight, head, Fault::Range),
                Status::Rights => self.refused(flight, head, Fault::Rights),
                Status::Failed | Status::Closing => self.refused(flight, head, Fault::Failed),
            },
        }
        Ok(())
    }

    fn granted(&self, head: &Head) -> Granted {
        Granted {
            target: self.conn.target,
            number: head.first.grant.get(),
        }
    }

    /// A question is answered: what waited for a number may go on, in any lane.
    fn answered(&self, ask: Ask, answer: Answer) {
        ask.end(answer);
        self.lane.core.wake_all();
    }

    /// One row was refused, and nothing was moved: the others go again.
    fn refused(&self, mut flight: Flight, head: &Head, fault: Fault) {
        let row = usize::try_from(head.first.offset.get()).unwrap_or(usize::MAX);
        match flight.split_off(row) {
            Some(alone) => alone.end(Err(fault)),
            None => return flight.end(Err(fault)),
        }
        if !flight.pieces.is_empty() {
            self.lane.push(Item::Flight(flight));
        }
    }

    /// The name is opened again, once.
    fn renew(&self, mut flight: Flight) {
        flight.renewed = true;
        flight.window.forget(flight.grant);
        self.lane.push(Item::Flight(flight));
    }

    /// It goes again, if it may.
    fn again(&self, mut flight: Flight, fault: Fault) {
        flight.tries += 1;
        if flight.tries > self.lane.core.retries {
            return flight.end(Err(fault));
        }
        self.lane.push(Item::Flight(flight));
    }
}

fn broken(error: Malformed) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
