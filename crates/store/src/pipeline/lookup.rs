//! What the index answers by itself: which blocks are stored, and that some no longer are.

use std::collections::HashSet;
use std::sync::Arc;

use kvdepot_arena::gate::Pass;
use kvdepot_arena::{Error, Key, NamespaceId, Place, Refused, TierStats, held};

use super::two_phase::NoRoom;
use super::{Core, Edge, Pin, Reservation};
use crate::devices::DeviceStats;
use crate::metrics::Stats;
use crate::namespace::is_saved;
use crate::placement::Holder;
use crate::tier::{Apart, Stage};

impl Core {
    /// Whether somebody is at work in an index now.
    pub(crate) fn is_busy(&self) -> bool {
        self.ledger.is_taken() || self.arenas().any(|(_, tier)| tier.is_busy())
    }

    /// Returns for each key whether its block is stored in some tier.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`].
    pub fn contains(self: &Arc<Core>, id: NamespaceId, keys: &[Key]) -> Result<Vec<bool>, Error> {
        let pass = self.gate.enter()?;
        self.asked(id, keys);
        let found = self.found(pass, id, keys);
        self.note_found(id, keys, run(&found));
        Ok(found)
    }

    /// Whether each key's block is stored in some tier. Waits for those that answer late.
    fn found(self: &Arc<Core>, pass: Pass, id: NamespaceId, keys: &[Key]) -> Vec<bool> {
        match self.is_apart() && !held::passes() {
            true => {
                let task = self.look_up(pass, id, keys, None);
                task.wait(None).unwrap_or_default()
            }
            false => self.stored(id, keys),
        }
    }

    /// Whether each key's block is stored in some tier of arenas.
    pub(super) fn stored(&self, id: NamespaceId, keys: &[Key]) -> Vec<bool> {
        let mut found = vec![false; keys.len()];
        for (_, tier) in self.arenas() {
            tier.contains(id, keys, &mut found);
        }
        found
    }

    /// Returns the number of consecutive keys, from the first, whose blocks are stored.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`].
    pub fn prefix(self: &Arc<Core>, id: NamespaceId, keys: &[Key]) -> Result<usize, Error> {
        let pass = self.gate.enter()?;
        self.asked(id, keys);
        let mut count = self.stored_run(id, keys);
        if count < keys.len() && self.is_apart() {
            let found = self.found(pass, id, &keys[count..]);
            count += run(&found);
        }
        self.note_found(id, keys, count);
        Ok(count)
    }

    /// Whether some tier may answer late.
    pub(crate) fn is_apart(&self) -> bool {
        self.tiers.iter().any(|tier| tier.apart().is_some())
    }

    /// Most blocks that a step of a call asks such tiers for.
    pub(super) fn step_max(&self) -> usize {
        let apart = self.tiers.iter().filter_map(Stage::apart);
        apart.map(Apart::step_max).min().unwrap_or(usize::MAX)
    }

    pub(super) fn stored_run(&self, id: NamespaceId, keys: &[Key]) -> usize {
        let mut count = 0;
        // Tiers and their devices take turns: each goes on where the others have a gap.
        loop {
            let before = count;
            for (_, tier) in self.arenas() {
                count += tier.prefix(id, &keys[count..]);
            }
            if count == before || count == keys.len() {
                return count;
            }
        }
    }

    /// Returns for each key the position of the first tier that has its block.
    ///
    /// The call does not count as a use of the blocks.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`].
    pub fn nearest(&self, id: NamespaceId, keys: &[Key]) -> Result<Vec<Option<usize>>, Error> {
        let _pass = self.gate.enter()?;
        let mut nearest = vec![None; keys.len()];
        for (number, tier) in self.tiers.iter().enumerate() {
            let mut found = vec![false; keys.len()];
            match tier {
                Stage::Here(arenas) => arenas.contains(id, keys, &mut found),
                Stage::Apart(_) if held::passes() => {}
                Stage::Apart(apart) => {
                    let missing = (0..keys.len()).filter(|at| nearest[*at].is_none());
                    let missing: Vec<usize> = missing.collect();
                    let asked: Vec<Key> = missing.iter().map(|at| keys[*at]).collect();
                    let there = apart.probe(id, &asked).wait().unwrap_or_default();
                    let there = missing.into_iter().zip(there);
                    there.for_each(|(at, there)| found[at] = there);
                }
            }
            let here = nearest.iter_mut().zip(found).filter(|(_, found)| *found);
            here.for_each(|(nearest, _)| *nearest = nearest.or(Some(number)));
        }
        Ok(nearest)
    }

    /// Removes blocks from every tier.
    ///
    /// Returns the number of keys that were stored in at least one tier. A repeated key counts
    /// once.
    ///
    /// # Errors
    ///
    /// * [`Error::Closed`].
    /// * [`Error::Silent`] if an asynchronous tier does not respond: it may still have the blocks.
    pub fn remove(self: &Arc<Core>, id: NamespaceId, keys: &[Key]) -> Result<usize, Error> {
        let _pass = self.gate.enter()?;
        let mut seen = HashSet::with_capacity(keys.len());
        let once = keys.iter().filter(|key| seen.insert(*key)).copied();
        let once: Vec<Key> = once.collect();
        let keys = once.as_slice();
        self.forget(id, keys);
        self.edges.iter().for_each(|edge| edge.forget(id, keys));
        let mut found = self.stored(id, keys);
        // Near, far, near: a copy under way in either direction finds its source removed, or has
        // arrived where the next step looks.
        let mut silent = Ok(());
        for tier in self.tiers.iter().chain(self.tiers.iter().rev().skip(1)) {
            match tier {
                Stage::Here(arenas) => {
                    arenas.remove(id, keys);
                }
                Stage::Apart(apart) => {
                    let gone = heard(tier, apart.remove(id, keys).wait());
                    let removed = gone.map(|gone| {
                        let each = found.iter_mut().zip(gone);
                        each.for_each(|(found, gone)| *found |= gone);
                    });
                    // The others are asked all the same.
                    silent = silent.and(removed);
                }
            }
        }
        silent?;
        Ok(found.into_iter().filter(|found| *found).count())
    }

    /// Removes every block of a namespace from every tier.
    ///
    /// Returns the number of blocks that were stored in at least one tier.
    ///
    /// # Errors
    ///
    /// Those of [`Core::remove`].
    pub fn clear(&self, id: NamespaceId) -> Result<usize, Error> {
        let _pass = self.gate.enter()?;
        self.forget_all();
        self.edges.iter().for_each(Edge::forget_all);
        let doubles = self.doubles(id);
        // In the order of `remove`.
        let tiers = self.tiers.iter().chain(self.tiers.iter().rev().skip(1));
        let (mut cleared, mut silent) = (0, Ok(()));
        for tier in tiers {
            let here = match tier {
                Stage::Here(arenas) => Ok(arenas.clear(id)),
                Stage::Apart(apart) => heard(tier, apart.clear(id).wait()),
            };
            match here {
                Ok(here) => cleared += here,
                Err(error) => silent = silent.and(Err(error)),
            }
        }
        silent?;
        // One that has left a tier since is no double any more.
        Ok(cleared.saturating_sub(doubles))
    }

    /// Records the description of a namespace in the tiers, and derives its key if the depot has
    /// keys.
    ///
    /// # Errors
    ///
    /// * [`Error::Input`] if the salt has no key.
    /// * [`Error::Closed`].
    pub fn describe(
        &self,
        id: NamespaceId,
        description: &str,
        salt: Option<&str>,
    ) -> Result<(), Error> {
        let _pass = self.gate.enter()?;
        if let Some(keys) = &self.keys {
            keys.name(id, salt)?;
        }
        if is_saved(description) {
            self.saved.note(id);
        }
        self.tiers
            .iter()
            .for_each(|tier| tier.describe(id, description));
        Ok(())
    }

    /// Returns counters and usage.
    pub fn stats(&self) -> Stats {
        if self.gate.forked() {
            // Another thread of the parent may have held a lock for ever, as seen from here.
            return Stats::default();
        }
        let mut tiers: Vec<TierStats> = self.tiers.iter().map(Stage::stats).collect();
        for (into, edge) in tiers.iter_mut().skip(1).zip(&self.edges) {
            into.write_back_deferred_blocks = edge.declined();
        }
        let media = self.media();
        let devices = media.iter().filter_map(|arena| DeviceStats::of(arena));
        let under_way = (self.loads.under_way() as u64, self.queued_bytes());
        self.metrics.read(tiers, devices.collect(), under_way)
    }

    /// Pins blocks where they are nearest; with `prefix` nothing behind the first miss.
    pub(crate) fn pin(
        self: &Arc<Core>,
        holder: Holder,
        id: NamespaceId,
        keys: &[Key],
        prefix: bool,
    ) -> Result<Vec<Option<Pin>>, Error> {
        let mut pins = self.pin_as(
            id,
            keys,
            (holder.seat, true),
            |(tier, here), place, parts| Pin {
                tier,
                tier_name: here.name(),
                parts,
                outside: self.outside_at(tier, &place),
                place,
                holder,
            },
        )?;
        if prefix {
            self.unpin(&behind_gap(&mut pins), false);
        }
        self.note_missed(&pins);
        Ok(pins)
    }

    /// Pins blocks for a client, which reads part tables itself.
    ///
    /// Returns the tier and the place of each block, or `None` for a miss. If `prefix` is true,
    /// blocks after the first miss are not pinned. `seat` is the number of the client. If
    /// `through_doors` is true, it can also read blocks on other hosts, and those are pinned too.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`].
    pub fn pin_places(
        self: &Arc<Core>,
        id: NamespaceId,
        keys: &[Key],
        prefix: bool,
        (seat, through_doors): (u64, bool),
    ) -> Result<Vec<Option<(usize, Place)>>, Error> {
        let caller = (seat, through_doors);
        let mut pins = self.pin_as(id, keys, caller, |(tier, _), place, _| (tier, place))?;
        if prefix {
            for (tier, place) in behind_gap(&mut pins) {
                self.tiers[tier].unpin([place].iter());
            }
        }
        self.note_missed(&pins);
        Ok(pins)
    }

    /// Counts the keys that were not pinned, once the answer stands.
    fn note_missed<T>(&self, pins: &[Option<T>]) {
        if held::is_answer() {
            let missed = pins.iter().filter(|pin| pin.is_none()).count();
            self.metrics.missed(missed as u64);
        }
    }

    /// Reserves space for blocks with parts of these lengths.
    ///
    /// `after` is the previous block of the prompt. With [`NoRoom::Stop`] the result ends before
    /// the first block that finds no space.
    ///
    /// # Errors
    ///
    /// * [`Error::Full`] with [`NoRoom::Fail`].
    /// * [`Error::Input`] for wrong arguments.
    /// * [`Error::Closed`].
    pub fn reserve(
        self: &Arc<Core>,
        holder: Holder,
        id: NamespaceId,
        after: Option<Key>,
        blocks: &[(Key, Vec<u64>)],
        no_room: NoRoom,
    ) -> Result<Vec<Option<Reservation>>, Error> {
        let mut answers = self.reserve_each(holder, id, after, blocks)?;
        let full = answers.iter().enumerate().find_map(|(at, answer)| {
            let Err(Refused::Full(full)) = answer else {
                return None;
            };
            Some((at, *full))
        });
        let declined = |answer: &_| matches!(answer, Err(Refused::Declined));
        let declined = answers.iter().position(declined);
        let declined = declined.filter(|_| no_room == NoRoom::Stop);
        let (kept, error) = match (full, no_room) {
            (None, _) | (_, NoRoom::Skip) => (answers.len(), None),
            (Some((_, full)), NoRoom::Fail) => (0, Some(Error::from(full))),
            (Some((at, _)), NoRoom::Stop) => (at, None),
        };
        let kept = kept.min(declined.unwrap_or(kept));
        let behind = answers.split_off(kept).into_iter().filter_map(Result::ok);
        self.abort(&behind.collect::<Vec<_>>());
        match error {
            Some(error) => Err(error),
            None => Ok(answers.into_iter().map(Result::ok).collect()),
        }
    }
}

/// How many of the first are found.
pub(super) fn run(found: &[bool]) -> usize {
    found.iter().take_while(|found| **found).count()
}

/// Takes what is behind the first miss.
fn behind_gap<T>(pins: &mut [Option<T>]) -> Vec<T> {
    let gap = pins.iter().position(Option::is_none).unwrap_or(pins.len());
    pins[gap..].iter_mut().filter_map(Option::take).collect()
}

/// What a tier has answered that cannot be taken for a miss.
pub(crate) fn heard<T>(tier: &Stage, answer: Option<T>) -> Result<T, Error> {
    answer.ok_or_else(|| Error::Silent { tier: tier.name() })
}
