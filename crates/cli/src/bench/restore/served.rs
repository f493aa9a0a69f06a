//! A depot of one tier that this process fills and serves.

use std::path::{Path, PathBuf};

use kvdepot_store::{BlockBuffers, Buffer, Config, Depot, Key};
use serde_json::json;

use crate::bench::media::spec;
use crate::bench::random::Random;
use crate::error::Error;
use crate::leftovers::Scratch;

/// Bytes that a call moves while it is filled.
const FILL: usize = 32 << 20;

pub(super) struct Served {
    pub(super) depot: Depot,
    /// In the order of the medium.
    pub(super) keys: Vec<Key>,
    blocks: usize,
    block: usize,
    lanes: usize,
    scratch: Scratch,
}

impl Served {
    /// One of so many blocks.
    pub(super) fn new(
        dir: &Path,
        blocks: usize,
        block: usize,
        lanes: usize,
    ) -> Result<Served, Error> {
        let scratch = Scratch::new(dir)?;
        let depot = open(&scratch, blocks, block, lanes)?;
        let keys = keys(blocks);
        let ns = depot.namespace(&spec())?;
        let payload = Buffer::from_vec(vec![7; block]);
        for some in keys.chunks((FILL / block).max(1)) {
            let buffers = BlockBuffers::whole(some.iter().map(|_| payload.clone()));
            if ns.put(some.to_vec(), buffers)?.wait(None)?.contains(&false) {
                return Err(Error::Bench("not every block was stored".into()));
            }
        }
        Ok(Served {
            depot,
            keys,
            blocks,
            block,
            lanes,
            scratch,
        })
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.depot.socket().unwrap_or_default()
    }

    /// Opens it again after a close.
    pub(super) fn open_again(&mut self) -> Result<(), Error> {
        self.depot = open(&self.scratch, self.blocks, self.block, self.lanes)?;
        Ok(())
    }
}

/// The blocks' keys; the same in every process.
pub(super) fn keys(blocks: usize) -> Vec<Key> {
    let mut random = Random(17);
    (0..blocks).map(|_| random.key()).collect()
}

fn open(scratch: &Scratch, blocks: usize, block: usize, lanes: usize) -> Result<Depot, Error> {
    let records = blocks + blocks / 64 + 64;
    let capacity = records * (block + 128) + (4 << 20);
    let settings = json!({
        "lanes": lanes, "lock_wait": "10s", "socket": scratch.path().join("sock"),
        "dax": {
            "path": scratch.path().join("arena"),
            "capacity": capacity.next_multiple_of(4096), "records": records,
        },
    });
    Ok(kvdepot_service::open(&Config::new("Dax", &settings)?)?)
}
