//! The depot of one case, and the plain files beside it.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use kvdepot_media::file::plain::{cool, settle};
use kvdepot_store::{Config, Depot, Key};
use serde_json::json;

use super::blocks::Blocks;
use super::plan::{Cell, Plan};
use super::raw::Raw;
use crate::bench::media::Region;
use crate::error::Error;
use crate::interrupt::Interrupt;
use crate::leftovers::Scratch;

/// A depot of one tier that is full of blocks, and as many plain ones.
pub(super) struct Store {
    pub(super) blocks: Blocks,
    pub(super) raw: Raw,
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
            blocks: Blocks::new(depot, block)?,
            raw,
            cached: None,
            path,
            _scratch: scratch,
        };
        // What is written in the rounds goes where something was before.
        let spare = plan.batch / block;
        let mut all = store.blocks.fill(count + spare, region, interrupt)?;
        let gone = all.split_off(count);
        store.remove(&gone)?;
        store.blocks.keep(all);
        if !cell.direct {
            store.cached = Some(store.files()?);
        }
        Ok(store)
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

    /// Removes what a dump has stored, once it is on the disk.
    pub(super) fn remove(&self, keys: &[Key]) -> Result<(), Error> {
        if self.path.is_dir() {
            let dir = File::open(&self.path).map_err(Error::io(&self.path))?;
            settle(dir.as_fd())?;
        }
        self.blocks.remove(keys)
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
