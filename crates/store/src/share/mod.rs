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
pub(crate) mod placement;
mod roster;
mod server;
mod session;
mod slow;
mod wire;

pub(crate) use client::Client;
pub use job::MoveJob;
pub use mover::Mover;
pub(crate) use server::Server;
pub(crate) use wire::MEDIA_MAX;
