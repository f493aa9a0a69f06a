//! Other processes of the host work for the owner: it hands them descriptors of its media over a
//! Unix socket (mode 0600, peer credentials checked), and no byte of a block crosses that socket.
//!
//! `server` is the owner's end, `mover` a worker's, `wire` what they say to each other,
//! `placement` what the owner's scheduler hands to a worker, by whatever way the engine has.

mod mover;
pub(crate) mod placement;
mod server;
mod wire;

pub use mover::{MoveJob, Mover};
pub(crate) use server::Server;
