//! The memory that `bench memory` copies between, and the depots over it.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

use kvdepot_host::limits;
use kvdepot_media::{Buffer, Mapping, Pages};
use kvdepot_service::Mover;
use kvdepot_store::format::record;
use kvdepot_store::{BlockBuffers, Config, Depot, Key, Namespace};
use serde_json::json;

use super::random::Random;
use crate::error::Error;
use crate::leftovers::Scratch;

/// Memory of the caller, already touched, cut into blocks.
pub(super) struct Region {
    whole: Buffer,
}

impl Region {
    /// Of huge pages where the system gives them, as whoever wants to be fast has it.
    pub(super) fn new(bytes: usize) -> Result<Region, Error> {
        Self::of(Pages::Huge, bytes)
    }

    pub(super) fn of(pages: Pages, bytes: usize) -> Result<Region, Error> {
        let whole = touched(Mapping::anonymous_of(pages, "kvdepot-bench", bytes as u64)?)?;
        Ok(Region { whole })
    }

    /// With bytes that no disk compresses, and of which no two pieces are alike.
    pub(super) fn filled(bytes: usize) -> Result<Region, Error> {
        const PIECE: usize = 1 << 20;
        let region = Region::new(bytes)?;
        let mut random = Random(23);
        let mut piece = vec![0; PIECE];
        for at in (0..bytes).step_by(PIECE) {
            for word in piece.chunks_exact_mut(8) {
                word.copy_from_slice(&random.next().to_le_bytes());
            }
            region.whole.write_at(at, &piece[..PIECE.min(bytes - at)])?;
        }
        Ok(region)
    }

    pub(super) fn whole(&self) -> &Buffer {
        &self.whole
    }

    /// How many blocks it has room for.
    pub(super) fn blocks(&self, block: usize) -> usize {
        self.whole.len() / block
    }

    /// The blocks with these numbers, as buffers for a call.
    pub(super) fn buffers(
        &self,
        block: usize,
        numbers: impl Iterator<Item = usize>,
    ) -> Result<BlockBuffers, Error> {
        let mut buffers = BlockBuffers::default();
        for number in numbers {
            buffers.push([self.whole.slice(number * block, block)?]);
        }
        Ok(buffers)
    }
}

/// A depot of one tier, its medium as another mapping of the same memory, and its keys.
pub(super) struct Store {
    depot: Depot,
    ns: Namespace,
    mover: Mover,
    random: Random,
    /// Bytes of blocks that it holds at most.
    bytes: usize,
}

/// Bytes that a call moves while a store is filled.
const FILL: usize = 32 << 20;

impl Store {
    /// A store of `bytes` for blocks of at least `block` bytes, on `tier`.
    pub(super) fn open(
        scratch: &Scratch,
        tier: &str,
        bytes: usize,
        block: usize,
        threads: usize,
    ) -> Result<Store, Error> {
        Self::open_with(scratch, tier, bytes, block, json!({"lanes": threads}))
    }

    /// The same with more of a depot's settings.
    pub(super) fn open_with(
        scratch: &Scratch,
        tier: &str,
        bytes: usize,
        block: usize,
        mut settings: serde_json::Value,
    ) -> Result<Store, Error> {
        let path = scratch.path().join("arena");
        let records = bytes / block;
        // The table, and the alignment of the data.
        let capacity = bytes + records * 128 + (4 << 20);
        settings["lock_wait"] = json!("0s");
        settings["socket"] = json!(scratch.path().join("sock"));
        match tier {
            "Cache" => settings["cache"] = json!({"capacity": bytes}),
            _ => {
                settings["dax"] = json!({"path": &path, "capacity": capacity, "records": records});
            }
        }
        let depot = kvdepot_service::open(&Config::new(tier, &settings)?)?;
        if path.exists() {
            // Without a name it goes with this process, however that ends.
            std::fs::remove_file(&path).map_err(Error::io(&path))?;
        }
        let ns = depot.namespace(&spec())?;
        let socket = depot.socket().unwrap_or_default();
        let mover = Mover::attach(&socket, Some(1), true)?;
        // As a served depot is: memory is there, of huge pages where the system gives them.
        mover.populate()?;
        Ok(Store {
            depot,
            ns,
            mover,
            random: Random(1),
            bytes,
        })
    }

    pub(super) fn namespace(&self) -> &Namespace {
        &self.ns
    }

    /// Fresh keys.
    pub(super) fn keys(&mut self, count: usize) -> Vec<Key> {
        (0..count).map(|_| self.random.key()).collect()
    }

    /// Removes the oldest blocks until `count` have room.
    pub(super) fn make_room(
        &self,
        old: &mut VecDeque<Vec<Key>>,
        count: usize,
    ) -> Result<(), Error> {
        let mut room = 0;
        while room < count {
            let oldest = old.pop_front().unwrap_or_default();
            let removed = self.ns.remove(&oldest)?;
            if removed == 0 {
                return Err(Error::Bench("there was nothing to remove".into()));
            }
            room += removed;
        }
        Ok(())
    }

    /// Fills it with blocks in place of those that it has; their keys in the order of the medium.
    pub(super) fn fill(&mut self, from: &Region, block: usize) -> Result<Vec<Key>, Error> {
        self.ns.clear()?;
        let mut all = Vec::with_capacity(self.bytes / block);
        let count = (FILL / block).max(1);
        while all.len() < self.bytes / block {
            let count = count.min(self.bytes / block - all.len());
            let keys = self.keys(count);
            let numbers = (0..count).map(|number| number % from.blocks(block));
            let task = self.ns.put(keys.clone(), from.buffers(block, numbers)?)?;
            let failed = task.wait(None)?.iter().filter(|ok| !**ok).count();
            if failed > 0 {
                return Err(Error::Bench(format!(
                    "{failed} of {count} blocks were not stored for lack of space"
                )));
            }
            all.extend(keys);
        }
        Ok(all)
    }

    /// Where blocks lie in the medium.
    pub(super) fn offsets(&self, keys: &[Key]) -> Result<Vec<u64>, Error> {
        let pins = self.ns.pin(keys, false)?;
        let locate = |pin: &Option<kvdepot_store::Pin>| {
            let pin = pin
                .as_ref()
                .ok_or_else(|| Error::Bench("a block was evicted".into()))?;
            match self.mover.locate(&pin.placement(), 0)?[..] {
                [(_, offset, _)] => Ok(offset),
                _ => Err(Error::Bench("a block is stored in several extents".into())),
            }
        };
        let offsets = pins.iter().map(locate).collect();
        self.ns
            .unpin(&pins.into_iter().flatten().collect::<Vec<_>>(), false);
        offsets
    }

    /// The medium as the plain copies see it, its pages mapped.
    pub(super) fn medium(&self) -> Result<Buffer, Error> {
        self.mover.populate()?;
        let medium = self.mover.media().into_iter().next();
        medium.ok_or_else(|| Error::Bench("the depot has no medium".into()))
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.mover.close();
        self.depot.close();
    }
}

/// Memory of the kind that a tier is made of, already touched.
pub(super) fn target(
    scratch: &Scratch,
    tier: &str,
    pages: Pages,
    bytes: usize,
) -> Result<Buffer, Error> {
    if tier == "Cache" {
        return touched(Mapping::anonymous_of(pages, "kvdepot-bench", bytes as u64)?);
    }
    let path = scratch.path().join("target");
    let mapping = Mapping::create(&path, bytes as u64)?;
    std::fs::remove_file(&path).map_err(Error::io(&path))?;
    touched(mapping)
}

/// All of a mapping, its pages there.
fn touched(mapping: Arc<Mapping>) -> Result<Buffer, Error> {
    let bytes = mapping.len();
    mapping.populate_write(0, bytes)?;
    Ok(mapping.buffer(0, bytes)?)
}

/// Refuses so many blocks where `dir` has no room for an arena of them and of `more`, `block` bytes
/// each.
pub(super) fn check_blocks(
    dir: &Path,
    blocks: usize,
    more: usize,
    block: u64,
) -> Result<(), Error> {
    let free = limits::disk_free(dir)?;
    let all = (blocks as u64).saturating_add(more as u64);
    if all.saturating_mul(block + record::LEN as u64) <= free {
        return Ok(());
    }
    let (free, dir) = (kvdepot_store::config::size::show(free), dir.display());
    Err(Error::Usage {
        field: "--blocks",
        value: blocks.to_string(),
        allowed: format!("a number that fits into {dir} ({free} free); use another --dir"),
    })
}

/// Where a tier's file is made unless it is said: memory, which is what is measured.
pub(super) fn in_memory(dir: Option<&Path>) -> &Path {
    dir.unwrap_or_else(|| Path::new("/dev/shm"))
}

/// Refuses sizes that this machine has no memory for.
pub(super) fn check_room(dir: &Path, size: usize, region: usize) -> Result<(), Error> {
    let refuse = |allowed: u64, what: String| {
        Err(Error::Usage {
            field: "--size",
            value: kvdepot_store::config::size::show(size as u64),
            allowed: format!(
                "a size that fits {what}; free: {}",
                kvdepot_store::config::size::show(allowed)
            ),
        })
    };
    // The arena, as much again to put into by plain copies, and the caller's memory.
    let needed = 2 * size as u64 + region as u64 + (256 << 20);
    let memory = limits::memory_allowed()?;
    if needed > memory / 4 * 3 {
        return refuse(memory, "into memory twice".into());
    }
    let free = limits::disk_free(dir)?;
    if 2 * size as u64 + (256 << 20) > free {
        return refuse(
            free,
            format!("into {} twice (or use another --dir)", dir.display()),
        );
    }
    Ok(())
}

/// What benchmarks call the model of their blocks.
pub(super) fn spec() -> kvdepot_store::NamespaceSpec {
    kvdepot_store::NamespaceSpec {
        model: "kvdepot-bench".into(),
        dtype: "bytes".into(),
        block_tokens: 1,
        ..Default::default()
    }
}
