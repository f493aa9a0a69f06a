//! Other processes of the host work for the owner: it hands them descriptors of its media over a
//! Unix socket (file mode, peer credentials checked), and no byte of a block crosses that socket.
//!
//! `server` is the owner's end, `accept` who knocks there, `wire` how a process attaches. A *mover*
//! (`mover`) moves what its engine's scheduler tells it, by placements (`placement`) that travel
//! the engine's own way, and lets the owner see for whom (`roster`). A *client* (`client`, `dial`)
//! is a depot by itself: its calls are answered by the owner (`calls`), which notes what it holds
//! (`holding`) and says once what left (`departures`); its puts and gets are the owner's tasks
//! (`session`) whose bytes the client's lanes move over its `link`, and both speak in frames
//! (`frame`, `line`, `outbox`). What may take minutes is `slow`, and how much a client may ask for
//! at a time is `credit`.

#![forbid(unsafe_code)]

mod accept;
mod calls;
mod client;
mod credit;
mod departures;
mod dial;
mod frame;
mod held;
mod holding;
mod job;
mod line;
mod link;
mod mover;
mod outbox;
mod roster;
mod server;
mod session;
mod slow;
mod wire;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use client::Client;
pub use job::MoveJob;
use kvdepot_arena::Error;
use kvdepot_store::{Config, Depot, Serves, Started};
pub use mover::Mover;
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
