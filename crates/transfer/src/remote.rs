//! Memory of a peer that was opened by its name.

use std::sync::Arc;
use std::time::{Duration, Instant};

use zerocopy::FromBytes;

use crate::error::Error;
use crate::flight::Flight;
use crate::grant::Rights;
use crate::local::{Lends, Mapped, Movers, Neighbour, Neighbours};
use crate::memory::Memory;
use crate::peer::Peer;
use crate::rdma::{Exposes, Fabric, Known, Link, Ranges};
use crate::window::{Granted, Window};
use crate::wire::{self, BYTES_MAX, Bytes, NAME_MAX, Verb};

/// A name that nothing is published under: names of engines of kvdepot's own are longer, and those
/// of others are text.
const NOWHERE: &[u8] = &[0];

/// Memory of a peer that was opened with [`Engine::open`](crate::Engine::open). The peer is
/// notified when the last clone is dropped.
///
/// # Examples
/// ```
/// # use std::sync::Arc;
/// # use kvdepot_media::Buffer;
/// # use kvdepot_transfer::Config;
/// use kvdepot_transfer::{Engine, Rights};
///
/// # let target = Arc::new(Engine::start(Config::default())?);
/// # let memory = Buffer::from_vec(vec![7; 4096]);
/// # let _published = target.publish(b"pages", &[memory], Rights::READ, None)?;
/// # let address = target.address().expect("it listens");
/// let engine = Engine::start(Config { listen: None, ..Config::default() })?;
/// let remote = engine.open(address, b"pages")?;
/// assert_eq!((remote.len(), remote.rights()), (4096, Rights::READ));
/// assert_eq!((remote.peer(), remote.lasts()), (address, None));
/// # Ok::<_, kvdepot_transfer::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Remote(pub(crate) Arc<Opened>);

#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) peer: Arc<Peer>,
    pub(crate) window: Arc<Window>,
    pub(crate) lasts: Option<Duration>,
    /// Whether the target has lent it by its number, and takes it back by itself.
    is_lent: bool,
    /// The same memory, where this process reaches it by itself.
    near: Option<Near>,
    /// The same memory, as devices of both ends know it.
    far: Option<Far>,
}

#[derive(Debug)]
struct Far {
    link: Arc<Link>,
    ranges: Ranges,
    /// When the grant is over.
    until: Option<Instant>,
}

#[derive(Debug)]
struct Near {
    neighbour: Arc<Neighbour>,
    number: u32,
    mapped: Arc<Mapped>,
    /// When what was granted is over: nobody says so to those that have it mapped.
    until: Option<Instant>,
}

impl Near {
    /// What a neighbour lends under a name, if that is what was opened: another may have got the
    /// name meanwhile, with other memory.
    fn find(neighbour: Arc<Neighbour>, window: &Window, until: Option<Instant>) -> Option<Near> {
        let (number, mapped) = neighbour.map(&window.name)?;
        if !mapped.is_like(window.len, window.rights) {
            neighbour.let_go(number);
            return None;
        }
        Some(Near {
            neighbour,
            number,
            mapped,
            until,
        })
    }

    fn is_there(&self) -> bool {
        let over = self.until.is_some_and(|until| Instant::now() >= until);
        !over && self.mapped.is_there()
    }
}

impl Opened {
    /// Whether this process reaches it by itself.
    pub(crate) fn is_near(&self) -> bool {
        self.near.as_ref().is_some_and(Near::is_there)
    }

    /// Whether devices of both ends reach it.
    pub(crate) fn is_far(&self) -> bool {
        self.far.as_ref().is_some_and(Far::is_there)
    }

    /// Gives a device of this end a slice; it is given back where there is none.
    pub(crate) fn post(self: &Arc<Self>, lane: usize, flight: Flight) -> Result<(), Flight> {
        match self.far.as_ref().filter(|far| far.is_there()) {
            Some(far) => {
                let opened: Arc<dyn Exposes> = Arc::<Self>::clone(self);
                far.link.submit(lane, flight, &opened);
                Ok(())
            }
            None => Err(flight),
        }
    }

    /// Queues a slice for the threads that copy.
    pub(crate) fn lend(self: &Arc<Self>, movers: &Movers, flight: Flight) {
        let opened: Arc<dyn Lends> = Arc::<Self>::clone(self);
        movers.submit(flight, &opened);
    }
}

impl Exposes for Opened {
    fn ranges(&self) -> Option<&Ranges> {
        self.far.as_ref().map(|far| &far.ranges)
    }

    fn by_connection(&self, flight: Flight) {
        self.peer.submit(0, flight);
    }
}

impl Lends for Opened {
    fn carry(&self, flight: Flight) -> Result<(), Flight> {
        match &self.near {
            Some(near) if near.is_there() => near.mapped.carry(flight),
            _ => Err(flight),
        }
    }

    fn by_connection(&self, flight: Flight) {
        self.peer.submit(0, flight);
    }
}

impl Far {
    fn is_there(&self) -> bool {
        let over = self.until.is_some_and(|until| Instant::now() >= until);
        !over && self.link.is_up()
    }

    /// What devices of the target know of a grant, where there are such.
    fn reach(
        peer: &Arc<Peer>,
        (fabric, memory): (&Arc<Fabric>, &Arc<Memory>),
        (grant, len): (Granted, u64),
        until: Option<Instant>,
    ) -> Option<Far> {
        let link = peer.link(fabric, memory)?;
        let timeout = peer.shake().timeout;
        let first = wire::Row::new(grant.number, 0, 0);
        let most = Bytes::Upto(BYTES_MAX);
        let asked = peer.ask_of(Verb::Expose, first, Vec::new(), most, timeout);
        // Another engine that is there by now has other grants under its numbers.
        let (_, body) = asked
            .ok()
            .filter(|(answer, _)| answer.target == grant.target)?;
        let known = <[Known]>::ref_from_bytes(&body).ok()?;
        let ranges = Ranges::new(known, link.devices(), len)?;
        Some(Far {
            link,
            ranges,
            until,
        })
    }
}

impl Remote {
    /// Opens what is published under a name.
    pub(crate) fn open(
        peer: &Arc<Peer>,
        name: &[u8],
        timeout: Duration,
        neighbours: Option<&Neighbours>,
        fabric: Option<(&Arc<Fabric>, &Arc<Memory>)>,
    ) -> Result<Remote, Error> {
        if name.is_empty() || name.len() > NAME_MAX {
            let shown = String::from_utf8_lossy(name).into_owned();
            return Err(Error::input("name", shown, "1 to 1024 bytes"));
        }
        let most = Bytes::Just(size_of::<wire::Opened>() as u64);
        // The answer is made later, so that this end does not take it for longer than it lasts.
        let asked = Instant::now();
        let (grant, body) = peer.ask(Verb::Open, name.to_vec(), most, timeout)?;
        let opened = wire::Opened::read_from_bytes(&body);
        let opened = opened.map_err(|_| Error::Unreachable {
            peer: peer.address().to_string(),
            reason: "the peer sent an unexpected response; use the same release on all hosts"
                .to_owned(),
        })?;
        let rights = Rights::of(opened.rights.get());
        let window = Window::new(name, grant, opened.len.get(), rights);
        let lasts = Some(opened.lasts_ms.get()).filter(|ms| *ms != u64::MAX);
        let lasts = lasts.map(Duration::from_millis);
        let until = lasts.and_then(|lasts| asked.checked_add(lasts));
        let neighbour = neighbours.and_then(|all| all.find(peer));
        let near = neighbour.and_then(|neighbour| Near::find(neighbour, &window, until));
        let far = match &near {
            Some(_) => None,
            None => {
                fabric.and_then(|fabric| Far::reach(peer, fabric, (grant, opened.len.get()), until))
            }
        };
        Ok(Remote(Arc::new(Opened {
            near,
            far,
            peer: Arc::clone(peer),
            window: Arc::new(window),
            lasts,
            is_lent: false,
        })))
    }

    /// What a peer has lent under a number, which it has told by an answer of its `target`. Unknown
    /// once the peer has taken it back: it has no name to be opened by again.
    pub(crate) fn lent(peer: &Arc<Peer>, grant: Granted, len: u64, rights: Rights) -> Remote {
        Remote(Arc::new(Opened {
            near: None,
            far: None,
            peer: Arc::clone(peer),
            window: Arc::new(Window::new(NOWHERE, grant, len, rights)),
            lasts: None,
            is_lent: true,
        }))
    }

    /// Returns the length of the memory, in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "nothing empty is published")]
    pub fn len(&self) -> u64 {
        self.0.window.len
    }

    /// Returns the rights of the grant.
    #[must_use]
    pub fn rights(&self) -> Rights {
        self.0.window.rights
    }

    /// Returns the remaining time of the grant as of its opening, or `None` if it lasts until it is
    /// withdrawn.
    #[must_use]
    pub fn lasts(&self) -> Option<Duration> {
        self.0.lasts
    }

    /// Returns true if transfers use RDMA devices.
    #[must_use]
    pub fn is_rdma(&self) -> bool {
        self.0.is_far()
    }

    /// Returns true if the memory is on the same host, and this process copies without a
    /// connection.
    #[must_use]
    pub fn is_near(&self) -> bool {
        self.0.is_near()
    }

    /// Returns the address of the peer.
    #[must_use]
    pub fn peer(&self) -> std::net::SocketAddr {
        self.0.peer.address()
    }
}

/// Who has answered a call.
pub(crate) struct Lender {
    peer: Arc<Peer>,
    target: u32,
}

impl Lender {
    /// The engine that was met as `target` at a peer's address.
    pub(crate) fn new(peer: Arc<Peer>, target: u32) -> Lender {
        Lender { peer, target }
    }

    /// Which of the engines that were met at its address it is: another number is another process.
    pub(crate) fn target(&self) -> u32 {
        self.target
    }

    /// What it has lent to this engine, by the number that its answer has told.
    pub(crate) fn lent(&self, number: u32, len: u64, rights: Rights) -> Remote {
        let target = self.target;
        Remote::lent(&self.peer, Granted { target, number }, len, rights)
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Some(near) = &self.near {
            near.neighbour.let_go(near.number);
        }
        if let Some(grant) = self.window.known().filter(|_| !self.is_lent) {
            self.peer.let_go(grant);
        }
    }
}
