//! The depot of one case on a disk, and the plain files beside it.

use super::plan::{Cell, Plan};
use super::raw::Raw;
use super::tier::{Tier, open, settings};
use crate::bench::media::Region;
use crate::error::Error;
use crate::interrupt::Interrupt;
use crate::leftovers::Scratch;

/// A depot of one tier that is full of blocks, and as many plain ones.
pub(super) struct Store {
    pub(super) tier: Tier,
    pub(super) raw: Raw,
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
        let settings = settings(&path, &cell.tier, cell.direct, "process", plan, block);
        let depot = open(&cell.tier, &settings)?;
        let raw = scratch.path().join("plain");
        let in_one = cell.tier == "Nvme";
        let raw = Raw::new(&raw, in_one, block, count, region.whole())?;
        let tier = Tier::filled(depot, Some(path), (block, count), region, interrupt)?;
        let tier = if cell.direct { tier } else { tier.cached()? };
        Ok(Store {
            tier,
            raw,
            _scratch: scratch,
        })
    }
}
