//! The depot of one case, and the plain files beside it.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Instant;

use kvdepot_media::file::plain::{cool, settle};
use kvdepot_store::{Config, Depot, Key, Namespace, Task};
use serde_json::json;

use super::plan::{Cell, Plan};
use super::raw::Raw;
use crate::bench::media::{Region, spec};
use crate::bench::random::Random;
use crate::error::Error;
use crate::interrupt::Interrupt;
use crate::leftovers::Scratch;

/// Calls that are under way at a time, as far as the depth has blocks for them: a call ends with
/// its last block, and with few of them much less than the depth would be under way mostly.
const CALLS: usize = 8;

/// Bytes of a call while a store is filled.
const FILL: usize = 32 << 20;

/// A depot of one tier that is full of blocks, and as many plain ones.
pub(super) struct Store {
    ns: Namespace,
    depot: Depot,
    pub(super) raw: Raw,
    random: Random,
    pub(super) keys: Vec<Key>,
    block: usize,
    /// Where the tier's files go through the page cache.
    cached: Option<HashMap<String, PathBuf>>,
    path: PathBuf,
    /// Goes last.
    _scratch: Scratch,
}

impl Store {
    pub(super) fn open(
        plan: &Plan,
        cell: &Cell,
        region: &Region,
        interrupt: &Interrupt,
    ) -> Result<Store, Error> {
        let scratch = Scratch::new(&plan.dir)?;
        let block = cell.block;
        let count = plan.size / block;
        let path = scratch.path().join("tier");
        let depot = open(&path, &cell.tier, cell.direct, "process", plan, block)?;
        let raw = scratch.path().join("plain");
        let in_one = cell.tier == "Nvme";
        let raw = Raw::new(&raw, in_one, block, count, region.whole())?;
        let mut store = Store {
            ns: depot.namespace(&spec())?,
            depot,
            raw,
            random: Random(7),
            keys: Vec::new(),
            block,
            cached: None,
            path,
            _scratch: scratch,
        };
        // What is written in the rounds goes where something was before.
        let spare = plan.batch / block;
        let mut all = store.fill(count + spare, region, interrupt)?;
        let gone = all.split_off(count);
        store.remove(&gone)?;
        // In no order of the medium: nothing is a neighbour of what is asked for next.
        store.random.shuffle(&mut all);
        store.keys = all;
        if !cell.direct {
            store.cached = Some(store.files()?);
        }
        Ok(store)
    }

    fn fill(
        &mut self,
        count: usize,
        region: &Region,
        interrupt: &Interrupt,
    ) -> Result<Vec<Key>, Error> {
        let mut all = Vec::with_capacity(count);
        let call = (FILL / self.block).max(1);
        while all.len() < count {
            interrupt.check()?;
            let keys = self.new_keys(call.min(count - all.len()));
            let slots = (all.len()..).map(|number| number % region.blocks(self.block));
            let buffers = region.buffers(self.block, slots.take(keys.len()))?;
            done(&self.ns.put(keys.clone(), buffers)?, "stored")?;
            all.extend(keys);
        }
        Ok(all)
    }

    pub(super) fn new_keys(&mut self, count: usize) -> Vec<Key> {
        (0..count).map(|_| self.random.key()).collect()
    }

    /// Blocks in the files of a tier, by their key.
    fn files(&self) -> Result<HashMap<String, PathBuf>, Error> {
        let file = File::open(&self.path).map_err(Error::io(&self.path))?;
        settle(file.as_fd())?;
        let blocks = self.path.join("blocks");
        let mut found = HashMap::new();
        for folder in std::fs::read_dir(&blocks).map_err(Error::io(&blocks))? {
            let folder = folder.map_err(Error::io(&blocks))?.path();
            for file in std::fs::read_dir(&folder).map_err(Error::io(&folder))? {
                let file = file.map_err(Error::io(&folder))?;
                let name = file.file_name().to_string_lossy().into_owned();
                let key = name.split('-').next().unwrap_or_default().to_owned();
                found.insert(key, file.path());
            }
        }
        Ok(found)
    }

    /// Empties the page cache of blocks, where their tier goes through it.
    pub(super) fn cool(&self, keys: &[Key]) -> Result<(), Error> {
        let Some(files) = &self.cached else {
            return Ok(());
        };
        for key in keys {
            let path = files.get(&key.to_string());
            let path = path.ok_or_else(|| Error::Bench("a block has no file".into()))?;
            cool(&File::open(path).map_err(Error::io(path))?)?;
        }
        Ok(())
    }

    /// Gets blocks into slots of the region, `depth` of them at a time; seconds.
    pub(super) fn load(
        &self,
        keys: &[Key],
        slots: &[usize],
        region: &Region,
        depth: usize,
    ) -> Result<f64, Error> {
        let start = Instant::now();
        self.keep_going(keys, slots, depth, "got", |keys, slots| {
            let buffers = region.buffers(self.block, slots.iter().copied())?;
            Ok(self.ns.get(keys.to_vec(), buffers)?)
        })?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Puts slots of the region as new blocks, `depth` of them at a time; seconds.
    pub(super) fn dump(
        &self,
        keys: &[Key],
        slots: &[usize],
        region: &Region,
        depth: usize,
    ) -> Result<f64, Error> {
        let start = Instant::now();
        self.keep_going(keys, slots, depth, "stored", |keys, slots| {
            let buffers = region.buffers(self.block, slots.iter().copied())?;
            Ok(self.ns.put(keys.to_vec(), buffers)?)
        })?;
        Ok(start.elapsed().as_secs_f64())
    }

    fn keep_going(
        &self,
        keys: &[Key],
        slots: &[usize],
        depth: usize,
        what: &str,
        begin: impl Fn(&[Key], &[usize]) -> Result<Task, Error>,
    ) -> Result<(), Error> {
        let call = (depth / CALLS).max(1);
        let mut under_way: VecDeque<Task> = VecDeque::new();
        for (keys, slots) in keys.chunks(call).zip(slots.chunks(call)) {
            if under_way.len() * call >= depth
                && let Some(first) = under_way.pop_front()
            {
                done(&first, what)?;
            }
            under_way.push_back(begin(keys, slots)?);
        }
        under_way.iter().try_for_each(|task| done(task, what))
    }

    /// Removes what a dump has stored, once it is on the disk.
    pub(super) fn remove(&self, keys: &[Key]) -> Result<(), Error> {
        if self.path.is_dir() {
            let dir = File::open(&self.path).map_err(Error::io(&self.path))?;
            settle(dir.as_fd())?;
        }
        match self.ns.remove(keys)? {
            removed if removed == keys.len() => Ok(()),
            removed => Err(Error::Bench(format!(
                "{removed} of {} blocks were removed",
                keys.len()
            ))),
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.depot.close();
    }
}

/// A depot of one tier, with room for what is measured.
pub(super) fn open(
    path: &Path,
    tier: &str,
    direct: bool,
    durability: &str,
    plan: &Plan,
    block: usize,
) -> Result<Depot, Error> {
    let (size, batch) = (plan.size as u64, plan.batch as u64);
    let mut settings = json!({"socket": "off", "lock_wait": "0s"});
    if tier == "Nvme" {
        // No room but for what is there, and what is written in a round.
        let records = (size + batch) / block as u64 + 1;
        let table = (records * 256).next_multiple_of(4096);
        let capacity = size + batch + table + (4 << 20);
        settings["nvme"] = json!({
            "path": path, "capacity": capacity, "records": records, "durability": durability,
        });
    } else {
        // The oldest would go otherwise.
        settings["posix"] = json!({
            "path": path, "capacity": 4 * (size + batch) + (1 << 30),
            "direct": if direct { "true" } else { "false" }, "durability": durability,
        });
    }
    Ok(kvdepot_service::open(&Config::new(tier, &settings)?)?)
}

/// Waits until all blocks of a call are there.
pub(super) fn done(task: &Task, what: &str) -> Result<(), Error> {
    let all = task.wait(None)?;
    let missing = all.iter().filter(|ok| !**ok).count();
    match missing {
        0 => Ok(()),
        _ => Err(Error::Bench(format!(
            "{missing} of {} blocks were not {what}",
            all.len()
        ))),
    }
}
