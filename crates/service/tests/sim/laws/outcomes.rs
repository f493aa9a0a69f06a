//! What calls may answer, and which bytes they may deliver.

use kvdepot_store::Outcome;
use kvdepot_testkit::sim::twin::Id;

use crate::world::{Asked, Expect, Flying, Law, World, key, law};

impl World {
    /// Outcomes that came.
    pub fn collect(&self) -> Law {
        let mut flying = std::mem::take(&mut *self.flying.borrow_mut());
        let checked = flying.iter_mut().try_for_each(|one| self.outcomes(one));
        flying.retain(|one| !one.task.is_done());
        flying.append(&mut self.flying.borrow_mut());
        *self.flying.borrow_mut() = flying;
        checked
    }

    pub(super) fn outcomes(&self, flying: &mut Flying) -> Law {
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
                self.unread.borrow_mut().insert(id);
                // One that was on its way may be declined later, by itself.
                let before = flying.task.outcomes().into_iter().zip(&flying.there);
                let mut before = before.take(index);
                let behind = before.any(|one| one == (Outcome::Declined, &false));
                law!(
                    flying.there[index] || !self.is_scheduled() || !behind,
                    "{id:?} was stored behind a block that was declined"
                );
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
                // Who takes over from a copy that failed comes later.
                law!(
                    !flying.has_room || faulty,
                    "a put of {id:?} found no room, and all was free"
                );
            }
            Outcome::Declined => {
                self.door("put declined");
                // Where others had to go for it: itself or one before it was stored before and
                // not asked for, or it lies deep in what the call adds.
                let mut unread = self.unread.borrow_mut();
                let now = || flying.ids[..=index].iter().any(|id| unread.contains(id));
                let known = flying.unread.is_some_and(|first| first <= index) || now();
                let is_deep = flying.there[..index].contains(&false) || !self.is_scheduled();
                law!(
                    self.shape.learned && (known || is_deep) && !flying.is_roomy,
                    "a put of {id:?} was declined for no reason"
                );
                unread.insert(id);
            }
            Outcome::Dropped => {
                counts.dropped += 1;
                let full = self.shape.drop && !self.is_single() && !flying.has_queue;
                law!(faulty || full, "a put of {id:?} was dropped for no reason");
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
            self.asks([*id]);
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
        // What does not verify is found no more, before anybody is told, unless it was put again.
        let is_new = {
            let twin = self.twin.borrow();
            let live = twin.live(id);
            !twin.writers(id).is_empty() || live.is_some_and(|live| live.since > flying.since)
        };
        if outcome == Outcome::Corrupt && self.is_scheduled() && !is_new {
            self.asks([id]);
            let found = self.namespace(0, id.0)?.contains(&[key(id.1)]);
            let found = found.map_err(|error| error.to_string())?;
            law!(
                !found[0],
                "{id:?} did not verify on its way near, and is still found"
            );
        }
        Ok(())
    }
}
