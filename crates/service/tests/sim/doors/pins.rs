//! Pins: `pin → move → unpin`.

use std::collections::BTreeSet;

use kvdepot_store::{BlockBuffers, Pin};
use kvdepot_testkit::sim::twin::Id;

use crate::world::{HeldPin, Law, PATIENCE, World, key, law};

impl World {
    pub(super) fn pin(&self, door: usize, ns: u8, numbers: &[u16], prefix: bool) -> Law {
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
        self.asks(ids.iter().copied());
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
                    let tier = if near { "Cache" } else { self.far() };
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
    pub(super) fn load(&self, pin: u8) -> Law {
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
            let (moved, seen) = self.home().memory(&vec![0xEE; *len as usize], 1);
            let buffers = BlockBuffers::whole(moved);
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
            let bytes: Vec<u8> = seen
                .iter()
                .flat_map(kvdepot_store::Buffer::to_vec)
                .collect();
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

    pub(super) fn unpin(&self, pin: u8, count: u8, served: bool) -> Law {
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

    pub(super) fn discard(&self, pin: u8) -> Law {
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
}
