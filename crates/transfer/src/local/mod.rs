//! The way between processes of one host: no wire. The target hands its memory's descriptors over
//! a Unix socket, or says where it has it; the initiator copies by itself.

mod mapped;
mod movers;
mod neighbour;
mod serve;
mod words;

pub(crate) use mapped::Mapped;
pub(crate) use movers::{Lends, Movers};
pub(crate) use neighbour::{Neighbour, Neighbours};
pub(crate) use serve::Door;
