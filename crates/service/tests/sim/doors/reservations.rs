//! Reservations: `reserve → move → commit | abort`.

use kvdepot_store::{BlockBuffers, Error, Namespace, NoRoom, Reservation};
use kvdepot_testkit::sim::twin::{Id, Version};

use crate::world::{Held, Law, PATIENCE, World, key, law};

impl World {
    pub(super) fn reserve(
        &self,
        door: usize,
        ns: u8,
        blocks: &[(u16, Vec<u32>)],
        strict: bool,
    ) -> Law {
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
        let is_roomy = self.is_roomy_for(&wanted);
        let ids: Vec<Id> = wanted.iter().map(|(id, _)| *id).collect();
        let after = World::after(&ids);
        let goes = is_roomy || after.is_none() && self.is_small(&wanted);
        let has_room = self.all_is_free() && self.fit_easily(&wanted) && goes;
        let may_decline = self.shape.learned && !is_roomy;
        self.may_evict();
        self.cause
            .borrow_mut()
            .own
            .extend(wanted.iter().map(|(id, _)| *id));
        self.uses(&ids, after);
        let no_room = match strict {
            true => NoRoom::Fail,
            false => NoRoom::Skip,
        };
        let answer = namespace.reserve_after(after, &call, no_room);
        let reserved = match answer {
            Ok(reserved) => reserved,
            Err(Error::Full { .. }) if strict => {
                law!(
                    !has_room || may_decline,
                    "a reservation found no room, and all was free"
                );
                let ids = wanted.into_iter().map(|(id, _)| id);
                self.unread.borrow_mut().extend(ids);
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
                None => {
                    law!(
                        needless || !has_room || may_decline,
                        "{id:?} was not reserved, and all was free"
                    );
                    // Not stored, and not asked for since, whatever the reason was.
                    self.unread.borrow_mut().insert(id);
                }
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

    pub(super) fn commit(&self, held: u8, count: u8) -> Law {
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
            self.unread.borrow_mut().insert(one.id);
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
            let buffers = BlockBuffers::whole(self.home().memory(&held.version.part(part), 1).0);
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

    pub(super) fn bad_commit(&self, held: u8) -> Law {
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

    pub(super) fn abort(&self, held: u8, count: u8) -> Law {
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
        // What has ended ends nothing again, whatever has its place by now.
        let (mut ended, door) = (self.ended.borrow_mut(), held[0].door);
        let of_door = ended.iter().filter(|(other, _)| *other == door);
        let again: Vec<Reservation> = of_door.map(|(_, one)| one.clone()).collect();
        namespace.abort(&again);
        ended.extend(reservations.into_iter().map(|one| (door, one)));
        let old = ended.len().saturating_sub(8);
        ended.drain(..old);
        for one in &held {
            self.twin.borrow_mut().end(one.id, one.writer);
        }
    }
}
