//! Host services: file locks, descriptors, processes, forks and resource limits.
//!
//! The modules enforce these rules:
//!
//! * An arena has one owner. A lock on the medium proves ownership and ends when the owner dies
//!   ([`lock`], [`fork`]).
//! * The workers of an owner receive descriptors of its media over a Unix socket ([`fds`]). The
//!   kernel vouches for the credentials of the peer ([`peer`]).
//! * A reservation ends with the death of its process; a broken connection alone does not end it
//!   ([`peer::Process`]).
//! * A block device belongs to one program only ([`block`]).
//! * A forked child owns nothing ([`fork`]), and may start threads of its own ([`Condvar`]).
//! * Defaults respect the limits of the machine *and* of its control group ([`limits`], [`cpu`],
//!   [`dirs`]).
//!
//! # The descriptor of a lock
//!
//! Locks belong to an *open file description*. It exists as long as anything refers to it: a
//! duplicate of the descriptor, a descriptor in a socket's queue or in another process, or a
//! mapping.
//!
//! A lock that must end with its holder therefore needs a description of its own that is neither
//! mapped nor sent. [`fork::LockFd::reopen`] creates one from any descriptor of the medium.

#![expect(
    unsafe_code,
    reason = "this crate calls the system where no safe wrapper exists"
)]

pub mod block;
mod condvar;
pub mod cpu;
pub mod dir;
pub mod dirs;
mod each_minute;
mod error;
pub mod event;
pub mod fds;
pub mod fork;
pub mod holders;
pub mod limits;
pub mod lock;
pub mod peer;
pub mod socket;

pub use condvar::{Condvar, Waited};
pub use each_minute::EachMinute;
pub use error::{Error, Result};
