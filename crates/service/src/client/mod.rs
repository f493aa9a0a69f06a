//! A depot that another process of this host serves. Its verbs (`verbs`) are calls over the `link`
//! that there is (`dial`), one at a time (`calls`); what left is said once (`departures`).

mod calls;
mod departures;
mod dial;
mod groups;
mod link;
mod starts;
mod stores;
mod verbs;

use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvdepot_arena::Error;
use kvdepot_arena::gate::Gate;
use kvdepot_arena::patience::Limit;
use kvdepot_store::About;
use parking_lot::Mutex;

use crate::frame::verbs as say;
use crate::frame::verbs::Asks;
use departures::Listening;
use dial::{Dial, Told};
use link::Link;
use stores::Stores;

/// Longest wait for an answer where nobody has chosen another: calls are index work, of
/// milliseconds at most.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(10);

/// This process's end.
pub(crate) struct Client {
    dial: Dial,
    about: About,
    stores: Arc<Stores>,
    gate: Arc<Gate>,
    pub(crate) listening: Mutex<Listening>,
    me: Weak<Client>,
    next_group: AtomicU64,
}

impl Client {
    pub(crate) fn connect(
        socket: &Path,
        lanes: Option<usize>,
        timeout: Option<Duration>,
    ) -> Result<Arc<Client>, Error> {
        let gate = Gate::new()?;
        let limit = Arc::new(Limit::new(timeout.unwrap_or(TIMEOUT)));
        let stores = Arc::<Stores>::default();
        let (dial, link) = Dial::new(socket, lanes, Arc::clone(&limit), Arc::clone(&stores))?;
        let about = link.call(&say::About {}, |about| Ok(about.0))?;
        if timeout.is_none() {
            about.timeout.iter().for_each(|owners| limit.set(*owners));
        }
        Ok(Arc::new_cyclic(|me| Client {
            dial,
            about,
            stores,
            gate,
            listening: Mutex::default(),
            me: Weak::clone(me),
            next_group: AtomicU64::new(1),
        }))
    }

    pub(crate) fn socket(&self) -> &Path {
        self.dial.socket()
    }

    /// Asks the owner what it has; `absent`, which is what an empty depot answers, when there is
    /// none.
    fn ask<C: Asks, T>(
        &self,
        absent: impl FnOnce() -> T,
        call: &C,
        read: impl FnOnce(C::Answer<'_>, &Link) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.at_owner(absent, |link| link.call(call, |answer| read(answer, link)))
    }

    /// Asks whoever is there; `absent` where nobody is.
    fn at_owner<T>(
        &self,
        absent: impl FnOnce() -> T,
        ask: impl FnOnce(&Link) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let _pass = self.gate.enter()?;
        let Some(link) = self.dial.link() else {
            return Ok(absent());
        };
        match ask(&link) {
            Err(Error::Closed(_)) => Ok(absent()),
            Err(error @ Error::Peer { .. }) => {
                tracing::warn!(%error, "call to the server failed; returning an empty result");
                Ok(absent())
            }
            answer => answer,
        }
    }

    /// Has the owner change what it has.
    ///
    /// # Errors
    /// [`Error::Peer`] when there is none: nothing would be changed, and the next one may still
    /// have it.
    fn change<C: Asks, T>(
        &self,
        call: &C,
        read: impl FnOnce(C::Answer<'_>) -> T,
    ) -> Result<T, Error> {
        let _pass = self.gate.enter()?;
        let link = self.dial.link().ok_or_else(|| self.nobody())?;
        let answer = link.call(call, |answer| Ok(read(answer)));
        answer.map_err(|error| match error {
            Error::Closed(_) => self.nobody(),
            other => other,
        })
    }

    fn nobody(&self) -> Error {
        self.fails("not connected; no server is listening on this socket")
    }

    fn fails(&self, reason: &str) -> Error {
        Error::Peer {
            socket: self.socket().display().to_string(),
            reason: reason.into(),
        }
    }

    /// As [`Client::change`], for what may take long.
    fn change_slowly<C: Asks, T>(
        &self,
        call: &C,
        read: impl FnOnce(C::Answer<'_>) -> T,
    ) -> Result<T, Error> {
        let _pass = self.gate.enter()?;
        let link = self.dial.link().ok_or_else(|| self.nobody())?;
        link.ask_slowly(call, read)?.ok_or_else(|| self.nobody())
    }

    /// Tells this owner, and each that follows.
    fn tell_all(&self, told: &Told) -> Result<(), Error> {
        self.dial.remember(told);
        self.at_owner(|| (), |link| told.say(link))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        kvdepot_store::Verbs::close(self);
    }
}
