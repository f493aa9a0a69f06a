//! A depot that is under pressure, and the memory that calls copy from and to.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvdepot_store::{BlockBuffers, Buffer, Config, Depot, Key, Namespace};
use serde_json::{Value, json};

use crate::bench::media::{Region, spec};
use crate::bench::report::Row;
use crate::error::Error;

/// Bytes of a block's payload.
pub(super) const BLOCK: usize = 4096;

/// Longest wait for the write-back queue.
const PATIENCE: Duration = Duration::from_secs(60);

/// Blocks of a call with which an engine stores a part of a prompt.
pub(super) const STEP: usize = 16;

/// Whether blocks of the last tier are files.
pub(super) fn is_of_files(tier: &str) -> bool {
    tier.ends_with("Posix")
}

/// A new depot with a capacity of so many blocks in its last tier.
pub(super) struct Store {
    pub(super) depot: Depot,
    pub(super) ns: Namespace,
    /// Its own directory, removed with the depot.
    dir: PathBuf,
}

impl Store {
    pub(super) fn new(
        dir: &Path,
        tier: &str,
        blocks: u64,
        admission: &str,
    ) -> Result<Store, Error> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let dir = dir.join(NEXT.fetch_add(1, Ordering::Relaxed).to_string());
        fs::create_dir(&dir).map_err(Error::io(&dir))?;
        let config = Config::new(tier, &settings(&dir, tier, blocks, admission))?;
        let depot = kvdepot_service::open(&config)?;
        let ns = depot.namespace(&spec())?;
        Ok(Store { depot, ns, dir })
    }

    /// Stores blocks that all have this payload, in one call.
    pub(super) fn put(
        &self,
        after: Option<Key>,
        keys: &[Key],
        payload: &Buffer,
    ) -> Result<(), Error> {
        let buffers = BlockBuffers::whole(keys.iter().map(|_| payload.clone()));
        self.ns
            .put_after(after, keys.to_vec(), buffers)?
            .wait(None)?;
        Ok(())
    }

    /// Waits until the write-back queue is empty.
    pub(super) fn drain(&self) -> Result<(), Error> {
        match self.depot.drain(PATIENCE) {
            true => Ok(()),
            false => Err(Error::Bench(
                "the write-back queue did not empty within 60 s".into(),
            )),
        }
    }

    /// Serves a prompt as an engine does: loads its stored prefix, and stores the other blocks in
    /// calls of [`STEP`] blocks. Returns the number of blocks in the prefix.
    pub(super) fn serve(&self, keys: &[Key], memory: &Memory) -> Result<usize, Error> {
        let there = self.ns.prefix(keys)?;
        for some in keys[..there].chunks(memory.blocks) {
            let buffers = memory.buffers(some.len())?;
            self.ns.get(some.to_vec(), buffers)?.wait(None)?;
        }
        let mut after = there.checked_sub(1).map(|last| keys[last]);
        for some in keys[there..].chunks(STEP) {
            self.put(after, some, &memory.payload)?;
            after = some.last().copied();
        }
        Ok(there)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.depot.close();
        // What is left goes with the directory around it.
        let _best_effort = fs::remove_dir_all(&self.dir);
    }
}

/// The caller's memory.
pub(super) struct Memory {
    /// Bytes of each block that is stored.
    pub(super) payload: Buffer,
    /// Memory of so many blocks that gets load into.
    loaded: Region,
    pub(super) blocks: usize,
}

impl Memory {
    pub(super) fn new(blocks: usize) -> Result<Memory, Error> {
        Ok(Memory {
            payload: Buffer::from_vec(vec![7; BLOCK]),
            loaded: Region::new(blocks * BLOCK)?,
            blocks,
        })
    }

    /// Returns a buffer for each of the first `count` blocks.
    pub(super) fn buffers(&self, count: usize) -> Result<BlockBuffers, Error> {
        self.loaded.buffers(BLOCK, 0..count)
    }
}

fn settings(dir: &Path, tier: &str, blocks: u64, admission: &str) -> Value {
    let block = BLOCK as u64;
    // Records of 128 bytes, and alignment.
    let arena = json!({
        "path": dir.join("arena"), "records": blocks,
        "capacity": blocks * (block + 128) + (4 << 20),
    });
    let near = if tier == "Cache" { blocks } else { blocks / 4 };
    let mut settings = json!({"admission": admission, "socket": "off"});
    for name in tier.split('|') {
        match name {
            "Cache" => settings["cache"] = json!({"capacity": near * block}),
            "Posix" => {
                // A header of one page in front of each payload.
                settings["posix"] = json!({
                    "path": dir.join("files"), "capacity": 2 * blocks * block,
                });
            }
            _ => settings[name.to_lowercase()] = arena.clone(),
        }
    }
    settings
}

pub(super) fn row(metric: &'static str, unit: &'static str, case: Value, value: f64) -> Row {
    Row {
        bench: "pressure",
        case,
        metric,
        unit,
        value,
        limit: None,
        ratio: None,
        rounds: 1,
        limit_name: None,
    }
}
