//! The statistics: every count and byte has somebody who knows it.

use std::collections::BTreeMap;

use kvdepot_testkit::sim::twin::Id;

use crate::world::{Law, Seen, World, law, room};

impl World {
    /// Statistics of the owner, as far as the twin knows them.
    pub(super) fn counters(&self, evicted: u64) -> Law {
        let stats = self.owner().stats();
        let now: u64 = stats.tiers.iter().map(|tier| tier.evicted_blocks).sum();
        let before = std::mem::replace(&mut self.seen.borrow_mut().evicted, now);
        let all = !self.is_scheduled() || !self.is_single() || now >= before + evicted;
        law!(
            now >= before && all,
            "{evicted} blocks were evicted, and {now} - {before} are counted"
        );
        let cause = self.cause.borrow();
        law!(
            now == before || cause.evicts || !self.is_scheduled(),
            "blocks were evicted, and nothing needed their room"
        );
        let counts = *self.counts.borrow();
        for (name, counted, known) in [
            ("put_tasks", stats.put_tasks, counts.put_tasks),
            ("put_blocks", stats.put_blocks, counts.put_blocks),
            ("put_bytes", stats.put_bytes, counts.put_bytes),
            ("get_tasks", stats.get_tasks, counts.get_tasks),
            ("get_blocks", stats.get_blocks, counts.get_blocks),
            ("get_bytes", stats.get_bytes, counts.get_bytes),
        ] {
            law!(counted == known, "{name} is {counted}, not {known}");
        }
        Ok(())
    }

    /// The statistics' fill is that of the tables and the listing.
    pub(super) fn filled(&self, found: &BTreeMap<Id, u64>, seen: &Seen) -> Law {
        let stats = self.owner().stats();
        let fill = stats.tiers.last().unwrap();
        if self.has_far() && self.nested.get() == 0 {
            let (blocks, bytes) = (seen.far.len() as u64, seen.far.values());
            let bytes: u64 = bytes.map(|far| far.stored).sum();
            law!(
                fill.blocks == blocks && fill.live_bytes == bytes,
                "{} blocks of {} bytes are counted, {blocks} of {bytes} recorded",
                fill.blocks,
                fill.live_bytes
            );
        }
        let (blocks, bytes) = (found.len() as u64, found.values().sum::<u64>());
        law!(
            !self.is_single() || fill.blocks == blocks && fill.live_bytes == bytes,
            "{} blocks of {} bytes are counted, {blocks} of {bytes} listed",
            fill.blocks,
            fill.live_bytes
        );
        Ok(())
    }

    /// Every pin, reservation and byte of a single tier has somebody who knows it.
    pub(super) fn held_exactly(&self, found: &BTreeMap<Id, u64>) -> Law {
        let stats = self.owner().stats();
        let twin = self.twin.borrow();
        let tier = &stats.tiers[0];
        let written: Vec<Id> = twin
            .written()
            .filter(|id| twin.live(*id).is_none())
            .collect();
        law!(
            tier.reserved_blocks == written.len() as u64,
            "{} blocks are reserved, and {written:?} being written",
            tier.reserved_blocks
        );
        let pins = self.pins.borrow();
        let flying = self.flying.borrow();
        let mut pinned: BTreeMap<(Id, u64), u64> = BTreeMap::new();
        for pin in pins.iter() {
            pinned.insert((pin.id, pin.birth), pin.versions[0].stored);
        }
        for one in flying.iter() {
            let each = one.ids.iter().zip(&one.pinned).zip(&one.settled);
            for ((id, pin), _) in each.filter(|(_, settled)| !**settled) {
                pinned.extend(pin.map(|(birth, stored)| ((*id, birth), stored)));
            }
        }
        law!(
            tier.pinned_blocks == pinned.len() as u64,
            "{} blocks are pinned, not {pinned:?}",
            tier.pinned_blocks
        );
        let live: u64 = found.values().map(|len| room(*len)).sum();
        let reserved: u64 = written
            .iter()
            .map(|id| room(twin.writers(*id)[0].version.stored))
            .sum();
        let doomed = pinned
            .iter()
            .filter(|((id, birth), _)| self.birth(*id) != Some(*birth));
        let doomed: u64 = doomed.map(|(_, stored)| room(*stored)).sum();
        let used = tier.capacity_bytes - tier.free_bytes - tier.lost_bytes;
        law!(
            used == live + reserved + doomed,
            "{used} bytes are in use: {live} by blocks, {reserved} by reservations, {doomed} by \
             pins of blocks that left"
        );
        let (blocks, served, full) = {
            let counts = self.counts.borrow();
            (counts.acknowledged, counts.hits, counts.full)
        };
        law!(
            stats.put_acknowledged_blocks == blocks && stats.put_full_blocks == full,
            "{} puts are counted as acknowledged and {} as full, not {blocks} and {full}",
            stats.put_acknowledged_blocks,
            stats.put_full_blocks
        );
        let (sure, corrupt) = {
            let counts = self.counts.borrow();
            (counts.sure && self.is_scheduled(), counts.corrupt)
        };
        law!(
            !sure || tier.corrupt_blocks == corrupt,
            "{} blocks are counted as corrupt, not {corrupt}",
            tier.corrupt_blocks
        );
        law!(
            stats.hit_blocks == [served],
            "{:?} hits, not {served}",
            stats.hit_blocks
        );
        Ok(())
    }
}
