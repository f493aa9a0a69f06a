//! A two-phase reservation call: the way of each block, and the answers of tiers, step by step.

use std::sync::Arc;
use std::time::Duration;

use kvdepot_arena::{
    Cause, Identity, Key, NamespaceId, Refused, Reserved, Stamps, Wanted, clock, parts,
};

use super::{Core, Reservation, Way, is_reached};
use crate::pipeline::budget::Share;
use crate::pipeline::ledger::Dues;
use crate::pipeline::spending::Spent;
use crate::pipeline::turns::steps;
use crate::placement::Holder;
use crate::tier::{Apart, Permits, Stage};

/// Index of a block that wants room, and its share of the write-back queue.
pub(super) type Mine = (usize, Option<Share>);

/// The answers of a tier to the blocks of a step.
type Answers = Vec<Result<Reserved, Refused>>;

/// A call of [`Core::reserve_each`].
pub(super) struct Call<'a> {
    pub(super) core: &'a Arc<Core>,
    pub(super) holder: Holder,
    pub(super) namespace: NamespaceId,
    pub(super) blocks: &'a [(Key, Vec<u64>)],
    pub(super) stamps: Stamps,
    pub(super) answers: Vec<Option<Result<Reservation, Refused>>>,
    /// Blocks that are to be reserved, with their shares of the write-back queue.
    pub(super) ways: Vec<(usize, Way, Option<Share>)>,
    /// Blocks that are stored, and do not go on by themselves.
    pub(super) again: Vec<Key>,
}

impl Call<'_> {
    fn len(&self, index: usize) -> u64 {
        parts::payload_len(&self.blocks[index].1)
    }

    /// Chooses the way of each block that is not declined or stored.
    pub(super) fn choose(&mut self, declined: &[bool]) {
        for (index, (key, lengths)) in self.blocks.iter().enumerate() {
            if declined.get(index) == Some(&true) {
                self.core.metrics.put_outcome(crate::Outcome::Declined);
                self.answers[index] = Some(Err(Refused::Declined));
                continue;
            }
            let identity = Identity {
                namespace: self.namespace,
                key: *key,
            };
            let (seat, stamp) = (self.holder.seat, self.stamps.of(index));
            match self.core.way_of(seat, &identity, lengths, stamp) {
                Ok((way, share)) => self.ways.push((index, way, share)),
                Err(refused) => {
                    self.again.push(*key);
                    self.answers[index] = Some(Err(refused));
                }
            }
        }
    }

    /// Reserves blocks in the tier that their way leads to first. A tier that may answer late is
    /// asked step by step: other calls have their turn between two steps.
    pub(super) fn reserve(&mut self, way: Way, mine: Vec<Mine>) {
        let core = self.core;
        let tier = way.tier();
        let apart = match &core.tiers[tier] {
            Stage::Here(arenas) => {
                let wanted = self.wanted(&mine);
                let places = core.reserve_here(tier, arenas, self.namespace, &wanted);
                return self.note(way, mine, places, None);
            }
            Stage::Apart(apart) => apart,
        };
        let steps = steps(mine.len(), apart.step_max());
        let mut mine = mine.into_iter();
        let mut refusal = None;
        // Only the first step waits for slots of others: by then this call has none.
        let mut patience = apart.limit();
        for step in steps {
            let mine: Vec<Mine> = mine.by_ref().take(step.len()).collect();
            let begun = clock::now();
            let answered = match refusal {
                Some(refusal) => Err(refusal),
                None => self.ask((tier, apart), &self.wanted(&mine), patience),
            };
            patience = Duration::ZERO;
            match answered {
                Ok((places, slots)) => {
                    // The next steps would wait as long for nothing.
                    let is_late = clock::since(begun) >= apart.limit();
                    if is_late && !places.iter().any(Result::is_ok) {
                        refusal = Some(None);
                    }
                    self.note(way, mine, places, Some(slots));
                }
                Err(cause) => {
                    refusal = Some(cause);
                    for (index, _) in mine {
                        let refused = match cause {
                            Some(cause @ Cause::Files { .. }) => {
                                apart.no_slots(self.len(index), cause)
                            }
                            _ => core.refused(tier, self.len(index), cause),
                        };
                        self.answers[index] = Some(Err(refused));
                    }
                }
            }
        }
    }

    fn wanted(&self, mine: &[Mine]) -> Vec<Wanted> {
        let wanted = mine.iter().map(|(index, _)| Wanted {
            key: self.blocks[*index].0,
            len: self.len(*index),
            parts: self.blocks[*index].1.len() as u16,
            stamp: self.stamps.of(*index),
            copy: false,
            evict: true,
        });
        wanted.collect()
    }

    /// Reserves a step in a tier that may answer late, and waits for that. Puts of this process
    /// that want the same blocks join; what is being written to a nearer tier is not written here,
    /// too. Where the tier cannot be asked, the cause that refuses this step and those after it;
    /// `None` if the tier is silent.
    fn ask(
        &self,
        (tier, apart): (usize, &Apart),
        wanted: &[Wanted],
        patience: Duration,
    ) -> Result<(Answers, Permits), Option<Cause>> {
        let core = self.core;
        if !is_reached(&core.tiers[tier]) {
            return Err(Some(Cause::Apart));
        }
        let slots = apart.take_lasting(self.holder.seat, wanted.len(), patience);
        let slots = slots.ok_or_else(|| Some(apart.no_lasting()))?;
        let mut silent = false;
        let places = core.unless_nearer(tier, self.namespace, wanted, |asked| {
            let answers = core.reserve_written((tier, apart), self.namespace, asked);
            silent = answers.is_none();
            answers.unwrap_or_default()
        });
        match silent {
            true => Err(None),
            false => Ok((places, slots)),
        }
    }

    /// Enters what a tier has answered for blocks, each of which takes a slot if it is reserved.
    fn note(&mut self, way: Way, mine: Vec<Mine>, places: Answers, mut slots: Option<Permits>) {
        let (core, tier) = (self.core, way.tier());
        let (mut given_up, mut reserved) = (Vec::new(), Vec::new());
        let mut ledger = core.ledger.lock();
        for (at, ((index, share), place)) in mine.into_iter().zip(places).enumerate() {
            ledger.take_turns(at);
            if matches!(place, Err(Refused::Present(_))) && share.is_none() {
                self.again.push(self.blocks[index].0);
            }
            let len = self.len(index);
            let spent = match &place {
                Ok(_) => core.spend(tier, len),
                Err(_) => Some(Spent::default()),
            };
            let Some(spent) = spent else {
                given_up.extend(place);
                // It stays there, and needs nothing of the queue, which is full.
                if !core.bypasses(0, len) {
                    self.ways.push((index, Way::Through, None));
                    continue;
                }
                core.edges[tier - 1].declines();
                core.metrics.put_outcome(crate::Outcome::Declined);
                self.answers[index] = Some(Err(Refused::Declined));
                continue;
            };
            let slot = match &place {
                Ok(_) => slots.as_mut().and_then(Permits::take),
                Err(_) => None,
            };
            let dues = Dues {
                share,
                spent,
                _slot: slot,
                ..Dues::default()
            };
            let place = core.note(&mut ledger, way, dues, place, &mut given_up);
            reserved.extend(place.is_ok().then_some(index));
            self.answers[index] = Some(place.map(|place| Reservation {
                way,
                tier,
                place,
                parts: parts::blank(&self.blocks[index].1).into(),
                outside: None,
                holder: self.holder,
            }));
        }
        drop(ledger);
        core.give_up(tier, given_up);
        // A file without a name gets one before the next step makes others.
        for index in reserved {
            if let Some(Ok(reservation)) = &mut self.answers[index] {
                reservation.outside = core.outside_at(tier, &reservation.place);
            }
        }
    }
}
