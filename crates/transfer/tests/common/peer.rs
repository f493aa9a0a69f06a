//! A peer in a process of its own, which can be stopped and killed.

use std::net::SocketAddr;

use kvdepot_testkit::child::{self, Child};
use rustix::process::{Pid, Signal, kill_process};

use super::{Home, bytes, config, engine_of};

/// The name of the test that plays it, in every binary that starts one.
pub(crate) const PLAYS: &str = "plays_a_peer";

/// What its memory is published under.
pub(crate) const NAME: &[u8] = b"home";

pub(crate) struct Peer {
    process: Child,
    pub(crate) address: SocketAddr,
}

impl Peer {
    /// One with so many bytes from a seed, at a port that is free.
    pub(crate) fn start(len: usize, seed: u64) -> Peer {
        Peer::at("127.0.0.1:0", len, seed)
    }

    /// One that listens here.
    pub(crate) fn at(listen: &str, len: usize, seed: u64) -> Peer {
        let values = [
            ("listen", listen.to_owned()),
            ("len", len.to_string()),
            ("seed", seed.to_string()),
        ];
        let values: Vec<(&str, &str)> = values.iter().map(|(n, v)| (*n, v.as_str())).collect();
        let mut process = Child::start(PLAYS, "peer", &values);
        let address = process.line().unwrap().parse().unwrap();
        Peer { process, address }
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.process.pid() as i32).unwrap();
        kill_process(pid, signal).unwrap();
    }

    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
    }

    pub(crate) fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill();
    }
}

/// Plays the peer, where this process is one.
pub(crate) fn play() {
    if child::role().as_deref() != Some("peer") {
        return;
    }
    let listen = Some(child::value("listen").parse().unwrap());
    let engine = engine_of(kvdepot_transfer::Config { listen, ..config() });
    let len = child::value("len").parse().unwrap();
    let seed = child::value("seed").parse().unwrap();
    let _home = Home::of(&engine, NAME, bytes(len, seed));
    child::say(&engine.address().unwrap().to_string());
    child::sleep_until_killed();
}
