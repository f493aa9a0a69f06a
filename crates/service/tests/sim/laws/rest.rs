//! What must hold when nobody works any more.

use std::collections::BTreeSet;

use kvdepot_store::Stats;
use kvdepot_testkit::sim::twin::Id;

use crate::world::{HeldPin, Law, PATIENCE, World, eventually, law, room};

/// The copies that are pinned: a block that several pins hold counts once.
fn copies(pins: &[HeldPin]) -> BTreeSet<(&str, Id, u64)> {
    let copy = |pin: &HeldPin| (pin.pin.tier(), pin.id, pin.birth);
    pins.iter().map(copy).collect()
}

impl World {
    /// Waits until nobody works any more: nothing is held but by those who are known.
    pub fn quiet(&self) -> Law {
        if self.flying.borrow().iter().any(|one| !one.task.is_done()) {
            return Ok(());
        }
        eventually(|| {
            let stats = self.owner().stats();
            let pins = self.pins.borrow();
            let pinned = copies(&pins);
            let held = self.held.borrow().len() as u64;
            let all_pinned: u64 = stats.tiers.iter().map(|tier| tier.pinned_blocks).sum();
            let all_reserved: u64 = stats.tiers.iter().map(|tier| tier.reserved_blocks).sum();
            law!(
                all_reserved == held,
                "{all_reserved} blocks stay reserved, {held} are known"
            );
            // A block on its way far waits where somebody holds its room there.
            let waits = !self.is_single() && held > 0;
            law!(
                all_pinned == pinned.len() as u64 || waits,
                "{all_pinned} blocks stay pinned, known are {pinned:?}"
            );
            Ok(())
        })
    }

    /// Nothing is held that nobody holds. All that could be done was done.
    pub fn at_rest(&self) -> Law {
        for one in self.flying.borrow().iter() {
            let held = self.held.borrow();
            let waits = one
                .ids
                .iter()
                .any(|id| held.iter().any(|held| held.id == *id));
            // Those whose room somebody holds wait for it too.
            let behind = !self.is_single() && !held.is_empty();
            law!(
                waits || behind,
                "a {:?} of {:?} does not end: {:?}",
                one.asked,
                one.ids,
                one.task.outcomes()
            );
        }
        if !self.flying.borrow().is_empty() {
            return Ok(());
        }
        let device = self.device.as_ref();
        law!(
            device.is_none_or(|device| device.rest(PATIENCE)),
            "a copy to or from a device's memory is counted that nobody waits for"
        );
        let stats = self.owner().stats();
        let pins = self.pins.borrow();
        let pinned = copies(&pins);
        let held = self.held.borrow().len() as u64;
        let (mut all_pinned, mut all_reserved) = (0, 0);
        for tier in &stats.tiers {
            all_pinned += tier.pinned_blocks;
            all_reserved += tier.reserved_blocks;
        }
        law!(
            all_reserved == held,
            "{all_reserved} blocks are reserved, {held} known"
        );
        law!(
            // A block on its way far waits where somebody holds its room there.
            (all_pinned <= pinned.len() as u64 || !self.is_single() && held > 0)
                && (all_pinned > 0 || pins.is_empty()),
            "{all_pinned} blocks are pinned, not {pinned:?}"
        );
        let reserved: u64 = match self.is_single() {
            true => 0,
            false => stats.write_back_bytes,
        };
        let near: u64 = self
            .held
            .borrow()
            .iter()
            .map(|held| held.version.stored)
            .sum();
        law!(reserved <= near, "{reserved} bytes wait for the far tier");
        if held == 0 && self.is_scheduled() {
            law!(
                self.owner().drain(std::time::Duration::ZERO),
                "a drain has something left"
            );
        }
        if pinned.is_empty() && held == 0 {
            self.nothing_leaks(&stats)?;
        }
        Ok(())
    }

    fn nothing_leaks(&self, stats: &Stats) -> Law {
        law!(
            stats.write_back_bytes == 0,
            "{} bytes are queued",
            stats.write_back_bytes
        );
        if self.has_far() {
            let seen = self.seen.borrow();
            let used: u64 = seen.far.values().map(|far| room(far.stored)).sum();
            let tier = stats.tiers.last().unwrap();
            law!(
                tier.capacity_bytes == tier.free_bytes + used + tier.lost_bytes,
                "far, {} bytes are free of {}, and {used} in use",
                tier.free_bytes,
                tier.capacity_bytes
            );
        }
        if !self.is_single() || !self.has_far() {
            let (seen, twin) = (self.seen.borrow(), self.twin.borrow());
            let near = &stats.tiers[0];
            let known: Vec<&Id> = seen.near.iter().collect();
            law!(
                near.blocks == known.len() as u64,
                "near has {} blocks, {known:?}",
                near.blocks
            );
            let stored = |id: &&Id| {
                let live = twin.live(**id);
                live.map_or(0, |live| room(live.versions[0].stored))
            };
            let used: u64 = known.iter().map(stored).sum();
            law!(
                near.capacity_bytes == near.free_bytes + used,
                "near, {} bytes are free of {}, and {used} in use",
                near.free_bytes,
                near.capacity_bytes
            );
        }
        Ok(())
    }
}
