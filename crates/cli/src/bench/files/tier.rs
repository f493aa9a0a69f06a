//! A depot of one tier that is full of blocks, which come and go in rounds.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use kvdepot_media::file::plain::{cool, settle};
use kvdepot_store::{Config, Depot, Key};
use serde_json::{Value, json};

use super::blocks::Blocks;
use super::plan::{Plan, RINGS};
use crate::bench::media::Region;
use crate::error::Error;
use crate::interrupt::Interrupt;

/// Where the payload of a block's file begins.
const PAYLOAD: u64 = 4096;

/// The depot, its blocks, and where they lie.
pub(super) struct Tier {
    pub(super) blocks: Blocks,
    /// Of files.
    path: Option<PathBuf>,
    /// Where files go through the page cache: each block's, and from where on.
    cached: Option<(HashMap<String, PathBuf>, u64)>,
}

impl Tier {
    /// A depot with so many blocks.
    pub(super) fn filled(
        depot: Depot,
        path: Option<PathBuf>,
        (block, count): (usize, usize),
        region: &Region,
        interrupt: &Interrupt,
    ) -> Result<Tier, Error> {
        let mut tier = Tier {
            blocks: Blocks::new(depot, block)?,
            path,
            cached: None,
        };
        // What is written in the rounds goes where something was before.
        let spare = tier.path.as_ref().map_or(0, |_| region.blocks(block));
        let mut all = tier.blocks.fill(count + spare, region, interrupt)?;
        let gone = all.split_off(count);
        tier.remove(&gone)?;
        tier.blocks.keep(all);
        Ok(tier)
    }

    /// Its files go through the page cache.
    pub(super) fn cached(self) -> Result<Tier, Error> {
        self.cached_from(0)
    }

    /// Its payloads may; headers do in each tier.
    pub(super) fn maybe_cached(self) -> Result<Tier, Error> {
        self.cached_from(PAYLOAD)
    }

    fn cached_from(mut self, from: u64) -> Result<Tier, Error> {
        if let Some(path) = &self.path {
            let file = File::open(path).map_err(Error::io(path))?;
            settle(file.as_fd())?;
            self.cached = Some((files(path)?, from));
        }
        Ok(self)
    }

    /// Empties the page cache of blocks, where their tier goes through it.
    pub(super) fn cool(&self, keys: &[Key]) -> Result<(), Error> {
        let Some((files, from)) = &self.cached else {
            return Ok(());
        };
        for key in keys {
            let path = files.get(&key.to_string());
            let path = path.ok_or_else(|| Error::Bench("a block has no file".into()))?;
            cool(&File::open(path).map_err(Error::io(path))?, *from)?;
        }
        Ok(())
    }

    /// Removes what a dump has stored, once it is on the disk.
    pub(super) fn remove(&self, keys: &[Key]) -> Result<(), Error> {
        if let Some(path) = self.path.as_ref().filter(|path| path.is_dir()) {
            let dir = File::open(path).map_err(Error::io(path))?;
            settle(dir.as_fd())?;
        }
        match keys {
            [] => Ok(()),
            keys => self.blocks.remove(keys),
        }
    }
}

/// Blocks in the files of a tier, by their key.
fn files(path: &Path) -> Result<HashMap<String, PathBuf>, Error> {
    let blocks = path.join("blocks");
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

/// A depot of one tier.
pub(super) fn open(tier: &str, settings: &Value) -> Result<Depot, Error> {
    Ok(kvdepot_service::open(&Config::new(tier, settings)?)?)
}

/// The settings of a tier with room for what is measured.
pub(super) fn settings(
    path: &Path,
    tier: &str,
    direct: bool,
    durability: &str,
    plan: &Plan,
    block: usize,
) -> Value {
    let (size, batch) = (plan.size as u64, plan.batch as u64);
    // The oldest would go otherwise.
    let mut section = json!({
        "path": path, "capacity": 4 * (size + batch) + (1 << 30), "durability": durability,
    });
    match tier {
        "Nvme" => {
            // No room but for what is there, and what is written in a round.
            let records = (size + batch) / block as u64 + 1;
            let table = (records * 256).next_multiple_of(4096);
            section["capacity"] = (size + batch + table + (4 << 20)).into();
            section["records"] = records.into();
        }
        RINGS => {
            if let Some(library) = &plan.library {
                section["library"] = json!(library);
            }
        }
        _ => section["direct"] = if direct { "true" } else { "false" }.into(),
    }
    let mut settings = json!({"socket": "off", "lock_wait": "0s"});
    settings[tier.to_lowercase()] = section;
    settings
}
