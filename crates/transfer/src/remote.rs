//! Memory of a peer that was opened by its name.

use std::sync::Arc;
use std::time::Duration;

use zerocopy::FromBytes;

use crate::error::Error;
use crate::grant::Rights;
use crate::peer::Peer;
use crate::window::Window;
use crate::wire::{self, Bytes, NAME_MAX, Verb};

/// Memory of a peer that was opened. The peer is told when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Remote(pub(crate) Arc<Opened>);

#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) peer: Arc<Peer>,
    pub(crate) window: Arc<Window>,
    pub(crate) lasts: Option<Duration>,
}

impl Remote {
    /// Opens what is published under a name.
    pub(crate) fn open(peer: &Arc<Peer>, name: &[u8], timeout: Duration) -> Result<Remote, Error> {
        if name.is_empty() || name.len() > NAME_MAX {
            let shown = String::from_utf8_lossy(name).into_owned();
            return Err(Error::input("name", shown, "1 to 1024 bytes"));
        }
        let most = Bytes::Just(size_of::<wire::Opened>() as u64);
        let (grant, body) = peer.ask(Verb::Open, name.to_vec(), most, timeout)?;
        let opened = wire::Opened::read_from_bytes(&body);
        let opened = opened.map_err(|_| Error::Unreachable {
            peer: peer.address().to_string(),
            reason: "it answered with something else".to_owned(),
        })?;
        let rights = Rights::of(opened.rights.get());
        let window = Window::new(name, grant, opened.len.get(), rights);
        let lasts = Some(opened.lasts_ms.get()).filter(|ms| *ms != u64::MAX);
        Ok(Remote(Arc::new(Opened {
            peer: Arc::clone(peer),
            window: Arc::new(window),
            lasts: lasts.map(Duration::from_millis),
        })))
    }

    /// How many bytes it has.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "nothing empty is published")]
    pub fn len(&self) -> u64 {
        self.0.window.len
    }

    /// What it allows.
    #[must_use]
    pub fn rights(&self) -> Rights {
        self.0.window.rights
    }

    /// How long it lasted when it was opened; `None`: until it is withdrawn.
    #[must_use]
    pub fn lasts(&self) -> Option<Duration> {
        self.0.lasts
    }

    /// The address of its peer.
    #[must_use]
    pub fn peer(&self) -> std::net::SocketAddr {
        self.0.peer.address()
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Some(grant) = self.window.known() {
            self.peer.let_go(grant);
        }
    }
}
