//! Mutual TLS for connections: what it is told, whom it lets in, and the threads that apply it.
//!
//! Lanes send from memory and receive into memory that others may change meanwhile, by raw
//! descriptors, and go on doing so: theirs is one end of a pair of sockets then, and a thread has
//! the other end and the TCP connection.

mod ended;
mod pump;
mod secured;
mod settings;
mod talk;

pub(crate) use ended::{Ended, Failure};
pub(crate) use secured::Secured;
pub use settings::Tls;
pub(crate) use talk::Talk;
