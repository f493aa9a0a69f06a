//! What keeper, watcher and the membership's owner have in common.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_host::Condvar;
use parking_lot::Mutex;

use super::super::board::Board;
use super::super::error::Error;
use super::gateway::Gateway;
use super::messages::Keys;
use super::settings::{Settings, check_own};
use crate::homes::Host;

/// As long as either of the threads runs.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) gateway: Gateway,
    pub(super) keys: Keys,
    pub(super) board: Arc<Board>,
    pub(super) ttl: Duration,
    state: Mutex<State>,
    /// Something of the state has changed.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    own: Option<Host>,
    is_closing: bool,
    /// The keeper shall look after the own key now.
    is_poked: bool,
    /// The revision at which the own key was written.
    registered: Option<i64>,
    running: usize,
}

impl Shared {
    pub(super) fn new(
        settings: &Settings,
        own: Option<Host>,
        board: &Arc<Board>,
    ) -> Result<Arc<Shared>, Error> {
        settings.check()?;
        own.as_ref().map_or(Ok(()), check_own)?;
        let state = State {
            own,
            ..State::default()
        };
        Ok(Arc::new(Shared {
            gateway: Gateway::new(&settings.endpoints, settings.patience()),
            keys: Keys::new(&settings.prefix),
            board: Arc::clone(board),
            ttl: settings.ttl,
            state: Mutex::new(state),
            changed: Condvar::new(),
        }))
    }

    /// One more thread runs, until what this gives is dropped.
    pub(super) fn enter(shared: &Arc<Shared>) -> Running {
        shared.state.lock().running += 1;
        Running(Arc::clone(shared))
    }

    pub(super) fn own(&self) -> Option<Host> {
        self.state.lock().own.clone()
    }

    /// The incarnation that this process has from now on, unless it was given one.
    pub(super) fn set_incarnation(&self, incarnation: u64) {
        let mut state = self.state.lock();
        if let Some(own) = state.own.as_mut().filter(|own| own.incarnation == 0) {
            own.incarnation = incarnation;
        }
    }

    pub(super) fn announce(&self, mut own: Host) -> Result<(), Error> {
        let mut state = self.state.lock();
        match &state.own {
            Some(known) if known.name == own.name => {
                if own.incarnation == 0 {
                    own.incarnation = known.incarnation;
                }
            }
            Some(_) => {
                let allowed = "the name that this host joined with";
                return Err(Error::setting("own.name", &own.name, allowed));
            }
            None => {
                let allowed = "no own host, because this process only watches the membership";
                return Err(Error::setting("own", &own.name, allowed));
            }
        }
        state.own = Some(own);
        state.is_poked = true;
        self.changed.notify_all();
        Ok(())
    }

    /// The own key was written, or is not to be relied upon any more.
    pub(super) fn set_registered(&self, revision: Option<i64>) {
        self.state.lock().registered = revision;
    }

    /// Has the keeper look after the own key, where the hosts as of a revision should have it and
    /// do not.
    pub(super) fn check_registered(&self, revision: i64, has: impl FnOnce(&Host) -> bool) {
        let mut state = self.state.lock();
        let should = state.registered.is_some_and(|since| since <= revision);
        if should && state.own.as_ref().is_some_and(|own| !has(own)) {
            state.is_poked = true;
            self.changed.notify_all();
        }
    }

    pub(super) fn is_closing(&self) -> bool {
        self.state.lock().is_closing
    }

    /// Sleeps so long, or until this closes.
    pub(super) fn sleep(&self, time: Duration) {
        self.sleep_until(time, |_| false);
    }

    /// The same, or until the keeper is to look after the own key.
    pub(super) fn sleep_unless_poked(&self, time: Duration) {
        self.sleep_until(time, |state| state.is_poked);
    }

    fn sleep_until(&self, time: Duration, is_over: impl Fn(&State) -> bool) {
        let end = Instant::now() + time;
        let mut state = self.state.lock();
        while !state.is_closing && !is_over(&state) {
            if self.changed.wait_until(&mut state, end).timed_out() {
                return;
            }
        }
    }

    /// Whether the own key was to be looked after; it is taken to be, from now on.
    pub(super) fn take_poke(&self) -> bool {
        std::mem::take(&mut self.state.lock().is_poked)
    }

    pub(super) fn close(&self) {
        self.state.lock().is_closing = true;
        self.changed.notify_all();
        self.gateway.close();
    }

    /// Whether both threads have ended, at the latest after so long.
    pub(super) fn wait_ended(&self, within: Duration) -> bool {
        let end = Instant::now() + within;
        let mut state = self.state.lock();
        while state.running > 0 {
            if self.changed.wait_until(&mut state, end).timed_out() {
                return state.running == 0;
            }
        }
        true
    }
}

/// A thread that runs.
pub(super) struct Running(Arc<Shared>);

impl Running {
    pub(super) fn shared(&self) -> &Shared {
        &self.0
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.state.lock().running -= 1;
        self.0.changed.notify_all();
    }
}
