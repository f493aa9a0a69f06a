//! The doors: each step as calls of the depot, and what they have to answer.

use std::collections::BTreeSet;
use std::time::Duration;

use kvdepot_store::{
    BlockBuffers, Buffer, DrainTo, Error, GetOptions, Namespace, Pin, Reservation,
};
use kvdepot_testkit::sim::twin::{Id, Version};

use crate::history::{KEYS, Step};
use crate::world::{
    Asked, Cause, Expect, Flying, Held, HeldPin, Law, PATIENCE, World, key, law, room, stored,
};

impl World {
    /// Lets one thing happen.
    pub fn perform(&self, step: &Step) -> Law {
        crate::log::step(step, self.nested.get() > 0);
        let doors = self.doors();
        let door_of = |door: &u8| usize::from(*door) % doors;
        match step {
            Step::Put {
                door,
                ns,
                blocks,
                pieces,
            } => self.put(door_of(door), *ns, blocks, *pieces),
            Step::Get {
                door,
                ns,
                keys,
                prefix,
                staged,
                misfit,
                pieces,
            } => {
                let how = (*prefix, *staged, misfit.map(usize::from), *pieces);
                self.get(door_of(door), *ns, keys, how)
            }
            Step::Prefetch { door, ns, keys } => self.prefetch(door_of(door), *ns, keys),
            Step::Remove { door, ns, keys } => self.remove(door_of(door), *ns, keys),
            Step::Clear { door, ns } => self.clear(door_of(door), *ns),
            Step::Reserve {
                door,
                ns,
                blocks,
                strict,
            } => self.reserve(door_of(door), *ns, blocks, *strict),
            Step::Commit { held, count } => self.commit(*held, *count),
            Step::BadCommit { held } => self.bad_commit(*held),
            Step::Abort { held, count } => self.abort(*held, *count),
            Step::Pin {
                door,
                ns,
                keys,
                prefix,
            } => self.pin(door_of(door), *ns, keys, *prefix),
            Step::Load { pin } => self.load(*pin),
            Step::Unpin { pin, count, served } => self.unpin(*pin, *count, *served),
            Step::Discard { pin } => self.discard(*pin),
            Step::Lanes { count } => {
                self.may_evict();
                (0..*count).for_each(|_| {
                    self.lanes();
                });
                Ok(())
            }
            Step::Background { count } => {
                self.may_evict();
                let depot = self.owner();
                (0..*count).for_each(|_| {
                    let _did = depot.step_evictor() || depot.step_background();
                });
                Ok(())
            }
            Step::Settle => {
                self.may_evict();
                self.settle();
                Ok(())
            }
            Step::Fail { count } => {
                if self.is_scheduled() {
                    self.fault("lane");
                    let fail = &self.turns.fail;
                    fail.store(u64::from(*count), std::sync::atomic::Ordering::Relaxed);
                }
                Ok(())
            }
            Step::Rot { ns, key, at } => {
                self.rot((*ns, *key), *at);
                Ok(())
            }
            Step::Add { device } => self.add(*device),
            Step::DrainDevice { device, others } => self.drain_device(*device, *others),
            Step::RemoveDevice { device, force } => self.remove_device(*device, *force),
            Step::Grow { device, kib } => self.grow(*device, *kib),
            Step::Contiguous { door, ns } => {
                let namespace = self.namespace(door_of(door), *ns)?;
                self.in_one_piece.set(true);
                namespace
                    .keep_contiguous()
                    .map_err(|error| error.to_string())
            }
            Step::Reopen => self.reopen(),
            Step::Crash => self.killed(),
            Step::FillUp { door, ns, first } => self.fill_up(*door, *ns, *first),
            Step::Noise { kind, key } => self.noise(*kind, *key),
        }
    }

    /// What follows may evict blocks.
    pub fn may_evict(&self) {
        self.cause.borrow_mut().evicts = true;
    }

    /// What a key is written with: in a pipeline of two tiers, what it is there with, or was when
    /// it left and nobody removed it: a sound copy may still be on its way to the other tier.
    fn version(&self, id: Id, parts: &[u64], call: &[(Id, Version)]) -> Version {
        if !self.is_single() {
            let twin = self.twin.borrow();
            let here = call.iter().find(|(other, _)| *other == id);
            let live = twin.live(id).map(|live| live.versions[0].clone());
            let written = || twin.writers(id).first().map(|one| one.version.clone());
            let version = here.map(|(_, version)| version.clone()).or(live);
            let returns = !self.removed.borrow().contains(&id);
            let left = || twin.last_left(id).map(|live| live.versions[0].clone());
            let left = || returns.then(left).flatten();
            if let Some(version) = version.or_else(written).or_else(left) {
                return version;
            }
        }
        Version {
            content: self.number(),
            parts: parts.to_vec(),
            stored: stored(parts),
        }
    }

    /// Room that somebody holds, so that it cannot be evicted.
    fn all_is_free(&self) -> bool {
        let idle = self.flying.borrow().is_empty();
        idle && self.held.borrow().is_empty() && self.pins.borrow().is_empty()
    }

    fn fits_easily(&self, wanted: u64, blocks: usize) -> bool {
        let stats = self.owner().stats();
        let devices = self.owner().devices().unwrap_or_default();
        let serving = devices
            .iter()
            .filter(|one| one.state.name() == "serving")
            .count();
        let records = stats
            .tiers
            .iter()
            .map(|tier| tier.blocks_max)
            .min()
            .unwrap_or(0);
        self.is_single()
            && (serving == 1 || !self.has_far())
            && devices.len() <= 1
            && wanted <= stats.tiers[0].capacity_bytes / 4
            && blocks as u64 <= records / 2
            && stats.tiers[0].lost_bytes == 0
    }

    fn put(&self, door: usize, ns: u8, blocks: &[(u16, u32)], pieces: u8) -> Law {
        self.door("put");
        let mut writes: Vec<(Id, Version)> = Vec::new();
        for (number, len) in blocks {
            let id = (ns, *number);
            let version = self.version(id, &[u64::from(*len)], &writes);
            // Where calls are waited for, none may wait for a reservation.
            let waits = !self.is_scheduled() && self.held.borrow().iter().any(|one| one.id == id);
            if !waits && (version.parts.len() == 1 || self.is_single()) {
                writes.push((id, version));
            }
        }
        if writes.is_empty() {
            return Ok(());
        }
        let namespace = self.namespace(door, ns)?;
        let mut buffers = BlockBuffers::default();
        for (_, version) in &writes {
            buffers.push(cut(&version.bytes(), pieces));
        }
        let ids: Vec<Id> = writes.iter().map(|(id, _)| *id).collect();
        let bytes = writes.iter().map(|(_, version)| version.len()).sum::<u64>();
        let rooms = writes.iter().map(|(_, version)| room(version.stored)).sum();
        let has_room = self.all_is_free() && self.fits_easily(rooms, writes.len());
        self.cause.borrow_mut().own.extend(&ids);
        self.may_evict();
        let stamps = self.twin.borrow_mut().stamps(ids.len());
        let mut writers = Vec::new();
        for ((id, version), stamp) in writes.into_iter().zip(stamps) {
            let number = self.number();
            let mut twin = self.twin.borrow_mut();
            // One that is there is not written again.
            twin.used(id, stamp);
            twin.begin(id, number, version);
            writers.push(number);
        }
        let (since, faults) = (self.now(), self.faults());
        let keys = ids.iter().map(|(_, number)| key(*number)).collect();
        let task = namespace
            .put(keys, buffers)
            .map_err(|error| format!("put: {error}"))?;
        {
            let mut counts = self.counts.borrow_mut();
            counts.put_tasks += 1;
            counts.put_blocks += ids.len() as u64;
            counts.put_bytes += bytes;
        }
        let count = ids.len();
        self.fly(Flying {
            task,
            asked: Asked::Put,
            ids,
            writers,
            buffers: Vec::new(),
            expect: Vec::new(),
            settled: vec![false; count],
            since,
            faults,
            pinned: vec![None; count],
            has_room,
        })
    }

    /// A call is under way. Where real threads work on it, it is waited for.
    fn fly(&self, flying: Flying) -> Law {
        if !self.is_scheduled() {
            let waited = flying.task.wait(Some(PATIENCE));
            law!(
                waited.is_ok(),
                "a {:?} of {:?} does not end: {:?}",
                flying.asked,
                flying.ids,
                flying.task.outcomes()
            );
        }
        self.flying.borrow_mut().push(flying);
        Ok(())
    }

    /// What a get of a key has to answer, and which block it pins.
    fn expect(&self, id: Id) -> (Expect, Option<()>, Option<Version>) {
        let (twin, seen) = (self.twin.borrow(), self.seen.borrow());
        let Some(live) = twin.live(id) else {
            return (Expect::Miss, None, None);
        };
        let version = live.versions[0].clone();
        let sure = live.versions.iter().all(|one| one.len() == version.len());
        let rotten = seen.far.get(&id).is_some_and(|far| self.is_rotten(far));
        let expect = match () {
            () if !sure || self.nested.get() > 0 => Expect::Any,
            () if seen.near.contains(&id) || !rotten => Expect::Done,
            () => Expect::Corrupt,
        };
        (expect, Some(()), Some(version))
    }

    fn get(
        &self,
        door: usize,
        ns: u8,
        numbers: &[u16],
        how: (bool, bool, Option<usize>, u8),
    ) -> Law {
        let (prefix, staged, misfit, pieces) = how;
        self.door(if prefix { "get prefix" } else { "get" });
        let namespace = self.namespace(door, ns)?;
        let ids: Vec<Id> = numbers.iter().map(|number| (ns, *number)).collect();
        let stamps = self.twin.borrow_mut().stamps(ids.len());
        let (mut expects, mut pinned, mut buffers) = (Vec::new(), Vec::new(), Vec::new());
        let mut gap = false;
        let mut bytes = 0;
        for (index, id) in ids.iter().enumerate() {
            let (mut expect, pin, version) = self.expect(*id);
            let is_long = misfit == Some(index);
            let len = version.as_ref().map_or(100, Version::len) + u64::from(is_long);
            let one_part = version.as_ref().is_none_or(|one| one.parts.len() == 1);
            if is_long && expect == Expect::Done {
                expect = Expect::Length;
            } else if is_long && expect == Expect::Corrupt {
                // Whether its table is what rotted decides.
                expect = if one_part {
                    Expect::Length
                } else {
                    Expect::Any
                };
            }
            let mut pin = pin;
            if gap && expect != Expect::Any {
                expect = Expect::Untouched;
                pin = None;
            }
            let ends = expect == Expect::Miss || expect == Expect::Length && one_part;
            if prefix && expect == Expect::Any {
                // Nobody knows whether the hits end here.
                gap = true;
            }
            if prefix && ends {
                gap = true;
            }
            {
                let mut twin = self.twin.borrow_mut();
                // Behind a gap, blocks are pinned for a moment, or not.
                match gap && !ends {
                    true => twin.maybe_used(*id, stamps[index]),
                    false => twin.used(*id, stamps[index]),
                }
            }
            if prefix && ends && expect == Expect::Length {
                pin = None;
            }
            bytes += len;
            buffers.push(cut(&vec![0xEE; len as usize], pieces));
            expects.push(expect);
            let copy = || Some((self.birth(*id)?, version.as_ref()?.stored));
            pinned.push(pin.and_then(|()| copy()));
        }
        if expects.contains(&Expect::Any) {
            expects.iter_mut().for_each(|expect| *expect = Expect::Any);
        }
        let mut blocks = BlockBuffers::default();
        buffers
            .iter()
            .for_each(|pieces| blocks.push(pieces.iter().cloned()));
        let mut options = GetOptions::default();
        (options.prefix, options.staged) = (prefix, staged);
        let (since, faults) = (self.now(), self.faults());
        // Far hits are promoted.
        if !self.is_single() {
            self.may_evict();
        }
        let keys = numbers.iter().map(|number| key(*number)).collect();
        let task = namespace.get_with(keys, blocks, options);
        let task = task.map_err(|error| format!("get: {error}"))?;
        {
            let mut counts = self.counts.borrow_mut();
            counts.get_tasks += 1;
            counts.get_blocks += ids.len() as u64;
            counts.get_bytes += bytes;
        }
        let count = ids.len();
        self.fly(Flying {
            task,
            asked: Asked::Get,
            ids,
            writers: Vec::new(),
            buffers,
            expect: expects,
            settled: vec![false; count],
            since,
            faults,
            pinned,
            has_room: false,
        })
    }

    fn prefetch(&self, door: usize, ns: u8, numbers: &[u16]) -> Law {
        self.door("prefetch");
        let namespace = self.namespace(door, ns)?;
        let ids: Vec<Id> = numbers.iter().map(|number| (ns, *number)).collect();
        let stamps = self.twin.borrow_mut().stamps(ids.len());
        let mut gap = false;
        let mut expects = Vec::new();
        for (id, stamp) in ids.iter().zip(stamps) {
            let (expect, _, _) = self.expect(*id);
            gap |= expect == Expect::Miss;
            self.twin.borrow_mut().maybe_used(*id, stamp);
            let near = self.is_single() || self.seen.borrow().near.contains(id);
            expects.push(match gap {
                true => Expect::Miss,
                false if near && self.nested.get() == 0 => Expect::Done,
                false => Expect::Any,
            });
        }
        if self.nested.get() > 0 {
            expects.iter_mut().for_each(|expect| *expect = Expect::Any);
        }
        if !self.is_single() {
            self.may_evict();
        }
        let (since, faults) = (self.now(), self.faults());
        let keys: Vec<_> = numbers.iter().map(|number| key(*number)).collect();
        let task = namespace
            .prefetch(&keys)
            .map_err(|error| format!("prefetch: {error}"))?;
        let count = ids.len();
        self.fly(Flying {
            task,
            asked: Asked::Prefetch,
            ids,
            writers: Vec::new(),
            buffers: Vec::new(),
            expect: expects,
            settled: vec![false; count],
            since,
            faults,
            pinned: vec![None; count],
            has_room: false,
        })
    }

    fn remove(&self, door: usize, ns: u8, numbers: &[u16]) -> Law {
        self.door("remove");
        let namespace = self.namespace(door, ns)?;
        let ids: BTreeSet<Id> = numbers.iter().map(|number| (ns, *number)).collect();
        let there = ids
            .iter()
            .filter(|id| self.twin.borrow().live(**id).is_some())
            .count();
        self.cause.borrow_mut().removed.extend(&ids);
        let keys: Vec<_> = ids.iter().map(|(_, number)| key(*number)).collect();
        let removed = namespace.remove(&keys).map_err(|error| error.to_string())?;
        let fewer = !self.is_scheduled() && removed < there;
        law!(
            removed == there || fewer,
            "{removed} of {there} blocks were removed"
        );
        for id in &ids {
            let found = namespace
                .contains(&[key(id.1)])
                .map_err(|error| error.to_string())?;
            law!(!found[0], "{id:?} was removed and is there");
        }
        Ok(())
    }

    fn clear(&self, door: usize, ns: u8) -> Law {
        self.door("clear");
        let namespace = self.namespace(door, ns)?;
        let there: Vec<Id> = {
            let twin = self.twin.borrow();
            twin.all_live()
                .map(|(id, _)| id)
                .filter(|id| id.0 == ns)
                .collect()
        };
        let copies = {
            let seen = self.seen.borrow();
            let near = seen.near.iter().filter(|id| id.0 == ns).count();
            near + seen.far.keys().filter(|id| id.0 == ns).count()
        };
        self.cause.borrow_mut().removed.extend(there);
        let cleared = namespace.clear().map_err(|error| error.to_string())?;
        law!(
            cleared == copies || self.nested.get() > 0 || !self.is_scheduled(),
            "{cleared} blocks were cleared of {copies}"
        );
        Ok(())
    }

    fn reserve(&self, door: usize, ns: u8, blocks: &[(u16, Vec<u32>)], strict: bool) -> Law {
        self.door("reserve");
        let namespace = self.namespace(door, ns)?;
        let mut wanted: Vec<(Id, Version)> = Vec::new();
        for (number, lens) in blocks {
            let lens: Vec<u64> = lens.iter().map(|len| u64::from(*len)).collect();
            let version = self.version((ns, *number), &lens, &wanted);
            wanted.push(((ns, *number), version));
        }
        let call: Vec<_> = wanted
            .iter()
            .map(|(id, version)| (key(id.1), version.parts.clone()))
            .collect();
        let rooms = wanted.iter().map(|(_, version)| room(version.stored)).sum();
        let has_room = self.all_is_free() && self.fits_easily(rooms, wanted.len());
        self.may_evict();
        self.cause
            .borrow_mut()
            .own
            .extend(wanted.iter().map(|(id, _)| *id));
        let stamps = self.twin.borrow_mut().stamps(wanted.len());
        for ((id, _), stamp) in wanted.iter().zip(stamps) {
            self.twin.borrow_mut().used(*id, stamp);
        }
        let answer = match strict {
            true => namespace.reserve_strict(&call),
            false => namespace.reserve(&call),
        };
        let reserved = match answer {
            Ok(reserved) => reserved,
            Err(Error::Full { .. }) if strict => {
                law!(!has_room, "a reservation found no room, and all was free");
                return Ok(());
            }
            Err(error) => return Err(format!("reserve: {error}")),
        };
        law!(reserved.len() == wanted.len(), "{} answers", reserved.len());
        for (index, ((id, version), reservation)) in wanted.into_iter().zip(reserved).enumerate() {
            let mut twin = self.twin.borrow_mut();
            let needless = twin.live(id).is_some() || !twin.writers(id).is_empty();
            let single = self.is_single();
            match reservation {
                Some(reservation) => {
                    // Those before it in the call may have evicted it.
                    let surely = self.is_scheduled() && index == 0 || twin.live(id).is_none();
                    law!(
                        !needless || !single || !surely,
                        "{id:?} was reserved although it is there"
                    );
                    law!(
                        reservation.key() == key(id.1),
                        "a reservation of another key"
                    );
                    let writer = self.number();
                    twin.begin(id, writer, version.clone());
                    self.held.borrow_mut().push(Held {
                        door,
                        id,
                        writer,
                        version,
                        reservation,
                    });
                }
                None => law!(
                    needless || !has_room,
                    "{id:?} was not reserved, and all was free"
                ),
            }
        }
        Ok(())
    }

    /// Takes some reservations of one door and namespace.
    fn take_held(&self, held: u8, count: u8) -> Vec<Held> {
        let mut all = self.held.borrow_mut();
        if all.is_empty() {
            return Vec::new();
        }
        let first = usize::from(held) % all.len();
        let (door, ns) = (all[first].door, all[first].id.0);
        let mut taken = Vec::new();
        let mut at = first;
        while taken.len() < usize::from(count) && at < all.len() {
            match all[at].door == door && all[at].id.0 == ns {
                true => taken.push(all.remove(at)),
                false => at += 1,
            }
        }
        taken
    }

    fn commit(&self, held: u8, count: u8) -> Law {
        let taken = self.take_held(held, count);
        let Some(first) = taken.first() else {
            return Ok(());
        };
        let namespace = self.namespace(first.door, first.id.0)?;
        let (mut ready, mut failed) = (Vec::new(), Vec::new());
        let mut sums = Vec::new();
        for one in taken {
            self.door("store part");
            match self.fill(&one)? {
                Some(of_parts) => {
                    sums.push(of_parts);
                    ready.push(one);
                }
                None => failed.push(one),
            }
        }
        if !failed.is_empty() {
            self.give_back(&namespace, failed);
        }
        if ready.is_empty() {
            return Ok(());
        }
        self.door("commit");
        self.may_evict();
        let reservations: Vec<Reservation> =
            ready.iter().map(|one| one.reservation.clone()).collect();
        let removed_meanwhile = self.nested.get() > 0;
        let stored = namespace.commit(&reservations, &sums);
        let stored = stored.map_err(|error| format!("commit: {error}"))?;
        for (one, stored) in ready.iter().zip(&stored) {
            self.twin.borrow_mut().told(one.id, one.writer);
            law!(
                *stored || removed_meanwhile,
                "a reservation of {:?} was not committed",
                one.id
            );
        }
        let again = namespace.commit(&reservations, &sums);
        let again = again.map_err(|error| format!("commit again: {error}"))?;
        law!(!again.contains(&true), "a reservation was committed twice");
        self.look_before_end(ready)
    }

    /// The blocks are seen before their writers end.
    fn look_before_end(&self, ended: Vec<Held>) -> Law {
        self.look_softly()?;
        for one in &ended {
            self.twin.borrow_mut().end(one.id, one.writer);
        }
        Ok(())
    }

    /// Moves the parts of a reservation; `None` where a lane failed.
    fn fill(&self, held: &Held) -> Law<Option<Vec<kvdepot_store::Checksum>>> {
        self.may_evict();
        let mut sums = Vec::new();
        for part in 0..held.version.parts.len() {
            let faults = self.faults();
            let buffers = BlockBuffers::whole([Buffer::from_vec(held.version.part(part))]);
            let placement = held.reservation.placement();
            let job = self.with_mover(|mover| mover.store(&[placement], &buffers, part as u32))?;
            let job = job.map_err(|error| format!("store: {error}"))?;
            law!(job.wait(Some(PATIENCE)), "a store does not end");
            match job.checksums()[0] {
                Some(sum) => sums.push(sum),
                None => {
                    law!(
                        self.faults() > faults,
                        "a part of {:?} was not stored",
                        held.id
                    );
                    return Ok(None);
                }
            }
        }
        Ok(Some(sums))
    }

    fn bad_commit(&self, held: u8) -> Law {
        let all = self.held.borrow();
        if all.is_empty() {
            return Ok(());
        }
        self.fault("bad commit");
        let one = &all[usize::from(held) % all.len()];
        let namespace = self.namespace(one.door, one.id.0)?;
        let few = vec![kvdepot_store::Checksum([7; 16]); one.version.parts.len() - 1];
        let answer = namespace.commit(std::slice::from_ref(&one.reservation), &[few]);
        law!(
            matches!(answer, Err(Error::Input { .. })),
            "a commit with too few checksums was answered {answer:?}"
        );
        Ok(())
    }

    fn abort(&self, held: u8, count: u8) -> Law {
        let taken = self.take_held(held, count);
        let Some(first) = taken.first() else {
            return Ok(());
        };
        let namespace = self.namespace(first.door, first.id.0)?;
        self.give_back(&namespace, taken);
        Ok(())
    }

    fn give_back(&self, namespace: &Namespace, held: Vec<Held>) {
        self.door("abort");
        self.may_evict();
        let reservations: Vec<Reservation> =
            held.iter().map(|one| one.reservation.clone()).collect();
        namespace.abort(&reservations);
        for one in &held {
            self.twin.borrow_mut().end(one.id, one.writer);
        }
    }

    fn pin(&self, door: usize, ns: u8, numbers: &[u16], prefix: bool) -> Law {
        self.door("pin");
        let namespace = self.namespace(door, ns)?;
        let ids: Vec<Id> = numbers.iter().map(|number| (ns, *number)).collect();
        let stamps = self.twin.borrow_mut().stamps(ids.len());
        let keys: Vec<_> = numbers.iter().map(|number| key(*number)).collect();
        // A table that rotted is found.
        let rotten: BTreeSet<Id> = {
            let seen = self.seen.borrow();
            let far = |id: &&Id| seen.far.get(id).is_some_and(|far| self.is_rotten(far));
            ids.iter().filter(far).copied().collect()
        };
        let pins = namespace
            .pin(&keys, prefix)
            .map_err(|error| format!("pin: {error}"))?;
        let mut gap = false;
        for ((id, pin), stamp) in ids.into_iter().zip(pins).zip(stamps) {
            let mut twin = self.twin.borrow_mut();
            let (seen, live) = (self.seen.borrow(), twin.live(id).cloned());
            match gap {
                true => twin.maybe_used(id, stamp),
                false => twin.used(id, stamp),
            }
            let sure = self.is_scheduled() && self.nested.get() == 0 && !rotten.contains(&id);
            match (pin, live) {
                (Some(pin), Some(live)) => {
                    law!(!gap || !prefix, "{id:?} was pinned behind a gap");
                    let near = seen.near.contains(&id);
                    let tier = if near { "Cache" } else { "Dax" };
                    law!(
                        !sure || pin.tier() == tier,
                        "{id:?} was pinned in {}",
                        pin.tier()
                    );
                    law!(pin.key() == key(id.1), "a pin of another key");
                    let fits = live.versions.iter().any(|one| one.len() == pin.bytes());
                    law!(fits, "a pin of {id:?} has {} bytes", pin.bytes());
                    let sequence = seen.far.get(&id).filter(|_| !near);
                    let birth = sequence.map_or(live.since, |far| far.sequence);
                    self.pins.borrow_mut().push(HeldPin {
                        door,
                        id,
                        number: self.number(),
                        loading: false,
                        since: live.since,
                        birth,
                        discarded: false,
                        versions: live.versions,
                        sequence: sequence.map(|far| far.sequence),
                        pin,
                    });
                }
                (Some(_), None) => return Err(format!("{id:?} was pinned and is not there")),
                (None, live) => {
                    let may = live.is_none() || !sure || gap && prefix;
                    law!(may, "{id:?} is there and was not pinned");
                    gap = true;
                }
            }
        }
        Ok(())
    }

    /// Loads the parts of a pinned block. Nobody ends the pin meanwhile: who holds one waits for
    /// the movers that have its placement.
    fn load(&self, pin: u8) -> Law {
        let number = {
            let mut pins = self.pins.borrow_mut();
            let free: Vec<usize> = (0..pins.len()).filter(|at| !pins[*at].loading).collect();
            if free.is_empty() {
                return Ok(());
            }
            let pin = &mut pins[free[usize::from(pin) % free.len()]];
            pin.loading = true;
            pin.number
        };
        let loaded = self.load_held(number);
        let mut pins = self.pins.borrow_mut();
        let held = pins.iter_mut().find(|pin| pin.number == number);
        if let Some(held) = held {
            held.loading = false;
        }
        loaded
    }

    fn load_held(&self, pin: u64) -> Law {
        let (placement, id, versions, parts, rotten) = {
            let pins = self.pins.borrow();
            let Some(pin) = pins.iter().find(|one| one.number == pin) else {
                return Ok(());
            };
            let rotten = pin.sequence.is_some_and(|sequence| {
                self.rotten
                    .borrow()
                    .get(&sequence)
                    .is_some_and(|bytes| !bytes.is_empty())
            });
            let parts = pin.versions[0].parts.clone();
            (
                pin.pin.placement(),
                pin.id,
                pin.versions.clone(),
                parts,
                rotten,
            )
        };
        if versions.iter().any(|version| version.parts != parts) {
            return Ok(());
        }
        // The lanes do other work meanwhile.
        self.may_evict();
        for (number, len) in parts.iter().enumerate() {
            self.door("load part");
            let faults = self.faults();
            let buffer = Buffer::from_vec(vec![0xEE; *len as usize]);
            let buffers = BlockBuffers::whole([buffer.clone()]);
            let job = self.with_mover(|mover| {
                mover.load(std::slice::from_ref(&placement), &buffers, number as u32)
            })?;
            let job = job.map_err(|error| format!("load: {error}"))?;
            law!(job.wait(Some(PATIENCE)), "a load does not end");
            if job.checksums()[0].is_none() {
                let may = rotten || self.faults() > faults;
                law!(
                    may,
                    "part {number} of {id:?}, which is pinned, was not loaded"
                );
                continue;
            }
            let bytes = buffer.to_vec();
            let known = versions.iter().any(|version| version.part(number) == bytes);
            law!(
                known,
                "WRONG BYTES: part {number} of {id:?}, which is pinned, is nobody's"
            );
        }
        Ok(())
    }

    fn take_pins(&self, pin: u8, count: u8) -> Vec<HeldPin> {
        let mut pins = self.pins.borrow_mut();
        let free: Vec<usize> = (0..pins.len()).filter(|at| !pins[*at].loading).collect();
        if free.is_empty() {
            return Vec::new();
        }
        let first = free[usize::from(pin) % free.len()];
        let (door, ns) = (pins[first].door, pins[first].id.0);
        let mut taken = Vec::new();
        let mut at = first;
        while taken.len() < usize::from(count) && at < pins.len() {
            match pins[at].door == door && pins[at].id.0 == ns && !pins[at].loading {
                true => taken.push(pins.remove(at)),
                false => at += 1,
            }
        }
        taken
    }

    fn unpin(&self, pin: u8, count: u8, served: bool) -> Law {
        let taken = self.take_pins(pin, count);
        let Some(first) = taken.first() else {
            return Ok(());
        };
        self.door("unpin");
        // Whoever has unpublished a block has not served it.
        let served = served && !taken.iter().any(|pin| pin.discarded);
        let namespace = self.namespace(first.door, first.id.0)?;
        let pins: Vec<Pin> = taken.iter().map(|pin| pin.pin.clone()).collect();
        if served {
            let mut counts = self.counts.borrow_mut();
            counts.hits += pins.len() as u64;
            counts.hit_bytes += taken.iter().map(|pin| pin.versions[0].stored).sum::<u64>();
            self.may_evict();
        }
        namespace.unpin(&pins, served);
        Ok(())
    }

    fn discard(&self, pin: u8) -> Law {
        let mut pins = self.pins.borrow_mut();
        if pins.is_empty() {
            return Ok(());
        }
        self.door("discard");
        let at = usize::from(pin) % pins.len();
        let pin = &mut pins[at];
        pin.discarded = true;
        let there = {
            let twin = self.twin.borrow();
            twin.live(pin.id)
                .is_some_and(|live| live.since == pin.since)
        };
        self.cause.borrow_mut().removed.insert(pin.id);
        self.cause.borrow_mut().discards = true;
        let namespace = self.namespace(pin.door, pin.id.0)?;
        let count = namespace.discard(std::slice::from_ref(&pin.pin));
        self.counts.borrow_mut().corrupt += count as u64;
        let exact = self.is_scheduled()
            && self.is_single()
            && self.nested.get() == 0
            && self.shape.devices <= 1;
        law!(
            count == usize::from(there) || !exact,
            "{count} blocks were discarded"
        );
        Ok(())
    }

    /// Whoever may ask for devices: the owner, and clients of the same user.
    fn device_door(&self) -> kvdepot_store::Depot {
        let doors = self.doors() as u64;
        let door = match doors > 1 && self.nested.get() == 0 {
            true => self.rng.borrow_mut().below(doors) as usize,
            false => 0,
        };
        if door > 0 {
            self.door("device verb by a client");
        }
        self.at(door)
    }

    fn path(&self, device: u8) -> Option<usize> {
        let media = self.media.borrow();
        (!media.is_empty()).then(|| usize::from(device) % media.len())
    }

    fn add(&self, device: u8) -> Law {
        let Some(at) = self.path(device) else {
            return Ok(());
        };
        self.door("add device");
        let medium = self.media.borrow()[at].clone();
        let answer = self
            .device_door()
            .add_device(&medium.path, Some(medium.kib << 10));
        answer.map_err(|error| format!("add_device: {error}"))?;
        self.media.borrow_mut()[at].present = true;
        self.media.borrow_mut()[at].read();
        Ok(())
    }

    fn drain_device(&self, device: u8, others: bool) -> Law {
        let Some(at) = self.path(device) else {
            return Ok(());
        };
        self.door("drain device");
        self.may_evict();
        self.cause.borrow_mut().moves = true;
        let path = self.media.borrow()[at].path.clone();
        let present = self.media.borrow()[at].present;
        let to = if others {
            DrainTo::Others
        } else {
            DrainTo::Nowhere
        };
        let faults = self.faults();
        match self.device_door().drain_device(&path, to, Duration::ZERO) {
            Ok(_) => law!(present, "a device that is not there was drained"),
            Err(Error::Busy {
                pinned, reserved, ..
            }) => {
                let free = self.all_is_free() && self.nested.get() == 0;
                // What a lane did not move is still there.
                let failed = self.faults() > faults;
                law!(
                    !free || failed || !self.is_single(),
                    "a drain found {pinned} blocks pinned and {reserved} reserved, by nobody"
                );
            }
            Err(Error::Input { .. }) => {}
            Err(error) => return Err(format!("drain_device: {error}")),
        }
        Ok(())
    }

    fn remove_device(&self, device: u8, force: bool) -> Law {
        let Some(at) = self.path(device) else {
            return Ok(());
        };
        self.door("remove device");
        if force {
            self.may_evict();
            self.cause.borrow_mut().moves = true;
        }
        let path = self.media.borrow()[at].path.clone();
        match self
            .device_door()
            .remove_device(&path, force, Duration::ZERO)
        {
            Ok(()) => {
                let far = |far: &crate::world::Far| far.medium == at;
                let empty = !self.seen.borrow().far.values().any(far);
                law!(
                    empty || force || self.nested.get() > 0,
                    "a device with blocks was removed"
                );
                self.media.borrow_mut()[at].present = false;
                self.media.borrow_mut()[at].read();
            }
            Err(Error::Input { .. } | Error::Busy { .. }) => {}
            Err(error) => return Err(format!("remove_device: {error}")),
        }
        Ok(())
    }

    fn grow(&self, device: u8, kib: u16) -> Law {
        let Some(at) = self.path(device) else {
            return Ok(());
        };
        self.door("grow device");
        let medium = self.media.borrow()[at].clone();
        let kib = medium.kib + u64::from(kib);
        match self.device_door().grow_device(&medium.path, kib << 10) {
            Ok(()) => {
                law!(medium.present, "a device that is not there has grown");
                self.media.borrow_mut()[at].kib = kib;
                self.media.borrow_mut()[at].read();
            }
            Err(Error::Input { .. }) if !medium.present => {}
            Err(error) => return Err(format!("grow_device: {error}")),
        }
        Ok(())
    }

    /// Whoever asks nested calls while another one waits must leave its cause alone.
    pub fn with_cause<T>(&self, call: impl FnOnce() -> T) -> T {
        let outer = self.cause.replace(Cause::default());
        let answer = call();
        let inner = self.cause.replace(outer);
        let mut cause = self.cause.borrow_mut();
        cause.removed.extend(inner.removed);
        cause.own.extend(inner.own);
        cause.evicts |= inner.evicts;
        cause.moves |= inner.moves;
        cause.discards |= inner.discards;
        answer
    }

    /// Everything is pinned nowhere, reserved nowhere, and every block comes back.
    pub fn read_all(&self, door: usize) -> Law {
        let ids: Vec<Id> = {
            let twin = self.twin.borrow();
            twin.all_live()
                .map(|(id, _)| id)
                .filter(|id| u64::from(id.1) < KEYS)
                .collect()
        };
        for ns in [0, 1] {
            let numbers: Vec<u16> = ids
                .iter()
                .filter(|id| id.0 == ns)
                .map(|(_, number)| *number)
                .collect();
            if !numbers.is_empty() {
                self.get(door, ns, &numbers, (false, false, None, 1))?;
            }
        }
        Ok(())
    }
}

/// Bytes in so many buffers.
fn cut(bytes: &[u8], pieces: u8) -> Vec<Buffer> {
    let each = bytes.len().div_ceil(usize::from(pieces)).max(1);
    bytes
        .chunks(each)
        .map(|piece| Buffer::from_vec(piece.to_vec()))
        .collect()
}
