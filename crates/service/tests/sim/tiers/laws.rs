//! What must hold after each step, and when all is at rest.

use kvdepot_store::Outcome;
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::sim::twin::Id;

use super::world::{Asked, Expect, Flying, World};
use crate::world::{Law, law};

impl World {
    /// Looks at all that can be seen.
    pub fn look(&self) -> Law {
        self.collect()?;
        // Nothing is left to do for who asks no tier apart.
        if self.schedule.waiting() == 0 && self.nested.get() == 0 {
            let flying = self.flying.borrow();
            let waits = flying.iter().find(|one| one.is_near);
            law!(
                waits.is_none(),
                "a {:?} that asked no tier apart waits for one: {:?}",
                waits.map(|one| one.asked),
                waits.map(|one| one.task.outcomes())
            );
        }
        self.within_terms()?;
        self.within_room()?;
        self.lasting()
    }

    /// What was acknowledged is in a tier that lasts.
    fn lasting(&self) -> Law {
        if self.shape.pipeline.contains("Dax") {
            // Its blocks are read at the end.
            return Ok(());
        }
        let blocks = self.blocks.borrow();
        for (id, _) in blocks.iter().filter(|(_, block)| block.lasting) {
            let identity = World::identity(*id);
            let mut lasting = self.shelves.iter().filter(|shelf| shelf.lasts);
            let kept = lasting.any(|shelf| shelf.has(&identity));
            law!(
                kept,
                "{id:?} was acknowledged, and no tier has it that lasts"
            );
        }
        Ok(())
    }

    /// Whether what is acknowledged stays: in a tier without eviction, or one that has room.
    pub fn keeps_all(&self) -> bool {
        let first = |name| self.shape.pipeline.find(name).unwrap_or(usize::MAX);
        let mid = if self.shape.mid_lasts {
            first("Mid")
        } else {
            usize::MAX
        };
        let ahead = first("Dax") > mid.min(first("Far"));
        !self.collects() && (ahead || self.shape.dax >= 2048)
    }

    /// Judges the tasks that have ended.
    pub fn collect(&self) -> Law {
        let ended: Vec<Flying> = {
            let mut flying = self.flying.borrow_mut();
            flying.extract_if(.., |one| one.task.is_done()).collect()
        };
        for one in ended {
            let outcomes = one.task.outcomes();
            // Whether each so far was found.
            for (index, outcome) in outcomes.iter().enumerate() {
                match one.asked {
                    Asked::Put => self.put_ended(&one, index, *outcome)?,
                    Asked::Get => self.get_ended(&one, index, *outcome)?,
                    Asked::Lookup => {
                        let found = *outcome == Outcome::Done;
                        let expect = self.expected(&one, index);
                        self.found(one.ids[index], found, expect, one.since)?;
                    }
                    // It has read the nearest copy alone.
                    Asked::Prefetch if self.shelves.len() > 1 => {}
                    Asked::Prefetch => self.rid_of(&one, index, *outcome)?,
                }
            }
        }
        Ok(())
    }

    fn put_ended(&self, one: &Flying, index: usize, outcome: Outcome) -> Law {
        let id = one.ids[index];
        if one.foreign {
            self.is_foreign(id);
            return self.sharer_put_ended(one, index, outcome);
        }
        let mut counts = self.counts.get();
        match outcome {
            Outcome::Done => counts.stored += 1,
            Outcome::Full => counts.full += 1,
            Outcome::Declined => {
                counts.declined += 1;
                self.declined(one, id)?;
            }
            Outcome::Dropped | Outcome::Corrupt => counts.dropped += 1,
            Outcome::Closed => {}
            _ => return Err(format!("a put of {id:?} ended as {outcome:?}")),
        }
        self.counts.set(counts);
        self.acknowledged(one, index, outcome);
        Ok(())
    }

    fn acknowledged(&self, one: &Flying, index: usize, outcome: Outcome) {
        let keeps = self.keeps_all() && one.safe[index];
        self.change(one.ids[index], |block| {
            block.lasting |= outcome == Outcome::Done && block.disturbed < one.since && keeps;
        });
    }

    /// It has one tier, and nothing fails there but lanes.
    fn sharer_put_ended(&self, one: &Flying, index: usize, outcome: Outcome) -> Law {
        let fits = match outcome {
            Outcome::Done | Outcome::Dropped | Outcome::Closed => true,
            Outcome::Full => self.collects(),
            _ => false,
        };
        law!(
            fits,
            "a sharer's put of {:?} ended as {outcome:?}",
            one.ids[index]
        );
        self.acknowledged(one, index, outcome);
        Ok(())
    }

    fn get_ended(&self, one: &Flying, index: usize, outcome: Outcome) -> Law {
        let id = one.ids[index];
        if outcome != Outcome::Done {
            let fits = matches!(outcome, Outcome::Miss | Outcome::Corrupt);
            law!(fits, "a get of {id:?} ended as {outcome:?}");
            self.rid_of(one, index, outcome)?;
            return self.missed(one, index);
        }
        if !one.foreign {
            let mut counts = self.counts.get();
            counts.hits += 1;
            self.counts.set(counts);
        }
        let bytes = one.buffers[index].to_vec();
        let block = self.block(id);
        let readable = World::readable(&block, one.since);
        let right = readable
            .iter()
            .any(|number| bytes == content(*number, bytes.len()));
        law!(
            right,
            "WRONG BYTES: of {id:?}, of which {} contents may be read",
            readable.len()
        );
        self.found(id, true, self.expected(one, index), one.since)
    }

    /// Who hears that a block did not verify puts it again: none of the tiers that were asked has
    /// it then, and takes that for what is there. The first key of a get is asked of all.
    fn rid_of(&self, one: &Flying, index: usize, outcome: Outcome) -> Law {
        let (id, is_first) = (one.ids[index], one.asked == Asked::Get && index == 0);
        let answered = one.calm && self.storms.get() == one.storms && !one.foreign;
        let known = answered && self.block(id).disturbed < one.since;
        let is_heard = outcome == Outcome::Corrupt || outcome == Outcome::Miss && is_first;
        law!(
            !known || !is_heard || !self.is_rotten(id),
            "{id:?} ended as {outcome:?}, and a tier has it still"
        );
        Ok(())
    }

    fn expected(&self, one: &Flying, index: usize) -> Expect {
        // A gap that was before it may have been closed since.
        let is_put = |id: &Id| self.block(*id).begun >= Some(one.since);
        let closed = one.ids[..index].iter().any(is_put);
        match one.expect[index] {
            Expect::Absent if closed => Expect::Any,
            expect if self.storms.get() == one.storms => expect,
            _ => Expect::Any,
        }
    }

    /// A get found nothing, or what came before it in its prefix was disturbed.
    fn missed(&self, one: &Flying, index: usize) -> Law {
        let expect = self.expected(one, index);
        let before: &[Id] = &one.ids[..index];
        let cut = before
            .iter()
            .any(|id| self.block(*id).disturbed >= one.since);
        match cut {
            true => Ok(()),
            false => self.found(one.ids[index], false, expect, one.since),
        }
    }

    /// Every task has ended.
    pub fn none_waits(&self, when: &str) -> Law {
        let flying = self.flying.borrow();
        let one = flying.first();
        law!(
            one.is_none(),
            "a {:?} of {:?} has no outcome {when}: {:?}",
            one.map(|one| one.asked),
            one.map(|one| &one.ids),
            one.map(|one| one.task.outcomes())
        );
        Ok(())
    }

    /// Nothing is held that nobody holds, and all is counted.
    pub fn at_rest(&self) -> Law {
        self.none_waits("when all is at rest")?;
        let stats = self.owner().stats();
        for tier in &stats.tiers {
            let held = (tier.pinned_blocks, tier.reserved_blocks);
            law!(
                held == (0, 0),
                "{} has pinned and reserved {held:?}",
                tier.tier
            );
        }
        law!(
            stats.write_back_bytes == 0,
            "{} bytes wait for further tiers",
            stats.write_back_bytes
        );
        if stats.coalesced_blocks > 0 {
            self.door("joined");
        }
        law!(
            stats.inflight_load_blocks == 0,
            "{} blocks are said to be loaded",
            stats.inflight_load_blocks
        );
        let drained = self.owner().drain(std::time::Duration::ZERO);
        law!(drained, "a drain has something left");
        for shelf in &self.shelves {
            let (_, unheard) = shelf.counts();
            let counted = stats.tiers.iter().find(|tier| tier.tier == shelf.name);
            let counted = counted.map_or(0, |tier| tier.timeouts);
            law!(
                counted == unheard,
                "{} did not answer {unheard} questions in time, and {counted} are counted",
                shelf.name
            );
        }
        if let Some(sharer) = self.sharer.borrow().as_ref() {
            let tier = &sharer.stats().tiers[0];
            let held = (tier.pinned_blocks, tier.reserved_blocks);
            law!(held == (0, 0), "a sharer has pinned and reserved {held:?}");
        }
        self.counted(&stats)
    }

    fn counted(&self, stats: &kvdepot_store::Stats) -> Law {
        let counts = self.counts.get();
        let hits: u64 = stats.hit_blocks.iter().sum();
        for (name, counted, known) in [
            ("put", stats.put_blocks, counts.put_blocks),
            ("get", stats.get_blocks, counts.get_blocks),
            ("hit", hits, counts.hits),
        ] {
            law!(
                counted == known,
                "{counted} {name} blocks are counted, not {known}"
            );
        }
        // Who waits for a block that is on its way is not counted by itself.
        let first = self.shape.pipeline.split('|').next().unwrap_or_default();
        if first == "Cache" || first == "Mid" && !self.shape.mid_lasts {
            return Ok(());
        }
        let dropped = stats.put_dropped_blocks + stats.put_corrupt_blocks;
        for (name, counted, known, or) in [
            (
                "acknowledged",
                stats.put_acknowledged_blocks,
                counts.stored,
                0,
            ),
            ("full", stats.put_full_blocks, counts.full, 0),
            (
                "declined",
                stats.put_declined_blocks,
                counts.declined,
                counts.refused,
            ),
            ("dropped", dropped, counts.dropped, counts.refused),
        ] {
            law!(
                (known..=known + or).contains(&counted),
                "{counted} puts are counted as {name}, not {known}"
            );
        }
        Ok(())
    }
}
