//! A client, as its owner sees it: what it holds, what its lanes are moving, and what ends it.
//!
//! Pins, reservations and moves end by the client's word, or with its process; a connection that
//! breaks ends nothing, because whoever was writing may still write.

use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use kvdepot_arena::verdict::Moved;
use kvdepot_arena::{Error, Key, NamespaceId, Place, clock};
use kvdepot_host::peer::Process;
use kvdepot_media::{Checksum, PART_LEN_MAX};
use kvdepot_store::placement::Holder;
use kvdepot_store::{Caller, Core, GetOptions, Lanes, Mirror, MovesDone, Op, Outcome, Reservation};
use parking_lot::{Condvar, Mutex};

use crate::credit::Credit;
use crate::frame::{self, Frame, In, Incoming, Out, Verb};
use crate::holding::{Granted, Holding, Ticket, give_back};
use crate::outbox::Outbox;
use crate::roster::Roster;
use crate::slow;

/// How often a process without a connection, or movers of a dead one, are looked at for another
/// reason to stop waiting: nothing waits for this but the end of a thread.
const LOOK: Duration = Duration::from_secs(1);

/// Copies of a batch end in less.
const LATE: Duration = Duration::from_secs(5);

/// One client process.
pub(crate) struct Session {
    pub(crate) core: Arc<Core>,
    pub(crate) process: Process,
    pub(crate) holding: Arc<Holding>,
    /// Whether it runs as the owner's own user.
    is_trusted: bool,
    roster: Arc<Roster>,
    moves: Mutex<Moves>,
    moved: Condvar,
    next_move: AtomicU64,
    pub(crate) calls: UnixStream,
    tasks: UnixStream,
    outbox: Outbox,
    /// What the client holds is not this session's to end: the owner has closed, or the process
    /// has another.
    retired: AtomicBool,
    /// The process has another one: nobody hears what is granted here. Taken while an answer is
    /// sent and what it grants is entered, so that the next one knows all of it.
    handed_over: Mutex<bool>,
}

/// Blocks that a client's lanes are moving: how many, and what follows.
type Moving = (usize, MovesDone);

#[derive(Default)]
struct Moves {
    /// By number.
    waiting: HashMap<u64, Moving>,
    /// Those of the sessions that this process had before: its lanes may still be at them, until
    /// it says that they have stopped.
    former: Vec<Moving>,
    /// Nobody hears of new ones: they fail at once.
    broken: bool,
    over: bool,
}

/// What passes from the session that a process had to its next one.
pub(crate) struct Inheritance {
    holding: Arc<Holding>,
    moves: Vec<Moving>,
    /// What was granted, and not heard of.
    unheard: Vec<Ticket>,
}

impl Inheritance {
    /// Of a process that had none.
    pub(crate) fn none(holder: Holder) -> Inheritance {
        Inheritance {
            holding: Arc::new(Holding::new(holder)),
            moves: Vec::new(),
            unheard: Vec::new(),
        }
    }

    /// To be given back before the first call.
    pub(crate) fn take_unheard(&mut self) -> Vec<Ticket> {
        std::mem::take(&mut self.unheard)
    }
}

/// How a session came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// By its word: its lanes have stopped.
    Goodbye,
    /// With its process.
    Dead,
    /// The connection broke; the process may go on.
    Broken,
}

impl Session {
    pub(crate) fn new(
        core: Arc<Core>,
        (process, is_trusted): (Process, bool),
        inherited: Inheritance,
        roster: Arc<Roster>,
        [calls, tasks]: [UnixStream; 2],
    ) -> Session {
        let moves = Moves {
            former: inherited.moves,
            ..Moves::default()
        };
        Session {
            core,
            process,
            is_trusted,
            holding: inherited.holding,
            roster,
            moves: Mutex::new(moves),
            moved: Condvar::new(),
            next_move: AtomicU64::new(1),
            calls,
            tasks,
            outbox: Outbox::default(),
            retired: AtomicBool::new(false),
            handed_over: Mutex::new(false),
        }
    }

    /// Serves the tasks of the client until its end, and ends what it held.
    pub(crate) fn run(self: &Arc<Session>) {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                self.outbox.run(&self.tasks);
                // What could not be written is lost: the client has to learn that.
                let _shut = self.tasks.shutdown(std::net::Shutdown::Both);
            });
            let mut end = self.listen();
            // From here on nobody hears of a move: those that are under way go on.
            self.moves.lock().broken = true;
            let _shut = self.tasks.shutdown(std::net::Shutdown::Both);
            self.outbox.end();
            if end == End::Broken && !self.retired.load(Ordering::Acquire) {
                let pid = self.process.identity().pid;
                tracing::warn!(
                    pid,
                    "a client's connection broke: what it holds is kept until it is back and \
                     says that its lanes have stopped, or ends"
                );
                while end == End::Broken && !self.retired.load(Ordering::Acquire) {
                    match self.process.wait_dead(LOOK) {
                        Ok(true) => end = End::Dead,
                        Ok(false) => {}
                        // It cannot be watched: it is taken for one that goes on.
                        Err(_) => std::thread::sleep(LOOK),
                    }
                }
            }
            if end != End::Broken {
                self.release();
            }
        });
    }

    fn listen(self: &Arc<Session>) -> End {
        let mut incoming = Incoming::default();
        loop {
            if !incoming.has_more() {
                match self.process.wait_readable(&self.tasks) {
                    Ok(true) => {}
                    Ok(false) => return End::Dead,
                    Err(_) => return End::Broken,
                }
            }
            match incoming.next(&self.tasks) {
                Ok(Some(frame)) if frame.verb == Verb::Goodbye => {
                    self.send(Out::new(Verb::Goodbye, frame.number));
                    return End::Goodbye;
                }
                Ok(Some(frame)) => {
                    if let Err(error) = self.handle(&frame) {
                        tracing::warn!(%error, "a client sent what is no request");
                        return End::Broken;
                    }
                }
                Ok(None) | Err(_) => return End::Broken,
            }
        }
    }

    fn handle(self: &Arc<Session>, frame: &Frame) -> Result<(), Error> {
        let mut body = In(&frame.body);
        match frame.verb {
            Verb::Prefetch => {
                let namespace = body.namespace()?;
                let keys = body.keys()?;
                body.end()?;
                let started = self
                    .mirror(frame.number, keys.len())
                    .and_then(|mirror| self.core.prefetch(namespace, &keys, Some(mirror)));
                if let Err(error) = started {
                    self.send(frame::refusal(Verb::Refused, frame.number, &error));
                }
                Ok(())
            }
            Verb::Put | Verb::Get => {
                let namespace = body.namespace()?;
                // Staging is the client's own affair.
                let mut options = GetOptions::default();
                options.prefix = body.flag()?;
                let keys = body.keys()?;
                let lens = (0..keys.len()).map(|_| body.long());
                let lens = lens.collect::<Result<Vec<u64>, Error>>()?;
                body.end()?;
                let op = match frame.verb {
                    Verb::Put => Op::Put,
                    _ => Op::Get,
                };
                let started = self.start((op, options), frame.number, namespace, keys, lens);
                if let Err(error) = started {
                    self.send(frame::refusal(Verb::Refused, frame.number, &error));
                }
                Ok(())
            }
            Verb::Moved => {
                let count = body.count(17)?;
                let mut moved = Vec::with_capacity(count);
                for _ in 0..count {
                    let kind = body.byte()?;
                    let checksum = body.checksum()?;
                    moved.push(match kind {
                        1 => Moved::Done(checksum),
                        2 => Moved::Corrupt,
                        _ => Moved::Failed,
                    });
                }
                body.end()?;
                self.finish(frame.number, &moved);
                Ok(())
            }
            Verb::Ping => {
                body.end()?;
                self.send(Out::new(Verb::Ping, frame.number));
                Ok(())
            }
            Verb::Quiet => {
                body.end()?;
                let former = std::mem::take(&mut self.moves.lock().former);
                former
                    .into_iter()
                    .for_each(|(count, done)| fail(count, done));
                self.moved.notify_all();
                Ok(())
            }
            verb if verb.is_slow() => {
                let session = Arc::clone(self);
                let (number, body) = (frame.number, frame.body.clone());
                let refused = move |error| frame::refusal(verb, number, &error);
                let credit = match self.may_ask(verb) {
                    Ok(credit) => credit,
                    Err(error) => {
                        self.send(refused(error));
                        return Ok(());
                    }
                };
                let run = move || {
                    let answer = slow::answer(&session.core, verb, number, &body);
                    drop(credit);
                    session.send(answer.unwrap_or_else(refused));
                };
                let name = "kvdepot-devices".to_owned();
                let spawned = std::thread::Builder::new().name(name).spawn(run);
                spawned.map(|_| ()).map_err(|source| Error::Io {
                    path: "thread".into(),
                    source,
                })
            }
            verb => Err(Error::Peer {
                socket: String::new(),
                reason: format!("{verb:?} is no request of a task"),
            }),
        }
    }

    /// Starts a put or get whose bytes the client's lanes move.
    fn start(
        self: &Arc<Session>,
        (op, options): (Op, GetOptions),
        task: u64,
        namespace: NamespaceId,
        keys: Vec<Key>,
        lens: Vec<u64>,
    ) -> Result<(), Error> {
        let pass = self.core.gate.enter()?;
        if let Some(len) = lens.iter().find(|len| !(1..=PART_LEN_MAX).contains(*len)) {
            let allowed = format!("1 to {PART_LEN_MAX} bytes a block");
            return Err(Error::input("buffers", format!("{len} bytes"), allowed));
        }
        let lanes = Arc::new(ClientLanes {
            session: Arc::clone(self),
            task,
        });
        let seat = self.holding.holder.seat;
        let caller = Caller::There { lens, lanes, seat };
        let mirror = self.mirror(task, keys.len())?;
        let handle = self.core.begin(op, keys.len(), &caller, Some(mirror));
        match op {
            Op::Put => self.core.start_put(pass, namespace, keys, caller, &handle),
            Op::Get => self
                .core
                .start_get(pass, namespace, keys, caller, &handle, options),
        }
        Ok(())
    }

    /// Tells the client each step of a task, which is one of those it may have under way until
    /// nothing here knows of it any more.
    fn mirror(self: &Arc<Session>, task: u64, keys: usize) -> Result<Mirror, Error> {
        let credits = self.holding.allowance.task(keys)?;
        let session = Arc::clone(self);
        Ok(Box::new(move |settled, released| {
            let _until_its_end = &credits;
            session.send(step(task, settled, released));
        }))
    }

    /// Refuses what is the owner's user's alone: it reaches beyond the blocks of who asks.
    pub(crate) fn only_owner(&self, what: &str) -> Result<(), Error> {
        if self.is_trusted {
            return Ok(());
        }
        let own = kvdepot_host::peer::own_uid();
        let allowed = format!("processes of uid {own} alone, which serves the depot");
        Err(Error::input(what, "a process of another user", allowed))
    }

    /// Refuses a call about devices from who may not make it, or who makes many at a time.
    fn may_ask(&self, verb: Verb) -> Result<Credit, Error> {
        if verb != Verb::Devices {
            self.only_owner("devices")?;
        }
        self.holding.allowance.slow()
    }

    /// The client's lanes have stopped.
    fn finish(&self, number: u64, moved: &[Moved]) {
        let Some((count, done)) = self.moves.lock().waiting.remove(&number) else {
            return;
        };
        if moved.len() == count {
            done(moved);
        } else {
            done(&vec![Moved::Failed; count]);
        }
        self.moved.notify_all();
    }

    pub(crate) fn send(&self, frame: Out) {
        self.outbox.send(&self.tasks, frame);
    }

    /// Tells the client that its owner closes, and waits for its lanes; what they are still moving
    /// after `timeout` is given up: its room is not used again.
    pub(crate) fn retire(&self, timeout: Duration) {
        self.send(Out::new(Verb::Closing, 0));
        let deadline = clock::now().checked_add(timeout);
        let mut moves = self.moves.lock();
        while !moves.waiting.is_empty() || !moves.former.is_empty() {
            let late = match deadline {
                None => {
                    self.moved.wait(&mut moves);
                    false
                }
                Some(deadline) => self.moved.wait_until(&mut moves, deadline).timed_out(),
            };
            if late {
                break;
            }
        }
        drop(moves);
        self.retired.store(true, Ordering::Release);
        self.end_moves(Moved::Abandoned);
        let _shut = self.tasks.shutdown(std::net::Shutdown::Both);
    }

    fn end_moves(&self, moved: Moved) {
        for (count, done) in self.take_moves() {
            done(&vec![moved; count]);
        }
        self.moved.notify_all();
    }

    /// All that are under way; no other is begun.
    fn take_moves(&self) -> Vec<Moving> {
        let mut moves = self.moves.lock();
        moves.over = true;
        let waiting = std::mem::take(&mut moves.waiting).into_values();
        let former = std::mem::take(&mut moves.former);
        waiting.chain(former).collect()
    }

    /// The process has another session now, which takes what it holds, and what its lanes are
    /// still moving. It has heard the answer to call `heard`, and none behind that.
    pub(crate) fn hand_over(&self, heard: u64) -> Inheritance {
        // Ends the answer that is being sent.
        let _shut = self.calls.shutdown(std::net::Shutdown::Both);
        *self.handed_over.lock() = true;
        self.retired.store(true, Ordering::Release);
        let moves = self.take_moves();
        let _shut = self.tasks.shutdown(std::net::Shutdown::Both);
        Inheritance {
            holding: Arc::clone(&self.holding),
            moves,
            unheard: self.holding.take_unheard(heard),
        }
    }

    /// Answers a call, and enters what that gives the client; gives it back, and answers false,
    /// when nobody hears it.
    pub(crate) fn answer(&self, call: u64, out: Out, granted: Granted) -> bool {
        let handed_over = self.handed_over.lock();
        let sent = !*handed_over && out.send(&self.calls).is_ok();
        // Entered while the client reads: it names what it got in its next call at the earliest.
        let nobodys = match sent {
            true => self.holding.grant(call, granted),
            false => granted,
        };
        drop(handed_over);
        give_back(&self.core, nobodys);
        sent
    }

    /// Takes back what a call could not commit: it is still the client's to abort. One that has
    /// another session has done so.
    pub(crate) fn put_back(&self, reservations: Vec<Reservation>) {
        let handed_over = self.handed_over.lock();
        let nobodys = match *handed_over {
            true => Granted::Reservations(reservations),
            false => self.holding.put_back(reservations),
        };
        drop(handed_over);
        give_back(&self.core, nobodys);
    }

    /// Nothing of the client touches a place any more: ends all that it held, once no mover that
    /// worked for it does either.
    fn release(&self) {
        self.end_moves(Moved::Failed);
        let seat = self.holding.holder.seat;
        let mut patience = LATE;
        loop {
            match self.roster.close(seat, patience) {
                Ok(true) => break,
                Ok(false) if self.retired.load(Ordering::Acquire) => return,
                Ok(false) if patience == LATE => {
                    let (pid, held) = (self.process.identity().pid, self.holding.count());
                    tracing::warn!(
                        pid,
                        held,
                        "a client is gone, and a process that moves its blocks is not: what it \
                         held is kept meanwhile"
                    );
                    patience = LOOK;
                }
                Ok(false) => {}
                Err(error) => {
                    tracing::error!(%error, "what a client held cannot be given back");
                    return;
                }
            }
        }
        self.holding.end(&self.core);
        // Last: its calls may be at it until its end.
        self.core.forget_listener(seat);
    }
}

/// Ends moves that have not been, or of which nothing is known.
fn fail(count: usize, done: MovesDone) {
    done(&vec![Moved::Failed; count]);
}

/// The lanes of one task's client.
struct ClientLanes {
    session: Arc<Session>,
    task: u64,
}

impl Lanes for ClientLanes {
    fn move_blocks(&self, blocks: &[(usize, Place)], done: MovesDone) {
        let session = &self.session;
        let number = session.next_move.fetch_add(1, Ordering::Relaxed);
        {
            let mut moves = session.moves.lock();
            if moves.over || moves.broken {
                drop(moves);
                return fail(blocks.len(), done);
            }
            moves.waiting.insert(number, (blocks.len(), done));
        }
        let mut out = Out::new(Verb::Move, number);
        out.reserve(blocks.len() * 64);
        out.long(self.task);
        out.word(blocks.len() as u32);
        for (index, place) in blocks {
            out.word(*index as u32);
            out.place(place);
        }
        session.send(out);
    }
}

/// The outcomes as they travel: their order is the protocol's.
pub(crate) const OUTCOMES: [Outcome; 9] = [
    Outcome::Pending,
    Outcome::Done,
    Outcome::Miss,
    Outcome::Corrupt,
    Outcome::Length,
    Outcome::Full,
    Outcome::Dropped,
    Outcome::Closed,
    // Earlier releases take it for a miss.
    Outcome::Declined,
];

fn step(task: u64, settled: &[(usize, Outcome)], released: usize) -> Out {
    let mut out = Out::new(Verb::Step, task);
    out.word(released as u32);
    out.word(settled.len() as u32);
    for (index, outcome) in settled {
        let code = OUTCOMES.iter().position(|known| known == outcome);
        out.word(*index as u32);
        out.byte(code.unwrap_or_default() as u8);
    }
    out
}

/// What became of moves, for their owner.
pub(crate) fn moved(number: u64, moved: &[Moved]) -> Out {
    let mut out = Out::new(Verb::Moved, number);
    out.word(moved.len() as u32);
    for moved in moved {
        let (kind, checksum) = match moved {
            Moved::Done(checksum) => (1, *checksum),
            Moved::Corrupt => (2, Checksum::default()),
            Moved::Failed | Moved::Abandoned => (0, Checksum::default()),
        };
        out.byte(kind);
        out.bytes(&checksum.0);
    }
    out
}
