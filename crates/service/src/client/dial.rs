//! Links to whoever serves at a socket, one after the other: where one breaks, or its owner is
//! gone, a thread looks for another until it has one.
//!
//! To an owner that it had before, this process says as whom, and takes up again what it held. The
//! lanes of links that ended may still be moving then: once they have stopped, the owner is told.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvdepot_arena::patience::Limit;
use kvdepot_arena::{Error, NamespaceId, clock};
use kvdepot_host::Condvar;
use kvdepot_host::cpu;
use kvdepot_store::placement::Holder;
use parking_lot::Mutex;

use crate::client::calls::Said;
use crate::client::link::Link;
use crate::client::stores::Stores;
use crate::frame::Out;
use crate::frame::verbs::Namespace;

/// What is remembered of namespaces, at most: a process uses a few.
const TOLD_MAX: usize = 4096;

/// Pause before an owner that is gone is looked for again: short against its start, and nothing
/// to speak of for the system.
const RETRY: Duration = Duration::from_millis(200);

/// Longest wait, beside that of a call, for the thread that looks for an owner: it makes at most
/// two connections.
const LEAVE_MAX: Duration = Duration::from_secs(10);

/// Most attempts to take leave of an owner whose connections break meanwhile.
const LEAVES: usize = 5;

/// Pause between two looks at lanes of a link that has ended: they copy for milliseconds.
const LOOK: Duration = Duration::from_millis(2);

pub(crate) struct Dial {
    shared: Arc<Shared>,
}

struct Shared {
    socket: PathBuf,
    lanes: Option<usize>,
    limit: Arc<Limit>,
    stores: Arc<Stores>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    link: Option<Arc<Link>>,
    /// Who owned the depot last, and as whom it knew this process.
    owner: u64,
    number: u64,
    /// How far the calls on the links that have ended had come.
    said: Said,
    /// Links that have ended and whose lanes may still be moving.
    former: Vec<Weak<Link>>,
    /// The owner has not been told that they have stopped.
    untold: bool,
    /// A thread looks for another link.
    dialing: bool,
    /// What this process has said of namespaces; a new owner is told again.
    told: Vec<Told>,
    /// Ends of pins and reservations that an owner has not heard of, and as whom they were held:
    /// it keeps those while this process lives, and hears of them when there is a link again.
    owed: Vec<(Holder, Vec<u8>)>,
    closed: bool,
}

/// What a process says of a namespace.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Told {
    Description(NamespaceId, String, Option<String>),
}

impl Told {
    /// Says it to this owner.
    pub(crate) fn say(&self, link: &Link) -> Result<(), Error> {
        match self {
            Told::Description(namespace, description, salt) => {
                let call = Namespace {
                    namespace: *namespace,
                    description,
                    salted: salt.is_some(),
                    salt: salt.as_deref().unwrap_or_default(),
                };
                link.call(&call, Ok)
            }
        }
    }
}

impl State {
    fn live(&self) -> Option<&Arc<Link>> {
        self.link.as_ref().filter(|link| !link.is_ending())
    }

    fn let_go(&mut self, link: &Arc<Link>) {
        self.former.retain(|link| link.strong_count() > 0);
        self.former.push(Arc::downgrade(link));
        self.untold = true;
        let holder = link.mover.holder;
        let (untold, said) = link.part();
        self.said = said;
        let owed = untold.into_iter().map(|frame| (holder, frame));
        self.owed.extend(owed);
    }

    /// Whether no lane of a link that has ended moves anything.
    fn is_quiet(&self) -> bool {
        self.former.iter().all(|link| link.strong_count() == 0)
    }
}

impl Dial {
    /// With the first link.
    pub(crate) fn new(
        socket: &Path,
        lanes: Option<usize>,
        limit: Arc<Limit>,
        stores: Arc<Stores>,
    ) -> Result<(Dial, Arc<Link>), Error> {
        let shared = Arc::new(Shared {
            socket: socket.into(),
            lanes,
            limit,
            stores,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let link = shared.attach()?;
        Ok((Dial { shared }, link))
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.shared.socket
    }

    /// Whether somebody serves there now. Asking begins nothing.
    pub(crate) fn is_live(&self) -> bool {
        self.shared.state.lock().live().is_some()
    }

    /// The link; `None` while nobody serves there.
    pub(crate) fn link(&self) -> Option<Arc<Link>> {
        let state = self.shared.state.lock();
        let link = state.live().cloned();
        let idle = link.is_none() && state.link.is_none() && !state.dialing;
        drop(state);
        if idle {
            // Its thread could not be started before.
            self.shared.dial_aside();
        }
        link
    }

    /// Tells the owner of what `holder` holds that some of it has ended: now, or when it is back.
    pub(crate) fn tell(&self, holder: Holder, out: Out) {
        let mut frame = out.finish();
        loop {
            let mut state = self.shared.state.lock();
            let link = state.live().filter(|link| link.mover.holder == holder);
            let Some(link) = link.cloned() else {
                if state.owner == holder.session && !state.closed {
                    state.owed.push((holder, frame));
                }
                return;
            };
            drop(state);
            match link.tell(frame) {
                Some(untold) => frame = untold,
                None => return,
            }
        }
    }

    /// Has every later owner be told this too.
    pub(crate) fn remember(&self, told: &Told) {
        let known = &mut self.shared.state.lock().told;
        if known.len() < TOLD_MAX && !known.contains(told) {
            known.push(told.clone());
        }
    }

    /// Makes no other link; takes the last one.
    pub(crate) fn end(&self) -> Option<Arc<Link>> {
        let mut state = self.shared.state.lock();
        state.closed = true;
        self.shared.changed.notify_all();
        state.link.take()
    }

    /// Takes leave, after [`Dial::end`] with its link: once no lane of this process touches a
    /// place, what it held is given back. Without a link an owner that is there nevertheless is
    /// told by one that is made for it.
    pub(crate) fn take_leave(&self, link: Option<Arc<Link>>) {
        let mut state = self.shared.state.lock();
        while !state.is_quiet() {
            self.shared.changed.wait_for(&mut state, LOOK);
        }
        // It ends with the attempt that it is at; an owner that answers nothing hears nothing.
        let until = clock::now() + LEAVE_MAX.max(self.shared.limit.get());
        while state.dialing {
            if self
                .shared
                .changed
                .wait_until(&mut state, until)
                .timed_out()
            {
                return;
            }
        }
        let mut former = (state.number, state.said);
        drop(state);
        let until = clock::now().checked_add(self.shared.limit.get());
        let mut link = link.map_or_else(|| self.shared.make(former), Ok);
        for _ in 0..LEAVES {
            match &link {
                Ok(link) if link.goodbye() => return,
                Ok(link) => former = (link.number, link.part().1),
                Err(_) => std::thread::sleep(LOOK),
            }
            if until.is_some_and(|until| clock::now() > until) {
                return;
            }
            link = self.shared.make(former);
        }
    }
}

impl Shared {
    /// Makes a link and uses it.
    fn attach(self: &Arc<Shared>) -> Result<Arc<Link>, Error> {
        let (former, told) = {
            let state = self.state.lock();
            ((state.number, state.said), state.told.clone())
        };
        let link = self.make(former)?;
        let told = told.iter().try_for_each(|one| one.say(&link));
        let mut state = self.state.lock();
        // Whatever becomes of it: that is who this process is now.
        state.number = link.number;
        let owner = link.mover.holder.session;
        if std::mem::replace(&mut state.owner, owner) != owner {
            self.stores.lose_owner();
        }
        if told.is_err() || link.is_ending() || state.closed {
            state.let_go(&link);
            drop(state);
            link.end();
            return Err(told.err().unwrap_or(Error::Closed("")));
        }
        // One whose owner closes may still be there.
        let last = state.link.replace(Arc::clone(&link));
        last.iter().for_each(|last| state.let_go(last));
        // What another owner, or this one under another name, gave has ended with that.
        let owed = std::mem::take(&mut state.owed);
        for (_, frame) in owed.into_iter().filter(|(of, _)| *of == link.mover.holder) {
            let _untold = link.tell(frame);
        }
        drop(state);
        Ok(link)
    }

    fn make(self: &Arc<Shared>, former: (u64, Said)) -> Result<Arc<Link>, Error> {
        let shared = Arc::downgrade(self);
        let shares = (Arc::clone(&self.limit), Arc::clone(&self.stores));
        Link::new(&self.socket, self.lanes, shares, former, move |ended| {
            if let Some(shared) = shared.upgrade() {
                shared.lost(ended);
            }
        })
    }

    /// A link has ended.
    fn lost(self: &Arc<Shared>, ended: &Arc<Link>) {
        let last = {
            let mut state = self.state.lock();
            let last = state.link.take_if(|link| Arc::ptr_eq(link, ended));
            if last.is_none() || state.closed {
                return;
            }
            state.let_go(ended);
            last
        };
        // The last owner's media go with its link: a new owner waits for all who may write them.
        drop(last);
        tracing::warn!(socket = %self.socket.display(), "server disconnected; all lookups are \
                                                         misses until a server listens on the \
                                                         socket again");
        self.dial_aside();
    }

    /// Looks for another link in a thread of its own, unless one does.
    fn dial_aside(self: &Arc<Shared>) {
        {
            let mut state = self.state.lock();
            if state.closed || std::mem::replace(&mut state.dialing, true) {
                return;
            }
        }
        let shared = Arc::clone(self);
        if let Err(error) = cpu::spawn("kvdepot-dial", move || shared.dial()) {
            tracing::warn!(%error, "cannot start the reconnect thread; lookups stay misses");
            self.state.lock().dialing = false;
        }
    }

    /// Looks for another link until there is one whose owner has heard all that is to be told.
    fn dial(self: &Arc<Shared>) {
        let mut state = self.state.lock();
        while !state.closed {
            let pause = match state.live().cloned() {
                Some(link) if state.is_quiet() => {
                    if std::mem::take(&mut state.untold) {
                        link.say_quiet();
                    }
                    break;
                }
                Some(_) => LOOK,
                None => {
                    drop(state);
                    if self.attach().is_ok() {
                        tracing::info!(socket = %self.socket.display(),
                            "server connected again");
                    }
                    state = self.state.lock();
                    match state.live() {
                        Some(_) => LOOK,
                        None => RETRY,
                    }
                }
            };
            if !state.closed {
                self.changed.wait_until(&mut state, clock::now() + pause);
            }
        }
        state.dialing = false;
        self.changed.notify_all();
    }
}
