//! What must hold after each step, and when all is at rest.

mod counts;
mod departures;
mod outcomes;
mod rest;

use std::collections::{BTreeMap, BTreeSet};

use kvdepot_store::format::record::{Record, State};
use kvdepot_testkit::sim::twin::Id;

use crate::common::raw::Raw;
use crate::history::{KEYS, NAMESPACES};
use crate::world::{Far, Law, Seen, World, eventually, key, law, number, spec};

impl World {
    /// Looks at all that can be seen, and tells the twin.
    pub fn look(&self) -> Law {
        // One door for all that is tried: what another one sees would hide what it does not.
        let asked = {
            let mut rng = self.rng.borrow_mut();
            let door = rng.below(self.doors() as u64) as usize;
            let ns = rng.below(NAMESPACES) as u8;
            // Where asking has consequences, it does not come with every step.
            let asks = !self.shape.learned || rng.once_in(8);
            (door, ns, rng.below(KEYS) as u16, asks)
        };
        let (found, seen) = match self.is_scheduled() {
            true => self.views(asked)?,
            // Somebody may be evicting ahead of need.
            false => eventually(|| self.views(asked))?,
        };
        let (appeared, left) = self.reconcile(&found)?;
        let before = self.seen.replace(seen);
        let evicted = self.departures(&left, &appeared, &before)?;
        self.collect()?;
        self.counters(evicted)?;
        match self.is_single() && self.nested.get() == 0 {
            true if self.is_scheduled() => self.held_exactly(&found),
            true => eventually(|| self.held_exactly(&self.listing(0)?)),
            false => Ok(()),
        }
    }

    /// All ways to ask what is there agree.
    fn views(&self, asked: (usize, u8, u16, bool)) -> Law<(BTreeMap<Id, u64>, Seen)> {
        let (found, seen) = (self.listing(asked.0)?, self.seen()?);
        self.compare_tiers(&found, &seen)?;
        self.lookups(&found, &seen, asked)?;
        self.filled(&found, &seen)?;
        Ok((found, seen))
    }

    /// The blocks by the listing of a door, with their bytes.
    fn listing(&self, door: usize) -> Law<BTreeMap<Id, u64>> {
        let mut found = BTreeMap::new();
        for ns in 0..NAMESPACES as u8 {
            let blocks = self.namespace(door, ns)?.blocks();
            for (key, len) in blocks.map_err(|error| error.to_string())? {
                let id = (ns, number(&key));
                law!(found.insert(id, len).is_none(), "{id:?} is listed twice");
            }
        }
        Ok(found)
    }

    /// What each tier has.
    fn seen(&self) -> Law<Seen> {
        let mut seen = Seen {
            evicted: self.seen.borrow().evicted,
            ..Seen::default()
        };
        let all: Vec<u16> = (0..KEYS as u16).collect();
        let keys: Vec<_> = all.iter().map(|number| key(*number)).collect();
        for ns in 0..NAMESPACES as u8 {
            let nearest = self.namespace(0, ns)?;
            let nearest = nearest.nearest(&keys).map_err(|error| error.to_string())?;
            let near = all.iter().zip(nearest);
            let near = near.filter(|(_, tier)| *tier == Some("Cache"));
            seen.near.extend(near.map(|(number, _)| (ns, *number)));
        }
        seen.far = self.tables()?;
        Ok(seen)
    }

    /// What the devices' tables hold now.
    pub fn tables(&self) -> Law<BTreeMap<Id, Far>> {
        let mut found = BTreeMap::new();
        let ids: Vec<_> = (0..NAMESPACES as u8)
            .map(|ns| spec(ns).id().unwrap())
            .collect();
        let media = self.media.borrow();
        for (medium, one) in media
            .iter()
            .enumerate()
            .filter(|(_, medium)| medium.present)
        {
            for (_, record) in live_in(one.table.as_ref().unwrap()).0 {
                let Some(ns) = ids.iter().position(|id| *id == record.identity.namespace) else {
                    return Err(format!("a record of a strange namespace: {record:?}"));
                };
                let far = Far {
                    stored: record.len,
                    parts: record.parts,
                    // Each device counts by itself.
                    sequence: record.sequence ^ (medium as u64) << 61,
                    medium,
                    extents: record.extents.iter().collect(),
                };
                let id = (ns as u8, number(&record.identity.key));
                let twice = found.insert(id, far).is_some();
                law!(!twice || self.nested.get() > 0, "{id:?} is on two devices");
            }
        }
        Ok(found)
    }

    fn compare_tiers(&self, found: &BTreeMap<Id, u64>, seen: &Seen) -> Law {
        let listed: BTreeSet<Id> = found.keys().copied().collect();
        let mut there: BTreeSet<Id> = seen.far.keys().copied().collect();
        // Keys of a final fill are beyond those that are asked for.
        there.extend(&seen.near);
        let known = |id: &&Id| u64::from(id.1) < KEYS || self.is_single() && self.has_far();
        let listed: BTreeSet<&Id> = listed.iter().filter(known).collect();
        let there: BTreeSet<&Id> = there.iter().filter(known).collect();
        law!(
            listed == there,
            "the listing has {listed:?}, the tiers {there:?}"
        );
        for (id, far) in &seen.far {
            let listed = found.get(id).copied();
            law!(
                listed == Some(far.stored),
                "{id:?} takes {} bytes by its record and {listed:?} by the listing",
                far.stored
            );
        }
        Ok(())
    }

    /// The other ways to ask what is there.
    fn lookups(
        &self,
        found: &BTreeMap<Id, u64>,
        seen: &Seen,
        asked: (usize, u8, u16, bool),
    ) -> Law {
        let (door, ns, first, asks) = asked;
        let numbers: Vec<u16> = (first..KEYS as u16).chain(0..first).collect();
        let keys: Vec<_> = numbers.iter().map(|number| key(*number)).collect();
        let there: Vec<bool> = numbers
            .iter()
            .map(|number| found.contains_key(&(ns, *number)))
            .collect();
        let namespace = self.namespace(door, ns)?;
        if asks {
            self.asks(numbers.iter().map(|number| (ns, *number)));
            let contains = namespace
                .contains(&keys)
                .map_err(|error| error.to_string())?;
            law!(
                contains == there,
                "contains: {contains:?}, listed: {there:?}"
            );
            let run = there.iter().take_while(|there| **there).count();
            let prefix = namespace.prefix(&keys).map_err(|error| error.to_string())?;
            law!(prefix == run, "prefix: {prefix}, listed: {run}");
        }
        let nearest = namespace
            .nearest(&keys)
            .map_err(|error| error.to_string())?;
        let near = &seen.near;
        for ((number, tier), there) in numbers.iter().zip(nearest).zip(there) {
            let expected = match there {
                false => None,
                true if near.contains(&(ns, *number)) => Some("Cache"),
                true => Some(self.far()),
            };
            law!(
                tier == expected,
                "{number} is said to be in {tier:?}, not {expected:?}"
            );
        }
        Ok(())
    }

    /// Tells the twin what appeared and what left.
    fn reconcile(&self, found: &BTreeMap<Id, u64>) -> Law<(Vec<Id>, Vec<Id>)> {
        let mut twin = self.twin.borrow_mut();
        twin.tick();
        let live: Vec<(Id, Vec<u64>)> = twin
            .all_live()
            .map(|(id, live)| (id, live.versions.iter().map(|one| one.stored).collect()))
            .collect();
        let (mut appeared, mut left) = (Vec::new(), Vec::new());
        for (id, stored) in &live {
            if found.get(id).is_none_or(|len| !stored.contains(len)) {
                twin.left(*id);
                let cause = self.cause.borrow();
                if cause.removed.contains(id) && !cause.discards {
                    self.removed.borrow_mut().insert(*id);
                }
                left.push(*id);
            }
        }
        for (id, stored) in found {
            if twin.live(*id).is_none() {
                // Evicted everywhere while it was on its way near; removed it would not come back.
                let returns = !self.is_single()
                    && twin.writers(*id).is_empty()
                    && !self.removed.borrow().contains(id);
                match returns {
                    true => twin.returned(*id, *stored)?,
                    false => twin.appeared(*id, *stored)?,
                }
                self.removed.borrow_mut().remove(id);
                appeared.push(*id);
            }
        }
        left.retain(|id| !appeared.contains(id));
        Ok((appeared, left))
    }

    pub fn now(&self) -> u64 {
        self.twin.borrow().now()
    }

    pub fn is_rotten(&self, far: &Far) -> bool {
        let rotten = self.rotten.borrow();
        rotten
            .get(&far.sequence)
            .is_some_and(|bytes| !bytes.is_empty())
    }
}

/// The live records of a table, with their slots, and how many are behind the end of its file.
pub fn live_in(table: &Raw) -> (Vec<(u32, Record)>, usize) {
    let mut live = table.records(State::Live);
    let (all, end) = (live.len(), table.file.len());
    live.retain(|(_, record)| record.extents.iter().all(|(at, len)| at + len <= end));
    let inside = live.len();
    (live, all - inside)
}
