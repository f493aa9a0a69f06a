//! One-sided transfers by RDMA: verbs on InfiniBand, RoCE and whatever else libibverbs drives.
//!
//! The library is found at run time, so neither building nor loading this crate needs it; where it
//! is not installed, or no device is there, an error says so. A [`Device`] is opened by its name,
//! memory is made known to it as a [`Region`], and a [`QueuePair`] is connected to one of the
//! peer's: each side sends the other its [`Endpoint`], a row of 64 bytes, over a connection that it
//! has already. Then either side reads and writes what the other has registered, without the
//! other's processor. A [`Lane`] does that for slices, in batches.
//!
//! Guarantees:
//!
//! * What a device may touch lives as long as it may. A region holds its buffer until the library
//!   has taken it back; a work request holds its regions until it has completed, or until its queue
//!   pair has been destroyed. Where the library refuses either, that memory is never given back,
//!   and the log says so.
//! * A peer that is lost may never be noticed by a device. [`Lane::finish`] has a deadline; behind
//!   it the queue pair is destroyed, each slice has been reported once, and no device touches what
//!   it named.
//! * A child of a fork has none of this: it refuses, and what it drops stays as it is.
//!
//! What a peer may do with a region until it is dropped: what its rights say, to all of it, at any
//! time. So regions are made of what a peer is trusted with.

mod abi;
mod device;
mod endpoint;
mod error;
mod lane;
mod library;
mod port;
mod queue;
mod region;
mod request;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use device::{Device, devices};
pub(crate) use endpoint::{ENDPOINT_LEN, Endpoint};
pub(crate) use error::Error;
#[cfg(test)]
pub(crate) use error::Failure;
#[cfg(test)]
pub(crate) use error::Result;
#[cfg(test)]
pub(crate) use lane::Counts;
pub(crate) use lane::Lane;
pub(crate) use port::{Choice, Port};
pub(crate) use queue::{QueuePair, Shape};
pub(crate) use region::{Piece, Region, Rights};
pub(crate) use request::{Completion, Op, Remote};
