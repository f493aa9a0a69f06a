//! Where blocks enter the pipeline, and how they go on from tier to tier.

use std::sync::Arc;

use kvdepot_arena::gate::Pass;
use kvdepot_arena::{Identity, Key, NamespaceId, Place, Stamps, Token, Use, held};

use super::Core;
use super::budget::Share;
use super::caller::Caller;
use super::edge::Stays;
use super::ledger::{State, Waiter};
use super::spending::Spent;
use super::turns::{Turn, in_turns};
use crate::config::Overload;
use crate::task::Outcome;
use crate::tier::Stage;

/// What became of a block that is to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    OnItsWay,
    /// It stays where it is: its edge does not let it.
    Stays(Stays),
    /// It is not there any more.
    Gone,
}

/// Why a block of a put enters no tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shut {
    /// It would pass a tier by whose edge does not let it.
    Stays(Stays),
    Out(Outcome),
}

/// Blocks that have stayed in a tier that may answer late, and are touched again.
struct Touched {
    core: Arc<Core>,
    namespace: NamespaceId,
    tier: usize,
    _pass: Pass,
}

impl Touched {
    /// Sends on what the tier still has of these, by keys and stamps.
    fn ask(self: &Arc<Touched>, step: &[(Key, u64)], turn: Turn) {
        let apart = self.core.tiers[self.tier].apart();
        let Some(apart) = apart.filter(|_| !turn.is_over()) else {
            return;
        };
        let (keys, used): (Vec<Key>, Vec<u64>) = step.iter().copied().unzip();
        let (touched, limit) = (Arc::clone(self), apart.lookup_limit());
        apart.pin(self.namespace, &keys, &used).then(move |places| {
            let places = places.unwrap_or_default().into_iter().zip(used);
            let places = places.filter_map(|(place, stamp)| Some(Place { stamp, ..place? }));
            let places: Vec<Place> = places.collect();
            if places.is_empty() {
                turn.came_to_nothing(limit);
            }
            touched.core.send_touched(touched.tier, places);
            drop(turn);
        });
    }
}

impl Core {
    /// Notes that somebody asks for blocks.
    pub(super) fn asked(self: &Arc<Core>, id: NamespaceId, keys: &[Key]) {
        self.note_asked(id, keys);
        self.touch(id, keys);
    }

    /// Sends on what has stayed in its tier, is there still, and is touched again now, as far as
    /// there is room in the queues.
    pub(super) fn touch(self: &Arc<Core>, id: NamespaceId, keys: &[Key]) {
        for (tier, edge) in self.edges.iter().enumerate() {
            let stayed = edge.stayed(id, keys);
            if !stayed.is_empty() {
                self.send_again(tier, id, &stayed, self.uses.asked());
            }
        }
    }

    /// Sends on what a tier still has of these blocks, which are used with these stamps.
    pub(super) fn send_again(
        self: &Arc<Core>,
        tier: usize,
        id: NamespaceId,
        keys: &[Key],
        stamps: Stamps,
    ) {
        // Sending takes the lock of the ledger; a caller that does not wait for locks asks again.
        if held::passes() {
            return;
        }
        match &self.tiers[tier] {
            Stage::Here(arenas) => {
                let mut places = Vec::with_capacity(keys.len());
                let mut found = vec![false; keys.len()];
                // The call that asks for them stamps them here.
                let never = |_| 0;
                arenas.pin(id, keys, &mut found, never, |index, place| {
                    let stamp = stamps.of(index);
                    places.push(Place { stamp, ..place });
                });
                self.send_touched(tier, places);
            }
            Stage::Apart(apart) => {
                let Ok(pass) = self.gate.enter() else { return };
                let touched = Touched {
                    core: Arc::clone(self),
                    namespace: id,
                    tier,
                    _pass: pass,
                };
                let touched = Arc::new(touched);
                let used = keys.iter().enumerate();
                let used = used.map(|(at, key)| (*key, stamps.of(at)));
                in_turns(used.collect(), apart.step_max(), move |step, turn| {
                    touched.ask(&step, turn);
                });
            }
        }
    }

    /// Takes what may be written into a tier past those before it, now that there is room there.
    pub(super) fn spend(&self, tier: usize, len: u64) -> Option<Spent> {
        let over = tier.checked_sub(1).and_then(|over| self.edges.get(over));
        over.map_or_else(|| Some(Spent::default()), |edge| edge.spend(len))
    }

    /// Notes that a block of a tier was touched, where it was not known.
    pub(super) fn note_touch(&self, tier: usize, identity: &Identity, len: u64) {
        if let Some(edge) = self.edges.get(tier) {
            edge.note(identity, len, false);
        }
    }

    /// Sends pinned blocks on that were touched twice.
    fn send_touched(&self, tier: usize, places: Vec<Place>) {
        let edge = &self.edges[tier];
        let mut stay = Vec::new();
        // The queue is full, and later it may not be: the next call that reads them offers them.
        let mut not_written = Vec::new();
        let is_late = |place: &Place| {
            let fits = place.len <= edge.budget.depth();
            fits && Use::of(place.stamp).is_again
                && edge.keeps(&place.identity, place.len).is_none()
        };
        {
            let mut ledger = self.ledger.lock();
            for (at, place) in places.into_iter().enumerate() {
                ledger.take_turns(at);
                let share = edge.budget.admit(0, place.len).filter(|_| !ledger.stop);
                if share.is_none() && is_late(&place) {
                    not_written.push(place);
                }
                let paid = share.and_then(|share| Some((share, edge.lets_touched(place.len)?)));
                let Some(paid) = paid else {
                    stay.push(place);
                    continue;
                };
                stay.extend(self.send_later(&mut ledger, tier, place, paid, Vec::new()));
            }
        }
        self.note_not_written(&not_written.iter().collect::<Vec<_>>());
        self.tiers[tier].unpin(stay.iter());
    }

    /// Sees to it that a block that is published in a tier of arenas is on its way to the next
    /// one, where it is not, and its edge lets it.
    pub(super) fn send_on(
        &self,
        ledger: &mut State,
        tier: usize,
        token: Token,
        waiters: Vec<Waiter>,
    ) -> Sent {
        if let Some(others) = ledger.waiting.get_mut(&token) {
            others.waiters.extend(waiters);
            return Sent::OnItsWay;
        }
        // Published, and neither there nor on its way: it had failed, or stayed.
        let place = self.tiers[tier].here();
        let Some(place) = place.and_then(|arenas| arenas.pin_token(token)) else {
            return Sent::Gone;
        };
        let spent = match self.edges[tier].admits(&place.identity, place.len) {
            Ok(spent) => spent,
            Err(stays) => {
                self.tiers[tier].unpin([place].iter());
                return Sent::Stays(stays);
            }
        };
        // Whoever put it, it goes on by itself.
        let share = self.edges[tier].budget.take(0, place.len);
        let twice = self.send_later(ledger, tier, place, (share, spent), waiters);
        self.tiers[tier].unpin(twice.iter());
        Sent::OnItsWay
    }

    /// Puts a pinned block of a tier on its way to the next one, with what it has of the queue, and
    /// of what may be written. Answers its pin, which is not needed, when it is on its way already.
    pub(super) fn send_later(
        &self,
        ledger: &mut State,
        tier: usize,
        place: Place,
        paid: (Share, Spent),
        waiters: Vec<Waiter>,
    ) -> Option<Place> {
        self.edges[tier].note(&place.identity, place.len, true);
        let queued = self.ledger.enqueue(ledger, tier, place, paid, waiters);
        (!queued).then_some(place)
    }

    /// Whether a block of a put may enter a tier whose bytes the caller's lanes move.
    pub(super) fn is_entered(&self, caller: &Caller, tier: usize) -> bool {
        let apart = self.tiers[tier].apart();
        self.takes_puts(tier) && apart.is_none_or(|apart| caller.reaches(apart))
    }

    /// The tier that a block of a put enters, with its share of the queue behind that; why, where
    /// it enters none. A tier can take it, and so can its queue: a full one delays, by sending what
    /// comes to the next tier, at whose speed that goes. It is one that the caller's lanes reach.
    pub(super) fn entrance(
        &self,
        caller: &Caller,
        identity: &Identity,
        len: u64,
    ) -> Result<(usize, Option<Share>), Shut> {
        let seat = caller.seat();
        let reaches = |tier: usize| self.is_entered(caller, tier);
        let mut stays = None;
        for (tier, edge) in self.edges.iter().enumerate() {
            if self.bypasses(tier, len) || !reaches(tier) {
                edge.lets_by(identity, len).map_err(Shut::Stays)?;
                continue;
            }
            // It stays here, and needs nothing of the queue.
            if edge.keeps(identity, len).is_some() {
                return Ok((tier, None));
            }
            match edge.budget.admit(seat, len) {
                Some(share) => return Ok((tier, Some(share))),
                None if self.overload == Overload::Wait => {
                    stays = stays.or(Some((tier, None)).filter(|_| tier >= self.ack));
                }
                // It stays where it is acknowledged, and goes no further.
                None if tier >= self.ack => return Ok((tier, None)),
                None => return Err(Shut::Out(Outcome::Dropped)),
            }
        }
        let last = self.edges.len();
        if reaches(last) {
            return Ok((last, None));
        }
        if let Some(stays) = stays {
            return Ok(stays);
        }
        // Where nothing further away can be written, a full queue delays nobody.
        let mut near = self.arenas().filter(|(_, tier)| len <= tier.block_max());
        let (near, _) = near.next().ok_or(Shut::Out(Outcome::Dropped))?;
        Ok((near, self.share_of(near, len)))
    }

    /// What a block has of the queue behind a tier where it has come to stay, because an edge kept
    /// it or the queue was full: some if there is room now.
    pub(super) fn room_in(&self, tier: usize, len: u64) -> Option<Share> {
        self.edges.get(tier)?.budget.admit(0, len)
    }

    /// What a block has of the queue behind a tier that it was not admitted to: room where a put
    /// waits for it, and else only where there is some.
    pub(super) fn share_of(&self, tier: usize, len: u64) -> Option<Share> {
        let edge = self.edges.get(tier)?;
        match tier < self.ack {
            true => Some(edge.budget.take(0, len)),
            false => edge.budget.admit(0, len),
        }
    }
}
