//! What the tests of the store share: depots in a directory of their own, blocks by number, and
//! the raw file of an arena.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::allow_attributes,
    reason = "each test binary uses its own part of this"
)]

#[path = "../../../arena/tests/common/raw.rs"]
pub mod raw;
pub mod several;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvdepot_media::{Copier, CopierConfig};
use kvdepot_store::inspect::{Inspection, Verified};
use kvdepot_store::{
    BlockBuffers, Buffer, Config, Depot, Key, Namespace, NamespaceSpec, Outcome, Task, TierStats,
};
use kvdepot_testkit::Rng;
use kvdepot_testkit::bytes::content;
use serde_json::{Value, json};

/// Longer than anything here takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A directory and what to open in it.
pub struct Place {
    dir: tempfile::TempDir,
    settings: Value,
    pipeline: String,
}

impl Place {
    /// In memory where that is possible: these tests are about processes, not about disks, but for
    /// those of `Nvme`.
    pub fn new(pipeline: &str, cache: &str, dax: &str) -> Place {
        let shm = Path::new("/dev/shm");
        let dir = if shm.is_dir() && !pipeline.contains("Nvme") {
            tempfile::tempdir_in(shm)
        } else {
            tempfile::tempdir()
        }
        .unwrap();
        let mut settings = json!({
            "socket": dir.path().join("s").to_str().unwrap(),
            "lock_wait": "0s",
            "lanes": 2,
        });
        if pipeline.contains("Cache") {
            settings["cache"] = json!({"capacity": cache});
        }
        for (tier, section) in [("Dax", "dax"), ("Nvme", "nvme")] {
            if pipeline.contains(tier) {
                settings[section] = json!({
                    "path": dir.path().join("arena").to_str().unwrap(),
                    "capacity": dax,
                });
            }
        }
        Place {
            dir,
            settings,
            pipeline: pipeline.into(),
        }
    }

    /// Another setting; `section` is empty for the depot's own.
    pub fn with(mut self, section: &str, name: &str, value: impl Into<Value>) -> Place {
        if section.is_empty() {
            self.settings[name] = value.into();
        } else {
            self.settings[section][name] = value.into();
        }
        self
    }

    /// One setting less.
    pub fn without(mut self, section: &str, name: &str) -> Place {
        self.settings[section].as_object_mut().unwrap().remove(name);
        self
    }

    /// Another section in the place of one.
    pub fn with_section(mut self, section: &str, settings: Value) -> Place {
        self.settings[section] = settings;
        self
    }

    /// The configuration with one medium, whatever is there.
    pub fn with_path(&self, path: &Path) -> Config {
        let mut settings = self.settings.clone();
        settings["dax"] = json!({ "path": path });
        settings["socket"] = "off".into();
        Config::new(&self.pipeline, &settings).unwrap()
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn arena(&self) -> PathBuf {
        self.dir.path().join("arena")
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    pub fn config(&self) -> Config {
        Config::new(&self.pipeline, &self.settings).unwrap()
    }

    pub fn open(&self) -> Depot {
        Depot::open(&self.config()).unwrap()
    }

    /// The configuration as a child process gets it.
    pub fn spec(&self) -> String {
        json!([self.pipeline, self.settings]).to_string()
    }
}

/// The configuration that [`Place::spec`] wrote.
pub fn config_of(spec: &str) -> Config {
    let spec: Value = serde_json::from_str(spec).unwrap();
    Config::new(spec[0].as_str().unwrap(), &spec[1]).unwrap()
}

pub fn key(number: u64) -> Key {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&number.to_le_bytes());
    Key(key)
}

pub fn keys(numbers: impl IntoIterator<Item = u64>) -> Vec<Key> {
    numbers.into_iter().map(key).collect()
}

pub fn number(key: &Key) -> u64 {
    u64::from_le_bytes(key.0[..8].try_into().unwrap())
}

pub fn namespace(depot: &Depot) -> Namespace {
    namespace_of(depot, "m")
}

pub fn namespace_of(depot: &Depot, model: &str) -> Namespace {
    let spec = NamespaceSpec {
        model: model.into(),
        dtype: "float32".into(),
        block_tokens: 16,
        ..NamespaceSpec::default()
    };
    depot.namespace(&spec).unwrap()
}

/// The buffer with the content of block `number`.
pub fn block(number: u64, len: usize) -> Buffer {
    Buffer::from_vec(content(number, len))
}

/// Starts a put of blocks with the content of their numbers.
pub fn start_put(ns: &Namespace, numbers: &[u64], len: usize) -> Task {
    let buffers = BlockBuffers::whole(numbers.iter().map(|number| block(*number, len)));
    ns.put(keys(numbers.iter().copied()), buffers).unwrap()
}

/// Puts blocks and waits for the outcomes.
pub fn put(ns: &Namespace, numbers: &[u64], len: usize) -> Vec<bool> {
    start_put(ns, numbers, len).wait(Some(PATIENCE)).unwrap()
}

/// Puts blocks as so many prompts, for which others may go; the outcomes.
pub fn put_each(ns: &Namespace, numbers: &[u64], len: usize) -> Vec<bool> {
    let tasks: Vec<Task> = numbers
        .iter()
        .map(|number| start_put(ns, &[*number], len))
        .collect();
    let outcomes = tasks
        .iter()
        .map(|task| task.wait(Some(PATIENCE)).unwrap()[0]);
    outcomes.collect()
}

/// Puts blocks until all are stored: a tier may wait for less than the machine stands still.
pub fn stored(ns: &Namespace, numbers: &[u64], len: usize) {
    eventually("puts that are stored", || {
        put(ns, numbers, len).iter().all(|stored| *stored)
    });
}

/// Gets blocks; panics at wrong bytes.
pub fn get(ns: &Namespace, numbers: &[u64], len: usize) -> Vec<Outcome> {
    let buffers: Vec<Buffer> = numbers
        .iter()
        .map(|_| Buffer::from_vec(vec![0xEE; len]))
        .collect();
    let task = ns
        .get(
            keys(numbers.iter().copied()),
            BlockBuffers::whole(buffers.clone()),
        )
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

pub fn pin_all(ns: &Namespace, numbers: std::ops::Range<u64>) -> Vec<kvdepot_store::Pin> {
    ns.pin(&keys(numbers), false)
        .unwrap()
        .into_iter()
        .flatten()
        .collect()
}

/// Blocks that are pinned, and those that are written, in the first tier.
pub fn held(depot: &Depot) -> (u64, u64) {
    let tier = &depot.stats().tiers[0];
    (tier.pinned_blocks, tier.reserved_blocks)
}

/// Whether all of these come back.
pub fn has(ns: &Namespace, numbers: &[u64], len: usize) -> bool {
    get(ns, numbers, len)
        .iter()
        .all(|outcome| *outcome == Outcome::Done)
}

/// Fills an arena with blocks of a page, so that neighbours in it are not neighbours in the order
/// of use; how many they are.
pub fn fill_scattered(depot: &Depot, ns: &Namespace, rng: &mut Rng) -> u64 {
    let blocks = depot.stats().tiers[0].capacity_bytes / 4096;
    let numbers: Vec<u64> = (0..blocks).collect();
    assert!(put(ns, &numbers, 4096).iter().all(|stored| *stored));
    for _ in 0..4 * blocks {
        assert!(has(ns, &[rng.below(blocks)], 4096));
    }
    blocks
}

/// Waits until `reached`.
pub fn eventually(what: &str, mut reached: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !reached() {
        assert!(begun.elapsed() < PATIENCE, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub fn copier() -> Copier {
    let mut config = CopierConfig::default();
    config.lanes = 1;
    Copier::new(config).unwrap()
}

/// Verifies the arena as a tool beside the owner would.
pub fn verify(path: &Path) -> Verified {
    let inspection = Inspection::open(path).unwrap();
    inspection.verify(&copier(), |_, _| true).unwrap()
}

/// That nothing is held, and that every byte of the far tier is either free or a block's.
pub fn assert_at_rest(depot: &Depot) {
    // Promotions that nobody waits for hold pins and room until they are done.
    let begun = Instant::now();
    let held = |depot: &Depot| {
        let stats = depot.stats();
        let held = |tier: &TierStats| tier.pinned_blocks + tier.reserved_blocks > 0;
        stats.inflight_load_blocks > 0 || stats.tiers.iter().any(held)
    };
    while held(depot) && begun.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(1));
    }
    let stats = depot.stats();
    assert_eq!(stats.write_back_bytes, 0, "bytes still counted as queued");
    assert_eq!(stats.inflight_load_blocks, 0, "loads that nobody ended");
    for tier in &stats.tiers {
        assert_eq!(tier.pinned_blocks, 0, "pins left in {}", tier.tier);
        assert_eq!(
            tier.reserved_blocks, 0,
            "reservations left in {}",
            tier.tier
        );
        assert!(tier.live_bytes + tier.free_bytes <= tier.capacity_bytes);
    }
    let Some(path) = depot.path() else { return };
    // Eviction ahead of need may be under way still: the table and the index are not looked at at
    // one moment.
    let begun = Instant::now();
    loop {
        let (blocks, _) = Inspection::open(&path).unwrap().blocks().unwrap();
        let used: u64 = blocks.iter().map(|block| block.record.extents.room()).sum();
        let stats = depot.stats();
        let mut tiers = stats.tiers.iter().rev();
        let far = tiers
            .find(|tier| ["Dax", "Nvme"].contains(&&*tier.tier))
            .unwrap();
        let known = far.free_bytes + used + far.lost_bytes;
        let is_one = far.blocks == blocks.len() as u64 && known == far.capacity_bytes;
        if is_one || begun.elapsed() > PATIENCE {
            assert_eq!(far.blocks, blocks.len() as u64, "the index and the table");
            assert_eq!(known, far.capacity_bytes, "extents leak");
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
