//! What the host offers and allows: locks, descriptors, processes, forks, limits.
//!
//! The rules that these modules exist for:
//!
//! * an arena has one owner, held by a lock on the medium that ends with the owner's death
//!   ([`lock`], [`fork`]);
//! * helpers of an owner get descriptors of its media over a Unix socket ([`fds`]) from a peer
//!   whose credentials the kernel vouches for ([`peer`]);
//! * a reservation ends with the death of its process, never by a broken connection alone
//!   ([`peer::Process`]);
//! * a block device is one program's alone ([`block`]);
//! * a forked child owns nothing ([`fork`]), and may have threads of its own ([`Condvar`]);
//! * defaults fit what the machine *and* its control group allow ([`limits`], [`cpu`], [`dirs`]).
//!
//! # Which descriptor a lock lives on
//!
//! The locks belong to an *open file description*, which lives as long as anything refers to it:
//! a duplicate of the descriptor, one in a socket's queue or in another process, or a mapping made
//! from it. A lock that must end with its holder therefore sits on a description of its own, that
//! is neither mapped nor sent: [`fork::LockFd::reopen`] makes one from any descriptor of the
//! medium.

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
