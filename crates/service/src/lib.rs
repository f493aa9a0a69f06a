//! Other processes of the host work for the owner: it hands them descriptors of its media over a
//! Unix socket (file mode, peer credentials checked), and no byte of a block crosses that socket.
//!
//! Five rooms, each of which knows those before it. `frame` is what is said: how a process attaches
//! (`hello`), and every call, answer and step of a task, declared once (`verbs`). `line` is the
//! connection that both sides have: what comes, what waits to be sent, and how much may be under
//! way. A *mover* (`mover`) moves what its engine's scheduler tells it, by placements (`placement`)
//! that travel the engine's own way. A *client* (`client`) is a depot by itself: its calls are
//! answered by the owner, its puts and gets are the owner's tasks, whose bytes its own lanes move.
//! The owner's end is `server`, which knows neither.

#![forbid(unsafe_code)]

mod client;
mod frame;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod line;
mod mover;
mod server;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use client::Client;
use kvdepot_arena::Error;
use kvdepot_store::{Config, Depot, Serves, Started};
pub use mover::Mover;
pub use mover::job::MoveJob;
use server::Server;

/// As [`Depot::open`], and lets other processes of the host in where the configuration says
/// (`socket`).
///
/// # Errors
/// Those of [`Depot::open`], and [`Error::Config`] for a socket that cannot be made.
pub fn open(config: &Config) -> Result<Depot, Error> {
    Ok(start(config)?.keep())
}

/// As [`Depot::start`], and lets other processes of the host in.
///
/// # Errors
/// Those of [`open`], and [`Error::Interrupted`].
pub fn start(config: &Config) -> Result<Started, Error> {
    // Before anything costs time, memory or room on a disk.
    Server::check(config)?;
    Depot::start_serving(config, |core, about| {
        let server = Server::start(config, core, about)?;
        Ok(server.map(|server| Box::new(server) as Box<dyn Serves>))
    })
}

/// Refuses what [`open`] would refuse of a configuration, as [`Config::check`] does.
///
/// # Errors
/// Those of [`open`], but for [`Error::Locked`].
pub fn check(config: &Config) -> Result<(), Error> {
    config.check()?;
    Server::check(config)
}

/// Uses a depot that another process of this host serves at `socket`: its index answers, and
/// `lanes` threads of this process move the bytes. When the owner goes away, every key is a
/// miss and nothing is stored until one listens there again.
///
/// # Errors
/// [`Error::Peer`] when nobody answers there, or with a refusal.
pub fn connect(socket: &Path, lanes: Option<usize>) -> Result<Depot, Error> {
    connect_within(socket, lanes, None)
}

/// As [`connect`], with the longest wait for the owner's answer to a call: an owner that takes
/// longer is taken for one that is gone. Without it the owner's `timeout` holds.
///
/// # Errors
/// Those of [`connect`].
pub fn connect_within(
    socket: &Path,
    lanes: Option<usize>,
    timeout: Option<Duration>,
) -> Result<Depot, Error> {
    let client: Arc<Client> = Client::connect(socket, lanes, timeout)?;
    Ok(Depot::over(client))
}
