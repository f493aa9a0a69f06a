//! What must hold after each step, and when all is at rest.

use std::collections::{BTreeMap, BTreeSet};

use kvdepot_store::format::record::State;
use kvdepot_store::{Outcome, Stats};
use kvdepot_testkit::sim::twin::Id;

use crate::history::{KEYS, NAMESPACES};
use crate::world::{
    Asked, Expect, Far, Flying, Law, Seen, World, eventually, key, law, number, room, spec,
};

/// Most departures that a listener has noted.
const GONE: usize = 1000;

impl World {
    /// Looks at all that can be seen, and tells the twin.
    pub fn look(&self) -> Law {
        // One door for all that is tried: what another one sees would hide what it does not.
        let asked = {
            let mut rng = self.rng.borrow_mut();
            let door = rng.below(self.doors() as u64) as usize;
            (door, rng.below(NAMESPACES) as u8, rng.below(KEYS) as u16)
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
    fn views(&self, asked: (usize, u8, u16)) -> Law<(BTreeMap<Id, u64>, Seen)> {
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
            for (_, record) in one.table.as_ref().unwrap().records(State::Live) {
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

    /// Whoever asks is told of all that left, and there was a reason. Answers how many of them
    /// were evicted, where that can be told.
    fn departures(&self, left: &[Id], appeared: &[Id], before: &Seen) -> Law<u64> {
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
                law!(
                    left.contains(&id) || fleeting || early,
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
            // What stays may leave no hole for one piece, however much goes.
            let pieces = !self.in_one_piece.get();
            law!(
                !refused || !self.is_single() || self.shape.devices > 1 || !pieces,
                "{left:?} went, and the block that needed their room was refused all the same"
            );
        }
        if evicted > 0 {
            self.in_order_of_use(left, appeared, &cause.own)?;
        }
        Ok(evicted)
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
        for id in left.iter().filter(old) {
            let went = twin.last_left(*id).map_or(0, |live| live.used.0);
            for (other, live) in twin.all_live() {
                let involved = busy.contains(&other) || own.contains(&other);
                if involved || appeared.contains(&other) {
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

    /// Outcomes that came.
    pub fn collect(&self) -> Law {
        let mut flying = std::mem::take(&mut *self.flying.borrow_mut());
        let checked = flying.iter_mut().try_for_each(|one| self.outcomes(one));
        flying.retain(|one| !one.task.is_done());
        flying.append(&mut self.flying.borrow_mut());
        *self.flying.borrow_mut() = flying;
        checked
    }

    fn outcomes(&self, flying: &mut Flying) -> Law {
        let outcomes = flying.task.outcomes();
        for (index, outcome) in outcomes.into_iter().enumerate() {
            if outcome == Outcome::Pending || flying.settled[index] {
                continue;
            }
            flying.settled[index] = true;
            match flying.asked {
                Asked::Put => self.put_ended(flying, index, outcome)?,
                Asked::Get => self.get_ended(flying, index, outcome)?,
                Asked::Prefetch => self.prefetch_ended(flying, index, outcome)?,
            }
        }
        Ok(())
    }

    fn put_ended(&self, flying: &Flying, index: usize, outcome: Outcome) -> Law {
        let id = flying.ids[index];
        self.twin.borrow_mut().end(id, flying.writers[index]);
        let faulty = self.faults() > flying.faults;
        let mut counts = self.counts.borrow_mut();
        match outcome {
            Outcome::Done => {
                counts.acknowledged += 1;
                let twin = self.twin.borrow();
                law!(
                    twin.was_live(id, flying.since),
                    "a put of {id:?} was acknowledged, and it is not there"
                );
                // Acknowledged is what outlives the process.
                let far = !self.has_far() || self.seen.borrow().far.contains_key(&id);
                let gone = self.cause.borrow().evicts || self.cause.borrow().removed.contains(&id);
                law!(
                    far || gone,
                    "a put of {id:?} was acknowledged, and it is not far"
                );
            }
            Outcome::Full => {
                counts.full += 1;
                law!(
                    !flying.has_room,
                    "a put of {id:?} found no room, and all was free"
                );
            }
            Outcome::Dropped => {
                counts.dropped += 1;
                let may = faulty || self.shape.drop && !self.is_single();
                law!(may, "a put of {id:?} was dropped for no reason");
            }
            Outcome::Corrupt if !self.is_single() => {}
            other => return Err(format!("a put of {id:?} ended as {other:?}")),
        }
        Ok(())
    }

    fn get_ended(&self, flying: &Flying, index: usize, outcome: Outcome) -> Law {
        let id = flying.ids[index];
        let expect = &flying.expect[index];
        let faulty = self.faults() > flying.faults;
        let fits = match (expect, outcome) {
            (Expect::Any, _) => true,
            (Expect::Done, Outcome::Done) | (Expect::Length, Outcome::Length) => true,
            (Expect::Miss | Expect::Untouched, Outcome::Miss) => true,
            // The first that does not fit is told so, behind a gap too.
            (Expect::Untouched, Outcome::Length) => true,
            (Expect::Corrupt, Outcome::Corrupt) => true,
            (_, Outcome::Miss) => faulty || self.one_has_left(&flying.ids)?,
            _ => false,
        };
        law!(
            fits,
            "a get of {id:?} ended as {outcome:?}, not as {expect:?}"
        );
        let mut bytes = Vec::new();
        for piece in &flying.buffers[index] {
            bytes.extend(piece.to_vec());
        }
        if *expect == Expect::Untouched {
            law!(
                bytes.iter().all(|byte| *byte == 0xEE),
                "a buffer behind the hits was written"
            );
        }
        if outcome == Outcome::Done {
            let content = {
                let twin = self.twin.borrow();
                let may = twin.readable(id, flying.since);
                let same = may.iter().find(|version| version.bytes() == bytes);
                let known = same.map(|version| (version.content, version.stored));
                known.ok_or_else(|| {
                    let len = bytes.len();
                    format!("WRONG BYTES: a get of {id:?} delivered {len} bytes of nobody's")
                })?
            };
            self.twin.borrow_mut().known(id, content.0);
            let mut counts = self.counts.borrow_mut();
            counts.hits += 1;
            counts.hit_bytes += content.1;
        }
        Ok(())
    }

    /// Whether one of these blocks was evicted ahead of need since the last look.
    fn one_has_left(&self, ids: &[Id]) -> Law<bool> {
        if self.is_scheduled() {
            return Ok(false);
        }
        for id in ids {
            if self.twin.borrow().live(*id).is_none() {
                return Ok(true);
            }
            let namespace = self.namespace(0, id.0)?;
            let found = namespace.contains(&[key(id.1)]);
            if !found.map_err(|error| error.to_string())?[0] {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn prefetch_ended(&self, flying: &Flying, index: usize, outcome: Outcome) -> Law {
        let id = flying.ids[index];
        let expect = &flying.expect[index];
        let fits = match (expect, outcome) {
            (Expect::Any, _) => true,
            (Expect::Miss, Outcome::Miss) => true,
            // Near already.
            (Expect::Done, Outcome::Done) => true,
            _ => !self.is_scheduled(),
        };
        law!(
            fits,
            "a prefetch of {id:?} ended as {outcome:?}, not as {expect:?}"
        );
        Ok(())
    }

    /// The other ways to ask what is there.
    fn lookups(&self, found: &BTreeMap<Id, u64>, seen: &Seen, asked: (usize, u8, u16)) -> Law {
        let (door, ns, first) = asked;
        let numbers: Vec<u16> = (first..KEYS as u16).chain(0..first).collect();
        let keys: Vec<_> = numbers.iter().map(|number| key(*number)).collect();
        let there: Vec<bool> = numbers
            .iter()
            .map(|number| found.contains_key(&(ns, *number)))
            .collect();
        let namespace = self.namespace(door, ns)?;
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
        let nearest = namespace
            .nearest(&keys)
            .map_err(|error| error.to_string())?;
        let near = &seen.near;
        for ((number, tier), there) in numbers.iter().zip(nearest).zip(there) {
            let expected = match there {
                false => None,
                true if near.contains(&(ns, *number)) => Some("Cache"),
                true => Some("Dax"),
            };
            law!(
                tier == expected,
                "{number} is said to be in {tier:?}, not {expected:?}"
            );
        }
        Ok(())
    }

    /// Statistics of the owner, as far as the twin knows them.
    fn counters(&self, evicted: u64) -> Law {
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
    fn filled(&self, found: &BTreeMap<Id, u64>, seen: &Seen) -> Law {
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

    /// Waits until nobody works any more: nothing is held but by those who are known.
    pub fn quiet(&self) -> Law {
        if self.flying.borrow().iter().any(|one| !one.task.is_done()) {
            return Ok(());
        }
        eventually(|| {
            let stats = self.owner().stats();
            let pins = self.pins.borrow();
            let pinned: BTreeSet<(&str, Id, u64)> = pins
                .iter()
                .map(|pin| (pin.pin.tier(), pin.id, pin.birth))
                .collect();
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

    /// Every pin, reservation and byte of a single tier has somebody who knows it.
    fn held_exactly(&self, found: &BTreeMap<Id, u64>) -> Law {
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
        let stats = self.owner().stats();
        let pins = self.pins.borrow();
        let pinned: BTreeSet<(&str, Id, u64)> = pins
            .iter()
            .map(|pin| (pin.pin.tier(), pin.id, pin.birth))
            .collect();
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
