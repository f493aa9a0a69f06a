//! One process's part in moving bytes: what it registers, publishes, opens and submits.

mod renew;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use kvdepot_host::fork::Origin;
use kvdepot_media::Buffer;
use kvdepot_plan::Limits;
use parking_lot::Mutex;

use crate::batch::{Plan, Request, submit};
use crate::config::{Config, Options};
use crate::error::{Error, Fault};
use crate::grant::{Grant, Names, Rights};
use crate::local::{Door, Lends, Movers, Neighbours};
use crate::memory::{Memory, Region};
use crate::peer::{Core, Dialer, Peer, Peers, Secrets, Shake, random};
use crate::rdma::Fabric;
use crate::remote::{Lender, Remote};
use crate::serve::{Answers, Lent, Server, Terms};
use crate::stats::Stats;
use crate::task::{Progress, Task, Then, begin};
use crate::tls::Secured;
use crate::watch::{Found, Watch};
use crate::wire::{BYTES_MAX, Bytes, Verb};

/// Largest number of requests in a batch.
pub const REQUESTS_MAX: usize = 1_000_000;

/// Transfer engine of one process. Dropping it closes it.
///
/// # Examples
/// ```
/// use kvdepot_media::Buffer;
/// use kvdepot_transfer::{Config, Engine};
///
/// let engine = Engine::start(Config::default())?;
/// let pages = Buffer::from_vec(vec![0; 4096]);
/// let registered = engine.register(&[pages.clone()])?; // batches may use the memory now
/// assert!(engine.address().is_some() && engine.stats().requests == 0);
/// drop(registered);
/// engine.close();
/// # Ok::<_, kvdepot_transfer::Error>(())
/// ```
///
/// The [crate documentation](crate) has an example with a transfer, and [`Rights`] one with a
/// grant.
pub struct Engine {
    config: Config,
    id: [u8; 16],
    /// What it is known by to those that it connects to.
    pub(crate) initiator: [u8; 16],
    memory: Arc<Memory>,
    names: Arc<Names>,
    server: Option<Server>,
    door: Option<Door>,
    movers: Arc<Movers>,
    neighbours: Arc<Neighbours>,
    fabric: Option<Arc<Fabric>>,
    secrets: Arc<ArcSwap<Secrets>>,
    /// All that connections were ever protected by: each has threads.
    secured: Mutex<Vec<Arc<Secured>>>,
    peers: Arc<Peers>,
    watch: Watch,
    origin: Origin,
    is_closed: AtomicBool,
    requests: AtomicU64,
    bytes: AtomicU64,
}

impl Engine {
    /// Starts an engine.
    ///
    /// # Errors
    /// [`Error::Input`] if an option is not allowed, and [`Error::Io`] if the engine cannot listen.
    pub fn start(config: Config) -> Result<Engine, Error> {
        Engine::answering(config, None)
    }

    /// Starts an engine that responds to the calls of peers with `answers`.
    ///
    /// # Errors
    /// [`Error::Input`] if an option is not allowed, and [`Error::Io`] if the engine cannot listen.
    pub fn answering(config: Config, answers: Option<Arc<dyn Answers>>) -> Result<Engine, Error> {
        config.check()?;
        let origin = Origin::here()
            .map_err(std::io::Error::other)
            .map_err(Error::io("start"))?;
        let secured = config.tls.as_ref().map(Secured::read);
        let secured = secured.transpose()?.map(Arc::new);
        let tokens = [config.token.clone()];
        let secrets = Arc::new(ArcSwap::from_pointee(Secrets::new(
            &tokens,
            secured.clone(),
        )));
        let names = Arc::new(Names::default());
        let peers: Arc<Peers> = Arc::default();
        let fabric = Fabric::open(config.devices()).map_err(|error| {
            let names = config.devices().unwrap_or_default().join(", ");
            let allowed = "names of usable RDMA devices, or an empty list for TCP only";
            Error::input("rdma", format!("{names} ({error})"), allowed)
        })?;
        let fabric = fabric.map(Arc::new);
        let movers = Arc::new(Movers::new(config.streams));
        let neighbours = Arc::<Neighbours>::default();
        let (watched, near) = (Arc::clone(&peers), Arc::clone(&movers));
        let lenders = Arc::clone(&neighbours);
        let look = move |now, kept| {
            let peers = watched.all();
            near.cancel(|flight| flight.is_late(now));
            // Each of them, whatever the others say.
            let busy = peers.iter().filter(|peer| peer.expire(now)).count();
            let mut is_known = !peers.is_empty();
            drop(peers);
            if kept {
                watched.let_go(now);
                is_known |= lenders.let_go();
            }
            match busy > 0 || !near.is_idle() {
                true => Found::Busy,
                false if is_known => Found::Kept,
                false => Found::Nothing,
            }
        };
        let watch = Watch::start(look).map_err(Error::io("start a thread"))?;
        let mut engine = Engine {
            id: random()?,
            initiator: random()?,
            memory: Arc::default(),
            names: Arc::clone(&names),
            server: None,
            door: None,
            movers,
            neighbours,
            fabric: fabric.clone(),
            secrets,
            secured: Mutex::new(secured.into_iter().collect()),
            peers,
            watch,
            origin,
            is_closed: AtomicBool::new(false),
            requests: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            config,
        };
        if let Some(address) = engine.config.listen {
            let shake = engine.shake();
            if engine.config.is_neighbourly() {
                // Without one, neighbours come by the network.
                engine.door = Door::open(shake.clone(), Arc::clone(&names)).ok();
            }
            let terms = Terms {
                shake,
                credit: engine.config.window as u32,
                connections_max: engine.config.connections_max,
                answers,
                fabric,
            };
            engine.server = Some(Server::start(address, names, terms)?);
        }
        Ok(engine)
    }

    fn shake(&self) -> Shake {
        Shake {
            engine: self.id,
            initiator: self.initiator,
            secrets: Arc::clone(&self.secrets),
            timeout: self.config.timeout,
        }
    }

    /// Returns the address that the engine listens on, or `None` if it does not listen.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.server.as_ref().map(Server::address)
    }

    /// Returns the ID of the engine, 16 random bytes, by which its initiators recognize it.
    #[must_use]
    pub fn id(&self) -> [u8; 16] {
        self.id
    }

    fn check(&self) -> Result<(), Error> {
        match self.is_closed.load(Ordering::Acquire) || !self.origin.is_here() {
            true => Err(Error::Closed),
            false => Ok(()),
        }
    }

    /// Registers memory of this process for use in batches, until the returned value is dropped.
    /// Batches in progress at that time keep the memory until they end.
    ///
    /// # Errors
    /// [`Error::Input`] if a buffer is registered already or is not memory of this process; then
    /// nothing is registered.
    pub fn register(&self, buffers: &[Buffer]) -> Result<Registered, Error> {
        self.check()?;
        let regions = self.memory.register(buffers)?;
        Ok(Registered {
            memory: Arc::clone(&self.memory),
            fabric: self.fabric.clone(),
            regions,
        })
    }

    /// Publishes memory of this process under a name, so that peers can use it with these `rights`.
    ///
    /// The grant consists of `buffers` in their order. It ends when the returned value is dropped,
    /// or after `lasts`; `None` is for no time limit. `name` has 1 to 1024 bytes.
    ///
    /// # Errors
    /// [`Error::Input`] if the name is in use, or the memory does not allow the rights.
    pub fn publish(
        self: &Arc<Self>,
        name: &[u8],
        buffers: &[Buffer],
        rights: Rights,
        lasts: Option<Duration>,
    ) -> Result<Published, Error> {
        self.check()?;
        let grant = self.names.publish(name, buffers, rights, lasts)?;
        Ok(Published {
            engine: Arc::clone(self),
            name: name.to_vec(),
            grant,
        })
    }

    /// Publishes memory under a random name of 32 bytes, like [`Engine::publish`]. Every peer that
    /// receives the name has the rights.
    ///
    /// # Errors
    /// [`Error::Input`] if the memory does not allow the rights.
    pub fn grant(
        self: &Arc<Self>,
        buffers: &[Buffer],
        rights: Rights,
        lasts: Option<Duration>,
    ) -> Result<Published, Error> {
        self.publish(&random::<32>()?, buffers, rights, lasts)
    }

    /// Opens memory that the engine at `peer` has published under `name`.
    ///
    /// # Errors
    /// [`Error::Unreachable`] if the peer does not respond, and [`Error::Refused`] if it rejects
    /// the request, for example because the name is unknown.
    pub fn open(&self, peer: SocketAddr, name: &[u8]) -> Result<Remote, Error> {
        self.check()?;
        let fabric = self.fabric.as_ref().map(|fabric| (fabric, &self.memory));
        let neighbours = Some(&*self.neighbours).filter(|_| self.config.is_neighbourly());
        Remote::open(
            &self.peer(peer)?,
            name,
            self.config.timeout,
            neighbours,
            fabric,
        )
    }

    /// Sends `call`, at most 64 MiB, to the [`Answers`] of the engine at `peer`, and returns the
    /// response.
    ///
    /// # Errors
    /// [`Error::Input`] if `call` is too long, [`Error::Unreachable`] if the peer does not respond,
    /// and [`Error::Refused`] if it rejects the call.
    pub fn call(&self, peer: SocketAddr, call: Vec<u8>) -> Result<Vec<u8>, Error> {
        self.converse(peer, call, self.config.timeout)
            .map(|(answer, _)| answer)
    }

    /// As [`Engine::call`]; and who has answered, whose grants the answer may name.
    pub(crate) fn converse(
        &self,
        peer: SocketAddr,
        call: Vec<u8>,
        within: Duration,
    ) -> Result<(Vec<u8>, Lender), Error> {
        self.check()?;
        if call.len() as u64 > BYTES_MAX {
            return Err(Error::input(
                "call",
                format!("{} bytes", call.len()),
                "at most 64MiB",
            ));
        }
        let peer = self.peer(peer)?;
        peer.note_call();
        let most = Bytes::Upto(BYTES_MAX);
        let (granted, answer) = peer.ask(Verb::Call, call, most, within)?;
        let target = granted.target;
        Ok((answer, Lender::new(peer, target)))
    }

    /// Grants memory to one initiator; see [`Lent`]. `None` where it is not connected.
    ///
    /// # Errors
    /// [`Error::Input`] where the memory does not allow it.
    pub(crate) fn lend(
        &self,
        initiator: [u8; 16],
        buffers: &[Buffer],
        rights: Rights,
    ) -> Result<Option<Lent>, Error> {
        self.check()?;
        let server = self.server.as_ref();
        server.map_or(Ok(None), |server| server.lend(initiator, buffers, rights))
    }

    /// As [`Engine::submit_then`], of memory that is not registered: `region` has all that the
    /// requests name. `then` is told what has become of them.
    pub(crate) fn submit_of<'r>(
        &self,
        requests: impl ExactSizeIterator<Item = Request<'r>>,
        options: Options,
        region: Region,
        then: Then,
    ) -> Result<Task, Error> {
        self.launch_of(&Memory::of(region), requests, options, Some(then), false)
    }

    /// Checks that the engine at `peer` responds.
    ///
    /// # Errors
    /// [`Error::Unreachable`] if the peer does not respond, and [`Error::Refused`] if it rejects
    /// the request.
    pub fn ping(&self, peer: SocketAddr) -> Result<(), Error> {
        self.check()?;
        let peer = self.peer(peer)?;
        peer.ask(Verb::Ping, Vec::new(), Bytes::Just(0), self.config.timeout)
            .map(drop)
    }

    fn peer(&self, address: SocketAddr) -> Result<Arc<Peer>, Error> {
        let config = &self.config;
        self.peers.find(address, config.streams, |first, fenced| {
            self.check()?;
            let dialer = Dialer {
                address,
                shake: self.shake(),
            };
            let limits = (config.window, config.retries);
            let core = Core::new(dialer, self.origin, limits, config.summed());
            // It is looked at from now on, also without a task.
            self.watch.begin();
            Ok(Peer::new(core, (first, config.streams), fenced))
        })
    }

    /// Forgets a peer: transfers in progress with it fail, and its connections are closed.
    pub fn forget(&self, peer: SocketAddr) {
        if self.origin.is_here() {
            self.peers.forget(peer);
        }
    }

    /// Submits a batch, and returns its [`Task`].
    ///
    /// # Errors
    /// [`Error::Input`] if there are more than [`REQUESTS_MAX`] requests, and [`Error::Closed`] if
    /// the engine is closed. An invalid request has its own [`Status`](crate::Status).
    pub fn submit<'r>(
        &self,
        requests: impl ExactSizeIterator<Item = Request<'r>>,
        options: Options,
    ) -> Result<Task, Error> {
        self.launch(requests, options, None, false)
    }

    /// Submits a batch, and calls `then` when the engine no longer uses the memory of the batch.
    ///
    /// The thread that finishes last calls `then`. The callback must not wait, and must not drop
    /// the last handle of the engine, which would end that thread.
    ///
    /// # Errors
    /// Errors of [`Engine::submit`]; `then` is not called.
    pub fn submit_then<'r>(
        &self,
        requests: impl ExactSizeIterator<Item = Request<'r>>,
        options: Options,
        then: impl FnOnce() + Send + 'static,
    ) -> Result<Task, Error> {
        self.launch(requests, options, Some(Box::new(move |_| then())), false)
    }

    /// Submits a batch, and waits until it has ended. A small batch is moved by the calling thread,
    /// without waking another one.
    ///
    /// # Errors
    /// Errors of [`Engine::submit`].
    pub fn run<'r>(
        &self,
        requests: impl ExactSizeIterator<Item = Request<'r>>,
        options: Options,
    ) -> Result<Task, Error> {
        let task = self.launch(requests, options, None, true)?;
        let _over = task.wait(None);
        Ok(task)
    }

    fn launch<'r>(
        &self,
        requests: impl ExactSizeIterator<Item = Request<'r>>,
        options: Options,
        then: Option<Then>,
        waits: bool,
    ) -> Result<Task, Error> {
        self.launch_of(&self.memory, requests, options, then, waits)
    }

    fn launch_of<'r>(
        &self,
        memory: &Memory,
        requests: impl ExactSizeIterator<Item = Request<'r>>,
        options: Options,
        then: Option<Then>,
        waits: bool,
    ) -> Result<Task, Error> {
        self.check()?;
        let count = requests.len();
        if count > REQUESTS_MAX {
            return Err(Error::input("requests", count, "at most 1000000"));
        }
        let deadline = options.deadline(Instant::now());
        let (join, task) = begin(Progress::new(count, deadline, options.priority), then);
        self.watch.begin();
        let limits = Limits {
            slice_size: self.config.slice_size,
            tail_merge: self.config.tail_merge,
            lanes: self.config.streams,
            watermark: self.config.watermark,
        };
        let mut plan = Plan::new(&join, &self.movers, self.initiator, limits, waits);
        let mut bytes = 0_u64;
        memory.look(|memory| {
            for (number, request) in requests.enumerate() {
                if plan.add(number as u32, &request, memory) {
                    bytes = bytes.saturating_add(request.len);
                }
            }
        });
        self.requests.fetch_add(count as u64, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        // Again: whoever made the requests may have taken longer than it stays awake for.
        self.watch.begin();
        if let Some((remote, lane, flight)) = plan.finish() {
            let carried = match remote.is_near() {
                true => Lends::carry(remote.as_ref(), flight),
                false if remote.is_far() => Err(flight),
                false => remote.peer.carry(flight),
            };
            if let Err(flight) = carried {
                submit(&remote, &self.movers, lane, flight);
            }
        }
        Ok(task)
    }

    /// Cancels a task, and waits until the engine no longer uses its memory. Transfers that are
    /// done stay done.
    pub fn cancel(&self, task: &Task) {
        if !self.origin.is_here() {
            return;
        }
        task.progress.end(Fault::Cancelled);
        let peers = self.peers.all();
        // A slice that was between two queues is found when it comes to rest.
        while !task.wait(Some(Duration::ZERO)) {
            self.movers.cancel(|flight| flight.is_of(&task.progress));
            peers.iter().for_each(|peer| peer.cancel(&task.progress));
            let _over = task.wait(Some(Duration::from_millis(1)));
        }
    }

    /// Returns the counters of the engine.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let peers = self.peers.all();
        let mut stats = Stats {
            requests: self.requests.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            frames: peers.iter().map(|peer| peer.sent()).sum(),
            peers: peers.len() as u64,
            ..Stats::default()
        };
        for (posts, work_requests) in peers.iter().map(|peer| peer.posted()) {
            stats.posts += posts;
            stats.work_requests += work_requests;
        }
        if let Some(server) = &self.server {
            let counts = server.counts();
            stats.connections = server.connections() as u64;
            stats.refused_greetings = counts.greetings.load(Ordering::Relaxed);
            stats.refused_grants = counts.grants.load(Ordering::Relaxed);
            stats.malformed_frames = counts.frames.load(Ordering::Relaxed);
        }
        stats
    }

    /// Ends all transfers in progress, of this engine and of others with it.
    ///
    /// When the call returns, all threads of the engine have ended, and the engine no longer uses
    /// any memory.
    pub fn close(&self) {
        if !self.origin.is_here() || self.is_closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let peers = self.peers.drain();
        peers.iter().for_each(|peer| peer.close());
        self.movers.close();
        self.neighbours.close();
        if let Some(door) = &self.door {
            door.close();
        }
        if let Some(server) = &self.server {
            server.close();
        }
        for secured in self.secured.lock().drain(..) {
            secured.wait();
        }
        self.watch.close();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.close();
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("address", &self.address())
            .finish_non_exhaustive()
    }
}

/// Registered memory. Dropping the value ends the registration. [`Engine`] has an example.
#[derive(Debug)]
pub struct Registered {
    memory: Arc<Memory>,
    fabric: Option<Arc<Fabric>>,
    regions: Vec<u64>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.memory.forget(&self.regions);
        if let Some(fabric) = &self.fabric {
            fabric.forget(&self.regions);
        }
    }
}

/// Published memory: a grant. Dropping the value withdraws the grant; after that, peers no longer
/// access the memory.
///
/// [`Rights`] has an example.
#[derive(Debug)]
pub struct Published {
    engine: Arc<Engine>,
    name: Vec<u8>,
    grant: Arc<Grant>,
}

impl Published {
    /// Returns the name that peers open.
    #[must_use]
    pub fn name(&self) -> &[u8] {
        &self.name
    }
}

impl Drop for Published {
    fn drop(&mut self) {
        // In a forked child nobody moves anything, and what did has left its locks and counts.
        if !self.engine.origin.is_here() {
            return;
        }
        self.engine.names.withdraw(&self.name, &self.grant, || {
            if let Some(door) = &self.engine.door {
                door.take_back(&self.grant);
            }
            // Last: it waits a moment for connections.
            if let Some(server) = &self.engine.server {
                server.end_users_of(&self.grant);
            }
        });
    }
}
