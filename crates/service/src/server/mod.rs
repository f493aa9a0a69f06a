//! The owner's end of the socket. `accept` is who knocks there, `session` a client as its owner
//! sees it, which answers its calls (`calls`, and `slow` what may take minutes) and notes what it
//! holds (`holding`). What it gets to reach the bytes with is `media`. Whether it lives is
//! `liveness`, and for whom movers are at work `roster`. `http` is the HTTP server in addition to
//! the socket.

mod accept;
mod calls;
mod holding;
mod http;
mod liveness;
mod media;
mod roster;
mod session;
mod slow;

use std::collections::HashMap;
use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use kvdepot_arena::{Error, clock};
use kvdepot_host::fork::Unshared;
use kvdepot_host::peer::{Credentials, Process};
use kvdepot_host::socket::{self, Bound, PassedSocket};
use kvdepot_host::{cpu, dirs, limits, peer};
use kvdepot_store::config::{Config, Socket};
use kvdepot_store::placement::Holder;
use kvdepot_store::{About, Core, Serves};
use parking_lot::Mutex;

use crate::frame::Out;
use crate::frame::hello::{self, Role, Terms};
use crate::frame::verbs::Removed;
use crate::line::credit::LIMITS;
use crate::socket_path;
use holding::Ticket;
use http::Http;
use liveness::{Liveness, Local};
use roster::Roster;
use session::{Inheritance, Session};

/// How long the answer to a process that attaches may take to be written, which is none where the
/// socket's memory takes it.
const PATIENCE: Duration = Duration::from_secs(1);

/// Most processes, or connections of one, that are attached at a time: each has threads here, and
/// descriptors.
const ATTACHED_MAX: usize = 1024;
/// Most of one process.
const ATTACHED_EACH_MAX: usize = 256;
/// As many descriptors of this process for each one that is attached: it has up to 5, and files of
/// tiers may take half of all.
const ATTACHED_PART: usize = 16;

/// Hands out the media's descriptors until it is stopped.
pub(crate) struct Server {
    bound: Bound,
    stop: Arc<AtomicBool>,
    /// The listening socket once more, to end its accept.
    listener: Unshared<UnixStream>,
    /// Ends the wait for connections, also where the socket goes on without this process.
    waker: Unshared<UnixStream>,
    thread: Mutex<Option<JoinHandle<()>>>,
    clients: Arc<Mutex<Clients>>,
    http: Option<Http>,
}

struct Owner {
    core: Arc<Core>,
    about: Arc<About>,
    slice_size: u64,
    lanes: Option<usize>,
    /// Whether the socket's mode lets other users in.
    others: bool,
    stop: Arc<AtomicBool>,
    woken: Unshared<UnixStream>,
    /// Open as long as this process serves, so that movers notice its end.
    connections: Mutex<Vec<(u32, Unshared<UnixStream>)>>,
    clients: Arc<Mutex<Clients>>,
    roster: Arc<Roster>,
    watch: Watch,
}

/// How it is known whether the client with this seat lives.
type Watch = Box<dyn Fn(Process, Arc<Roster>, u64) -> Box<dyn Liveness> + Send>;

/// The clients that have attached, by number.
#[derive(Default)]
struct Clients {
    /// The connection of their tasks is still to come.
    halves: HashMap<u64, Half>,
    sessions: HashMap<u64, Arc<Session>>,
    stopped: bool,
}

struct Half {
    calls: Unshared<UnixStream>,
    from: Credentials,
    seat: u64,
    /// The last call whose answer the client has heard.
    heard: u64,
    /// It was here before.
    is_back: bool,
}

impl Server {
    /// Refuses a socket that cannot be made. Whether somebody listens there is seen at the start.
    pub(crate) fn check(config: &Config) -> Result<(), Error> {
        http::check(config)?;
        let Some(path) = place(config, 0)? else {
            return Ok(());
        };
        socket_path::check("socket", &path)?;
        socket_path::check_directory("socket", &path)
    }

    /// Listens where the configuration says, on the socket that was passed if there is one; `None`
    /// when it says `off`.
    pub(crate) fn start(
        config: &Config,
        core: &Arc<Core>,
        about: &About,
        passed: Option<PassedSocket>,
    ) -> Result<Option<Server>, Error> {
        let local = |process, roster, seat| {
            let local = Local {
                process,
                roster,
                seat,
            };
            Box::new(local) as Box<dyn Liveness>
        };
        Server::start_watching(config, core, about, (Box::new(local), passed))
    }

    fn start_watching(
        config: &Config,
        core: &Arc<Core>,
        about: &About,
        (watch, passed): (Watch, Option<PassedSocket>),
    ) -> Result<Option<Server>, Error> {
        let session = about.session;
        let Some(path) = place(config, session)? else {
            return Ok(None);
        };
        let io = |source| Error::Io {
            path: path.clone(),
            source,
        };
        let (listener, bound, mode) = match passed {
            Some(passed) => passed.into_bound().map_err(io)?,
            None => {
                let (listener, bound) = listen(&path, config.socket_mode)?;
                (listener, bound, config.socket_mode)
            }
        };
        let http = http::start(config, core, about, &path).inspect_err(|_| bound.remove())?;
        let twin = Unshared::open(|| listener.try_clone()).map_err(io)?;
        let (waker, woken) = Unshared::pair().map_err(io)?;
        let stop = Arc::new(AtomicBool::new(false));
        let clients = Arc::new(Mutex::new(Clients::default()));
        let told = Arc::clone(&clients);
        core.on_removal.get_or_init(|| {
            Box::new(move |number| {
                for session in told.lock().sessions.values() {
                    session.send(Out::new(&Removed {}).number(number.into()));
                }
            })
        });
        let owner = Owner {
            core: Arc::clone(core),
            about: Arc::new(about.clone()),
            slice_size: config.slice_size,
            lanes: config.lanes,
            others: mode & 0o077 != 0,
            stop: Arc::clone(&stop),
            woken,
            connections: Mutex::new(Vec::new()),
            clients: Arc::clone(&clients),
            roster: Arc::new(Roster::new()?),
            watch,
        };
        let thread = std::thread::Builder::new()
            .name("kvdepot-share".into())
            .spawn(move || owner.run(&listener))
            .map_err(io)?;
        Ok(Some(Server {
            bound,
            stop,
            listener: twin.map(|twin| OwnedFd::from(twin).into()),
            waker,
            thread: Mutex::new(Some(thread)),
            clients,
            http,
        }))
    }
}

impl Serves for Server {
    fn path(&self) -> &Path {
        self.bound.path()
    }

    fn http(&self) -> Option<String> {
        let http = self.http.as_ref();
        http.map(|http| http.address().to_owned())
    }

    fn retire(&self, timeout: Duration) {
        let sessions: Vec<Arc<Session>> = {
            let mut clients = self.clients.lock();
            clients.stopped = true;
            clients.halves.clear();
            clients.sessions.values().cloned().collect()
        };
        let begun = clock::now();
        for session in sessions {
            session.retire(timeout.saturating_sub(begun.elapsed()));
        }
    }

    fn stop(&self) {
        let Some(thread) = self.thread.lock().take() else {
            return;
        };
        self.http.iter().for_each(Http::stop);
        self.stop.store(true, Ordering::SeqCst);
        // Ends the accept, whatever has become of the path. The service manager keeps its socket
        // for the next server, and new connections wait in the queue of the socket.
        if !self.bound.is_passed() {
            let _ended = self.listener.shutdown(Shutdown::Both);
        }
        let _woken = self.waker.shutdown(Shutdown::Both);
        if thread.join().is_err() {
            tracing::error!(
                "internal error: socket thread panicked; other processes could not attach"
            );
        }
        self.bound.remove();
    }
}

/// Where a depot listens, if it does.
fn place(config: &Config, session: u64) -> Result<Option<PathBuf>, Error> {
    Ok(match &config.socket {
        Socket::Off => None,
        Socket::At(path) => Some(path.clone()),
        Socket::Auto => Some(auto_place(session)?),
    })
}

fn auto_place(session: u64) -> Result<PathBuf, Error> {
    let runtime = dirs::runtime_dir().map_err(|error| {
        let allowed = format!(
            "a path or off, because this user has no directory for sockets (set XDG_RUNTIME_DIR): \
             {error}"
        );
        Error::config("socket", "auto", allowed)
    })?;
    Ok(runtime.join(format!("{session:016x}.sock")))
}

/// Binds, and removes what owners that were killed have left beside it.
fn listen(path: &Path, mode: u32) -> Result<(Unshared<UnixListener>, Bound), Error> {
    socket_path::check("socket", path)?;
    if let Some(runtime) = socket_path::runtime_of(path) {
        let swept = socket::sweep(runtime);
        http::sweep(runtime);
        if swept > 0 {
            tracing::info!(swept, "removed sockets of killed servers");
        }
    }
    socket_path::listen("socket", path, mode)
}

impl Owner {
    fn run(&self, listener: &UnixListener) {
        let may = |from: &Credentials| self.may_attach(from);
        let until = (&*self.stop, &*self.woken);
        accept::run(listener, until, may, |socket, from, role| {
            self.serve(socket, from, role)
        });
    }

    fn may_attach(&self, from: &Credentials) -> Result<(), Error> {
        let own = peer::own_uid();
        if from.uid == own || self.others {
            return Ok(());
        }
        Err(refused(format!(
            "uid {} is not allowed to attach; allowed: uid {own} (set socket_mode to allow other \
             users)",
            from.uid
        )))
    }

    fn serve(&self, socket: &UnixStream, from: Credentials, role: Role) -> Result<(), Error> {
        let io = |source| Error::Io {
            path: "cannot set up the socket".into(),
            source,
        };
        socket.set_nonblocking(false).map_err(io)?;
        socket.set_write_timeout(Some(PATIENCE)).map_err(io)?;
        let (pid, uid) = (from.pid, from.uid);
        let asks = (role, uid == peer::own_uid());
        tracing::debug!(pid, uid, ?role, "a process attached");
        let kept = Unshared::open(|| socket.try_clone()).map_err(io)?;
        match role {
            Role::Read | Role::Write => {
                self.has_room(pid)?;
                self.welcome(socket, asks, 0, 0)?;
                self.connections.lock().push((pid, kept));
                Ok(())
            }
            Role::Client(former) => {
                let known = {
                    let clients = self.clients.lock();
                    // Not welcomed and refused after that: it would take its owner for one that
                    // is back.
                    if clients.stopped {
                        return Err(Error::Closed(""));
                    }
                    clients.former(former.number, pid).cloned()
                };
                if known.is_none() {
                    self.has_room(pid)?;
                }
                // A process that comes back keeps its number, and with it what it holds.
                let is_back = known.is_some();
                let (number, seat) = match known {
                    Some(session) => (former.number, session.holding.holder.seat),
                    None => (self.number(), self.roster.seat()),
                };
                self.welcome(socket, asks, number, seat)?;
                let half = Half {
                    calls: kept,
                    from,
                    seat,
                    heard: former.heard,
                    is_back,
                };
                self.clients.lock().halves.insert(number, half);
                Ok(())
            }
            Role::Tasks(number) => {
                let half = {
                    let mut clients = self.clients.lock();
                    // A connection of another process leaves the first half of the client in place.
                    let half = clients.halves.get(&number);
                    let is_own = half.is_some_and(|half| half.from.pid == pid);
                    is_own.then(|| clients.halves.remove(&number)).flatten()
                };
                let Some(half) = half else {
                    let reason =
                        format!("client {number} is unknown or belongs to another process");
                    return Err(refused(reason));
                };
                let process = Process::of_peer(socket)?;
                self.welcome(socket, asks, number, half.seat)?;
                self.start(number, process, half, kept)
            }
        }
    }

    /// Refuses one more of a process, or of all, than there may be.
    fn has_room(&self, pid: u32) -> Result<(), Error> {
        let mut pids: Vec<u32> = {
            let mut connections = self.connections.lock();
            connections.retain(|(_, socket)| is_open(socket));
            connections.iter().map(|(pid, _)| *pid).collect()
        };
        let mut clients = self.clients.lock();
        // Those that have gone before their second connection came.
        clients.halves.retain(|_, half| is_open(&half.calls));
        pids.extend(clients.halves.values().map(|half| half.from.pid));
        let sessions = clients.sessions.values();
        pids.extend(sessions.map(|session| session.client.who()));
        let own = pids.iter().filter(|other| **other == pid).count();
        let most = ATTACHED_MAX.min((limits::descriptors() / ATTACHED_PART).max(1));
        if pids.len() < most && own < ATTACHED_EACH_MAX {
            return Ok(());
        }
        Err(refused(format!(
            "{} clients and workers are attached, {own} of them from process {pid}; allowed: at \
             most {most}, and {ATTACHED_EACH_MAX} per process (see the open-file limit of the \
             server)",
            pids.len()
        )))
    }

    fn welcome(
        &self,
        socket: &UnixStream,
        (role, is_trusted): (Role, bool),
        client: u64,
        seat: u64,
    ) -> Result<(), Error> {
        let media = match role {
            Role::Tasks(_) => Vec::new(),
            _ => media::offered(&self.core, role, is_trusted)?,
        };
        let terms = Terms {
            session: self.about.session,
            client,
            seat,
            slice_size: self.slice_size,
            lanes: self.lanes,
            limits: LIMITS,
        };
        hello::send_welcome(socket, &terms, &self.roster.descriptor()?, &media)
    }

    /// One that a process cannot guess.
    fn number(&self) -> u64 {
        use std::hash::{BuildHasher, RandomState};
        RandomState::new().hash_one(clock::now()).max(1)
    }

    /// Starts the two threads of a client.
    fn start(
        &self,
        number: u64,
        process: Process,
        half: Half,
        tasks: Unshared<UnixStream>,
    ) -> Result<(), Error> {
        let io = |source| Error::Io {
            path: "cannot set up the socket".into(),
            source,
        };
        let calls = half.calls;
        for socket in [&calls, &tasks] {
            socket.set_nonblocking(false).map_err(io)?;
            socket.set_read_timeout(None).map_err(io)?;
            socket.set_write_timeout(None).map_err(io)?;
        }
        // Before anything is handed over: without them the client would have nobody.
        let begin = self.start_threads(number).map_err(io)?;
        let (session, unheard) = {
            let mut clients = self.clients.lock();
            if clients.stopped {
                return Err(Error::Closed(""));
            }
            let former = clients.former(number, half.from.pid);
            let mut inherited = match former.map(|former| former.hand_over(half.heard)) {
                Some(Some(inherited)) => inherited,
                // Its seat is nobody's any more.
                Some(None) => return Err(ended(number)),
                None if half.is_back => return Err(ended(number)),
                None => Inheritance::none(Holder {
                    session: self.about.session,
                    seat: half.seat,
                }),
            };
            let unheard = inherited.take_unheard();
            let client = (self.watch)(process, Arc::clone(&self.roster), half.seat);
            let client = (client, half.from.uid == peer::own_uid());
            let sockets = [calls, tasks];
            let session = Arc::new(Session::new(
                Arc::clone(&self.core),
                client,
                inherited,
                sockets,
            ));
            clients.sessions.insert(number, Arc::clone(&session));
            (session, unheard)
        };
        begin(session, unheard);
        Ok(())
    }

    /// The two threads of a client, which begin when they are told for whom; if that is nobody,
    /// they end.
    fn start_threads(
        &self,
        number: u64,
    ) -> io::Result<impl FnOnce(Arc<Session>, Vec<Ticket>) + use<>> {
        let (of_calls, calls) = mpsc::channel::<(Arc<Session>, Vec<Ticket>)>();
        let about = Arc::clone(&self.about);
        let answer = move || {
            if let Ok((session, unheard)) = calls.recv() {
                calls::run(&session, unheard, &about);
            }
        };
        cpu::spawn("kvdepot-calls", answer)?;
        let (of_tasks, tasks) = mpsc::channel::<Arc<Session>>();
        let clients = Arc::clone(&self.clients);
        let serve = move || {
            if let Ok(session) = tasks.recv() {
                session.run();
                let _shut = session.calls.shutdown(Shutdown::Both);
                clients.lock().forget(number, &session);
            }
        };
        cpu::spawn("kvdepot-client", serve)?;
        Ok(move |session: Arc<Session>, unheard| {
            // Nothing ends them before.
            let _sent = of_calls.send((Arc::clone(&session), unheard));
            let _sent = of_tasks.send(session);
        })
    }
}

impl Clients {
    /// The session that a process had before its connection broke.
    fn former(&self, number: u64, pid: u32) -> Option<&Arc<Session>> {
        let session = self.sessions.get(&number);
        session.filter(|session| session.client.who() == pid && !session.is_over())
    }

    /// A session is over; its process may have another one by now.
    fn forget(&mut self, number: u64, session: &Arc<Session>) {
        let mine = |known: &Arc<Session>| Arc::ptr_eq(known, session);
        if self.sessions.get(&number).is_some_and(mine) {
            self.sessions.remove(&number);
        }
    }
}

fn ended(number: u64) -> Error {
    refused(format!(
        "client {number} has ended; connect again as a new client"
    ))
}

fn refused(reason: String) -> Error {
    Error::Peer {
        socket: "(peer)".into(),
        reason,
    }
}

/// Whether the other end still has its connection.
fn is_open(socket: &UnixStream) -> bool {
    peer::is_connected(socket).unwrap_or(false)
}
