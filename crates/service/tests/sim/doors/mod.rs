//! The doors: each step as calls of the depot, and what they have to answer.

mod devices;
mod groups;
mod pins;
mod remove;
mod reservations;
mod starts;
mod tasks;

use kvdepot_store::{DeviceStats, Key};
use kvdepot_testkit::sim::twin::{Id, Version};

use crate::history::{Step, UNIFORM};
use crate::world::{Cause, Law, World, key, room, stored};

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
            Step::Group {
                door,
                ns,
                keys,
                class,
            } => self.group(door_of(door), *ns, keys, *class),
            Step::Regroup { group, keys, class } => self.regroup(*group, keys, *class),
            Step::PinGroup { group } => self.pin_group(*group),
            Step::Ungroup { group } => self.ungroup(*group),
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
            Step::Rot {
                ns,
                key,
                at,
                reader,
            } => {
                let rotten = self.rot((*ns, *key), *at);
                match rotten.zip(reader.as_ref()) {
                    Some(((ns, number), door)) => {
                        self.get(door_of(door), ns, &[number], (false, false, None, 1))
                    }
                    None => Ok(()),
                }
            }
            Step::Add { device } => self.add(*device),
            Step::DrainDevice { device, others } => self.drain_device(*device, *others),
            Step::RemoveDevice { device, force } => self.remove_device(*device, *force),
            Step::Grow { device, kib } => self.grow(*device, *kib),
            Step::Disk { kib } => {
                self.fill_disk(kib.map(u64::from));
                Ok(())
            }
            Step::Start { kind } => self.start(*kind),
            Step::Reopen => self.reopen(),
            Step::Crash => self.killed(),
            Step::Truncate { part } => self.cut(u64::from(*part)),
            Step::FillUp { door, ns, first } => self.fill_up(*door, *ns, *first),
            Step::Noise { kind, key } => self.noise(*kind, *key),
        }
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

    /// What follows may evict blocks.
    pub fn may_evict(&self) {
        self.cause.borrow_mut().evicts = true;
    }

    /// Nobody holds room, so that it cannot be evicted: neither who is known for it, nor a call
    /// that waits.
    pub(super) fn all_is_free(&self) -> bool {
        let idle = self.flying.borrow().is_empty() && self.nested.get() == 0;
        idle && self.held.borrow().is_empty() && self.pins.borrow().is_empty()
    }

    /// Bytes that may wait for the far tier.
    pub fn queue(&self) -> u64 {
        let near = self.owner().stats().tiers[0].capacity_bytes;
        match self.shape.write_back {
            0 => near / 2,
            kib => near.min(kib << 10),
        }
    }

    /// Nothing waits, so that all of the queue is this call's.
    pub(super) fn fit_the_queue(&self, bytes: u64) -> bool {
        let idle = self.is_scheduled() && !self.is_single() && self.all_is_free();
        idle && self.owner().stats().write_back_bytes == 0 && bytes <= self.queue()
    }

    /// Whether one of several devices has room for so many blocks, of which all take the same.
    pub(super) fn has_a_place_for(&self, blocks: u64) -> bool {
        let known = self.is_scheduled() && self.shape.uniform && self.is_single();
        let devices = self.owner().devices().unwrap_or_default();
        let has_room = |one: &DeviceStats| {
            one.state.name() == "serving"
                && one.data_bytes - one.used_bytes >= blocks * UNIFORM
                && one.blocks + blocks <= self.shape.records / 2
        };
        known && devices.len() > 1 && self.all_is_free() && devices.iter().any(has_room)
    }

    /// Whether nothing has to go for these blocks in the tier that keeps them: twice what eviction
    /// ahead of need keeps free is beyond them.
    pub(super) fn is_roomy_for(&self, blocks: &[(Id, Version)]) -> bool {
        let devices = self.owner().devices().unwrap_or_default();
        let serving = devices.iter().all(|one| one.state.name() == "serving");
        if !self.is_scheduled() || !self.all_is_free() || !serving || self.room.get().is_some() {
            return false;
        }
        let stats = self.owner().stats();
        let Some(last) = stats.tiers.last() else {
            return false;
        };
        let count = blocks.len() as u64;
        let wanted: u64 = blocks.iter().map(|(_, one)| room(one.stored)).sum();
        // Each block ends in a page that may be all but empty.
        let taken = last.live_bytes + 4096 * last.blocks + stats.write_back_bytes;
        taken + wanted + last.capacity_bytes / 25 + 8192 <= last.capacity_bytes
            && last.blocks + count + last.blocks_max / 25 + 2 <= last.blocks_max
    }

    /// The block that a call continues: every third one names one, which may be there or not.
    pub(super) fn after(ids: &[Id]) -> Option<Key> {
        let (_, number) = ids.first()?;
        let before = number.checked_sub(1)?;
        number.is_multiple_of(3).then(|| key(before))
    }

    /// A call uses blocks that are there: at which time is not known where it continues another,
    /// whose use may be older.
    pub(super) fn uses(&self, ids: &[Id], after: Option<Key>) {
        let mut twin = self.twin.borrow_mut();
        let stamps = twin.stamps(ids.len());
        for (id, stamp) in ids.iter().zip(stamps) {
            match after {
                None => twin.used(*id, stamp),
                Some(_) => twin.maybe_used(*id, stamp),
            }
        }
    }

    /// Whether others may be evicted for each of these blocks: a new prompt evicts at least a 256th
    /// of the bytes and of the records.
    pub(super) fn is_small(&self, blocks: &[(Id, Version)]) -> bool {
        let tiers = self.owner().stats().tiers;
        let records = tiers.iter().map(|tier| tier.blocks_max.div_ceil(256)).min();
        let tiers = tiers.iter().map(|tier| tier.capacity_bytes);
        let devices = self.owner().devices().unwrap_or_default().into_iter();
        let least = tiers.chain(devices.map(|one| one.data_bytes)).min();
        let least = least.unwrap_or(0) / 256;
        let each = (0_u64..).zip(blocks);
        let mut before = each.map(|(before, (_, one))| before * room(one.stored));
        before.all(|before| before < least) && blocks.len() as u64 <= records.unwrap_or(0)
    }

    pub(super) fn fit_easily(&self, blocks: &[(Id, Version)]) -> bool {
        // What is there already stays as large as it is.
        let there = |id: &Id| {
            let twin = self.twin.borrow();
            let live = twin.live(*id).into_iter();
            let rooms = live.flat_map(|live| live.versions.iter().map(|one| room(one.stored)));
            rooms.max().unwrap_or(0)
        };
        let rooms = blocks.iter();
        let rooms = rooms.map(|(id, version)| room(version.stored).max(there(id)));
        let wanted: u64 = rooms.sum();
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
            && blocks.len() as u64 <= records / 2
            && stats.tiers[0].lost_bytes == 0
    }

    /// What a key is written with: in a pipeline of two tiers, what it is there with, or was when
    /// it left and nobody removed it: a sound copy may still be on its way to the other tier.
    pub(super) fn version(&self, id: Id, parts: &[u64], call: &[(Id, Version)]) -> Version {
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
}
