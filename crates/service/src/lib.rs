//! Depots for several processes of a host: server, client and worker.
//!
//! The server ([`open`]) has the tiers and their index. Other processes of the host attach to its
//! Unix socket in one of two ways:
//!
//! | kind | starts with | use |
//! | --- | --- | --- |
//! | client | [`connect`] | a [`Depot`] with all operations; its own copy threads move the bytes |
//! | worker | [`Mover`] | copies the bytes of placements that the scheduler of an engine sends |
//!
//! Attached processes receive descriptors of the media. So block bytes never cross the socket. The
//! server checks the mode of the socket file and the credentials of each peer.
//!
//! # Examples
//!
//! ```
//! use kvdepot_store::{Config, Key, NamespaceSpec};
//! use serde_json::json;
//!
//! let dir = tempfile::tempdir()?;
//! let socket = dir.path().join("depot.sock");
//! let settings = json!({"cache": {"capacity": "1MiB"}, "socket": socket});
//! let depot = kvdepot_service::open(&Config::new("Cache", &settings)?)?;
//!
//! // In another process:
//! let client = kvdepot_service::connect(&socket, Some(1))?;
//! let blocks = client.namespace(&NamespaceSpec {
//!     model: "llama-3-8b".into(),
//!     dtype: "bfloat16".into(),
//!     block_tokens: 16,
//!     ..NamespaceSpec::default()
//! })?;
//! assert_eq!(blocks.contains(&[Key([1; 32])])?, [false]);
//! client.close();
//! depot.close();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Structure
//!
//! Modules depend only on modules before them in this list:
//!
//! * `socket_path`: Unix sockets at the paths that options name.
//! * `http`: HTTP server of metrics and health checks, with the feature `http`.
//! * `frame`: handshake (`hello`), and the requests and responses (`verbs`).
//! * `line`: connection of both sides: incoming frames, outgoing queue, and limits of requests in
//!   flight.
//! * `mover`: worker, which copies the bytes of placements.
//! * `client`: depot of an attached process; the server performs its calls.
//! * `server`: server, which uses neither worker nor client.

#![forbid(unsafe_code)]

mod client;
mod frame;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
#[cfg(feature = "http")]
mod http;
mod line;
mod mover;
mod server;
mod socket_path;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use client::Client;
use kvdepot_arena::Error;
use kvdepot_host::socket::PassedSocket;
use kvdepot_store::{Config, Depot, Serves, Started};
pub use mover::Mover;
pub use mover::job::MoveJob;
use server::Server;

/// Opens a depot like [`Depot::open`], and serves it to other processes of the host.
///
/// The option `socket` selects the socket; `off` opens the depot without a server. The server runs
/// until the depot is closed.
///
/// # Errors
///
/// Those of [`Depot::open`], and [`Error::Config`] if the socket cannot be created.
///
/// # Examples
///
/// ```
/// use kvdepot_store::Config;
/// use serde_json::json;
///
/// let dir = tempfile::tempdir()?;
/// let socket = dir.path().join("depot.sock");
/// let settings = json!({"cache": {"capacity": "1MiB"}, "socket": socket});
/// let depot = kvdepot_service::open(&Config::new("Cache", &settings)?)?;
/// assert_eq!(depot.socket(), Some(socket));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn open(config: &Config) -> Result<Depot, Error> {
    Ok(start(config)?.keep())
}

/// Opens a depot like [`Depot::start`], and serves it to other processes of the host.
///
/// # Errors
///
/// Those of [`open`], and [`Error::Interrupted`].
pub fn start(config: &Config) -> Result<Started, Error> {
    start_on(config, None)
}

/// Opens a depot like [`start`], and serves it on a socket that the service manager has bound.
///
/// The option `socket` of `config` is the path of `passed`. The permission bits of that path apply
/// instead of the option `socket_mode`. Without `passed`, this function is [`start`].
///
/// # Errors
///
/// Those of [`start`].
pub fn start_on(config: &Config, passed: Option<PassedSocket>) -> Result<Started, Error> {
    // Before anything costs time, memory or room on a disk.
    Server::check(config)?;
    Depot::start_serving(config, |core, about| {
        let server = Server::start(config, core, about, passed)?;
        Ok(server.map(|server| Box::new(server) as Box<dyn Serves>))
    })
}

/// Checks whether [`open`] would succeed on this machine now, like [`Config::check`].
///
/// # Errors
///
/// Those of [`open`] except [`Error::Locked`].
pub fn check(config: &Config) -> Result<(), Error> {
    config.check()?;
    Server::check(config)
}

/// Connects to a depot that another process of this host serves at `socket`.
///
/// The index of the server answers the calls, and `lanes` copy threads of this process move the
/// bytes. `None` selects `lanes` of the server's configuration, or
/// [`default_lanes`](kvdepot_store::config::default_lanes). While no server listens, every key is a
/// miss and puts are not stored. The client reconnects automatically.
///
/// # Errors
///
/// [`Error::Peer`] if no server listens at `socket`, or if it rejects the client.
///
/// # Examples
///
/// ```
/// use kvdepot_store::Config;
/// use serde_json::json;
///
/// let dir = tempfile::tempdir()?;
/// let socket = dir.path().join("depot.sock");
/// let settings = json!({"cache": {"capacity": "1MiB"}, "socket": socket});
/// let depot = kvdepot_service::open(&Config::new("Cache", &settings)?)?;
///
/// // In another process:
/// let client = kvdepot_service::connect(&socket, Some(1))?;
/// assert!(client.is_served() && client.is_connected());
/// assert_eq!(client.tiers(), ["Cache"]);
/// # client.close();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn connect(socket: &Path, lanes: Option<usize>) -> Result<Depot, Error> {
    connect_within(socket, lanes, None)
}

/// Connects to a depot like [`connect`], with a time-out for calls.
///
/// If the server does not respond to a call within `timeout`, the client treats it as dead. `None`
/// selects the server's `timeout`.
///
/// # Errors
///
/// Those of [`connect`].
pub fn connect_within(
    socket: &Path,
    lanes: Option<usize>,
    timeout: Option<Duration>,
) -> Result<Depot, Error> {
    let client: Arc<Client> = Client::connect(socket, lanes, timeout)?;
    Ok(Depot::over(client))
}
