//! The two-phase verbs, by a mover: reservations of blocks in parts, which go on to the tiers that
//! stand apart, and pins of blocks that lie there in files.

use std::sync::Arc;

use kvdepot_service::Mover;
use kvdepot_store::{BlockBuffers, Buffer, Checksum, Pin, Reservation};
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::sim::twin::Id;

use super::memory::Bytes;
use super::shelf::Shelf;
use super::world::{Expect, World};
use crate::world::{Law, PATIENCE, key, law};

/// The most that is reserved, and pinned, at a time: the rest finds room.
const MOST: usize = 8;

/// A reservation that somebody has.
pub struct Held {
    pub id: Id,
    reservation: Reservation,
    /// Nothing endangered the block when it was made.
    safe: bool,
    since: u64,
    /// Somebody fills it.
    busy: bool,
}

/// A pin that somebody has.
pub struct Pinned {
    id: Id,
    number: u64,
    pin: Pin,
    since: u64,
    discarded: bool,
    /// Somebody reads by it.
    busy: bool,
}

/// Up to `count` that nobody is busy with, of the namespace of the one at `first`.
fn choose<T>(all: &[T], first: u8, count: u8, of: impl Fn(&T) -> (u8, bool)) -> Vec<usize> {
    let free: Vec<usize> = (0..all.len()).filter(|at| !of(&all[*at]).1).collect();
    if free.is_empty() {
        return Vec::new();
    }
    let first = usize::from(first) % free.len();
    let ns = of(&all[free[first]]).0;
    let same = free[first..].iter().filter(|at| of(&all[**at]).0 == ns);
    same.take(count.into()).copied().collect()
}

impl World {
    fn with_mover<T>(&self, call: impl FnOnce(&Mover) -> T) -> Law<T> {
        let mover = self.mover.borrow_mut().take();
        let mover = match mover {
            Some(mover) => mover,
            None => {
                self.door("attach");
                let mover = Mover::attach(&self.socket(), Some(1), true);
                mover.map_err(|error| format!("attach: {error}"))?
            }
        };
        let answer = call(&mover);
        *self.mover.borrow_mut() = Some(mover);
        Ok(answer)
    }

    pub fn reserve(&self, ns: u8, keys: &[u16]) -> Law {
        if !self.shape.moved || self.held.borrow().len() >= MOST {
            return Ok(());
        }
        self.door("reserve");
        let since = self.now.get();
        let ids: Vec<Id> = keys.iter().take(3).map(|key| (ns, *key)).collect();
        let safe: Vec<bool> = ids.iter().map(|id| self.is_safe(*id)).collect();
        ids.iter().for_each(|id| self.offers(self.payload(*id)));
        let parts = ids.iter().map(|id| (key(id.1), self.parts(*id)));
        let reserved = self.namespace(ns)?.reserve(&parts.collect::<Vec<_>>());
        let reserved = reserved.map_err(|error| format!("reserve: {error}"))?;
        law!(reserved.len() == ids.len(), "{} answers", reserved.len());
        for ((id, safe), reservation) in ids.into_iter().zip(safe).zip(reserved) {
            let Some(reservation) = reservation else {
                let mut counts = self.counts.get();
                counts.refused += 1;
                self.counts.set(counts);
                continue;
            };
            law!(reservation.key() == key(id.1), "another key is reserved");
            self.change(id, |block| block.begun = Some(since));
            self.held.borrow_mut().push(Held {
                id,
                reservation,
                safe,
                since,
                busy: false,
            });
        }
        Ok(())
    }

    /// Marks some, so that nobody else takes them; their reservations.
    fn hold(&self, held: u8, count: u8) -> Vec<(Id, Reservation)> {
        let mut all = self.held.borrow_mut();
        let chosen = choose(&all, held, count, |one| (one.id.0, one.busy));
        let mut take = |at: usize| {
            all[at].busy = true;
            (all[at].id, all[at].reservation.clone())
        };
        chosen.into_iter().map(&mut take).collect()
    }

    /// They have ended. Others of the same keys, in another tier, have not.
    fn ended(&self, reservations: &[Reservation]) -> Vec<Held> {
        let mut all = self.held.borrow_mut();
        all.extract_if(.., |one| reservations.contains(&one.reservation))
            .collect()
    }

    pub fn commit(&self, held: u8, count: u8) -> Law {
        let taken = self.hold(held, count);
        let (mut ready, mut sums, mut failed) = (Vec::new(), Vec::new(), Vec::new());
        for one in taken {
            match self.fill(one.0, &one.1)? {
                Some(of_parts) => {
                    sums.push(of_parts);
                    ready.push(one);
                }
                None => failed.push(one),
            }
        }
        self.give_back(failed)?;
        let Some(((ns, _), _)) = ready.first() else {
            return Ok(());
        };
        self.door("commit");
        let was_calm = self.calm.get();
        let namespace = self.namespace(*ns)?;
        let reservations: Vec<Reservation> = ready.into_iter().map(|(_, one)| one).collect();
        let stored = namespace.commit(&reservations, &sums);
        let stored = stored.map_err(|error| format!("commit: {error}"))?;
        let calm = self.calm.get() && was_calm;
        for (held, stored) in self.ended(&reservations).into_iter().zip(stored) {
            let apart = self.apart_at(held.reservation.tier);
            let disturbed = self.block(held.id).disturbed >= held.since || !held.safe;
            law!(
                stored || apart.is_some() && (!calm || disturbed),
                "{:?} was reserved, and not committed",
                held.id
            );
            let first = self.shape.pipeline.split('|').nth(held.reservation.tier);
            let lasts = apart.map_or_else(|| first == Some("Dax"), |shelf| shelf.lasts);
            let keeps = stored && lasts && self.keeps_all() && !disturbed;
            self.change(held.id, |block| block.lasting |= keeps);
        }
        Ok(())
    }

    /// The tier at a position, if it stands apart.
    fn apart_at(&self, tier: usize) -> Option<&Arc<Shelf>> {
        let here = ["Cache", "Dax"];
        let names = self.shape.pipeline.split('|').take(tier + 1);
        let before = names.clone().filter(|name| !here.contains(name)).count();
        let is_apart = names.last().is_some_and(|name| !here.contains(&name));
        self.shelves
            .get(before.checked_sub(1)?)
            .filter(|_| is_apart)
    }

    /// Moves the parts of a reservation; `None` where a lane failed.
    fn fill(&self, id: Id, reservation: &Reservation) -> Law<Option<Vec<Checksum>>> {
        let bytes = content(self.block(id).content, self.len(id));
        let (mut at, mut sums) = (0, Vec::new());
        for (number, len) in self.parts(id).into_iter().enumerate() {
            self.door("store part");
            let part = bytes[at..at + len as usize].to_vec();
            at += len as usize;
            let buffers = BlockBuffers::whole([Buffer::from_vec(part)]);
            let (placement, faults) = (reservation.placement(), self.faults());
            let job =
                self.with_mover(|mover| mover.store(&[placement], &buffers, number as u32))?;
            let job = job.map_err(|error| format!("store: {error}"))?;
            law!(job.wait(Some(PATIENCE)), "a store does not end");
            let Some(sum) = job.checksums()[0] else {
                law!(self.faults() > faults, "a part of {id:?} was not stored");
                return Ok(None);
            };
            sums.push(sum);
        }
        Ok(Some(sums))
    }

    pub fn abort(&self, held: u8, count: u8) -> Law {
        self.give_back(self.hold(held, count))
    }

    fn give_back(&self, held: Vec<(Id, Reservation)>) -> Law {
        let Some(((ns, _), _)) = held.first() else {
            return Ok(());
        };
        self.door("abort");
        self.freed.set(true);
        let namespace = self.namespace(*ns)?;
        let reservations: Vec<Reservation> = held.into_iter().map(|(_, one)| one).collect();
        namespace.abort(&reservations);
        drop(self.ended(&reservations));
        Ok(())
    }

    pub fn pin(&self, ns: u8, keys: &[u16], prefix: bool) -> Law {
        if !self.shape.moved || self.pins.borrow().len() >= MOST {
            return Ok(());
        }
        self.door("pin");
        let (since, namespace) = (self.now.get(), self.namespace(ns)?);
        let ids: Vec<Id> = keys.iter().map(|key| (ns, *key)).collect();
        let expect = ids.iter().map(|id| self.expect(*id));
        let expect = expect.collect::<Law<Vec<_>>>()?;
        let near = self.are_near(ns, keys)?;
        let names: Vec<_> = keys.iter().map(|number| key(*number)).collect();
        let inner = self.inner.get();
        let pins = namespace.pin(&names, prefix);
        let pins = pins.map_err(|error| format!("pin: {error}"))?;
        let alone = inner == self.inner.get();
        let mut gap = false;
        for (((id, expect), near), pin) in ids.into_iter().zip(expect).zip(near).zip(pins) {
            let Some(pin) = pin else {
                // Others' lanes reach what is mapped, or lies in a file.
                let reached = near || matches!(self.shape.bytes, Bytes::Files | Bytes::Posix);
                let behind = gap && prefix;
                let expect = match alone && reached && !behind {
                    true => expect,
                    false => Expect::Any,
                };
                self.found(id, false, expect, since)?;
                gap = true;
                continue;
            };
            law!(!gap || !prefix, "{id:?} was pinned behind a gap");
            law!(pin.key() == key(id.1), "a pin of another key");
            let bytes = pin.bytes();
            law!(
                bytes == self.len(id) as u64,
                "a pin of {id:?} has {bytes} bytes"
            );
            self.found(id, true, Expect::Any, since)?;
            self.pins.borrow_mut().push(Pinned {
                id,
                number: self.number(),
                pin,
                since,
                discarded: false,
                busy: false,
            });
        }
        Ok(())
    }

    /// Loads the parts of a pinned block.
    pub fn load(&self, pin: u8) -> Law {
        let (number, pin, (id, since)) = {
            let mut pins = self.pins.borrow_mut();
            let Some(at) = choose(&pins, pin, 1, |one| (one.id.0, one.busy)).pop() else {
                return Ok(());
            };
            let one = &mut pins[at];
            one.busy = true;
            (one.number, one.pin.clone(), (one.id, one.since))
        };
        let loaded = self.load_parts(id, &pin, since);
        let mut pins = self.pins.borrow_mut();
        if let Some(one) = pins.iter_mut().find(|one| one.number == number) {
            one.busy = false;
            one.discarded |= !loaded.as_ref().copied().unwrap_or(true);
        }
        loaded.map(drop)
    }

    /// Whether they verified.
    fn load_parts(&self, id: Id, pin: &Pin, since: u64) -> Law<bool> {
        let mut at = 0;
        for (number, len) in self.parts(id).into_iter().enumerate() {
            self.door("load part");
            let range = at..at + len as usize;
            at = range.end;
            let buffer = Buffer::from_vec(vec![0xEE; range.len()]);
            let buffers = BlockBuffers::whole([buffer.clone()]);
            let (placement, faults) = (pin.placement(), self.faults());
            let job = self.with_mover(|mover| mover.load(&[placement], &buffers, number as u32))?;
            let job = job.map_err(|error| format!("load: {error}"))?;
            law!(job.wait(Some(PATIENCE)), "a load does not end");
            if job.corrupt()[0] {
                self.door("discard");
                // A tier says whether it was sound.
                let namespace = self.namespace(id.0)?;
                let (calm, storms) = (self.calm.get(), self.storms.get());
                namespace.discard(std::slice::from_ref(pin));
                let answered = calm && self.storms.get() == storms;
                let known = answered && self.block(id).disturbed < since;
                law!(
                    !known || self.shelves.len() > 1 || !self.is_rotten(id),
                    "{id:?} was discarded, and a tier has it still"
                );
                return Ok(false);
            }
            if job.checksums()[0].is_none() {
                // A mover opens it by its name, which goes with the block, also where another
                // depot stores it once more.
                let block = self.block(id);
                let gone = block.removing > 0 || block.disturbed >= since || self.collects();
                let gone = gone || self.was_foreign(id, since) || self.has_rotted(id);
                law!(
                    self.faults() > faults || gone && self.shape.bytes == Bytes::Posix,
                    "part {number} of {id:?}, which is pinned, was not loaded"
                );
                continue;
            }
            let bytes = buffer.to_vec();
            let readable = World::readable(&self.block(id), since);
            let mut contents = readable.iter().map(|number| content(*number, self.len(id)));
            law!(
                contents.any(|whole| whole[range.clone()] == bytes),
                "WRONG BYTES: part {number} of {id:?}, which is pinned, is nobody's"
            );
        }
        Ok(true)
    }

    pub fn unpin(&self, pin: u8, count: u8, served: bool) -> Law {
        let taken: Vec<Pinned> = {
            let mut pins = self.pins.borrow_mut();
            let chosen = choose(&pins, pin, count, |one| (one.id.0, one.busy));
            let mut at = 0;
            let mut is_chosen = || {
                at += 1;
                chosen.contains(&(at - 1))
            };
            pins.extract_if(.., |_| is_chosen()).collect()
        };
        let Some(first) = taken.first() else {
            return Ok(());
        };
        self.door("unpin");
        let namespace = self.namespace(first.id.0)?;
        // Whoever has unpublished a block has not served it.
        let served = served && !taken.iter().any(|one| one.discarded);
        let pins: Vec<Pin> = taken.into_iter().map(|one| one.pin).collect();
        if served {
            let mut counts = self.counts.get();
            counts.hits += pins.len() as u64;
            self.counts.set(counts);
        }
        namespace.unpin(&pins, served);
        Ok(())
    }

    /// Ends all that was reserved or pinned.
    pub fn let_go(&self) -> Law {
        while !self.held.borrow().is_empty() {
            self.abort(0, u8::MAX)?;
        }
        while !self.pins.borrow().is_empty() {
            self.unpin(0, u8::MAX, false)?;
        }
        Ok(())
    }
}
