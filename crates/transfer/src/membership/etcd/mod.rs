//! Hosts that register in an etcd, by its JSON gateway (`/v3`, etcd 3.4 and later).
//!
//! Under `<prefix>/hosts/` each host has one key, its name, with a JSON object: `address`,
//! `capacity` and `incarnation`. The key hangs on a lease, which the host's *keeper* renews three
//! times in its time to live. A host that dies or is stopped is gone when its lease has run out,
//! and one that leaves ends its lease.
//!
//! The *watcher* lists the keys once, and then watches from that revision on. A watch that breaks
//! goes on where it broke; one whose revisions have been compacted away lists again. An etcd that
//! has lost its memory (its revision runs backwards) is believed, but hosts that it does not know
//! any more stay in the view for as long as they may take to register again.
//!
//! Keeper and watcher talk to the same endpoint. Where that does not answer the keeper in time both
//! go on to the next one: so a watch that is silent because its endpoint hangs is found out, too.
//!
//! Of two processes with one name the later incarnation has it. One that was stopped, and finds its
//! name taken, stays out.

mod backoff;
mod gateway;
mod keeper;
mod messages;
mod roster;
mod settings;
mod shared;
mod watcher;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::board::Board;
use super::error::Error;
use crate::homes::Host;
pub use settings::Settings;
use shared::Shared;

/// Two threads, and what they share.
#[derive(Debug)]
pub(super) struct Etcd(Arc<Shared>);

impl Etcd {
    pub(super) fn start(
        settings: &Settings,
        own: Option<Host>,
        board: &Arc<Board>,
    ) -> Result<Etcd, Error> {
        let etcd = Etcd(Shared::new(settings, own, board)?);
        etcd.spawn("kvdepot-keeper", keeper::run)?;
        // Where there is no thread for it, the other one ends as this is dropped.
        etcd.spawn("kvdepot-watcher", watcher::run)?;
        Ok(etcd)
    }

    fn spawn(&self, name: &str, body: fn(&Shared)) -> Result<(), Error> {
        let running = Shared::enter(&self.0);
        let thread = thread::Builder::new().name(name.to_owned());
        let started = thread.spawn(move || body(running.shared()));
        started.map(drop).map_err(Error::Thread)
    }

    pub(super) fn announce(&self, own: Host) -> Result<(), Error> {
        self.0.announce(own)
    }

    pub(super) fn close(&self, within: Duration) -> bool {
        self.0.close();
        self.0.wait_ended(within)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.0.close();
    }
}
