//! A client's connections to one owner: calls that wait for their answer, and the tasks whose
//! blocks the owner tells the lanes here to move (`moves`). A link that breaks is not mended; the
//! client makes another.

mod moves;

use std::collections::HashMap;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use kvdepot_arena::gate::Pass;
use kvdepot_arena::patience::{self, Limit, SLICE, Wait, Why};
use kvdepot_arena::{Error, Key, NamespaceId, clock};
use kvdepot_host::cpu::spawn;
use kvdepot_store::{BlockBuffers, GetOptions, Op, Outcome, Task};
use parking_lot::Mutex;

use crate::client::calls::{Line, Paced, Said, Telling};
use crate::client::stores::Stores;
use crate::frame::hello::{Former, Role};
use crate::frame::verbs::{self as say, Asks, Says, Verb};
use crate::frame::{Frame, Out};
use crate::line::credit::{Allowance, Credit};
use crate::line::incoming::Incoming;
use crate::line::outbox::Outbox;
use crate::mover::Mover;
use crate::mover::attach::{PATIENCE, shake_hands};
use moves::Opener;

/// How often the connection of the tasks is looked at while nothing comes.
const TICK: Duration = Duration::from_millis(250);

/// Two connections to one owner.
pub(crate) struct Link {
    /// Among the owner's clients.
    pub(crate) number: u64,
    /// Its socket carries the calls.
    pub(crate) mover: Mover,
    line: Line,
    /// Longest wait for an answer. An owner that takes longer is taken for one that is gone.
    limit: Arc<Limit>,
    stores: Arc<Stores>,
    tasks: Mutex<Tasks>,
    socket: UnixStream,
    outbox: Outbox,
    next: AtomicU64,
    /// What the owner lets this process have under way.
    allowance: Allowance,
    /// Opens files for moves.
    opener: Opener,
    /// Nothing new is begun: the owner closes, or is gone.
    ending: AtomicBool,
}

#[derive(Default)]
struct Tasks {
    under_way: HashMap<u64, Arc<Call>>,
    /// Whoever waits for a slow call.
    asking: HashMap<u64, Sender<Frame>>,
    /// No step comes any more.
    over: bool,
}

/// A put or get of this process.
pub(crate) struct Call {
    op: Op,
    options: GetOptions,
    /// Whose prompt the blocks of a put continue.
    after: Option<Key>,
    namespace: NamespaceId,
    keys: Vec<Key>,
    buffers: BlockBuffers,
    task: Task,
    /// Moves of it that lanes here are at.
    moving: Mutex<usize>,
    /// Of what this process may have under way, given back with the call.
    credits: Option<[Credit; 2]>,
    _pass: Pass,
}

impl Link {
    /// Attaches, and starts the threads that read and write the tasks' connection. `number` and
    /// `said` are those of a link that this one follows, or 0. `ended` runs when it is over.
    pub(crate) fn new(
        socket: &Path,
        lanes: Option<usize>,
        (limit, stores): (Arc<Limit>, Arc<Stores>),
        (number, said): (u64, Said),
        ended: impl FnOnce(&Arc<Link>) + Send + 'static,
    ) -> Result<Arc<Link>, Error> {
        let io = |source| Error::Io {
            path: socket.into(),
            source,
        };
        let patience = limit.get().min(PATIENCE);
        let heard = said.heard;
        let role = Role::Client(Former { number, heard });
        let (calls, welcome) = shake_hands(socket, role, patience)?;
        calls.set_read_timeout(Some(SLICE)).map_err(io)?;
        let client = welcome.terms.client;
        let allowance = Allowance::new(welcome.terms.limits);
        let mover = Mover::new(socket, calls, welcome, role, lanes)?;
        let (tasks, _) = shake_hands(socket, Role::Tasks(client), patience)?;
        tasks.set_read_timeout(Some(TICK)).map_err(io)?;
        tasks.set_write_timeout(None).map_err(io)?;
        let link = Arc::new(Link {
            number: client,
            mover,
            line: Line::new(said.asked),
            limit,
            stores,
            tasks: Mutex::new(Tasks::default()),
            socket: tasks,
            outbox: Outbox::default(),
            next: AtomicU64::new(1),
            allowance,
            opener: Opener::default(),
            ending: AtomicBool::new(false),
        });
        let reader = Arc::clone(&link);
        let _thread = spawn("kvdepot-tasks", move || {
            reader.read();
            reader.end();
            ended(&reader);
        })
        .map_err(io)?;
        let writer = Arc::clone(&link);
        let write = move || writer.outbox.run(&writer.socket);
        let _thread = spawn("kvdepot-outbox", write).map_err(|source| {
            link.end();
            io(source)
        })?;
        Ok(link)
    }

    /// Asks, and waits for the answer.
    pub(crate) fn call<C: Asks, T>(
        &self,
        call: &C,
        read: impl FnOnce(C::Answer<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.exchange(call, read).map_err(|error| self.named(error))
    }

    /// An error that says whose owner it is about: what reads and writes frames does not know.
    pub(crate) fn named(&self, error: Error) -> Error {
        match error {
            Error::Peer { reason, .. } => Error::Peer {
                socket: self.mover.at().display().to_string(),
                reason,
            },
            other => other,
        }
    }

    fn exchange<C: Asks, T>(
        &self,
        call: &C,
        read: impl FnOnce(C::Answer<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let out = Out::new(call);
        let answered = self.line.call(&self.mover.socket, out, self.limit.get());
        let frame = answered.map_err(|failed| {
            if failed.broken {
                self.end();
            }
            failed.error
        })?;
        // What the owner answers with an error leaves the connection sound.
        read(frame.answer::<C>()?)
    }

    /// Tells without waiting; what cannot be told here any more is handed back.
    pub(crate) fn tell(&self, frame: Vec<u8>) -> Option<Vec<u8>> {
        match self.line.tell(&self.mover.socket, frame) {
            Telling::Told => None,
            Telling::Broken => {
                self.shut();
                None
            }
            Telling::Over(frame) => Some(frame),
        }
    }

    /// What was not told, and is not told here any more; and how far the calls have come, of which
    /// none hears of a grant here any more.
    pub(crate) fn part(&self) -> (Vec<Vec<u8>>, Said) {
        self.line.end()
    }

    /// Breaks the connections: the thread that reads them ends the link.
    fn shut(&self) {
        let _shut = self.mover.socket.shutdown(Shutdown::Both);
        let _shut = self.socket.shutdown(Shutdown::Both);
    }

    /// Asks what may take long; `None` when the link ends first.
    ///
    /// # Errors
    /// [`Error::Interrupted`], and those that are the answer.
    pub(crate) fn ask_slowly<C: Asks, T>(
        &self,
        call: &C,
        read: impl FnOnce(C::Answer<'_>) -> T,
    ) -> Result<Option<T>, Error> {
        let _credit = self.allowance.slow()?;
        if self.is_ending() {
            return Ok(None);
        }
        let (number, answered) = self.ask_aside(Out::new(call));
        loop {
            match answered.recv_timeout(SLICE) {
                Ok(frame) => {
                    let answer = frame.answer::<C>().map(read);
                    return answer.map(Some).map_err(|error| self.named(error));
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) if patience::is_interrupted() => {
                    self.tasks.lock().asking.remove(&number);
                    return Err(Error::Interrupted);
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Asks on the connection of the tasks: the number, and where the answer comes, unless the link
    /// ends first.
    fn ask_aside(&self, out: Out) -> (u64, Receiver<Frame>) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = channel();
        let mut tasks = self.tasks.lock();
        if !tasks.over {
            tasks.asking.insert(number, answer);
            drop(tasks);
            self.outbox.send(&self.socket, out.number(number));
        }
        (number, answered)
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    /// Starts a put or get. When the link is at its end, every key of the task has its outcome.
    pub(crate) fn start(&self, call: Call) {
        let (namespace, keys) = (call.namespace, call.keys.as_slice().into());
        let lens = (0..call.keys.len()).map(|index| call.buffers.bytes(index).into());
        let lens = lens.collect();
        let out = match call.op {
            Op::Put => Out::new(&say::Put {
                namespace,
                after: call.after.map(|key| key.0),
                keys,
                lens,
            }),
            Op::Get => Out::new(&say::Get {
                namespace,
                prefix: call.options.prefix,
                keys,
                lens,
            }),
        };
        let count = call.keys.len();
        self.begin(call, count, out);
    }

    /// Starts a task without bytes, which `asked` says to the owner.
    pub(crate) fn start_plain(
        &self,
        asked: &impl Says,
        namespace: NamespaceId,
        keys: usize,
        task: &Task,
        pass: Pass,
    ) {
        let none = BlockBuffers::default();
        let how = (Op::Get, GetOptions::default(), None);
        let call = Call::new(how, namespace, Vec::new(), none, task.clone(), pass);
        self.begin(call, keys, Out::new(asked));
    }

    fn begin(&self, mut call: Call, keys: usize, out: Out) {
        if keys == 0 {
            // It is done, and no step of it would ever come.
            return;
        }
        match self.allowance.task(keys) {
            Ok(credits) => call.credits = Some(credits),
            // As the owner would refuse it.
            Err(_) => return self.give_up(&call),
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let call = Arc::new(call);
        {
            let mut tasks = self.tasks.lock();
            if tasks.over || self.is_ending() {
                drop(tasks);
                return self.give_up(&call);
            }
            tasks.under_way.insert(number, call);
        }
        self.outbox.send(&self.socket, out.number(number));
    }

    fn read(self: &Arc<Link>) {
        let mut incoming = Incoming::default();
        loop {
            // Since when an answer is awaited that proves that the owner is there.
            let mut pinged = None;
            match incoming.next(Paced::new(&self.socket, || self.watch(&mut pinged))) {
                Ok(Some(frame)) if frame.verb.is_slow() || frame.verb == Verb::Goodbye => {
                    let asking = self.tasks.lock().asking.remove(&frame.number);
                    // Whoever asked may have been interrupted.
                    let _heard = asking.map(|asking| asking.send(frame));
                }
                Ok(Some(frame)) => {
                    if let Err(error) = self.handle(&frame).map_err(|error| self.named(error)) {
                        tracing::error!(%error, "protocol error: invalid message from server; \
                                                 disconnecting");
                        return;
                    }
                }
                Ok(None) | Err(_) => return,
            }
        }
    }

    /// Nothing comes: whether to go on waiting. An owner that says nothing for too long while
    /// something waits for it, not even that it is there, is stopped or stuck.
    fn watch(&self, pinged: &mut Option<Instant>) -> Result<(), Why> {
        self.line.hear(&self.mover.socket);
        if self.line.flush(&self.mover.socket).is_err() {
            return Err(Why::Late);
        }
        let waiting = {
            let tasks = self.tasks.lock();
            !tasks.under_way.is_empty() || !tasks.asking.is_empty()
        };
        match *pinged {
            _ if !waiting && !self.line.has_told() => *pinged = None,
            None => {
                self.outbox.send(&self.socket, Out::new(&say::Ping {}));
                *pinged = Some(clock::now());
            }
            Some(since) if since.elapsed() > self.limit.get() => {
                tracing::warn!(
                    "server not responding; all lookups are misses until the server responds"
                );
                return Err(Why::Late);
            }
            Some(_) => {}
        }
        Ok(())
    }

    fn handle(self: &Arc<Link>, frame: &Frame) -> Result<(), Error> {
        match frame.verb {
            Verb::Move => {
                let asked: say::Move<'_> = frame.read()?;
                let call = self.tasks.lock().under_way.get(&asked.task).cloned();
                let Some(call) = call else { return Ok(()) };
                self.start_move(frame.number, call, &asked)?;
            }
            Verb::Step => {
                let say::Step { released, settled } = frame.read()?;
                let settled: Vec<(usize, Outcome)> = settled.iter().map(Into::into).collect();
                self.step(frame.number, &settled, released as usize);
            }
            Verb::Refused => {
                let say::Refused { error } = frame.read()?;
                tracing::debug!(error = %Error::from(error), "the server rejected a task");
                let call = self.tasks.lock().under_way.remove(&frame.number);
                call.iter().for_each(|call| self.give_up(call));
            }
            // Its next owner waits for all who may write it.
            Verb::Removed => self.mover.forget(frame.number as u32),
            Verb::Ping => {}
            Verb::Closing => self.ending.store(true, Ordering::Release),
            verb => {
                return Err(Error::input(
                    "verb",
                    format!("{verb:?}"),
                    "a verb of a task",
                ));
            }
        }
        Ok(())
    }

    /// A step of a task, as its owner took it.
    fn step(&self, number: u64, settled: &[(usize, Outcome)], released: usize) {
        let Some(call) = self.tasks.lock().under_way.get(&number).cloned() else {
            return;
        };
        // Keys of a get were settled here when their bytes had arrived.
        call.task.repeat(settled, released);
        if call.task.is_done() {
            self.tasks.lock().under_way.remove(&number);
        }
    }

    /// Ends the link: no answer and no step comes any more. Lanes that are moving go on, and their
    /// tasks end with them.
    pub(crate) fn end(&self) {
        self.ending.store(true, Ordering::Release);
        self.shut();
        self.outbox.end();
        let calls: Vec<Arc<Call>> = {
            let mut tasks = self.tasks.lock();
            tasks.over = true;
            tasks.asking.clear();
            tasks.under_way.drain().map(|(_, call)| call).collect()
        };
        for call in calls {
            if *call.moving.lock() == 0 {
                self.give_up(&call);
            }
        }
    }

    fn give_up(&self, call: &Call) {
        if call.op == Op::Put && !call.task.is_done() {
            self.stores.drop_put();
        }
        call.give_up();
    }

    /// Says that the lanes of the links before this one have stopped.
    pub(crate) fn say_quiet(&self) {
        self.outbox.send(&self.socket, Out::new(&say::Quiet {}));
    }

    /// Says that nothing here touches a place any more, and ends. The lanes must have stopped.
    /// False when the connection broke first. An owner that is late with its answer has been told:
    /// it reads what has reached it.
    pub(crate) fn goodbye(&self) -> bool {
        let (_, answered) = self.ask_aside(Out::new(&say::Goodbye {}));
        let wait = Wait::new(self.limit.get());
        let heard = loop {
            match answered.recv_timeout(SLICE) {
                Err(RecvTimeoutError::Timeout) if wait.goes_on().is_ok() => {}
                answer => break !matches!(answer, Err(RecvTimeoutError::Disconnected)),
            }
        };
        let _shut = self.socket.shutdown(Shutdown::Read);
        heard
    }
}

impl Call {
    pub(crate) fn new(
        (op, options, after): (Op, GetOptions, Option<Key>),
        namespace: NamespaceId,
        keys: Vec<Key>,
        buffers: BlockBuffers,
        task: Task,
        pass: Pass,
    ) -> Call {
        Call {
            op,
            options,
            after,
            namespace,
            keys,
            buffers,
            task,
            moving: Mutex::new(0),
            credits: None,
            _pass: pass,
        }
    }

    /// Ends the keys without an outcome: their owner is gone, and no lane is at them.
    fn give_up(&self) {
        let outcome = match self.op {
            Op::Put => Outcome::Dropped,
            Op::Get => Outcome::Miss,
        };
        self.task.abandon(outcome);
    }
}
