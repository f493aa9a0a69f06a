//! A client, as its owner sees it: what it holds, what its lanes are moving, and what ends it.
//!
//! Pins, reservations and moves end by the client's word, or with its process; a connection that
//! breaks ends nothing, because whoever was writing may still write.

mod moves;

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use kvdepot_arena::verdict::Moved;
use kvdepot_arena::{Error, Key, NamespaceId, clock};
use kvdepot_host::Condvar;
use kvdepot_host::fork::Unshared;
use kvdepot_media::PART_LEN_MAX;
use kvdepot_store::placement::Holder;
use kvdepot_store::{Caller, Core, GetOptions, Mirror, Op, Outcome, Reservation};
use parking_lot::Mutex;
use zerocopy::little_endian::U64;

use crate::frame::verbs::{self as say, Verb};
use crate::frame::{Frame, Out};
use crate::line::credit::Credit;
use crate::line::incoming::Incoming;
use crate::line::outbox::Outbox;
use crate::server::holding::{Granted, Holding, Ticket, give_back};
use crate::server::liveness::{Liveness, WhileAlive};
use crate::server::session::moves::{ClientLanes, Moves, Moving, fail};
use crate::server::slow;

/// How often a process without a connection, or movers of a dead one, are looked at for another
/// reason to stop waiting: nothing waits for this but the end of a thread.
const LOOK: Duration = Duration::from_secs(1);

/// Copies of a batch end in less.
const LATE: Duration = Duration::from_secs(5);

/// One client process.
pub(crate) struct Session {
    pub(crate) core: Arc<Core>,
    pub(crate) client: Box<dyn Liveness>,
    pub(crate) holding: Arc<Holding>,
    /// Whether it runs as the owner's own user.
    pub(crate) is_trusted: bool,
    moves: Mutex<Moves>,
    moved: Condvar,
    next_move: AtomicU64,
    pub(crate) calls: Unshared<UnixStream>,
    tasks: Unshared<UnixStream>,
    outbox: Outbox,
    /// What the client holds is not this session's to end: the owner has closed, or the process
    /// has another.
    retired: AtomicBool,
    /// Whose what the client holds is. Taken while an answer is sent and what it grants is entered,
    /// so that the next session knows all of it.
    whose: Mutex<Whose>,
    /// The client has ended here. Beside `whose`, which is held while an answer is sent, as long as
    /// the client likes.
    over: AtomicBool,
}

/// Which session what a client holds belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whose {
    This,
    /// The process has another one: nobody hears what is granted here.
    Next,
    /// It is given back, or about to be, and is nobody's any more.
    Nobody,
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

/// What a client's task does.
enum How {
    /// Stores blocks, which continue a prompt behind a block.
    Put {
        after: Option<Key>,
    },
    Get(GetOptions),
}

impl Session {
    pub(crate) fn new(
        core: Arc<Core>,
        (client, is_trusted): (Box<dyn Liveness>, bool),
        inherited: Inheritance,
        [calls, tasks]: [Unshared<UnixStream>; 2],
    ) -> Session {
        let moves = Moves {
            former: inherited.moves,
            ..Moves::default()
        };
        Session {
            core,
            client,
            is_trusted,
            holding: inherited.holding,
            moves: Mutex::new(moves),
            moved: Condvar::new(),
            next_move: AtomicU64::new(1),
            calls,
            tasks,
            outbox: Outbox::default(),
            retired: AtomicBool::new(false),
            whose: Mutex::new(Whose::This),
            over: AtomicBool::new(false),
        }
    }

    /// Serves the tasks of the client until its end, and ends what it held.
    pub(crate) fn run(self: &Arc<Session>) {
        std::thread::scope(|scope| {
            let writes = || {
                self.outbox.run(&self.tasks);
                // What could not be written is lost: the client has to learn that.
                let _shut = self.tasks.shutdown(std::net::Shutdown::Both);
            };
            let writer = std::thread::Builder::new().spawn_scoped(scope, writes);
            let mut end = match writer {
                Ok(_) => self.listen(),
                Err(error) => {
                    tracing::error!(%error,
                        "cannot start a thread for a client; the client is disconnected");
                    End::Broken
                }
            };
            // From here on nobody hears of a move: those that are under way go on.
            self.moves.lock().broken = true;
            let _shut = self.tasks.shutdown(std::net::Shutdown::Both);
            self.outbox.end();
            if end == End::Broken && !self.retired.load(Ordering::Acquire) {
                let pid = self.client.who();
                tracing::warn!(
                    pid,
                    "client disconnected; the server keeps the client's pins and reservations until \
                     the client reconnects or exits"
                );
                while end == End::Broken && !self.retired.load(Ordering::Acquire) {
                    match self.client.wait_end(LOOK) {
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
        let mut tasks = WhileAlive::new(self.client.as_ref(), &self.tasks);
        loop {
            match incoming.next(&mut tasks) {
                Ok(Some(frame)) if frame.verb == Verb::Goodbye => {
                    self.send(Out::answer::<say::Goodbye>(frame.number, &()));
                    return End::Goodbye;
                }
                Ok(Some(frame)) => {
                    if let Err(error) = self.handle(&frame) {
                        tracing::warn!(%error, "protocol error: invalid request from client; \
                                                disconnecting");
                        return End::Broken;
                    }
                }
                Ok(None) | Err(_) if tasks.has_ended => return End::Dead,
                Ok(None) | Err(_) => return End::Broken,
            }
        }
    }

    fn handle(self: &Arc<Session>, frame: &Frame) -> Result<(), Error> {
        let number = frame.number;
        match frame.verb {
            Verb::Prefetch => {
                let call: say::Prefetch<'_> = frame.read()?;
                let started = call.keys.allowed().and_then(|keys| {
                    let mirror = self.mirror(number, keys.len())?;
                    let seat = self.holding.holder.seat;
                    self.core.prefetch(seat, call.namespace, keys, Some(mirror))
                });
                self.refuse(number, started.map(|_| ()));
            }
            Verb::Lookup => {
                let call: say::Lookup<'_> = frame.read()?;
                let started = call.keys.allowed().and_then(|keys| {
                    let mirror = self.mirror(number, keys.len())?;
                    self.core.lookup(call.namespace, keys, Some(mirror))
                });
                self.refuse(number, started.map(|_| ()));
            }
            Verb::Put => {
                let say::Put {
                    namespace,
                    after,
                    keys,
                    lens,
                } = frame.read()?;
                let how = How::Put {
                    after: after.map(Key),
                };
                let keys = keys.allowed();
                let started = keys.and_then(|keys| self.start(how, number, namespace, keys, &lens));
                self.refuse(number, started);
            }
            Verb::Get => {
                let call: say::Get<'_> = frame.read()?;
                // Staging is the client's own affair.
                let mut options = GetOptions::default();
                options.prefix = call.prefix;
                let (how, id) = (How::Get(options), call.namespace);
                let keys = call.keys.allowed();
                let started = keys.and_then(|keys| self.start(how, number, id, keys, &call.lens));
                self.refuse(number, started);
            }
            Verb::Moved => {
                let call: say::Moved<'_> = frame.read()?;
                let moved: Vec<Moved> = call.moved.iter().map(Moved::from).collect();
                self.finish(number, &moved);
            }
            Verb::Ping => {
                let say::Ping {} = frame.read()?;
                self.send(Out::answer::<say::Ping>(number, &()));
            }
            Verb::Quiet => {
                let say::Quiet {} = frame.read()?;
                let former = std::mem::take(&mut self.moves.lock().former);
                former
                    .into_iter()
                    .for_each(|(count, done)| fail(count, done));
                self.moved.notify_all();
            }
            verb if verb.is_slow() => return self.answer_aside(frame),
            verb => {
                return Err(Error::Peer {
                    socket: String::new(),
                    reason: format!(
                        "the request {verb:?} is not allowed in a task; use the same release for \
                         client and server"
                    ),
                });
            }
        }
        Ok(())
    }

    /// Says that a task was refused, if it was.
    fn refuse(&self, task: u64, started: Result<(), Error>) {
        if let Err(error) = started {
            let error = (&error).into();
            self.send(Out::new(&say::Refused { error }).number(task));
        }
    }

    /// Answers what may take long, in a thread of its own.
    fn answer_aside(self: &Arc<Session>, frame: &Frame) -> Result<(), Error> {
        let credit = match self.may_ask(frame.verb) {
            Ok(credit) => credit,
            Err(error) => {
                self.send(Out::refusal(frame.verb, frame.number, &error));
                return Ok(());
            }
        };
        let (session, frame) = (Arc::clone(self), frame.clone());
        let run = move || {
            let answer = slow::answer(&session.core, &frame);
            drop(credit);
            let refused = |error| Out::refusal(frame.verb, frame.number, &error);
            session.send(answer.unwrap_or_else(refused));
        };
        let name = "kvdepot-devices".to_owned();
        let spawned = std::thread::Builder::new().name(name).spawn(run);
        spawned.map(|_| ()).map_err(|source| Error::Io {
            path: "cannot start a thread".into(),
            source,
        })
    }

    /// Starts a put or get whose bytes the client's lanes move.
    fn start(
        self: &Arc<Session>,
        how: How,
        task: u64,
        namespace: NamespaceId,
        keys: &[Key],
        lens: &[U64],
    ) -> Result<(), Error> {
        if keys.len() != lens.len() {
            let what = format!("{} lengths", lens.len());
            return Err(Error::input(
                "buffers",
                what,
                format!("{}, one per key", keys.len()),
            ));
        }
        let lens: Vec<u64> = lens.iter().copied().map(U64::get).collect();
        let keys = keys.to_vec();
        let op = match how {
            How::Put { .. } => Op::Put,
            How::Get(_) => Op::Get,
        };
        let pass = self.core.gate.enter_as(op.name(), keys.len())?;
        if let Some(len) = lens.iter().find(|len| !(1..=PART_LEN_MAX).contains(*len)) {
            let allowed = format!("1 to {PART_LEN_MAX} bytes per block");
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
        let core = &self.core;
        match how {
            How::Put { after } => core.start_put(pass, namespace, (after, keys), caller, &handle),
            How::Get(options) => core.start_get(pass, namespace, keys, caller, &handle, options),
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
        let allowed = format!("processes of uid {own}, the user of the server");
        Err(Error::input(what, "a process of another user", allowed))
    }

    /// Refuses a call about devices from who may not make it, or who makes many at a time.
    fn may_ask(&self, verb: Verb) -> Result<Credit, Error> {
        if verb != Verb::Devices {
            self.only_owner("devices")?;
        }
        self.holding.allowance.slow()
    }

    pub(crate) fn send(&self, frame: Out) {
        self.outbox.send(&self.tasks, frame);
    }

    /// Tells the client that its owner closes, and waits for its lanes; what they are still moving
    /// after `timeout` is given up: its room is not used again.
    pub(crate) fn retire(&self, timeout: Duration) {
        self.send(Out::new(&say::Closing {}));
        let deadline = clock::now().checked_add(timeout);
        let mut moves = self.moves.lock();
        let mut late = false;
        while !late && (!moves.waiting.is_empty() || !moves.former.is_empty()) {
            late = match deadline {
                None => {
                    self.moved.wait(&mut moves);
                    false
                }
                Some(deadline) => self.moved.wait_until(&mut moves, deadline).timed_out(),
            };
        }
        drop(moves);
        self.retired.store(true, Ordering::Release);
        if late {
            // The client must not hear that a task is over whose bytes its lanes still move: it
            // ends those itself, when they have stopped.
            self.outbox.end();
            let _shut = self.tasks.shutdown(std::net::Shutdown::Both);
        }
        self.end_moves(Moved::Abandoned);
        let _shut = self.tasks.shutdown(std::net::Shutdown::Both);
    }

    /// Whether the client has ended here: who comes back as it is another one.
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Whether the process has another session now.
    pub(crate) fn is_former(&self) -> bool {
        *self.whose.lock() == Whose::Next
    }

    /// The process has another session now, which takes what it holds, and what its lanes are
    /// still moving. It has heard the answer to call `heard`, and none behind that. `None` where
    /// the client has ended meanwhile.
    pub(crate) fn hand_over(&self, heard: u64) -> Option<Inheritance> {
        // Ends the answer that is being sent.
        let _shut = self.calls.shutdown(std::net::Shutdown::Both);
        {
            let mut whose = self.whose.lock();
            if *whose == Whose::Nobody {
                return None;
            }
            *whose = Whose::Next;
        }
        self.retired.store(true, Ordering::Release);
        let moves = self.take_moves();
        let _shut = self.tasks.shutdown(std::net::Shutdown::Both);
        Some(Inheritance {
            holding: Arc::clone(&self.holding),
            moves,
            unheard: self.holding.take_unheard(heard),
        })
    }

    /// The client has heard all that was answered here.
    pub(crate) fn hear(&self) {
        let whose = self.whose.lock();
        // What the next session has granted is not meant.
        if *whose == Whose::This {
            self.holding.hear();
        }
    }

    /// Answers a call, and enters what that gives the client; gives it back, and answers false,
    /// when nobody hears it.
    pub(crate) fn answer(&self, call: u64, out: Out, granted: Granted) -> bool {
        let whose = self.whose.lock();
        let sent = *whose != Whose::Next && out.send(&self.calls).is_ok();
        // Entered while the client reads: it names what it got in its next call at the earliest.
        let nobodys = match sent {
            true => self.holding.grant(call, granted),
            false => granted,
        };
        drop(whose);
        give_back(&self.core, nobodys);
        sent
    }

    /// Takes back what a call could not commit: it is still the client's to abort. One that has
    /// another session has done so.
    pub(crate) fn put_back(&self, reservations: Vec<Reservation>) {
        let whose = self.whose.lock();
        let nobodys = match *whose {
            Whose::Next => Granted::Reservations(reservations),
            _ => self.holding.put_back(reservations),
        };
        drop(whose);
        give_back(&self.core, nobodys);
    }

    /// Nothing of the client touches a place any more: ends all that it held, once no mover that
    /// worked for it does either.
    fn release(&self) {
        // Ends the answer that is being sent: another process may have the socket, too.
        let _shut = self.calls.shutdown(std::net::Shutdown::Both);
        {
            let mut whose = self.whose.lock();
            if *whose == Whose::Next {
                // It watches the client too.
                return;
            }
            *whose = Whose::Nobody;
            self.over.store(true, Ordering::Release);
        }
        if let Err(error) = self.client.fence() {
            tracing::error!(%error,
                "cannot revoke a dead client's access; the client's pins and reservations stay \
                 until the server restarts");
            return;
        }
        self.end_moves(Moved::Failed);
        let seat = self.holding.holder.seat;
        let mut patience = LATE;
        loop {
            match self.client.clear(patience) {
                Ok(true) => break,
                Ok(false) if self.retired.load(Ordering::Acquire) => return,
                Ok(false) if patience == LATE => {
                    let (pid, held) = (self.client.who(), self.holding.count());
                    tracing::warn!(
                        pid,
                        held,
                        "client exited, but one of its workers is running; the client's pins and \
                         reservations are kept until the worker exits"
                    );
                    patience = LOOK;
                }
                Ok(false) => {}
                Err(error) => {
                    tracing::error!(%error,
                        "cannot release a dead client's pins and reservations; their space stays \
                         in use until the server restarts");
                    return;
                }
            }
        }
        self.holding.end(&self.core);
        // Last: its calls may be at it until its end.
        self.core.forget_listener(seat);
    }
}

fn step(task: u64, settled: &[(usize, Outcome)], released: usize) -> Out {
    let step = say::Step {
        released: released as u32,
        settled: settled.iter().map(Into::into).collect(),
    };
    Out::new(&step).number(task)
}
