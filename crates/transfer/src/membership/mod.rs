//! Membership: views of the hosts in a cluster, from a fixed list or from an existing etcd.
//!
//! Only [`Membership::close`] waits for the network, for a time that the caller limits. Threads of
//! the membership query, watch and publish. The newest view can be read at any time, and is passed
//! to a callback. If the source is lost, the last view stays, and [`Membership::status`] reports
//! it.

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

/// Source of views. Dropping it has the effect of [`Membership::close`] without a wait.
///
/// # Examples
/// ```
/// use kvdepot_transfer::homes::Host;
/// use kvdepot_transfer::membership::Membership;
///
/// let host = |name: &str| Host {
///     name: name.into(),
///     address: format!("{name}:7700"),
///     capacity: 1 << 40,
///     incarnation: 0,
/// };
/// let membership = Membership::fixed(vec![host("a"), host("b")])?;
/// assert_eq!(membership.view().hosts().len(), 2);
/// assert!(membership.status().is_current);
/// # Ok::<_, kvdepot_transfer::membership::Error>(())
/// ```
///
/// With etcd, a host registers itself and follows the others:
///
/// ```no_run
/// use std::time::Duration;
///
/// use kvdepot_transfer::homes::Host;
/// use kvdepot_transfer::membership::{Membership, Settings};
///
/// let settings = Settings::new(vec!["http://10.0.0.1:2379".into()]);
/// let own = Host {
///     name: "a".into(),
///     address: "10.0.0.2:7700".into(),
///     capacity: 1 << 40,
///     incarnation: 0,
/// };
/// let on_view = Box::new(|view: &_| println!("{view:?}"));
/// let membership = Membership::etcd(&settings, Some(own), on_view)?;
/// membership.close(Duration::from_secs(5));
/// # Ok::<_, kvdepot_transfer::membership::Error>(())
/// ```
#[derive(Debug)]
pub struct Membership {
    board: Arc<Board>,
    etcd: Option<Etcd>,
}

impl Membership {
    /// Creates a membership whose hosts never change. The epoch of its view is 1.
    ///
    /// # Errors
    /// [`Error::View`] if the hosts do not form a view.
    pub fn fixed(hosts: Vec<Host>) -> Result<Membership, Error> {
        let board = Arc::new(fixed::board(hosts)?);
        Ok(Membership { board, etcd: None })
    }

    /// Follows the hosts that are registered in an etcd, and registers `own`. With `None` this
    /// process only follows.
    ///
    /// `on_view` receives each new view. Before the first response of etcd, the view has no hosts
    /// and epoch 0. An unreachable etcd is not an error.
    ///
    /// # Errors
    /// [`Error::Setting`] if a setting is not allowed, and [`Error::Thread`] if a thread cannot be
    /// started.
    pub fn etcd(
        settings: &Settings,
        own: Option<Host>,
        on_view: OnView,
    ) -> Result<Membership, Error> {
        let board = Arc::new(Board::new(on_view, own.is_some()));
        let etcd = Some(Etcd::start(settings, own, &board)?);
        Ok(Membership { board, etcd })
    }

    /// Returns the newest view.
    #[must_use]
    pub fn view(&self) -> Arc<View> {
        self.board.view()
    }

    /// Returns the state of the source, and of this process in the view.
    #[must_use]
    pub fn status(&self) -> Status {
        self.board.status()
    }

    /// Publishes changed data of this host to all others, such as another capacity or another
    /// address.
    ///
    /// # Errors
    /// [`Error::Setting`] if the name differs from the registered one or is not allowed, if this
    /// process only follows, or if the hosts are fixed.
    pub fn announce(&self, own: Host) -> Result<(), Error> {
        match &self.etcd {
            Some(etcd) => etcd.announce(own),
            None => Err(Error::setting(
                "own",
                &own.name,
                "no own host, because the list of hosts is fixed",
            )),
        }
    }

    /// Leaves the cluster, waits at most `within`, and returns true if all threads have ended.
    ///
    /// If etcd can be reached, other hosts receive the change immediately; otherwise when the lease
    /// expires. The last view stays readable.
    pub fn close(&self, within: Duration) -> bool {
        self.etcd.as_ref().is_none_or(|etcd| etcd.close(within))
    }
}
