//! The hosts of a history, what stands between them, and what is known of their blocks.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use kvdepot_testkit::Rng;
use kvdepot_testkit::etcd::Etcd;
use kvdepot_testkit::proxy::Proxy;
use kvdepot_testkit::sim::tally::Tally;
use kvdepot_testkit::sim::twin::Id;
use kvdepot_testkit::worker::Worker;
use serde_json::json;

use super::steps::Shape;
use crate::history::NAMESPACES;
use crate::processes::heard;
use crate::shared::steps::{KEYS, Step};
use crate::tiers::posix::SECRET;
use crate::world::{Law, law};

/// Longer than any call takes, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long a host that was left alone may be so, and blocks take on their way home.
const SOON: Duration = Duration::from_secs(40);

/// Where hosts listen.
const PORT: u16 = 7700;

/// Capacities of a share where everything fits, and where it does not.
const ROOMY: &str = "16MiB";
const NARROW: &str = "1MiB";

/// What is known of a block.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// Somebody has begun to write it.
    pub begun: bool,
    /// Copies that are there in any case: it was acknowledged, and so many hosts were not lost.
    pub copies: usize,
    /// It was removed, and nobody has begun to write it since.
    pub absent: bool,
    /// A write had no answer, or was not stored: what it left may be found.
    pub murky: bool,
    /// Its bytes were changed in some share.
    pub rotted: bool,
}

pub struct Ring {
    pub shape: Shape,
    seed: u64,
    dir: tempfile::TempDir,
    listens: Vec<SocketAddr>,
    /// Where hosts come and go.
    pub etcd: Option<Etcd>,
    /// From each host to each other one; with an etcd, to each from all others.
    pub ways: BTreeMap<(usize, usize), Proxy>,
    pub hosts: Vec<Option<Worker>>,
    /// Something fails now; nothing has failed yet.
    pub trouble: bool,
    pub quiet: bool,
    pub known: BTreeMap<Id, Known>,
    pub tally: Tally,
}

impl Ring {
    pub fn new(seed: u64, shape: &Shape) -> Ring {
        let dir = tempfile::Builder::new()
            .prefix("kvsim")
            .tempdir_in(crate::disk::dir())
            .unwrap();
        let digits: String = SECRET.iter().map(|byte| format!("{byte:02x}")).collect();
        let keys = dir.path().join("keys");
        fs::write(&keys, format!("- {digits}\n")).unwrap();
        fs::set_permissions(&keys, Permissions::from_mode(0o600)).unwrap();
        let count = usize::from(shape.hosts);
        // Addresses that no connection of anybody has for its own end while a host is away.
        let [low, high, ..] = std::process::id().to_le_bytes();
        let listen = |host: usize| SocketAddr::from(([127, high | 128, low, host as u8 + 1], PORT));
        let listens: Vec<SocketAddr> = (0..count).map(listen).collect();
        let pairs = (0..count).flat_map(|from| (0..count).map(move |to| (from, to)));
        let etcd = shape.etcd.then(Etcd::start).flatten();
        // What an etcd says of a host is the same for all others.
        let ways = pairs.filter(|(from, to)| (from == to) == etcd.is_some());
        let ways = ways.map(|(from, to)| ((from, to), Proxy::plain(listens[to])));
        Ring {
            shape: shape.clone(),
            seed,
            dir,
            ways: ways.collect(),
            etcd,
            listens,
            hosts: (0..count).map(|_| None).collect(),
            trouble: false,
            quiet: true,
            known: BTreeMap::new(),
            tally: Tally::default(),
        }
    }

    pub fn count(&self) -> usize {
        self.hosts.len()
    }

    /// Where a host's share is, where it outlives the process.
    pub fn share(&self, host: usize) -> PathBuf {
        self.dir.path().join(format!("share-{host}"))
    }

    fn older(&self, host: usize) -> PathBuf {
        self.dir.path().join(format!("older-{host}"))
    }

    fn spec(&self, host: usize) -> String {
        let name = |host: usize| char::from(b'a' + host as u8).to_string();
        let others = (0..self.count()).map(|other| {
            let address = match self.ways.get(&(host, other)) {
                Some(way) => way.address,
                None => self.listens[host],
            };
            format!("{} {address}", name(other))
        });
        let mut settings = json!({
            "socket": self.dir.path().join(format!("socket-{host}")), "lanes": 2, "close_timeout": "1s",
            "peer": {
                "name": name(host),
                "listen": self.listens[host].to_string(),
                "capacity": if self.shape.roomy { ROOMY } else { NARROW },
                "replicas": self.shape.replicas,
                "token": "only we know",
                "timeout": "2s", "lookup_timeout": "2s",
            },
        });
        let peer = &mut settings["peer"];
        match &self.etcd {
            Some(etcd) => {
                peer["etcd"] = json!(etcd.url());
                peer["etcd_ttl"] = json!("2s");
                peer["advertise"] = json!(self.ways[&(host, host)].address.to_string());
            }
            None => peer["hosts"] = json!(others.collect::<Vec<_>>().join(", ")),
        }
        if self.shape.lasts {
            settings["peer"]["path"] = json!(self.share(host));
        }
        let mut pipeline = String::from("Peer");
        if self.shape.cached {
            settings["cache"] = json!({"capacity": "1MiB"});
            pipeline = format!("Cache|{pipeline}");
        }
        if self.shape.backed {
            let path = self.dir.path().join("posix");
            settings["posix"] = json!({"path": path, "capacity": "64MiB"});
            pipeline += "|Posix";
        }
        if self.shape.keyed {
            settings["mac_key_file"] = json!(self.dir.path().join("keys"));
        }
        json!([pipeline, settings]).to_string()
    }

    /// Opens one, with what it had when it left before the last time, if anything.
    pub fn open(&mut self, host: usize, older: bool) -> Law {
        self.tally.door("open host");
        if older && self.shape.lasts && self.older(host).is_file() {
            self.tally.fault("older share");
            fs::copy(self.older(host), self.share(host)).unwrap();
            self.lose();
            // What was removed since is back.
            self.known
                .values_mut()
                .for_each(|known| known.absent = false);
        } else if self.shape.lasts && self.share(host).is_file() {
            fs::copy(self.share(host), self.older(host)).unwrap();
        }
        let mut worker = Worker::start(&format!("sharer {}", self.spec(host)));
        worker.tell("open");
        let said = heard(worker.answer(PATIENCE), "host")?;
        law!(said == "open", "open: {said}");
        self.hosts[host] = Some(worker);
        Ok(())
    }

    /// One leaves: with its share, where that does not outlive it.
    pub fn leave(&mut self, host: usize, killed: bool) -> Law {
        self.quiet = false;
        if killed {
            self.tally.fault("host killed");
            if let Some(mut worker) = self.hosts[host].take() {
                worker.kill();
            }
        } else {
            self.tally.door("close host");
            let said = self.ask(host, "close")?;
            law!(said == "closed", "close: {said}");
            self.hosts[host] = None;
        }
        if !self.shape.lasts {
            self.lose();
        }
        Ok(())
    }

    /// A host has lost what it had.
    fn lose(&mut self) {
        if !self.shape.backed {
            let all = self.known.values_mut();
            all.for_each(|known| known.copies = known.copies.saturating_sub(1));
        }
    }

    /// Hosts that have left, with blocks that nobody reaches now.
    pub fn away(&self) -> usize {
        self.hosts.iter().filter(|host| host.is_none()).count()
    }

    pub fn ask(&mut self, host: usize, command: &str) -> Law<String> {
        self.tell(host, command);
        self.hear(host)
    }

    pub fn tell(&mut self, host: usize, command: &str) {
        self.hosts[host].as_mut().unwrap().tell(command);
    }

    pub fn hear(&mut self, host: usize) -> Law<String> {
        let worker = self.hosts[host].as_mut().unwrap();
        let said = heard(worker.answer(PATIENCE), "host");
        if std::env::var_os("SIM_LOG").is_some() {
            println!("  {host}: {said:?}");
        }
        said
    }

    pub fn known(&mut self, id: Id) -> &mut Known {
        self.known.entry(id).or_default()
    }

    /// Bytes of a block: always the same.
    pub fn len(&self, id: Id) -> u64 {
        let mut rng = Rng::new(self.content(id));
        match rng.below(8) {
            0 => rng.between(1, 200),
            1 => rng.between(4080, 4112),
            2 => rng.between(100_000, 300_000),
            _ => rng.between(5_000, 60_000),
        }
    }

    pub fn content(&self, id: Id) -> u64 {
        (self.seed << 24) ^ u64::from(id.0) << 8 ^ u64::from(id.1)
    }

    pub fn command(&self, step: &Step) -> (&'static str, String) {
        step.command(|id| (self.content(id), self.len(id)))
    }

    /// What must hold soon.
    pub fn soon(&mut self, mut look: impl FnMut(&mut Ring) -> Law) -> Law {
        let begun = Instant::now();
        loop {
            match look(self) {
                Err(_) if begun.elapsed() < SOON => sleep(Duration::from_millis(20)),
                answer => return answer,
            }
        }
    }

    /// Nobody holds anything once all calls have ended, and blocks are where they go.
    fn is_at_rest(&mut self, host: usize) -> Law {
        self.soon(|ring| {
            let said = ring.ask(host, "held")?;
            law!(said == "held 0 0", "at rest host {host} says {said}");
            Ok(())
        })
    }

    /// Nothing fails any more, and all are there: what was acknowledged comes to all of them, and
    /// again when all have been away.
    pub fn finish(&mut self) -> Law {
        self.calm();
        for host in 0..self.count() {
            if self.hosts[host].is_none() {
                self.open(host, false)?;
            }
        }
        self.read_all()?;
        for host in 0..self.count() {
            self.is_at_rest(host)?;
        }
        self.write_all()?;
        if self.shape.lasts || self.shape.backed {
            for host in 0..self.count() {
                self.leave(host, false)?;
            }
            for host in 0..self.count() {
                self.open(host, false)?;
            }
            self.read_all()?;
        }
        (0..self.count()).try_for_each(|host| self.leave(host, false))
    }

    /// What is missing can be written, whatever has happened to it.
    fn write_all(&mut self) -> Law {
        self.tally.door("final puts");
        for id in (0..4).map(|key| (0, key)) {
            let known = self.known(id);
            (known.begun, known.absent) = (true, false);
            let put = Step::Put {
                ns: id.0,
                keys: vec![id.1],
            };
            let put = self.command(&put).1;
            self.soon(|ring| {
                let said = ring.ask(0, &put)?;
                law!(said == "Done", "{id:?} is not stored at last: {said}");
                (0..ring.count()).try_for_each(|host| ring.comes(host, id))
            })?;
        }
        Ok(())
    }

    fn read_all(&mut self) -> Law {
        for host in 0..self.count() {
            for ns in 0..NAMESPACES as u8 {
                let keys: Vec<u16> = (0..KEYS as u16).collect();
                self.get(host, &Step::Get { ns, keys })?;
            }
        }
        Ok(())
    }
}
