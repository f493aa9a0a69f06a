//! Who is there: views of the hosts, from a list (`fixed`) or from an etcd that people already run
//! (`etcd`).
//!
//! No call here waits for the network, but for [`Membership::close`], whose bound is the caller's.
//! Threads of a membership's own ask, watch and publish: the newest view can be read at any time,
//! and is handed to a callback. Where the source is lost the last view stays, and
//! [`Membership::status`] says so.

mod board;
mod error;
mod etcd;
mod fixed;
mod status;

use std::sync::Arc;
use std::time::Duration;

use crate::homes::{Host, View};
use board::Board;
pub use board::OnView;
pub use error::Error;
use etcd::Etcd;
pub use etcd::Settings;
pub use status::{Standing, Status};

/// Where views come from. Dropped, it ends as by [`Membership::close`], without waiting.
#[derive(Debug)]
pub struct Membership {
    board: Arc<Board>,
    etcd: Option<Etcd>,
}

impl Membership {
    /// These hosts, for ever; the view's epoch is 1.
    ///
    /// # Errors
    /// [`Error::View`] where they are no view.
    pub fn fixed(hosts: Vec<Host>) -> Result<Membership, Error> {
        let board = Arc::new(fixed::board(hosts)?);
        Ok(Membership { board, etcd: None })
    }

    /// The hosts that are registered in an etcd, as `own` will be; without `own` this process only
    /// looks. Until etcd has been heard the view has no hosts and epoch 0.
    ///
    /// # Errors
    /// [`Error::Setting`] for settings that are not allowed, [`Error::Thread`] where the system has
    /// no thread. That etcd is not there is none.
    pub fn etcd(
        settings: &Settings,
        own: Option<Host>,
        on_view: OnView,
    ) -> Result<Membership, Error> {
        let board = Arc::new(Board::new(on_view, own.is_some()));
        let etcd = Some(Etcd::start(settings, own, &board)?);
        Ok(Membership { board, etcd })
    }

    /// The newest view.
    #[must_use]
    pub fn view(&self) -> Arc<View> {
        self.board.view()
    }

    /// Whether the view is what the source says now, and how this process stands in it.
    #[must_use]
    pub fn status(&self) -> Status {
        self.board.status()
    }

    /// Says anew what this host is: another capacity, another address. Soon all will know.
    ///
    /// # Errors
    /// [`Error::Setting`] for another name than before, or one that is not allowed, or where this
    /// process only looks, or its hosts are fixed.
    pub fn announce(&self, own: Host) -> Result<(), Error> {
        match &self.etcd {
            Some(etcd) => etcd.announce(own),
            None => Err(Error::setting("own", &own.name, "none, as hosts are fixed")),
        }
    }

    /// Leaves: others know at once, where etcd can be told, else when the lease has run out. Waits
    /// for that so long at most, and says whether everything has ended. The last view stays.
    pub fn close(&self, within: Duration) -> bool {
        self.etcd.as_ref().is_none_or(|etcd| etcd.close(within))
    }
}
