//! Whoever left had a reason, and whoever asks is told.

use std::collections::BTreeSet;

use kvdepot_store::Outcome;
use kvdepot_testkit::sim::twin::Id;

use crate::history::{NAMESPACES, UNIFORM};
use crate::world::{Asked, Law, Seen, World, law, number, spec};

/// Most departures that a listener has noted.
const GONE: usize = 1000;

impl World {
    /// Whoever asks is told of all that left, and there was a reason. Answers how many of them
    /// were evicted, where that can be told.
    pub(super) fn departures(&self, left: &[Id], appeared: &[Id], before: &Seen) -> Law<u64> {
        let ids: Vec<_> = (0..NAMESPACES as u8)
            .map(|ns| spec(ns).id().unwrap())
            .collect();
        let mut twin = self.twin.borrow_mut();
        for door in 0..self.doors() {
            let gone = self
                .at(door)
                .gone(GONE)
                .map_err(|error| error.to_string())?;
            law!(!gone.overflowed, "departures were lost");
            let mut told = self.early.borrow_mut().remove(&door).unwrap_or_default();
            for (identity, _) in &gone.blocks {
                let ns = ids.iter().position(|id| *id == identity.namespace);
                let ns = ns.ok_or("a strange namespace left")?;
                let id = (ns as u8, number(&identity.key));
                // What came and went between two looks was being written.
                let fleeting = !twin.writers(id).is_empty();
                // Where others evict ahead of need, the next look misses it too.
                let early = !self.is_scheduled() && !left.contains(&id);
                if early {
                    self.early.borrow_mut().entry(door).or_default().insert(id);
                }
                // One that left may have come back by a promotion, and left again.
                let back = !self.is_single()
                    && twin.last_left(id).is_some()
                    && !self.removed.borrow().contains(&id);
                law!(
                    left.contains(&id) || fleeting || early || back,
                    "{id:?} is said to be gone"
                );
                if fleeting && !left.contains(&id) {
                    twin.passed(id);
                }
                told.insert(id);
            }
            for id in left {
                law!(
                    told.contains(id),
                    "door {door} was not told that {id:?} left"
                );
            }
        }
        let cause = self.cause.borrow();
        let mut evicted = 0;
        for id in left {
            let rotten = before.far.get(id).is_some_and(|far| self.is_rotten(far));
            if rotten && !cause.removed.contains(id) {
                self.counts.borrow_mut().corrupt += 1;
            }
            if cause.removed.contains(id) || rotten {
                self.counts.borrow_mut().sure &= !(rotten && (cause.evicts || cause.moves));
                continue;
            }
            evicted += 1;
            law!(
                cause.evicts || !self.is_scheduled(),
                "{id:?} left, and nothing needed its room"
            );
            if self.is_single() {
                let copy = match before.far.get(id) {
                    Some(far) => Some(far.sequence),
                    None => twin.last_left(*id).map(|live| live.since),
                };
                let pinned = self.pins.borrow();
                let pinned = pinned
                    .iter()
                    .any(|pin| pin.id == *id && Some(pin.birth) == copy && pin.since < twin.now());
                let moved = cause.moves;
                law!(!pinned || moved, "{id:?} is pinned and was evicted");
            }
        }
        drop(twin);
        if evicted > 0 && self.is_scheduled() && self.nested.get() == 0 {
            let flying = self.flying.borrow();
            let refused = flying.last().filter(|one| {
                one.asked == Asked::Put && one.since + 1 == self.now() && one.ids.len() == 1
            });
            let refused = refused.is_some_and(|one| one.task.outcomes() == [Outcome::Full]);
            // What stays may leave no hole, however much goes.
            let held = !self.held.borrow().is_empty() || !self.pins.borrow().is_empty();
            // Members of groups are evicted before older blocks that the put may not evict.
            let grouped = !self.groups.borrow().is_empty();
            let stays = flying.len() > 1 || held || grouped;
            law!(
                !refused || !self.is_single() || self.shape.devices > 1 || stays,
                "{left:?} went, and the block that needed their room was refused all the same"
            );
        }
        law!(
            evicted == 0 || !cause.needless,
            "{left:?} were evicted, and a device had room"
        );
        if evicted > 0 {
            self.in_order_of_use(left, appeared, &cause.own)?;
        }
        Ok(evicted)
    }

    /// What stays was used after what went.
    fn in_order_of_use(&self, left: &[Id], appeared: &[Id], own: &BTreeSet<Id>) -> Law {
        let exact = self.is_scheduled()
            && self.shape.uniform
            && self.is_single()
            && self.shape.devices <= 1;
        let cause = self.cause.borrow();
        if !exact || cause.moves || self.nested.get() > 0 {
            return Ok(());
        }
        let twin = self.twin.borrow();
        let pins = self.pins.borrow();
        let flying = self.flying.borrow();
        let busy: BTreeSet<Id> = pins
            .iter()
            .map(|pin| pin.id)
            .chain(flying.iter().flat_map(|one| one.ids.iter().copied()))
            .collect();
        let old = |id: &&Id| !cause.removed.contains(id) && !own.contains(id);
        // All take the same room. Eviction runs 1/64 ahead of need, and so does that of records.
        let tier = &self.owner().stats().tiers[0];
        let ahead = tier.capacity_bytes / 64 / UNIFORM + tier.blocks_max / 128 + 2;
        let wanted = (own.len() + busy.len() + self.held.borrow().len()) as u64 + ahead;
        let in_group = |id: &Id| {
            let groups = self.groups.borrow();
            groups.iter().any(|group| group.ids().any(|one| one == *id))
        };
        let plain = |id: &&Id| old(id) && !in_group(id);
        let went = left.iter().filter(plain).count() as u64;
        law!(went <= wanted, "{went} blocks went, for {wanted} at most");
        let evicted: Vec<Id> = left.iter().filter(old).copied().collect();
        let involved = |id: &Id| busy.contains(id) || own.contains(id) || appeared.contains(id);
        self.as_one(&evicted, &involved)?;
        for id in left.iter().filter(plain) {
            let went = twin.last_left(*id).map_or(0, |live| live.used.0);
            for (other, live) in twin.all_live() {
                if involved(&other) || in_group(&other) {
                    continue;
                }
                law!(
                    went <= live.used.1,
                    "{id:?}, used at {went}, was evicted before {other:?}, used at {:?}",
                    live.used
                );
            }
        }
        Ok(())
    }
}
