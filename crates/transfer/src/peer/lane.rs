//! A lane: a queue, the connection it goes over, and the thread that sends.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_host::Condvar;
use kvdepot_host::peer::is_connected;
use parking_lot::{Mutex, MutexGuard};
use zerocopy::IntoBytes;

use super::answers::Answers;
use super::conn::Conn;
use super::queue::{Ask, Down, Flying, Item, Sent, State, Wants};
use super::{Core, Summed};
use crate::error::{Error, Fault};
use crate::flight::{Flight, Op};
use crate::socket::Ranges;
use crate::window::{Granted, Number};
use crate::wire::{Bytes, Head, Row, SUM, Verb, rows_sum};

/// First pause between two attempts to connect; each is twice as long.
const PAUSE_MIN: Duration = Duration::from_millis(10);

/// First time that a peer which cannot be reached is left alone, and the longest.
const DOWN_MIN: Duration = Duration::from_millis(100);
const DOWN_MAX: Duration = Duration::from_secs(5);

pub(super) struct Lane {
    pub(super) number: u32,
    pub(super) core: Arc<Core>,
    pub(super) state: Mutex<State>,
    /// There is something to send, or room for it; or the lane ends.
    pub(super) wake: Condvar,
    /// The thread that sends, which ends where there is no connection and nothing to send.
    sender: Mutex<Option<JoinHandle<()>>>,
    /// The thread that receives from the present connection.
    receiver: Mutex<Option<JoinHandle<()>>>,
    me: Weak<Lane>,
}

impl Lane {
    pub(super) fn new(number: u32, core: Arc<Core>) -> Arc<Lane> {
        Arc::new_cyclic(|me| Lane {
            number,
            core,
            state: Mutex::default(),
            wake: Condvar::new(),
            sender: Mutex::new(None),
            receiver: Mutex::new(None),
            me: Weak::clone(me),
        })
    }

    /// Queues something, unless it is over at once.
    pub(super) fn push(&self, item: Item) {
        let mut state = self.state.lock();
        let fault = match state.is_closing {
            true => Some(Fault::Closed),
            false if !state.has_thread && state.is_down() => Some(Fault::Lost),
            false => None,
        };
        if let Some(fault) = fault {
            drop(state);
            item.end(fault);
            return;
        }
        state.push(item);
        let starts = !std::mem::replace(&mut state.has_thread, true);
        drop(state);
        match starts {
            true => self.start(),
            false => {
                self.wake.notify_one();
            }
        }
    }

    /// It may have writes in a connection that was lost: it connects by itself.
    pub(super) fn fence(&self) {
        let mut state = self.state.lock();
        state.is_fenced = true;
        state.has_thread = true;
        drop(state);
        self.core.fence();
        self.start();
    }

    /// Starts the thread that sends, which the state says there is.
    fn start(&self) {
        let mut sender = self.sender.lock();
        // The one before it has said that it ends.
        drop(sender.take().map(JoinHandle::join));
        // Whoever closes the lane waits for what is here, or has said so before.
        let lane = self.me.upgrade().filter(|_| !self.state.lock().is_closing);
        let Some(lane) = lane else { return };
        let name = format!("kvdepot-send-{}", self.number);
        match kvdepot_host::cpu::spawn(&name, move || lane.run()) {
            Ok(thread) => *sender = Some(thread),
            Err(error) => {
                drop(sender);
                self.core.note_failure(&Error::io("start a thread")(error));
                let mut state = self.state.lock();
                state.has_thread = false;
                let all = state.drain();
                drop(state);
                all.into_iter().for_each(|item| item.end(Fault::Lost));
            }
        }
    }

    /// What the lane's thread does.
    fn run(self: Arc<Self>) {
        loop {
            let mut state = self.state.lock();
            let conn = loop {
                if state.is_closing {
                    let left = state.drain();
                    drop(state);
                    left.into_iter().for_each(|item| item.end(Fault::Closed));
                    self.join_receiver();
                    return;
                }
                if !state.is_fenced && self.core.refuses_writes() {
                    let writes = state.take_writes();
                    if !writes.is_empty() {
                        MutexGuard::unlocked(&mut state, || {
                            writes.into_iter().for_each(|item| item.end(Fault::Lost));
                        });
                        continue;
                    }
                }
                let fences = self.core.fences();
                match &state.conn {
                    Some(conn) if state.is_ready(conn.window, fences) => {
                        break Some(Arc::clone(conn));
                    }
                    Some(_) => self.wake.wait(&mut state),
                    None if state.has_work() => break None,
                    None if state.is_fenced => match state.down.as_ref().map(|down| down.until) {
                        Some(until) if Instant::now() < until => {
                            self.wake.wait_until(&mut state, until);
                        }
                        _ => break None,
                    },
                    None => {
                        state.has_thread = false;
                        return;
                    }
                }
            };
            drop(state);
            match conn {
                Some(conn) => self.send_next(&conn),
                None => self.connect(),
            }
        }
    }

    fn send_next(&self, conn: &Arc<Conn>) {
        let _sending = conn.sending.lock();
        let mut state = self.state.lock();
        let fences = self.core.fences();
        let is_current = state
            .conn
            .as_ref()
            .is_some_and(|one| Arc::ptr_eq(one, conn));
        if !is_current || !state.is_ready(conn.window, fences) {
            return;
        }
        let Some(item) = state.pop() else { return };
        match self.numbered(item, conn, &mut state) {
            Some(item) => self.send(conn, state, item, false),
            None => return,
        };
    }

    /// The item with its grant's number; where that has to be asked for, the question.
    fn numbered(&self, item: Item, conn: &Conn, state: &mut MutexGuard<'_, State>) -> Option<Item> {
        let mut flight = match item {
            Item::Flight(flight) => flight,
            Item::Ask(ask) => return ask.is_for(conn.target).then_some(Item::Ask(ask)),
        };
        match flight.window.number(conn.target) {
            Number::Known(grant) => {
                flight.grant = grant;
                Some(Item::Flight(flight))
            }
            Number::Asked => {
                state.push_front(Item::Flight(flight));
                None
            }
            Number::ToAsk => {
                let ask = open(
                    &flight.window.name,
                    Wants::Number(Arc::clone(&flight.window)),
                );
                state.push_front(Item::Flight(flight));
                Some(Item::Ask(ask))
            }
            Number::Gone => {
                MutexGuard::unlocked(state, || flight.end(Err(Fault::Unknown)));
                None
            }
        }
    }

    /// Sends an item. Under `sending`, which says in which order they are answered. Whether all of
    /// it was sent.
    fn send(
        &self,
        conn: &Conn,
        mut state: MutexGuard<'_, State>,
        item: Item,
        is_inline: bool,
    ) -> bool {
        let number = conn.next_number();
        let mut frame = Frame::default();
        // SAFETY: what flies is not let go before it is sent: whoever ends it waits for `is_sent`,
        // or for the lock that is held here. The frame is gone by then.
        unsafe { frame.fill(&item, number, self.core.summed) };
        if let Item::Flight(flight) = &item
            && let Some(progress) = flight.progress()
        {
            progress.note_sent();
        }
        let what = Sent::Item(item);
        let flying = Flying {
            number,
            what,
            is_sent: false,
            is_touched: false,
            is_inline,
        };
        state.flying.push_back(flying);
        drop(state);
        if !is_inline {
            conn.arrived.notify_one();
        }
        // Before it is sent: a caller that has received the answer may read the count.
        self.core.count_sent();
        let result = frame.send(conn);
        let mut state = self.state.lock();
        if let Some(flying) = state.flying.iter_mut().rfind(|one| one.number == number) {
            flying.is_sent = true;
        }
        drop(state);
        if !is_inline {
            conn.arrived.notify_one();
        }
        if result.is_err() {
            self.end(conn);
        }
        result.is_ok()
    }

    /// Ends a connection.
    pub(super) fn end(&self, conn: &Conn) {
        conn.kill();
        // Under the lock, so that nobody who has just looked misses it.
        let state = self.state.lock();
        conn.arrived.notify_all();
        drop(state);
    }

    /// Sends a slice and receives its answer in this thread, where nothing else is under way;
    /// otherwise it is given back.
    pub(super) fn carry(&self, flight: Flight) -> Result<(), Flight> {
        let state = self.state.lock();
        let Some(conn) = state.conn.clone().filter(|_| state.is_idle()) else {
            return Err(flight);
        };
        drop(state);
        let Some(_receiving) = conn.receiving.try_lock() else {
            return Err(flight);
        };
        let Some(sending) = conn.sending.try_lock() else {
            return Err(flight);
        };
        let mut state = self.state.lock();
        let is_current = state
            .conn
            .as_ref()
            .is_some_and(|one| Arc::ptr_eq(one, &conn));
        let held_back = flight.op == Op::Write && self.core.fences() > 0;
        if !is_current || !state.is_idle() || held_back || state.is_closing {
            return Err(flight);
        }
        if flight.window.known().map(|grant| grant.target) != Some(conn.target) {
            return Err(flight);
        }
        let Some(item) = self.numbered(Item::Flight(flight), &conn, &mut state) else {
            drop(state);
            self.wake.notify_one();
            return Ok(());
        };
        let is_sent = self.send(&conn, state, item, true);
        drop(sending);
        let mut answers = Answers::new(self, &conn);
        while is_sent && answers.has_inline() {
            if answers.receive().is_err() {
                self.end(&conn);
                break;
            }
        }
        // What came behind it is the thread's.
        let state = self.state.lock();
        if !state.flying.is_empty() {
            conn.arrived.notify_one();
        }
        Ok(())
    }

    /// Connects, or says to all that wait that it cannot be done.
    fn connect(self: &Arc<Self>) {
        self.join_receiver();
        if self.state.lock().is_down() {
            self.refuse_all();
            return;
        }
        match self.core.dialer.dial(self.number) {
            Ok(greeted) => {
                let window = greeted.credit.min(self.core.window);
                let target = self.core.target(greeted.target);
                let conn = Arc::new(Conn::new(greeted.line, target, window));
                self.connected(conn);
            }
            Err(error) => self.failed(&error),
        }
    }

    fn connected(self: &Arc<Self>, conn: Arc<Conn>) {
        let (lane, its) = (Arc::clone(self), Arc::clone(&conn));
        let name = format!("kvdepot-recv-{}", self.number);
        let receiver = kvdepot_host::cpu::spawn(&name, move || {
            Answers::new(&lane, &its).run();
            lane.bury(&its);
        });
        let Ok(receiver) = receiver else {
            self.failed(&Error::Closed);
            return;
        };
        *self.receiver.lock() = Some(receiver);
        let mut state = self.state.lock();
        state.failures = 0;
        state.down = None;
        if std::mem::take(&mut state.is_fenced) {
            self.core.lift();
        }
        if std::mem::take(&mut state.has_given_up) {
            self.core.given_up.fetch_sub(1, Ordering::AcqRel);
        }
        if state.is_closing {
            conn.kill();
            conn.arrived.notify_all();
        }
        state.conn = Some(conn);
        drop(state);
        self.core.note_there();
    }

    fn failed(&self, error: &Error) {
        tracing::debug!(peer = %self.core.dialer.address, lane = self.number, %error, "not connected");
        self.core.note_failure(error);
        let mut state = self.state.lock();
        state.failures += 1;
        let is_final = matches!(error, Error::Refused { .. });
        if is_final || state.failures > self.core.retries {
            let last = state.down.take().map_or(DOWN_MIN / 2, |down| down.pause);
            let pause = (last * 2).min(DOWN_MAX);
            state.down = Some(Down {
                until: Instant::now() + jittered(pause),
                pause,
            });
            state.failures = 0;
            let waits = state.is_fenced && !std::mem::replace(&mut state.has_given_up, true);
            drop(state);
            self.refuse_all();
            if waits {
                // What the others have to write would wait for this lane until its time is over.
                self.core.given_up.fetch_add(1, Ordering::AcqRel);
                self.core.wake_all();
            }
            return;
        }
        let pause = jittered(PAUSE_MIN * 2_u32.pow(state.failures.min(10) - 1));
        let until = Instant::now() + pause;
        while !state.is_closing && Instant::now() < until {
            self.wake.wait_until(&mut state, until);
        }
    }

    fn refuse_all(&self) {
        let mut state = self.state.lock();
        let all = state.drain();
        drop(state);
        all.into_iter().for_each(|item| item.end(Fault::Lost));
    }

    /// A connection has ended, and nobody but this thread is in it any more.
    fn bury(&self, conn: &Arc<Conn>) {
        self.end(conn);
        let sending = conn.sending.lock();
        let receiving = conn.receiving.lock();
        let mut state = self.state.lock();
        let (over, wrote) = state.lose(self.core.retries, !conn.is_given_up());
        if wrote && !state.is_fenced {
            state.is_fenced = true;
            self.core.fence();
        }
        state.conn = None;
        drop(state);
        drop((sending, receiving));
        over.into_iter().for_each(|(item, fault)| item.end(fault));
        // Others may have waited for the number that was asked for over this connection.
        self.core.wake_all();
    }

    /// Ends slices, as far as these `ends` say.
    pub(super) fn cancel(&self, ends: impl Fn(&Flight) -> bool) {
        let mut state = self.state.lock();
        let (ended, stuck) = state.cancel(ends);
        let conn = state.conn.clone().filter(|_| stuck);
        drop(state);
        // What was behind them may be ready.
        self.wake.notify_one();
        for flight in ended {
            Item::Flight(flight).end(Fault::Cancelled);
        }
        if let Some(conn) = conn {
            conn.give_up();
            self.end(&conn);
        }
    }

    /// Ends the connection where nothing is under way and the target has ended it: nobody else
    /// would notice.
    pub(super) fn end_if_gone(&self) {
        let conn = {
            let state = self.state.lock();
            state.conn.clone().filter(|_| state.is_idle())
        };
        if let Some(conn) = conn.filter(|conn| !is_connected(conn).unwrap_or(true)) {
            self.end(&conn);
        }
    }

    /// Waits until its threads have ended, once it is closed.
    pub(super) fn join(&self) {
        let sender = self.sender.lock().take();
        // It catches nothing, and has nothing to say.
        drop(sender.map(JoinHandle::join));
        self.join_receiver();
    }

    /// Ends the lane, whose threads are waited for by [`Lane::join`]. What waits is over at once:
    /// the thread may be connecting.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.is_closing = true;
        let conn = state.conn.clone();
        let left = state.drain();
        drop(state);
        left.into_iter().for_each(|item| item.end(Fault::Closed));
        self.wake.notify_one();
        if let Some(conn) = conn {
            self.end(&conn);
        }
    }

    fn join_receiver(&self) {
        let receiver = self.receiver.lock().take();
        // It catches nothing, and has nothing to say.
        drop(receiver.map(JoinHandle::join));
    }
}

/// A question for the grant of a name.
pub(super) fn open(name: &[u8], wants: Wants) -> Ask {
    let most = Bytes::Just(size_of::<crate::wire::Opened>() as u64);
    Ask {
        until: None,
        is_again: false,
        verb: Verb::Open,
        first: Row::default(),
        body: name.to_vec(),
        most,
        wants,
    }
}

/// Between half of a pause and all of it, so that many do not come back at once.
fn jittered(pause: Duration) -> Duration {
    let word = super::dial::random::<1>().map_or(0, |[byte]| byte);
    pause / 2 + pause / 512 * u32::from(word)
}

/// A frame that is about to be sent.
#[derive(Default)]
struct Frame {
    head: Vec<u8>,
    rows: Vec<u8>,
    body: Vec<u8>,
    sum: [u8; SUM],
    ranges: Ranges,
    /// Bytes whose sum follows them, and the first of their ranges.
    summed: Option<(u64, usize)>,
}

impl Frame {
    /// # Safety
    ///
    /// The frame goes before the item's memory, and is not moved before.
    unsafe fn fill(&mut self, item: &Item, number: u64, summed: Summed) {
        let (head, written) = match item {
            Item::Ask(ask) => {
                self.body.clone_from(&ask.body);
                let names_one = matches!(ask.verb, Verb::Close | Verb::Expose);
                let (rows, bytes) = (usize::from(names_one), ask.body.len() as u64);
                (
                    Head::request(ask.verb, rows, number, bytes, false).with(ask.first),
                    None,
                )
            }
            Item::Flight(flight) => {
                let written = Some(flight).filter(|flight| flight.op == Op::Write);
                let (verb, bytes) = match written {
                    Some(flight) => (Verb::Write, flight.bytes),
                    None => (Verb::Read, 0),
                };
                let first = flight.rows(&mut self.rows);
                let summed = summed.is(flight.op);
                let head = Head::request(verb, flight.pieces.len(), number, bytes, summed);
                (head.with(first), written)
            }
        };
        self.head.extend_from_slice(head.as_bytes());
        if head.is_summed() {
            let sum = rows_sum(&self.head, &self.rows);
            self.rows.extend_from_slice(&sum);
        }
        // SAFETY: the frame's own bytes stay where they are until it has been sent; the rest is
        // passed on.
        unsafe {
            self.ranges.push_bytes(&self.head);
            self.ranges.push_bytes(&self.rows);
            self.ranges.push_bytes(&self.body);
            if let Some(flight) = written {
                self.summed = summed.writes.then_some((flight.bytes, self.ranges.len()));
                flight.add_to(&mut self.ranges);
            }
        }
    }

    fn send(&mut self, conn: &Conn) -> std::io::Result<()> {
        if let Some((bytes, first)) = self.summed {
            self.sum = self.ranges.sum(first, bytes).0;
            // SAFETY: as in `fill`.
            unsafe { self.ranges.push_bytes(&self.sum) };
        }
        self.ranges.send(conn.as_fd())
    }
}

/// The number of a window, for whoever lets it go.
pub(super) fn close_of(grant: Granted) -> Ask {
    Ask {
        until: None,
        is_again: false,
        verb: Verb::Close,
        first: Row::new(grant.number, 0, 0),
        body: Vec::new(),
        most: Bytes::Just(0),
        wants: Wants::Nobody(grant.target),
    }
}
