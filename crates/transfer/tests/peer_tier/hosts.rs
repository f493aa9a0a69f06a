//! Depots of several hosts in one process, each of which has its share of all.

use std::path::Path;
use std::time::{Duration, Instant};

use kvdepot_store::{
    BlockBuffers, Buffer, Config, Depot, Key, Kinds, Namespace, NamespaceSpec, Outcome, TierStats,
};
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::etcd::free_ports;
use kvdepot_transfer::tier_kind;
use serde_json::{Value, json};

/// Longer than anything here takes on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Addresses that nobody listens at.
pub(crate) fn addresses(count: usize) -> Vec<String> {
    let address = |_| format!("127.0.0.1:{}", free_ports()[0]);
    (0..count).map(address).collect()
}

/// Hosts `a`, `b` and so on, that are the same everywhere.
pub(crate) struct Cluster {
    pub(crate) addresses: Vec<String>,
    pub(crate) capacity: &'static str,
    pub(crate) extra: Value,
    dir: tempfile::TempDir,
}

impl Cluster {
    pub(crate) fn new(count: usize) -> Cluster {
        Cluster {
            addresses: addresses(count),
            capacity: "64MiB",
            extra: json!({"token": "only we know"}),
            dir: tempfile::tempdir().unwrap(),
        }
    }

    pub(crate) fn with(mut self, name: &str, value: impl Into<Value>) -> Cluster {
        self.extra[name] = value.into();
        self
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn name(&self, host: usize) -> String {
        char::from(b'a' + host as u8).to_string()
    }

    /// What a host's section says.
    pub(crate) fn section(&self, host: usize) -> Value {
        let hosts = self.addresses.iter().enumerate();
        let hosts = hosts.map(|(at, address)| format!("{} {address}", self.name(at)));
        let mut section = json!({
            "name": self.name(host),
            "capacity": self.capacity,
            "hosts": hosts.collect::<Vec<_>>().join(", "),
        });
        for (name, value) in self.extra.as_object().unwrap() {
            section[name] = value.clone();
        }
        section
    }

    /// What a host's depot is opened with.
    pub(crate) fn settings(&self, pipeline: &str, host: usize) -> Value {
        let mut settings = json!({
            "socket": "off",
            "lanes": 2,
            // Another host is waited for about half as long: more than a machine stands still.
            "lookup_timeout": "20s",
            "peer": self.section(host),
        });
        if pipeline.contains("Cache") {
            settings["cache"] = json!({"capacity": "8MiB"});
        }
        if pipeline.contains("Dax") {
            let path = self.dir().join(format!("dax-{host}"));
            settings["dax"] = json!({"path": path, "capacity": "8MiB"});
        }
        if pipeline.contains("Posix") {
            let path = self.dir().join("posix");
            settings["posix"] = json!({"path": path, "capacity": "64MiB"});
        }
        settings
    }

    pub(crate) fn open(&self, pipeline: &str, host: usize) -> Depot {
        open(pipeline, &self.settings(pipeline, host))
    }

    pub(crate) fn open_all(&self, pipeline: &str) -> Vec<Depot> {
        let hosts = 0..self.addresses.len();
        hosts.map(|host| self.open(pipeline, host)).collect()
    }
}

pub(crate) fn open(pipeline: &str, settings: &Value) -> Depot {
    Depot::open(&config(pipeline, settings).unwrap()).unwrap()
}

pub(crate) fn config(pipeline: &str, settings: &Value) -> Result<Config, kvdepot_store::Error> {
    let kinds = Kinds::standard().with(tier_kind());
    Config::with_kinds(&kinds, pipeline, settings)
}

pub(crate) fn key(number: u64) -> Key {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&number.to_le_bytes());
    Key(key)
}

pub(crate) fn keys(numbers: &[u64]) -> Vec<Key> {
    numbers.iter().map(|number| key(*number)).collect()
}

pub(crate) fn namespace(depot: &Depot) -> Namespace {
    depot
        .namespace(&NamespaceSpec {
            model: "m".into(),
            dtype: "float32".into(),
            block_tokens: 16,
            ..NamespaceSpec::default()
        })
        .unwrap()
}

pub(crate) fn put(ns: &Namespace, numbers: &[u64], len: usize) -> Vec<bool> {
    let block = |number: &u64| Buffer::from_vec(content(*number, len));
    let buffers = BlockBuffers::whole(numbers.iter().map(block));
    ns.put(keys(numbers), buffers)
        .unwrap()
        .wait(Some(PATIENCE))
        .unwrap()
}

/// Gets blocks; panics at wrong bytes.
pub(crate) fn get(ns: &Namespace, numbers: &[u64], len: usize) -> Vec<Outcome> {
    let buffer = |_: &u64| Buffer::from_vec(vec![0xEE; len]);
    let buffers: Vec<Buffer> = numbers.iter().map(buffer).collect();
    let task = ns
        .get(keys(numbers), BlockBuffers::whole(buffers.clone()))
        .unwrap();
    task.wait(Some(PATIENCE)).unwrap();
    let outcomes = task.outcomes();
    for ((number, buffer), outcome) in numbers.iter().zip(&buffers).zip(&outcomes) {
        assert!(
            *outcome != Outcome::Done || buffer.to_vec() == content(*number, len),
            "wrong bytes for block {number}"
        );
    }
    outcomes
}

pub(crate) fn count_done(outcomes: &[Outcome]) -> usize {
    outcomes.iter().filter(|one| **one == Outcome::Done).count()
}

pub(crate) fn has(ns: &Namespace, numbers: &[u64], len: usize) -> bool {
    count_done(&get(ns, numbers, len)) == numbers.len()
}

/// What the tier says of this host.
pub(crate) fn share(depot: &Depot) -> TierStats {
    let stats = depot.stats();
    let mut tiers = stats.tiers.into_iter();
    tiers.find(|tier| tier.tier == "Peer").unwrap()
}

pub(crate) fn eventually(what: &str, mut reached: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !reached() {
        assert!(begun.elapsed() < PATIENCE, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// That nothing is pinned or reserved in any share, however it was held.
pub(crate) fn at_rest(depots: &[Depot]) {
    let held = |depot: &Depot| share(depot).pinned_blocks + share(depot).reserved_blocks;
    eventually("rest", || depots.iter().all(|depot| held(depot) == 0));
}
