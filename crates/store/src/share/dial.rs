//! Links to whoever serves at a socket, one after the other: where one breaks, or its owner is
//! gone, another is made when it is wanted.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::calls::of_namespace;
use super::frame::Verb;
use super::link::Link;
use crate::{Error, NamespaceId, clock};

/// Pause before an owner that is gone is looked for again: short against its start, and nothing
/// to speak of for calls that find it gone.
const RETRY: Duration = Duration::from_millis(200);

/// Longest wait for the lanes of a link that broke before another is made.
const QUIET: Duration = Duration::from_secs(1);

pub(super) struct Dial {
    socket: PathBuf,
    lanes: Option<usize>,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    link: Option<Arc<Link>>,
    /// The last one that was made, with its number.
    former: Option<(Weak<Link>, u64)>,
    /// When it was last tried to make one.
    tried: Option<Instant>,
    /// A thread is at it.
    connecting: bool,
    /// Namespaces whose blocks are to stay in one piece; a new owner is told again.
    contiguous: Vec<NamespaceId>,
    closed: bool,
}

impl State {
    fn set(&mut self, link: &Arc<Link>) {
        self.former = Some((Arc::downgrade(link), link.number));
        self.link = Some(Arc::clone(link));
    }
}

impl Dial {
    /// With the first link.
    pub(super) fn new(socket: &Path, lanes: Option<usize>) -> Result<(Dial, Arc<Link>), Error> {
        let dial = Dial {
            socket: socket.into(),
            lanes,
            state: Arc::default(),
        };
        let link = dial.attach(0)?;
        dial.state.lock().set(&link);
        Ok((dial, link))
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// The link, made anew where the last one broke; `None` when nobody serves there.
    pub(super) fn link(&self) -> Option<Arc<Link>> {
        let mut state = self.state.lock();
        if let Some(link) = state.link.as_ref().filter(|link| !link.is_ending()) {
            return Some(Arc::clone(link));
        }
        let early = state.tried.is_some_and(|tried| tried.elapsed() < RETRY);
        if early || state.connecting || state.closed {
            return None;
        }
        state.tried = Some(clock::now());
        // The last owner's media go with its link: a new owner waits for all who may write them.
        state.link = None;
        state.connecting = true;
        let former = state.former.clone();
        drop(state);
        let former = former.filter(|(link, _)| is_quiet(link));
        let link = self.attach(former.map_or(0, |(_, number)| number));
        let mut state = self.state.lock();
        state.connecting = false;
        let link = link.ok()?;
        state.set(&link);
        let told = state.contiguous.iter().all(|id| {
            let out = of_namespace(Verb::KeepContiguous, 0, *id);
            link.call(out, |_| Ok(())).is_ok()
        });
        if state.closed || !told {
            // Nothing was begun on it; its threads would keep it.
            state.link = None;
            link.goodbye();
            return None;
        }
        tracing::info!(socket = %self.socket.display(), "the depot's owner is back");
        Some(link)
    }

    /// Has every owner keep the blocks of a namespace in one piece.
    pub(super) fn keep_contiguous(&self, id: NamespaceId) {
        self.state.lock().contiguous.push(id);
    }

    /// Makes no other link; takes the last one.
    pub(super) fn end(&self) -> Option<Arc<Link>> {
        let mut state = self.state.lock();
        state.closed = true;
        state.link.take()
    }

    fn attach(&self, former: u64) -> Result<Arc<Link>, Error> {
        let shared = Arc::downgrade(&self.state);
        let name = self.socket.display().to_string();
        Link::new(&self.socket, self.lanes, former, move |ended| {
            let Some(state) = shared.upgrade() else {
                return;
            };
            let mut state = state.lock();
            let last = state.link.as_ref();
            if last.is_some_and(|link| Arc::ptr_eq(link, ended)) {
                state.link = None;
                if !state.closed {
                    tracing::warn!(socket = %name, "the depot's owner is gone: all is a miss until \
                        one listens there again");
                }
            }
        })
    }
}

/// Waits until the threads and lanes of a link that has ended have stopped; false when they take
/// long.
fn is_quiet(link: &Weak<Link>) -> bool {
    let begun = clock::now();
    while link.strong_count() > 0 && begun.elapsed() < QUIET {
        std::thread::sleep(Duration::from_millis(1));
    }
    link.strong_count() == 0
}
